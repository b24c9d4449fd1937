"""Where the records of processes are: one directory of this user, which no other user may read or write, with a file for each process.

The directory is in /dev/shm, which is local to the machine and no disk: a tier that keeps the disks busy does not delay a record.
XDG_RUNTIME_DIR comes second, because processes of one user that were started in different ways may lack it. A directory that another user
has made under this name is not used.

The name of a record has the number and the start of its process: a number alone may be that of another process by now. The numbers are
those of a namespace of processes, which the name has too; a reader in another one cannot tell whether the process lives."""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from .. import _files

#: The form of a record.
FORMAT = 1
#: Most bytes of a record.
MOST_BYTES = 1 << 20
_RECORD = re.compile(r"(\d{1,10})-(\d{1,20})-(\d{1,20})\.json")
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW


class Process(NamedTuple):
    """A process: its number, when it was started, in ticks since the boot, and the namespace of its number."""

    number: int
    start: int
    namespace: int

    @property
    def file(self) -> str:
        """The name of its record."""
        return f"{self.number}-{self.start}-{self.namespace}.json"

    def lives(self, here: int) -> bool | None:
        """True if the process has not ended, seen from the namespace `here`; None: it is of another one, and that is not known."""
        return None if self.namespace != here else start_of(self.number) == self.start


def this_process() -> Process:
    """This process.

    Raises:
        OSError: The system does not tell."""
    start = start_of(os.getpid())
    if start is None:
        raise OSError(errno.ESRCH, "the system does not tell when this process was started", "/proc/self/stat")
    return Process(os.getpid(), start, namespace())


def start_of(number: int) -> int | None:
    """When a process was started; None: it has ended, or the system does not tell."""
    try:
        with open(f"/proc/{number}/stat", "rb") as file:
            # The name of the program is in brackets, and may have any letters.
            fields = file.read().rpartition(b")")[2].split()
        # A zombie has ended.
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def namespace() -> int:
    """The namespace of the numbers of processes that this process sees."""
    return os.stat("/proc/self/ns/pid").st_ino


def directories() -> list[str]:
    """The names of the directories, in the order in which they are used."""
    base = "/dev/shm" if os.path.isdir("/dev/shm") else os.environ.get("TMPDIR") or "/tmp"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    bases = [base, *([runtime] if runtime and os.path.isabs(runtime) else [])]
    return [os.path.join(one, f"spillway-watch-{os.geteuid()}") for one in bases]


@contextmanager
def opened(path: str, make: bool = False) -> Iterator[int]:
    """A descriptor of a directory of this user alone. `make`: makes a missing one.

    Raises:
        OSError: There is none, or others may use it."""
    if make:
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise OSError(errno.EPERM, "another user made it, or may use it; remove it, or chmod 700", path)
        yield folder
    finally:
        os.close(folder)


def write(folder: int, process: Process, content: bytes) -> None:
    """Replaces the record of a process: a reader finds the old one or the new one."""
    # Two threads may write at once.
    part = f"{process.file}.{threading.get_ident()}.part"
    try:
        os.unlink(part, dir_fd=folder)
    except FileNotFoundError:
        pass
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=folder)
    try:
        try:
            complete = os.write(file, content) == len(content)
        finally:
            os.close(file)
        if not complete:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), part)
        os.rename(part, process.file, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.unlink(part, dir_fd=folder)
        raise


def read(folder: int, name: str) -> dict[str, object] | None:
    """A record; None: it has gone, or is none of this form."""
    try:
        # O_NONBLOCK: an open of a FIFO would wait for its other end.
        file = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _OPEN, dir_fd=folder)
    except OSError:
        return None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size > MOST_BYTES:
            return None
        with os.fdopen(os.dup(file), "rb") as stream:
            record = _files.parse_json(stream.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        os.close(file)
    return record if isinstance(record, dict) and record.get("format") == FORMAT else None


def processes(folder: int) -> list[Process]:
    """The processes with a record in a directory."""
    return sorted(Process(*map(int, found.groups())) for found in map(_RECORD.fullmatch, os.listdir(folder)) if found)
