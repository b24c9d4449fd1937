"""Measures the seconds of one optimizer step of Spillway's tier and of DeepSpeed's PipelinedOptimizerSwapper.
DeepSpeed uses its compiled ops. Both use the same directories and step in turn; gradients are included.

    python tier_deepspeed.py DIRECTORY [DIRECTORY]    with SPILLWAY_DEEPSPEED unset, in an environment that has both

Each kind runs in a process of its own, which steps on command. The time of a step covers backward, which moves
gradients, and engine.step(), minus the backward of the run with states in host memory. DeepSpeed can use the first
directory only. Resident memory is that of the whole process, as the kernel counts it: at the end, and its peak."""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

DEEPSPEED_TESTS = pathlib.Path(__file__).resolve().parents[1] / "deepspeed"


def main():
    options = arguments()
    if options.kind:
        return serve(options)
    kinds = {"host": options.directories[:1], "deepspeed": options.directories[:1], "spillway-1": options.directories[:1]}
    if len(options.directories) > 1:
        kinds["spillway-2"] = options.directories
    runs = {kind: start(options, kind, directories) for kind, directories in kinds.items()}
    seconds = {kind: [] for kind in runs}
    for number in range(options.warm + options.rounds):
        # A rate-limited device transfers more after a pause, so the order of the kinds rotates.
        for kind in [*runs][number % len(runs) :] + [*runs][: number % len(runs)]:
            runs[kind].stdin.write("step\n")
            seconds[kind].append(json.loads(runs[kind].stdout.readline()))
    ends = {kind: end(process) for kind, process in runs.items()}
    assert len({hashed for hashed, *_ in ends.values()}) == 1, ends
    report(options, {kind: times[options.warm :] for kind, times in seconds.items()}, ends)


def start(options, kind, directories):
    environment = dict(os.environ, DS_ACCELERATOR="cpu")
    if kind != "deepspeed":
        environment["SPILLWAY_DEEPSPEED"] = "1"
    command = [
        sys.executable,
        __file__,
        *directories,
        "--kind",
        kind,
        "--matrices",
        str(options.matrices),
        "--part",
        str(options.part),
        "--more",
        str(options.more),
        "--compute",
        str(options.compute),
        "--aio",
        options.aio,
    ]
    if options.split:
        command.append("--split")
    if options.overlap:
        command.append("--overlap")
    if options.ratio:
        command += ["--ratio", *map(str, options.ratio)]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    while process.stdout.readline() != "ready\n":
        assert process.poll() is None, f"the process of {kind} ended before the measurement"
    return process


def end(process):
    process.stdin.close()
    answer = json.loads(process.stdout.readline())
    process.wait()
    return answer


def report(options, seconds, ends):
    base = statistics.median(backward for _, backward, _ in seconds["host"])
    steps = {kind: [backward + step - base for _, backward, step in times] for kind, times in seconds.items()}
    iterations = {kind: [sum(parts) for parts in times] for kind, times in seconds.items()}
    state = options.matrices * 12 * (1 << 20)
    print(f"{options.matrices} M parameters, {state / 1e9:.2f} GB of state, {options.rounds} rounds")
    for kind, times in steps.items():
        ratios = [theirs / ours for theirs, ours in zip(steps["deepspeed"], times)]
        print(
            f"{kind:11s} {statistics.median(times):7.3f} s a step (from {min(times):.3f} to {max(times):.3f}), "
            f"{2 * state / statistics.median(times) / 1e9:6.2f} GB/s, DeepSpeed / this: {statistics.median(ratios):.2f}, "
            f"resident {ends[kind][1]:.2f} GB, at most {ends[kind][2]:.2f}"
        )
    for kind, times in iterations.items():
        ratios = [theirs / ours for theirs, ours in zip(iterations["deepspeed"], times)]
        print(f"{kind:11s} {statistics.median(times):7.3f} s an iteration, DeepSpeed / this: {statistics.median(ratios):.2f}")


