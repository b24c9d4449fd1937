"""Trains the small GPT of train.py under ZeRO-3 with its optimizer states on Spillway's tier or in host memory.
Both must give the same losses and weights.

The script mentions Spillway in its configuration block and in the report at its end. If a test asks for it, the
script also kills a rank between the commits of two ranks. It derives its position in the data from the engine's
global step alone, so a killed run resumes when it is restarted. Each loss is multiplied by a random number, so that
the state of the generators matters; learning rates follow a schedule."""

import argparse
import json
import logging
import os
import pathlib
import signal
import sys
import time

import late_stream
import train


def main():
    options = arguments()
    train.become_single_rank()
    import deepspeed
    import torch

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if options.die:
        die_in_commit(*options.die)
    if options.device:
        be_a_device()
    torch.manual_seed(options.seed)
    model = train.Gpt(options.dim, options.layers, options.context)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters_of(model, options), config=config(options))
    if options.load:
        assert engine.load_checkpoint(options.load)[0], f"{options.load} has no checkpoint"
        torch.manual_seed(options.seed + engine.global_steps)
    began_at = engine.global_steps
    losses, rate, waits = run(engine, options, torch)
    report = {
        "steps": engine.global_steps,
        "began_at": began_at,
        "skipped": engine.skipped_steps,
        "losses": losses,
        "waits": waits,
        "copied": copied(engine),
        "steps_per_second": rate,
        "sha256": train.weights_hash(engine.module),
        "published": published(engine),
        "active": train.active(),
        "compiled_ops": train.compiled_ops(),
    }
    if int(os.environ["RANK"]) == 0:
        describe(report)
        if options.json:
            pathlib.Path(options.json).write_text(json.dumps(report))
    train.leave_group()


def die_in_commit(rank, step, marker):
    """Kills a rank just before its commit of a step, after another rank has committed that step and left the marker."""
    import spillway

    own_commit, marker = spillway.Swap._commit, pathlib.Path(marker)

    def commit(self, at, payload, status):
        if at == int(step) and os.environ["RANK"] == rank:
            for _ in range(6000):
                if marker.exists():
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.01)
        own_commit(self, at, payload, status)
        if at == int(step):
            marker.touch()

    spillway.Swap._commit = commit


def be_a_device():
    """Has Spillway take the model's weights for those of a device, with a stream of its own."""
    from spillway.deepspeed import _tier

    late_stream.install()
    _tier.TierSwapper.weight = lambda self, index: None


def set_again(engine, torch):
    """Writes states to the tier between two steps without changing them, as a rank may do that waits
    for no other rank."""
    swapper = engine.optimizer.optimizer_swapper
    for index, elements in enumerate(swapper.elements):
        parts = [torch.empty(elements) for _ in range(3)]
        swapper.read(index, *parts)
        swapper.write(index, *parts)


def round_moments(engine, torch):
    """Gives the moments in host memory values of bfloat16."""
    for state in engine.optimizer.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].copy_(state[name].to(torch.bfloat16))


def run(engine, options, torch):
    batches, losses, moments, waits = train.Batches(options), [], [], {"backward": 0, "step": 0}
    for _ in range(engine.global_steps * options.accumulate):
        batches.next()
    while engine.global_steps < options.steps:
        if options.seed_each_step:
            torch.manual_seed(options.seed + engine.global_steps)
        for _ in range(options.accumulate):
            loss = engine(batches.next()) * (0.9 + 0.2 * torch.rand(()))
            begun = late_stream.Stream.waits
            engine.backward(loss)
            waits["backward"] += late_stream.Stream.waits - begun
            begun = late_stream.Stream.waits
            engine.step()
            waits["step"] = max(waits["step"], late_stream.Stream.waits - begun)
        if options.round_moments and not options.paths:
            round_moments(engine, torch)
        if options.die:
            set_again(engine, torch)
        losses.append(loss.item())
        moments.append(time.monotonic())
        if options.progress:
            print(f"step {engine.global_steps}", flush=True)
        if options.save and engine.global_steps == options.save_at:
            engine.save_checkpoint(options.save)
    return losses, train.rate(moments), waits


