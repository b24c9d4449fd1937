"""The file systems that a run sets up, and what happens to their servers. run.sh says what ends them."""

import functools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import uuid

WORK = pathlib.Path(os.environ.get("SPILLWAY_PFS", ""))
# An address of the run's own loopback that GlusterFS and MooseFS accept: they refuse 127.0.0.1.
ADDRESS = "10.77.0.1"


def run(*command, **options):
    """The output of a command that must succeed."""
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stdout[-2000:]}"
    return done.stdout


def until(true, what, seconds=30):
    """Waits until a condition holds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def processes(program, words=""):
    """The processes of the run with this program whose command line contains the words."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            name, *arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            ended = (folder / "stat").read_text().rsplit(") ", 1)[1][0] == "Z"
        except OSError:
            continue
        if pathlib.Path(name).name == program and words in " ".join(arguments) and not ended:
            found.append(int(folder.name))
    return found


def send(pids, number):
    for pid in pids:
        os.kill(pid, number)
    if number == signal.SIGKILL:
        until(lambda: not any(alive(pid) for pid in pids), f"{pids} do not end")


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


@functools.cache
def loopback():
    run("ip", "link", "set", "lo", "up")
    run("ip", "address", "add", f"{ADDRESS}/32", "dev", "lo")


class FileSystem:
    """A file system below a folder.

    Attributes:
        mounts: Its mounts, one or two.
        small: A directory on a file system of this kind with little room, or None.
        room: A directory of a local file system whose files take the room of `small`."""

    packages: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    # Its name in /proc/filesystems.
    kernel = "fuse"
    # What the tests may do: "basic" for the tests of every file system, "shared" has two mounts, "servers" can be stopped,
    # "redundant" survives the end of one server, "forgets" loses its locks, "full" has a small mount, "trains" is that of a
    # training run, "reflinks" shares blocks between files.
    features: frozenset[str] = frozenset()
    # Seconds for which a mount may show what it read before a write of the other one.
    stale = 0.0

    def __init__(self, folder):
        self.folder, self.mounts, self.small, self.room = folder, [], None, None
        self.set_up()

    @classmethod
    def reason(cls):
        """Why it cannot be set up here; None if it can."""
        if shutil.which("modprobe"):
            subprocess.run(["modprobe", "-q", cls.kernel], check=False)
        if cls.kernel not in pathlib.Path("/proc/filesystems").read_text().split():
            return f"the kernel has no {cls.kernel}"
        if cls.kernel == "fuse" and not os.path.exists("/dev/fuse"):
            return "/dev/fuse is missing"
        for program in cls.programs:
            if not shutil.which(program):
                return f"{program} is missing: apt-get install {' '.join(cls.packages)}"
        return None

    def set_up(self):
        raise NotImplementedError

    def made(self, name):
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def servers(self):
        """The processes without which no operation ends."""
        return []

    def forget_locks(self):
        """Lets the servers lose the locks of all mounts."""

    def lose_a_server(self):
        """Ends one server for good."""


class Gluster(FileSystem):
    packages = ("glusterfs-server", "iproute2")
    programs = ("glusterd", "gluster", "ip")
    kind: tuple[str, ...] = ()
    bricks = 2
    options: dict[str, str] = {}
    # Its client caches small files for a second, also for direct reads.
    stale = 1.2

    def set_up(self):
        self.volume = type(self).__name__.lower()
        gluster("volume", "create", self.volume, *self.kind, *(f"{ADDRESS}:{self.made(f'brick-{n}')}" for n in range(self.bricks)), "force")
        for option, value in self.options.items():
            gluster("volume", "set", self.volume, option, value)
        gluster("volume", "start", self.volume)
        self.mounts = [self.mount(self.volume, self.made(name)) for name in ("a", "b")]

    def mount(self, volume, place):
        run("glusterfs", "-s", ADDRESS, f"--volfile-id={volume}", "-l", f"{place}.log", place)
        until(lambda: os.path.ismount(place) and os.statvfs(place).f_blocks, f"{place} is not mounted")
        return place

    def servers(self):
        return processes("glusterfsd", f"--volfile-id {self.volume}.")

    def forget_locks(self):
        send(self.servers(), signal.SIGKILL)
        gluster("volume", "start", self.volume, "force")
        for mount in self.mounts:
            until(lambda: readable(mount), f"{mount} does not reach its bricks")


