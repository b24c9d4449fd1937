"""The programs of other languages that docs/c.md includes: each does a step of Adam, and shows the text of a failed call."""

import os
import shutil
import subprocess

import pytest
from blocks import DOCS, ROOT

FOLDER = ROOT / "examples_c" / "languages"
#: The tools of each program; the tests of this repository need LuaJIT, and the others where they are installed.
TOOLS = {"adam.lua": "luajit", "adam.f90": "gfortran", "adam.go": "go", "adam.rb": "ruby", "adam.js": "node"}


def test_the_docs_include_every_program():
    page = (DOCS / "c.md").read_text()
    programs = sorted(path.name for path in FOLDER.iterdir())
    assert programs == sorted(TOOLS)
    assert all(page.count(f"```{{literalinclude}} ../examples_c/languages/{name}\n") == 1 for name in programs)


@pytest.mark.parametrize("name", TOOLS)
def test_a_program_steps_and_shows_the_text_of_a_failed_call(name, linked, tmp_path):
    if shutil.which(TOOLS[name]) is None:
        assert TOOLS[name] != "luajit", "luajit is missing: run packaging/system_packages.sh"
        pytest.skip(f"{TOOLS[name]} is not installed")
    source, library = FOLDER / name, linked / "libspillway.so"
    flags = f"-L{linked} -Wl,-rpath,{linked}"
    environment = {**os.environ, "GO111MODULE": "off", "GOCACHE": str(tmp_path / "go"), "CGO_CFLAGS": f"-I{ROOT / 'include'}"}
    environment["CGO_LDFLAGS"] = flags
    program = tmp_path / "program"
    if name == "adam.f90":
        built = [
            "gfortran",
            "-std=f2018",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-J",
            tmp_path,
            source,
            *flags.split(),
            "-lspillway",
            "-o",
            program,
        ]
        run(built, environment)
        command = [program]
    elif name == "adam.go":
        run(["go", "vet", source], environment)
        run(["go", "build", "-o", program, source], environment)
        command = [program]
    else:
        if name == "adam.js" and subprocess.run(["node", "-e", "require('koffi')"], capture_output=True).returncode:
            pytest.skip("koffi is not installed")
        command = [TOOLS[name], source, library]
    value, text = run(command, environment).splitlines()
    assert value == "0.9000" and text.startswith("options.grad_scale: is 0, as in a spw_adam_options that was never initialised")


def run(command, environment):
    done = subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
