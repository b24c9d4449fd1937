"""Weights that go to second copies on their device before the verdict: the bits are the same, and only a kept step uses them."""

import collections

import pytest
import torch
from offload_runs import BUCKETS, Later, Stream, backward, offloaded, same, training

import spillway.torch
from spillway.torch._copies import DeviceLink, HostLink


def use(monkeypatch, link):
    monkeypatch.setattr("spillway.torch._offload.slot.link_to", lambda param: link)
    return link


def test_second_copies_give_the_same_bits(monkeypatch):
    placed = 0
    for seed in range(200, 224):
        bucket = BUCKETS[seed % 2]
        with monkeypatch.context() as patch:
            waits = training(seed, offloaded(bucket_bytes=bucket, overlap=False))
            link = use(patch, Later(room=True))
            same(training(seed, offloaded("forward" if seed % 4 > 1 else "step", bucket_bytes=bucket)), waits)
            placed += link.placed
    assert placed > 20


class Meter(HostLink):
    """A link that counts the bytes of its copies, and what a device without room or memory refuses."""

    is_apart = True

    def __init__(self, room=True, left=10):
        self.room, self.left = room, left
        self.moved = collections.Counter()

    def has_room(self, size):
        return self.room

    def second(self, tensors):
        self.left -= 1
        return None if self.left < 0 else super().second(tensors)

    def out_all(self, hosts, tensors):
        self.moved["out"] += sum(tensor.nbytes for tensor in tensors)
        super().out_all(hosts, tensors)

    def back_all(self, tensors, hosts):
        self.moved["back"] += sum(host.nbytes for host in hosts)
        super().back_all(tensors, hosts)

    def bring_second(self, copies, hosts):
        self.moved["second"] += sum(host.nbytes for host in hosts)
        super().bring_second(copies, hosts)

    def place_all(self, tensors, copies, fence):
        self.moved["on the device"] += sum(copy.nbytes for copy in copies)
        super().place_all(tensors, copies, fence)


#: Parameters of 12 bytes each, and buckets of one.
PARAMS, BYTES = 6, 72


def moved(monkeypatch, link, spike=False, **options):
    """What the fifth iteration moves."""
    use(monkeypatch, link)
    params = [torch.nn.Parameter(torch.ones(6, dtype=torch.bfloat16)) for _ in range(PARAMS)]
    optimizer = spillway.torch.offload(params, lr=1e-3, overlap=True, bucket_bytes=1, **options)
    for step in range(5):
        link.moved.clear()
        backward(params)
        for param in params:
            if spike and step == 4:
                param.grad.data.mul_(1000)
        optimizer.step()
        optimizer.settle()
        optimizer.zero_grad()
    assert len(optimizer._plan.buckets) == PARAMS
    optimizer.close()
    return dict(link.moved)


@pytest.mark.parametrize("verdict", ["step", "forward"])
def test_a_kept_step_brings_two_bytes_a_parameter_before_its_verdict_and_none_after(monkeypatch, verdict):
    options = {"verdict": "forward", "model": torch.nn.Linear(1, 1)} if verdict == "forward" else {}
    found = moved(monkeypatch, Meter(), max_norm=1e6, **options)
    assert found == {"out": BYTES, "second": BYTES, "on the device": BYTES}


def test_a_clipped_step_brings_the_weights_after_its_verdict(monkeypatch):
    found = moved(monkeypatch, Meter(), max_norm=1e-3)
    # The first bucket exceeds the norm: no other one is stepped before the verdict. Two such steps end the attempts.
    assert found == {"out": BYTES, "back": BYTES}


@pytest.mark.parametrize("link", [Meter(room=False), Meter(left=0), Meter(left=3)], ids=["no room", "no memory", "some memory"])
def test_without_memory_the_weights_come_after_the_verdict(monkeypatch, link):
    assert moved(monkeypatch, link) == {"out": BYTES, "back": BYTES}


def test_second_copies_wait_for_no_copy_to_the_host_and_for_their_last_use(monkeypatch):
    monkeypatch.setattr(torch, "Stream", Stream)
    recorded = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(stream))
    program = Stream()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: program)
    link = DeviceLink(torch.device("cuda", 0))
    weights, host = torch.zeros(3), torch.ones(3)
    (second,) = link.second([weights])
    assert recorded == [link._early] and link._early.waits_for == [program]
    for turn in range(2):
        fence = link.bring_second([second], [host])
        assert fence == ("event of", link._early)
        # The copy is from a stream on which no copy to the host waits for a backward.
        assert link._early.waits_for == [program, *[("event of", program)] * turn]
        link.place_all([weights], [second], fence)
        assert program.waits_for == [fence] * (turn + 1) and torch.equal(weights, host)
        host += 1


def test_room_is_a_quarter_of_what_was_never_used(monkeypatch):
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr("spillway.torch._copies.unused_bytes", lambda device: 4000)
    link = DeviceLink(torch.device("cuda", 0))
    assert link.has_room(1000) and not link.has_room(1001) and not HostLink().has_room(0)


def test_a_device_that_is_full_has_no_second_copies(monkeypatch):
    monkeypatch.setattr(torch, "Stream", Stream)
    link = DeviceLink(torch.device("cuda", 0))

    def full(tensor):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "empty_like", full)
    assert link.second([torch.zeros(3)]) is None
