"""Finds and loads libspillway.so; no other module does.

The library is the file beside this package, or the one that SPILLWAY_LIBRARY names. It is loaded at first use, so
importing spillway is cheap and does not fail."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from typing import Any

from . import _abi, _arguments
from .errors import IoError, LibraryNotFoundError, SpillwayError, from_status

_lock = threading.Lock()
_library: ctypes.CDLL | None = None


def library() -> ctypes.CDLL:
    """The loaded library, prototypes set and ABI version checked.

    ctypes shortens integers that do not fit: call its functions by `call` or `_native_handle.record`, which check them. A hot path may call
    a function itself if the package has made all integers."""
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                _library = _load(library_path())
    return _library


@functools.cache
def short(name: str) -> Any:
    """A C function that keeps the interpreter to itself: for calls so short that another thread must not take over at each of them."""
    restype, argtypes = _abi.PROTOTYPES[name]
    return ctypes.PYFUNCTYPE(restype, *_kinds(argtypes))((name, library()))


def library_path() -> str:
    """Returns the path of the library that is loaded, or will be at first use."""
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libspillway.so")
    return os.environ.get("SPILLWAY_LIBRARY") or beside


def preload_path() -> str:
    """Returns the path of the preload library, for LD_PRELOAD. It lies beside the library."""
    return _beside_library("libspillway_preload.so")


def tool_path() -> str:
    """Returns the path of the command line tool. It lies beside the library."""
    return _beside_library("spillway-tool" if _in_package() else "spillway")


def _in_package() -> bool:
    return os.path.dirname(library_path()) == os.path.dirname(os.path.abspath(__file__))


def _beside_library(name: str) -> str:
    return os.path.join(os.path.dirname(os.path.abspath(library_path())), name)


def _load(path: str) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(path)
        loaded.spw_abi_version.restype = ctypes.c_uint32
        loaded.spw_abi_version.argtypes = []
        found = loaded.spw_abi_version()
    except (OSError, AttributeError) as error:
        raise LibraryNotFoundError(
            f"cannot load {path}: {error}; reinstall the spillway wheel, or name the library in SPILLWAY_LIBRARY"
        ) from error
    if found != _abi.ABI_VERSION:
        raise LibraryNotFoundError(
            f"{path} has ABI version {found}, this package needs {_abi.ABI_VERSION}; install the library and the package of one release"
        )
    for name, (restype, argtypes) in _abi.PROTOTYPES.items():
        try:
            function = getattr(loaded, name)
        except AttributeError as error:
            raise LibraryNotFoundError(
                f"{path} lacks the function {name}, because it is older than this package; install the library "
                "and the package of one release"
            ) from error
        function.restype, function.argtypes = restype, _kinds(argtypes)
    return loaded


def _kinds(arguments: list[Any]) -> list[Any]:
    """The types of arguments of a prototype, for ctypes."""
    return [argument.kind if isinstance(argument, _abi.Integer) else argument for argument in arguments]


def fitting(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a C function, after a check that its integers fit their C types.

    ctypes would keep the lower bits of an integer that is too large. Its own hook for the conversion of an argument, from_param, is not
    used: ctypes replaces every exception there, also that of a signal handler, by an ArgumentError.

    Raises:
        InvalidArgumentError: An integer does not fit. The message has its name in the C header, and the range."""
    checked = None
    for position, argument, least, most, is_address in _abi.INTEGERS.get(name, ()):
        value = arguments[position]
        if (type(value) is int and least <= value <= most) or (is_address and not isinstance(value, int)):
            continue
        checked = [*arguments] if checked is None else checked
        checked[position] = _arguments.between(argument, value, least, most)
    return arguments if checked is None else tuple(checked)


def call(name: str, *arguments: Any) -> None:
    """Calls a C function that returns a status, and raises the exception of a failed call."""
    check(getattr(library(), name)(*fitting(name, arguments)))


def text(function: str, *arguments: Any) -> str:
    """The text that a C function writes into a buffer. Its last arguments are the buffer, its size, and where the size that is needed
    goes."""
    needed, size = ctypes.c_uint64(), 0
    call(function, *arguments, None, 0, ctypes.byref(needed))
    # The text may grow between two calls.
    while needed.value > size:
        size = needed.value
        room = ctypes.create_string_buffer(size)
        call(function, *arguments, room, size, ctypes.byref(needed))
    return room.value.decode("utf-8", "replace")


def library_version() -> str:
    """Returns the version of the loaded library, such as "1.2.3"."""
    return library().spw_version().decode()


def kernel_name() -> str:
    """Returns the active kernel: "avx512", "avx2", "sve_bf16", "sve", "neon" or "scalar".

    The environment variable SPILLWAY_KERNEL forces one."""
    return (process_info().kernel or b"").decode()


def process_info() -> Any:
    """Kernel, threads and counters of this process, as the library states them."""
    info = _abi.sized(_abi.Info)
    call("spw_get_info", ctypes.byref(info))
    return info


def check(status: int) -> None:
    """Raises the typed exception of a failed call."""
    # No variable of this frame refers to the exception, whose traceback refers to the frame: such a circle keeps the objects of all callers
    # until the garbage collector runs, an open tier with its locks among them.
    if status:
        raise _error_of(status)


def _error_of(status: int) -> SpillwayError:
    message = library().spw_last_error().decode("utf-8", "replace")
    error = from_status(status, message or library().spw_status_name(status).decode())
    if isinstance(error, IoError):
        _locate(error)
    return error


def _locate(error: Any) -> None:
    found, path = _abi.sized(_abi.IoFailure), ctypes.create_string_buffer(4096)
    if library().spw_get_io_failure(0, ctypes.byref(found), path, len(path), None) == 0 and path.value:
        error.errno = found.system_errno or None
        error.strerror = os.strerror(found.system_errno) if found.system_errno else None
        error.filename, error.offset, error.bytes = os.fsdecode(path.value), found.offset, found.bytes
