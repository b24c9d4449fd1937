"""Proves that every old name of the package still works in this release and gives a warning that names the new one.
A new name gives no warning."""

import importlib
import inspect
import pkgutil
import types
import warnings

import numpy as np
import pytest

import spillway
from spillway import _deprecated, errors, swap, tier


def modules():
    for found in pkgutil.iter_modules(spillway.__path__, "spillway."):
        if not found.ispkg:
            yield importlib.import_module(found.name)


def declared(kind):
    list(modules())
    return [old for old in _deprecated.DECLARED if old.kind == kind]


def warned(new, category=DeprecationWarning):
    return pytest.warns(category, match=f"^spillway: .* is deprecated and will be removed in the next release; .*{new}")


def owner_of(name):
    return next(vars(module)[name] for module in modules() if name in vars(module))


def test_every_kind_of_old_name_is_declared():
    assert {old.kind for old in _deprecated.DECLARED} == {"name", "argument", "attribute", "property", "dict"}
    assert len(declared("name")) == 2 * len(errors.OLD_NAMES) + 3


@pytest.mark.parametrize("old", declared("name"), ids=lambda old: f"{old.owner}.{old.old}")
def test_names_of_modules(old):
    module = importlib.import_module(old.owner)
    with warned(old.new):
        found = getattr(module, old.old)
    assert found is getattr(module, old.new)
    assert old.old not in getattr(module, "__all__", ())


@pytest.mark.parametrize("old", declared("argument"), ids=lambda old: f"{old.owner.__qualname__}-{old.old}")
def test_arguments(old):
    parameters = inspect.signature(old.owner).parameters
    assert old.new in parameters and old.old not in parameters
    # The function accepts the new name: the TypeError is about its other arguments, at least self.
    with warned(old.new), pytest.raises(TypeError, match="missing .* required"):
        old.owner(**{old.old: None})
    with pytest.raises(TypeError, match=f"got both {old.new} and its old name {old.old}"):
        old.owner(**{old.old: None, old.new: None})
    # An argument that never existed is not an old name.
    with pytest.raises(TypeError, match="unexpected keyword"):
        old.owner(no_such_argument=None)


@pytest.mark.parametrize("old", declared("attribute"), ids=lambda old: f"{old.owner}.{old.old}")
def test_attributes(old):
    owner = owner_of(old.owner)
    assert hasattr(owner, old.new)
    value = object()
    with warned(old.new):
        assert vars(owner)[old.old].__get__(types.SimpleNamespace(**{old.new: value})) is value


def test_named_tuples_that_were_dicts():
    assert [old.old for old in declared("dict")] == ["Speculation.stats()", "spillway.stats()"]
    for old in declared("dict"):
        value = old.owner(*range(len(old.owner._fields)))
        for field, number in zip(old.owner._fields, value):
            key = "seconds_exposed" if field == "exposed_seconds" else field
            with warned(f".{field}"):
                assert value[key] == number == getattr(value, field)
        with warned("the fields"):
            assert list(value.values()) == list(value)
        with warned("the fields"):
            assert dict(value.items()).keys() == set(value.keys())
        with warned("the fields"):
            assert value.get("no such counter", 7) == 7


def test_the_statistics_of_a_swap_were_a_property(tmp_path):
    assert [(old.owner, old.old) for old in declared("property")] == [("Swap", "stats")]
    with tier.Tier([tmp_path], job="names") as opened, swap.Swap(opened, [8], huge_pages=False, pin_memory=False) as update:
        update.fill([(None, None, None)])
        with warned(r"Swap.stats\(\)"):
            assert update.stats.rounds == update.stats().rounds == 1
        with warned(r"Swap.stats\(\)"):
            rounds, *_ = update.stats
        with warned(r"Swap.stats\(\)"):
            assert rounds == update.stats[0] == 1


def test_old_and_new_spelling_do_the_same(tmp_path):
    def arrays():
        param, grad = np.linspace(0, 1, 64, dtype=np.float32), np.full(64, 0x3F80, np.uint16)
        return param, grad, np.zeros(64, np.float32), np.zeros(64, np.float32)

    ours, theirs = arrays(), arrays()
    new = spillway.Adam().step([ours], return_stats=True, uint16_dtype="bf16")
    with warned("return_stats"), warned("uint16_dtype"):
        old = spillway.Adam().step([theirs], stats=True, uint16_as="bf16")
    assert old == new == (False, 64.0) and all((a == b).all() for a, b in zip(ours, theirs))
    with warned("io_timeout"), spillway.Tier([tmp_path], job="old", stall_seconds=5) as opened:
        with warned("memory_budget"), warned("pin_memory"), spillway.Swap(opened, [64], host_bytes=1 << 20, lock=False, huge_pages=False) as update:
            update.fill([(None, None, None)])
            update.commit(1)
            with warned("Swap.rollback"):
                update.roll_back()
    with pytest.raises(AttributeError, match="has no attribute 'Adamm'"):
        spillway.Adamm


def test_old_keys_of_the_configuration_block():
    _block = pytest.importorskip("spillway.deepspeed._block")
    given = {"lock": False, "stall_seconds": 5.0, "interleave": {"parameter": 3, "transfers": True}}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = _block.read(given)
    assert (found.pin_memory, found.io_timeout_seconds) == (False, 5.0)
    assert (found.interleave.plan_argument, found.interleave.gradient_transfers) == (3, True)
    old = [*_block._OLD_NAMES.items(), *_block._OLD_INTERLEAVE_NAMES.items()]
    for warning, (before, now) in zip(seen, old, strict=True):
        assert warning.category is FutureWarning
        assert f"{before} is deprecated" in str(warning.message) and str(warning.message).endswith(f"write {now}")
    assert given == {"lock": False, "stall_seconds": 5.0, "interleave": {"parameter": 3, "transfers": True}}
    with pytest.raises(spillway.InvalidArgumentError, match="spillway has pin_memory and its old name lock; take lock out"):
        _block.read({"lock": True, "pin_memory": True})
