"""Paths of Spillway and of megatron-core for the tests of spillway.megatron. packaging/python_env.sh installs the versions of
megatron-core, each in a folder of its own, without what they depend on: HybridDeviceOptimizer needs only torch and numpy.
packaging/newer_python.sh installs those that need a newer Python, when a test asks for them."""

import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CACHE = pathlib.Path(sys.prefix).parent
# test_newer_versions.py runs tests with a version of its own.
NEWEST = os.environ.get("SPILLWAY_TEST_MEGATRON", "0.16.1")

os.environ.pop("SPILLWAY_MEGATRON", None)
os.environ.setdefault(
    "SPILLWAY_LIBRARY", str(pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "release" / "libspillway.so")
)
sys.path[:0] = [str(ROOT / "packaging" / "python"), str(pathlib.Path(__file__).parent), str(CACHE / f"megatron-core-{NEWEST}")]
# What the tests of several folders share.
sys.path += [str(ROOT / "ffi_tests" / "torch"), str(ROOT / "packaging" / "python" / "tests")]

from sampled import pytest_configure  # noqa: F401


@pytest.fixture(scope="session")
def megatron_core():
    """The folder of a version: megatron_core("0.12.3"); by default of the newest."""
    return lambda version=None: CACHE / f"megatron-core-{version or NEWEST}"


@pytest.fixture
def cpu_as_gpu(monkeypatch):
    """CUDA's streams and events on the CPU."""
    from spillway.bench import _gpu_on_cpu

    _gpu_on_cpu.install(monkeypatch.setattr)


@pytest.fixture
def installed(cpu_as_gpu):
    """spillway.megatron, installed for one test."""
    import spillway.megatron
    from spillway.megatron import _hybrid, _versions

    _hybrid.counts.update(dict.fromkeys(_hybrid.counts, 0))
    _versions._left.clear()
    spillway.megatron.install()
    yield spillway.megatron
    spillway.megatron.uninstall()
