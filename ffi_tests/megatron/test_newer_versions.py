"""The tests of training, of checkpoints and of the store, with the newest megatron-core, which needs a newer Python."""

import pathlib

from newer_python import newer_python, run_tests
from test_megatron_hook import NEWER

FILES = ("test_hybrid.py", "test_megatron_distributed.py", "test_checkpoint.py")


def test_the_newest_version_trains_as_the_others():
    python = newer_python("3.12", f"megatron-core=={NEWER[-1]}")
    files = [pathlib.Path(__file__).with_name(name) for name in FILES]
    assert run_tests(python, *files, SPILLWAY_TEST_MEGATRON=NEWER[-1]) > 60
