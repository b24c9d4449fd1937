"""Proves that each attribute of a public object that can be set has an effect, and that the others cannot be set. Proves too that a repr
tells the facts of an object without a call of the library."""

import copy
import inspect
import os

import numpy
import pytest

import spillway
from spillway import _native, arena, stage, window


def floats(count=4):
    return numpy.ones(count, numpy.float32)


def tensors():
    return [tuple(floats() for _ in range(4))]


SET = [
    (spillway.Adam, "lr", 0.5),
    (spillway.Adam, "betas", (0.5, 0.25)),
    (spillway.Adam, "eps", 0.5),
    (spillway.Adam, "weight_decay", 0.5),
    (spillway.Adam, "weight_decay_mode", "l2"),
    (spillway.Adam, "bias_correction", False),
    (spillway.Adam, "rounding", "stochastic"),
    (spillway.Adam, "rounding_seed", 7),
    (spillway.Adagrad, "lr", 0.5),
    (spillway.Adagrad, "lr_decay", 0.5),
    (spillway.Adagrad, "eps", 0.5),
    (spillway.Adagrad, "weight_decay", 0.5),
    (spillway.Lion, "lr", 0.5),
    (spillway.Lion, "betas", (0.5, 0.25)),
    (spillway.Lion, "weight_decay", 0.5),
    (spillway.Signum, "lr", 0.5),
    (spillway.Signum, "momentum", 0.5),
    (spillway.Signum, "weight_decay", 0.5),
]


@pytest.mark.parametrize("kind, name, value", SET)
def test_an_option_that_is_set_later_is_that_of_the_constructor(kind, name, value):
    later, given = kind(), kind(**{name: value})
    assert getattr(later, name) != value
    setattr(later, name, value)
    assert getattr(later, name) == getattr(given, name) == value
    assert bytes(later.options_of_next_step(1.0)) == bytes(given.options_of_next_step(1.0))


@pytest.mark.parametrize("kind", [spillway.Adam, spillway.Adagrad, spillway.Lion, spillway.Signum])
def test_every_argument_of_an_optimizer_can_be_set_later(kind):
    assert {name for own, name, _ in SET if own is kind} == set(inspect.signature(kind).parameters)


@pytest.mark.parametrize(
    "kind, name, value",
    [
        (spillway.Adam, "weight_decay_mode", "coupled"),
        (spillway.Adam, "rounding", 1),
        (spillway.Adam, "rounding_seed", -1),
        (spillway.Adam, "betas", (0.5, "x")),
        (spillway.Adam, "betas", 0.5),
        (spillway.Lion, "betas", (0.5, None)),
        (spillway.Adagrad, "eps", "x"),
    ],
)
def test_a_wrong_value_is_named_and_changes_nothing(kind, name, value):
    optimizer = kind()
    before = bytes(optimizer.options_of_next_step(1.0))
    with pytest.raises(spillway.InvalidArgumentError, match=name):
        setattr(optimizer, name, value)
    assert bytes(optimizer.options_of_next_step(1.0)) == before


@pytest.mark.parametrize("kind", [spillway.Adam, spillway.Adagrad, spillway.Lion, spillway.Signum])
def test_a_misspelled_option_is_an_error(kind):
    with pytest.raises(AttributeError, match="wieght_decay"):
        kind().wieght_decay = 0.1
    changed = copy.copy(kind(lr=0.25))
    assert changed.lr == 0.25 and changed.step_count == 0


def objects():
    """An object of each public class that holds something, with the public attributes that have an effect when they are set."""
    adam = spillway.Adam(lr=0.25)
    prepared = adam.prepare(tensors())
    tier = spillway.Tier([None], job="attributes")
    swap = spillway.Swap(tier, [4, 5])
    swap.fill([(None, None, None)] * 2)
    yield adam, {name for kind, name, _ in SET if kind is spillway.Adam} | {"step_count"}
    yield prepared, set()
    yield prepared.record(), set()
    yield tier, set()
    yield swap, set()
    yield swap.commit(1, wait=False), set()
    yield swap.begin(adam), set()
    yield spillway.Speculation(3), set()
    yield stage.Stage(tensors(), adam), set()
    yield arena.Arena.create(None, {"layers": 4096}), set()
    yield spillway.Interleave([spillway.Subgroup(*(floats() for _ in range(4)))]), set()
    yield window.Window([floats(), floats()]), set()


