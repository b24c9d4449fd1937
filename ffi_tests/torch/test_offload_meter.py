"""Counts what a step of offload() asks of a device: copies, waits of the program, and where it waits. Each of them costs time on a GPU."""

import collections
import threading

import pytest
import torch
from offload_runs import Stream, backward

import spillway.torch
from spillway.torch._copies import DeviceLink, HostLink


class Meter(HostLink):
    """A link that counts. `at` is where the program is."""

    is_apart = True

    def __init__(self):
        self.at, self.counts = "", collections.Counter()

    def count(self, what):
        main = threading.current_thread() is threading.main_thread()
        self.counts[what, self.at if main else "beside"] += 1

    def out_all(self, hosts, tensors):
        self.count("copy to the host")
        super().out_all(hosts, tensors)

    def back_all(self, tensors, hosts):
        self.count("copy to the device")
        super().back_all(tensors, hosts)

    def fence(self):
        meter = self

        class Fence:
            def synchronize(self):
                meter.count("wait")

            def query(self):
                return True

        return Fence()


def counts_of(params, monkeypatch, buckets, **options):
    """The counts of the fifth iteration, in which nothing happens for the first time."""
    meter = Meter()
    monkeypatch.setattr("spillway.torch._offload.slot.link_to", lambda param: meter)
    params = [torch.nn.Parameter(torch.ones(6, dtype=torch.bfloat16)) for _ in range(params)]
    optimizer = spillway.torch.offload(
        params, torch.optim.AdamW, lr=1e-3, overlap=True, bucket_bytes=64 << 20 if buckets == 1 else 1, **options
    )
    for _ in range(5):
        meter.counts.clear()
        meter.at = "backward"
        backward(params)
        meter.at = "step"
        optimizer.step()
        optimizer.zero_grad()
    assert len(optimizer._plan.buckets) == buckets
    optimizer.close()
    return dict(meter.counts)


@pytest.mark.parametrize("max_norm", [None, 1e6])
@pytest.mark.parametrize("params", [1, 7, 300])
def test_copies_and_waits_do_not_depend_on_the_number_of_parameters(params, max_norm, monkeypatch):
    assert counts_of(params, monkeypatch, 1, max_norm=max_norm) == {
        ("copy to the host", "backward"): 1,
        ("copy to the device", "step"): 1,
        # By the thread that submits the bucket: for its gradients, and for the last weights, whose memory the step writes.
        ("wait", "beside"): 2,
    }


def test_each_bucket_has_its_copies_and_the_program_waits_for_none(monkeypatch):
    assert counts_of(5, monkeypatch, 5, max_norm=1.0) == {
        ("copy to the host", "backward"): 5,
        ("copy to the device", "step"): 5,
        ("wait", "beside"): 10,
    }


def test_a_copy_of_a_bucket_waits_for_each_stream_that_computed_a_gradient(monkeypatch):
    """Backward runs an operation on the stream of its forward, and a hook has that stream."""
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    link, streams = DeviceLink(torch.device("cuda", 0)), [Stream() for _ in range(3)]
    current = iter([streams[0], streams[1], streams[0], streams[2], streams[0]])
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: next(current))
    host, tensor = torch.zeros(2), torch.ones(2)
    for _ in range(3):
        link.follow()
    link.out_all([host], [tensor])
    assert set(link._stream.waits_for) == set(streams) and len(link._stream.waits_for) == 3 and torch.equal(host, tensor)
    link.out(host, tensor)
    assert link._stream.waits_for[3:] == [streams[0]]
