"""Measures an iteration of a GPT with one optimizer: torch on the GPU, torchao, spillway.torch.offload, a tier, and DeepSpeed with and
without Spillway.

    iteration.py [KIND...] [--batch N] [--norm X]     measures each kind in a process of its own, and writes the record
    iteration.py --one KIND [--trace FILE]            trains here; prints the figures as JSON, and writes a trace for ui.perfetto.dev

A kind whose package is missing is left out, with a note."""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from machine import DEVICE, report, size, torch_on_device, wait

import spillway

OFFLOAD = {
    "offload": {},
    "offload-wait": {"overlap": False},
    "offload-forward": {"verdict": "forward"},
    "offload-tail": {"tail": "auto"},
    "offload-flow": {"weights": "flow", "device": DEVICE},
}
DEEPSPEED = ["deepspeed-zero2", "deepspeed-superoffload", "superoffload-on-spillway", "interleave-on-spillway", "residents-on-spillway"]
#: The most important ones first: time on a GPU may end.
KINDS = ["gpu", "torchao", *OFFLOAD, *DEEPSPEED, "tier", "tier-overlap"]
LAYERS, WIDTH, CONTEXT, WORDS, STEPS = size(16, 4, 2), size(1536, 256, 64), size(1024, 128, 8), size(32768, 1024, 64), size(14, 6, 4)


def main():
    given = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given.add_argument("kinds", nargs="*", default=KINDS, metavar="KIND")
    given.add_argument("--one", choices=KINDS)
    given.add_argument("--batch", type=int, default=size(16, 4, 2))
    given.add_argument("--norm", type=float, default=1.0, help="limit of the norm of the gradients, above which a step is clipped")
    given.add_argument("--trace")
    given.add_argument("--seconds", type=float, default=120, help="limit of a kind's process")
    options = given.parse_args()
    if options.one:
        print("RESULT " + json.dumps(_train(options.one, options)))
        return
    lines = [f"{LAYERS} layers of {WIDTH} in bf16, {options.batch} sequences of {CONTEXT} tokens, norm limited to {options.norm}."]
    lines.append("torch on the GPU and torchao have 16-bit states, and torchao does not clip; the others have float32 states.")
    for kind in options.kinds:
        lines.append(_measured(kind, options))
        # Written after each kind: the time may end.
        gpu = spillway.Gpu(0) if DEVICE != "cpu" else None
        report("iteration", "An iteration of a GPT in bf16 with one optimizer", gpu, lines, "ffi_tests/gpu/run.sh iteration")


def _measured(kind, options):
    """The row of a kind, or a note that says why there is none."""
    command = [sys.executable, __file__, "--one", kind, "--batch", str(options.batch), "--norm", str(options.norm)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.seconds)
    except subprocess.TimeoutExpired:
        return f"{kind}: not measured: it did not end within {options.seconds:.0f} s"
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not found:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return f"{kind}: not measured: {last[:200]}"
    return {"case": {"kind": kind, "batch": options.batch}, "figures": json.loads(found[-1][7:]), "headline": "ms", "better": "lower"}


