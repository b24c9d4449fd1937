"""One run of test_universal.py: trains a small model under ZeRO-3, loads and saves checkpoints, and writes the whole states of every
parameter to a file."""

import argparse

import train

options = argparse.ArgumentParser()
options.add_argument("--where", choices=("tier", "host"), required=True)
options.add_argument("--paths", nargs="*", default=[])
options.add_argument("--sub-group-size", type=int, required=True)
options.add_argument("--split-master", action="store_true")
options.add_argument("--load")
options.add_argument("--steps", type=int, default=0)
options.add_argument("--save")
options.add_argument("--json", required=True)
given = options.parse_args()

train.become_single_rank()
import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

torch.manual_seed(5)
model = torch.nn.Sequential(torch.nn.Linear(33, 47), torch.nn.Tanh(), torch.nn.Linear(47, 29), torch.nn.Tanh(), torch.nn.Linear(29, 7))
decayed, plain = [[param for param in model.parameters() if (param.dim() > 1) is matrix] for matrix in (True, False)]
if given.where == "tier":
    offload = {"device": "nvme", "nvme_path": given.paths[0]}
    block = {"spillway": {"paths": given.paths, "pin_memory": False, "split_master": given.split_master}}
else:
    offload, block = {"device": "cpu"}, {}
zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": given.sub_group_size, "offload_optimizer": offload}
engine = deepspeed.initialize(
    model=model,
    model_parameters=[{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
    config={
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "steps_per_print": 1 << 30,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "checkpoint": {"load_universal": given.load is not None},
        **block,
    },
)[0]
if given.load:
    engine.load_checkpoint(given.load)
for step in range(given.steps):
    inputs = torch.randn(4, 33, generator=torch.Generator().manual_seed(engine.global_steps)).bfloat16()
    engine.backward(engine(inputs).float().square().mean())
    engine.step()
if given.save:
    engine.save_checkpoint(given.save, tag="t")
found = {}
for name, param in engine.module.named_parameters():
    moments = [safe_get_full_optimizer_state(param, key) for key in ("exp_avg", "exp_avg_sq")]
    with deepspeed.zero.GatheredParameters([param]):
        found[name] = [part.detach().clone().cpu() for part in (safe_get_full_fp32_param(param), *moments, param)]
groups = [{name: group[name] for name in ("lr", "weight_decay")} for group in engine.optimizer.optimizer.param_groups]
if torch.distributed.get_rank() == 0:
    torch.save({"states": found, "steps": engine.global_steps, "groups": groups}, given.json)
train.leave_group()
