"""Runs the programs of this folder against the package in this checkout and the library that cargo built, unless the environment names
others."""

import os
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "packaging" / "python")]
os.environ.setdefault(
    "SPILLWAY_LIBRARY", str(pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "release" / "libspillway.so")
)


@pytest.fixture
def on_cpu(tmp_path):
    """The environment in which the programs run without a GPU, at small sizes."""
    driver = pathlib.Path(os.environ["SPILLWAY_LIBRARY"]).parent / "libfakecuda.so"
    if not driver.exists():
        pytest.skip(f"{driver.name} is not built: cargo build --release --package fakecuda")
    path = os.pathsep.join([str(ROOT / "packaging" / "python"), str(HERE)])
    further = {"SPILLWAY_CUDA_LIBRARY": str(driver), "SPILLWAY_PROFILE": str(tmp_path / "profile"), "SPILLWAY_PYTHON": sys.executable}
    return {**os.environ, **further, "DEV": "cpu", "QUICK": "1", "BENCH": str(tmp_path), "LOGS": str(tmp_path), "PYTHONPATH": path}
