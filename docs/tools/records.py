"""Shows the records of measurements, which lie beside the programs that made them, as pages of the site."""

import pathlib
import re

import measurements

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "records"
SHOWN = [*sorted((ROOT / "ffi_tests" / "deepspeed").glob("*.md")), ROOT / "ffi_tests" / "model" / "README.md"]
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#:\s]+)\)")


def page_of(path):
    """The name of a record's page."""
    return f"{path.parent.name}.md" if path.name == "README.md" else path.name


def write():
    """Writes the pages; links to other records stay links, links to other files become their names."""
    PAGES.mkdir(exist_ok=True)
    pages = {"measurements.md": measurements.page()}
    for path in SHOWN:

        def link(match):
            target = (path.parent / match[2]).resolve()
            return f"[{match[1]}]({page_of(target)})" if target in SHOWN else f"{match[1]} (`{target.relative_to(ROOT)}`)"

        pages[page_of(path)] = f"{_LINK.sub(link, path.read_text())}\n*Source: `{path.relative_to(ROOT)}`*\n"
    for old in {path.name for path in PAGES.glob("*.md")} - set(pages):
        (PAGES / old).unlink()
    for name, text in pages.items():
        page = PAGES / name
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def inside(name, text):
    """A page of docs/, with links to records turned into links to their pages or sections."""
    folder = (ROOT / "docs" / name).parent
    up = "../" * name.count("/")

    def link(match):
        target = (folder / match[2]).resolve()
        if target in SHOWN:
            return f"[{match[1]}]({up}records/{page_of(target)})"
        if target.parent == measurements.FOLDER and target.suffix == ".json":
            return f"[{match[1]}](#record-{target.stem})"
        if target.exists() and not target.is_relative_to(ROOT / "docs"):
            return f"`{target.relative_to(ROOT)}`" if match[1].startswith("`") else f"{match[1]} (`{target.relative_to(ROOT)}`)"
        return match[0]

    return _LINK.sub(link, text)
