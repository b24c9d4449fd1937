"""Writes docs/reference/configuration.md: the environment variables, with the files that read them, and the `spillway`
block of a DeepSpeed configuration, from its pydantic models.

    python docs/tools/configuration.py            writes the page; needs pydantic, as packaging/python_env.sh installs it"""

import pathlib
import re
import sys
import types
import typing

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "configuration.md"
sys.path[:0] = [str(ROOT / "packaging" / "python"), str(pathlib.Path(__file__).parent)]

from variables import VARIABLES

# A name of these families in a string of the code is a variable that the code reads.
_FAMILY = re.compile(r'"((?:SPILLWAY|AWS|XDG)_[A-Z0-9_]+|HOME)"')
_READ = re.compile(
    r"""(?:env::var(?:_os)?|environment::(?:value|text|word|path|is_one)|env_number|getenv|environ\.get)\(["'](\w+)["']\)?|environ\[["'](\w+)["']\](?!\s*=[^=])"""
)
_SHELL = re.compile(r"\$\{([A-Z][A-Z0-9_]*)(?=:?[-?=])")
_COMMENT = {".rs": "//", ".py": "#", ".pth": "\0", ".sh": "#"}


def readers():
    """Each variable that the library, the tool, the kernels, the stores and packaging read, with the files that read it; without tests."""
    found = {}
    for folder in ("src", "cli/src", "kernels/src", "stores/src", "packaging"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in _COMMENT or "tests" in path.parts or path.name == "tests.rs":
                continue
            for name in _names(path):
                found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return found


def _names(path):
    text = path.read_text()
    if path.suffix == ".rs":
        # Unit tests come last in a file.
        text = text.split("#[cfg(test)]\nmod tests {")[0]
    lines = [line.split(_COMMENT[path.suffix])[0] for line in text.splitlines()]
    code = "\n".join(lines)
    if path.suffix == ".sh":
        return sorted(set(_SHELL.findall(code)))
    direct = [first or second for first, second in _READ.findall(code)]
    return sorted({*direct, *_FAMILY.findall(code)})


def page():
    """The text of the page."""
    parts = [
        """<!-- Written by docs/tools/configuration.py. Do not edit. -->
# Configuration

This page is generated from the code that reads each setting. Fields of option structs are in the
[C reference](c.md), options of the command line tool in [](cli.md).

## Environment variables

The library takes a blank variable as one that is not set, except `SPILLWAY_PROFILE` and `CUDA_VISIBLE_DEVICES`. A value that is
not UTF-8 is an error that names the variable. A program with more rights than its caller (setuid, setgid, file capabilities)
reads none.
"""
    ]
    files = readers()
    for group in dict.fromkeys(row[0] for row in VARIABLES):
        parts.append(f"### {group}\n\n| variable | values | effect | read by |\n|---|---|---|---|")
        for _, name, values, effect in (row for row in VARIABLES if row[0] == group):
            where = "<br>".join(f"`{file}`" for file in files.get(name, []))
            parts.append(f"| `{name}` | {values} | {effect} | {where} |")
        parts.append("")
    parts.append(_block())
    return "\n".join(parts)


def _block():
    from spillway.deepspeed import _settings

    parts = [
        """## The `spillway` block of a DeepSpeed configuration

The block is a top-level key of the DeepSpeed configuration, like DeepSpeed's own blocks. An unknown setting, a wrong
value, and a setting without effect in the configuration are errors that name the setting. Without the block,
`nvme_path` is the only path of ZeRO-3's optimizer states, as scratch space.
"""
    ]
    for title, model, intro in (
        (
            "spillway",
            _settings.Block,
            "Storage of ZeRO-3's optimizer states with `offload_optimizer` on the device `nvme`. "
            "`paths`, `job`, `host` and `io_timeout_seconds` also apply to parameters with `offload_param` on the device `nvme`.",
        ),
        ("spillway.paths[]", _settings.PathBlock, "An entry of `paths` may also be a string: the path alone."),
        (
            "spillway.interleave",
            _settings.InterleaveBlock,
            "An update that CPU and GPU do together. It needs ZeRO stage 3 with `offload_optimizer` on the device `cpu`.",
        ),
        ("spillway.interleave.rates", _settings.RatesBlock, "Measured rates, in parameters per second."),
        (
            "spillway.superoffload",
            _settings.SuperOffloadBlock,
            "DeepSpeed's SuperOffload. It needs ZeRO stage 3 and `super_offload` in `offload_optimizer`; see "
            "[Speculation](../speculation.md#under-deepspeed).",
        ),
    ):
        parts.append(f"### `{title}`\n\n{intro}\n\n| setting | type | default | meaning |\n|---|---|---|---|")
        for name, field in model.model_fields.items():
            default = "required" if field.is_required() else f"`{_json(field.default)}`"
            parts.append(f"| `{name}` | {_type(field.annotation)} | {default} | {_cell(field.description)} |")
        parts.append("")
    return "\n".join(parts)


def _cell(text):
    return re.sub(r'"([^"]*)"', r"`\1`", text).replace("<", "&lt;").replace("|", "\\|")


def _json(value):
    return (
        {None: "null", True: "true", False: "false"}.get(value, value)
        if not isinstance(value, (int, float)) or isinstance(value, bool)
        else value
    )


def _type(kind):
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is list:
        return f"list of {_type(arguments[0])}s"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type(one) for one in arguments if one is not type(None))
    names = {int: "integer", float: "number", str: "string", bool: "boolean"}
    return names.get(kind, "object")


if __name__ == "__main__":
    PAGE.write_text(page())
