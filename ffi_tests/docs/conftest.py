"""Fixtures with the paths of the package and of the library that cargo built."""

import os
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
RELEASE = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "release"

os.environ.setdefault("SPILLWAY_LIBRARY", str(RELEASE / "libspillway.so"))
sys.path[:0] = [str(ROOT / "packaging" / "python"), str(ROOT / "docs" / "tools"), str(pathlib.Path(__file__).parent)]
# sampled.py
sys.path.append(str(ROOT / "packaging" / "python" / "tests"))

from sampled import pytest_configure  # noqa: F401


@pytest.fixture(scope="session")
def linked(tmp_path_factory):
    """A directory with the library under the names that the linker and the loader look for."""
    folder = tmp_path_factory.mktemp("lib")
    headers = [ROOT / "include" / "spillway.h", ROOT / "include" / "spillway" / "base.h"]
    text = "".join(path.read_text() for path in headers if path.exists())
    abi = re.search(r"#define SPW_ABI_VERSION (\d+)", text)[1]
    for name in ("libspillway.so", f"libspillway.so.{abi}"):
        (folder / name).symlink_to(os.environ["SPILLWAY_LIBRARY"])
    return folder


@pytest.fixture(scope="session")
def tool():
    """The command line tool."""
    path = pathlib.Path(os.environ["SPILLWAY_LIBRARY"]).parent / "spillway"
    assert path.exists(), f"{path} is not built: cargo build --release -p spillway-cli"
    return str(path)
