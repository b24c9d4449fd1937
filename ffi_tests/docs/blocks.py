"""The code blocks of the docs and READMEs. A block's first line has a language and words that say how
the block is tested."""

import pathlib
import re
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GENERATED = ("_build", "plots", "records", "c")
LANGUAGES = ("python", "c", "cpp", "sh", "json", "text")

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)(?P=ticks) *$", re.M | re.S)


class Block(NamedTuple):
    """A block: its page, line, language, further words, reason not to run it, and text; `output` is the expected
    output that follows it."""

    page: str
    line: int
    language: str
    words: tuple
    not_run: str | None
    text: str
    output: str | None = None

    @property
    def name(self):
        return f"{self.page}:{self.line}"


def pages():
    """The pages with code blocks, generated ones left out."""
    inside = [path for path in DOCS.rglob("*.md") if not set(path.relative_to(DOCS).parts[:-1]) & set(GENERATED)]
    others = ["README.md", "packaging/python/README.md", "ffi_tests/README.md", "ffi_tests/model/README.md"]
    return sorted([*inside, *(ROOT / name for name in others)])


def of(path):
    """The blocks of a page. An expected output belongs to the block before it."""
    text, found = path.read_text(), []
    for match in _FENCE.finditer(text):
        info = match["info"].strip()
        if info.startswith("{"):
            continue
        reason = re.search(r'not-run="([^"]+)"', info)
        language, *words = re.sub(r'not-run="[^"]+"', "", info).split() or ("",)
        lines = [line[len(match["indent"]) :] for line in match["body"].splitlines()]
        block = Block(
            str(path.relative_to(ROOT)),
            text.count("\n", 0, match.start()) + 1,
            language,
            tuple(words),
            reason[1] if reason else None,
            "\n".join(lines) + "\n",
        )
        if language == "text" and "output" in words:
            found[-1] = found[-1]._replace(output=block.text)
        found.append(block)
    return found


def all_blocks():
    """The blocks of all pages."""
    return [block for path in pages() for block in of(path)]
