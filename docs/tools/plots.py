"""Makes the plots of docs/benchmarks.md and of the page of records from ffi_tests/bench/records, whenever the docs are built."""

import math
import pathlib
import statistics

import measurements
from measurements import middle

PLOTS = pathlib.Path(__file__).resolve().parents[1] / "plots"


def against_others():
    """Of a step of 100 Mi parameters, the time of each contender over Spillway's: [(case, ratio)]."""
    found = [(row["case"], middle(row["figures"]["time_ratio"])) for row in measurements.read("adam_others_xeon")["rows"]]
    return [
        (f"{case['contender']}\n{case['work']}", ratio)
        for case, ratio in found
        if case.get("parameters") == 100 << 20 and case["contender"] != "spillway"
    ]


def after_last_gradient():
    """Milliseconds after the last gradient: [(case, ms)]."""
    return [(row["case"]["step"], middle(row["figures"]["ms"])) for row in measurements.read("speculation_overlap")["rows"]]


def seconds_per_step():
    """Of ZeRO-3 on storage: [(case, [DeepSpeed, Spillway on one path, Spillway on two])], medians of the runs of a case. The first case is
    the default size of parts, which the README has; the others have parts of 256 Ki and the block size that belongs to them."""
    rows = measurements.read("zero3_tier")["rows"]
    runs = {"72 M, parts of the default size": [row for row in rows if row["case"].get("parts", "").endswith("the default")]}
    for row in rows:
        case = row["case"]
        if case["block"] == "20 KiB":
            runs.setdefault(f"{case['parameters']}, parts of 256 Ki", []).append(row)
    names = ("deepspeed_one_path_s", "spillway_one_path_s", "spillway_two_paths_s")
    return [(case, [statistics.median(middle(row["figures"][name]) for row in of) for name in names]) for case, of in runs.items()]


def with_latency():
    """Reads and writes on a device with a latency: [(case, [read, written])], as ratios to DeepSpeed's best settings."""
    found = {}
    for row in measurements.read("io_latency")["rows"]:
        case = row["case"]
        if "build" not in case:
            found.setdefault(f"{case['tensors']} at {case['latency']}", []).append(middle(row["figures"]["speed_ratio_to_best"]))
    return list(found.items())


def write():
    """Writes every plot as SVG."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "spillway", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    (PLOTS / "records").mkdir(parents=True, exist_ok=True)
    for name, draw in {"adam": _adam, "speculation": _speculation, "tier": _tier, "io": _io}.items():
        _save(name, 3.2, draw)
    for name in measurements.names():
        rows = measurements.drawn(measurements.read(name))
        if rows:
            _save(f"records/{name}", 1 + 0.24 * len(rows), lambda axes: _headlines(axes, rows))


def _save(name, height, draw):
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, height), layout="constrained")
    draw(axes)
    figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None})
    pyplot.close(figure)


def _headlines(axes, rows):
    """A bar for the headline of each row, with a whisker where its figure has a range."""
    figures = [row["figures"][row["headline"]] for row in rows]
    values = [middle(figure) for figure in figures]
    ends = [measurements.whisker(figure) or (math.nan, math.nan) for figure in figures]
    reach = [[value - low for value, (low, _) in zip(values, ends)], [high - value for value, (_, high) in zip(values, ends)]]
    common, labels = measurements.labels(rows)
    bars = axes.barh(range(len(rows)), values, 0.7, xerr=reach, error_kw={"elinewidth": 0.8, "capsize": 2})
    axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=2, fontsize=7)
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    names = dict.fromkeys(f"{measurements.words(row['headline'])}, {row['better']} is better" for row in rows)
    axes.set_xlabel("; ".join(names) + (f"\n{common}" if common else ""))
    axes.margins(x=0.1)


def _bars(axes, groups, labels, unit):
    """Horizontal bars in groups: [(group, [value of each label])]."""
    height = 0.8 / len(labels)
    for place, label in enumerate(labels):
        values = [values[place] for _, values in groups]
        at = [group + place * height for group in range(len(groups))]
        bars = axes.barh(at, values, height, label=label)
        axes.bar_label(bars, [f"{value:g}" for value in values], padding=2, fontsize=7)
    axes.set_yticks([group + 0.4 - height / 2 for group in range(len(groups))], [name for name, _ in groups])
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.margins(x=0.1)
    if len(labels) > 1:
        axes.legend(frameon=False, fontsize=8)


def _adam(axes):
    _bars(axes, [(name, [ratio]) for name, ratio in against_others()], ["time over Spillway's"], "time over Spillway's")
    axes.axvline(1, color="black", linewidth=0.8)


def _speculation(axes):
    _bars(axes, [(name, [ms]) for name, ms in after_last_gradient()], ["ms"], "ms after the last gradient; less is better")


def _tier(axes):
    _bars(axes, seconds_per_step(), ["DeepSpeed, one path", "Spillway, one path", "Spillway, two paths"], "seconds a step; less is better")


def _io(axes):
    _bars(axes, with_latency(), ["read", "written"], "bandwidth over that of DeepSpeed's op at its best settings")
    axes.axvline(1, color="black", linewidth=0.8)


if __name__ == "__main__":
    write()
