"""One process of test_offload_ranks.py: spillway.torch.offload with parameters that are placed on meshes of 2 or 4 processes.

offload_worker.py FOLDER CASE...     prints a line for each case that holds"""

import datetime
import math
import os
import pathlib
import random
import signal
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2] / "packaging" / "python")]

import torch
import torch.distributed as dist
from fsdp_worker import exchange
from ranks_worker import give, meshes, parameter, parts, placed, raises, same_bits, values
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial

import spillway
from spillway import torch as own

DTYPES = (torch.float32, torch.bfloat16)
TRAININGS = int(os.environ.get("SPILLWAY_TRAININGS", "6"))


def layers(chance, dtype):
    torch.manual_seed(chance.randrange(1 << 30))
    width = chance.choice((7, 16, 33))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(chance.randint(2, 4))))
    if chance.random() < 0.3:
        model[0].requires_grad_(False)
    return model.to(dtype), width


def sharded(seed, mesh, dtype):
    """A model of FSDP2; its layers share units in some seeds."""
    chance = random.Random(seed)
    model, width = layers(chance, dtype)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32) if chance.random() < 0.3 else MixedPrecisionPolicy()
    for layer in model:
        if chance.random() < 0.7:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy), width


def training(seed, mesh, make):
    """Losses, norms, final weights and moments of this process in a random training."""
    chance = random.Random(seed)
    dtype = chance.choice(DTYPES)
    model, width = sharded(seed, mesh, dtype)
    options = {
        "lr": 10 ** chance.uniform(-4, -2),
        "max_norm": chance.choice((None, 0.02, 1.0, 50.0)),
        "skip_nonfinite": chance.random() < 0.6,
        "bucket_bytes": chance.choice((1, 2000, 1 << 20)),
    }
    optimizer = make([p for p in model.parameters() if p.requires_grad], model, **options)
    later = getattr(optimizer, "_next", None) is not None
    data, losses, verdicts = torch.Generator().manual_seed(1000 * seed + dist.get_rank()), [], []

    def heard(action):
        """The result of what gives the verdict of a step; None if it is refused."""
        result = None
        try:
            result = action()
        except spillway.InvalidArgumentError as error:
            assert "Inf or NaN" in str(error)
            verdicts.append("refused")
        verdicts.append((optimizer.skipped, optimizer.grad_norm))
        return result

    for step in range(chance.randint(3, 6)):
        micro = chance.choice((1, 1, 2, 3))
        spiked = chance.randrange(dist.get_world_size()) if chance.random() < 0.3 else None
        event = chance.choice((None, None, None, "inf", "edit", "lr"))
        synchronous = chance.random() < 0.5
        for number in range(micro):
            model.set_requires_gradient_sync(synchronous or number == micro - 1)
            x = torch.randn(4, width, generator=data).to(dtype)
            found = heard(lambda: model(x)) if later and step and not number else None  # noqa: B023
            loss = (model(x) if found is None else found).float().square().mean() * (300.0 if spiked == dist.get_rank() else 1.0)
            loss.backward()
            losses.append(loss.item())
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if event == "inf" and dist.get_rank() == step % dist.get_world_size() and grads[0].to_local().numel():
            grads[0].to_local().view(-1)[0] = math.inf
        if event == "edit":
            grads[-1].mul_(0.5)
        if event == "lr":
            optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step() if later else heard(optimizer.step)
        optimizer.zero_grad()
    if later:
        heard(optimizer.settle)
    states = optimizer.state_dict()["state"]
    moments = [states[number][name].to_local() for number in sorted(states) for name in ("exp_avg", "exp_avg_sq")]
    return (losses, verdicts), [p.to_local().detach().clone() for p in model.parameters()] + moments


def with_tail(params, model=None, **options):
    return own.offload(params, overlap=True, tail=2, **options)


def with_overlap(params, model=None, **options):
    return own.offload(params, overlap=True, **options)


def without_overlap(params, model=None, **options):
    return own.offload(params, overlap=False, **options)


def in_next_forward(params, model, **options):
    return own.offload(params, overlap=True, verdict="forward", model=model, **options)


