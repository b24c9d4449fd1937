"""Exceptions of the package.

Every failure of the library, and every argument, setting or use that the package refuses, is a `SpillwayError`, which carries the status
of the C library as `status`. Exceptions that match a built-in one inherit from it too: an `IoError` is an `OSError`, an
`InvalidArgumentError` a `ValueError`.

Python's own rules keep Python's exceptions: a `TypeError` for a call with unknown arguments and for an object that cannot be copied, an
`AttributeError`, and an `OSError` of a file that Python itself opens or makes.

    try:
        tier.wait(ticket)
    except spillway.CorruptError as error:
        print(error.status, error)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class SpillwayError(RuntimeError):
    """A call of the library failed; the base of all exceptions of this package.

    Attributes:
        status: Status of the C library as an integer; spillway.h lists the values."""

    status: int = 9

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        if status is not None:
            self.status = status

    def __str__(self) -> str:
        # KeyError, a base of UnknownIdError, would print its argument in quotes.
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        # OSError, a base of IoError, would lose errno and filename in another process.
        details = {name: getattr(self, name) for name in ("errno", "strerror", "filename") if getattr(self, name, None)}
        return _restored, (type(self), self.args, {**self.__dict__, **details})


def _restored(kind: type[SpillwayError], args: tuple[Any, ...], details: dict[str, Any]) -> SpillwayError:
    error = kind(*args[:1])
    for name, value in details.items():
        setattr(error, name, value)
    return error


class InvalidArgumentError(SpillwayError, ValueError):
    """An argument violates the function's contract. Nothing was written; correct the argument that the message
    names."""

    status = 1


class UnsupportedError(SpillwayError):
    """This build or machine does not support the operation. Nothing was written."""

    status = 2


class UnknownIdError(SpillwayError, KeyError):
    """No optimizer has this id: it was never created, or was destroyed."""

    status = 3


class InternalError(SpillwayError):
    """A bug inside the library; please report it with the message."""

    status = 9


class SystemCallError(SpillwayError):
    """A system call failed; the message contains its errno."""

    status = 11


class OutOfOrderError(SpillwayError):
    """The state of the speculation round, or of the update on a tier, does not allow the call. Nothing changed."""

    status = 40


class IoError(SpillwayError, OSError):
    """Reading or writing a file failed.

    Attributes:
        filename: Path of the file; None if it was given as a descriptor.
        offset: First byte of the failed part in the file.
        bytes: Length of the failed part in bytes.
        errno: Error number of the system; None if the system reported none, for example when the file ends before
            the requested range."""

    status = 20
    offset: int | None = None
    bytes: int | None = None


class NotFoundError(IoError, FileNotFoundError):
    """The file, directory or object does not exist."""

    status = 25


class BusyError(SpillwayError):
    """The object is in use, or an update must be rolled back first. Nothing changed."""

    status = 5


class TierError(SpillwayError):
    """The tier cannot be used as requested. `status` gives the cause:

    - 31: The files are not a tier, have a format version that this library does not read, or lost their superblocks.
    - 32: What was found does not match the request: SPW_ERR_FOREIGN in docs/troubleshooting.md lists causes and cures.
    - 34: A path that holds a part of the tier is missing, or its files were moved or replaced.
    - 35: A part of the extent was on a missing path."""

    status = 32


class CorruptError(TierError):
    """Stored bytes do not match their checksum, or are not in the form in which the library writes them. The message names the file,
    and for a block its extent, number and offset."""

    status = 30


class TierLockedError(TierError):
    """A live process holds the tier; the message names the process. Wait until it ends, or use another job name."""

    status = 33


class TierFencedError(TierError):
    """Another process claimed the tier while this one had it open. Nothing was committed. Close the tier, end one of the two
    processes, and open the tier again."""

    status = 38


class NoStateError(TierError):
    """The tier has no committed state."""

    status = 36


class NoStepError(TierError):
    """The tier cannot be opened at the requested step: the step was never committed, or has been overwritten."""

    status = 37


class TimedOutError(SpillwayError, TimeoutError):
    """A wait timed out. The operation is still in flight, and a later wait returns its outcome."""

    status = 23


class GpuError(SpillwayError):
    """The GPU or its driver failed: driver too old, stub library, out of memory, context lost, or CUDA used before a
    fork."""

    status = 57


class NoDeviceError(GpuError):
    """No GPU is available: there is no driver, or the driver reports no device."""

    status = 50


class ArenaError(SpillwayError):
    """An arena of shared memory cannot be used as requested."""

    status = 63


class TornError(ArenaError):
    """The writer of a region ended in the middle of a write. A new writer must write the whole region."""

    status = 60


class ChangedError(ArenaError):
    """The region was written while it was read. Read it again."""

    status = 61


class PeerEndedError(ArenaError):
    """A process has ended: the owner of an arena, or one that has not posted its verdict. Or a process left the round of
    verdicts, which is aborted for all."""

    status = 62


class ArenaFormatError(ArenaError):
    """The memory is not an arena, has a format version that this library does not read, or is truncated or damaged."""

    status = 63


class ArenaForeignError(ArenaError):
    """The memory belongs to another user, is a link, or has a second name."""

    status = 64


class ArenaExistsError(ArenaError):
    """An arena of this name exists; the message says whether its owner lives."""

    status = 65


class ArenaMissingError(ArenaError):
    """There is no arena of this name, or its owner has not completed it."""

    status = 66


class LibraryNotFoundError(SpillwayError, ImportError):
    """libspillway.so is missing, cannot be loaded, or has another ABI version than this package."""

    status = 2


_BY_STATUS: dict[int, type[SpillwayError]] = {
    kind.status: kind
    for kind in (InvalidArgumentError, UnsupportedError, UnknownIdError, InternalError, SystemCallError, TimedOutError, BusyError)
}
_BY_STATUS.update(dict.fromkeys((20, 21, 22, 24, 26, 27), IoError))
_BY_STATUS.update(dict.fromkeys(range(30, 38), TierError))
_BY_STATUS.update(
    {kind.status: kind for kind in (NotFoundError, CorruptError, TierLockedError, TierFencedError, NoStateError, NoStepError)}
)
_BY_STATUS.update(dict.fromkeys(range(40, 46), OutOfOrderError))
_BY_STATUS.update(dict.fromkeys(range(51, 58), GpuError))
_BY_STATUS[NoDeviceError.status] = NoDeviceError
_BY_STATUS.update(
    {
        kind.status: kind
        for kind in (TornError, ChangedError, PeerEndedError, ArenaFormatError, ArenaForeignError, ArenaExistsError, ArenaMissingError)
    }
)


def is_own(error: BaseException) -> bool:
    """True for an error of this package that no code of the program has raised or passed on since, such as a signal handler. Call it where
    the error is caught."""
    return isinstance(error, SpillwayError) and is_raised_within(error, (__name__.partition(".")[0],))


def is_raised_within(error: BaseException, packages: Iterable[str]) -> bool:
    """True if no other code than that of these packages has raised an error, or passed it on since. Call it where the error is caught."""
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in packages:
            return False
        at = at.tb_next
    return True


class OwnSuppressed:
    """A with block after whose errors of this class, see `is_own`, the program continues.

    Args:
        kind: The class."""

    def __init__(self, kind: type[SpillwayError] = SpillwayError):
        self._kind = kind

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> bool:
        return isinstance(error, self._kind) and is_own(error)


def from_status(status: int, message: str) -> SpillwayError:
    """Returns the exception for a status of the C library; a SpillwayError for an unknown status."""
    return _BY_STATUS.get(status, SpillwayError)(message, status)
