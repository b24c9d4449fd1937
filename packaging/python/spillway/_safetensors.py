"""The header of the format safetensors: eight bytes with the length of a JSON object, and the object, in which each tensor has its dtype,
its shape and the range of its bytes behind the header."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from . import _files
from .errors import InvalidArgumentError

_ALIGNMENT, _MOST_HEADER = 8, 100_000_000
_METADATA = "__metadata__"
#: The name of each dtype in torch and numpy, and the bytes of an element.
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "U16": ("uint16", 2),
    "U32": ("uint32", 4),
    "U64": ("uint64", 8),
    "BOOL": ("bool", 1),
}


class Header:
    """The header of tensors whose bytes follow it in the order in which they are added."""

    def __init__(self) -> None:
        self._entries: dict[str, Any] = {}
        self._end = 0

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self._entries)

    def add(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Adds a tensor."""
        start, self._end = self._end, self._end + math.prod(shape) * DTYPES[dtype][1]
        self._entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, self._end]}

    def packed(self, metadata: Mapping[str, str] | None = None) -> bytes:
        """The bytes before those of the tensors.

        Raises:
            InvalidArgumentError: A name or a text cannot be part of a header, or the header is too large; readers would refuse it."""
        for name in self._entries:
            if name == _METADATA or not is_text(name):
                raise InvalidArgumentError(
                    f"the name {name!r} cannot be that of a tensor in a safetensors file; use another name of valid Unicode"
                )
        if metadata is not None and not _are_texts(metadata):
            raise InvalidArgumentError("the metadata of a safetensors file are strings of valid Unicode; pass such strings")
        encoded = json.dumps({**({_METADATA: metadata} if metadata else {}), **self._entries}).encode()
        encoded += b" " * (-len(encoded) % _ALIGNMENT)
        if len(encoded) > _MOST_HEADER:
            raise InvalidArgumentError(
                f"the header of {len(self)} tensors has {len(encoded)} bytes, and a safetensors file has at most {_MOST_HEADER}; "
                "use shorter names, or fewer tensors in a file"
            )
        return len(encoded).to_bytes(8, "little") + encoded


def parse(data: bytes) -> tuple[dict[str, Any], dict[str, Any], memoryview]:
    """The metadata, the entries, and the bytes of the tensors. ValueError if the header is none, or does not fit the data."""
    if len(data) < 8:
        raise ValueError(f"{len(data)} bytes")
    size = int.from_bytes(data[:8], "little")
    if size > min(len(data) - 8, _MOST_HEADER):
        raise ValueError(f"a header of {size} bytes in {len(data)}")
    entries = _files.parse_json(data[8 : 8 + size])
    if not isinstance(entries, dict):
        raise ValueError("a header that is no object")
    metadata = entries.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not _are_texts(metadata):
        raise ValueError("metadata that are not strings")
    return metadata, entries, memoryview(data)[8 + size :]


def _are_texts(metadata: Mapping[str, Any]) -> bool:
    return all(map(is_text, (*metadata, *metadata.values())))


def is_text(value: Any) -> bool:
    """True for a string that UTF-8 can encode: one without half of a pair of surrogates."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def bytes_of(name: str, entry: Mapping[str, Any], content: memoryview) -> memoryview:
    """The bytes of a tensor. ValueError if they are not in the content, or do not fit dtype and shape."""
    (start, end), shape, dtype = entry["data_offsets"], entry["shape"], entry["dtype"]
    if not all(type(number) is int and number >= 0 for number in (start, end, *shape)):
        raise ValueError(f"tensor {name}: offsets {start}, {end}, shape {shape}")
    if end > len(content) or end - start != math.prod(shape) * DTYPES[dtype][1]:
        raise ValueError(f"tensor {name}: bytes {start} to {end} of {len(content)} for {dtype} of shape {shape}")
    return content[start:end]
