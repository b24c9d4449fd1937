"""Trains small GPTs under DeepSpeed with Spillway's ops, and prints a table of what each run proves.

DeepSpeed is unmodified: SPILLWAY_DEEPSPEED=1 is all that serves it. One run needs stand-ins on a machine without a GPU:
DeepSpeed's SuperOffload asks for CUDA and a stream, and superoffload.py replaces both by stubs.

The runs are forked from a process that has imported torch and DeepSpeed, which saves seconds for each; every run names the
command that does the same. demo.sh sets up what this program needs.

    demo.py --compile      compiles DeepSpeed's own cpu_adam into TORCH_EXTENSIONS_DIR, to compare with"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import signal
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
SHARED = pathlib.Path("/dev/shm")
# Seconds after which a run is given up.
LIMIT = 300


class Failed(Exception):
    """A run ended with an error, or did not prove its claim."""


class Demo:
    def __init__(self, options):
        from forked import Starter

        self.work, self.options = pathlib.Path(options.work), options
        self.dtype = fast_dtype()
        self.table, self._starters = [], []
        self._shared = set(os.listdir(SHARED)) if SHARED.is_dir() else set()
        self._folders = []
        threads = str(min(os.cpu_count() or 1, 8))
        # Two runs are bit-identical only for the same number of OpenMP threads.
        self._environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads), "DS_ACCELERATOR": "cpu"}
        self._starter = lambda module, **settings: self._keep(
            # Threads that wait leave the processor to others, so that the demo also ends on a busy machine.
            Starter(sys.executable, module, session=True, DS_ACCELERATOR="cpu", OMP_WAIT_POLICY="passive", **settings)
        )
        self._spillway = self._starter("forked", SPILLWAY_DEEPSPEED="1")
        self._native = None

    def _keep(self, starter):
        self._starters.append(starter)
        return starter

    def folder(self, path):
        """An empty folder that the demo removes at its end."""
        path = pathlib.Path(path)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        self._folders.append(path)
        return path

    def run(self, name, script, *arguments, kill_at=None, deepspeed=True):
        """The report of a run with Spillway; None if it was killed after step `kill_at`."""
        extensions = self.folder(self.work / "extensions")
        variable = {"SPILLWAY_DEEPSPEED": "1"} if deepspeed else {}
        environment = {**self._environment, **variable, "TORCH_EXTENSIONS_DIR": str(extensions)}
        prefix = "SPILLWAY_DEEPSPEED=1 " if deepspeed else ""
        report = self._run(self._spillway, environment, prefix, name, script, arguments, kill_at)
        if any(extensions.iterdir()):
            raise Failed(f"{name}: DeepSpeed compiled {os.listdir(extensions)}")
        return report

    def native(self, name, script, *arguments):
        """The report of a run with DeepSpeed's own compiled ops."""
        self._native = self._native or self._starter("demo")
        return self._run(self._native, self._environment, "", name, script, arguments, None)

    def _run(self, starter, environment, prefix, name, script, arguments, kill_at):
        report = self.work / f"{name}.json"
        report.unlink(missing_ok=True)
        command = [HERE / script, *arguments, "--json", report]
        print(f"  $ {prefix}python ffi_tests/deepspeed/{script} {' '.join(map(quoted, arguments))}", flush=True)
        with open(self.work / f"{name}.log", "w+") as errors:
            run = starter.start(command, environment, errors)
            killed = False
            with run.stdout:
                for line in run.stdout:
                    if kill_at is None:
                        show(line)
                    elif line == f"step {kill_at}\n":
                        run.kill()
                        killed = True
            status = run.wait(LIMIT)
            if killed:
                return None
            if status or not report.exists():
                errors.seek(0)
                raise Failed(f"{name}: exit status {status}\n{errors.read()[-2000:]}")
        found = json.loads(report.read_text())
        losses = found["losses"]
        if len(losses) >= 5 and mean(losses[-3:]) >= mean(losses[:2]):
            raise Failed(f"{name}: the loss did not fall: {losses}")
        return found

    def row(self, run, proves, rate, more):
        self.table.append((run, proves, f"{rate:.1f}" if rate else "", more))

    def close(self):
        """Ends all processes of the demo, and removes its folders and its shared memory."""
        for starter in self._starters:
            starter.kill()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        for name in set(os.listdir(SHARED)) - self._shared if SHARED.is_dir() else ():
            # The queue of the tier's turns; other names are not of this demo.
            if name.startswith(f"spillway-turns-{os.getuid()}"):
                shutil.rmtree(SHARED / name, ignore_errors=True)


