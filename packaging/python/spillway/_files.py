"""Files at names that other users may have made, and JSON that they may have written.

A file is created anew, with mode 0600: an existing file is never opened for writing, and no link is followed. A file is read only if it is
regular, which is checked on the open descriptor, and not larger than its reader expects. JSON has a limit of depth."""

from __future__ import annotations

import collections
import errno
import json
import os
import re
import stat
from typing import Any, BinaryIO

from .errors import CorruptError

#: Most bytes of a file of JSON, and most levels of JSON.
MOST_JSON, MOST_LEVELS = 64 << 20, 300
#: Most digits of an integer in JSON: the time to convert one grows with their square.
_MOST_DIGITS = 4300
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_RUN = re.compile(rb"[\[{]+|[\]}]+")
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def create(path: str | os.PathLike[str], replace: bool = False) -> BinaryIO:
    """Creates a file that only this user may read.

    Args:
        path: Its name.
        replace: Remove a file or link of this name first; otherwise that is a FileExistsError."""
    if replace:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600), "wb")


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file for reading. CorruptError if it is a link, a FIFO, a device or a directory."""
    try:
        # O_NONBLOCK: an open of a FIFO would wait for its other end.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _OPEN)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):
            raise CorruptError(f"{os.fspath(path)} is no regular file; use another directory") from None
        raise
    # A signal handler that raises here loses the descriptor. A second owner of it could close that of another thread.
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CorruptError(f"{os.fspath(path)} is no regular file; use another directory")
    return os.fdopen(handle, "rb")


def read_json(path: str | os.PathLike[str]) -> Any:
    """The content of a file of JSON. CorruptError if it is no regular file or too large, ValueError if it is no JSON."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_JSON:
            raise CorruptError(f"{os.fspath(path)} has {size} bytes, more than the {MOST_JSON} of a manifest; use another directory")
        return parse_json(file.read(MOST_JSON))


def check_levels(content: bytes) -> None:
    """ValueError if JSON has more than MOST_LEVELS levels. The parser recurses, and so does code that walks the value."""
    depth = most = 0
    for run in _RUN.findall(_STRING.sub(b"", content).translate(None, _ALL_BUT_BRACKETS)):
        depth += len(run) if run[0] in b"[{" else -len(run)
        most = max(most, depth)
    if most > MOST_LEVELS:
        raise ValueError(f"{most} levels of JSON, of which at most {MOST_LEVELS} are read")


def parse_json(content: bytes) -> Any:
    """The value of UTF-8 encoded JSON. ValueError if it is none, has more than MOST_LEVELS levels, numbers that are not finite, or an
    object with the same key twice."""
    check_levels(content)
    return json.loads(content.decode(), parse_int=_integer, parse_constant=_constant, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        ((twice, _),) = collections.Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice[:100]!r} twice in one object")
    return found


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


#: The messages about numbers that are not finite.
NOT_FINITE = tuple(f"the number {name}" for name in ("NaN", "Infinity", "-Infinity"))


def _constant(name: str) -> Any:
    raise ValueError(f"the number {name}")


class durable:
    """A new file that takes its name when it is complete and durable. The name may exist: its file or link is replaced."""

    def __init__(self, path: str):
        self._path, self._part = path, f"{path}.part"

    def __enter__(self) -> BinaryIO:
        check_replaceable(self._path)
        # The part of a process that was killed.
        self._file = create(self._part, replace=True)
        return self._file

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            with self._file:
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            if kind is None:
                os.replace(self._part, self._path)
        except BaseException:
            kind = kind or BaseException
            raise
        finally:
            if kind is not None:
                try:
                    os.unlink(self._part)
                except FileNotFoundError:
                    pass


def check_replaceable(path: str) -> None:
    """IsADirectoryError if a file cannot take this name by `durable`, because a directory has it."""
    for taken in (path, f"{path}.part"):
        if os.path.isdir(taken) and not os.path.islink(taken):
            raise IsADirectoryError(
                errno.EISDIR, "a directory has the name of a file to be written; remove it, or use another directory", taken
            )


def make_directory(path: str | os.PathLike[str]) -> None:
    """Makes a directory of mode 0700, unless there is one. Its parent must exist: a disk that is not mounted is an error."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, "it is not a directory; pass another name", os.fspath(path)) from None
    else:
        sync_directory(os.path.dirname(os.path.abspath(path)))


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Makes the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
