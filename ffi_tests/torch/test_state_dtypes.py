"""States whose memory is smaller than a step of their parameter would write: refused, or stepped as what they are. Each is followed by a
guard of bytes, so that a write behind it is seen."""

import functools

import pytest
import torch

import spillway
from spillway import _native, pipeline
from spillway import torch as own
from spillway.torch import _table

N = 4096


class Guarded:
    """A tensor at a fixed address with 8 bytes per element, of which the tensor uses as many as its dtype needs."""

    def __init__(self):
        self.memory = torch.full((8 * N,), 77, dtype=torch.uint8)

    def tensor(self, dtype):
        self.memory.fill_(77)
        self.used = N * dtype.itemsize
        made = self.memory[: self.used].view(dtype)
        return made.zero_()

    def intact(self):
        return bool((self.memory[self.used :] == 77).all())


def stepped(dtype, **options):
    param = torch.nn.Parameter(torch.ones(N, dtype=dtype))
    optimizer = own.AdamW([param], lr=1e-2, **options)
    param.grad = torch.ones_like(param)
    optimizer.step()
    return param, optimizer


@pytest.mark.parametrize("wide", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_moments_of_two_dtypes_are_refused_by_name(dtype, wide):
    param, optimizer = stepped(dtype)
    state, guard = optimizer.state[param], Guarded()
    narrow = "exp_avg_sq" if wide == "exp_avg" else "exp_avg"
    state[wide], state[narrow] = state[wide].float(), guard.tensor(dtype)
    before = param.detach().clone()
    with pytest.raises(spillway.InvalidArgumentError, match=r"param_groups\[0\]\['params'\]\[0\]: its .*exp_avg_sq has another dtype"):
        optimizer.step()
    assert guard.intact() and torch.equal(param, before)


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "both", "master_param"])
def test_a_state_of_another_dtype_at_the_address_of_the_old_one_is_seen(key):
    """An allocator returns freed memory again, so an address says nothing about the dtype behind it."""
    param, optimizer = stepped(torch.bfloat16, **({"master": "f32"} if key == "master_param" else {}))
    keys = ["exp_avg", "exp_avg_sq"] if key == "both" else [key]
    guards, state = {name: Guarded() for name in keys}, optimizer.state[param]
    for name, guard in guards.items():
        state[name] = guard.tensor(torch.float32)
    if key not in ("both", "master_param"):
        other = "exp_avg_sq" if key == "exp_avg" else "exp_avg"
        state[other] = state[other].float()
    optimizer.step()
    addresses = {name: state[name].data_ptr() for name in keys}
    for name, guard in guards.items():
        state[name] = guard.tensor(torch.bfloat16)
        assert state[name].data_ptr() == addresses[name]
    if key == "both":
        optimizer.step()
        assert state["exp_avg"].any()
    else:
        with pytest.raises(spillway.SpillwayError, match=r"param_groups\[0\]\['params'\]\[0\]"):
            optimizer.step()
    assert all(guard.intact() for guard in guards.values())


@pytest.mark.parametrize("swap", ["shorter", "data"])
def test_a_shorter_state_at_the_address_of_the_old_one_is_seen(swap):
    param, optimizer = stepped(torch.float32)
    state, guard = optimizer.state[param], Guarded()
    state["exp_avg"] = guard.tensor(torch.float32)
    optimizer.step()
    memory = guard.tensor(torch.bfloat16)
    if swap == "shorter":
        state["exp_avg"] = memory[: N // 2].view(torch.float32)
        guard.used = N
        guard.memory[N:] = 77
    else:
        state["exp_avg"].data = memory
    with pytest.raises(spillway.SpillwayError, match=r"params'\]\[0\]"):
        optimizer.step()
    assert guard.intact()


@pytest.mark.parametrize("what", ["parameter", "gradient", "exp_avg", "a new state", "all states"])
@pytest.mark.parametrize("cls", [functools.partial(own.AdamW, undo=True), pipeline.StageAdamW], ids=["AdamW", "StageAdamW"])
def test_a_rollback_of_memory_that_is_of_another_tensor_now_is_refused(cls, what):
    param, guard = torch.nn.Parameter(torch.ones(N)), Guarded()
    optimizer = cls([param], lr=1e-2)
    param.grad = torch.ones(N)
    optimizer.step()
    state = optimizer.state[param]
    changed = {"parameter": param, "gradient": param.grad}.get(what, state["exp_avg"])
    changed.data = guard.tensor(torch.float32)
    optimizer.step()
    if what == "a new state":
        state["exp_avg"] = state["exp_avg"].clone()
    elif what == "all states":
        optimizer.state[param] = dict(state)
    else:
        changed.data = guard.tensor(torch.bfloat16)
    with pytest.raises(spillway.InvalidArgumentError, match="rollback: a .* since the step"):
        optimizer.rollback()
    assert guard.intact()


@pytest.mark.parametrize("cls", ["Adam", "Lion", "Signum", "Adagrad"])
def test_changes_of_many_tensors_are_seen_where_the_table_knows_their_objects(cls, monkeypatch):
    """The table loads the cache lines of its objects ahead, also of those that are freed meanwhile."""
    count, loads = 1000, []
    short = _native.short
    monkeypatch.setattr(_native, "short", lambda name: lambda *given: loads.append(given[1]) or short(name)(*given))

    def steps():
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(5)) for _ in range(count)]
        optimizer = getattr(own, cls)(params, lr=0.1)
        for number in range(6):
            for param in params:
                param.grad = None if number == 5 and param is params[-1] else torch.randn(5)
            if number == 3:
                for param, state in optimizer.state.items():
                    state.update({name: value.clone() for name, value in state.items()})
                    param.data = param.data.clone()
            optimizer.step()
        return params, optimizer

    many = steps()
    monkeypatch.setattr(_table, "_MANY", count + 1)
    before = len(loads)
    few = steps()
    assert before and min(loads) > count and len(loads) == before
    for param, other in zip(many[0], few[0]):
        assert torch.equal(param, other)
        for name, value in many[1].state[param].items():
            assert torch.equal(value, few[1].state[other][name])