def fast_dtype():
    """The dtype in which this processor multiplies matrices faster, by a probe of some milliseconds. It counts processor
    time, which other programs do not change much."""
    import torch

    torch.set_num_threads(1)
    rates = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        a, b = torch.ones(192, 192, dtype=dtype), torch.ones(192, 192, dtype=dtype)
        seconds = []
        for _ in range(4):
            start = time.thread_time()
            a @ b
            seconds.append(time.thread_time() - start)
        rates[name] = 2 * 192**3 / max(min(seconds), 1e-9) / 1e9
    chosen = max(rates, key=rates.get)
    print(
        f"demo: this processor multiplies matrices at {rates['bf16']:.0f} GFLOP/s in bf16 and {rates['fp32']:.0f} in fp32 "
        f"(one thread): the models train in {chosen}"
    )
    return chosen


def zero(demo, stage):
    """States in host memory; repeated with DeepSpeed's own op."""
    print(f"ZeRO-{stage}, optimizer states in host memory")
    arguments = ["--stage", stage, *small(demo), "--steps", demo.options.steps]
    ours = demo.run(f"spillway-{stage}", "train.py", *arguments)
    theirs = None
    if demo.options.compare == "1" or (demo.options.compare == "auto" and stage == 2):
        theirs = demo.native(f"native-{stage}", "train.py", *arguments, "--native")
    proves = same_bits(ours, theirs, demo.dtype) if theirs else "DeepSpeed compiled nothing"
    demo.row(f"ZeRO-{stage}", f"{proves}; loss {change(ours)}", ours["steps_per_second"], "docs/deepspeed.md")
    if theirs:
        demo.row("  with DeepSpeed's op", "the reference", theirs["steps_per_second"], "docs/benchmarks.md")


def same_bits(ours, theirs, dtype):
    if ours["sha256"] == theirs["sha256"]:
        return "final weights equal DeepSpeed's own op, bit for bit"
    if theirs["width"] == "AVX512" or (theirs["width"] == "AVX256" and dtype == "fp32"):
        raise Failed(f"the final weights differ: {ours['sha256']}, DeepSpeed's op {theirs['sha256']}")
    return f"DeepSpeed's {theirs['width']} build leaves roundings to the compiler: last bits differ"


def files(demo):
    """States, gradients and parameters in files, which DeepSpeed moves for matrices of a mebibyte and more."""
    print("ZeRO-3, states and parameters in files")
    folder = demo.folder(pathlib.Path(demo.options.files) / "spillway-files")
    arguments = [
        "--nvme",
        folder,
        "--dtype",
        demo.dtype,
        "--dim",
        512 if demo.dtype == "fp32" else 768,
        "--layers",
        1,
        "--context",
        64,
        "--batch",
        4,
        "--steps",
        10,
    ]
    ours = demo.run("spillway-files", "train.py", *arguments)
    moved = ours["active"]["async_io"]
    proves = (
        f"async_io and pin_memory served, {(moved['read_bytes'] + moved['written_bytes']) / 1e9:.1f} GB moved by {ours['active']['io']}"
    )
    if demo.options.compare == "1":
        demo.folder(folder)
        theirs = demo.native("native-files", "train.py", *arguments, "--native")
        proves = same_bits(ours, theirs, demo.dtype)
    demo.row("ZeRO-3, files", proves, ours["steps_per_second"], "docs/why.md")
    shutil.rmtree(folder)


def speculation(demo):
    """Sub-groups step during backward. Some gradients are clipped, some are infinite."""
    print("SuperOffload: every 5th gradient 1000 times as large, every 7th infinite")
    print("  (stand-ins on the CPU: DeepSpeed's check for CUDA is skipped, and its stream is a stub)")
    arguments = ["--spikes", "--clip", 2.5, "--steps", 15, "--dtype", demo.dtype]
    ours = demo.run("super", "superoffload.py", "--mode", "super", *arguments)
    waits = demo.run("serial", "superoffload.py", "--mode", "serial", *arguments)
    equal("speculation changed the final weights", ours, waits)
    done = ours["active"]["superoffload"]
    demo.row(
        "SuperOffload",
        f"clipped during backward: {done['buckets_speculated']} sub-groups stepped early, {done['redos']} updates redone, "
        f"{done['aborts']} taken back; bits of the run that waits",
        ours["steps_per_second"],
        "docs/speculation.md",
    )


