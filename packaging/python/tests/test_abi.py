"""Proves that ctypes declares what a C compiler reads in the headers: every function,
argument, structure and constant."""

import ctypes
import os
import re
import shutil
import subprocess

import pytest

import spillway
from spillway import _abi

_KINDS = {
    "uint32_t": "u32",
    "int32_t": "i32",
    "uint64_t": "u64",
    "int64_t": "i64",
    "float": "f32",
    "double": "f64",
    "spw_log_fn": "pointer",
    "spw_swap_stepped_fn": "pointer",
    "spw_status": "i32",
}
_CTYPES = {
    ctypes.c_uint32: "u32",
    ctypes.c_int32: "i32",
    ctypes.c_uint64: "u64",
    ctypes.c_int64: "i64",
    ctypes.c_float: "f32",
    ctypes.c_double: "f64",
}
_NAME = re.compile(r"(\w+)\s*(?:\[\w*\])?\s*$")
# Only builds for tests export these, never a release.
_TEST_ONLY = {"spw_probe_panic"}
_CONSTANTS = {
    "SPW_ABI_VERSION": _abi.ABI_VERSION,
    "SPW_DTYPE_NONE": _abi.DTYPE_NONE,
    "SPW_DTYPE_F32": _abi.DTYPE_F32,
    "SPW_DTYPE_F16": _abi.DTYPE_F16,
    "SPW_DTYPE_BF16": _abi.DTYPE_BF16,
    # As an int, like the other values.
    "SPW_TOPO_NONE": ctypes.c_int32(_abi.TOPO_NONE).value,
    **{f"SPW_WEIGHT_DECAY_{name.upper()}": value for name, value in _abi.WEIGHT_DECAY_MODES.items()},
    **{f"SPW_LOG_LEVEL_{name.upper()}": value for name, value in _abi.LOG_LEVELS.items()},
}


@pytest.fixture(scope="module")
def headers(repository):
    return sorted((repository / "include" / "spillway").glob("*.h"))


@pytest.fixture(scope="module")
def prototypes(headers):
    """name -> (kind of the result, kinds and names of the arguments), parsed from the text of the headers."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", _text(headers), flags=re.S)
    found = re.findall(r"^([\w ]+?[\s*]+)(spw_\w+)\(([^)]*)\);", text, flags=re.M)
    return {
        name: (_kind(result), [(_kind(part), _NAME.search(part)[1]) for part in arguments.split(",") if part.strip() != "void"])
        for result, name, arguments in found
        if name not in _TEST_ONLY
    }


def test_every_function_has_the_prototype_of_the_header(prototypes):
    assert len(prototypes) > 20
    ours = {
        name: (_ctypes_kind(result), [_ctypes_kind(kind) for kind in arguments]) for name, (result, arguments) in _abi.PROTOTYPES.items()
    }
    assert ours == {name: (result, [kind for kind, _ in arguments]) for name, (result, arguments) in prototypes.items()}


def test_every_integer_argument_is_declared_with_its_name_in_the_header(prototypes):
    for name, (_, arguments) in _abi.PROTOTYPES.items():
        for (kind, named), ours in zip(prototypes[name][1], arguments):
            assert isinstance(ours, _abi.Integer) or kind not in ("u32", "i32", "u64", "i64"), (name, named)
            assert not isinstance(ours, _abi.Integer) or ours.name == named, (name, named)


def test_structures_and_constants_are_those_of_the_compiled_header(headers, tmp_path):
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "layout.c").write_text(_layout_program(headers))
    subprocess.run([compiler, "-std=c11", "-Wall", "-Werror", "-o", tmp_path / "layout", tmp_path / "layout.c"], check=True)
    printed = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True).stdout
    compiled = {name: int(value) for name, value in (line.split() for line in printed.splitlines())}
    expected = dict(_CONSTANTS)
    for structure in _abi.STRUCTURES:
        expected[structure.c_name] = ctypes.sizeof(structure)
        for field, _ in structure._fields_:
            expected[f"{structure.c_name}.{field}"] = getattr(structure, field).offset
    assert compiled == expected


def test_no_field_of_the_header_is_missing_in_ctypes(headers):
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", _text(headers), flags=re.S)
    bodies = {name: body for body, name in re.findall(r"typedef struct \w+ \{([^}]*)\} (spw_\w+);", text)}
    assert set(bodies) == {structure.c_name for structure in _abi.STRUCTURES}
    for structure in _abi.STRUCTURES:
        names = [part for line in bodies[structure.c_name].split(";") for part in re.findall(r"(\w+)\s*(?=,|$)", line.strip())]
        assert names == [field for field, _ in structure._fields_], structure.c_name


def test_the_loaded_library_states_the_version_of_the_package():
    import spillway

    assert spillway.library_version() == spillway.__version__


def _text(headers):
    return "".join(header.read_text() for header in headers)


def _kind(text):
    text = re.sub(r"\bconst\b", " ", text)
    if "*" in text or "[" in text:
        return "pointer"
    words = text.split()
    for length in (len(words), len(words) - 1):
        kind = _KINDS.get(" ".join(words[:length]))
        if kind:
            return kind
    raise AssertionError(f"a C type this test does not know: {text!r}")


def _ctypes_kind(kind):
    return _CTYPES.get(kind.kind if isinstance(kind, _abi.Integer) else kind, "pointer")


def _layout_program(headers):
    lines = [
        "#define SPW_EXPERIMENTAL",
        *(f'#include "{header}"' for header in headers),
        "#include <stddef.h>",
        "#include <stdio.h>",
        "int main(void) {",
    ]
    for structure in _abi.STRUCTURES:
        name = structure.c_name
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        lines += [f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));' for field, _ in structure._fields_]
    lines += [f'printf("{name} %d\\n", (int){name});' for name in _CONSTANTS]
    return "\n".join([*lines, "return 0; }", ""])


@pytest.mark.parametrize("name, value", [("block_bytes", 2**70), ("world", 2**40), ("rank", -1), ("io_timeout", -1)])
def test_an_integer_that_a_field_cannot_hold_is_an_error(tmp_path, name, value):
    # ctypes silently keeps only the lower bits.
    with pytest.raises(spillway.InvalidArgumentError, match="pass (an integer from 0 to|0 or a number of seconds)"):
        spillway.Tier([tmp_path], job="ranges", **{name: value})
