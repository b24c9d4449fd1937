"""Proves that importing spillway is fast, and that a missing or wrong library raises a typed error that names it."""

import ast
import os
import re
import shutil
import subprocess
import sys

import pytest


def run(code, environment, **extra):
    # Not in the directory of the tests: Python imports packages of the working directory before all others.
    return subprocess.run([sys.executable, "-c", code], env={**environment, **extra}, capture_output=True, text=True, cwd="/")


def test_import_needs_neither_torch_nor_numpy_nor_the_library(child_environment):
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'deepspeed'): sys.modules[name] = None\n"
        "import spillway, spillway.deepspeed, spillway.megatron\n"
        "print('ok')"
    )
    done = run(code, child_environment, SPILLWAY_LIBRARY="/nonexistent/libspillway.so")
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_a_step_needs_no_torch(child_environment):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy, spillway\n"
        "arrays = [numpy.ones(8, numpy.float32) for _ in range(4)]\n"
        "spillway.Adam().step([tuple(arrays)])\n"
        "assert (arrays[0] != 1).all()\n"
        "del sys.modules['torch']; assert 'torch' not in sys.modules"
    )
    done = run(code, child_environment)
    assert done.returncode == 0, done.stderr


def test_a_missing_library_is_named(child_environment):
    code = "import spillway\ntry: spillway.kernel_name()\nexcept spillway.LibraryNotFoundError as error: print(error)"
    done = run(code, child_environment, SPILLWAY_LIBRARY="/nonexistent/libspillway.so")
    assert "/nonexistent/libspillway.so" in done.stdout and "SPILLWAY_LIBRARY" in done.stdout, done.stderr


def test_another_abi_version_is_refused_before_any_other_call(child_environment, tmp_path):
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "other.c").write_text("unsigned spw_abi_version(void) { return 4711; }\nint spw_get_info(void *i) { __builtin_trap(); }\n")
    library = tmp_path / "libother.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "other.c"], check=True)
    code = "import spillway\ntry: spillway.kernel_name()\nexcept ImportError as error: print(error)"
    done = run(code, child_environment, SPILLWAY_LIBRARY=str(library))
    assert "ABI version 4711" in done.stdout, done.stderr


HOOKS = ("deepspeed", "megatron")


def pth_line(repository, framework):
    """The line of the .pth file for a framework. Python runs each line by itself."""
    lines = (repository / "packaging" / "python" / "spillway.pth").read_text().splitlines()
    assert len(lines) == len(HOOKS) and all(line.startswith("import ") for line in lines)
    return lines[HOOKS.index(framework)]


@pytest.mark.parametrize("framework", HOOKS)
def test_a_pth_line_imports_one_module_of_spillway_and_none_when_off(repository, child_environment, framework):
    line, variable = pth_line(repository, framework), f"SPILLWAY_{framework.upper()}"
    code = f"import sys\nbefore = set(sys.modules)\n{line}\nprint(sorted(set(sys.modules) - before))"
    off = {name: value for name, value in child_environment.items() if name != variable}
    assert run(code, off).stdout == "[]\n"
    assert run(code, off, **{variable: "0"}).stdout == "[]\n"
    assert run(code, off, **{variable: "1"}).stdout == "['_spillway_hook']\n"
    assert run(code, off, **{variable: "require"}).stdout == "['_spillway_hook']\n"


@pytest.mark.parametrize("framework", HOOKS)
def test_the_hook_is_installed_by_the_import_of_its_framework(repository, child_environment, tmp_path, framework):
    line, variable = pth_line(repository, framework), f"SPILLWAY_{framework.upper()}"
    (tmp_path / f"{framework}.py").write_text("")
    code = (
        f"import sys\n{line}\nsys.path.insert(0, {str(tmp_path)!r})\nhook = 'spillway.{framework}._hook'\n"
        f"import json, email\nassert hook not in sys.modules\nimport {framework}\nassert hook in sys.modules\n"
        "print(sum(type(finder).__name__ == 'ImportHook' for finder in sys.meta_path))"
    )
    assert run(code, child_environment, **{variable: "1"}).stdout == "1\n"


