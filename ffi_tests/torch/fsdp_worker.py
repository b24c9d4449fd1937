"""One process of test_distributed.py: trains a model that FSDP2 shards over two processes, on the CPU with gloo.

fsdp_worker.py FOLDER CASE...     prints a line for each case that holds"""

import os
import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2] / "packaging" / "python")]

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import spillway
from spillway import torch as own

STEPS = 6


def main(folder, *cases):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for case in cases:
        if case == "one rank":
            one_rank(mesh)
        else:
            alike(case, f"{folder}/{case}", mesh)
        print(f"{case} holds\n", end="", flush=True)
    dist.barrier()
    # The interpreter's exit aborts now and then after FSDP2 on the CPU, also with torch alone ("terminate called without an active
    # exception").
    os._exit(0)


def alike(case, folder, mesh):
    """Trains with both classes, and compares the weights."""
    before = spillway.stats().adam_elements
    models = [sharded_model(mesh), sharded_model(mesh)]
    options = {"max_norm": 0.5, "process_group": mesh.get_group()} if case == "clip" else {}
    if case == "tier":
        options["tier"] = own.TierOptions(folder, part_elements=500, pin_memory=False, durability="process")
    optimizers = [own.AdamW(models[0].parameters(), lr=1e-2, **options), torch.optim.AdamW(models[1].parameters(), lr=1e-2)]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers):
            train(model, optimizer, step, case == "clip" and optimizer is optimizers[1])
        if case in ("checkpoint", "tier") and step == STEPS // 2:
            exchange(models, optimizers, folder)
        if case == "tier" and step == STEPS // 2:
            optimizers[0] = resumed(models[0], optimizers[0], options)
    assert spillway.stats().adam_elements > before
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one.to_local(), other.to_local(), rtol=1e-5, atol=1e-6)


def one_rank(mesh):
    """Only the part of one process has a gradient with Inf or NaN: all processes skip the step, or raise, and roll back alike."""
    model, reference = sharded_model(mesh), sharded_model(mesh)
    beyond = {"lr": 1e-2, "max_norm": 0.5, "process_group": mesh.get_group()}
    optimizer = own.AdamW(model.parameters(), skip_nonfinite=True, undo=True, **beyond)
    plain = own.AdamW(reference.parameters(), **beyond)
    for step, bad in enumerate((None, float("nan"), None, float("inf"))):
        before = locals_of(model)
        gradients(model, step, bad)
        optimizer.step()
        assert optimizer.skipped == (bad is not None)
        if bad is None:
            gradients(reference, step, None)
            plain.step()
            assert plain.grad_norm == optimizer.grad_norm
        else:
            assert all(map(torch.equal, locals_of(model), before))
        assert all(map(torch.equal, locals_of(model), locals_of(reference)))
    assert all(float(state["step"]) == 2 for state in optimizer.state.values())
    before = locals_of(model)
    gradients(model, 7, None)
    optimizer.step()
    assert not any(map(torch.equal, locals_of(model), before))
    optimizer.rollback()
    assert all(map(torch.equal, locals_of(model), before))
    # A GradScaler without a reduction of its own has found Inf in one process.
    gradients(reference, 8, None)
    plain.grad_scale, plain.found_inf = torch.tensor(2.0), torch.tensor(float(dist.get_rank() == 1))
    plain.step()
    assert plain.skipped and all(map(torch.equal, locals_of(reference), before))
    del plain.grad_scale, plain.found_inf
    # One process refuses the step: the other does not wait for it.
    state = next(iter(plain.state.values()))
    kept = state["exp_avg"]
    if dist.get_rank() == 1:
        state["exp_avg"] = torch.zeros(3)
    try:
        plain.step()
    except spillway.SpillwayError as error:
        assert ("has shape" if dist.get_rank() == 1 else "another process of process_group refused") in str(error), error
    else:
        raise AssertionError("one process stepped alone")
    state["exp_avg"] = kept
    assert all(map(torch.equal, locals_of(reference), before))
    gradients(reference, 8, float("inf"))
    try:
        plain.step()
    except spillway.InvalidArgumentError as error:
        assert ("another process" in str(error)) == (dist.get_rank() == 0), error
    else:
        raise AssertionError("a gradient of Inf was stepped")
    assert all(map(torch.equal, locals_of(reference), before))


def locals_of(model):
    return [param.to_local().detach().clone() for param in model.parameters()]


def gradients(model, step, bad):
    """Computes gradients; with `bad`, one element of the part of rank 1 has this value."""
    model.zero_grad()
    torch.manual_seed(100 * step + dist.get_rank())
    model(torch.randn(5, 33)).square().sum().backward()
    if bad is not None and dist.get_rank() == 1:
        next(model.parameters()).grad.to_local()[0, 0] = bad


def sharded_model(mesh):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.ReLU(), torch.nn.Linear(65, 7))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


def train(model, optimizer, step, clip):
    torch.manual_seed(100 * step + dist.get_rank())
    model(torch.randn(5, 33)).square().sum().backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def exchange(models, optimizers, folder):
    """Each optimizer saves its state, and loads that of the other: nested, and then flattened."""
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        for name, model, optimizer in zip(("ours", "theirs"), models, optimizers):
            checkpoint.save(get_optimizer_state_dict(model, optimizer, options=options), checkpoint_id=f"{folder}/{name}-{flat}")
        for name, model, optimizer in zip(("theirs", "ours"), models, optimizers):
            state = get_optimizer_state_dict(model, optimizer, options=options)
            checkpoint.load(state, checkpoint_id=f"{folder}/{name}-{flat}")
            set_optimizer_state_dict(model, optimizer, state, options=options)


def resumed(model, optimizer, options):
    """Commits, does a step that is lost, and constructs the optimizer again."""
    optimizer.commit(payload=b"half")
    train(model, optimizer, 99, False)
    optimizer.close()
    again = own.AdamW(model.parameters(), lr=1e-2, **options)
    assert again.resumed_step == STEPS // 2 + 1 and again.payload == b"half"
    return again


if __name__ == "__main__":
    main(*sys.argv[1:])
