"""A tensor that is larger than its bucket: pieces of it leave, are stepped and return one after another. The bits are those of a tensor
that is not divided."""

import math
import threading

import pytest
import torch
from offload_runs import Later, bits, offload, offloaded, same, training

from spillway.speculate import Speculation
from spillway.torch._copies import HostLink
from spillway.torch._offload import portions as portions_module

#: Smaller than all tensors of two tiles.
SMALL = 2000


def use(monkeypatch, link):
    monkeypatch.setattr("spillway.torch._offload.slot.link_to", lambda param: link)
    return link


def undivided(monkeypatch):
    monkeypatch.setattr(portions_module, "_TILE", 1 << 40)


@pytest.mark.sampled(cases=8)
@pytest.mark.parametrize("verdict", ["step", "forward"])
@pytest.mark.parametrize("seed", range(300, 316))
def test_a_training_has_the_bits_of_one_with_undivided_tensors(seed, verdict, monkeypatch):
    options = {"bucket_bytes": (1, SMALL)[seed % 2], "tail": (0, 0, 1)[seed % 3]}
    with monkeypatch.context() as patch:
        undivided(patch)
        whole = training(seed, offloaded(verdict, **options))
    same(training(seed, offloaded(verdict, overlap=seed % 4 != 3, **options)), whole)
    if seed % 4 != 3:
        link = use(monkeypatch, Later(room=seed % 4 == 0))
        same(training(seed, offloaded(verdict, **options)), whole)
        link.end()


def large(count, strides=False, dtype=torch.bfloat16):
    """Some parameters, of which one has several pieces."""
    shapes = [(3, 5), (70, 120), (24,), (7, 4096), (2, 2)][:count]
    made = [torch.linspace(-1, 1, math.prod(shape)).view(shape).to(dtype) for shape in shapes]
    return [torch.nn.Parameter(one.t().contiguous().t() if strides and one.dim() == 2 else one) for one in made]


def stepped(params, gradients, **options):
    """The bits of parameters and states, and the norms, after steps with these kinds of gradients."""
    optimizer, norms = offload(params, lr=1e-2, bucket_bytes=SMALL, **options), []
    for number, kind in enumerate(gradients):
        optimizer.zero_grad()
        for param in params:
            value = torch.cos(torch.arange(param.numel()) + number).to(param.dtype).view(param.shape)
            param.register_hook(lambda grad, value=value, kind=kind: kind(value)) if number == 0 else None
        sum((param.float() * (number + 1)).sum() for param in params).backward()
        optimizer.step()
        optimizer.settle()
        norms.append(optimizer.grad_norm)
    states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq", "step")]
    return [bits(tensor.detach()) for tensor in (*params, *states)], norms


GRADIENTS = {
    "dense": lambda value: value,
    "transposed": lambda value: value.t().contiguous().t() if value.dim() == 2 else value,
    "expanded": lambda value: value[:1].expand(value.shape),
    "with gaps": lambda value: torch.stack([value, value], -1)[..., 0],
}


