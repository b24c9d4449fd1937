"""Makes the plots of docs/benchmarks.md from the records in ffi_tests/bench/*.md, whenever the docs are built."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORDS = ROOT / "ffi_tests" / "bench"
PLOTS = ROOT / "docs" / "plots"


def section(record, heading):
    """The text below a heading of a record, up to the next heading of the same level."""
    text = (RECORDS / record).read_text()
    match = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#{{1,2}} |\Z)", text, re.M | re.S)
    if match is None:
        raise ValueError(f"{record} has no section {heading!r}; docs/tools/plots.py reads it")
    return match[2]


def table(text, number=0):
    """The rows of a Markdown table of a section, as lists of cells; the header is the first."""
    tables = re.findall(r"(?:^\|.*\n)+", text, re.M)
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in tables[number].splitlines()]
    return [rows[0], *rows[2:]]


def against_others(record="adam-x86_64.md", heading="Intel Xeon, after the caller of a step takes part in it"):
    """Of each case, the time of each contender over Spillway's: [(case, [(contender, ratio)])]."""
    cases = []
    for block in re.findall(r"^((?:plain|fused|\d+ tensors).*)\n((?:  .*x\n)+)", section(record, heading), re.M):
        rows = [re.match(r"  (.*?) {2,}.* ([\d.]+)x$", line).groups() for line in block[1].splitlines()]
        cases.append((block[0], [(name, float(ratio)) for name, ratio in rows]))
    return cases


def after_last_gradient():
    """Milliseconds after the last gradient: [(case, ms)]."""
    text = section("speculation.md", "Time of the step after the last gradient")
    return [(name.strip(), float(ms)) for name, ms in re.findall(r"^(\w.*?) {2,}([\d.]+) ms after", text, re.M)]


def seconds_per_step():
    """Of ZeRO-3 on storage, with the present block size: [(size, DeepSpeed, Spillway on one path, Spillway on two)]."""
    rows, found, size = table(section("tier_deepspeed.md", "Results"))[1:], {}, ""
    for row in rows:
        size = row[0] or size
        if row[1].startswith("20 KiB"):
            found[size] = [float(cell) for cell in row[2:5]]
    return [(size, *values) for size, values in found.items()]


def with_latency():
    """Reads and writes on a device with a latency: [(case, read, written)], as ratios to DeepSpeed's best settings."""
    rows, found, latency = table(section("io-x86_64.md", "Devices with a latency"))[1:], [], ""
    for row in rows:
        latency = row[0] or latency
        found.append((f"{row[1]} at {latency.split(',')[0]}", float(row[3]), float(row[7])))
    return found


def write():
    """Writes every plot as SVG."""
    import matplotlib
    matplotlib.use("svg")
    from matplotlib import pyplot
    PLOTS.mkdir(exist_ok=True)
    matplotlib.rcParams.update({"svg.hashsalt": "spillway", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    draw = {"adam": _adam, "speculation": _speculation, "tier": _tier, "io": _io}
    for name, function in draw.items():
        figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
        function(axes)
        figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None})
        pyplot.close(figure)


def _bars(axes, groups, labels, unit):
    """Horizontal bars in groups: [(group, [value of each label])]."""
    height = 0.8 / len(labels)
    for place, label in enumerate(labels):
        values = [values[place] for _, values in groups]
        at = [group + place * height for group in range(len(groups))]
        bars = axes.barh(at, [value or 0 for value in values], height, label=label)
        axes.bar_label(bars, ["" if value is None else f"{value:g}" for value in values], padding=2, fontsize=7)
    axes.set_yticks([group + 0.4 - height / 2 for group in range(len(groups))], [name for name, _ in groups])
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.margins(x=0.1)
    if len(labels) > 1:
        axes.legend(frameon=False, fontsize=8)


def _adam(axes):
    bars = [(f"{name}\n{case}" if len(rows) > 2 else case, ratio)
            for case, rows in against_others() for name, ratio in rows if name != "spillway" and "100 Mi" in case]
    _bars(axes, [(name, [ratio]) for name, ratio in bars], ["time over Spillway's"], "time over Spillway's")
    axes.axvline(1, color="black", linewidth=0.8)


def _speculation(axes):
    _bars(axes, [(name, [ms]) for name, ms in after_last_gradient()], ["ms"], "ms after the last gradient; less is better")


def _tier(axes):
    _bars(axes, [(size, values) for size, *values in seconds_per_step()],
          ["DeepSpeed, one path", "Spillway, one path", "Spillway, two paths"], "seconds a step; less is better")


def _io(axes):
    _bars(axes, [(case, values) for case, *values in with_latency()], ["read", "written"],
          "bandwidth over that of DeepSpeed's op at its best settings")
    axes.axvline(1, color="black", linewidth=0.8)


if __name__ == "__main__":
    write()
