"""Values as bytes, in a data-only format: reading them runs no code. What a commit stores beside the states is in this format.

The format is that of safetensors: eight bytes with the length of a JSON header, the header, the bytes of the tensors. The header's
"__metadata__" has the values as JSON. What JSON lacks is an object with one key, the type:

    {"$tuple": [...]}  {"$deque": [[...], maxlen]}  {"$bytes": base64}  {"$float": "inf"}  {"$dtype": name}
    {"$tensor": name}  {"$array": name}  {"$counter": [[key, value], ...]}  {"$ordered": [[key, value], ...]}
    {"$named": [type, [fields], [...]]}  {"$dict": [[key, value], ...]}

The last one is a dictionary that is no object of JSON: a key is no string, or begins with "$". A named tuple is read as a new type with the
same name and fields."""

from __future__ import annotations

import base64
import collections
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import _files, _safetensors
from .errors import CorruptError, InvalidArgumentError

_VERSION = "spillway-values-1"
_CODES = {name: code for code, (name, _) in _safetensors.DTYPES.items()}
_PAIRS = {"$dict": dict, "$ordered": collections.OrderedDict, "$counter": collections.Counter}
_KINDS: dict[type, str] = {kind: name for name, kind in _PAIRS.items()}
#: Types that are JSON, a type whose finite values are, and the collections of JSON. A list of the former takes no Python code per item.
_PLAIN, _NUMBERS, _COLLECTIONS = {type(None), bool, int, str}, {float}, {list, dict}
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def pack(value: Any) -> bytes:
    """Encodes a value; raises InvalidArgumentError, with its place in the record, for an unsupported type."""
    writer = _Writer()
    try:
        words = json.dumps(writer.encode(value), allow_nan=False, separators=(",", ":"))
        _files.check_levels(words.encode())
    except InvalidArgumentError:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"the record is too deeply nested for a commit: {error}") from None
    return b"".join([writer.header.packed({"format": _VERSION, "value": words}), *writer.parts])


def unpack(data: bytes | bytearray) -> Any:
    """Decodes the bytes of pack(); raises CorruptError for other bytes."""
    try:
        metadata, entries, content = _safetensors.parse(bytes(data))
        if metadata["format"] != _VERSION:
            raise ValueError(f"format {metadata['format']!r}")
        return _Reader(entries, content).decode(_files.parse_json(metadata["value"].encode()))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RuntimeError, ImportError) as error:
        raise CorruptError(f"the commit's record is damaged or was not written by Spillway: {type(error).__name__}: {error}") from error