@pytest.mark.parametrize("apart", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("strides", [False, True], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("kind", GRADIENTS)
def test_strides_of_parameters_and_gradients(kind, strides, apart, monkeypatch):
    if apart:
        use(monkeypatch, Later(room=True))
    divided = stepped(large(4, strides), [GRADIENTS[kind]] * 3, max_norm=5.0)
    undivided(monkeypatch)
    assert divided == stepped(large(4, strides), [GRADIENTS[kind]] * 3, max_norm=5.0)


@pytest.mark.parametrize("tiles", range(1, 40))
def test_the_sum_of_the_portions_is_that_of_the_bucket(tiles, monkeypatch):
    """The last bits of a sum depend on the order of its terms."""
    generator = torch.Generator().manual_seed(tiles)
    sizes = [5, 4096 * tiles - 7, 700, 3 * 4096, 4096][: 2 + tiles % 4]
    norms = []
    for most in (1, 9000, 40000, 1 << 30):
        torch.manual_seed(tiles)
        params = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
        # All are in one bucket.
        monkeypatch.setattr("spillway.torch._offload.plan._cut", lambda slots, _, most=most: [(slots, most)])
        optimizer = offload(params, lr=0.0, max_norm=1e9, overlap=False)
        generator.manual_seed(tiles)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator) * 10 ** torch.randn(param.shape, generator=generator)
        optimizer.step()
        [bucket] = optimizer._plan.buckets
        norms.append(optimizer.grad_norm)
        assert len(bucket.portions) >= (2 if most < 4 * max(sizes) and max(sizes) > 4096 else 1)
    assert len({*norms}) == 1


class Gate(HostLink):
    """A link on which the copy of a piece of a gradient ends when the weights of the piece before it have begun to return."""

    is_apart = True

    def __init__(self):
        self.closed, self.copies, self.returned = False, 0, threading.Semaphore(0)

    def has_room(self, size):
        return True

    def out_all(self, hosts, tensors):
        self.copies += 1
        super().out_all(hosts, tensors)

    def bring_second(self, copies, hosts):
        super().bring_second(copies, hosts)
        self.returned.release()
        return Fence(None)

    def fence(self):
        return Fence(self.returned if self.closed and self.copies > 1 else None)


class Fence:
    """Is over when a semaphore lets it pass; None: at once."""

    def __init__(self, until):
        self._until = until

    def synchronize(self):
        # The time is that of a test which fails.
        assert self._until is None or self._until.acquire(timeout=10)

    def query(self):
        return True


def test_a_piece_is_stepped_and_returns_before_the_copy_of_the_next_one_has_ended(monkeypatch):
    gate = use(monkeypatch, Gate())
    param = torch.nn.Parameter(torch.ones(5, 4096, dtype=torch.bfloat16))
    optimizer = offload([param], lr=1e-2, bucket_bytes=1, max_norm=1e9)
    for _ in range(4):
        param.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        # From now on there is a plan, and the weights are on the host.
        gate.closed, gate.copies, gate.returned = True, 0, threading.Semaphore(0)
    assert optimizer._plan.engines[0].speculation.stats().buckets_committed == 4 * 5


class Log(HostLink):
    """A link that notes the elements of its copies of weights."""

    is_apart = True

    def __init__(self):
        self.log = []

    def back_all(self, tensors, hosts):
        self.log.append(sum(host.numel() for host in hosts))
        super().back_all(tensors, hosts)


def test_after_the_verdict_weights_return_in_the_order_in_which_portions_become_final(monkeypatch):
    """The engine begins with those that were submitted last."""
    link, wait = use(monkeypatch, Log()), Speculation.wait
    params = [torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for size in (3 * 4096 + 100, 3, 5)]
    optimizer = offload(params, lr=1e-2, bucket_bytes=1, max_norm=1e-3)
    monkeypatch.setattr(Speculation, "wait", lambda engine, number: (link.log.append(f"wait {number}"), wait(engine, number))[1])
    for _ in range(4):
        link.log.clear()
        # In the order of a backward that completes the first parameter last.
        sum((param.sum() for param in params), torch.zeros(())).backward()
        optimizer.step()
        optimizer.zero_grad()
    order = [bucket.slots[0].param.numel() for bucket in optimizer._plan.buckets]
    assert order == [5, 3, 3 * 4096 + 100]
    sizes = [5, 3, 4096, 4096, 4096, 100]
    assert link.log == [event for number in reversed(range(6)) for event in (f"wait {number}", sizes[number])]


def test_a_parameter_that_has_grown_is_divided_anew():
    """Its memory was replaced, and it has new states."""
    param = torch.nn.Parameter(torch.ones(9000))
    optimizer = offload([param], lr=1e-2, bucket_bytes=1)
    seen = []
    for size in (9000, 20000, 4000):
        param.data = torch.ones(size)
        optimizer.state[param] = {}
        for _ in range(2):
            param.grad = None
            param.square().sum().backward()
            optimizer.step()
        seen.append(len(optimizer._plan.buckets[0].portions))
        other = torch.nn.Parameter(torch.ones(size))
        plain = torch.optim.AdamW([other], lr=1e-2)
        for _ in range(2):
            plain.zero_grad()
            other.square().sum().backward()
            plain.step()
        torch.testing.assert_close(param, other)
    assert seen == [3, 5, 1]


def test_default_buckets_divide_what_is_larger_than_they_are():
    """With 64 MiB of gradients per bucket, the last ones have less."""
    slots = [type("Slot", (), {"size": size, "param": torch.empty(0, dtype=torch.bfloat16)}) for size in (10, 50 << 20, 2 << 20, 3)]
    for most, pieces in ((4 << 20, 25), (64 << 20, 2), (100 << 20, 1), (90 << 20, 2)):
        found = [*portions_module.leaves(portions_module.divide(slots, most))]
        assert sum(len(part.places) == 1 and part.places[0] == 1 for part in found) == (pieces if pieces > 1 else 0)
        assert sorted({place for part in found for place in part.places}) == [0, 1, 2, 3]
