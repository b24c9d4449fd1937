"""Paths of Spillway for the tests of its torch optimizers."""

import os
import pathlib
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]

os.environ.setdefault(
    "SPILLWAY_LIBRARY", str(pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "release" / "libspillway.so")
)
sys.path[:0] = [str(ROOT / "packaging" / "python"), str(ROOT / "ffi_tests" / "torch")]
# interrupts.py, sampled.py
sys.path.append(str(ROOT / "packaging" / "python" / "tests"))

from sampled import pytest_configure  # noqa: F401


@pytest.fixture(autouse=True)
def gradients():
    """Tests of interrupted steps may raise while `no_grad` ends, which leaves gradients off for the tests after them."""
    yield
    torch.set_grad_enabled(True)