class _Writer:
    def __init__(self) -> None:
        self.header, self.parts = _safetensors.Header(), list[bytes]()
        #: The collections around the present value, and its keys in them.
        self._open, self._keys = set[int](), list[Any]()

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str, int):
            return value
        if kind is list and _PLAIN.issuperset(map(type, value)):
            return value
        if kind is not float and (kind in _KINDS or kind in (list, tuple)):
            return self._collection(value)
        if isinstance(value, str):
            return str(value)
        if isinstance(value, int) and not hasattr(value, "dtype"):
            return int(value)
        if isinstance(value, float) and not hasattr(value, "dtype"):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, (bytes, bytearray)):
            return {"$bytes": base64.b64encode(value).decode()}
        found = self._array(value)
        return self._collection(value) if found is None else found

    def _collection(self, value: Any) -> Any:
        if id(value) in self._open:
            raise InvalidArgumentError(f"{self._place} contains itself; a commit stores plain data only")
        self._open.add(id(value))
        found = self._parts_of(value)
        self._open.discard(id(value))
        return found

    def _parts_of(self, value: Any) -> Any:
        kind = type(value)
        if kind is list:
            plain = _NUMBERS.issuperset(map(type, value)) and all(map(math.isfinite, value))
            return value if plain else self._items(enumerate(value))
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return dict(zip(value, self._items(value.items())))
        if kind in _KINDS:
            return {_KINDS[kind]: [list(pair) for pair in zip(map(self._key, value), self._items(value.items()))]}
        if kind is collections.deque:
            return {"$deque": [self._items(enumerate(value)), value.maxlen]}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {"$named": [kind.__name__, list(value._fields), self._items(enumerate(value))]}
        if isinstance(value, tuple):
            return {"$tuple": self._items(enumerate(value))}
        raise InvalidArgumentError(
            f"{self._place} is a {kind.__module__}.{kind.__qualname__}; a commit stores data only: None, "
            "numbers, strings, bytes, lists, tuples, deques, dictionaries, tensors and numpy arrays"
        )

    def _items(self, items: Iterable[tuple[Any, Any]]) -> list[Any]:
        found = []
        for key, value in items:
            self._keys.append(key)
            found.append(self.encode(value))
            self._keys.pop()
        return found

    @property
    def _place(self) -> str:
        return "".join(["record", *(f"[{key!r}]" for key in self._keys)])

    def _key(self, key: Any) -> Any:
        if type(key) in (str, int, bool, float) or key is None:
            return self.encode(key)
        raise InvalidArgumentError(f"{self._place} has the key {key!r}; use strings or numbers as keys")

    def _array(self, value: Any) -> dict[str, str] | None:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.dtype):
            return {"$dtype": self._known(str(value).removeprefix("torch."))}
        if torch is not None and isinstance(value, torch.Tensor):
            flat = value.detach().to("cpu").contiguous()
            content = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
            return {"$tensor": self._add(str(flat.dtype).removeprefix("torch."), flat.shape, content)}
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            array = numpy.asarray(value, order="C")
            return {"$array": self._add(array.dtype.name, array.shape, array.astype(array.dtype.newbyteorder("<")).tobytes())}
        return None

    def _add(self, dtype: str, shape: Sequence[int], content: bytes) -> str:
        name = str(len(self.header))
        self.header.add(name, _CODES[self._known(dtype)], shape)
        self.parts.append(content)
        return name

    def _known(self, dtype: str) -> str:
        if dtype not in _CODES:
            raise InvalidArgumentError(f"{self._place} has the dtype {dtype}, which cannot be stored; a commit stores {', '.join(_CODES)}")
        return dtype


class _Reader:
    def __init__(self, entries: Mapping[str, Any], content: memoryview):
        self._entries, self._content = entries, content

    def decode(self, words: Any) -> Any:
        if isinstance(words, list):
            return words if _COLLECTIONS.isdisjoint(map(type, words)) else [*map(self.decode, words)]
        if not isinstance(words, dict):
            return words
        if not any(key.startswith("$") for key in words):
            return dict(zip(words, map(self.decode, words.values())))
        ((kind, body),) = words.items()
        if kind in _PAIRS:
            return _PAIRS[kind]({self.decode(key): self.decode(value) for key, value in body})
        if kind == "$tuple":
            return tuple(map(self.decode, body))
        if kind == "$named":
            name, fields, items = body
            return collections.namedtuple(name, fields)(*map(self.decode, items))
        if kind == "$deque":
            items, most = body
            return collections.deque(map(self.decode, items), most)
        if kind == "$bytes":
            return base64.b64decode(body, validate=True)
        if kind == "$float":
            return _FLOATS[body]
        if kind == "$dtype":
            import torch

            if body not in _CODES:
                raise ValueError(f"the dtype {body!r}")
            return getattr(torch, body)
        if kind in ("$tensor", "$array"):
            return self._tensor(body, kind)
        raise ValueError(f"unknown kind {kind!r}")

    def _tensor(self, name: str, kind: str) -> Any:
        entry = self._entries[name]
        shape, (dtype, _) = entry["shape"], _safetensors.DTYPES[entry["dtype"]]
        content = bytearray(_safetensors.bytes_of(name, entry, self._content))
        if kind == "$array":
            import numpy

            found = numpy.frombuffer(content, numpy.dtype(dtype).newbyteorder("<")).reshape(shape)
            found = found.astype(found.dtype.newbyteorder("="))
            # A scalar is stored as an array without dimensions.
            return found if shape else found[()]
        import torch

        known = getattr(torch, dtype)
        return torch.frombuffer(content, dtype=known).reshape(shape) if content else torch.empty(shape, dtype=known)
