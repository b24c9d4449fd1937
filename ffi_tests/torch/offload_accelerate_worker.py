"""One process of test_offload_frameworks.py: accelerate's FSDP2, as axolotl trains with it, and spillway.torch.offload, which clips.

offload_accelerate_worker.py FOLDER"""

import os
import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2] / "packaging" / "python")]

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from spillway.torch import offload


def trained(make, clip):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1)
    accelerator = Accelerator(cpu=True)
    # accelerate shards on a device only; what it does is the same.
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    model, optimizer = accelerator.prepare(model, make(model.parameters()))
    data = torch.Generator().manual_seed(accelerator.process_index)
    for _ in range(6):
        accelerator.backward(model(torch.randn(8, 16, generator=data)).square().mean())
        if clip is not None:
            accelerator.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    plan = getattr(optimizer.optimizer, "_plan", None)
    stepped = plan and sum(engine.speculation.stats().buckets_speculated for engine in plan.engines)
    return [param.full_tensor().detach() for param in model.parameters()], stepped


def main():
    ours, stepped = trained(lambda params: offload(params, torch.optim.AdamW, lr=1e-2, max_norm=0.05, overlap=True), None)
    theirs, _ = trained(lambda params: torch.optim.AdamW(params, lr=1e-2), 0.05)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert stepped
    print("holds\n", end="", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
