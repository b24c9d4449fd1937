"""The programs for a machine with a GPU run on this one, so that time on a GPU is not spent on their mistakes: those of torch's optimizers
on the CPU, and those of spillway.Gpu on the test driver. What needs a real driver is read for names that the package does not have."""

import ast
import json
import pathlib
import subprocess
import sys
import tarfile

import pytest

import spillway

pytest.importorskip("torch")
sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "docs" / "tools"))
import measurements

HERE = pathlib.Path(__file__).resolve().parent
#: Programs with a main(), without the helpers and this file.
PROGRAMS = sorted(path.name for path in HERE.glob("*.py") if "__main__" in path.read_text() and path.name != pathlib.Path(__file__).name)


def run(environment, program, *arguments):
    done = subprocess.run([sys.executable, HERE / program, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("program", ["offload_bits.py", "offload_uses.py"])
def test_checks_of_the_torch_optimizers_hold_on_the_cpu(on_cpu, program):
    said = run(on_cpu, program)
    assert said.endswith("all checks passed\n") and said.count("\nok ") > 15


@pytest.mark.parametrize(
    "program, name", [("bench_adam", "adam"), ("bench_transfer", "transfer"), ("bench_tensors", "adam_tensors"), ("waiting", "waiting")]
)
def test_a_measurement_on_the_test_driver_writes_a_good_record(on_cpu, tmp_path, program, name):
    run(on_cpu, f"{program}.py")
    assert not measurements.faults(json.loads((tmp_path / f"gpu_{name}.json").read_text()))


def test_iterations_are_measured_and_a_kind_that_cannot_run_is_a_note(on_cpu, tmp_path):
    # DeepSpeed's own offload cannot run here in some versions, nor torchao's, which needs streams.
    run(on_cpu, "iteration.py", "gpu", "offload-forward", "torchao", "--seconds", "600")
    record = json.loads((tmp_path / "gpu_iteration.json").read_text())
    assert not measurements.faults(record)
    assert [row["case"]["kind"] for row in record["rows"]][:2] == ["gpu", "offload-forward"]
    assert len(record["rows"]) == 3 or any(note.startswith("torchao: not measured: ") for note in record["notes"])


def _unknown(text):
    """The attributes that a program asks of `spillway` and of a `gpu`, and which the package does not have."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = {"spillway": spillway, "gpu": spillway.Gpu}.get(node.value.id)
            modules = ("torch", "deepspeed", "window", "planner")
            if owner is not None and not hasattr(owner, node.attr) and not (owner is spillway and node.attr in modules):
                yield f"{node.value.id}.{node.attr}"


@pytest.mark.parametrize("program", sorted(path.name for path in HERE.glob("*.py")))
def test_a_program_names_what_the_package_has(program):
    assert not list(_unknown((HERE / program).read_text()))


def test_a_name_that_the_package_does_not_have_is_found():
    assert sorted(_unknown("gpu.link(again=True)\nspillway.Gpuu\nspillway.torch.offload\ngpu.info()")) == ["gpu.link", "spillway.Gpuu"]


def test_the_script_runs_every_program():
    script = (HERE / "run.sh").read_text()
    assert [program for program in PROGRAMS if f'/{program}"' not in script] == []
    steps = script.split("[ $# -gt 0 ] || set -- ")[1].split("\n")[0].split()
    assert steps[:3] == ["check", "bits", "uses"] and all(f"\n        {step}) " in script for step in steps)


def test_no_step_begins_after_the_minutes(on_cpu):
    done = subprocess.run(["sh", HERE / "run.sh", "--minutes", "0", "bits", "kernels"], env=on_cpu, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpu: bits: not run: the time is over\ngpu: kernels: not run: the time is over" in done.stdout


def test_the_script_runs_a_step_on_the_test_driver(on_cpu, tmp_path):
    done = subprocess.run(["sh", HERE / "run.sh", "--minutes", "9", "waiting"], env=on_cpu, capture_output=True, text=True)
    assert done.returncode == 0 and "gpu: waiting: ok" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "gpu_waiting.json").exists()


def test_the_archive_has_what_a_machine_without_a_network_needs(on_cpu, tmp_path):
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "some.whl").write_bytes(b"wheel")
    archive = tmp_path / "gpu.tgz"
    done = subprocess.run(["sh", HERE / "run.sh", "pack", archive, tmp_path / "wheels"], env=on_cpu, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(archive) as packed:
        names = set(packed.getnames())
    wanted = ["lib/libspillway.so", "wheels/some.whl", "Cargo.toml", "include/spillway.h", "packaging/python/spillway/gpu.py"]
    wanted += ["ffi_tests/gpu/run.sh", "ffi_tests/deepspeed/train.py", "examples_c/interleave.c"]
    assert {f"spillway/{name}" for name in wanted} <= names
