"""A step of offload() that starts during backward waits for a GPU's events in the library: no thread of Python is started, nothing in
Python waits for the device, and the bits are those of a step that waits. The device is the test driver, which runs queued work only
when a thread waits for it: a step that does not wait reads old gradients."""

import ctypes
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")
TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / "torch"), str(TESTS.parent / "packaging" / "python" / "tests")]
from fake_cuda import FakeDriver
from offload_runs import NARROW, offload, offloaded, run, same, training

import spillway
from spillway._early import gpu_events
from spillway.torch._copies import DeviceLink
from spillway.torch._slabs import LockedPages, Slabs

SEEDS = range(24)


class Event:
    """A recorded event, as torch has it."""

    #: Waits of Python.
    waits = 0

    def __init__(self, driver, handle):
        self._driver, self.cuda_event, self.device = driver, handle, torch.device("cuda", driver.ordinal)

    def synchronize(self):
        Event.waits += 1
        self._driver("cuEventSynchronize", ctypes.c_void_p(self.cuda_event))


class DriverStream:
    """A stream of the test driver, as torch has it."""

    def __init__(self, driver):
        self._driver, self.of = driver, driver.stream()
        self.number = ctypes.c_void_p(self.of.cuda_stream)

    def record_event(self):
        return Event(self._driver, self._driver.record(self.of).cuda_event)

    def wait_event(self, event):
        self._driver("cuStreamWaitEvent", self.number, ctypes.c_void_p(event.cuda_event), 0)


class Locks:
    """Registers host memory with the test driver."""

    node = None

    def __init__(self, driver):
        self._driver = driver

    def register(self, address, size):
        with self._driver.current() as library:
            assert library.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(size), 0) == 0

    def unregister(self, address):
        # Any thread may free the last tensor. A device that has failed refuses the call.
        with self._driver.current() as library:
            library.cuMemHostUnregister(ctypes.c_void_p(address))


