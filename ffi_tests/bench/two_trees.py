"""Steps of torch optimizers and operations of a tier: this tree against another checkout, in alternation.

    python ffi_tests/bench/two_trees.py OTHER [--rounds N] [--dir DIR] [--rows NAME,NAME]

Both trees have a release library (`make lib`). Each tree runs in a process of its own, with its own package and library.
Both processes do one row at a time and take turns, so that only one works at any moment. A row prints the median time of
each tree and the median of the ratios of neighbouring turns: above 1, this tree is faster."""

import argparse
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parents[2]


def torch_step(count, n, dtype="float32", **options):
    """AdamW.step of parameters of `n` elements."""
    import torch

    import spillway.torch

    torch.manual_seed(0)
    dtype = getattr(torch, dtype)
    params = [torch.nn.Parameter(torch.randn(n).to(dtype)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(n).to(dtype)
    optimizer = spillway.torch.AdamW(params, lr=1e-3, weight_decay=0.01, **options)
    return optimizer.step


def offload_step(count, n):
    """A step of offload() with parameters in host memory, and backward's gradients ready."""
    import torch

    import spillway.torch

    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(n)
    return spillway.torch.offload(params, lr=1e-3, max_norm=1.0).step


def prepared(n):
    """A prepared step of numpy arrays."""
    import numpy

    import spillway

    arrays = [numpy.ones(n, numpy.float32) for _ in range(4)]
    return spillway.Adam(lr=1e-3).prepare([tuple(arrays)]).step


def tier(folder, extent_bytes, extents, action):
    """A function that puts all extents, or puts one and commits, or verifies what was committed."""
    import numpy

    import spillway

    opened = spillway.Tier([folder], job="bench")
    data = [numpy.full(extent_bytes, number, numpy.uint8) for number in range(extents)]
    numbers = [opened.define(f"extent{number}", [extent_bytes]) for number in range(extents)]
    steps = iter(range(1, 1 << 30))

    def put():
        for ticket in [opened.put(number, [array]) for number, array in zip(numbers, data, strict=True)]:
            opened.wait(ticket)

    def get():
        for ticket in [opened.get(number, [array]) for number, array in zip(numbers, data, strict=True)]:
            opened.wait(ticket)

    def put_and_commit():
        opened.wait(opened.put(numbers[0], [data[0]]))
        opened.commit(next(steps))

    put()
    opened.commit(next(steps))
    return {"put": put, "get": get, "commit": put_and_commit, "verify": opened.verify}[action]


# name: how the work is made in a folder, and how often a turn does it.
ROWS = {
    "prepared step, 16 elements": (lambda _: prepared(16), 20_000),
    "AdamW.step, 1 tensor of 64": (lambda _: torch_step(1, 64), 2_000),
    "AdamW.step, 100 tensors of 64": (lambda _: torch_step(100, 64), 500),
    "AdamW.step, 10,000 tensors of 64": (lambda _: torch_step(10_000, 64), 6),
    "AdamW.step, 100 tensors of 64, clipped": (lambda _: torch_step(100, 64, max_norm=1.0), 500),
    "AdamW.step, 10,000 tensors of 64, clipped": (lambda _: torch_step(10_000, 64, max_norm=1.0), 6),
    "AdamW.step, 1 tensor of 16 Mi": (lambda _: torch_step(1, 16 << 20), 5),
    "AdamW.step, 1,000 bf16 tensors of 64, f32 masters": (lambda _: torch_step(1_000, 64, "bfloat16", master="f32"), 60),
    "AdamW.step, 64 bf16 tensors of 64 Ki, f32 masters": (lambda _: torch_step(64, 64 << 10, "bfloat16", master="f32"), 20),
    "AdamW.step, 1 bf16 tensor of 16 Mi, f32 master": (lambda _: torch_step(1, 16 << 20, "bfloat16", master="f32"), 5),
    "AdamW.step, 64 bf16 tensors of 64 Ki, split masters": (lambda _: torch_step(64, 64 << 10, "bfloat16", master="split"), 20),
    "AdamW.step, 1 bf16 tensor of 16 Mi, split master": (lambda _: torch_step(1, 16 << 20, "bfloat16", master="split"), 5),
    "offload.step, 2,000 tensors of 64": (lambda _: offload_step(2_000, 64), 8),
    "offload.step, 16 tensors of 1 Mi": (lambda _: offload_step(16, 1 << 20), 4),
    "tier, 64 puts of 64 KiB": (lambda folder: tier(folder, 64 << 10, 64, "put"), 10),
    "tier, 64 gets of 64 KiB": (lambda folder: tier(folder, 64 << 10, 64, "get"), 10),
    "tier, 4 puts of 64 MiB": (lambda folder: tier(folder, 64 << 20, 4, "put"), 1),
    "tier, 4 gets of 64 MiB": (lambda folder: tier(folder, 64 << 20, 4, "get"), 1),
    "tier, a put of 4 KiB and a commit": (lambda folder: tier(folder, 4 << 10, 8, "commit"), 50),
    "tier, verify of 256 MiB": (lambda folder: tier(folder, 64 << 20, 4, "verify"), 1),
}


def serve(name, folder):
    """The process of one tree: does a turn for each line of its input, and prints the seconds of one repetition."""
    make, repeats = ROWS[name]
    work = make(folder)
    work()
    print("ready", flush=True)
    for _ in sys.stdin:
        begun = time.perf_counter()
        for _ in range(repeats):
            work()
        print((time.perf_counter() - begun) / repeats, flush=True)


class Side:
    """The process of one tree for one row."""

    def __init__(self, tree, name, folder):
        folder.mkdir()
        environment = {
            **os.environ,
            "SPILLWAY_LIBRARY": str(tree / "target/release/libspillway.so"),
            "PYTHONPATH": str(tree / "packaging/python"),
        }
        command = [sys.executable, __file__, "--serve", name, "--dir", folder]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder)
        self.taken = []
        if self.process.stdout.readline() != "ready\n":
            raise SystemExit(f"{name}: the process of {tree} failed; its error stands above")

    def turn(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.taken.append(float(self.process.stdout.readline()))

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def compare(name, trees, rounds, folder):
    """Seconds of both trees in each round, which begin with one and the other."""
    folder = pathlib.Path(tempfile.mkdtemp(dir=folder))
    sides = []
    try:
        for number, tree in enumerate(trees):
            sides.append(Side(tree, name, folder / str(number)))
        for number in range(rounds):
            for side in sides if number % 2 else sides[::-1]:
                side.turn()
    finally:
        for side in sides:
            side.end()
        shutil.rmtree(folder)
    return [side.taken for side in sides]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", nargs="?", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dir", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()))
    parser.add_argument("--rows", help="parts of the names of rows, separated by commas")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, options.dir)
    if options.other is None:
        parser.error("OTHER is the folder of another checkout")
    parts = options.rows.split(",") if options.rows else [""]
    for name in ROWS:
        if any(part in name for part in parts):
            ours, theirs = compare(name, (HERE, options.other.resolve()), options.rounds, options.dir)
            ratio = statistics.median(other / our for our, other in zip(ours, theirs, strict=True))
            print(
                f"{name:44} {1e6 * statistics.median(ours):12.2f} us  {1e6 * statistics.median(theirs):12.2f} us  ratio {ratio:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
