"""Tests of the package and of its torch optimizers on newer versions of Python, with the newest torch.

Each version takes 5 GB, so there is one here. NEWER_PYTHONS names others, such as "3.12 3.13". `make test` runs one of the two folders with
each of them."""

import os

import pytest
from newer_python import ROOT, newer_python, run_tests

VERSIONS = os.environ.get("NEWER_PYTHONS", "3.12").split()
PACKAGE = ("test_import.py", "test_optim.py", "test_signals.py")
TORCH = ("test_offload.py", "test_flow.py", "test_tier.py")
# One of ten random trainings.
SOME = "not (that_waits or end_later) or 0]"


@pytest.mark.sampled(cases=len(VERSIONS))
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder, files", [("packaging/python/tests", PACKAGE), ("ffi_tests/torch", TORCH)], ids=["package", "torch"])
def test_a_newer_python(version, folder, files):
    assert run_tests(newer_python(version), *(ROOT / folder / file for file in files), "-k", SOME) > 70
