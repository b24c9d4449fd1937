"""Trains a tiny ZeRO-3 model for four steps with one of Spillway's parts under DeepSpeed. Prints its losses, its
weights and the parts that Spillway served.

    feature.py PART FOLDER     PART: ops, states, parameters, interleave, superoffload

Works with any DeepSpeed since 0.14.0, on a torch that is newer than DeepSpeed. The script restores the functions
that old versions import from torch and numpy. None of them concerns optimizers."""

import hashlib
import json
import logging
import os
import sys
import types


def make_room_for_old_versions():
    import numpy
    import torch.distributed.elastic.agent.server.api as api

    if not hasattr(numpy, "BUFSIZE"):
        numpy.BUFSIZE = 8192
    for name, value in (("log", logging.getLogger("elastic")), ("_get_socket_with_port", None)):
        if not hasattr(api, name):
            setattr(api, name, value)
    for name in INTEL:
        sys.modules.setdefault(name, types.ModuleType(name))


KEYS = {"ops": "cpu_adam", "states": "tier", "parameters": "parameter_tier", "interleave": "interleave", "superoffload": "superoffload"}
INTEL = ("oneccl_bindings_for_pytorch", "intel_extension_for_pytorch")


def import_all():
    """Imports DeepSpeed with Spillway's parts; see forked.py."""
    make_room_for_old_versions()
    import spillway.deepspeed

    spillway.deepspeed.install()
    import deepspeed
    import deepspeed.runtime.zero.stage3  # noqa: F401


def main(feature, folder):
    import_all()
    os.chdir(folder)
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    import spillway.deepspeed

    get_accelerator()._communication_backend_name = "gloo"
    if get_accelerator().current_stream() is None:
        type(get_accelerator()).current_stream = lambda self, device_index=None: types.SimpleNamespace(synchronize=lambda: None)
    for name in INTEL:
        sys.modules.pop(name)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import train

    train.become_single_rank()
    if feature == "superoffload":
        from superoffload import allow_the_cpu

        allow_the_cpu()
    torch.manual_seed(1)
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(feature, folder))
    source, losses = torch.Generator().manual_seed(7), []
    for _ in range(4):
        x = torch.randn(2, 64, generator=source).bfloat16()
        loss = engine(x).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    digest = hashlib.sha256()
    for flat in engine.optimizer.fp16_partitioned_groups_flat:
        if flat is not None:
            digest.update(flat.float().numpy().tobytes())
    active = spillway.deepspeed.active()
    print(
        json.dumps(
            {
                "version": deepspeed.__version__,
                "losses": losses,
                "sha256": digest.hexdigest(),
                "served": [part for part, key in KEYS.items() if active.get(key)],
                "left": active.get("left_to_deepspeed", {}),
            }
        )
    )
    train.leave_group()


def config(feature, folder):
    zero = {"stage": 3, "sub_group_size": 5000, "offload_optimizer": {"device": "cpu"}}
    block = None
    if feature == "states":
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder}
        block = {"paths": [folder], "resume": True, "pin_memory": False}
    if feature == "parameters":
        zero.update(
            stage3_param_persistence_threshold=0,
            offload_param={"device": "nvme", "nvme_path": folder, "buffer_count": 10, "max_in_cpu": 0, "buffer_size": 5000},
        )
        block = {"paths": [folder]}
    if feature == "interleave":
        block = {"interleave": {"backend": "host", "plan": "stride", "plan_argument": 2}}
    if feature == "superoffload":
        zero["offload_optimizer"].update(super_offload=True, cpuadam_cores_perc=0.8)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "steps_per_print": 1 << 30,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    }
    if block:
        settings["spillway"] = block
    return settings


if __name__ == "__main__":
    main(*sys.argv[1:])
