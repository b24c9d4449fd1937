"""Proves that `python -m spillway.bench` prints a row for each case, and writes the JSON shape that docs/reference/reports.md describes.
Two reports are compared; a plot names every row."""

import copy
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys

import pytest

from spillway.bench import _output, _report

PACKAGE = pathlib.Path(_report.__file__).parents[2]
TINY = {
    "adam": ["--sizes", "4Ki", "--tensors", "3"],
    "io": ["--size", "2Mi", "--tensor", "1Mi"],
    "accumulate": ["--size", "64Ki"],
    "undo": ["--size", "64Ki"],
}


def bench(folder, kind, *arguments, before="", code=0):
    """Standard output and standard error of one run with 3 rounds."""
    program = f"{before}\nimport runpy\nrunpy.run_module('spillway.bench', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", program, kind, "--rounds", "3", *TINY[kind], *arguments]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(PACKAGE)}, cwd=folder, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def compared(folder, old, new, code=0):
    """Standard output and standard error of a comparison."""
    done = subprocess.run(
        [sys.executable, "-m", "spillway.bench", "compare", old, new],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
    )
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def made(ratios, better="higher", name="a"):
    report = _report.new("python adam", {"rounds": len(ratios)})
    report["rows"].append(_report.row({"contender": name, "parameters": 4096}, {"time_ratio": ratios}, "time_ratio", better))
    return report


@pytest.mark.parametrize("values", [[7.0], [4.0, 1.0, 3.0, 2.0], [5.0, 1.0, 4.0, 2.0, 3.0], [0.3, 0.1, 0.2]])
def test_quartiles_are_those_of_the_standard_library(values):
    found = _report.quartiles(values)
    expected = statistics.quantiles(values, method="inclusive") if len(values) > 1 else values * 3
    assert [found["q1"], found["median"], found["q3"]] == pytest.approx(expected)


def test_a_figure_that_is_not_finite_is_left_out():
    assert not _report.row({}, {"ratio": [1.0, float("inf")]}, "ratio", "higher")["figures"]


@pytest.mark.parametrize(
    "old, new, better, verdict",
    [
        ([1.0, 1.1, 1.2], [2.0, 2.1, 2.2], "higher", "faster"),
        ([1.0, 1.1, 1.2], [2.0, 2.1, 2.2], "lower", "slower"),
        ([2.0, 2.1, 2.2], [1.0, 1.1, 1.2], "higher", "slower"),
        ([1.0, 1.1, 1.2], [1.1, 1.15, 2.1], "higher", "same"),
    ],
)
def test_only_ranges_that_lie_apart_differ(old, new, better, verdict):
    assert [line[-1] for line in _report.compare(made(old, better), made(new, better))] == [verdict]


def test_rows_of_one_report_are_new_or_missing():
    lines = _report.compare(made([1.0], name="a"), made([1.0], name="b"))
    assert [(case["contender"], verdict) for case, *_, verdict in lines] == [("b", "new"), ("a", "missing")]


def test_a_report_without_the_parts_of_a_comparison_is_refused(tmp_path):
    path = tmp_path / "old.json"
    good = made([1.0])
    for fault in (
        {"format": 2},
        {"bench": "adam"},
        {"bench": None},
        {"cpu": None},
        {"rows": [{}]},
        {"rows": [good["rows"][0] | {"headline": "x"}]},
    ):
        path.write_text(json.dumps({**copy.deepcopy(good), **fault}))
        with pytest.raises(SystemExit, match="--compare"):
            _report.read(path, "python adam")
    for text in ("", "{", "[]"):
        path.write_text(text)
        with pytest.raises(SystemExit, match="--compare"):
            _report.read(path, "python adam")
    path.write_text(json.dumps(good))
    assert _report.read(path, "python adam") == good


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The standard output of a run of a benchmark and its report. Each runs once."""
    folder = tmp_path_factory.mktemp("bench")
    return functools.cache(lambda kind: (bench(folder, kind, "--json", f"{kind}.json")[0], folder / f"{kind}.json"))


@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("kind", TINY)
def test_a_run_prints_rows_and_writes_the_documented_shape(runs, kind, tmp_path):
    text, path = runs(kind)
    report = json.loads(path.read_text())
    assert set(report) == {"bench", "cpu", "date", "format", "rows", "settings", "threads", "version"}
    assert report["bench"] == f"python {kind}" and report["settings"]["rounds"] == 3
    assert len(text.splitlines()) == 2 + len(report["rows"]) > 3, text
    for row in report["rows"]:
        assert set(row) - {"note"} == {"better", "case", "figures", "headline"} and row["headline"] in row["figures"]
        assert all(figure["q1"] <= figure["median"] <= figure["q3"] for figure in row["figures"].values()), row
    # Verdicts of the report with itself.
    text, said = compared(tmp_path, path, path)
    assert [line.split()[-1] for line in text.splitlines()[3:]] == ["same"] * len(report["rows"]) and not said


def test_reports_are_compared_and_those_of_two_benchmarks_are_refused(tmp_path, runs):
    own = runs("undo")[1]
    rows = json.loads(own.read_text())["rows"]
    (tmp_path / "other.json").write_text(json.dumps({**json.loads(own.read_text()), "cpu": "another"}))
    text, said = compared(tmp_path, own, "other.json")
    assert text.count(" same") == len(rows) and said.startswith("spillway: warning: the old report is from")
    text, said = compared(tmp_path, own, runs("accumulate")[1], code=1)
    assert not text and said.startswith("NEW.json: ") and "not of bench python undo" in said


def test_json_is_alone_on_standard_output_and_verdicts_are_beside_it(tmp_path, runs):
    _, old = runs("io")
    text, said = bench(tmp_path, "io", "--json", "--compare", old)
    verdicts = [line for line in said.splitlines() if line.endswith(("faster", "slower", "same"))]
    assert len(verdicts) == len(json.loads(text)["rows"]) > 0, said


def test_a_fault_of_an_option_ends_the_run_before_it_measures(tmp_path):
    (tmp_path / "old.json").write_text(json.dumps(made([1.0])))
    text, said = bench(tmp_path, "io", "--compare", "old.json", code=1)
    assert not text and said.strip() == "--compare: old.json is a report of bench python adam, not of bench python io"
    (tmp_path / "deep.json").write_text("[" * 100_000)
    text, said = bench(tmp_path, "io", "--compare", "deep.json", code=1)
    assert not text and said.startswith("--compare: deep.json: the file is not JSON")
    text, said = bench(tmp_path, "io", "--json=no/such/folder.json", code=1)
    assert not text and said.startswith("writing the file of --json: no/such/folder.json: No such file")
    text, said = bench(tmp_path, "io", "--plot", "io.svg", before="import sys\nsys.modules['matplotlib'] = None", code=1)
    assert not text and said.strip() == "--plot needs matplotlib: pip install matplotlib"


def test_a_plot_names_every_row(tmp_path):
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    report = made([1.0, 2.0, 4.0])
    report["rows"] += made([0.5, 1.0, 1.5], name="one & two")["rows"]
    _output._plot(_output._pyplot(), report, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert "<svg" in text and all(f">{label}<" in text for label in ("a", "one &amp; two", "time_ratio")), text
