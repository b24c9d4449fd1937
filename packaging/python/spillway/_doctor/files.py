"""Reads the file of a job: a script of Python, or a configuration in JSON, which may have comments as DeepSpeed reads them."""

from __future__ import annotations

import os
from typing import Any

from .. import _files
from ..errors import CorruptError, InvalidArgumentError

#: Most bytes of a script, and of a configuration.
MOST_SCRIPT, MOST_CONFIGURATION = 4 << 20, 1 << 20
#: Most letters of what a parser says, which may quote the file.
_MOST_REASON = 200


def content(path: str, most: int) -> bytes:
    """The bytes of a regular file, to which a link may lead.

    Raises:
        InvalidArgumentError: It cannot be read, or is too large."""
    if os.path.isdir(path):
        raise InvalidArgumentError(f"{path} is a directory; name a script, or a configuration in JSON")
    try:
        with _files.open_regular(os.path.realpath(path)) as file:
            found = file.read(most + 1)
    except FileNotFoundError:
        raise InvalidArgumentError(f"{path} does not exist; name a script, or a configuration in JSON") from None
    except (CorruptError, ValueError):
        raise InvalidArgumentError(f"{path!r} is no regular file; name a script, or a configuration in JSON") from None
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error.strerror}; run the doctor as a user who may read it") from None
    if len(found) > most:
        raise InvalidArgumentError(f"{path} has more than {most >> 20} MiB; name a script, or a configuration in JSON")
    return found


def configuration(path: str) -> Any:
    """The value of a file of JSON, in which hjson allows comments if it is installed, as DeepSpeed has it."""
    stored = content(path, MOST_CONFIGURATION)
    if not stored.strip():
        raise InvalidArgumentError(f"{path} is empty; write a configuration in JSON")
    try:
        return _files.parse_json(stored)
    except RecursionError:
        raise InvalidArgumentError(f"{path} has too many levels; write a configuration in JSON") from None
    except ValueError as error:
        strict = " ".join(str(error).split())[:_MOST_REASON]
    cure = "write a configuration in JSON"
    if strict in _files.NOT_FINITE:
        raise InvalidArgumentError(f"{path} has {strict}, which JSON does not know; write finite numbers")
    try:
        import hjson
    except ImportError:
        cure += "; comments need the package hjson, which DeepSpeed installs"
        raise InvalidArgumentError(f"{path} is no JSON: {strict}; {cure}") from None
    try:
        _files.check_levels(stored)
        return hjson.loads(stored.decode(), object_pairs_hook=_object)
    except (CorruptError, ValueError, RecursionError, TypeError, AttributeError, IndexError) as error:
        reason = " ".join(str(error).split())[:_MOST_REASON] or strict
        raise InvalidArgumentError(f"{path} is no JSON, with comments or without: {reason}; {cure}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, which DeepSpeed refuses with a key twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise CorruptError("a key twice in one object")
    return found
