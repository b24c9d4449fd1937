"""Fixtures with the paths of Spillway, of DeepSpeed's oldest and newest version, and of DeepSpeed's compiled ops.

packaging/python_env.sh creates the environment. Compiled ops are built once into its cache."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CACHE = pathlib.Path(sys.prefix).parent

os.environ.pop("SPILLWAY_DEEPSPEED", None)
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(CACHE / "torch_extensions"))
os.environ.setdefault(
    "SPILLWAY_LIBRARY", str(pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "release" / "libspillway.so")
)
os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
sys.path[:0] = [str(ROOT / "packaging" / "python"), str(pathlib.Path(__file__).parent)]
# interrupts.py, sampled.py
sys.path.append(str(ROOT / "packaging" / "python" / "tests"))

from sampled import pytest_configure  # noqa: F401
from starters import *  # noqa: F403


@pytest.fixture(scope="session", autouse=True)
def processor():
    """What DeepSpeed asks of the processor for each optimizer, found once."""
    import cpuinfo
    from forked import remember_processor

    remember_processor()
    return cpuinfo.get_cpu_info()


@pytest.fixture(scope="session")
def oldest_deepspeed():
    """The folder of the oldest supported DeepSpeed."""
    return pathlib.Path(os.environ.get("SPILLWAY_OLD_DEEPSPEED") or CACHE / "deepspeed-0.14.0")


@pytest.fixture(scope="session")
def older_deepspeed():
    """The folder of an older version: older_deepspeed("0.16.9")."""
    return lambda version: CACHE / f"deepspeed-{version}"


@pytest.fixture(scope="session")
def compiled():
    """DeepSpeed's op, compiled by DeepSpeed: compiled("cpu_adam")."""
    need_compiler()
    from compiled_ops import newest

    def load(op):
        if op == "async_io":
            need_libaio()
        return newest(op)

    return load


@pytest.fixture(scope="session")
def compiled_oldest(oldest_deepspeed):
    """The oldest version's op from its own sources: compiled_oldest("cpu_lion")."""
    need_compiler()
    from compiled_ops import oldest

    return lambda op: oldest(op, oldest_deepspeed)


def need_compiler():
    if not shutil.which(os.environ.get("CXX") or "c++"):
        pytest.skip("no C++ compiler, so there is no compiled op of DeepSpeed to compare with")


def need_libaio():
    if not os.path.exists("/usr/include/libaio.h"):
        pytest.skip("no libaio.h (apt-get install libaio-dev), so there is no compiled async_io to compare with")


@pytest.fixture(scope="session")
def served():
    """Spillway's op module, as DeepSpeed receives it: served("cpu_adam")."""
    from spillway.deepspeed import _hook

    return _hook.module_of


@pytest.fixture
def run_script(overlay, processor, tmp_path):
    """Runs a script in a process with SPILLWAY_DEEPSPEED=1 and returns its output. The script is a file that does
    not mention Spillway.

    DeepSpeed gets an empty folder for compiled ops, and the test fails if it leaves anything there."""
    head = f"import cpuinfo\ncpuinfo.get_cpu_info = lambda: {processor}\n"

    def run(text, *paths, accelerator="cpu", **extra):
        extra = {"DS_ACCELERATOR": accelerator, "PYTHONPATH": os.pathsep.join(map(str, paths)), **extra}
        return _without_compiled_ops(
            tmp_path,
            head + text,
            extra,
            lambda script, environment: subprocess.run([overlay, script], env=environment, capture_output=True, text=True, cwd=tmp_path),
        )

    return run


@pytest.fixture
def run_forked(starter, tmp_path):
    """Like run_script with the newest DeepSpeed, in a process that has already imported it."""

    def run(text, *paths, **extra):
        head = f"import os, sys; os.chdir({str(tmp_path)!r}); sys.path[:0] = {list(map(str, paths))}\n"
        return _without_compiled_ops(
            tmp_path, head + text, {"OMP_NUM_THREADS": "1", **extra}, lambda script, environment: starter.run([script], environment, 300)
        )

    return run


def _without_compiled_ops(folder, text, extra, start):
    script, extensions = folder / "script.py", folder / "extensions"
    script.write_text(text)
    extensions.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "SPILLWAY_LIBRARY"}
    environment.update({"SPILLWAY_DEEPSPEED": "1", "TORCH_EXTENSIONS_DIR": str(extensions), **extra})
    done = start(script, environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert not list(extensions.iterdir()), "DeepSpeed compiled something"
    return done.stdout
