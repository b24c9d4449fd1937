"""Trains the GPT of train.py with ZenFlow, and prints the losses and a hash of the final weights as JSON.

    zenflow.py STAGE OVERLAP OFFLOAD

With OVERLAP 1 a process of its own steps the optimizer; with OFFLOAD 1 the moments of the selected columns are in host
memory. The settings leave DeepSpeed no race: warm-up rounds drain the first steps, and the columns are selected once,
while that process is idle. DeepSpeed's ZenFlow of stage 3 puts tensors
on device "cuda"; on the CPU accelerator they are redirected, for both ops alike."""

import hashlib
import json
import os
import sys
import types

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import train


def main():
    stage, overlap, offload = (int(word) for word in sys.argv[1:4])
    train.become_single_rank()
    import deepspeed

    redirect_cuda()
    torch.manual_seed(1)
    model = train.Gpt(64, 2, 32)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(stage, overlap, offload))
    batches = train.Batches(types.SimpleNamespace(context=32, batch=4, seed=1))
    losses = []
    for _ in range(12):
        loss = engine(batches.next().to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    optimizer = engine.optimizer
    if overlap:
        assert optimizer.zf_op.zenflow_adam_wait(optimizer.zf_ctrl.data_ptr(), 60.0)
        assert not optimizer.zf_op.zenflow_adam_wait(optimizer.zf_ctrl.data_ptr(), 0.0)
    print(json.dumps({"losses": losses, "sha256": weights_hash(optimizer), "active": train.active(), "compiled_ops": train.compiled_ops()}))
    sys.stdout.flush()
    train.leave_group()


def config(stage, overlap, offload):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "steps_per_print": 1 << 30,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu"},
            "overlap_comm": True,
            "zenflow": {
                "topk_ratio": 0.2,
                "select_strategy": "step",
                "select_interval": 1000,
                "update_interval": 2,
                "overlap_step": bool(overlap),
                "offload": bool(offload),
                "full_warm_up_rounds": 3,
            },
        },
    }


def weights_hash(optimizer):
    """sha256 over the master weights."""
    digest = hashlib.sha256()
    masters = getattr(optimizer, "fp32_partitioned_groups_flat", None) or optimizer.single_partition_of_fp32_groups
    for tensor in masters:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def redirect_cuda():
    from deepspeed.runtime.zenflow import engine_stage3

    class Torch:
        def __getattr__(self, name):
            found = getattr(torch, name)
            if name not in ("zeros", "tensor"):
                return found
            return lambda *args, **kwargs: found(*args, **{**kwargs, "device": "cpu"})

    engine_stage3.torch = Torch()


if __name__ == "__main__":
    main()
