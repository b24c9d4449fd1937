"""The version. A wheel has a file with a constant instead, which setup.py writes."""

import pathlib
import re

_MANIFEST = pathlib.Path(__file__).resolve().parents[3] / "Cargo.toml"
_found = re.search(r'^version = "(.*)"$', _MANIFEST.read_text(), re.MULTILINE)
assert _found is not None, f"{_MANIFEST} has no version"
VERSION: str = _found[1]
