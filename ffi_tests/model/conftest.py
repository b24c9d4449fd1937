"""Paths of the package and of the library that cargo built."""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "packaging" / "python"), str(ROOT / "ffi_tests")]
os.environ.setdefault(
    "SPILLWAY_LIBRARY", str(pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "release" / "libspillway.so")
)
