"""Trains the small GPT of train.py on the CPU under DeepSpeed's SuperOffload or plain ZeRO-3 offload.
Plain offload waits for the norm before it steps, and must give the same weights.

DeepSpeed's SuperOffload requires CUDA and synchronises a stream. Both are replaced by stubs here, because none of
the compared values depends on them. A copy of the stub ends some time after its start. The report counts the waits
of the trainer's thread for the stream during backward.

--spikes scales the loss of every fifth batch, so that gradients are clipped, and makes every seventh batch infinite.
--norms writes the norms of the sub-groups' gradients in order of arrival, one line per step."""

import argparse
import json
import logging
import os
import pathlib
import sys
import time

import late_stream
import train


def main():
    options = arguments()
    train.become_single_rank()
    import deepspeed
    import torch

    train.without_compiled_collectives()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if options.mode != "serial":
        allow_the_cpu()
    torch.manual_seed(options.seed)
    model = train.Gpt(options.dim, options.layers, options.context)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(options))
    options.seed += 1000 * int(os.environ["RANK"])
    batches, losses, norms, moments, waits = train.Batches(options), [], [], [], 0
    for step in range(1, options.steps + 1):
        loss = engine(batches.next())
        before = late_stream.Stream.waits
        engine.backward(loss * factor(options, step))
        waits += late_stream.Stream.waits - before
        norms.append(
            [group.grad.norm().item() for group in reversed(engine.optimizer.fp32_partitioned_groups_flat)] if options.norms else []
        )
        engine.step()
        losses.append(loss.item())
        moments.append(time.monotonic())
    report = {
        "mode": options.mode,
        "steps": options.steps,
        "skipped": engine.skipped_steps,
        "losses": losses,
        "steps_per_second": train.rate(moments),
        "sha256": train.weights_hash(engine.module),
        "active": train.active(),
        "stage3": type(engine.optimizer).__name__,
        "children": children(),
        "waits": waits,
        "published": published(engine.optimizer),
        "tail": tail(engine.optimizer),
    }
    if options.mode != "serial":
        engine.optimizer.superoffload_cpu_optimizer.close()
    if options.norms:
        pathlib.Path(options.norms).write_text("".join(" ".join(f"{n:.6g}" for n in step) + "\n" for step in norms))
    if os.environ["RANK"] != "0":
        train.leave_group()
    print(describe(report), flush=True)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(report))
    train.leave_group()


def describe(report):
    lines = [
        f"  {report['mode']}: {report['steps']} steps, {report['skipped']} skipped, "
        f"loss {report['losses'][0]:.4f} -> {report['losses'][-1]:.4f}"
    ]
    done = report["active"].get("superoffload")
    if done:
        lines.append("  rounds: {commits} committed, {redos} clipped and redone, {aborts} taken back".format(**done))
        lines.append(
            "  sub-groups: {buckets_speculated} stepped before the norm was known, {buckets_redone} of them "
            "redone, {buckets_rolled_back} rolled back, {buckets_spared} spared since the verdict was certain".format(**done)
        )
    lines.append(f"  sha256 of the final weights: {report['sha256']}")
    return "\n".join(lines)


def factor(options, step):
    if options.spikes and step % 7 == 0:
        return float("inf")
    return 1e3 if options.spikes and step % 5 == 0 else 1.0


def config(options):
    offload = {"device": "cpu", "super_offload": options.mode != "serial"}
    return {
        "train_micro_batch_size_per_gpu": options.batch,
        **train.precision(options.dtype),
        "gradient_clipping": options.clip,
        "zero_optimization": {"stage": 3, "sub_group_size": options.sub_group, "offload_optimizer": offload},
        "optimizer": {"type": "AdamW", "params": {"lr": options.lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "steps_per_print": 1 << 30,
        **({"spillway": {"superoffload": ours}} if (ours := of_spillway(options)) else {}),
    }


def of_spillway(options):
    """The settings of Spillway that are not the defaults."""
    tail = options.tail if options.tail == "auto" else int(options.tail)
    return {**({"verdict": options.verdict} if options.verdict != "step" else {}), **({"tail": tail} if tail else {})}


def allow_the_cpu():
    try:
        from deepspeed.runtime.superoffload import superoffload_stage3
    except ImportError:
        return
    superoffload_stage3._validate_superoffload_accelerator = lambda: None
    late_stream.install()


def published(optimizer):
    """The dtypes of the weights that Spillway's steps write for the model."""
    window = vars(optimizer).get("_spillway_window")
    return [] if window is None else sorted({str(weights.dtype) for weights in window._weights._memory.values()})


def tail(optimizer):
    """The sub-groups of Spillway's tail, and the number of all."""
    window = vars(optimizer).get("_spillway_window")
    return [] if window is None else [window.tail.members, len(window._sub_groups)]


def children():
    """Names of the processes that this process started and that still run."""
    tasks = pathlib.Path("/proc/self/task").glob("*/children")
    numbers = [number for task in tasks for number in task.read_text().split()]
    return [pathlib.Path(f"/proc/{number}/comm").read_text().strip() for number in numbers]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=("super", "serial"), default="super")
    parser.add_argument("--verdict", choices=("step", "forward"), default="step", help="where a step of Spillway's ends")
    parser.add_argument("--tail", default="0", help="sub-groups on the device, or auto")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--spikes", action="store_true")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of parameters and gradients")
    parser.add_argument("--norms", help="write the norms to this file")
    parser.add_argument("--json", help="write the report to this file")
    for name, value in (("dim", 64), ("layers", 4), ("context", 64), ("batch", 4), ("seed", 0), ("steps", 12), ("sub_group", 40000)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
