"""Each name of the glossary's second table is defined where the table says, and nowhere else."""

import re

import pytest
from blocks import DOCS, ROOT

SOURCES = ("src", "kernels/src", "planner/src", "stores/src", "cli/src", "packaging/preload/src", "packaging/python/spillway")
ROW = re.compile(r"^\| `(\w+)` \| (.+?) \|(.*)\|$", re.M)
PLACES = {name: set(re.findall(r"`([^`]+)`", places)) for name, _, places in ROW.findall((DOCS / "glossary.md").read_text())}


def _definitions(text, name):
    """The definitions of `name` in Rust or Python, private ones of Python included."""
    kinds = "struct|enum|trait|union|type|fn|class|def"
    return re.findall(rf"^[ \t]*(?:pub(?:\([^)]*\))? |async |const |unsafe )*(?:{kinds}) _?{name}\b", text, re.M)


@pytest.fixture(scope="module")
def texts():
    files = [path for folder in SOURCES for kind in ("rs", "py") for path in (ROOT / folder).rglob(f"*.{kind}")]
    return {str(path.relative_to(ROOT)): path.read_text() for path in files if "tests" not in str(path.relative_to(ROOT))}


def test_the_table_is_read():
    assert len(PLACES) > 8 and sum(map(len, PLACES.values())) > 8


@pytest.mark.parametrize("name", PLACES)
def test_a_name_means_one_thing(texts, name):
    found = {path for path, text in texts.items() if _definitions(text, name)}
    assert found == PLACES[name], "give what means something else another name, or list the place in docs/glossary.md"


@pytest.mark.parametrize(
    "text", ["struct Part {", "    pub(in crate::tier) enum Part<T> {", "pub type Part = u32;", "class _Part:", "class Part(NamedTuple):"]
)
def test_a_definition_is_found(text):
    assert len(_definitions(text, "Part")) == 1
    assert not _definitions(text, "Par") and not _definitions("PartOf, Part { from }, impl Part", "Part")
