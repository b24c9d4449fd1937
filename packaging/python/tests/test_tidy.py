"""Proves how the modules of the package depend on each other: without circles, by agreed faces only, and with optional parts that nothing
else needs. Imports inside of functions and for annotations count. Proves too that what the package refuses is a SpillwayError."""

import ast
import builtins

import pytest

from spillway import errors

#: Modules with a leading underscore that modules of other folders import. The list only gets shorter.
FACES = {"__main__": {"deepspeed._hook", "deepspeed._versions", "megatron._versions"}, "bench._io": {"deepspeed._hook"}}
#: Modules that are no face for programs, and the modules of other folders that build on them.
INNER = {
    "torch.inner": {
        "deepspeed._interleave_residents",
        "deepspeed._stage3",
        "deepspeed._superoffload_tail",
        "megatron._hybrid",
        "megatron._shards",
        "pipeline._stage_optimizer",
    }
}
#: Parts that can be left out of a wheel.
OPTIONAL = ("bench", "pipeline")


#: Python's exceptions that `spillway.errors` names: for calls and copies, attributes, files, and methods that subclasses have.
PYTHONS = {"AttributeError", "NotImplementedError", "TypeError", "OSError", "IsADirectoryError", "NotADirectoryError"}
#: Modules that raise others, which they or their callers catch, or which a protocol of Python or torch asks for. The list only gets
#: shorter.
INTERNAL = {
    "_files": {"ValueError"},
    "_safetensors": {"ValueError"},
    "_snapshot": {"ValueError"},
    "_values": {"ValueError"},
    "bench.__main__": {"ValueError"},
    "deepspeed._settings": {"ValueError"},
    "megatron._saved": {"ValueError"},
    "torch._offload.flow": {"RuntimeError"},
    "torch._offload.slot": {"ValueError"},
    "torch._tier_states": {"KeyError"},
}


@pytest.fixture(scope="module")
def imports(repository):
    """For each module of the package the modules that it imports; names without `spillway.`."""
    root = repository / "packaging" / "python" / "spillway"
    files = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix("__init__").rstrip("."): path for path in root.rglob("*.py")
    }

    def imported(name, node):
        package = name if files[name].name == "__init__.py" else name.rpartition(".")[0]
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[2] for alias in node.names if alias.name.split(".")[0] == "spillway")
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "spillway"):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level and package else []
            base = ".".join([*above, *([node.module] if node.module else [])]) if node.level else node.module.partition(".")[2]
            for alias in node.names:
                whole = f"{base}.{alias.name}".lstrip(".")
                yield whole if whole in files else base

    return {
        name: {found for node in ast.walk(ast.parse(path.read_text())) for found in imported(name, node) if found in files} - {name}
        for name, path in files.items()
    }


def _folder(module):
    return module.rpartition(".")[0]


def _circles(imports):
    """The imports of the modules that import each other in a circle."""
    left = dict(imports)
    while ready := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in ready:
            del left[name]
    # What remains are circles and their users: without users, the circles alone.
    while unused := [name for name in left if not any(name in needs for needs in left.values())]:
        for name in unused:
            del left[name]
    return {name: sorted(needs & left.keys()) for name, needs in left.items()}


def test_no_modules_import_each_other_in_a_circle(imports):
    assert not _circles(imports)


def test_no_files_of_the_tests_import_each_other_in_a_circle(repository):
    """They import each other by the names of their files."""
    files = {path.stem: path for path in (repository / "ffi_tests").rglob("*.py")}
    imports = {name: set() for name in files}
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imports[name].update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                imports[name].add(node.module)
    assert len(files) > 100 and not _circles({name: found & files.keys() - {name} for name, found in imports.items()})


def test_a_circle_is_found_without_its_users():
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert _circles(imports) == {"b": ["c"], "c": ["b"]}


def test_private_modules_are_imported_by_their_own_folder_and_agreed_users_only(imports):
    foreign = {}
    for name, needs in imports.items():
        own = name if any(other.startswith(f"{name}.") for other in imports) else _folder(name)
        for needed in needs:
            # A module of a folder may use the private modules of the folders above.
            if needed.rpartition(".")[2].startswith("_") and not f"{own}.".startswith(f"{_folder(needed)}.") and _folder(needed):
                foreign.setdefault(name, set()).add(needed)
    assert foreign == FACES


@pytest.mark.parametrize("inner", INNER)
def test_an_inner_module_is_imported_by_agreed_users_only(imports, inner):
    assert {name for name, needs in imports.items() if inner in needs} == INNER[inner]


@pytest.mark.parametrize("part", OPTIONAL)
def test_nothing_else_imports_an_optional_part(imports, part):
    users = {name for name, needs in imports.items() for needed in needs if f"{needed}.".startswith(f"{part}.")}
    assert all(f"{name}.".startswith(f"{part}.") for name in users), users


def test_the_graph_has_the_imports_of_the_package(imports):
    """Relative, absolute, lazy and typing imports."""
    assert {"_abi", "optim", "errors"} <= imports[""] and "_native" in imports["deepspeed._optimizer_ops"]
    assert "deepspeed._installed" in imports["deepspeed._optimizer_ops"] and "megatron._versions" in imports["__main__"]
    assert "tier" in imports["swap"] and "torch" in imports["pipeline._stage_optimizer"]


def _foreign(text):
    """The built-in exceptions of a module's raise statements that are neither a SpillwayError's nor Python's own rules."""
    raised = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            name = getattr(node.exc.func if isinstance(node.exc, ast.Call) else node.exc, "id", "")
            # Names in lower case are variables, and functions that make an error.
            if isinstance(getattr(builtins, name, None), type) and name not in PYTHONS:
                raised.add(name)
            # A method that subclasses have raises it without a text.
            if name == "NotImplementedError" and isinstance(node.exc, ast.Call):
                raised.add(name)
    return raised


def test_what_the_package_refuses_is_an_error_of_the_package(repository):
    root = repository / "packaging" / "python" / "spillway"
    found = {".".join(path.relative_to(root).with_suffix("").parts): _foreign(path.read_text()) for path in root.rglob("*.py")}
    found = {name: kinds - {"SystemExit"} if name.startswith("bench.") else kinds for name, kinds in found.items()}
    assert {name: kinds for name, kinds in found.items() if kinds} == INTERNAL


@pytest.mark.parametrize(
    "statement, kinds",
    [
        ('raise ValueError("x")', {"ValueError"}),
        ("raise ValueError", {"ValueError"}),
        ('raise NotImplementedError("no such op")', {"NotImplementedError"}),
        ("raise NotImplementedError", set()),
        ('raise TypeError("cannot be copied")', set()),
        ('raise InvalidArgumentError("x")', set()),
        ("raise", set()),
    ],
)
def test_a_foreign_exception_is_found(statement, kinds):
    assert _foreign(f"try:\n    pass\nexcept OSError:\n    {statement}") == kinds


def test_every_class_of_the_errors_is_a_spillway_error():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) > 25 and all(issubclass(kind, errors.SpillwayError) for kind in kinds)
