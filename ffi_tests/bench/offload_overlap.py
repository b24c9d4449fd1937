"""What remains of an optimizer's step after backward, on the CPU: spillway.torch.offload with and without overlap, torchao's
CPUOffloadOptimizer, and DeepSpeed's SuperOffload by itself and on Spillway.

    python ffi_tests/bench/offload_overlap.py [--rounds N] [--dtype bfloat16|float32] [--backward device|cpu]

The model is 12 layers of 1024 x 1024. With --backward device, backward takes no processor, as on a device: a layer has its gradient when
the shares of `offload`'s step of the layers so far are over, also if the hooks of the layer before took long. With --backward cpu it is
that of torch, which shares the processors with the step, and only `offload` is measured. The exposed time is that of `step()`. Each program
runs in a process of its own and steps on command, one after the other.

torchao and DeepSpeed have their defaults, or a sub-group and a reduce bucket per layer. Both ask for a CUDA device; the CPU is put in its
place, and its streams do their work at once. torchao has no clipping. Its moments have the dtype of the parameters, and those of the others
are float32. DeepSpeed's compiled Adam is built at its first use."""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from unittest import mock

import torch

LAYERS, WIDTH, BATCH = 12, 1024, 48
BUCKET = 2 << 20
#: A limit that clips nothing, and one that clips every step.
NEVER, ALWAYS = 1e6, 1e-9
KINDS = {
    "offload, verdict in the next forward": {"side": "offload", "max_norm": NEVER, "verdict": "forward"},
    "offload, nothing clipped": {"side": "offload", "max_norm": NEVER},
    "offload without overlap, nothing clipped": {"side": "offload", "max_norm": NEVER, "overlap": False},
    "offload, every step clipped": {"side": "offload", "max_norm": ALWAYS},
    "offload without overlap, every step clipped": {"side": "offload", "max_norm": ALWAYS, "overlap": False},
    "torchao CPUOffloadOptimizer": {"side": "torchao"},
    "DeepSpeed SuperOffload": {"side": "deepspeed"},
    "DeepSpeed SuperOffload, gradient_clipping 0": {"side": "deepspeed", "gradient_clipping": 0.0},
    "DeepSpeed SuperOffload, gradient_clipping 0, a sub-group per layer": {
        "side": "deepspeed",
        "gradient_clipping": 0.0,
        "sub_group_size": WIDTH * WIDTH,
    },
    "SuperOffload on Spillway, a sub-group per layer": {"side": "deepspeed", "spillway": {}, "sub_group_size": WIDTH * WIDTH},
    "SuperOffload on Spillway, verdict in the next forward": {
        "side": "deepspeed",
        "spillway": {"superoffload": {"verdict": "forward"}},
        "sub_group_size": WIDTH * WIDTH,
    },
}
#: Whose exposed time is 1.
BASES = {"offload": "offload without overlap, nothing clipped", "clipped": "offload without overlap, every step clipped"}


class Waits(torch.autograd.Function):
    """A layer whose backward takes `pause` seconds of a device, after that of the layer before."""

    #: When the device has completed the last layer.
    completed = 0.0

    @staticmethod
    def forward(context, x, weight, pause):
        context.save_for_backward(weight)
        context.pause = pause
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        [weight] = context.saved_tensors
        Waits.completed += context.pause
        made = torch.full_like(weight, 1e-4)
        time.sleep(max(0.0, Waits.completed - time.perf_counter()))
        return gradient, made, None


