"""Benchmarks Spillway's async_io op against DeepSpeed's compiled one on the same files.

Both read and write in this process, in alternation, each on buffers that it allocates itself. The data read is compared
before the timing. Each op runs at its best settings, which are searched first; DeepSpeed's also runs at the settings of
a configuration without an "aio" block. fio, if installed, takes its turn on a file that holds all tensors, as a
reference for the device's bandwidth at that moment. Processor time covers the whole process, including kernel threads
of io_uring. Spillway wins at a speed ratio above 1 and a processor time ratio below 1."""

import itertools
import os
import resource
import shutil
import statistics
import tempfile
import time

import spillway
from spillway.deepspeed import _ops

from . import _io_fio, _machine, _progress
from ._io_contender import Contender

_MIB = 1 << 20
# Block size, queue depth, single_submit, overlap_events, intra_op_parallelism. Spillway ignores the last three.
_DEFAULTS = (_MIB, 8, False, True, 1)
_OURS = [(_MIB, depth, False, True, 1) for depth in (4, 8, 32)]


def run(options):
    """The report, as a dict."""
    folder = tempfile.mkdtemp(prefix="spillway-bench-", dir=options.dir)
    try:
        _progress.stage("loading DeepSpeed's op, which may compile it")
        native, reason = _machine.deepspeed_op("AsyncIOBuilder")
        cases = [_case(folder, native, options, min(tensor, options.size), apart)
                 for tensor in options.tensor for apart in options.files
                 if not apart or tensor < options.size]
    finally:
        shutil.rmtree(folder)
    return {"version": spillway.__version__, "cpu": _machine.cpu(),
            "date": time.strftime("%Y-%m-%d"), "deepspeed": reason, "rounds": options.rounds, "cases": cases}


def _case(folder, native, options, tensor, apart):
    """`size` bytes as tensors of `tensor` bytes, in one file or a file each."""
    count = max(1, options.size // tensor)
    places = [(os.path.join(folder, f"tensor{n}" if apart else "tensors"), 0 if apart else n * tensor)
              for n in range(count)]
    files = "a file each" if apart else "one file"
    tensors = "1 tensor" if count == 1 else f"{count} tensors"
    case = f"{tensors} of {tensor // _MIB} MiB, {files}, one wait"
    _progress.stage(f"{case}: writing the files")
    _fill(places, tensor)
    part = places[:max(1, count // 4)]
    ours = _ops.module("async_io")
    _progress.stage(f"{case}: finding Spillway's best settings")
    work = {"spillway": Contender("Spillway", ours, places, tensor, _fastest(ours, part, tensor, _OURS))}
    if native:
        _progress.stage(f"{case}: finding DeepSpeed's best settings")
        work["deepspeed"] = Contender("DeepSpeed", native, places, tensor, _best(native, part, tensor))
        work["as it comes"] = Contender("DeepSpeed as it comes", native, places, tensor, _DEFAULTS)
    _progress.stage(f"{case}: comparing what is read and written")
    _agree(work)
    if not apart and _io_fio.installed():
        work["fio"] = _io_fio.Ceiling(places[0][0])
    results = []
    for way in ("read", "write"):
        taken = {name: [] for name in work}
        for round_number in range(options.rounds + 1):
            _progress.stage(f"{case}: {way}, round {round_number} of {options.rounds}")
            for name, contender in work.items():
                figures = _timed(getattr(contender, way))
                if round_number:
                    taken[name].append(figures)
        results += _rows(way, taken, {name: contender.setting for name, contender in work.items()}, count * tensor)
    for contender in work.values():
        contender.close()
    for path in {path for path, _ in places}:
        os.unlink(path)
    return {"case": case, "results": results}


def _best(native, places, tensor):
    """DeepSpeed's op at its fastest settings: block size, depth, one or many requests per call, overlap, threads.

    The first search varies block size, depth and threads, with overlap; the second varies submission and waiting."""
    settings = [(block, depth, False, True, threads)
                for block, depth, threads in itertools.product((_MIB, 8 * _MIB), (32, 128), (1, 2, 8))
                if block <= max(tensor, _MIB)]
    found = _fastest(native, places, tensor, settings)
    block, depth, _, _, threads = found
    others = [(block, depth, single, overlap, threads)
              for single, overlap in ((False, False), (True, True), (True, False))]
    return _fastest(native, places, tensor, [found, *others])


def _fastest(module, places, tensor, settings):
    speeds = {setting: _seconds(module, places, tensor, setting) for setting in settings}
    return min(speeds, key=speeds.get)


def _seconds(module, places, tensor, setting):
    contender = Contender(module.__name__, module, places, tensor, setting)
    contender.read()
    seconds = sum(min(_timed(way)[0] for _ in range(3)) for way in (contender.read, contender.write))
    contender.close()
    return seconds


def _fill(places, tensor):
    """Fills files with random bytes, so that a device cannot compress them."""
    block = os.urandom(_MIB)
    for number, (path, offset) in enumerate(places):
        with open(path, "r+b" if os.path.exists(path) else "wb") as file:
            file.seek(offset)
            for part in range(tensor // _MIB):
                stamp = f"{number} {part} ".encode()
                file.write(stamp + block[len(stamp):])
    os.sync()


def _agree(work):
    """Checks that reads return the files' content and that writes change it."""
    for contender in work.values():
        contender.read()
        contender.compare()
        contender.write()
        contender.read()
        contender.compare()


def _timed(work):
    """Elapsed seconds and processor seconds; for another program the seconds that it reports, without processor
    time."""
    before, start = _processor(), time.perf_counter()
    named = work()
    seconds = time.perf_counter() - start
    return (named, None) if named else (seconds, _processor() - before)


def _processor():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _rows(way, taken, settings, size):
    ours = taken["spillway"]
    rows = []
    for name, figures in taken.items():
        speed = statistics.median(own / other for (own, _), (other, _) in zip(ours, figures))
        row = {"way": way, "name": name, "setting": settings[name],
               "gb_per_s": round(size / 1e9 / statistics.median(seconds for seconds, _ in figures), 3),
               "speed_ratio": round(1 / speed, 3)}
        if figures[0][1] is not None:
            processor = statistics.median(own / max(other, 1e-9) for (_, own), (_, other) in zip(ours, figures))
            row["cpu_seconds_per_gb"] = round(statistics.median(cpu for _, cpu in figures) / (size / 1e9), 5)
            row["cpu_ratio"] = round(processor, 3)
        rows.append(row)
    return rows


def table(report):
    """The report as text."""
    lines = [f"{report['cpu']}; DeepSpeed {report['deepspeed']}",
             f"median of {report['rounds']} rounds in alternation; speed: Spillway's over the other's; cpu: Spillway's "
             "processor time over the other's", "setting: block, depth, single_submit, overlap_events, threads"]
    for case in report["cases"]:
        lines += ["", case["case"]]
        lines += [_line(row) for row in case["results"]]
    return "\n".join(lines)


def _line(row):
    processor, ratio = " " * 18, " " * 12
    if "cpu_ratio" in row:
        processor, ratio = f" {row['cpu_seconds_per_gb']:8.4f} cpu s/GB", f"  cpu {row['cpu_ratio']:6.2f}"
    return (f"  {row['way']:<6} {row['name']:<11} {row['gb_per_s']:7.3f} GB/s{processor}"
            f"   speed {row['speed_ratio']:6.2f}{ratio}  {row['setting']}")