def _train(kind, options):
    """The figures of an iteration: medians of the last half."""
    torch = torch_on_device()
    torch.manual_seed(0)
    with torch.device("cpu" if kind == "offload-flow" else DEVICE):
        model = _gpt(torch).to(torch.bfloat16)
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        engine, optimizer = _optimizer(kind, torch, model, options, stack)
        setup, rows = time.perf_counter() - start, []
        for step in range(STEPS):
            tokens = torch.randint(0, min(512, WORDS), (options.batch, CONTEXT), generator=torch.Generator().manual_seed(step)).to(DEVICE)
            traced = options.trace and step == STEPS - 2
            with _trace(torch, options.trace) if traced else contextlib.nullcontext():
                rows.append(_iteration(torch, kind, model, engine, optimizer, tokens, options.norm))
        getattr(optimizer, "settle", lambda: None)()
        wait(torch)
    counted = rows[STEPS // 2 :]
    figures = {f"{name}_ms": round(1e3 * statistics.median(row[at] for row in counted), 2) for at, name in enumerate(_PARTS)}
    peak = torch.cuda.max_memory_allocated() >> 20 if DEVICE != "cpu" else 0
    return {"ms": round(1e3 * statistics.median(map(sum, counted)), 2), **figures, "setup_s": round(setup, 1), "gpu_mib": peak}


_PARTS = ("forward", "backward", "step", "wait")


def _iteration(torch, kind, model, engine, optimizer, tokens, norm):
    """Seconds of forward, backward, step, and of the wait for the device."""
    times = [time.perf_counter()]
    loss = (engine or model)(tokens)
    times.append(time.perf_counter())
    engine.backward(loss) if engine else loss.backward()
    times.append(time.perf_counter())
    if kind == "gpu":
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
    engine.step() if engine else optimizer.step()
    if not engine:
        optimizer.zero_grad()
    times.append(time.perf_counter())
    # The step of this kind ends in the next forward.
    if kind != "offload-forward":
        wait(torch)
    times.append(time.perf_counter())
    return [after - before for before, after in zip(times, times[1:])]


@contextlib.contextmanager
def _trace(torch, file):
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if DEVICE != "cpu" else [])]) as profile:
        yield
    profile.export_chrome_trace(file)


def _optimizer(kind, torch, model, options, stack):
    """DeepSpeed's engine, or None, and the optimizer."""
    given = {"lr": 1e-4, "weight_decay": 0.1}
    if kind in DEEPSPEED:
        return _engine(kind, model, options)
    if kind == "gpu":
        return None, torch.optim.AdamW(model.parameters(), fused=True, **given)
    if kind == "torchao":
        from torchao.optim import CPUOffloadOptimizer

        return None, CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **given)
    import spillway.torch

    if kind in OFFLOAD:
        made = spillway.torch.offload(model, torch.optim.AdamW, model=model, max_norm=options.norm, **OFFLOAD[kind], **given)
    else:
        directory = stack.enter_context(tempfile.TemporaryDirectory(dir=os.environ.get("TIER")))
        tier = {"tier": directory, "overlap": kind == "tier-overlap"}
        made = spillway.torch.AdamW(model.parameters(), max_norm=options.norm, **tier, **given)
    stack.callback(made.close)
    return None, made


def _engine(kind, model, options):
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29000 + os.getpid() % 2000))
    if "spillway" in kind:
        import spillway.deepspeed

        spillway.deepspeed.install()
    import deepspeed

    host = {"device": "cpu", "pin_memory": DEVICE != "cpu"}
    zero = {"stage": 2 if kind == "deepspeed-zero2" else 3, "offload_optimizer": host, "overlap_comm": True, "contiguous_gradients": True}
    if kind != "deepspeed-zero2":
        zero.update(sub_group_size=60_000_000, reduce_bucket_size=60_000_000)
    if "superoffload" in kind:
        host.update(super_offload=True, ratio=1.0, cpuadam_cores_perc=0.9)
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "bf16": {"enabled": True},
        "gradient_clipping": options.norm,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
        "steps_per_print": 1 << 30,
    }
    plans = {
        "interleave-on-spillway": {"plan": "stride", "plan_argument": 2},
        "residents-on-spillway": {"residents": "auto", "plan": "count", "plan_argument": 0},
    }
    if kind in plans:
        config["spillway"] = {"interleave": {"gradient_transfers": True, **plans[kind]}}
    engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine, optimizer


def _gpt(torch):
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

        def forward(self, given):
            batch, length, width = given.shape
            q, k, v = self.qkv(self.before(given)).view(batch, length, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            given = given + self.out(mixed.reshape(batch, length, width))
            return given + self.down(nn.functional.gelu(self.up(self.between(given))))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

        def forward(self, tokens):
            hidden = self.embedding(tokens)
            for block in self.blocks:
                hidden = block(hidden)
            return nn.functional.cross_entropy(self.head(self.norm(hidden))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return Gpt()


if __name__ == "__main__":
    main()