class GlusterReplicated(Gluster):
    """Two bricks with the same files."""

    kind = ("replica", "2")
    features = frozenset({"basic", "shared", "redundant"})

    def lose_a_server(self):
        send(self.servers()[:1], signal.SIGKILL)


class GlusterDispersed(Gluster):
    """Three bricks, of which any two have all data."""

    kind, bricks = ("disperse", "3", "redundancy", "1"), 3
    features = frozenset({"forgets"})


class GlusterSharded(Gluster):
    """Two bricks, each with a part of the pieces of each file. The caches of the clients are off, as in GlusterFS' own profile for such
    volumes (virt): with them a mount may go on to return what another mount has overwritten."""

    options = {
        "features.shard": "on",
        "features.shard-block-size": "16MB",
        "performance.quick-read": "off",
        "performance.read-ahead": "off",
        "performance.io-cache": "off",
        "performance.strict-o-direct": "on",
        "network.remote-dio": "off",
    }
    features = frozenset({"trains"})


class GlusterDistributed(Gluster):
    """Two bricks, each with a part of the files, and a volume of one small brick."""

    features = frozenset({"basic", "servers", "full"})

    def set_up(self):
        super().set_up()
        brick = self.made("small-brick")
        run("mount", "-t", "tmpfs", "-o", "size=48m", "none", brick)
        (brick / "files").mkdir()
        gluster("volume", "create", "small", f"{ADDRESS}:{brick / 'files'}", "force")
        gluster("volume", "start", "small")
        # A write of a client to a full volume may hang.
        self.small, self.room = self.mount("small", self.made("small")), brick


def readable(folder):
    try:
        os.listdir(folder)
        return True
    except OSError:
        return False


SOCKET = WORK / "glusterd.socket"


def gluster(*arguments):
    loopback()
    glusterd()
    run("gluster", "--mode=script", f"--glusterd-sock={SOCKET}", *arguments)


@functools.cache
def glusterd():
    """Starts the daemon, with files and sockets of its own."""
    folder, volfile = WORK / "glusterd", WORK / "glusterd.vol"
    folder.mkdir()
    options = {
        "working-directory": folder,
        "run-directory": folder,
        "glusterd-sockfile": SOCKET,
        "transport-type": "socket",
        "transport.address-family": "inet",
        "transport.socket.bind-address": ADDRESS,
        "transport.socket.listen-backlog": 128,
    }
    lines = "".join(f"    option {name} {value}\n" for name, value in options.items())
    volfile.write_text(f"volume management\n    type mgmt/glusterd\n{lines}end-volume\n")
    run("glusterd", "-f", volfile, "-l", WORK / "glusterd.log", "-p", WORK / "glusterd.pid")
    command = ["gluster", "--mode=script", f"--glusterd-sock={SOCKET}", "volume", "list"]
    until(lambda: not subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode, "glusterd does not answer")


class Sshfs(FileSystem):
    """sshfs with a pipe to an SFTP server of its own for each mount, without a network."""

    packages = ("sshfs", "openssh-sftp-server")
    programs = ("sshfs",)
    features = frozenset({"basic", "shared", "servers"})
    server = "/usr/lib/openssh/sftp-server"

    @classmethod
    def reason(cls):
        if not os.path.exists(cls.server):
            return f"{cls.server} is missing: apt-get install {' '.join(cls.packages)}"
        return super().reason()

    def set_up(self):
        start = self.folder / "start"
        start.write_text(f"#!/bin/sh\nexec {self.server}\n")
        start.chmod(0o700)
        data = self.made("data")
        self.mounts = [self.made(name) for name in ("a", "b")]
        for mount in self.mounts:
            run("sshfs", f"nowhere:{data}", mount, "-o", f"ssh_command={start}")

    def servers(self):
        return processes("sftp-server")