class OnDriver(DeviceLink):
    """The link of a device whose tensors torch has in host memory. What a copy takes is what the tensor holds when the copy is started, as
    later work on a device comes after it."""

    def __init__(self, driver, room):
        self._driver, self._room, self._device = driver, room, torch.device("cuda", driver.ordinal)
        self._stream, self._early = DriverStream(driver), DriverStream(driver)
        self._slabs, self._mirrors, self._moment = Slabs(LockedPages(Locks(driver))), [], None

    def follow(self):
        pass

    def release(self):
        pass

    def has_room(self, size):
        return self._room

    def second(self, tensors):
        return [torch.empty_like(tensor) for tensor in tensors]

    def _mirror(self, tensor):
        address = ctypes.c_uint64()
        self._driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(1, tensor.nbytes)))
        self._mirrors.append(address)
        return address

    def out_all(self, hosts, tensors):
        for host, tensor in zip(hosts, tensors, strict=True):
            mirror, plain = self._mirror(tensor), tensor.detach().contiguous()
            ctypes.memmove(mirror.value, plain.data_ptr(), plain.nbytes)
            if plain.nbytes:
                size = ctypes.c_size_t(plain.nbytes)
                self._driver("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(host.data_ptr()), mirror, size, self._stream.number)

    def _give(self, tensors, hosts, stream):
        for tensor, host in zip(tensors, hosts, strict=True):
            if not host.nbytes:
                continue
            mirror, size = self._mirror(tensor), ctypes.c_size_t(host.nbytes)
            self._driver("cuMemcpyHtoDAsync_v2", mirror, ctypes.c_void_p(host.data_ptr()), size, stream.number)
            self._driver("cuStreamSynchronize", stream.number)
            # A tensor with gaps takes the elements in its own order.
            taken = torch.frombuffer((ctypes.c_char * host.nbytes).from_address(mirror.value), dtype=host.dtype)
            tensor.detach().data.copy_(taken.view(host.shape))

    def back_all(self, tensors, hosts):
        self._give(tensors, hosts, self._stream)

    def bring(self, tensor, host):
        self._give([tensor], [host], self._stream)

    def bring_second(self, copies, hosts):
        self._give(copies, hosts, self._early)
        return self._early.record_event()

    def place_all(self, tensors, copies, fence):
        torch._foreach_copy_(tensors, copies)

    def wait(self, fence):
        self._driver("cuEventSynchronize", ctypes.c_void_p(fence.cuda_event))


@pytest.fixture
def link_of(on_cpu, monkeypatch):
    """Makes parameters on the CPU those of a GPU of the test driver."""
    monkeypatch.setenv("SPILLWAY_CUDA_LIBRARY", on_cpu["SPILLWAY_CUDA_LIBRARY"])
    monkeypatch.setattr(gpu_events, "_gpus", {})

    def make(room=False, ordinal=0):
        link = OnDriver(FakeDriver(on_cpu["SPILLWAY_CUDA_LIBRARY"], ordinal), room)
        monkeypatch.setattr("spillway.torch._offload.slot.link_to", lambda param: link)
        Event.waits = 0
        return link

    return make


@pytest.mark.parametrize("room", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_trainings_have_the_bits_of_steps_that_wait(seed, room, link_of):
    plain = training(seed, offloaded(overlap=False, bucket_bytes=2000))
    link_of(room)
    same(plain, training(seed, offloaded(bucket_bytes=2000)))


@pytest.mark.parametrize("states", [None, *NARROW])
def test_no_thread_of_python_and_no_wait_of_python(states, link_of):
    """But for the first step, which makes masters from weights on the device."""
    options = {"lr": 0.1, "bucket_bytes": 2000, **({} if states is None else NARROW[states])}
    plain, _, norms = run(lambda model: offload(model.parameters(), max_norm=1.0, **{**options, "overlap": False}), torch.bfloat16)
    link_of()
    waits = []

    def made(model):
        optimizer = offload(model.parameters(), max_norm=1.0, **options)
        step = optimizer.step
        optimizer.step = lambda: (step(), waits.append(Event.waits))
        return optimizer

    model, optimizer, found = run(made, torch.bfloat16)
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), model.parameters())) and norms == found
    assert optimizer._plan._worker is None
    assert len(waits) == 6 and waits[0] == waits[-1], waits
    stats = [engine.speculation.stats() for engine in optimizer._plan.engines]
    assert all(own.buckets_speculated for own in stats if own.commits), stats


def test_the_begin_of_a_step_is_the_end_of_its_first_copy(link_of):
    link = link_of()
    model, optimizer, _ = run(lambda model: offload(model.parameters(), lr=0.1, bucket_bytes=1))
    before = optimizer._plan.began()
    model(torch.ones(8, 16)).sum().backward()
    assert optimizer._plan.began() is None or optimizer._plan.began() > before
    optimizer.step()
    assert optimizer._plan.began() > before
    assert link._moment is not None


def test_a_device_that_the_driver_does_not_serve_has_a_thread(link_of, monkeypatch):
    plain, _, _ = run(lambda model: offload(model.parameters(), lr=0.1, bucket_bytes=1, overlap=False))
    link_of()
    monkeypatch.setattr(gpu_events, "_gpus", {0: None})
    model, optimizer, _ = run(lambda model: offload(model.parameters(), lr=0.1, bucket_bytes=1))
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), model.parameters()))
    assert optimizer._plan._worker is not None and Event.waits


def test_an_error_of_the_device_is_raised_by_step_and_nothing_was_stepped(link_of, monkeypatch):
    # A device of its own: it fails for good.
    link_of(ordinal=17)
    model, optimizer, _ = run(lambda model: offload(model.parameters(), lr=0.1))
    before = [param.detach().clone() for param in model.parameters()]
    monkeypatch.setenv("FAKECUDA_FAIL", "cuEventSynchronize=700")
    model(torch.ones(8, 16)).sum().backward()
    with pytest.raises(spillway.SpillwayError, match="the GPU reported an error"):
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters()))
