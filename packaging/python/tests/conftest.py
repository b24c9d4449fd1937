"""Runs these tests against the package in this checkout and the library that cargo built, unless
the environment names others."""

import os
import pathlib
import sys

import pytest
from sampled import pytest_configure  # noqa: F401

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
REPOSITORY = PACKAGE.parents[1]

sys.path.insert(0, str(PACKAGE))
os.environ.setdefault(
    "SPILLWAY_LIBRARY", str(pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or REPOSITORY / "target") / "release" / "libspillway.so")
)


@pytest.fixture(scope="session")
def repository():
    return REPOSITORY


@pytest.fixture(scope="session")
def fake_driver():
    """The fake CUDA driver, which replaces the system's driver for this process."""
    path = pathlib.Path(os.environ["SPILLWAY_LIBRARY"]).parent / "libfakecuda.so"
    if not path.exists():
        pytest.skip(f"{path.name} is not built: cargo build --release --package fakecuda")
    os.environ["SPILLWAY_CUDA_LIBRARY"] = str(path)
    return str(path)


@pytest.fixture
def child_environment():
    """The environment for a fresh interpreter that imports this package."""
    return {**os.environ, "PYTHONPATH": str(PACKAGE)}
