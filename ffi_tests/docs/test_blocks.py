"""Every code block of the docs and READMEs runs, compiles or is accepted; otherwise it gives a reason.
`make test` runs a sample of the Python blocks."""

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys

import pytest
from blocks import LANGUAGES, ROOT, all_blocks

BLOCKS = all_blocks()
# Number of blocks that this machine cannot run. A new one requires a decision: then change the number.
NOT_RUN = 7
KERNELS = r"\b(avx512|avx2|sve_bf16|sve|neon|scalar)\b"


def chosen(*languages):
    found = [block for block in BLOCKS if block.language in languages and block.not_run is None]
    return pytest.mark.parametrize("block", found, ids=[block.name for block in found])


def test_every_block_has_a_language_that_these_tests_know():
    unknown = [block.name for block in BLOCKS if block.language not in LANGUAGES]
    assert not unknown, f"say one of {LANGUAGES} after the fence of {unknown}"
    assert {"python", "c", "cpp", "sh", "json"} <= {block.language for block in BLOCKS}


def test_blocks_that_do_not_run_are_counted():
    found = [(block.name, block.not_run) for block in BLOCKS if block.not_run]
    assert len(found) == NOT_RUN, found


def test_blocks_of_code_are_fenced():
    """An indented block has no language; only formulas and file listings may be indented blocks."""
    for block in {block.page for block in BLOCKS}:
        text = re.sub(r"^```.*?^```", "", (ROOT / block).read_text(), flags=re.M | re.S)
        indented = re.findall(r"^    (?:\$|import |#include|pip |cargo |python |make |eval ).*", text, re.M)
        assert not indented, f"{block}: {indented}"


@pytest.mark.sampled(cases=20)
@chosen("python")
def test_python_blocks_run(block, tmp_path):
    run(block, [sys.executable, save(block, tmp_path, "py")], tmp_path)


@chosen("c", "cpp")
def test_c_and_cpp_blocks_compile_and_run(block, tmp_path, linked):
    compiler, standard = ("gcc", "-std=c99") if block.language == "c" else ("g++", "-std=c++17")
    program = tmp_path / "program"
    subprocess.run(
        [
            compiler,
            standard,
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Werror",
            "-I",
            ROOT / "include",
            save(block, tmp_path, block.language),
            "-o",
            program,
            "-L",
            linked,
            f"-Wl,-rpath,{linked}",
            "-lspillway",
            "-lm",
        ],
        check=True,
    )
    run(block, [program], tmp_path)


@chosen("json")
def test_json_blocks_are_accepted_by_what_reads_them(block, tmp_path):
    """A record by the docs, a report by the benchmarks, a configuration by DeepSpeed and Spillway."""
    found = json.loads(block.text)
    if "title" in found:
        import measurements

        assert not measurements.faults(found)
        return
    if "bench" in found:
        from spillway.bench import _report

        _report.read(save(block, tmp_path, "json"), found["bench"])
        return
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    from spillway.deepspeed import _settings

    zero = DeepSpeedZeroConfig(**found["zero_optimization"])
    _settings.refuse_unserved(_settings.read(found["spillway"]), zero)


@chosen("sh")
def test_commands_of_sh_blocks_exist(block, tmp_path):
    missing = [line for line in commands(block.text) if not exists(line)]
    assert not missing, f"{block.name}: {missing}"
    if "run" in block.words:
        subprocess.run(["sh", "-eu"], input=block.text, text=True, cwd=ROOT, check=True)


def save(block, folder, suffix):
    path = folder / f"block.{suffix}"
    path.write_text(block.text)
    return path


def run(block, command, folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "packaging" / "python"),
        "DS_ACCELERATOR": "cpu",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
    }
    environment.pop("SPILLWAY_DEEPSPEED", None)
    made = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=300)
    assert made.returncode == 0, made.stderr
    if block.output is not None:
        # Frameworks print lines of their own before the output.
        wanted = block.output.splitlines()
        printed = made.stdout.splitlines()[-len(wanted) :]
        assert [normal(line) for line in printed] == [normal(line) for line in wanted]


def normal(line):
    """A line without the parts that differ between machines."""
    return re.sub(KERNELS, "KERNEL", line)


def test_the_output_of_a_block_is_compared():
    assert normal("{'calls': 50} avx512") == normal("{'calls': 50} avx2") != normal("{'calls': 51} avx2")


# Commands of packages that a reader installs, or of the project after `make lib`.
KNOWN = {"deepspeed", "spillway", "pip", "python", "mpirun", "apt-get", "."}


def commands(text):
    """The commands of a script, without comments, assignments and line continuations."""
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        for part in re.split(r"\s*(?:&&|\||;)\s*", line):
            words = part.split()
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words.pop(0)
            if words:
                yield " ".join(words)


def exists(command):
    first, *rest = command.split()
    if first == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        return all(word in targets for word in rest if "=" not in word)
    files = [word for word in rest if re.fullmatch(r"(docs|ffi_tests|packaging|examples_c)/[\w./-]+", word)]
    if first == "pip":
        files += [word for word in rest if word.startswith("./")]
    if not all((ROOT / file).exists() for file in files):
        return False
    if first in ("cargo", "$SPILLWAY_PYTHON", "eval", "cd", "export", "cc"):
        return True
    if first.startswith("target/"):
        return pathlib.PurePath(first).name == "spillway"
    if "/" in first:
        return (ROOT / first).exists()
    return first in KNOWN or shutil.which(first) is not None


def test_a_command_that_does_not_exist_is_found():
    assert not exists("make nothing") and not exists("packaging/nothing.sh") and not exists("no-such-command --help")
    assert exists("make test") and exists("packaging/python_env.sh --export")
