"""Writes docs/reference/cli.md from the help texts of the command line tool.

python docs/tools/cli.py target/release/spillway          writes the page"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "cli.md"


def help_of(tool, *command):
    """The help text of a command."""
    made = subprocess.run([tool, *command, "--help"], capture_output=True, text=True, check=True, env={"COLUMNS": "100", "PATH": ""})
    return "\n".join(line.rstrip() for line in made.stdout.rstrip().splitlines())


def commands(text):
    """The names of the commands that a help text lists."""
    listed = re.search(r"^Commands:\n((?:  .*\n)+)", text, re.M)
    names = re.findall(r"^  (\w+)", listed[1], re.M) if listed else []
    return [name for name in names if name != "help"]


def page(tool):
    """The text of the page."""
    parts = [
        "<!-- Written by docs/tools/cli.py. Do not edit. -->\n# Command line tool\n\n"
        "The wheel and `make install` install the tool; `make lib` builds it as `target/release/spillway`.\n"
        "The Python package has the commands `doctor JOB`, `watch` and `metrics` too: [before and during a run](../watch.md).\n"
    ]
    waiting = [()]
    while waiting:
        command = waiting.pop(0)
        text = help_of(tool, *command)
        parts.append(f"## `{' '.join(('spillway', *command))}`\n\n```text\n{text}\n```\n")
        waiting[:0] = [(*command, name) for name in commands(text)]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(sys.argv[1]))