@pytest.fixture(scope="module")
def opened():
    found = list(objects())
    yield found
    for each, _ in reversed(found):
        if hasattr(each, "close"):
            each.close()


def test_an_attribute_without_an_effect_cannot_be_set(opened):
    tried = 0
    for each, settable in opened:
        methods = {name for name in dir(type(each)) if callable(getattr(type(each), name))}
        for name in {name for name in dir(each) if not name.startswith("_")} - methods - settable - {"closer", "c_name"}:
            with pytest.raises(AttributeError):
                setattr(each, name, getattr(each, name))
            tried += 1
    assert tried > 20


FACTS = {
    "Adam": ["lr=0.25", "betas=(0.9, 0.999)", "weight_decay_mode='decoupled'", "step_count=0"],
    "Prepared": ["tensors=1", "elements=4", "<Adam"],
    "Recording": ["mode='delta'", "elements=4", "open"],
    "Tier": ["job='attributes'", "paths=[None]", "extents=", "open"],
    "Swap": ["subgroups=2", "elements=9", "host_bytes=", "<Tier job='attributes'"],
    "Commit": ["step=1"],
    "SwapUpdate": ["speculative=False", "<Swap", "open"],
    "Speculation": ["buckets=3", "publish='final'", "undo='delta'"],
    "Stage": ["tensors=1", "publish='final'"],
    "Arena": ["regions={'layers': 4096}", "owner=True"],
    "Interleave": ["subgroups=1", "transfer_dtype='native'"],
    "Window": ["units=2", "bytes=32", "slots=2"],
}


class Silent:
    """In place of the library: every call of it fails the test."""

    def __getattr__(self, name):
        raise AssertionError(f"a repr calls {name}")


def test_a_repr_tells_the_facts_without_a_call_of_the_library(opened, monkeypatch):
    monkeypatch.setattr(_native, "_library", Silent())
    monkeypatch.setattr(_native, "library", lambda: Silent())
    shown = {type(each).__name__: repr(each) for each, _ in opened}
    monkeypatch.undo()
    assert set(shown) == set(FACTS)
    for name, facts in FACTS.items():
        assert shown[name].startswith(f"<{name} ") and all(fact in shown[name] for fact in facts), shown[name]


def test_a_closed_object_says_so():
    tier = spillway.Tier([None], job="closed")
    tier.close()
    assert repr(tier).endswith("closed>") and "job='closed'" in repr(tier)


def test_the_repr_of_a_commit_that_has_ended_says_how():
    with spillway.Tier([None], job="ended") as tier:
        commit = tier.commit(3, wait=False)
        assert repr(commit) == "<Commit step=3, in flight when last asked>"
        commit.wait()
        assert repr(commit) == "<Commit step=3, succeeded>"


def test_half_constructed_objects_have_a_repr():
    for kind in (spillway.Adam, spillway.Tier, spillway.Swap, spillway.Gpu, stage.Stage, arena.Arena, window.Window):
        assert repr(kind.__new__(kind)).startswith(f"<{kind.__name__} ")
    with pytest.raises(spillway.NotFoundError):
        spillway.Tier(["/no/such/directory"], job="x")


def test_a_copy_in_a_forked_child_names_the_process_that_opened_the_object():
    with spillway.Speculation(1) as speculation:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, repr(speculation).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as file:
            assert f"of process {os.getpid()}" in file.read()
        assert os.waitpid(child, 0)[1] == 0


def test_a_repr_is_of_bounded_length():
    with spillway.Tier([None], job="long") as tier, spillway.Swap(tier, [1] * 5000) as swap:
        assert len(repr(swap)) < 1000