@pytest.mark.parametrize("framework", HOOKS)
def test_a_hook_that_cannot_be_installed_ends_a_process_that_requires_it(repository, child_environment, tmp_path, framework):
    line, variable = pth_line(repository, framework), f"SPILLWAY_{framework.upper()}"
    (tmp_path / "spillway").mkdir()
    (tmp_path / "spillway" / "__init__.py").write_text("raise OSError('half installed')")
    (tmp_path / f"{framework}.py").write_text("")
    # Python runs the lines of such files in this way: it prints an error, and the process continues.
    code = (
        f"import traceback\ntry:\n    exec({line!r})\nexcept Exception:\n    traceback.print_exc()\n"
        f"print('goes on', flush=True)\nimport {framework}\nprint('imported')"
    )
    package = repository / "packaging" / "python"
    (tmp_path / "_spillway_hook.py").write_text((package / "_spillway_hook.py").read_text())
    broken = {**child_environment, "PYTHONPATH": str(tmp_path)}
    asked = run(code, broken, **{variable: "1"})
    assert (asked.returncode, asked.stdout) == (0, "goes on\nimported\n") and "half installed" in asked.stderr
    required = run(code, broken, **{variable: "require"})
    assert (required.returncode, required.stdout) == (1, "goes on\n")
    assert "half installed" in required.stderr and f"{variable}=require" in required.stderr
    (tmp_path / "_spillway_hook.py").write_text("raise OSError('half copied')")
    required = run(code, broken, **{variable: "require"})
    assert (required.returncode, required.stdout) == (1, "") and "half copied" in required.stderr
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / f"{framework}.py").write_text("")
    whole = {**child_environment, "PYTHONPATH": f"{package}:{tmp_path / 'empty'}"}
    assert run(code, whole, **{variable: "require"}).stdout == "goes on\nimported\n"


@pytest.mark.parametrize("framework", HOOKS)
def test_a_library_that_cannot_be_loaded_ends_a_process_that_requires_it(repository, child_environment, tmp_path, framework):
    line, variable = pth_line(repository, framework), f"SPILLWAY_{framework.upper()}"
    (tmp_path / f"{framework}.py").write_text("")
    code = f"import sys\n{line}\nsys.path.insert(0, {str(tmp_path)!r})\nprint('goes on', flush=True)\nimport json\nREST"
    without = {**child_environment, "SPILLWAY_LIBRARY": "/nowhere/libspillway.so"}
    required = run(code.replace("REST", f"import {framework}; print('imported')"), without, **{variable: "require"})
    assert (required.returncode, required.stdout) == (1, "goes on\n")
    said = required.stderr.splitlines()[-1]
    assert f"{variable}=require" in said and "cannot load /nowhere/libspillway.so" in said and said.endswith("; the process ends")
    assert run(code.replace("REST", f"import {framework}; print('imported')"), without, **{variable: "1"}).stdout == "goes on\nimported\n"
    # A process without the framework does not need the library.
    assert run(code.replace("REST", "print('spillway' in sys.modules)"), without, **{variable: "require"}).stdout == "goes on\nFalse\n"


def test_a_hook_works_beside_finders_of_an_older_kind(child_environment):
    """Up to Python 3.11 a finder may have find_module alone, and a loader load_module alone."""
    code = """
import sys, types
from spillway._import_hook import ImportHook

class Loader:
    def load_module(self, name):
        sys.modules[name] = types.ModuleType(name)
        return sys.modules[name]

class Finder:
    def find_module(self, name, path=None):
        return Loader() if name == "chosen" else None

sys.meta_path.insert(0, Finder())
ImportHook(lambda name: name in ("chosen", "fractions"), lambda module: setattr(module, "patched", True)).insert()
import fractions
print(fractions.patched)
if sys.version_info < (3, 12):
    import chosen
    assert chosen.patched
"""
    done = run(code, child_environment, PYTHONWARNINGS="ignore")
    assert done.stdout == "True\n", done.stderr


def test_the_oldest_python_that_the_package_asks_for_reads_every_module(repository):
    project = (repository / "packaging" / "python" / "pyproject.toml").read_text()
    oldest = re.search(r'requires-python = ">=3\.(\d+)"', project)
    modules = [*(repository / "packaging" / "python" / "spillway").rglob("*.py"), repository / "packaging" / "python" / "_spillway_hook.py"]
    assert len(modules) > 20
    for module in modules:
        ast.parse(module.read_text(), str(module), feature_version=(3, int(oldest[1])))