class MooseFs(FileSystem):
    """A master, two chunkservers and two mounts."""

    packages = ("moosefs-master", "moosefs-chunkserver", "moosefs-client", "iproute2")
    programs = ("mfsmaster", "mfschunkserver", "mfsmount", "ip")
    features = frozenset({"basic", "shared", "servers"})

    def set_up(self):
        loopback()
        exports = self.folder / "exports"
        exports.write_text("* / rw,alldirs,maproot=0\n* . rw\n")
        listen = {f"MATO{whom}_LISTEN_HOST": ADDRESS for whom in ("CL", "CS", "ML")}
        master = self.made("master")
        (master / "metadata.mfs").write_text("MFSM NEW")
        self.start("mfsmaster", "master", EXPORTS_FILENAME=exports, TOPOLOGY_FILENAME=self.made("none") / "topology", **listen)
        for number in (1, 2):
            disk, disks = self.made(f"disk-{number}"), self.folder / f"disks-{number}"
            disks.write_text(f"{disk}\n")
            hosts = {"BIND_HOST": ADDRESS, "MASTER_HOST": ADDRESS, "CSSERV_LISTEN_HOST": ADDRESS}
            self.start("mfschunkserver", f"chunks-{number}", HDD_CONF_FILENAME=disks, CSSERV_LISTEN_PORT=9422 + number, **hosts)
        self.mounts = [self.made(name) for name in ("a", "b")]
        for mount in self.mounts:
            run("mfsmount", mount, "-H", ADDRESS)
        until(lambda: os.statvfs(self.mounts[0]).f_blocks, "no chunkserver has room")

    def start(self, program, name, **settings):
        path = self.folder / f"{name}.cfg"
        settings |= {"WORKING_USER": "root", "WORKING_GROUP": "root", "DATA_PATH": self.made(name)}
        path.write_text("".join(f"{key} = {value}\n" for key, value in settings.items()))
        run(program, "-c", path, "start")

    def servers(self):
        return processes("mfsmaster") + processes("mfschunkserver")


class Ceph(FileSystem):
    """CephFS: a monitor, a manager, two object servers on files, a metadata server, and two FUSE mounts."""

    packages = ("ceph-mon", "ceph-mgr", "ceph-osd", "ceph-mds", "ceph-fuse", "ceph-common", "iproute2")
    programs = ("ceph", "ceph-mon", "ceph-mgr", "ceph-osd", "ceph-mds", "ceph-fuse", "monmaptool", "ip")
    features = frozenset({"basic", "shared", "servers"})

    def set_up(self):
        loopback()
        self.config = self.folder / "ceph.conf"
        identity, monitors = str(uuid.uuid4()), f"[v2:{ADDRESS}:3300,v1:{ADDRESS}:6789]"
        run_files = self.made("run")
        settings = {
            "fsid": identity,
            "mon_initial_members": "a",
            "mon_host": monitors,
            "public_addr": ADDRESS,
            **{f"auth_{whom}_required": "none" for whom in ("cluster", "service", "client")},
            "osd_pool_default_size": 2,
            "osd_pool_default_min_size": 1,
            "osd_crush_chooseleaf_type": 0,
            "run_dir": run_files,
            "admin_socket": run_files / "$name.asok",
            "pid_file": run_files / "$name.pid",
            "log_file": run_files / "$name.log",
            **{f"{kind}_data": self.made(kind) for kind in ("mon", "mgr", "mds")},
            "osd_data": self.folder / "osd$id",
            "bluestore_block_size": 4 << 30,
            "bluestore_block_create": "true",
            "osd_memory_target": 939524096,
            "mgr_initial_modules": "",
        }
        lines = "".join(f"{key} = {value}\n" for key, value in settings.items())
        self.config.write_text(f"[global]\n{lines}[mon.a]\nmon_addr = {ADDRESS}\n")
        monitor_map = self.folder / "monmap"
        run("monmaptool", "--create", "--addv", "a", monitors, "--fsid", identity, monitor_map)
        self.server("mon", "a", "--mkfs", "--monmap", monitor_map)
        self.server("mon", "a")
        until(lambda: self.says("mon", "stat"), "the monitor does not answer", 60)
        self.server("mgr", "x")
        for number in ("0", "1"):
            self.made(f"osd{number}")
            disk = str(uuid.uuid4())
            self.ceph("osd", "new", disk, number)
            self.server("osd", number, "--mkfs", "--osd-uuid", disk)
            self.server("osd", number)
        for pool in ("meta", "data"):
            self.ceph("osd", "pool", "create", pool, "8")
        self.ceph("fs", "new", "cephfs", "meta", "data")
        self.server("mds", "m")
        until(lambda: "up:active" in self.says("mds", "stat"), "the metadata server is not active", 120)
        self.mounts = [self.made(name) for name in ("a", "b")]
        for mount in self.mounts:
            run("ceph-fuse", "-c", self.config, "--id", "admin", f"--admin_socket={mount}.asok", f"--pid_file={mount}.pid", mount)

    def server(self, kind, name, *arguments):
        run(f"ceph-{kind}", "-c", self.config, "-i", name, *arguments)

    def ceph(self, *arguments):
        return run("ceph", "-c", self.config, *arguments, timeout=60)

    def says(self, *arguments):
        """The answer to a question; nothing if there is none."""
        try:
            return self.ceph("--connect-timeout", "3", *arguments)
        except (AssertionError, subprocess.TimeoutExpired):
            return ""

    def servers(self):
        return [pid for kind in ("mon", "mds", "osd") for pid in processes(f"ceph-{kind}")]


