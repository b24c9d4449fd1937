"""The record that a commit stores beside the states, in a data-only format: reading it runs no code.

The format is that of safetensors: eight bytes with the length of a JSON header, the header, the bytes of the tensors.
The header's "__metadata__" has the values. Null, booleans, numbers, strings and lists are JSON. Other types are an
object with one key, the type:

    {"dict": [[key, value], ...]}  {"tuple": [...]}  {"deque": [[...], maxlen]}  {"bytes": base64}  {"float": "inf"}
    {"tensor": name}  {"array": name}  {"counter": [[key, value], ...]}  {"ordered": [[key, value], ...]}  {"dtype": name}
    {"named": [type, [fields], [...]]}

A named tuple is read as a new type with the same name and fields."""

import base64
import binascii
import collections
import json
import math
import sys

from .. import _files, _safetensors
from .._snapshot import RECORD
from ..errors import CorruptError, InvalidArgumentError

_VERSION = "spillway-payload-1"
_PIECE = 1 << 20
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "BOOL": "bool",
}
_NAMES = {name: code for code, name in _DTYPES.items()}
_PAIRS = {"dict": dict, "ordered": collections.OrderedDict, "counter": collections.Counter}


def pack(record):
    """Encodes a value; raises InvalidArgumentError, with its place in the record, for an unsupported type."""
    writer = _Writer()
    words = json.dumps(writer.encode(record, "record"), allow_nan=False, separators=(",", ":"))
    try:
        _files.check_levels(words.encode())
    except ValueError as error:
        raise InvalidArgumentError(f"the record is too deeply nested for a commit: {error}") from None
    return b"".join([writer.header.packed({"format": _VERSION, "value": words}), *writer.parts])


def unpack(data):
    """Decodes the bytes of pack(); raises CorruptError for other bytes."""
    data = bytes(data)
    try:
        return _Reader(data).value()
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, binascii.Error) as error:
        raise CorruptError(f"the commit's record is damaged or was not written by Spillway: {type(error).__name__}: {error}") from error