def waiting_class(params, model, bucket_bytes, **options):
    master = {"master": "f32"} if params[0].dtype is not torch.float32 else {}
    group = {"process_group": dist.group.WORLD} if options["max_norm"] or options["skip_nonfinite"] else {}
    return own.AdamW(params, **options, **master, **group)


def equal(one, other):
    return repr(one[0]) == repr(other[0]) and len(one[1]) == len(other[1]) and all(map(same_bits, one[1], other[1]))


def trainings():
    """Random trainings under FSDP2 and HSDP have the bits of a step that waits, and of spillway.torch.AdamW."""
    first = int(os.environ.get("SPILLWAY_SEED", "0"))
    for seed in range(first, first + TRAININGS):
        for mesh in meshes():
            found = training(seed, mesh, with_overlap)
            assert equal(found, training(seed, mesh, without_overlap)), seed
            assert equal(found, training(seed, mesh, in_next_forward)), seed
            assert equal(found, training(seed, mesh, with_tail)), seed
            other = training(seed, mesh, waiting_class)
            assert len(found[1]) == len(other[1]) and all(map(same_bits, found[1], other[1])), seed


def overlaps():
    """Buckets are stepped before step() is called, and each process steps its part alone."""
    model, width = sharded(5, meshes()[0], torch.float32)
    optimizer = with_overlap(model, lr=1e-3, max_norm=1.0, bucket_bytes=1)
    for step in range(3):
        model(torch.randn(3, width)).square().mean().backward()
        assert bool(step) == (optimizer._plan is not None and all(bucket.submitted for bucket in optimizer._plan.buckets))
        optimizer.step()
        optimizer.zero_grad()
    for state in optimizer.state.values():
        assert isinstance(state["exp_avg"], DTensor) and state["exp_avg"].to_local().is_cpu


def norms():
    """The norm is that of torch for all placements, plain parameters beside DTensors included; replicas have equal bits."""
    for mesh in meshes():
        mixed = [parameter(mesh, placements, at, (6, 5)) for at, placements in enumerate(placed(mesh))]
        mixed += [torch.nn.Parameter(values(90, (7,)))]
        give(mixed, 3)
        whole = [param.grad.full_tensor() if isinstance(param, DTensor) else param.grad for param in mixed]
        expected = float(torch.nn.utils.get_total_norm(whole))
        optimizer = with_overlap(mixed, max_norm=0.5)
        optimizer.step()
        torch.testing.assert_close(optimizer.grad_norm, expected, rtol=1e-5, atol=0)
        reference = [parameter(mesh, placements, at, (6, 5)) for at, placements in enumerate(placed(mesh))]
        reference += [torch.nn.Parameter(values(90, (7,)))]
        give(reference, 3)
        waits = own.AdamW(reference, max_norm=0.5, process_group=dist.group.WORLD)
        waits.step()
        assert waits.grad_norm == optimizer.grad_norm
        for one, other in zip(mixed, reference, strict=True):
            one, other = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in (one, other))
            assert same_bits(one.detach(), other.detach())
        same = parts(mixed[0])
        assert all(same_bits(part, same[0]) for part in same)


def refusals():
    """One process refuses a step, has Inf, or has a scaler with Inf: no process steps, each for its reason."""
    mesh = meshes()[0]
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    params = [parameter(mesh, placed(mesh)[1], at, (8, 5)) for at in range(3)]
    optimizer = with_overlap(params, lr=0.1, max_norm=1.0)

    def bits():
        return [p.to_local().detach().clone() for p in params]

    give(params, 0)
    optimizer.step()
    before = bits()
    give(params, 1)
    kept = optimizer.state[params[1]]["exp_avg"]
    if rank == last:
        optimizer.state[params[1]]["exp_avg"] = torch.zeros(3)
    words = "is no longer a contiguous float32 tensor" if rank == last else "another process of process_group refused"
    raises(spillway.SpillwayError, optimizer.step, words)
    assert all(map(torch.equal, bits(), before))
    optimizer.state[params[1]]["exp_avg"] = kept
    if rank == last:
        params[2].grad.to_local().view(-1)[0] = math.nan
    raises(spillway.InvalidArgumentError, optimizer.step, "parameter 2" if rank == last else "a parameter of another process")
    assert all(map(torch.equal, bits(), before))
    give(params, 1)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(float(rank == last))
    optimizer.step()
    assert optimizer.skipped and optimizer.grad_norm == math.inf and all(map(torch.equal, bits(), before))
    del optimizer.grad_scale, optimizer.found_inf
    optimizer.step()
    assert not optimizer.skipped and not any(map(torch.equal, bits(), before))
    # A gradient that is a term of a sum.
    params[0].grad = DTensor.from_local(torch.ones(8, 5), mesh, [Partial()], run_check=False)
    before = bits()
    raises(spillway.InvalidArgumentError, optimizer.step, "the gradient is placed as")
    assert all(map(torch.equal, bits(), before))
    # A process without gradients takes part.
    give(params, 2)
    if rank == last:
        for param in params:
            param.grad = None
    optimizer.step()
    assert not optimizer.skipped and all(map(torch.equal, bits(), before)) == (rank == last)
    norms = [None] * dist.get_world_size()
    dist.all_gather_object(norms, optimizer.grad_norm)
    assert norms == [norms[0]] * len(norms) and norms[0] > 0