class Nfs(FileSystem):
    """NFS 4 by the kernel's client, from a server in user space."""

    packages = ("nfs-ganesha", "nfs-ganesha-vfs", "nfs-common", "iproute2")
    programs = ("ganesha.nfsd", "mount.nfs4", "ip")
    kernel = "nfs4"
    features = frozenset({"basic", "shared", "servers"})

    def set_up(self):
        loopback()
        data, config = self.made("data"), self.folder / "ganesha.conf"
        config.write_text(
            f"NFS_CORE_PARAM {{ Protocols = 4; Bind_addr = {ADDRESS}; Enable_NLM = false; Enable_RQUOTA = false; }}\n"
            f"NFSv4 {{ Graceless = true; RecoveryRoot = {self.made('recovery')}; }}\n"
            f"EXPORT {{ Export_Id = 1; Path = {data}; Pseudo = /data; Access_Type = RW; Squash = No_Root_Squash; SecType = sys;"
            " Protocols = 4; Transports = TCP; FSAL { Name = VFS; } }\n"
        )
        run("ganesha.nfsd", "-f", config, "-L", self.folder / "log", "-p", self.folder / "pid")
        self.mounts = [self.made(name) for name in ("a", "b")]
        for mount in self.mounts:
            run("mount", "-t", "nfs4", "-o", "nosharecache", f"{ADDRESS}:/data", mount)

    def servers(self):
        return processes("ganesha.nfsd")


class Image(FileSystem):
    """A file system of this machine in an image on a loop device."""

    mkfs: tuple[str, ...] = ()
    sector = 512
    features = frozenset({"basic", "full"})

    def set_up(self):
        self.mounts = [self.mount("image", "1G")]
        self.small = self.room = self.mount("small", self.least)

    least = "64M"

    def mount(self, name, size):
        image, place = self.folder / f"{name}.img", self.made(name)
        run("truncate", "-s", size, image)
        device = run("losetup", "--find", "--show", "--direct-io=on", "--sector-size", self.sector, image).strip()
        try:
            run(*self.mkfs, device)
            run("mount", "-t", self.kernel, device, place)
        finally:
            # The device ends with the last mount.
            run("losetup", "--detach", device)
        return place


class Ext4kn(Image):
    """ext4 on a device with sectors of 4 KiB."""

    packages, programs, kernel = ("e2fsprogs",), ("mkfs.ext4", "losetup"), "ext4"
    mkfs, sector = ("mkfs.ext4", "-q"), 4096


class Xfs(Image):
    packages, programs, kernel = ("xfsprogs",), ("mkfs.xfs", "losetup"), "xfs"
    mkfs, least = ("mkfs.xfs", "-q"), "300M"
    features = Image.features | {"reflinks"}


class Xfs4kn(Xfs):
    """XFS on a device with sectors of 4 KiB."""

    sector = 4096


class Btrfs(Image):
    packages, programs, kernel = ("btrfs-progs",), ("mkfs.btrfs", "losetup"), "btrfs"
    mkfs, least = ("mkfs.btrfs", "-q"), "128M"
    features = Image.features | {"reflinks"}


FILE_SYSTEMS = {
    "gluster-replicated": GlusterReplicated,
    "gluster-distributed": GlusterDistributed,
    "gluster-dispersed": GlusterDispersed,
    "gluster-sharded": GlusterSharded,
    "sshfs": Sshfs,
    "moosefs": MooseFs,
    "ceph": Ceph,
    "nfs": Nfs,
    "xfs": Xfs,
    "xfs-4kn": Xfs4kn,
    "ext4-4kn": Ext4kn,
    "btrfs": Btrfs,
}


def chosen(names):
    """The file systems in a list with commas: whole names, or what comes before "-"; all: every one."""
    found = [name for name in FILE_SYSTEMS for part in names.split(",") if part in ("all", name, name.split("-")[0])]
    return found or sys.exit(f"{names} names none of: {', '.join(FILE_SYSTEMS)}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--packages", name]:
            print(*FILE_SYSTEMS[name].packages)
        case ["--reason", name]:
            print(FILE_SYSTEMS[name].reason() or "")
        case [names]:
            print(*chosen(names))
