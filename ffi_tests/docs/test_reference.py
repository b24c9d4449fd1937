"""Every public name of the Python package is in its reference, with the methods and properties of its class and the classes that these
return."""

import functools
import importlib
import inspect
import re

import pytest
from blocks import DOCS

pytest.importorskip("torch")
PAGE = (DOCS / "reference" / "python.md").read_text()
#: Modules that a program imports.
MODULES = [
    "spillway",
    *(f"spillway.{name}" for name in ("optim", "recording", "speculate", "arena", "stage", "tier", "swap", "topo", "planner", "gpu")),
    *(f"spillway.{name}" for name in ("interleave", "window", "pipeline", "deepspeed", "errors", "torch", "torch.dcp", "megatron")),
]
#: What other modules of the package use of these.
INTERNAL = {"spillway.optim.counter", "spillway.optim.tensor_table", "spillway.swap.extent_name"}
#: Classes that methods return to other modules of the package.
INTERNAL_RESULTS = {"Place", "Command", "Weight"}


def _entries():
    """Each directive of the page: its kind, what it names, and its members; None: all of them."""
    for kind, name, rest in re.findall(r"^\.\. auto(\w+):: ([\w.]+)\n((?:   .*\n)*)", PAGE, re.M):
        found = re.search(r":members:(.*)", rest)
        names = found[1].replace(",", " ").split() if found else []
        yield kind, name, None if found and not names else names


def _object(name):
    """What a dotted name of the page names."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


@functools.cache
def documented():
    """The objects of the page, and for those whose members are listed their names."""
    whole, listed = [], {}
    for kind, name, members in _entries():
        if kind != "module":
            whole.append(_object(name))
            listed[_object(name)] = members
            continue
        module = importlib.import_module(name)
        names = public(module) if members is None else members
        whole += [getattr(module, each) for each in names]
    return whole, listed


def public(module):
    """The public names of a module: what it lists, else its own classes and functions."""
    own = lambda value: (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module.__name__
    return getattr(module, "__all__", None) or [name for name, value in vars(module).items() if not name.startswith("_") and own(value)]


def _is_documented(value):
    return any(value is each for each in documented()[0])


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_in_the_reference(name):
    module = importlib.import_module(name)
    values = {each: getattr(module, each) for each in public(module) if f"{name}.{each}" not in INTERNAL}
    missing = [each for each, value in values.items() if callable(value) and not _is_documented(value)]
    assert not missing, missing


def _members(kind):
    """The public methods and properties that a class of the package has."""
    for base in kind.__mro__:
        if base.__module__.startswith("spillway"):
            yield from ((name, value) for name, value in vars(base).items() if not name.startswith("_"))


def test_every_method_of_a_class_with_listed_members_is_in_the_reference():
    seen = 0
    for kind, members in documented()[1].items():
        if members is None or not inspect.isclass(kind) or issubclass(kind, tuple):
            continue
        has = {
            name
            for name, value in vars(kind).items()
            if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
        }
        hidden = {"enter", "weight_of", "unpacked", "arrived"} if kind.__name__ == "Flow" else set()
        assert has - hidden <= set(members), (kind, has - hidden - set(members))
        seen += 1
    assert seen >= 4


def test_the_classes_that_methods_return_are_in_the_reference():
    found = {}
    for kind in {value for value in documented()[0] if inspect.isclass(value)}:
        for name, value in _members(kind):
            method = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            returned = str(getattr(method, "__annotations__", {}).get("return", ""))
            module = importlib.import_module(kind.__module__)
            for word in re.findall(r"\b[A-Z]\w+", returned):
                result = getattr(module, word, None)
                if inspect.isclass(result) and result.__module__.startswith("spillway") and not _is_documented(result):
                    found.setdefault(word, []).append(f"{kind.__name__}.{name}")
    assert found.keys() == INTERNAL_RESULTS


def test_the_reference_has_the_names_that_programs_look_for():
    for name in ("Flow", "TierOptions", "SwapUpdate", "Commit", "Snapshot"):
        assert any(getattr(value, "__name__", "") == name for value in documented()[0]), name
    assert {"snapshot", "restore"} <= set(re.findall(r"\w+", PAGE)) and {"settle", "tail"} <= set(re.findall(r"\w+", PAGE))
