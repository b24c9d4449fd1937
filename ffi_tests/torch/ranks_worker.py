"""One process of test_placements.py: norms, random bits and refusals of optimizers whose parameters are placed on meshes of 2 or 4
processes.

ranks_worker.py CASE...     prints a line for each case that holds"""

import copy
import datetime
import math
import os
import pathlib
import random
import sys
from itertools import product

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2] / "packaging" / "python")]

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import spillway
from spillway import torch as own

SHAPES = ((6, 5), (3, 9), (8, 4))
BEYOND = {"moment_dtype": torch.bfloat16, "moment_rounding": "stochastic", "rounding_seed": 7}


def meshes():
    """A mesh with one dimension, and with 4 processes one with two."""
    world = dist.get_world_size()
    return [init_device_mesh("cpu", (world,))] + (
        [init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))] if world == 4 else []
    )


def placed(mesh):
    """All placements of a matrix that hold values."""
    return list(product((Replicate(), Shard(0), Shard(1)), repeat=mesh.ndim))


def values(seed, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameter(mesh, placements, seed, shape, dtype=torch.float32):
    return torch.nn.Parameter(distribute_tensor(values(seed, shape).to(dtype), mesh, placements))


def give(params, step, scale=1.0):
    for at, param in enumerate(params):
        grad = (scale * values(1000 * step + at, param.shape)).to(param.dtype)
        param.grad = distribute_tensor(grad, param.device_mesh, param.placements) if isinstance(param, DTensor) else grad


def parts(tensor):
    """This process's part of a tensor, as all processes have it."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach())
    return gathered


def same_bits(one, other):
    return (
        one.dtype is other.dtype
        and one.shape == other.shape
        and one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))
    )


def raises(kind, work, words):
    try:
        work()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}: {words}")


def norms():
    """The norm is that of torch, whatever the placements are, and no part counts twice."""
    for mesh in meshes():
        group = dist.group.WORLD
        for at, placements in enumerate(placed(mesh)):
            for shape in SHAPES:
                param = parameter(mesh, placements, at, shape)
                give([param], at)
                expected = float(torch.nn.utils.get_total_norm([param.grad]).full_tensor())
                optimizer = own.AdamW([param], max_norm=1.0, process_group=group)
                optimizer.step()
                torch.testing.assert_close(optimizer.grad_norm, expected, rtol=1e-5, atol=0)
        mixed = [parameter(mesh, placements, at, SHAPES[at % 3]) for at, placements in enumerate(placed(mesh))]
        mixed += [torch.nn.Parameter(values(90, (7,))), torch.nn.Parameter(values(91, (2, 3)).double())]
        give(mixed, 3)
        whole = [param.grad.full_tensor() if isinstance(param, DTensor) else param.grad for param in mixed]
        expected = float(torch.nn.utils.get_total_norm(whole))
        optimizer = own.AdamW(mixed, max_norm=1.0, process_group=group)
        optimizer.step()
        torch.testing.assert_close(optimizer.grad_norm, expected, rtol=1e-5, atol=0)


def own_parts():
    """Without DTensors, every process has a part of its own: the norm is over all of them."""
    param = torch.nn.Parameter(torch.ones(4))
    param.grad = torch.full((4,), 1.0 + dist.get_rank())
    optimizer = own.AdamW([param], max_norm=1.0, process_group=dist.group.WORLD)
    optimizer.step()
    assert optimizer.grad_norm == math.sqrt(sum(4 * (1.0 + rank) ** 2 for rank in range(dist.get_world_size())))


def replicas():
    """Replicas of a part have equal bits after steps with random bits, and different parts have random bits of their own."""
    for mesh in meshes():
        for placements in placed(mesh):
            whole = torch.ones(8, 8)
            params = [torch.nn.Parameter(distribute_tensor(whole, mesh, placements)), torch.nn.Parameter(torch.ones(50))]
            optimizer = own.AdamW(params, lr=1e-2, **BEYOND)
            for step in range(5):
                for param in params:
                    grad = torch.full(param.shape, 0.1 + 0.037 * step)
                    param.grad = distribute_tensor(grad, mesh, placements) if isinstance(param, DTensor) else grad
                optimizer.step()
            split = [not placement.is_replicate() for placement in placements]
            key = tuple(at for at, apart in zip(mesh.get_coordinate(), split) if apart)
            keys = [None] * dist.get_world_size()
            dist.all_gather_object(keys, key)
            for tensor in (params[0], optimizer.state[params[0]]["exp_avg"], optimizer.state[params[0]]["exp_avg_sq"]):
                gathered = parts(tensor)
                for first, second in product(range(len(keys)), repeat=2):
                    if keys[first] == keys[second]:
                        assert same_bits(gathered[first], gathered[second]), (placements, keys, gathered)
                    elif tensor is not params[0] and gathered[first].shape == gathered[second].shape:
                        assert not same_bits(gathered[first], gathered[second]), (placements, keys)
            gathered = parts(params[1])
            assert all(same_bits(gathered[0], other) for other in gathered)


def no_norm():
    """Gradients that have no common norm are an error in every process, and nothing is stepped."""
    mesh, world = meshes()[0], dist.get_world_size()
    param = torch.nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Partial()]))
    param.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    optimizer = own.AdamW([param], max_norm=1.0, process_group=dist.group.WORLD)
    raises(spillway.InvalidArgumentError, optimizer.step, "terms of a sum")
    assert param.to_local().eq(1).all() and not optimizer.state[param]
    groups = [dist.new_group([rank]) for rank in range(world)]
    param = parameter(mesh, [Shard(0)], 1, (8, 4))
    give([param], 1)
    before = param.to_local().clone()
    optimizer = own.AdamW([param], max_norm=1.0, process_group=groups[dist.get_rank()])
    raises(spillway.InvalidArgumentError, optimizer.step, f"process_group has 1 of the {world} parts")
    assert same_bits(param.to_local(), before)
    # A group of one process has every part of a replicated parameter.
    param = parameter(mesh, [Replicate()], 1, (8, 4))
    give([param], 1)
    optimizer = own.AdamW([param], max_norm=1.0, process_group=groups[dist.get_rank()])
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, float(param.grad.to_local().norm()), rtol=1e-6, atol=0)
    if world == 4:
        two = meshes()[1]
        params = [parameter(two, [Replicate(), Shard(0)], 1, (8, 4)), parameter(two["shard"], [Shard(0)], 2, (8, 4))]
        give(params, 1)
        optimizer = own.AdamW(params, max_norm=1.0, process_group=dist.group.WORLD)
        raises(spillway.InvalidArgumentError, optimizer.step, "meshes of different processes")
        # Replicas of a model whose parameters are on a part of the mesh: over all processes each part would count twice.
        shard = two["shard"]
        param = parameter(shard, [Shard(0)], 2, (8, 4))
        give([param], 1)
        before = param.to_local().clone()
        optimizer = own.AdamW([param], max_norm=1.0, process_group=dist.group.WORLD)
        raises(spillway.InvalidArgumentError, optimizer.step, "replicas, which would count twice")
        assert same_bits(param.to_local(), before)
        optimizer = own.AdamW([param], max_norm=1.0, process_group=shard.get_group())
        optimizer.step()
        torch.testing.assert_close(optimizer.grad_norm, float(param.grad.full_tensor().norm()), rtol=1e-6, atol=0)


def odd(params, optimizer):
    local = params[0].grad._local_tensor
    bytes_of = bytearray(1 + local.nbytes)
    apart = torch.frombuffer(bytes_of, dtype=torch.float32, count=local.numel(), offset=1).view(local.shape)
    params[0].grad = DTensor.from_local(apart, params[0].device_mesh, params[0].placements)


def other_placement(params, optimizer):
    params[0].grad = DTensor.from_local(
        params[0].grad._local_tensor,
        params[0].device_mesh,
        [Replicate()],
        shape=params[0].shape,
        stride=params[0].stride(),
        run_check=False,
    )


def other_shape(params, optimizer):
    optimizer.state[params[1]]["exp_avg"] = torch.zeros(3)


def other_dtype(params, optimizer):
    optimizer.state[params[1]]["exp_avg"] = torch.zeros(params[1].shape, dtype=torch.int32)


def no_step(params, optimizer):
    optimizer.state[params[1]]["step"] = "three"


def bad_scale(params, optimizer):
    optimizer.grad_scale = torch.zeros(())


def infinite(params, optimizer):
    params[1].grad[0] = float("inf")


REFUSALS = (odd, other_placement, other_shape, other_dtype, no_step, bad_scale, infinite)


def refusals():
    """One process refuses its step: every process gets an error, none waits, and none has stepped."""
    mesh, rank = meshes()[0], dist.get_rank()
    for refusing, refuse in product(range(dist.get_world_size()), REFUSALS):
        params = [parameter(mesh, [Shard(0)], 1, (8, 4)), torch.nn.Parameter(values(2, (5,))), torch.nn.Parameter(values(3, (5,)).double())]
        optimizer = own.AdamW(params, lr=0.1, max_norm=0.5, process_group=dist.group.WORLD)
        give(params, 1)
        optimizer.step()
        give(params, 2)
        grads = [param.grad for param in params]
        bits = [param.detach().clone() for param in params]
        if rank == refusing:
            kept = [dict(optimizer.state[param]) for param in params]
            refuse(params, optimizer)
        try:
            optimizer.step()
        except Exception as error:
            if rank != refusing:
                assert "another process" in str(error), (refuse, error)
        else:
            raise AssertionError(f"rank {rank} stepped where rank {refusing} has {refuse.__name__}")
        for at, (param, grad, before) in enumerate(zip(params, grads, bits)):
            one, other = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach() for tensor in (param, before))
            assert same_bits(one, other), (rank, refusing, refuse.__name__)
            if not isinstance(grad, DTensor):
                assert refuse is infinite or same_bits(grad, values(2000 + at, grad.shape).to(grad.dtype))
        if rank == refusing:
            optimizer.state.update(zip(params, kept))
            optimizer.__dict__.pop("grad_scale", None)
        give(params, 2)
        optimizer.step()
        assert [float(optimizer.state[param]["step"]) for param in params] == [2.0] * 3


def hook():
    """A hook raises in one process: the others get an error after the timeout of their group, and none has stepped."""
    mesh = meshes()[0]
    group = dist.new_group()
    dist.barrier(group)
    # Only the step has the short timeout: processes of a busy machine connect more slowly.
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=3), group)
    param = parameter(mesh, [Shard(0)], 1, (8, 4))
    optimizer = own.AdamW([param], max_norm=0.5, process_group=group)
    give([param], 1)
    before = param.to_local().clone()
    if dist.get_rank() == 1:
        optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    raises(ZeroDivisionError if dist.get_rank() == 1 else RuntimeError, optimizer.step, "")
    assert same_bits(param.to_local(), before)


def reference_norm(params):
    """Clips nothing; the norm of the whole gradients. torch refuses plain tensors beside DTensors, so their parts are put together
    first."""
    grads = [param.grad for param in params if param.grad is not None]
    if not any(isinstance(grad, DTensor) for grad in grads) or all(isinstance(grad, DTensor) for grad in grads):
        norm = torch.nn.utils.get_total_norm(grads)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    return torch.nn.utils.get_total_norm([grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads])


def training(seed):
    """A random training with both classes: equal norms and weights, and equal bits in replicas."""
    choose = random.Random(seed)
    mesh = choose.choice(meshes())
    name = choose.choice(["AdamW", "Adam", "Adagrad"])
    on_tier = name != "Adagrad" and choose.random() < 0.2
    kinds = [torch.float32] * 4 if on_tier else [torch.float32, torch.float32, torch.float64, torch.bfloat16]
    plan = []
    for at in range(choose.randint(1, 5)):
        shape = tuple(choose.choice((1, 2, 3, 5, 8, 17)) for _ in range(choose.randint(1, 3)))
        places = [choose.choice([Replicate(), *map(Shard, range(len(shape)))]) for _ in range(mesh.ndim)]
        plan.append((None if choose.random() < 0.25 else places, 10 * seed + at, shape, choose.choice(kinds)))
    if all(places is None for places, *_ in plan):
        plan[0] = ([Replicate()] * mesh.ndim, *plan[0][1:])
    options = {"lr": choose.choice([1e-3, 0.03]), "weight_decay": choose.choice([0.0, 0.1]), "maximize": choose.random() < 0.2}
    if name != "Adagrad" and not on_tier and choose.random() < 0.2:
        options["amsgrad"] = True
    max_norm, skip = choose.choice([None, 0.1, 3.0]), choose.random() < 0.5
    beyond = {"max_norm": max_norm, "skip_nonfinite": skip, "process_group": dist.group.WORLD}
    if on_tier:
        beyond["tier"] = own.TierOptions(None, part_elements=4096, pin_memory=False)
    elif all(dtype is torch.float32 for *_, dtype in plan) and not options.get("amsgrad") and choose.random() < 0.3:
        beyond["undo"] = True
    both = [
        [
            torch.nn.Parameter(values(at, shape).to(dtype)) if places is None else parameter(mesh, places, at, shape, dtype)
            for places, at, shape, dtype in plan
        ]
        for _ in range(2)
    ]
    optimizers = [getattr(own, name)(both[0], **options, **beyond), getattr(torch.optim, name)(both[1], **options)]
    for step in range(choose.randint(1, 6)):
        absent = [choose.random() < 0.15 for _ in plan]
        scale, bad, back = choose.choice([0.01, 1.0, 30.0]), choose.random() < 0.15, "undo" in beyond and choose.random() < 0.3
        for params in both:
            give(params, 100 * seed + step, scale)
            for param, none in zip(params, absent):
                param.grad = None if none else param.grad
        present = [param for param in both[1] if param.grad is not None]
        if bad and skip and present:
            for params in both:
                grad = next(param.grad for param in params if param.grad is not None)
                first = grad._local_tensor if isinstance(grad, DTensor) else grad
                # With a mesh of two dimensions the first process may hold no part of the element; the last one does or does not.
                if first.numel() and (dist.get_rank() == 0 or not isinstance(grad, DTensor)):
                    first.view(-1)[0] = float("nan")
            bits = [parts(param) for param in both[0]]
            optimizers[0].step()
            assert optimizers[0].skipped, (seed, step)
            assert all(all(map(same_bits, one, parts(param))) for one, param in zip(bits, both[0])), (seed, step)
            continue
        norm = reference_norm(both[1]) if present else torch.zeros(())
        if back and present:
            optimizers[0].step()
            optimizers[0].rollback()
        optimizers[0].step()
        if max_norm is not None:
            torch.testing.assert_close(
                optimizers[0].grad_norm,
                float(norm),
                rtol=2e-2 if any(param.dtype is torch.bfloat16 for param in present) else 1e-5,
                atol=1e-12,
                msg=lambda text: f"seed {seed}, step {step}: {text}",
            )
            factor = min(1.0, max_norm / (optimizers[0].grad_norm + 1e-6))
            for param in present:
                param.grad.mul_(factor)
        optimizers[1].step()
        if choose.random() < 0.2:
            # torch's load_state_dict takes over tensors of the same dtype.
            optimizers[0].load_state_dict(copy.deepcopy(choose.choice(optimizers).state_dict()))
    for at, (one, other) in enumerate(zip(*both)):
        # torch rounds to bf16 after every operation.
        near, least = (6e-2, 3e-2) if one.dtype is torch.bfloat16 else (1e-5, 1e-6)
        torch.testing.assert_close(parts(one), parts(other), rtol=near, atol=least, msg=lambda text: f"seed {seed}, parameter {at}: {text}")
        placements = one.placements if isinstance(one, DTensor) else [Replicate()] * mesh.ndim
        keys = [None] * dist.get_world_size()
        dist.all_gather_object(keys, tuple(where for where, place in zip(mesh.get_coordinate(), placements) if not place.is_replicate()))
        gathered = parts(one)
        assert all(keys[i] != keys[j] or same_bits(gathered[i], gathered[j]) for i, j in product(range(len(keys)), repeat=2)), (seed, at)
    optimizers[0].close()


def trainings(first=0, count=25):
    """Random trainings; SPILLWAY_TRAININGS="FIRST COUNT" chooses them."""
    first, count = map(int, os.environ.get("SPILLWAY_TRAININGS", f"{first} {count}").split())
    for seed in range(first, first + count):
        training(seed)


CASES = {work.__name__: work for work in (norms, own_parts, replicas, no_norm, refusals, trainings, hook)}


def main(*cases):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    for case in cases:
        CASES[case]()
        print(f"{case} holds\n", end="", flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
