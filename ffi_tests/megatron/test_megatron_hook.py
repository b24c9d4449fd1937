"""SPILLWAY_MEGATRON=1 alone puts Spillway under Megatron, in every tested version of megatron-core, in the process and in a spawned worker;
install() has the same effect after the import."""

import os
import pathlib
import subprocess
import sys

import pytest
from newer_python import newer_python

from spillway.megatron import _versions

ROOT = pathlib.Path(__file__).resolve().parents[2]
#: They need Python 3.12.
NEWER = [version for version in _versions.TRIED if int(version.split(".")[1]) >= 17]
TRAIN = """
import sys, torch
from spillway.bench import _gpu_on_cpu as gpu
gpu.install()
import hybrid
def trained():
    params = hybrid.parameters()
    return hybrid.train(hybrid.build(params, fraction=0.5), params, range(4))
"""

COMPARED = (
    TRAIN
    + """
import spillway.megatron, megatron.core
ours, found = trained(), spillway.megatron.active()
spillway.megatron.uninstall()
for one, other in zip(ours, trained(), strict=True):
    torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)
spillway.megatron.install()
assert hybrid.same(trained(), ours)
print(megatron.core.__version__, found["optimizers"], found["steps"], megatron.core.optimizer.CPUAdam.__module__)
"""
)


@pytest.fixture
def run(megatron_core, tmp_path):
    """Runs a script as with an installed wheel: Python runs the lines of its .pth file at the start."""

    def run(text, version=None, python=sys.executable, **extra):
        script = tmp_path / "script.py"
        script.write_text(text)
        pth = ROOT / "packaging" / "python" / "spillway.pth"
        (tmp_path / "sitecustomize.py").write_text(f"for line in open({str(pth)!r}): exec(line)\n")
        core = pathlib.Path(python).parents[2] / f"megatron-core-{version}" if version else megatron_core()
        paths = [tmp_path, ROOT / "packaging" / "python", pathlib.Path(__file__).parent, core]
        environment = {**os.environ, "SPILLWAY_MEGATRON": "1", "PYTHONPATH": os.pathsep.join(map(str, paths)), **extra}
        done = subprocess.run([python, "-W", "ignore", script], env=environment, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    return run


@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize("version", _versions.TRIED)
def test_every_version_of_the_table_trains_by_the_variable_alone(run, version):
    python = newer_python("3.12", f"megatron-core=={version}") if version in NEWER else sys.executable
    assert f"{version} 1 4 spillway.torch\n" in run(COMPARED, version, python)


def test_the_table_names_the_versions_that_are_installed(megatron_core):
    text = (ROOT / "packaging" / "python_env.sh").read_text()
    older = [version for version in _versions.TRIED if version not in NEWER]
    assert f"megatron_core='{' '.join(older)}'" in text and megatron_core(older[-1]) == megatron_core()


def test_a_spawned_worker(run):
    out = run(
        TRAIN
        + """
import multiprocessing
def work(queue):
    trained()
    queue.put(sys.modules["spillway.megatron"].active()["steps"])
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    worker = context.Process(target=work, args=(queue,))
    worker.start()
    print("worker:", queue.get(timeout=120))
    worker.join()
"""
    )
    assert "worker: 4" in out


def test_without_the_variable_nothing_changes(run):
    out = run(
        TRAIN
        + """
trained()
import megatron.core.optimizer
print("spillway.megatron" in sys.modules, megatron.core.optimizer.CPUAdam)
""",
        SPILLWAY_MEGATRON="0",
    )
    assert out == "False <class 'torch.optim.adamw.AdamW'>\n"


def test_install_reaches_modules_that_were_imported_before(run):
    out = run(
        TRAIN
        + """
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
import megatron.core.optimizer, spillway.megatron
for _ in range(2):
    spillway.megatron.install()
trained()
print(spillway.megatron.active()["optimizers"], megatron.core.optimizer.CPUAdam.__module__)
for _ in range(2):
    spillway.megatron.uninstall()
trained()
print(spillway.megatron.active()["optimizers"], megatron.core.optimizer.CPUAdam.__module__)
""",
        SPILLWAY_MEGATRON="0",
    )
    assert out == "1 spillway.torch\n1 torch.optim.adamw\n"


def test_a_job_without_megatron_imports_nothing(run):
    assert run("import sys; print('torch' in sys.modules, 'spillway.megatron._hook' in sys.modules)") == "False False\n"