def parameters_of(model, options):
    """Two groups with different settings, and in --groups a third whose betas differ."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]
    if options.groups:
        groups.append({"params": [groups[0]["params"].pop()], "betas": [0.8, 0.99], "lr": 3e-4})
    return groups


def published(engine):
    """sha256 over the 16-bit weights in this rank's part of the model."""
    import hashlib

    digest = hashlib.sha256()
    for flat in engine.optimizer.fp16_partitioned_groups_flat:
        if flat is not None:
            digest.update(flat.float().numpy().tobytes())
    return digest.hexdigest()


def copied(engine):
    """The dtypes of weights that steps write to host memory beside the model's."""
    swapper = engine.optimizer.optimizer_swapper
    return sorted({str(memory.dtype) for memory in swapper.host_weights._memory.values()}) if hasattr(swapper, "host_weights") else []


def config(options):
    offload = {"device": "cpu"}
    if options.paths:
        # Both kinds of DeepSpeed's own swapper are replaced.
        offload = {"device": "nvme", "nvme_path": options.paths[0], "pipeline_read": options.pipeline}
    zero = {"stage": 3, "sub_group_size": options.sub_group, "offload_optimizer": offload}
    if options.reduce_bucket:
        zero["reduce_bucket_size"] = options.reduce_bucket
    if options.params:
        zero.update(
            stage3_param_persistence_threshold=0,
            offload_param={
                "device": "nvme",
                "nvme_path": options.params,
                "buffer_count": 20,
                "max_in_cpu": 0,
                "buffer_size": 4 * options.dim * options.dim,
            },
        )
    settings = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": options.accumulate,
        **precision(options.dtype),
        "gradient_clipping": options.clip,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": options.lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": options.lr, "warmup_num_steps": 10}},
        "steps_per_print": 1 << 30,
    }
    if options.block != "none" and options.paths:
        block = json.loads(options.block)
        settings["spillway"] = {**({"paths": options.paths} if block.get("enabled", True) else {}), **block}
    return settings


def precision(dtype):
    found = train.precision(dtype)
    if dtype == "fp16":
        found[dtype].update(initial_scale_power=18, hysteresis=1, loss_scale_window=4)
    return found


def describe(report):
    print(
        f"  steps {report['began_at'] + 1} to {report['steps']}, {report['skipped']} skipped, "
        f"loss {report['losses'][0]:.4f} -> {report['losses'][-1]:.4f}"
        if report["losses"]
        else "  no steps left"
    )
    for tier in report["active"].get("tier", []):
        blocks = sum(path["blocks"] for path in tier["paths"]) or 1
        for path in tier["paths"]:
            print(
                f"  {path['directory']}: {100 * path['blocks'] / blocks:.0f} % of the state, "
                f"{path['written_bytes'] / 1e9:.3f} GB written, {path['read_bytes'] / 1e9:.3f} GB read"
            )
        wanted = max(1, (tier["rounds"]) * tier["subgroups"])
        print(
            f"  {tier['rounds']} updates of {tier['subgroups']} sub-groups: {100 * tier['hits'] / wanted:.0f} % found in "
            f"memory; {tier['commits']} commits"
        )
    print(f"  sha256 of the final weights: {report['sha256']}", flush=True)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paths", nargs="+", help="directories of the tier; without them the states are in host memory")
    parser.add_argument("--block", default="{}", help="the rest of the spillway block, as JSON; none: no block at all")
    parser.add_argument("--params", help="directory for the parameters")
    parser.add_argument("--die", nargs=3, metavar=("RANK", "STEP", "MARKER"), help="see die_in_commit")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--clip", type=float, default=0.5)
    for name in ("device", "pipeline", "groups", "progress", "seed-each-step", "round-moments"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("save", "load", "json"):
        parser.add_argument(f"--{name}")
    for name, value in (
        ("dim", 64),
        ("layers", 3),
        ("context", 64),
        ("batch", 4),
        ("seed", 0),
        ("steps", 8),
        ("sub_group", 12000),
        ("accumulate", 1),
        ("reduce_bucket", 0),
        ("save_at", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
