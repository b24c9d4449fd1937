"""Proves that what a commit stores beside the states is read back unchanged, and that values other than data are refused by name.
Reading executes no code, whatever the bytes are."""

import collections
import contextlib
import io
import json
import math
import os
import pickle
import random

import numpy as np
import pytest

import spillway
from spillway import _safetensors, _values
from spillway.deepspeed import _tier

torch = pytest.importorskip("torch")

Point = collections.namedtuple("Point", "x y")


class RunsCode:
    def __reduce__(self):
        return os.system, ("echo a commit's record was run",)


def values():
    return {
        "numbers": [0, -1, 1 << 80, 0.1, 5e-324, -0.0, math.inf, -math.inf, True, None],
        "words": "\u00e4\0\ud7ff",
        "bytes": b"\0\xff",
        "tuple": (1, (2, [3]), ()),
        7: {0.5: "float key", None: "none", True: "bool"},
        "named": Point(1, (2,)),
        "deque": collections.deque([1, (2,)], maxlen=5),
        "counter": collections.Counter({3: 2, 9: 1}),
        "ordered": collections.OrderedDict(b=1, a=2),
        "dict": {"$tuple": {"$dict": "looks like a kind"}, "$": {"tuple": "is a string"}},
        "random": random.getstate(),
        "numpy": np.random.RandomState(3).get_state(),
        "dtype": torch.bfloat16,
    }


def test_what_is_data_comes_back_as_it_was():
    found = _values.unpack(_values.pack(values()))
    wanted = values()
    state, other = found.pop("numpy"), wanted.pop("numpy")
    assert state[0] == other[0] and np.array_equal(state[1], other[1]) and state[2:] == other[2:]
    assert found == wanted and found["named"].x == 1 and found["deque"].maxlen == 5
    assert type(found["counter"]) is collections.Counter and type(found["ordered"]) is collections.OrderedDict
    assert math.copysign(1, found["numbers"][5]) == -1 and math.isnan(_values.unpack(_values.pack(math.nan)))
    np.random.RandomState().set_state(state), random.Random().setstate(found["random"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_tensors_and_arrays_come_back_to_the_bit(dtype):
    tensors = [
        torch.arange(24).reshape(2, 3, 4).to(dtype),
        torch.ones((), dtype=dtype),
        torch.empty((0, 3), dtype=dtype),
        torch.arange(24).to(dtype).reshape(4, 6).t(),
    ]
    arrays = [np.arange(5.0), np.array([True]), np.arange(4, dtype=">i4"), np.float32(0.1), np.zeros((2, 0), np.int8)]
    for before, after in zip(tensors, _values.unpack(_values.pack(tensors))):
        assert before.dtype == after.dtype and before.shape == after.shape and torch.equal(before, after)
    for before, after in zip(arrays, _values.unpack(_values.pack(arrays))):
        assert before.shape == after.shape and np.array_equal(before, after)


def test_what_is_not_data_is_refused_by_its_place():
    itself = []
    itself.append(itself)
    for value, words in (
        (RunsCode(), r"record\['client_state'\]\[1\] is a .*RunsCode"),
        (len, "builtin"),
        ({(1, 2): 3}, "key"),
        (itself, "contains itself"),
        (np.array(["a"]), "dtype str"),
        (torch.complex64, "dtype complex64"),
        ({1, 2}, "set"),
    ):
        with pytest.raises(spillway.InvalidArgumentError, match=words) as refusal:
            _values.pack({"client_state": [0, value]})
        assert str(refusal.value).startswith("record['client_state'][1]")


def test_what_json_has_is_json():
    plain = {"step": 3, "groups": [{"lr": 0.1, "name": None, "on": True}]}
    assert _safetensors.parse(_values.pack(plain))[0]["value"] == json.dumps(plain, separators=(",", ":"))


@pytest.mark.parametrize("levels", [100, 290, 5000])
@pytest.mark.parametrize("nest", [lambda value: [value], lambda value: {"a": value}, lambda value: (value,)])
def test_what_is_nested_is_read_back_or_refused(nest, levels):
    value = 1.5
    for _ in range(levels):
        value = nest(value)
    try:
        packed = _values.pack(value)
    except spillway.InvalidArgumentError as refusal:
        assert "nested" in str(refusal) and levels > 100
        return
    assert levels < 5000 and _values.unpack(packed) == value


@pytest.mark.parametrize(
    "words",
    ['{"$deque":[[1],1' + "0" * 30 + "]}", '{"$dtype":"int128"}', '{"$bytes":"?"}', '{"$tuple":1}', '{"$new":1}', '{"$tensor":"9"}'],
)
def test_words_that_no_value_has_are_damage(words):
    header = json.dumps({"__metadata__": {"format": "spillway-values-1", "value": words}}).encode()
    with pytest.raises(spillway.CorruptError):
        _values.unpack(len(header).to_bytes(8, "little") + header)


def test_a_pickle_is_never_run(capfd):
    saved = io.BytesIO()
    torch.save(RunsCode(), saved)
    for data in (saved.getvalue(), pickle.dumps(RunsCode())):
        with pytest.raises(spillway.CorruptError):
            _values.unpack(data)
    assert capfd.readouterr().out == ""


def test_a_record_that_was_cut_is_an_error_and_other_damage_raises_nothing_else():
    """The payload has no checksum of its own: the tier's blocks have. A changed number may thus be another valid record."""
    data = _values.pack(values() | {"tensor": torch.ones(100)})
    chance = random.Random(1)
    for _ in range(3000):
        damaged = bytearray(data[: chance.randrange(len(data) + 1)] if chance.random() < 0.3 else data)
        for _ in range(chance.randrange(1, 4)):
            if damaged:
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        with contextlib.suppress(spillway.TierError):
            _values.unpack(damaged)
    for size in range(len(data)):
        with pytest.raises(spillway.TierError):
            _values.unpack(data[:size])
    assert torch.equal(_values.unpack(data)["tensor"], torch.ones(100))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [100], "data_offsets": [0, 4000]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 0]},
        {"dtype": "X", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
    ],
)
def test_a_tensor_lies_within_the_bytes(entry):
    header = json.dumps({"__metadata__": {"format": "spillway-values-1", "value": '{"$tensor":"0"}'}, "0": entry}).encode()
    for size in (len(header), len(header) + 1, 1 << 63):
        with pytest.raises(spillway.CorruptError):
            _values.unpack(size.to_bytes(8, "little") + header + b"1234")


