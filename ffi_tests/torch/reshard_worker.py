"""One process of test_reshard.py: a job on a tier that continues with another number of processes.

reshard_worker.py FOLDER PHASE DTYPE PLACEMENT [FROM]

Gradients are the same whatever the number of processes. So a step of the parts has the bits of a step of the whole parameters in one
process. Every part is compared with that step."""

import os
import pathlib
import signal
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2] / "packaging" / "python")]

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import spillway
from spillway import torch as own

FIRST, NEXT = 3, 6
#: Not divisible by 2, 3 or 4; the last one has fewer rows than there are processes.
SHAPES = ((65, 33), (65,), (7, 65), (7,), (2, 5, 3))


def values(number, step, dtype, scale=1.0):
    generator = torch.Generator().manual_seed(1000 * step + number)
    return (scale * torch.randn(SHAPES[number], generator=generator)).to(dtype)


class Model(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.params = torch.nn.ParameterList(values(number, 0, dtype) for number in range(len(SHAPES)))


def placed(placement, dtype, mesh):
    """The parameters of this process."""
    model = Model(dtype)
    if placement == "fsdp":
        return list(fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)).parameters())
    return [torch.nn.Parameter(of(param.detach(), placement, mesh)) for param in model.parameters()]


def of(whole, placement, mesh):
    """A whole tensor, placed as the parameters are."""
    if placement == "plain":
        return whole
    placements = [Shard(whole.dim() - 1)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
    return distribute_tensor(whole, mesh, [Shard(0)] if placement == "fsdp" else placements, src_data_rank=None)


def train(params, optimizer, steps, placement, mesh):
    for step in steps:
        for number, param in enumerate(params):
            grad = values(number, step + 1, param.dtype)
            param.grad = of(grad, placement, mesh) if mesh is not None else grad
        optimizer.step()


def control(dtype, steps):
    """The whole parameters and states after a run of one process that nothing has interrupted."""
    params = [torch.nn.Parameter(param.detach()) for param in Model(dtype).parameters()]
    optimizer = own.AdamW(params, lr=1e-2, master="f32" if dtype is torch.bfloat16 else None)
    train(params, optimizer, range(steps), "plain", None)
    return params, optimizer.state_dict()["state"]


def compare(params, optimizer, dtype, steps, placement, mesh):
    """Compares the part of this process with the run of one process, bit by bit."""
    whole, states = control(dtype, steps)
    mine = optimizer.state_dict()["state"]
    for number, (param, other) in enumerate(zip(params, whole)):
        pairs = [(param, other), *((mine[number][key], states[number][key]) for key in mine[number] if key != "step")]
        for one, expected in pairs:
            expected = of(expected.detach(), placement, mesh)
            one, expected = (each.to_local() if isinstance(each, DTensor) else each for each in (one, expected))
            assert torch.equal(one.detach(), expected.to(one.dtype)), (number, one, expected)
        assert float(mine[number]["step"]) == steps


def options(folder, job, **further):
    return own.TierOptions(
        folder, job=job, host=f"node-{dist.get_rank()}", part_elements=700, pin_memory=False, durability="process", **further
    )


def first(folder, dtype, placement, mesh):
    params = placed(placement, dtype, mesh)
    optimizer = own.AdamW(params, lr=1e-2, tier=options(folder, "first"))
    train(params, optimizer, range(FIRST), placement, mesh)
    optimizer.commit(payload=f"of rank {dist.get_rank()}".encode())
    with optimizer.snapshot(f"{folder}/snapshot") as snapshot:
        snapshot.wait()
    # Lost.
    train(params, optimizer, [40], placement, mesh)
    optimizer.close()


def begin(folder, dtype, placement, mesh, source, **further):
    """Goes on from the job or the snapshot `source`."""
    params = placed(placement, dtype, mesh)
    tier = options(folder, job_after(source), begin_from=f"{folder}/{source}", **further)
    return params, own.AdamW(params, lr=1e-2, tier=tier)


def job_after(source):
    return f"after-{source}-{dist.get_world_size()}"


def next_(folder, dtype, placement, mesh, source):
    params, optimizer = begin(folder, dtype, placement, mesh, source)
    assert optimizer.resumed_step == FIRST
    assert optimizer.payload.startswith(b"of rank "), optimizer.payload
    compare(params, optimizer, dtype, FIRST, placement, mesh)
    train(params, optimizer, range(FIRST, NEXT), placement, mesh)
    compare(params, optimizer, dtype, NEXT, placement, mesh)
    optimizer.commit()
    optimizer.close()
    # With a commit of its own it does not look at the other run, which may be gone.
    params = placed(placement, dtype, mesh)
    optimizer = own.AdamW(params, lr=1e-2, tier=options(folder, job_after(source), begin_from=f"{folder}/gone"))
    assert optimizer.resumed_step == NEXT
    compare(params, optimizer, dtype, NEXT, placement, mesh)
    optimizer.close()


def again(folder, dtype, placement, mesh):
    """The run that was read goes on by itself."""
    params = placed(placement, dtype, mesh)
    optimizer = own.AdamW(params, lr=1e-2, tier=options(folder, "first", resume="resume"))
    assert optimizer.resumed_step == FIRST
    train(params, optimizer, range(FIRST, NEXT), placement, mesh)
    compare(params, optimizer, dtype, NEXT, placement, mesh)
    optimizer.close()


def killed(folder, dtype, placement, mesh, source):
    """The last process is killed after its second subgroup."""
    if dist.get_rank() == dist.get_world_size() - 1:
        write, calls = spillway.tiered.Tiered.write, []

        def counted(self, subgroup, *parts):
            calls.append(subgroup)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            write(self, subgroup, *parts)

        spillway.tiered.Tiered.write = counted
    begin(folder, dtype, placement, mesh, source)
    raise AssertionError("the kill did not take place")


def refused(folder, dtype, placement, mesh, source):
    """Prints the error of each process."""
    try:
        begin(folder, dtype, placement, mesh, source)
    except spillway.SpillwayError as error:
        print(f"refused: {type(error).__name__}: {error}\n", end="", flush=True)


def group(folder, dtype, placement, mesh):
    """The processes but the first are a job of their own, and make few calls of their group to open it."""
    members = list(range(1, dist.get_world_size()))
    group = dist.new_group(members)
    if dist.get_rank() in members:
        calls, gather = [], dist.all_gather_object

        def counted(values, value, group=None):
            calls.append(group)
            gather(values, value, group=group)

        dist.all_gather_object = counted
        params = placed("plain", dtype, mesh)
        optimizer = own.AdamW(params, lr=1e-2, tier=options(folder, "group", process_group=group))
        assert len(calls) == 5 and all(one is group for one in calls), calls
        train(params, optimizer, range(FIRST), "plain", None)
        optimizer.commit()
        assert all(one is group for one in calls), calls
        optimizer.close()


PHASES = {"first": first, "next": next_, "again": again, "killed": killed, "refused": refused, "group": group}


def main(folder, phase, dtype, placement, *source):
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2) if placement == "replicas" else (world,))
    PHASES[phase](folder, getattr(torch, dtype), placement, mesh, *source)
    print(f"{phase} holds\n", end="", flush=True)
    dist.barrier()
    # As in fsdp_worker.py.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
