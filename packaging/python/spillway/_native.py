"""Finds and loads libspillway.so; no other module does.

The library is the file beside this package, or the one that SPILLWAY_LIBRARY names. It is loaded at first use, so
importing spillway is cheap and does not fail."""

import ctypes
import os
import threading

from . import _abi
from .errors import IoFailure, LibraryNotFound, from_status

_lock = threading.Lock()
_library = None


def library():
    """The loaded library, prototypes set and ABI version checked."""
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                _library = _load(library_path())
    return _library


def library_path():
    """Path of the library that is loaded, or will be at first use."""
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libspillway.so")
    return os.environ.get("SPILLWAY_LIBRARY") or beside


def _load(path):
    try:
        loaded = ctypes.CDLL(path)
        loaded.spw_abi_version.restype = ctypes.c_uint32
        loaded.spw_abi_version.argtypes = []
        found = loaded.spw_abi_version()
    except (OSError, AttributeError) as error:
        raise LibraryNotFound(f"cannot load {path}: {error}; reinstall the spillway wheel, or name the library "
                              "in SPILLWAY_LIBRARY") from error
    if found != _abi.ABI_VERSION:
        raise LibraryNotFound(f"{path} has ABI version {found}, this package speaks {_abi.ABI_VERSION}")
    for name, (restype, argtypes) in _abi.PROTOTYPES.items():
        try:
            function = getattr(loaded, name)
        except AttributeError as error:
            raise LibraryNotFound(f"{path} lacks {name}: it is older than this package") from error
        function.restype, function.argtypes = restype, argtypes
    return loaded


def check(status):
    """Raises the typed exception of a failed call."""
    if status:
        message = library().spw_last_error().decode("utf-8", "replace")
        name = library().spw_status_name(status).decode()
        error = from_status(status, message or name)
        if isinstance(error, IoFailure):
            _locate(error)
        raise error


def _locate(error):
    found = _abi.sized(_abi.IoFailure)
    if library().spw_io_last_failure(ctypes.byref(found)) == 0 and found.path is not None:
        error.errno = found.system_errno or None
        error.strerror = os.strerror(found.system_errno) if found.system_errno else None
        error.filename, error.offset, error.bytes = os.fsdecode(found.path), found.offset, found.bytes


def initialised(structure_type, init_name):
    """An options structure with the library's defaults."""
    options = structure_type()
    check(getattr(library(), init_name)(ctypes.byref(options), ctypes.sizeof(options)))
    return options
