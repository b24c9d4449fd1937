"""The records of measurements are complete, and the page and the readers of reports accept them."""

import ast
import copy
import statistics

import iteration
import measurements
import plots
import pytest

RECORDS = {name: measurements.read(name) for name in measurements.names()}
REPORTS = sorted(name for name, record in RECORDS.items() if "bench" in record)
each = pytest.mark.parametrize("name", RECORDS)


@each
def test_a_record_is_complete_and_each_figure_has_a_documented_form(name):
    assert not measurements.faults(RECORDS[name])


@each
def test_no_two_rows_of_a_record_have_the_same_case(name):
    cases = [row["case"] for row in RECORDS[name]["rows"]]
    assert not [case for case in cases if cases.count(case) > 1]


@each
def test_the_page_has_a_section_with_every_row_of_a_record(name):
    section = measurements.page().split(f"(record-{name})=\n")[1].split("\n(record-")[0]
    record = RECORDS[name]
    assert section.startswith(f"## {record['title']}\n") and f"{name}.json" in section
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(record["rows"])


def _median(name, figure, **case):
    """The median of the only row of a record with these entries of its case."""
    rows = [row for row in RECORDS[name]["rows"] if case.items() <= row["case"].items()]
    assert len(rows) == 1, (name, case)
    return rows[0]["figures"][figure]["median"]


def _readme():
    return " ".join((measurements.ROOT / "README.md").read_text().split())


def test_figures_of_the_readme_are_those_of_the_records():
    text, found = _readme(), iteration.milliseconds()
    ms = {name: f"{value:,.0f}" for name, value in found.items()}
    own, theirs = ms["DeepSpeed SuperOffload on Spillway"], ms["DeepSpeed SuperOffload"]
    assert f"DeepSpeed SuperOffload | {theirs} ms | **{own} ms**" in text
    offload, zero2 = ms["spillway offload"], ms["DeepSpeed ZeRO-2 with offload"]
    torchao = ms["torchao CPUOffloadOptimizer, bf16 states"]
    assert f"`offload` took {offload} ms an iteration, DeepSpeed ZeRO-2 with CPU offload {zero2} ms, and torchao {torchao} ms" in text
    assert f"SuperOffload {theirs}, on Spillway {own}; DeepSpeed ZeRO-2 with offload {zero2}; Spillway offload {offload}]" in text
    work = {"work": "fused step, bf16 gradient and copy"}
    deepspeed = _median("adam_others_xeon", "ms", contender="deepspeed op and torch operations", **work)
    fused = _median("adam_others_xeon", "ms", contender="spillway", **work)
    assert f"DeepSpeed's op and torch, two cores | {deepspeed:.0f} ms | **{fused:.0f} ms** |" in text


def test_seconds_of_zero3_in_the_readme_and_the_plot_are_those_of_the_defaults():
    """Not those of the best run, and not of a setting that the reader does not have."""
    rows = [row for row in RECORDS["zero3_tier"]["rows"] if row["case"].get("parts", "").endswith("the default")]
    assert len(rows) == 1
    deepspeed, one, two = (
        rows[0]["figures"][f"{name}_s"]["median"] for name in ("deepspeed_one_path", "spillway_one_path", "spillway_two_paths")
    )
    assert f"two cores | {deepspeed:.1f} s | **{one:.1f} s**; {two:.1f} s with a second path" in _readme()
    assert plots.seconds_per_step()[0] == ("72 M, parts of the default size", [deepspeed, one, two])


def test_a_bar_of_the_plot_of_zero3_is_the_median_of_all_runs_of_its_case():
    drawn = dict(plots.seconds_per_step())
    runs = [row for row in RECORDS["zero3_tier"]["rows"] if (row["case"]["parameters"], row["case"]["block"]) == ("72 M", "20 KiB")]
    assert len(runs) == 4
    for number, name in enumerate(("deepspeed_one_path_s", "spillway_one_path_s", "spillway_two_paths_s")):
        assert drawn["72 M, parts of 256 Ki"][number] == statistics.median(row["figures"][name]["median"] for row in runs)


