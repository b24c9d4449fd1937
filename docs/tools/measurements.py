"""Reads the records of measurements in ffi_tests/bench/records, and makes their page.

docs/reference/reports.md describes the shape of a record: that of a report, with a title, a command, a machine and notes."""

import json
import math
import pathlib
import re
import statistics

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "ffi_tests" / "bench" / "records"
FORMAT = 1
# Forms of a figure that is not a number, by their keys.
FORMS = ({"median"}, {"median", "q1", "q3"}, {"low", "high"}, {"runs"})
# A report of a benchmark has these as well; readers of reports rely on them.
REPORT = {"bench": str, "version": str, "cpu": str, "threads": int, "settings": dict}


def names():
    """The names of all records, in the order of the page."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def faults(record):
    """What a record lacks, as sentences; empty for a good one."""
    found = [] if record.get("format") == FORMAT else [f"format is not {FORMAT}"]
    found += [f"{key} is missing or empty" for key in ("title", "machine", "date", "notes", "rows") if not record.get(key)]
    if bool(record.get("command")) == bool(record.get("method")):
        found.append("one of command and method is needed")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", str(record.get("date"))):
        found.append("date is not of the form 2026-11-24")
    machine = record.get("machine") or {}
    found += [f"machine has no {key}" for key in ("processor", "cores", "virtual") if key not in machine]
    if not all(isinstance(note, str) for note in record.get("notes") or []):
        found.append("a note is not text")
    if "bench" in record:
        found += [f"a report needs {key}" for key, kind in REPORT.items() if not isinstance(record.get(key), kind)]
    for number, row in enumerate(record.get("rows") or []):
        found += [f"row {number}: {fault}" for fault in _faults_of_row(row, "bench" in record)]
    return found


def _faults_of_row(row, report):
    if not isinstance(row.get("case"), dict) or not isinstance(row.get("figures"), dict):
        return ["case or figures is missing"]
    found = [f"the figure {name} has no known form" for name, figure in row["figures"].items() if not _is_figure(figure)]
    if not row["figures"] and not row.get("note"):
        found.append("there is neither a figure nor a note")
    judged = row.get("headline") in row["figures"] and row.get("better") in ("higher", "lower")
    if ("headline" in row or report) and not judged:
        found.append("the headline is no figure, or better is neither higher nor lower")
    if report and any(not isinstance(figure, dict) or set(figure) != FORMS[1] for figure in row["figures"].values()):
        found.append("a figure of a report has no quartiles")
    return found


def _is_figure(figure):
    """True for a number, and for the documented forms."""
    if not isinstance(figure, dict):
        return _is_number(figure)
    if set(figure) not in FORMS:
        return False
    if "runs" in figure:
        return isinstance(figure["runs"], list) and len(figure["runs"]) > 1 and all(map(_is_number, figure["runs"]))
    return all(map(_is_number, figure.values())) and figure.get("low", 0) <= figure.get("high", math.inf)


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def middle(figure):
    """The value of a figure: its median if there is one, otherwise the middle of its range or of its runs."""
    if not isinstance(figure, dict):
        return figure
    if "runs" in figure:
        return statistics.median(figure["runs"])
    return figure["median"] if "median" in figure else (figure["low"] + figure["high"]) / 2


def whisker(figure):
    """The ends of the range of a figure, or None if it has none."""
    if not isinstance(figure, dict) or set(figure) == {"median"}:
        return None
    if "runs" in figure:
        return min(figure["runs"]), max(figure["runs"])
    return (figure["q1"], figure["q3"]) if "q1" in figure else (figure["low"], figure["high"])


def drawn(record):
    """The rows whose headline is a ratio, which the plot of a record shows."""
    return [row for row in record["rows"] if "ratio" in row.get("headline", "")]


def labels(rows):
    """What the cases of all rows have in common, and a label of the rest for each."""
    first = rows[0]["case"]
    common = {key for key in first if len(rows) > 1 and all(row["case"].get(key) == first[key] for row in rows)}
    label = lambda case, wanted: ", ".join(_field(key, value) for key, value in case.items() if (key in common) == wanted)
    return label(first, True), [label(row["case"], False) for row in rows]


def _field(key, value):
    return value if isinstance(value, str) else f"{words(key)} {_case(value)}"


def words(name):
    """The name of a field as a reader sees it: gb_per_s is GB/s."""
    text = re.sub(r" per s\b", "/s", name.replace("_", " "))
    return re.sub(r"\b(gb|mib)\b", lambda match: {"gb": "GB", "mib": "MiB"}[match[1]], text)


def _case(value):
    """A value of a case; a size as options accept it, such as 64Ki."""
    if isinstance(value, int) and value > 0:
        for unit, name in ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")):
            if value % unit == 0:
                return f"{value // unit}{name}"
    return str(value)


def _number(value):
    """A number as it was recorded; four digits of those that a tool computed."""
    exact = f"{value:,}"
    return exact if len(exact) <= 9 else f"{value:.4g}"


def _figure(figure):
    if figure is None:
        return ""
    if not isinstance(figure, dict):
        return _number(figure)
    if "runs" in figure:
        return "; ".join(map(_number, figure["runs"]))
    if "low" in figure:
        return f"{_number(figure['low'])} to {_number(figure['high'])}"
    ends = whisker(figure)
    return _number(figure["median"]) + (f" ({_number(ends[0])} to {_number(ends[1])})" if ends else "")


def table(rows):
    """The rows as a Markdown table: a column for each key of a case, and for each figure."""
    cases = list(dict.fromkeys(key for row in rows for key in row["case"]))
    figures = list(dict.fromkeys(name for row in rows for name in row["figures"]))
    notes = ["note"] if any("note" in row for row in rows) else []
    lines = [[words(name) for name in cases + figures + notes], ["---"] * len(cases + figures + notes)]
    for row in rows:
        lines.append(
            [
                *(_case(row["case"].get(key, "")) for key in cases),
                *(_figure(row["figures"].get(name)) for name in figures),
                *(row.get("note", "") for _ in notes),
            ]
        )
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def machine(record):
    """The machine as one line."""
    fields = dict(record["machine"])
    first = [fields.pop("processor"), f"{fields.pop('cores')} cores"]
    virtual = fields.pop("virtual")
    return "; ".join(
        [
            *first,
            f"under {virtual}" if virtual else "not virtual",
            *(value if key in ("kernel", "software") else f"{key} {value}" for key, value in fields.items()),
        ]
    )


def section(name, record):
    """A record as a section of the page."""
    how = f"`{record['command']}`" if "command" in record else _linked(record["method"])
    lines = [
        f"(record-{name})=",
        f"## {record['title']}",
        "",
        f"- **Machine:** {machine(record)}",
        f"- **Date:** {record['date']}",
        f"- **How:** {how}",
    ]
    if record.get("settings"):
        lines.append("- **Settings:** " + "; ".join(f"{words(key)}: {_case(value)}" for key, value in record["settings"].items()))
    lines += ["", table(record["rows"]), "", *(f"- {_linked(note)}" for note in record["notes"]), ""]
    if drawn(record):
        lines += [f"![{record['title']}](../plots/records/{name}.svg)", ""]
    return "\n".join([*lines, f"*Source: `ffi_tests/bench/records/{name}.json`*", ""])


def _linked(text):
    """A text in which names of records are links to their sections."""
    known = "|".join(names())
    return re.sub(rf"\brecord ({known})\b", r"record [\1](#record-\1)", text)


def page():
    """The page of all records."""
    intro = """# Measurements

Each section is a file of `ffi_tests/bench/records`. [The record](../reference/reports.md#the-record) describes its fields.
In a table, two figures in parentheses are the quartiles of a median; figures with a semicolon are those of several runs.
A bar ends at the median, or at the middle of a range or of runs. A whisker covers the range.
"""
    return "\n".join([intro, *(section(name, read(name)) for name in names())])
