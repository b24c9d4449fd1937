"""Turns the package's docstrings into reStructuredText for autodoc: Google's sections, Markdown tables, lists, code in
backticks and code blocks that are indented by four spaces."""

import re

# Sections of named items, and sections of text.
_ITEMS, _TEXTS = ("Args", "Attributes", "Raises"), ("Returns", "Example", "Conventions")


def converted(lines):
    """The lines in reStructuredText."""
    made, at = [], 0
    while at < len(lines):
        line = lines[at]
        if line.removesuffix(":") in _ITEMS + _TEXTS and line.endswith(":"):
            block, at = _indented(lines, at + 1)
            made += _section(line.removesuffix(":"), block)
        elif line.startswith("| "):
            rows = []
            while at < len(lines) and lines[at].startswith("|"):
                rows.append([cell.strip() for cell in lines[at].strip().strip("|").split("|")])
                at += 1
            made += _table(rows)
        elif line.startswith("    "):
            block, at = _indented(lines, at)
            made += ["", ".. code-block:: text", "", *block, ""]
        elif line.startswith("- "):
            made.append("")
            while at < len(lines) and (lines[at].startswith(("- ", "  ")) and not lines[at].startswith("    ")):
                made.append(_inline(lines[at]))
                at += 1
            made.append("")
        else:
            made.append(_inline(line))
            at += 1
    return made


def _indented(lines, at):
    """The block of indented and empty lines at `at`, and the place behind it."""
    start = at
    while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
        at += 1
    return lines[start:at], at


def _section(name, block):
    inner = [line[4:] for line in block]
    if name == "Example" and not any(line.startswith("    ") and inner[0][-1:] == ":" for line in inner):
        # Code alone.
        return ["", f"**{name}**", "", ".. code-block:: python", "", *block, ""]
    if name in _TEXTS:
        return ["", f"**{name}**", "", *converted(inner), ""]
    made = ["", f"**{name}**", ""]
    for line in inner:
        item = re.match(r"([\w, ]+): (.*)", line) if not line.startswith(" ") else None
        if item:
            names = ", ".join(f"``{one.strip()}``" for one in item[1].split(","))
            made.append(f"- {names}: {_inline(item[2])}")
        elif line.strip():
            made.append("  " + _inline(line.strip()))
    return [*made, ""]


def _table(rows):
    head, *body = [row for row in rows if not all(set(cell) <= set("-: ") for cell in row)]
    made = ["", ".. list-table::", "   :header-rows: 1", ""]
    for row in (head, *body):
        for number, cell in enumerate(row):
            made.append(("   * - " if number == 0 else "     - ") + _inline(cell))
    return [*made, ""]


def _inline(line):
    """`code` as reStructuredText's literal; characters that it gives a meaning are escaped outside."""
    parts = re.split(r"`+([^`]+)`+", line)
    for number, part in enumerate(parts):
        if number % 2:
            parts[number] = f"``{part}``"
        else:
            parts[number] = re.sub(r"([*|\\]|(?<=\w)_(?!\w))", r"\\\1", part)
    return "".join(parts)