def serve(options):
    """Steps once for each line of standard input."""
    sys.path.insert(0, str(DEEPSPEED_TESTS))
    output, sys.stdout = sys.stdout, sys.stderr
    import train

    train.become_single_rank()
    import deepspeed

    engine = made(deepspeed, options)
    print("ready", file=output, flush=True)
    for _ in sys.stdin:
        moments = [time.perf_counter()]
        engine.zero_grad()
        loss = engine()
        moments.append(time.perf_counter())
        engine.backward(loss)
        moments.append(time.perf_counter())
        engine.step()
        moments.append(time.perf_counter())
        print(json.dumps([after - before for before, after in zip(moments, moments[1:])]), file=output, flush=True)
    resident = [status("VmRSS"), status("VmHWM")]
    print(json.dumps([train.weights_hash(engine.module), *resident]), file=output, flush=True)
    compiled = train.compiled_ops()
    assert bool(compiled) == (options.kind == "deepspeed"), compiled


def status(name):
    """GB of this process."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith(name + ":"))


def made(deepspeed, options):
    import torch

    class Matrices(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            # One module for each matrix, so that ZeRO-3 gathers at most one of them at a time.
            self.parts = torch.nn.ModuleList(Matrix() for _ in range(options.matrices))

        def forward(self):
            return sum(part() for part in self.parts)

    class Matrix(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(1024, 1024))

        def forward(self):
            # The norm of the gradients is below the limit: nothing is clipped.
            return Waits.apply(1e-5 * (self.weight * self.weight).sum().float(), options.compute / options.matrices)

    class Waits(torch.autograd.Function):
        """A third of some seconds in forward, and the rest in backward."""

        @staticmethod
        def forward(context, x, seconds):
            context.seconds = seconds
            time.sleep(seconds / 3)
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            time.sleep(context.seconds * 2 / 3)
            return gradient, None

    model = Matrices()
    offload = {"device": "cpu"}
    if options.kind != "host":
        offload = {"device": "nvme", "nvme_path": options.directories[0], "buffer_count": 14, "pipeline_read": True, "pipeline_write": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "sub_group_size": 4 << 20, "reduce_bucket_size": 4 << 20, "offload_optimizer": offload},
        "aio": json.loads(options.aio),
        "spillway": block(options),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "steps_per_print": 1 << 30,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def block(options):
    """The memory of DeepSpeed's 14 buffers of 16 MiB, plus the requested extra."""
    if options.kind in ("host", "deepspeed"):
        return {}
    found = {
        "paths": options.directories,
        "job": options.kind,
        "part_elements": options.part,
        "split_master": options.split,
        "overlap": options.overlap,
        "host_memory": 14 * 16 + options.more << 20,
    }
    return {**found, "ratio": options.ratio} if options.ratio else found


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directories", nargs="+")
    parser.add_argument("--matrices", type=int, default=32, help="matrices of 1 Mi parameters")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm", type=int, default=8, help="rounds before those, in which the speeds of paths are learnt")
    parser.add_argument("--ratio", type=float, nargs="+", help="share of each directory; default: as measured")
    parser.add_argument("--part", type=int, default=1 << 20, help="elements that Spillway fetches and keeps at a time")
    parser.add_argument("--more", type=int, default=0, help="MiB that Spillway caches beyond what DeepSpeed's buffers take")
    parser.add_argument("--split", action="store_true", help="Spillway with split masters: 10 bytes a parameter instead of 12")
    parser.add_argument("--compute", type=float, default=0.0, help="seconds of forward and backward")
    parser.add_argument("--overlap", action="store_true", help="Spillway steps during backward")
    # The best of DeepSpeed's settings on the measured machines.
    parser.add_argument(
        "--aio",
        default='{"block_size": 1048576, "queue_depth": 32, "intra_op_parallelism": 2, "overlap_events": true}',
        help="DeepSpeed's aio block",
    )
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