class Layer(torch.nn.Module):
    """A matrix whose forward costs nothing."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((WIDTH, WIDTH), 0.1, dtype=dtype))
        self.pause = 0.0

    def forward(self, x):
        return Waits.apply(x, self.weight, self.pause)


def model_of(options):
    dtype = getattr(torch, options.dtype)
    if options.backward == "device":
        return torch.nn.Sequential(*(Layer(dtype) for _ in range(LAYERS)))
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(dtype)


def batch_of(options):
    return torch.ones(1 if options.backward == "device" else BATCH, WIDTH, dtype=getattr(torch, options.dtype), requires_grad=True)


class Plain:
    """A training of a torch optimizer."""

    def __init__(self, options, make):
        self.model, self.x = model_of(options), batch_of(options)
        self.optimizer = make(self.model)

    def forward(self):
        return self.model(self.x).float().mean()

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self):
        pass


def offload(options, max_norm, overlap=True, verdict="step"):
    from spillway import torch as own

    return Plain(
        options, lambda model: own.offload(model, lr=1e-4, max_norm=max_norm, overlap=overlap, verdict=verdict, bucket_bytes=BUCKET)
    )


def torchao(options):
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "torch"))
    from cpu_streams import StreamOfTheCpu
    from torchao.optim import cpu_offload

    empty_like = torch.empty_like
    mock.patch.object(cpu_offload, "get_available_devices", lambda: ["cpu", "cuda"]).start()
    mock.patch.multiple(
        torch.cuda, Stream=StreamOfTheCpu, current_stream=StreamOfTheCpu, stream=lambda stream: contextlib.nullcontext()
    ).start()
    mock.patch.object(torch, "empty_like", lambda *given, pin_memory=False, **more: empty_like(*given, **more)).start()
    return Plain(options, lambda model: cpu_offload.CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4))


class DeepSpeed:
    """A training of DeepSpeed's engine."""

    def __init__(self, options, **given):
        sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "deepspeed"))
        import superoffload
        import train

        train.become_single_rank()
        if "spillway" in given:
            import spillway.deepspeed

            spillway.deepspeed.install()
        import deepspeed

        superoffload.allow_the_cpu()
        self.model, self.x = model_of(options), batch_of(options)
        zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}
        if "sub_group_size" in given:
            zero["sub_group_size"] = zero["reduce_bucket_size"] = given.pop("sub_group_size")
        config = {
            "train_micro_batch_size_per_gpu": 1,
            **({"bf16": {"enabled": True}} if options.dtype == "bfloat16" else {}),
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "steps_per_print": 1 << 30,
            **given,
        }
        self.engine, *_ = deepspeed.initialize(model=self.model, model_parameters=self.model.parameters(), config=config)

    def forward(self):
        return self.engine(self.x).float().mean()

    def backward(self, loss):
        self.engine.backward(loss)

    def step(self):
        self.engine.step()

    def close(self):
        self.engine.optimizer.superoffload_cpu_optimizer.close()


def serve(options):
    """Trains a step for each line of the input, a number of seconds of a layer's backward; prints the seconds of forward, backward and
    step."""
    given = dict(KINDS[options.kind])
    training = {"offload": offload, "torchao": torchao, "deepspeed": DeepSpeed}[given.pop("side")](options, **given)
    answers = os.fdopen(options.answers, "w")
    for line in sys.stdin:
        for layer in training.model:
            layer.pause = float(line)
        moments = [time.perf_counter()]
        loss = training.forward()
        moments.append(time.perf_counter())
        Waits.completed = moments[-1]
        training.backward(loss)
        moments.append(time.perf_counter())
        training.step()
        moments.append(time.perf_counter())
        answers.write(json.dumps([after - before for before, after in zip(moments, moments[1:])]) + "\n")
        answers.flush()
    training.close()


def start(options, kind):
    """A process of `serve`, and the file with its answers."""
    read, write = os.pipe()
    command = [sys.executable, __file__, "--kind", kind, "--answers", str(write), "--dtype", options.dtype, "--backward", options.backward]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    with open(options.log, "a") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=(write,), text=True, env=environment)
    os.close(write)
    return process, os.fdopen(read)


def main():
    options = arguments()
    if options.kind:
        return serve(options)
    kinds = [kind for kind, given in KINDS.items() if options.backward == "device" or given["side"] == "offload"]
    runs = {}

    def step(kind, pause):
        process, answers = runs[kind]
        # Threads of the process before spin for some time after their work.
        time.sleep(0.1)
        process.stdin.write(f"{pause}\n")
        process.stdin.flush()
        line = answers.readline()
        if not line:
            raise SystemExit(f"{kind} ended; see {options.log}")
        return json.loads(line)

    # The first steps touch the memory, and measure how long the step that waits is. A kind starts after the one before has.
    for kind in kinds:
        runs[kind] = start(options, kind)
        waiting = [step(kind, 0.0)[2] for _ in range(4)]
        if kind == BASES["offload"]:
            pause = min(waiting) / LAYERS
    seconds = {kind: [] for kind in runs}
    for number in range(options.rounds):
        turned = [*runs][number % len(runs) :] + [*runs][: number % len(runs)]
        for kind in turned:
            seconds[kind].append(step(kind, pause))
    for process, _ in runs.values():
        process.stdin.close()
        process.wait()
    middles = {kind: [statistics.median(column) for column in zip(*rows)] for kind, rows in seconds.items()}
    print(f"{LAYERS * WIDTH * WIDTH >> 20} Mi parameters of {options.dtype}, {options.rounds} rounds, backward of the {options.backward}")
    print(f"{'':68} {'backward':>9} {'step()':>9} {'of waiting':>10} {'with forward':>12}")
    for kind, (forward, backward, after) in middles.items():
        base = middles[BASES["clipped" if "every step" in kind else "offload"]]
        print(
            f"{kind:68} {1e3 * backward:6.1f} ms {1e3 * after:6.1f} ms {after / base[2]:10.2f} "
            f"{(forward + backward + after) / sum(base):12.2f}"
        )


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--backward", choices=("device", "cpu"), default="device")
    parser.add_argument("--log", default=os.devnull, help="file for what the processes print")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
