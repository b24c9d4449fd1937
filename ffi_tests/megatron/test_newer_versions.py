"""The tests of training, of checkpoints and of the store, with the versions of megatron-core that need a newer Python than the others."""

import pathlib

import pytest
from newer_python import newer_python, run_tests
from test_megatron_hook import NEWER

FILES = ("test_hybrid.py", "test_megatron_distributed.py", "test_checkpoint.py")


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("version", NEWER)
def test_a_newer_version_trains_as_the_others(version):
    python = newer_python("3.12", f"megatron-core=={version}")
    files = [pathlib.Path(__file__).with_name(name) for name in FILES]
    assert run_tests(python, *files, SPILLWAY_TEST_MEGATRON=version) > 60