ENTRY = '"0": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
GOOD = f'{{"__metadata__": {{"format": "spillway-values-1", "value": "1"}}, {ENTRY}}}'
HEADERS = {
    "a tensor twice": GOOD[:-1] + f", {ENTRY}}}",
    "a field of a tensor twice": GOOD.replace('"shape"', '"shape": [1], "shape"'),
    "a text twice": GOOD.replace('"value": "1"', '"value": "1", "value": "1"'),
    "metadata twice": GOOD[:-1] + ', "__metadata__": {}}',
    "a text that is true": GOOD.replace('"value": "1"', '"value": "1", "other": true'),
    "a list of metadata": '{"__metadata__": []}',
    "a number": GOOD.replace('"value": "1"', '"value": 1'),
    "a text": '"abc"',
    "a list of tensors": "[]",
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_has_unique_keys_and_metadata_of_strings(name):
    def framed(header):
        return len(header).to_bytes(8, "little") + header.encode() + b"1234"

    assert _values.unpack(framed(GOOD)) == 1
    with pytest.raises(spillway.CorruptError):
        _values.unpack(framed(HEADERS[name]))


@pytest.mark.parametrize(
    "names, metadata", [(["__metadata__"], {}), (["\ud800"], {}), (["a", 3], {}), (["a"], {"b": True}), (["a"], {"b": "\udfff"})]
)
def test_a_header_that_readers_would_refuse_is_not_written(names, metadata):
    header = _safetensors.Header()
    for name in names:
        header.add(name, "F32", [1])
    with pytest.raises(spillway.InvalidArgumentError, match="safetensors file"):
        header.packed(metadata)


@pytest.mark.parametrize("large", [False, True])
def test_a_record_of_any_size_comes_back_from_a_tier(tmp_path, large):
    record = {"counts": {"global_steps": 3}, "buffers": {"b": torch.ones((2 << 20) if large else 3)}}
    with spillway.Tier([tmp_path], job="run") as tier:
        tier.commit(3, _tier.store(tier, record, 1 << 20))
        assert len(tier.extents()) == large
    with spillway.Tier([tmp_path], job="run", mode="resume") as tier:
        found = _tier.load(tier, tier.opened.payload)
        assert found["counts"] == record["counts"] and torch.equal(found["buffers"]["b"], record["buffers"]["b"])