def test_no_plot_takes_one_of_several_rows():
    """The other plots have a bar for each row that they name: no row hides another one."""
    assert len(plots.against_others()) == len({case for case, _ in plots.against_others()}) == 5
    assert len(plots.after_last_gradient()) == len(RECORDS["speculation_overlap"]["rows"])
    rows = [row for row in RECORDS["io_latency"]["rows"] if "build" not in row["case"]]
    assert sum(len(values) for _, values in plots.with_latency()) == len(rows)
    assert all(len(values) == 2 for _, values in plots.with_latency())


def test_kills_of_the_readme_are_those_of_the_records():
    kills = RECORDS["tier_kills"]["rows"]
    assert f"{sum(row['figures']['kills'] for row in kills):,} kills at random moments lost no committed state" in _readme()
    assert not any(row["figures"]["lost_or_mixed"] for row in kills)


def test_the_small_step_on_which_deepspeed_is_faster_is_that_of_the_records():
    small = _median("adam_others_xeon", "time_ratio", work="plain f32", parameters=1 << 20, contender="deepspeed")
    text = (measurements.ROOT / "docs" / "why.md").read_text()
    assert f"with 1 Mi parameters, DeepSpeed's op takes {small} of Spillway's time if DeepSpeed's threads spin between steps" in text


def test_forms_of_a_figure_are_those_of_the_docs():
    text = (measurements.ROOT / "docs" / "reference" / "reports.md").read_text().split("A figure of a record has one of these forms.")[1]
    rows = [line.split("`")[1] for line in text.splitlines() if line.startswith(("| `{", "| `9"))]
    forms = [set(ast.literal_eval(row)) for row in rows if row.startswith("{")]
    assert len(rows) == 5 and sorted(map(sorted, forms)) == sorted(map(sorted, measurements.FORMS))


@pytest.mark.parametrize(
    "change, fault",
    [
        (lambda record: record.pop("title"), "title is missing"),
        (lambda record: record.pop("machine"), "machine is missing"),
        (lambda record: record["machine"].pop("cores"), "machine has no cores"),
        (lambda record: record.pop("command"), "one of command and method"),
        (lambda record: record.update(date="today"), "date is not"),
        (lambda record: record.update(format=2), "format is not 1"),
        (lambda record: record.update(notes=[]), "notes is missing"),
        (lambda record: record["rows"][0].update(headline="absent"), "the headline is no figure"),
        (lambda record: record["rows"][0]["figures"].update(ms="fast"), "ms has no known form"),
        (lambda record: record["rows"][0]["figures"].update(ms={"median": 1, "q1": 1}), "ms has no known form"),
        (lambda record: record["rows"][0]["figures"].update(ms={"low": 2, "high": 1}), "ms has no known form"),
        (lambda record: record["rows"][0]["figures"].update(ms={"runs": [1]}), "ms has no known form"),
        (lambda record: record.update(bench="adam"), "a report needs version"),
        (lambda record: record.update(bench="adam"), "has no quartiles"),
    ],
)
def test_a_fault_of_a_record_is_found(change, fault):
    record = copy.deepcopy(RECORDS["speculation_overlap"])
    change(record)
    assert [found for found in measurements.faults(record) if fault in found], measurements.faults(record)


def test_values_and_whiskers_of_each_form():
    forms = {5: (5, None), 1.5: (1.5, None)}
    assert {figure: (measurements.middle(figure), measurements.whisker(figure)) for figure in forms} == forms
    for figure, value, ends in [
        ({"median": 3}, 3, None),
        ({"median": 3, "q1": 2, "q3": 5}, 3, (2, 5)),
        ({"low": 1, "high": 2}, 1.5, (1, 2)),
        ({"runs": [4, 1, 2]}, 2, (1, 4)),
    ]:
        assert (measurements.middle(figure), measurements.whisker(figure)) == (value, ends)


def test_a_link_to_a_record_leads_to_its_section():
    import records

    text = records.inside("benchmarks.md", "[a](../ffi_tests/bench/records/zero3_tier.json), [b](c.md)")
    assert text == "[a](#record-zero3_tier), [b](c.md)"


@pytest.mark.parametrize("name", REPORTS)
def test_python_reads_a_record_that_a_tool_wrote(name):
    from spillway.bench import _report

    record = _report.read(measurements.FOLDER / f"{name}.json", RECORDS[name]["bench"])
    assert {verdict for *_, verdict in _report.compare(record, record)} == {"same"}


def test_there_are_records_that_a_tool_wrote():
    assert REPORTS
