"""Benchmarks Spillway's async_io op against DeepSpeed's compiled one on the same files.

Both read and write in this process, in alternation, each on buffers that it allocates itself. The data read is compared
before the timing. Each op runs at its best settings, which are searched first; DeepSpeed's also runs at the settings of
a configuration without an "aio" block. fio, if installed, takes its turn on a file that holds all tensors, as a
reference for the device's bandwidth at that moment. Processor time covers the whole process, including kernel threads
of io_uring. Both ratios are the other's time over Spillway's: above 1, Spillway takes less."""

import itertools
import os
import resource
import shutil
import tempfile
import time
from typing import Any

from spillway.deepspeed import _hook

from . import _machine, _progress, _report
from ._io_contenders import Ceiling, Contender, fio_installed

_MIB = 1 << 20
# Block size, queue depth, single_submit, overlap_events, intra_op_parallelism. Spillway ignores the last three.
_DEFAULTS = (_MIB, 8, False, True, 1)
_OURS = [(_MIB, depth, False, True, 1) for depth in (4, 8, 32)]


NAME = "python io"
COLUMNS = [
    ("tensors", "tensors", 7, None),
    ("of", "tensor_bytes", 5, None),
    ("files", "files", 5, None),
    ("way", "direction", 5, None),
    ("contender", "contender", 11, None),
    ("GB/s", "gb_per_s", 7, 3),
    ("cpu s/GB", "cpu_seconds_per_gb", 8, 4),
    ("time ratio", "time_ratio", 10, 2),
    ("q1..q3", "quartiles", 12, 2),
    ("cpu ratio", "cpu_time_ratio", 9, 2),
]


def prepare(options):
    """The settings of the report, and DeepSpeed's op."""
    _progress.stage("loading DeepSpeed's op, which may compile it")
    native, reason = _machine.deepspeed_op("AsyncIOBuilder")
    return {"deepspeed": reason, "rounds": options.rounds}, native


def rows(options, native):
    """The rows of each case, as soon as they are measured. Their notes are block size, depth, single_submit,
    overlap_events and threads."""
    folder = tempfile.mkdtemp(prefix="spillway-bench-", dir=options.dir)
    try:
        for tensor in options.tensor:
            for apart in options.files:
                if not apart or tensor < options.size:
                    yield from _case(folder, native, options, min(tensor, options.size), apart)
    finally:
        shutil.rmtree(folder)


def _case(folder, native, options, tensor, apart):
    """`size` bytes as tensors of `tensor` bytes, in one file or a file each."""
    count = max(1, options.size // tensor)
    places = [(os.path.join(folder, f"tensor{n}" if apart else "tensors"), 0 if apart else n * tensor) for n in range(count)]
    tensors = "1 tensor" if count == 1 else f"{count} tensors"
    case = f"{tensors} of {_report.text(tensor)}, {'a file each' if apart else 'one file'}"
    _progress.stage(f"{case}: writing the files")
    _fill(places, tensor)
    part = places[: max(1, count // 4)]
    ours = _hook.module_of("async_io")
    _progress.stage(f"{case}: finding Spillway's best settings")
    work: dict[str, Any] = {"spillway": Contender("Spillway", ours, places, tensor, _fastest(ours, part, tensor, _OURS))}
    if native:
        _progress.stage(f"{case}: finding DeepSpeed's best settings")
        work["deepspeed"] = Contender("DeepSpeed", native, places, tensor, _best(native, part, tensor))
        work["as it comes"] = Contender("DeepSpeed as it comes", native, places, tensor, _DEFAULTS)
    _progress.stage(f"{case}: comparing what is read and written")
    _agree(work)
    if not apart and fio_installed():
        work["fio"] = Ceiling(places[0][0])
    for way in ("read", "write"):
        taken: dict[str, list[Any]] = {name: [] for name in work}
        for round_number in range(options.rounds + 1):
            _progress.stage(f"{case}: {way}, round {round_number} of {options.rounds}")
            for name, contender in work.items():
                figures = _timed(getattr(contender, way))
                if round_number:
                    taken[name].append(figures)
        fields = {"tensors": count, "tensor_bytes": tensor, "files": "each" if apart else "one", "direction": way}
        yield from _rows(fields, taken, {name: contender.setting for name, contender in work.items()})
    for contender in work.values():
        contender.close()
    for path in {path for path, _ in places}:
        os.unlink(path)


def _best(native, places, tensor):
    """DeepSpeed's op at its fastest settings: block size, depth, one or many requests per call, overlap, threads.

    The first search varies block size, depth and threads, with overlap; the second varies submission and waiting."""
    settings = [
        (block, depth, False, True, threads)
        for block, depth, threads in itertools.product((_MIB, 8 * _MIB), (32, 128), (1, 2, 8))
        if block <= max(tensor, _MIB)
    ]
    found = _fastest(native, places, tensor, settings)
    block, depth, _, _, threads = found
    others = [(block, depth, single, overlap, threads) for single, overlap in ((False, False), (True, True), (True, False))]
    return _fastest(native, places, tensor, [found, *others])


def _fastest(module, places, tensor, settings):
    speeds = {setting: _seconds(module, places, tensor, setting) for setting in settings}
    return min(speeds, key=speeds.__getitem__)


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
                file.write(stamp + block[len(stamp) :])
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


def _rows(fields, taken, settings):
    """A row for each contender; without another than Spillway, the bandwidth is the headline."""
    gigabytes = fields["tensors"] * fields["tensor_bytes"] / 1e9
    columns = {name: list(zip(*figures)) for name, figures in taken.items()}
    our_seconds, our_processor = columns["spillway"]
    headline = "time_ratio" if len(taken) > 1 else "gb_per_s"
    for name, (seconds, processor) in columns.items():
        figures = {"gb_per_s": [gigabytes / each for each in seconds], "time_ratio": _report.ratios(seconds, our_seconds)}
        if None not in processor:
            figures["cpu_seconds_per_gb"] = [each / gigabytes for each in processor]
            figures["cpu_time_ratio"] = _report.ratios(processor, our_processor)
        yield _report.row({**fields, "contender": name}, figures, headline, "higher", str(settings[name]))