def groups():
    """A mesh of some processes needs the group of the norm."""
    if dist.get_world_size() == 4:
        mesh = meshes()[1]["shard"]
        param = parameter(mesh, placed(mesh)[1], 0, (6, 5))
        raises(spillway.InvalidArgumentError, lambda: own.offload([param], max_norm=1.0), "need process_group")
        give([param], 0)
        optimizer = own.offload([param], max_norm=1.0, process_group=mesh.get_group())
        optimizer.step()
        expected = float(torch.nn.utils.get_total_norm([param.grad]).full_tensor())
        torch.testing.assert_close(optimizer.grad_norm, expected, rtol=1e-5, atol=0)
        own.offload([param]).step()
        over_all = {"max_norm": 1.0, "process_group": dist.group.WORLD}
        raises(spillway.InvalidArgumentError, lambda: own.offload([param], **over_all), "replicas, which would count twice")


def checkpoints(folder):
    """torch.distributed.checkpoint saves a state of one class, and the other class continues with it."""
    mesh = meshes()[0]
    models, optimizers = [], []
    for kind in (lambda params: own.offload(params, lr=1e-2), lambda params: torch.optim.AdamW(params, lr=1e-2)):
        model, width = sharded(11, mesh, torch.float32)
        models.append(model)
        optimizers.append(kind(model.parameters()))

    def train(model, optimizer, step):
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(5, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for step in range(8):
        for model, optimizer in zip(models, optimizers):
            train(model, optimizer, step)
        if step == 3:
            exchange(models, optimizers, folder)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one.to_local(), other.to_local(), rtol=1e-5, atol=1e-6)
    # A new optimizer gets its states by the first call of set_optimizer_state_dict.
    state = get_optimizer_state_dict(models[0], optimizers[0])
    fresh = own.offload(models[0].parameters(), lr=1e-2)
    set_optimizer_state_dict(models[0], fresh, state)
    for param in models[0].parameters():
        assert same_bits(fresh.state[param]["exp_avg"].to_local(), optimizers[0].state[param]["exp_avg"].to_local())
        assert float(fresh.state[param]["step"]) == 8


def lost():
    """A process is killed before its sum of squares: the others get an error, and have stepped nothing. The last case."""
    mesh = meshes()[0]
    params = [parameter(mesh, placed(mesh)[1], at, (6, 5)) for at in range(3)]
    optimizer = with_overlap(params, lr=0.1, max_norm=1.0)
    give(params, 0)
    optimizer.step()
    later = in_next_forward(params, torch.nn.ParameterList(params), lr=0.1, max_norm=1.0)
    before = [p.to_local().detach().clone() for p in params]
    give(params, 1)
    # The launcher ends the others once it sees that one process has ended.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        print("lost holds\n", end="", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    raises(RuntimeError, lambda: (later.step(), later.settle()), "")
    raises(RuntimeError, optimizer.step, "")
    assert all(map(torch.equal, [p.to_local().detach().clone() for p in params], before))
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}
    assert not any(float(state["step"]) for state in later.state.values())


def main(folder, *cases):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    for case in cases:
        globals()[case](*([folder] if case == "checkpoints" else []))
        print(f"{case} holds\n", end="", flush=True)
    # The interpreter's exit aborts now and then after FSDP2 on the CPU, also with torch alone.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