def tier(demo):
    """Two directories, of which the first holds two thirds of the state. The run is killed after step 6 and restarted."""
    print("ZeRO-3, states on a tier of two paths, every step committed")
    folder = demo.folder(demo.work / "tier")
    paths = [folder / "nvme", folder / "pfs"]
    for path in paths:
        path.mkdir()
    arguments = ["--dim", 128, "--layers", 3, "--sub_group", 120000, "--steps", 12, "--dtype", demo.dtype]
    block = json.dumps({"ratio": [2, 1], "resume": True, "host_memory": 8000000, "job": "demo"})
    on_tier = [*arguments, "--paths", *paths, "--block", block]
    host = demo.run("host", "tiered.py", *arguments)
    if demo.run("killed", "tiered.py", *on_tier, "--progress", kill_at=6) is not None:
        raise Failed("the run on the tier ended before it was killed")
    print("  killed by SIGKILL after step 6")
    again = demo.run("again", "tiered.py", *on_tier)
    equal("the run that was killed has other weights", again, host)
    if not 0 < again["began_at"] < 12:
        raise Failed(f"the run began at step {again['began_at']}")
    demo.row(
        "ZeRO-3, tier",
        f"resumed at step {again['began_at']} after kill -9; final weights equal the run in host memory, bit for bit",
        again["steps_per_second"],
        "docs/tier.md",
    )
    shutil.rmtree(folder)


def pipelined(demo):
    """Two processes with forward and backward passes of a stage in different ones. DeepSpeed is not used."""
    print("torch, a pipeline of two processes by SysX's decoupled schedule")
    report = demo.run("pipelined", "pipelined.py", "--steps", 6, deepspeed=False)
    demo.row(
        "torch pipeline",
        "bits of the serial run; a killed process is reported, and nothing is left of it",
        report["steps_per_second"],
        "docs/pipeline.md",
    )


def small(demo):
    return ["--dtype", demo.dtype, "--dim", 192, "--layers", 4, "--context", 64]


def equal(message, one, other):
    if one["sha256"] != other["sha256"]:
        raise Failed(f"{message}: {one['sha256']}, {other['sha256']}")


def change(report):
    return f"{mean(report['losses'][:3]):.2f} -> {mean(report['losses'][-3:]):.2f}"


def mean(values):
    return sum(values) / len(values)


def quoted(argument):
    text = str(argument)
    return f"'{text}'" if any(letter in text for letter in ' "{[') else text


def show(line):
    """Hashes and counters are in the reports; the table has what they prove."""
    if not line.lstrip().startswith(("sha256", "active:", "compiled ops")):
        print(f"  {line.rstrip()}", flush=True)


def print_table(rows):
    head = ("run", "what it proves", "steps/s", "read on")
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(4)]
    print()
    for row in (head, tuple("-" * width for width in widths), *rows):
        print(
            "  ".join(
                cell.rjust(width) if column == 2 else cell.ljust(width) for column, (cell, width) in enumerate(zip(row, widths))
            ).rstrip()
        )


def import_all():
    """What the process of the runs on DeepSpeed's own ops imports. DeepSpeed's collectives in shared memory, which one rank
    does not use, would take as long to compile as the op."""
    import forked

    forked.import_all()
    from deepspeed.ops.op_builder import cpu

    cpu.comm.ShareMemCommBuilder.is_compatible = lambda self, verbose=False: False


def compile_op():
    os.environ["DS_ACCELERATOR"] = "cpu"
    import compiled_ops

    compiled_ops.newest("cpu_adam")


def main():
    options = arguments()
    if options.compile:
        compile_op()
        return
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    demo = None
    try:
        demo = Demo(options)
        zero(demo, 2)
        zero(demo, 3)
        files(demo)
        speculation(demo)
        tier(demo)
        pipelined(demo)
    except Failed as reason:
        sys.exit(f"demo: {reason}")
    except KeyboardInterrupt:
        print("\ndemo: interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        # A second Ctrl-C does not stop the clean-up.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with contextlib.suppress(AttributeError):
            demo.close()
    print_table(demo.table)
    print(f"\ndemo: ok, trained for {time.monotonic() - began:.0f} s")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="compile DeepSpeed's op and do nothing else")
    parser.add_argument("--work", default="target/demo", help="folder of logs and reports")
    parser.add_argument("--files", default="target/demo", help="folder below which the run on files has its files")
    parser.add_argument("--steps", type=int, default=40, help="steps of the first two runs")
    parser.add_argument("--compare", choices=("0", "1", "auto"), default="auto")
    return parser.parse_args()


if __name__ == "__main__":
    main()
