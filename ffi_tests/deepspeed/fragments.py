"""Reads and sets parameters, moments and gradients between steps, and prints the values. The states are in host
memory or, with PLACE, on a tier in that folder; BLOCK is the tier's configuration in JSON."""

import hashlib
import json
import os

import torch
import train

train.become_single_rank()
import deepspeed
from deepspeed import utils

place = os.environ["PLACE"]
torch.manual_seed(0)
model = train.Gpt(32, 1, 16)
offload = {"device": "nvme", "nvme_path": place} if place else {"device": "cpu"}
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": 3, "sub_group_size": 5000, "offload_optimizer": offload},
        "spillway": json.loads(os.environ["BLOCK"]),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "steps_per_print": 1 << 30,
    },
)


def show(what, tensor):
    print(what, tuple(tensor.shape), hashlib.sha256(tensor.float().contiguous().numpy().tobytes()).hexdigest()[:16])


def look(step):
    for name, parameter in engine.module.named_parameters():
        show(f"{step} {name} param", utils.safe_get_full_fp32_param(parameter))
        for key in ("exp_avg", "exp_avg_sq"):
            show(f"{step} {name} {key}", utils.safe_get_full_optimizer_state(parameter, key))


chance = torch.Generator().manual_seed(7)
for step in range(4):
    loss = engine(torch.randint(256, (2, 17), generator=chance))
    engine.backward(loss)
    parameters = dict(engine.module.named_parameters())
    chosen = parameters["head.weight"]
    show(f"{step} grad", utils.safe_get_full_grad(chosen))
    if step == 1:
        # A number that no 16-bit type can represent.
        utils.safe_set_full_grad(chosen, torch.full((256, 32), 1.0001))
        show("set grad", utils.safe_get_full_grad(chosen))
    engine.step()
    look(step)
    if step == 2:
        utils.safe_set_full_fp32_param(chosen, torch.full((256, 32), 0.30001))
        utils.safe_set_full_optimizer_state(chosen, torch.full((256, 32), 0.125), "exp_avg")
        local = utils.safe_get_local_fp32_param(chosen)
        utils.safe_set_local_optimizer_state(chosen, torch.full_like(local, 0.0625), "exp_avg_sq")
        look("set")
print(engine.optimizer.optimizer_swapper is not None if place else True)
