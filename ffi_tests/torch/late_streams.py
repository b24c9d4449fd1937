"""Streams of a device on the CPU, whose copies end late, and a driver that locks few bytes: for tests of links to a device.

Tensors "on the device" are in host memory. The program's own work on them is done at once, so its stream has ended it at all times. A copy
on another stream is done by that stream's thread, some time after it was started. What the program's stream waits for, the double awaits
on the spot: that is the device's order, and no wait of the program, which `waits` counts."""

import concurrent.futures
import contextlib
import threading
import time

import torch

from spillway._early import worker
from spillway.errors import UnsupportedError
from spillway.torch import _copies, _slabs, _staging

_here = threading.local()


class Event:
    """The end of the work that a stream had.

    Attributes:
        waits: The waits of the main thread for events, by `place`."""

    waits, place = [], ""

    def __init__(self, end=None):
        self.end = end

    def synchronize(self):
        if threading.current_thread() is threading.main_thread() and not self.query():
            Event.waits.append(Event.place)
        if self.end is not None:
            self.end.result()

    def query(self):
        return self.end is None or self.end.done()


class Program:
    """The stream of the program."""

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def wait_event(self, event):
        if event.end is not None:
            event.end.result()

    def record_event(self):
        return Event()

    def synchronize(self):
        pass


class Late:
    """A stream with a thread of its own."""

    #: Seconds that a copy takes at least.
    delay = 0.0005

    def __init__(self, device=None):
        self.queue, self.error = concurrent.futures.ThreadPoolExecutor(1), None

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def wait_event(self, event):
        if event.end is not None:
            self.queue.submit(event.end.result)

    def record_event(self):
        return Event(self.queue.submit(self._check))

    def _check(self):
        """Raises the error of a copy, as all that a device does after one."""
        if self.error is not None:
            raise self.error

    def __enter__(self):
        _here.stream = self

    def __exit__(self, *_):
        _here.stream = None

    def copy(self, copy_all, to, sources):
        """Starts copies."""
        torch.autograd.graph.increment_version([*to])
        to, sources = [end.data for end in to], [source.data for source in sources]

        def run():
            time.sleep(self.delay)
            try:
                with torch.inference_mode():
                    copy_all(to, sources)
            except Exception as error:
                self.error = error

        self.queue.submit(run)


class Driver:
    """Locks a number of bytes, at most `largest` in one call, and refuses more. `most` is the largest number that was locked at once."""

    node = None

    def __init__(self, limit, largest=1 << 40):
        self.limit, self.largest, self.live, self.most = limit, largest, {}, 0

    def register(self, address, size):
        if size > self.largest or self.bytes + size > self.limit:
            raise UnsupportedError("the limit is reached")
        self.live[address] = size
        self.most = max(self.most, self.bytes)

    def unregister(self, address):
        del self.live[address]

    @property
    def bytes(self):
        return sum(self.live.values())

    def holds(self, tensor):
        """What is_pinned() tells of a tensor."""
        at = tensor.data_ptr()
        return any(start <= at < start + size for start, size in [*self.live.items()])


def make_small(patch):
    """Makes blocks and slabs small, as the tensors of tests are."""
    patch.setattr(_staging, "_MOST", 2048)
    patch.setattr(_staging, "_LEAST", 256)
    patch.setattr(_slabs, "_LEAST", 4096)
    patch.setattr(_slabs, "_LARGE", 2048)


def link(patch, *limits):
    """A link to a device whose driver has these limits, and torch locks nothing; and the driver. The link is that of all parameters."""
    driver, copy_all, wait = Driver(*limits), torch._foreach_copy_, worker.Flag.wait
    program = Program()

    def copied(to, sources, **options):
        if (stream := getattr(_here, "stream", None)) is None:
            return copy_all(to, sources, **options)
        return stream.copy(copy_all, to, sources)

    def waited(flag):
        if threading.current_thread() is threading.main_thread() and not flag.is_set:
            Event.waits.append(Event.place)
        wait(flag)

    Event.waits.clear()
    Event.place = ""
    patch.setattr(_slabs, "_told", [])
    patch.setattr(torch, "Stream", Late)
    patch.setattr(torch, "_foreach_copy_", copied)
    patch.setattr(worker.Flag, "wait", waited)
    patch.setattr(torch.accelerator, "current_stream", lambda device: program)
    patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    patch.setattr(torch.Tensor, "is_pinned", lambda tensor: driver.holds(tensor))
    patch.setattr(_copies, "CudaDriver", lambda device: driver)
    patch.setattr(_copies, "unused_bytes", lambda device: 1 << 40)
    made = _copies.DeviceLink(torch.device("cuda", 0))
    for module in ("_offload.slot", "_copies"):
        patch.setattr(f"spillway.torch.{module}.link_to", lambda param: made)
    return made, driver


@contextlib.contextmanager
def at(place):
    """A block whose waits are those of a place."""
    Event.place = place
    try:
        yield
    finally:
        Event.place = ""
