"""What a benchmark measured: the JSON shape that all benchmarks share, and its comparison
with an earlier run.

docs/reference/reports.md describes the shape. A figure is a median with its quartiles over the rounds."""

import math
import time

import spillway

from .. import _files
from . import _machine

FORMAT = 1


def new(bench, settings):
    """A report without rows, of this machine and version."""
    return {
        "format": FORMAT,
        "bench": bench,
        "version": spillway.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cpu": _machine.cpu(),
        "threads": spillway.num_threads(),
        "settings": settings,
        "rows": [],
    }


def row(case, figures, headline, better, note=None):
    """A measured case. `figures` are the values of the rounds by name; JSON has no infinity, so a figure that is not
    finite is left out."""
    found = {name: quartiles(values) for name, values in figures.items()}
    finite = {name: figure for name, figure in found.items() if all(map(math.isfinite, figure.values()))}
    made = {"case": case, "figures": finite, "headline": headline, "better": better}
    return {**made, "note": note} if note else made


def quartiles(values):
    """Median, first and third quartile; interpolates between the two nearest values."""
    ordered = sorted(values)

    def at(share):
        place = share * (len(ordered) - 1)
        below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
        return below + (above - below) * (place - math.floor(place))

    return {"median": at(0.5), "q1": at(0.25), "q3": at(0.75)}


def ratios(values, references):
    """The ratio of two measurements in each round."""
    return [value / reference if reference else math.inf for value, reference in zip(values, references)]


def read(path, bench, option="--compare"):
    """The report in a file that `option` names; exits with a message if it cannot be compared with one of `bench`, if given."""
    try:
        with open(path, "rb") as file:
            report = _files.parse_json(file.read())
    except OSError as error:
        raise SystemExit(f"{option}: {path}: {error.strerror}") from None
    except ValueError as error:
        raise SystemExit(f"{option}: {path}: the file is not JSON: {error}") from None
    if not isinstance(report, dict) or "format" not in report:
        raise SystemExit(f"{option}: {path}: the file is not a report of a benchmark: it has no format")
    if report["format"] != FORMAT:
        raise SystemExit(f"{option}: {path}: the report has format {report['format']}, and this version reads format {FORMAT}")
    if bench is not None and report.get("bench") != bench:
        raise SystemExit(f"{option}: {path} is a report of bench {report.get('bench')}, not of bench {bench}")
    if not _is_complete(report):
        raise SystemExit(f"{option}: {path}: the file is not a report of a benchmark: its rows are incomplete")
    return report


def _is_complete(report):
    """True if a comparison finds all that it reads."""
    kinds = {"bench": str, "cpu": str, "date": str, "threads": int, "rows": list}
    try:
        return all(isinstance(report[name], kind) for name, kind in kinds.items()) and all(_row_is_complete(row) for row in report["rows"])
    except (KeyError, TypeError, AttributeError, OverflowError):
        return False


def _row_is_complete(row):
    numbers = [figure[name] for figure in row["figures"].values() for name in ("median", "q1", "q3")]
    return (
        isinstance(row["case"], dict)
        and row["headline"] in row["figures"]
        and row["better"] in ("higher", "lower")
        and all(isinstance(number, (int, float)) and math.isfinite(number) for number in numbers)
    )


def compare(old, new):
    """A tuple for each case: case, figure, old and new quartiles or None, verdict. First the new report's rows, then
    those that only the old one has."""

    def alone(row, verdict):
        figure = row["figures"].get(row["headline"])
        return row["case"], row["headline"], *((None, figure) if verdict == "new" else (figure, None)), verdict

    lines = []
    for row in new["rows"]:
        before = _of(old, row["case"])
        lines.append(before and _judge(before, row) or alone(row, "new"))
    return lines + [alone(row, "missing") for row in old["rows"] if not _of(new, row["case"])]


def _of(report, case):
    return next((row for row in report["rows"] if row["case"] == case), None)


def _judge(old, new):
    """Compares the new headline, or the old one if only that is in both rows; None if neither is."""
    for row in (new, old):
        name = row["headline"]
        if name in old["figures"] and name in new["figures"]:
            before, after = old["figures"][name], new["figures"][name]
            if before["q1"] <= after["q3"] and after["q1"] <= before["q3"]:
                verdict = "same"
            else:
                verdict = "faster" if (after["median"] > before["median"]) == (row["better"] == "higher") else "slower"
            return new["case"], name, before, after, verdict
    return None


def labels(cases):
    """What all cases have in common, and a label of the rest for each."""
    first = cases[0] if cases else {}
    common = {name for name in first if len(cases) > 1 and all(case.get(name) == first[name] for case in cases)}
    label = lambda case, wanted: ", ".join(_field(name, case[name]) for name in sorted(case) if (name in common) == wanted)
    return label(first, True), [label(case, False) for case in cases]


def _field(name, value):
    """A text speaks for itself; a number needs its name."""
    return value if isinstance(value, str) else f"{name} {text(value)}"


def text(value):
    """A field's value; a number as options accept it, such as 64Ki."""
    if isinstance(value, int) and value > 0:
        for unit, name in ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")):
            if value % unit == 0:
                return f"{value // unit}{name}"
    return str(value)
