"""The file systems that a run sets up, and what happens to their servers. run.sh says what ends them."""

import functools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

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
        small: A directory on a file system of this kind with little room, or None."""

    packages: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    # Its name in /proc/filesystems.
    kernel = "fuse"
    # What the tests may do: "basic" for the tests of every file system, "shared" has two mounts, "servers" can be stopped,
    # "redundant" survives the end of one server, "forgets" loses its locks, "full" has a small mount, "trains" is that of a
    # training run.
    features: frozenset[str] = frozenset()
    # Seconds for which a mount may show what it read before a write of the other one.
    stale = 0.0

    def __init__(self, folder):
        self.folder, self.mounts, self.small = folder, [], None
        self.set_up()

    @classmethod
    def reason(cls):
        """Why it cannot be set up here; None if it can."""
        for program in cls.programs:
            if not shutil.which(program):
                return f"{program} is missing: apt-get install {' '.join(cls.packages)}"
        subprocess.run(["modprobe", "-q", cls.kernel], check=False) if shutil.which("modprobe") else None
        if cls.kernel not in pathlib.Path("/proc/filesystems").read_text().split():
            return f"the kernel has no {cls.kernel}"
        if cls.kernel == "fuse" and not os.path.exists("/dev/fuse"):
            return "/dev/fuse is missing"
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
    """Two bricks, each with a part of the pieces of each file."""

    options = {"features.shard": "on", "features.shard-block-size": "16MB"}
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
        self.small = self.mount("small", self.made("small"))


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


class Image(FileSystem):
    """A file system of this machine in an image on a loop device."""

    mkfs: tuple[str, ...] = ()
    sector = 512
    features = frozenset({"basic", "full"})

    def set_up(self):
        self.mounts = [self.mount("image", "1G")]
        self.small = self.mount("small", self.least)

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


class Xfs4kn(Xfs):
    """XFS on a device with sectors of 4 KiB."""

    sector = 4096


class Btrfs(Image):
    packages, programs, kernel = ("btrfs-progs",), ("mkfs.btrfs", "losetup"), "btrfs"
    mkfs, least = ("mkfs.btrfs", "-q"), "128M"


FILE_SYSTEMS = {
    "gluster-replicated": GlusterReplicated,
    "gluster-distributed": GlusterDistributed,
    "gluster-dispersed": GlusterDispersed,
    "gluster-sharded": GlusterSharded,
    "sshfs": Sshfs,
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
    if sys.argv[1] == "--packages":
        print(*FILE_SYSTEMS[sys.argv[2]].packages)
    else:
        print(*chosen(sys.argv[1]))
