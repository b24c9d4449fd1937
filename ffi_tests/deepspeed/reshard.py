"""A process of test_reshard_zero3.py: trains a small model under ZeRO-3 with states on a tier, and continues with other processes.

reshard.py PHASE FOLDER SOURCE     SOURCE is first for the job, or snapshot"""

import os
import sys

import train

train.become_single_rank()
train.without_compiled_collectives()

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import spillway

RANK = int(os.environ["RANK"])
KEYS = ("exp_avg", "exp_avg_sq")


def make(job, seed, sub_group_size, **block):
    os.makedirs("tier", exist_ok=True)
    torch.manual_seed(seed)
    # Elements that no number of processes here divides.
    model = torch.nn.Sequential(torch.nn.Linear(63, 65), torch.nn.LayerNorm(65), torch.nn.Linear(65, 7), torch.nn.Linear(7, 1))
    offload = {"device": "nvme", "nvme_path": "tier"}
    spillway_block = {
        "paths": ["tier"],
        "job": job,
        "host": f"node-{RANK}",
        "resume": True,
        "part_elements": 700,
        "pin_memory": False,
        **block,
    }
    return deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "steps_per_print": 1 << 30,
            "zero_optimization": {"stage": 3, "sub_group_size": sub_group_size, "offload_optimizer": offload},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
            "spillway": spillway_block,
        },
    )[0]


def step(engine):
    source = torch.Generator().manual_seed(engine.global_steps)
    engine.backward(engine(torch.randn(2, 63, generator=source).bfloat16()).float().square().mean())
    engine.step()


def whole(engine):
    """Masters and moments of all parameters."""
    found = []
    for param in engine.module.parameters():
        found.append([safe_get_full_fp32_param(param), *(safe_get_full_optimizer_state(param, key) for key in KEYS)])
    return [[value.clone() for value in values] for values in found]


def first(_):
    engine = make("first", 0, 3000)
    # Each step is committed.
    spillway.deepspeed.client_state(engine)["rank"] = RANK
    for _ in range(3):
        step(engine)
    found = whole(engine)
    if RANK == 0:
        torch.save(found, "whole.pt")
    tiered = engine.optimizer.optimizer_swapper.tiered
    with tiered.snapshot("snapshot", 0, None) as snapshot:
        snapshot.wait()
    engine.destroy()


def next_(source):
    where = "tier/first" if source == "first" else source
    engine = make(f"after-{source}", 1, 2000, begin_from=where)
    assert spillway.deepspeed.resumed_step(engine) == engine.global_steps == 3
    expected = torch.load("whole.pt")
    for values, others in zip(whole(engine), expected, strict=True):
        assert all(map(torch.equal, values, others))
    for param, (master, *_) in zip(engine.module.parameters(), expected):
        with deepspeed.zero.GatheredParameters([param]):
            assert torch.equal(param.detach(), master.to(torch.bfloat16))
    assert spillway.deepspeed.client_state(engine) in ({"rank": 0}, {"rank": 1})
    step(engine)
    engine.destroy()
    # The new run no longer needs the old one.
    engine = make(f"after-{source}", 2, 2000, begin_from="gone")
    assert engine.global_steps == 4
    engine.destroy()


if __name__ == "__main__":
    os.chdir(sys.argv[2])
    {"first": first, "next": next_}[sys.argv[1]](sys.argv[3])
    print(f"{sys.argv[1]} holds\n", end="", flush=True)
    train.leave_group()
