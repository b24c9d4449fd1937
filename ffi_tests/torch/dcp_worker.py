"""One process of test_dcp.py: continues a checkpoint with a model that FSDP2 shards over all processes, and saves it again.

dcp_worker.py FOLDER FIRST LAST     loads FOLDER/FIRST into a tier, trains to step LAST, and writes FOLDER/second"""

import os
import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2] / "packaging" / "python")]

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict, set_optimizer_state_dict

from spillway import torch as own
from spillway.torch import dcp


def new_model(dtype=torch.float32):
    """A model with parameters that span subgroups, and with several in one. `dtype`: of the second layer."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(50, 30), torch.nn.Linear(30, 7).to(dtype), torch.nn.Linear(7, 3, bias=False))


def train(model, optimizer, steps):
    """Steps with gradients that depend on the step and the parameter only, however it is placed."""
    for step in steps:
        for number, param in enumerate(model.parameters()):
            grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + number)).to(param.dtype)
            placed = isinstance(param, dist.tensor.DTensor)
            param.grad = dist.tensor.distribute_tensor(grad, param.device_mesh, param.placements) if placed else grad
        optimizer.step()


def tiered(model, folder, **options):
    """An optimizer with its states on a tier in a new folder."""
    os.makedirs(folder, exist_ok=True)
    tier = own.TierOptions(folder, part_elements=1000, pin_memory=False, durability="process")
    return own.AdamW(model.parameters(), lr=1e-2, tier=tier, **options)


def state_of(model, optimizer):
    return {"model": get_model_state_dict(model), "optim": dcp.states(model, optimizer)}


def load(model, optimizer, directory, **options):
    """Loads a checkpoint, with values of the tier one by one."""
    state = state_of(model, optimizer)
    dcp.load(state, directory, **options)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    optimizer.commit()


def main(folder, first, last):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = new_model(torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer, done = tiered(model, f"{folder}/tier-of-{dist.get_world_size()}"), []
    load(model, optimizer, f"{folder}/first", progress=lambda *bytes: done.append(bytes))
    train(model, optimizer, range(int(first), int(last)))
    dcp.save(state_of(model, optimizer), f"{folder}/second")
    local = sum(param.to_local().numel() * (8 if param.dtype is torch.float32 else 12) for param in model.parameters())
    assert done[-1] == (local, local) and done == sorted(done), (done, local)
    optimizer.close()
    print("saved\n", end="", flush=True)
    dist.barrier()
    # The interpreter's exit aborts now and then after FSDP2 on the CPU, also with torch alone.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
