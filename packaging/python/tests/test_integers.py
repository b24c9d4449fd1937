"""An integer that does not fit its C type is an error that names it and its range: ctypes would keep the lower bits."""

import ast
import ctypes
import operator
import pathlib

import numpy as np
import pytest

import spillway
from spillway import _abi, _native, _native_handle
from spillway._integers import Given
from spillway.tier import collect, steps

PACKAGE = pathlib.Path(spillway.__file__).parent


class Index:
    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


@pytest.mark.parametrize("name", sorted(name for name, integers in _abi.INTEGERS.items() if integers))
def test_every_integer_argument_of_every_function_is_checked(name):
    for checked in _abi.INTEGERS[name]:
        arguments = [None] * len(_abi.PROTOTYPES[name][1])
        for one in _abi.INTEGERS[name]:
            arguments[one.position] = None if one.is_address else 0

        def fitting(value):
            arguments[checked.position] = value
            return _native.fitting(name, tuple(arguments))[checked.position]

        wrong = [checked.least - 1, checked.most + 1, 2**70, -(2**70)]
        wrong += [] if checked.is_address else [1.5, "1", None, Index(checked.most + 1), np.float32(2)]
        for value in wrong:
            with pytest.raises(spillway.InvalidArgumentError) as raised:
                fitting(value)
            assert str(raised.value) == f"{checked.name} is {value!r}; pass an integer from {checked.least} to {checked.most}"
        for value in [checked.least, checked.most, True, *([] if checked.is_address else [np.int64(7), Index(7)])]:
            assert fitting(value) == operator.index(value)
        assert checked.is_address or type(fitting(np.int64(7))) is int


@pytest.mark.parametrize("structure", [structure for structure in _abi.STRUCTURES if issubclass(structure, Given)])
def test_every_integer_field_of_a_given_struct_is_checked(structure):
    for field, kind, *_ in structure._fields_:
        if kind in _abi.RANGES and kind is not ctypes.c_void_p:
            least, most = _abi.RANGES[kind]
            made = structure()
            for value in (least - 1, most + 1, np.float32(1), 1.5, "1", None, Index(most + 1)):
                with pytest.raises(spillway.InvalidArgumentError, match=f"^{field} is .*pass an integer from {least} to {most}"):
                    setattr(made, field, value)
            if least == 0:
                with pytest.raises(spillway.InvalidArgumentError):
                    setattr(made, field, np.int64(-1))
            setattr(made, field, np.int64(5))
            assert getattr(made, field) == 5


def _functions_taken(path):
    """The name of each function that a file takes from the library, by its name or by getattr."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("spw_"):
            yield node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "getattr"
            and "library" in ast.unparse(node.args[0])
        ):
            yield ast.unparse(node.args[1])


# Functions with integers that only the package makes: the hot path of a step, and addresses that the library returned.
OWN = {
    ("optim.py", "self._step_name"),
    ("optim.py", "self._recorded_step_name"),
    ("deepspeed/_optimizer_ops.py", "spw_ds_adam_update"),
    ("torch/_table.py", "f'spw_{rule.c_name}_step'"),
}


def test_no_module_calls_a_function_with_integers_past_the_check():
    taken = set()
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        if name not in ("_native.py", "_native_handle.py"):
            taken |= {(name, function) for function in _functions_taken(path) if _abi.INTEGERS.get(function, True)}
    assert taken == OWN


def test_a_rank_that_does_not_fit_removes_no_tier(tmp_path):
    with spillway.Tier([tmp_path], job="run") as tier:
        tier.commit(1)
    for rank in (2**32, -(2**32), np.int64(2**32), 0.0):
        with pytest.raises(spillway.InvalidArgumentError, match="rank is .*; pass an integer from 0 to 4294967295"):
            collect(tmp_path, job="run", rank=rank)
        with pytest.raises(spillway.InvalidArgumentError, match="rank"):
            steps([tmp_path], job="run", rank=rank)
    assert steps([tmp_path], job="run").last == 1
    assert collect(tmp_path, job="run", rank=np.int64(0))


def test_an_extent_that_does_not_fit_is_not_another_extent():
    with spillway.Tier([None], job="run") as tier:
        extent = tier.define("a", [4])
        tier.wait(tier.put(extent, [np.ones(1, np.float32)]))
        tier.commit(1)
        for call in (
            tier.remove,
            tier.evacuate,
            lambda path: tier.set_health(path, "draining"),
            lambda path: tier.put(extent, [np.ones(1, np.float32)], path=path),
        ):
            with pytest.raises(spillway.InvalidArgumentError, match=f"is {2**32 + extent}; pass an integer from 0 to {2**32 - 1}"):
                call(2**32 + extent)
        assert [found.name for found in tier.extents()] == ["a"]
        tier.remove(np.uint8(extent))
        tier.commit(2)
        assert tier.extents() == []


def test_a_ticket_that_does_not_fit_is_not_another_ticket():
    with spillway.Tier([None], job="run") as tier:
        ticket = tier.put(tier.define("a", [4]), [np.ones(1, np.float32)])
        for wrong in (ticket + 2**64, -1, None, "a", 1.0):
            with pytest.raises(spillway.InvalidArgumentError, match="ticket is .*; pass an integer from 0 to"):
                tier.wait(wrong)
        assert tier.wait(np.int64(ticket)) == 1


def test_a_bucket_that_does_not_fit_is_not_another_bucket():
    arrays = [np.ones(10, np.float32) for _ in range(4)]
    with spillway.Speculation(2) as speculation:
        speculation.begin(spillway.Adam())
        for call in (lambda bucket: speculation.submit(bucket, [tuple(arrays)]), speculation.bucket_state, speculation.wait):
            with pytest.raises(spillway.InvalidArgumentError, match=f"bucket is {2**32 + 1}; pass an integer from 0 to {2**32 - 1}"):
                call(2**32 + 1)
        assert speculation.bucket_state(1) == "missing" and not speculation._held
        speculation.abort()


def test_sizes_and_counts_in_lists_are_checked(tmp_path):
    for elements in ([-1], [2**64 + 100], [1.5], [np.int64(-5)]):
        with pytest.raises(spillway.InvalidArgumentError, match="elements is .*; pass an integer from 0 to"):
            spillway.swap.plan_budget(elements, host_memory=1 << 30, paths=1)
    for paths in (-1, 2**64, 1.0):
        with pytest.raises(spillway.InvalidArgumentError, match="paths is .*; pass an integer from 0 to"):
            spillway.swap.plan_budget([1000], host_memory=1 << 30, paths=paths)


def test_a_close_with_a_very_long_timeout_closes(tmp_path):
    tier = spillway.Tier([tmp_path], job="run")
    tier.close(timeout=1e30)
    with pytest.raises(spillway.InvalidArgumentError, match="closed"):
        tier.paths()


def test_a_refused_integer_calls_nothing(monkeypatch):
    called = []

    class Library:
        def __getattr__(self, name):
            return lambda *arguments: called.append(name) or 0

    monkeypatch.setattr(_native, "library", Library)
    outcome = []
    with pytest.raises(spillway.InvalidArgumentError):
        _native_handle.record(outcome, "spw_tier_remove", None, 2**32)
    with pytest.raises(spillway.InvalidArgumentError):
        _native.call("spw_tier_remove", None, 2**32)
    assert called == outcome == []
