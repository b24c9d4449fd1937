"""What the benchmarks do with their rows: they print each at once, and then write, plot and compare the report."""

import contextlib
import json
import os
import sys

from .. import _console
from . import _progress, _report


def add_arguments(parser):
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="writes the report as one JSON object to FILE; without FILE to standard output, instead of the rows",
    )
    parser.add_argument("--plot", metavar="FILE.svg", help="draws the headline of each row as a bar in this SVG file")
    parser.add_argument(
        "--compare",
        metavar="OLD.json",
        help="compares each row with an earlier report: faster or slower where the ranges between the quartiles lie apart",
    )


def run(options, measurement):
    """Measures, and does with the rows what the options say."""
    old = _report.read(options.compare, measurement.NAME) if options.compare else None
    pyplot = _pyplot() if options.plot else None
    _check_files(options)
    alone = options.json == "-"  # standard output belongs to the JSON object
    with _standard_output() as out:
        report = _measure(options, measurement, old, None if alone else out)
        if alone:
            _console.write(json.dumps(report, indent=1), out)
        elif options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                print(json.dumps(report, indent=1), file=file)
        if old:
            _console.write(_verdicts(options.compare, old, report), sys.stderr if alone else out)
        # Last, so that a fault of the plot loses nothing else.
        if pyplot:
            _plot(pyplot, report, options.plot)


def compare(before, after):
    """Prints the verdicts of two reports that files have."""
    old = _report.read(before, None, "OLD.json")
    new = _report.read(after, old["bench"], "NEW.json")
    _warn_of_other_machine(old, new)
    _console.write(_verdicts(before, old, new), sys.stdout)


def _check_files(options):
    """Ends the program if a file of the report cannot be written: before the measurement, not after it."""
    for name, path in (("--json", options.json), ("--plot", options.plot)):
        if path and path != "-":
            try:
                # Appending leaves what an earlier report has written.
                open(path, "a", encoding="utf-8").close()
            except OSError as error:
                raise SystemExit(f"writing the file of {name}: {path}: {error.strerror}; name another file") from None


@contextlib.contextmanager
def _standard_output():
    """Standard output for the benchmark alone; what torch and DeepSpeed print there goes to standard error."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        try:
            yield out
        finally:
            sys.stdout.flush()
            os.dup2(out.fileno(), 1)


def _measure(options, measurement, old, out):
    """The report. Its rows are printed at once; without `out` they are not printed."""
    with _progress.shown():
        settings, tools = measurement.prepare(options)
        report = _report.new(measurement.NAME, settings)
        _warn_of_other_machine(old, report)
        if out:
            _progress.say(_facts(report), out)
            _progress.say(_line(measurement.COLUMNS, lambda title, *_: title), out)
        for row in measurement.rows(options, tools):
            report["rows"].append(row)
            if out:
                _progress.say(_cells(measurement.COLUMNS, row), out)
    return report


def _facts(report):
    settings = "".join(f", {name} {_report.text(value)}" for name, value in report["settings"].items())
    return f"bench {report['bench']}: {report['cpu']}, {report['threads']} threads{settings}"


def _warn_of_other_machine(old, new):
    if old and (old["cpu"], old["threads"]) != (new["cpu"], new["threads"]):
        old, new = (f"{report['cpu']} with {report['threads']} threads" for report in (old, new))
        print(f"spillway: warning: the old report is from {old}, the new from {new}", file=sys.stderr)


def _line(columns, text):
    """Columns are title, name, width and decimals. A column without decimals shows a field of the case, aligned to the
    left; the others show the median of a figure."""
    cells = [f"{text(*column):{'<' if column[3] is None else '>'}{column[2]}}" for column in columns]
    return "  ".join(cells).rstrip()


def _cells(columns, row):
    def text(_, name, __, decimals):
        if decimals is None:
            return _report.text(row["case"].get(name, "-"))
        figure = row["figures"].get(row["headline"] if name == "quartiles" else name)
        if figure is None:
            return "-"
        if name == "quartiles":
            return f"{figure['q1']:.{decimals}f}..{figure['q3']:.{decimals}f}"
        return f"{figure['median']:.{decimals}f}"

    return f"{_line(columns, text)}  {row.get('note', '')}".rstrip()


def _verdicts(path, old, new):
    lines = _report.compare(old, new)
    common, names = _report.labels([case for case, *_ in lines])
    median = lambda figure: f"{figure['median']:.3f}" if figure else "-"
    ratio = lambda old, new: f"{new['median'] / old['median']:.3f}" if old and new and old["median"] else "-"
    cells = [("case", "figure", "old", "new", "new/old", "verdict")]
    cells += [
        (name, figure, median(before), median(after), ratio(before, after), verdict)
        for name, (_, figure, before, after, verdict) in zip(names, lines)
    ]
    widths = [max(map(len, column)) for column in zip(*cells)]
    texts = [f"bench {new['bench']} compared with {path} of {old['date']}{': ' if common else ''}{common}"]
    for first, *others in cells:
        texts.append("  ".join([first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:]))]))
    return "\n" + "\n".join(texts)


def _pyplot():
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("svg")
    # Labels remain text.
    matplotlib.rcParams.update({"svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    return pyplot


def _plot(pyplot, report, path):
    """A bar for each row's headline, with a whisker between the quartiles."""
    # A headline that was not finite is not drawn.
    rows = [row for row in report["rows"] if row["headline"] in row["figures"]]
    common, names = _report.labels([row["case"] for row in rows])
    found = [row["figures"][row["headline"]] for row in rows]
    medians = [figure["median"] for figure in found]
    whiskers = [[figure["median"] - figure["q1"] for figure in found], [figure["q3"] - figure["median"] for figure in found]]
    inches = 6 + 0.08 * max(map(len, names), default=0), 1.3 + 0.25 * len(rows)
    figure, axes = pyplot.subplots(figsize=inches, layout="constrained")
    axes.barh(range(len(rows)), medians, xerr=whiskers, capsize=2, height=0.6, color="#78a0d2")
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    headline = rows[0]["headline"] if rows else ""
    if "ratio" in headline:
        axes.axvline(1, color="red", linewidth=1)
    axes.set_xlabel(headline)
    machine = f"{report['cpu']}, {report['threads']} threads, version {report['version']}, {report['date']}"
    figure.suptitle(f"bench {report['bench']}{': ' if common else ''}{common}\n{machine}", x=0.01, ha="left", fontsize=9)
    figure.savefig(path, format="svg")
    pyplot.close(figure)
