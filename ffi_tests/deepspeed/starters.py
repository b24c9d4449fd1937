"""Fixtures that start runs of DeepSpeed, for the conftest.py of each folder that has such runs."""

import os
import pathlib
import subprocess
import sys

import pytest

__all__ = ["native_starter", "overlay", "starter"]

ROOT = pathlib.Path(__file__).resolve().parents[2]
CACHE = pathlib.Path(sys.prefix).parent

os.environ["DS_ACCELERATOR"] = "cpu"


@pytest.fixture(scope="session")
def overlay(tmp_path_factory):
    """A python in which the spillway wheel is installed and activated by its .pth."""
    folder = tmp_path_factory.mktemp("overlay")
    environment = {**os.environ, "SPILLWAY_PREBUILT_LIB": os.environ["SPILLWAY_LIBRARY"], "SPILLWAY_CACHE": str(CACHE)}
    subprocess.run([ROOT / "packaging" / "python_overlay.sh", folder], check=True, env=environment, stdout=subprocess.DEVNULL)
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def starter(overlay):
    """Starts runs with Spillway quickly; see forked.py."""
    from forked import Starter

    starter = Starter(overlay, SPILLWAY_DEEPSPEED="1")
    yield starter
    starter.close()


@pytest.fixture(scope="session")
def native_starter(overlay):
    """The same without Spillway."""
    from forked import Starter

    starter = Starter(overlay)
    yield starter
    starter.close()