def store(tier, record, room):
    """The payload for a tier's commit: the record, or a reference to an extent that stores it if it has more than `room` bytes."""
    data = pack(record)
    if len(data) <= room:
        return data
    size = -(-len(data) // _PIECE) * _PIECE
    name = f"{RECORD}{size // _PIECE}"
    old = next((extent for extent in tier.extents() if extent.name.startswith(RECORD) and extent.name != name), None)
    if old is not None:
        tier.remove(old.number)
    padded = bytearray(size)
    padded[: len(data)] = data
    tier._transfer(tier.put(extent, [padded]) for extent in [tier.define(name, [size])])
    return pack({"record": name, "bytes": len(data)})


def load(tier, payload):
    """The record of a payload of store()."""
    record = unpack(payload)
    if not isinstance(record, dict):
        raise CorruptError("the commit's record is damaged: it is no dictionary")
    if "record" not in record:
        return record
    extent = next((extent for extent in tier.extents() if extent.name == record["record"]), None)
    if extent is None or not extent.name.startswith(RECORD) or not 0 <= record["bytes"] <= extent.bytes:
        raise CorruptError(f"the commit's record is damaged: it refers to the extent {record['record']!r}, which the tier lacks")
    padded = bytearray(extent.bytes)
    tier._transfer(tier.get(number, [padded]) for number in [tier.define(extent.name, [extent.bytes])])
    return unpack(bytes(padded[: record["bytes"]]))


class _Writer:
    def __init__(self):
        self.header, self.parts, self._open = _safetensors.Header(), [], set()

    def encode(self, value, place):
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if isinstance(value, str):
            return str(value)
        if isinstance(value, (bool, int)) and not hasattr(value, "dtype"):
            return int(value)
        if isinstance(value, float) and not hasattr(value, "dtype"):
            return float(value) if math.isfinite(value) else {"float": repr(float(value))}
        if isinstance(value, (bytes, bytearray)):
            return {"bytes": base64.b64encode(value).decode()}
        if (found := self._array(value)) is not None:
            return found
        if id(value) in self._open:
            raise InvalidArgumentError(f"{place} contains itself; a commit stores plain data only")
        self._open.add(id(value))
        try:
            return self._collection(value, place)
        finally:
            self._open.discard(id(value))

    def _collection(self, value, place):
        for name, kind in reversed(_PAIRS.items()):
            if type(value) is kind:
                return {name: [[self._key(key, place), self.encode(item, f"{place}[{key!r}]")] for key, item in value.items()]}
        if type(value) is list:
            return self._items(value, place)
        if type(value) is collections.deque:
            return {"deque": [self._items(value, place), value.maxlen]}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {"named": [type(value).__name__, list(value._fields), self._items(value, place)]}
        if isinstance(value, tuple):
            return {"tuple": self._items(value, place)}
        raise InvalidArgumentError(
            f"{place} is a {type(value).__module__}.{type(value).__qualname__}; a commit stores data only: None, "
            "numbers, strings, bytes, lists, tuples, deques, dictionaries, tensors and numpy arrays"
        )

    def _items(self, values, place):
        return [self.encode(value, f"{place}[{index}]") for index, value in enumerate(values)]

    def _key(self, key, place):
        if type(key) in (str, int, bool, float) or key is None:
            return self.encode(key, f"a key of {place}")
        raise InvalidArgumentError(f"{place} has the key {key!r}; use strings or numbers as keys")

    def _array(self, value):
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if torch is not None and isinstance(value, torch.Tensor):
            flat = value.detach().to("cpu").contiguous()
            content = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
            return {"tensor": self._add(str(flat.dtype).removeprefix("torch."), flat.shape, content)}
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            content = numpy.asarray(value, order="C")
            plain = content.astype(content.dtype.newbyteorder("<"))
            return {"array": self._add(content.dtype.name, content.shape, plain.tobytes())}
        return None

    def _add(self, dtype, shape, content):
        if dtype not in _NAMES:
            raise InvalidArgumentError(f"a tensor of dtype {dtype} cannot be stored; a commit stores {', '.join(_NAMES)}")
        name = str(len(self.header))
        self.header.add(name, _NAMES[dtype], shape)
        self.parts.append(content)
        return name


class _Reader:
    def __init__(self, data):
        metadata, self._entries, self._content = _safetensors.parse(data)
        if metadata["format"] != _VERSION:
            raise ValueError(f"format {metadata['format']!r}")
        self._words = metadata["value"]

    def value(self):
        return self._decode(_files.parse_json(self._words.encode()))

    def _decode(self, words):
        if isinstance(words, list):
            return [self._decode(word) for word in words]
        if not isinstance(words, dict):
            return words
        ((kind, body),) = words.items()
        if kind in _PAIRS:
            return _PAIRS[kind]({self._decode(key): self._decode(item) for key, item in body})
        if kind == "tuple":
            return tuple(self._decode(word) for word in body)
        if kind == "named":
            name, fields, items = body
            return collections.namedtuple(name, fields)(*(self._decode(word) for word in items))
        if kind == "deque":
            items, most = body
            return collections.deque((self._decode(word) for word in items), most)
        if kind == "bytes":
            return base64.b64decode(body, validate=True)
        if kind == "dtype":
            import torch

            return getattr(torch, _DTYPES[_NAMES[body]])
        if kind == "float":
            return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[body]
        if kind in ("tensor", "array"):
            return self._tensor(body, kind)
        raise ValueError(f"unknown kind {kind!r}")

    def _tensor(self, name, kind):
        entry = self._entries[name]
        shape, dtype = entry["shape"], entry["dtype"]
        content = bytearray(_safetensors.bytes_of(name, entry, self._content))
        if kind == "array":
            import numpy

            found = numpy.frombuffer(content, numpy.dtype(_DTYPES[dtype]).newbyteorder("<")).reshape(shape)
            # A scalar is stored as an array without dimensions.
            return found.astype(found.dtype.newbyteorder("="))[()] if not shape else found.astype(found.dtype.newbyteorder("="))
        import torch

        found = getattr(torch, _DTYPES[dtype])
        return torch.frombuffer(content, dtype=found).reshape(shape) if content else torch.empty(shape, dtype=found)
