"""Pageable memory of a link to a device: its copies pass through a bounded ring of page-locked blocks, and the program waits for none of
them during backward."""

import gc
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import warnings

import late_streams
import pytest
import torch
from interrupts import Interrupt, interrupted
from late_streams import Event, Late, at
from offload_runs import BUCKETS, backward, offloaded, same, training
from test_tier_overlap import tiered

import spillway.torch
from spillway.errors import UnsupportedError
from spillway.torch import _staging

KIB = 1 << 10
#: The driver locks a ring, and no slab; it locks both.
RING, BOTH = (8 * KIB, 2 * KIB), (30 * KIB,)
pytestmark = pytest.mark.filterwarnings("ignore:spillway. the system locks no more memory")


@pytest.fixture
def small(monkeypatch):
    """Small blocks and slabs."""
    late_streams.make_small(monkeypatch)
    return monkeypatch


def told(work):
    """The result of work(), and its warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        return work(), [str(warning.message) for warning in found]


def pageable(link, *shape, dtype=torch.float32):
    tensor = link.memory(shape, dtype)
    assert not tensor.is_pinned()
    return tensor


@pytest.mark.parametrize("seed", range(300, 312))
def test_states_in_pageable_memory_give_the_same_bits(seed, small):
    """With none of it locked but the ring, with some of it, and with a ring of none."""
    limits = (RING, BOTH, (0,))[seed % 3]
    more = {"bucket_bytes": BUCKETS[seed % 2], "tail": seed % 2}
    waits = training(seed, offloaded(bucket_bytes=BUCKETS[seed % 2], overlap=False))
    with small.context() as patch:
        link, driver = late_streams.link(patch, *limits)
        same(training(seed, offloaded("forward" if seed % 4 > 1 else "step", **more)), waits)
    assert link._slabs.ring is not None and driver.most <= limits[0]
    assert link.staging_bytes == 8 * KIB or limits is not RING
    assert bool(link.staging_bytes) is bool(limits[0])


@pytest.mark.parametrize("seed", range(4))
def test_copies_of_states_on_a_tier_give_the_same_bits(seed, small):
    waits = training(seed, tiered(seed))
    with small.context() as patch:
        link, _ = late_streams.link(patch, *(RING, (0,))[seed % 2])
        made = []

        def make(*given, **options):
            made.append(tiered(seed, overlap=seed > 1)(*given, **options))
            return made[-1]

        same(training(seed, make), waits)
        assert made[0].memory().host.get("staging", 0) == link.staging_bytes == (0 if seed % 2 else 8 * KIB)
    assert link._stagings


@pytest.mark.parametrize("verdict", ["step", "forward"])
@pytest.mark.parametrize("max_norm", [None, 1e6])
def test_backward_waits_for_nothing(max_norm, verdict, small):
    link, driver = late_streams.link(small, *RING)
    # Four buckets, each larger than all blocks together.
    params = [torch.nn.Parameter(torch.ones(5000)) for _ in range(4)]
    model = {"verdict": verdict, "model": torch.nn.Linear(1, 1)} if verdict == "forward" else {}
    optimizer = spillway.torch.offload(params, lr=1e-3, overlap=True, bucket_bytes=1, max_norm=max_norm, **model)
    second = []
    bring = link.bring_second
    small.setattr(link, "bring_second", lambda copies, hosts: second.append(Event.place) or bring(copies, hosts))
    for step in range(5):
        Event.waits.clear()
        second.clear()
        with at("backward"):
            backward(params)
        with at("step"):
            optimizer.step()
            optimizer.settle()
        optimizer.zero_grad()
        assert "backward" not in Event.waits
        assert step == 0 or len(optimizer._plan.buckets) == 4
    assert "step" in Event.waits and driver.most <= 8 * KIB and link.staging_bytes == 8 * KIB
    assert optimizer.memory().host["staging"] == 8 * KIB
    stepped = sum(engine.speculation.stats().buckets_speculated for engine in optimizer._plan.engines)
    assert stepped and second
    optimizer.close()


def test_memory_on_a_device_without_a_ring_has_no_staging(small):
    link, _ = late_streams.link(small, 1 << 30)
    params = [torch.nn.Parameter(torch.ones(50))]
    optimizer = spillway.torch.offload(params, lr=1e-3)
    backward(params)
    optimizer.step()
    assert "staging" not in optimizer.memory().host and link.staging_bytes == 0 and not link._stagings


def test_one_warning_tells_what_is_locked_and_what_to_change(small):
    link, _ = late_streams.link(small, *BOTH)
    kept, messages = told(lambda: [link.memory((1000,), torch.float32) for _ in range(12)])
    assert len(kept) == 12 and len(messages) == 1
    start, *_ = messages[0].split(" (the driver: the limit is reached; torch: ")
    assert start == "spillway: the system locks no more memory"
    assert ". 28672 bytes are page-locked, and further gradients, weights and states are pageable: " in messages[0]
    assert "copy them through 2048 page-locked bytes" in messages[0] and "as docs/states.md shows" in messages[0]
    assert not told(lambda: type(link)(torch.device("cuda", 1)).memory((1000,), torch.float32))[1]
    link, _ = late_streams.link(small, 0)
    _, messages = told(lambda: link.memory((1000,), torch.float32))
    assert len(messages) == 1 and ". 0 bytes are page-locked" in messages[0] and "the driver copies them" in messages[0]


@pytest.mark.parametrize(
    ("limit", "sizes"), [(1 << 40, [2048] * 4), (8191, [1024] * 4), (1024, [256] * 4), (1023, [256] * 3), (511, [256]), (255, [])]
)
def test_blocks_are_smaller_where_less_is_locked(limit, sizes, small):
    driver = late_streams.Driver(limit)

    class Block:
        def __init__(self, size):
            self.number = max(driver.live, default=0) + 1
            driver.register(self.number, size)
            self.nbytes = size

        def __del__(self):
            driver.live.pop(getattr(self, "number", None), None)

    ring = _staging.Ring(Block)
    assert [block.nbytes for block in ring.blocks] == sizes and ring.nbytes == sum(sizes) == driver.bytes


def ordered(tensor, seed):
    return tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + seed)


SHAPES = [
    lambda: torch.empty(3),
    lambda: torch.empty(0, 4),
    lambda: torch.empty(()),
    lambda: torch.empty(5000),
    lambda: torch.empty(700, 11).t(),
    lambda: torch.empty(3, 40, 50).permute(2, 0, 1),
    lambda: torch.empty(2, 8, 8, 8).to(memory_format=torch.channels_last),
    lambda: torch.empty(1500, dtype=torch.bfloat16),
    lambda: torch.empty(1023, dtype=torch.uint8),
    lambda: torch.empty(999, dtype=torch.float64),
]


@pytest.mark.parametrize("limits", [RING, BOTH, (256,), (0,)])
def test_tensors_of_all_shapes_come_and_go(limits, small):
    """Larger than the ring, without elements, with any strides and dtype, and many in one call."""
    link, _ = late_streams.link(small, *limits)
    tensors = [ordered(make(), number).requires_grad_(make().dtype is torch.float32) for number, make in enumerate(SHAPES * 3)]
    hosts = [link.memory(tensor.shape, tensor.dtype).fill_(0) for tensor in tensors]
    back = [torch.empty_like(tensor) for tensor in tensors]
    versions = [host._version for host in hosts]
    link.out_all(hosts, [tensor.detach() for tensor in tensors])
    assert [host._version for host in hosts] == [version + 1 for version in versions]
    fence = link.fence()
    link.back_all(back, hosts)
    # The double's program has awaited the end of the copies.
    assert all(map(torch.equal, back, tensors)) and [one.stride() for one in back] == [one.stride() for one in tensors]
    fence.synchronize()
    assert fence.query() and all(map(torch.equal, hosts, tensors))
    # A copy to another dtype is the device's.
    link.out(hosts[0], torch.ones(3, dtype=torch.float64))
    link.fence().synchronize()
    assert torch.equal(hosts[0], torch.ones(3))


def test_copies_of_locked_and_pageable_memory_keep_their_order(small):
    link, _ = late_streams.link(small, *BOTH)
    locked = link.memory((1000,), torch.float32)
    *_, last = hosts = [link.memory((1000,), torch.float32) for _ in range(10)]
    assert hosts[0].is_pinned() and locked.is_pinned() and not last.is_pinned() and link.staging_bytes
    device = torch.zeros(1000)
    for turn in range(5):
        first, second = torch.full((1000,), float(turn)), torch.full((1000,), turn + 0.5)
        last.copy_(first), locked.copy_(second)
        link.bring(device, last)
        link.bring(device, locked)
        link.wait(link.fence())
        assert torch.equal(device, second)
        link.out(last, device)
        link.bring(device, last)
        link.fence().synchronize()
        assert torch.equal(last, second) and torch.equal(device, second)


class Gate:
    """Events that end when the test says so, in place of those of a stream."""

    def __init__(self, patch):
        self.open, self.error = threading.Event(), None
        gate, late = self, late_streams.Late.record_event

        class Gated(Event):
            def synchronize(self):
                gate.open.wait()
                if gate.error is not None:
                    raise gate.error
                super().synchronize()

            def query(self):
                return gate.open.is_set() and super().query()

        patch.setattr(Late, "record_event", lambda stream: Gated(late(stream).end))


def test_copies_that_wait_for_a_block_keep_tensors_and_no_memory(small):
    """The device does nothing for a while: all blocks are taken, and the call returns at once."""
    link, driver = late_streams.link(small, *RING)
    hosts = [pageable(link, 3000) for _ in range(4)]
    gate, before = Gate(small), driver.bytes
    for number, host in enumerate(hosts):
        link.out(host, torch.full((3000,), float(number)))
    gc.collect()
    fence = link.fence()
    assert not fence.query() and driver.bytes == before == 8 * KIB
    gate.open.set()
    fence.synchronize()
    assert [float(host.sum()) for host in hosts] == [3000.0 * number for number in range(4)]
    # A fence has nothing of copies that are over, and the link's is an event again.
    assert isinstance(link.fence(), Event)


def test_second_copies_do_not_wait_for_copies_to_the_host(small):
    link, _ = late_streams.link(small, *RING)
    out, weights = pageable(link, 3000), pageable(link, 3000).fill_(5)
    (second,) = link.second([torch.zeros(3000)])
    held = threading.Event()
    # The stream of copies to the host waits for the device.
    link._stream.queue.submit(held.wait)
    link.out(out, torch.ones(3000))
    fence = link.bring_second([second], [weights])
    fence.synchronize()
    assert torch.equal(second, torch.full((3000,), 5.0)) and not link.fence().query()
    to = torch.zeros(3000)
    link.place_all([to], [second], fence)
    assert torch.equal(to, second)
    held.set()
    link.fence().synchronize()
    assert torch.equal(out, torch.ones(3000))


def test_an_error_of_a_copy_is_raised_by_its_fence_and_by_no_later_one(small):
    link, _ = late_streams.link(small, *RING)
    hosts = [pageable(link, 3000).fill_(0) for _ in range(3)]
    gate = Gate(small)
    link.out(hosts[0], torch.ones(3000))
    fence = link.fence()
    link.out(hosts[1], torch.ones(3000))
    both = link.fence()
    gate.error = RuntimeError("the device has failed")
    gate.open.set()
    with pytest.raises(RuntimeError, match="the device has failed"):
        fence.synchronize()
    with pytest.raises(RuntimeError, match="the device has failed"):
        both.synchronize()
    gate.error = None
    link.out(hosts[2], torch.ones(3000))
    link.fence().synchronize()
    assert not hosts[0].any() and bool(hosts[2].all())


def test_an_error_before_the_device_has_a_copy_is_raised_where_the_program_needs_it(small):
    link, _ = late_streams.link(small, *RING)
    host, device = pageable(link, 3000).fill_(1), torch.zeros(3000)

    def refused(to, sources, **_):
        raise RuntimeError("no such copy")

    with small.context() as patch:
        patch.setattr(torch, "_foreach_copy_", refused)
        with pytest.raises(RuntimeError, match="no such copy"):
            link.back(device, host)
        link.out(host, device)
        with pytest.raises(RuntimeError, match="no such copy"):
            link.release()
    # The blocks are free again.
    link.back(device, host)
    assert torch.equal(device, host)


def test_a_step_whose_copies_fail_raises_and_the_next_one_steps(small):
    link, _ = late_streams.link(small, *RING)
    params = [torch.nn.Parameter(torch.ones(3000)) for _ in range(3)]
    optimizer = spillway.torch.offload(params, lr=1e-3, overlap=True, bucket_bytes=1)
    for step in range(6):
        before = [param.detach().clone() for param in params]
        with small.context() as patch:
            if step == 3:
                patch.setattr(_staging._Load, "begin", lambda load, stream: (_ for _ in ()).throw(RuntimeError("no copy")))
                backward(params)
                with pytest.raises(RuntimeError, match="no copy"):
                    optimizer.step()
            else:
                backward(params)
                optimizer.step()
        optimizer.zero_grad()
        changed = [not torch.equal(param, then) for param, then in zip(params, before)]
        assert changed == [step != 3] * 3
    optimizer.close()


@pytest.mark.parametrize("room", [True, False])
def test_weights_whose_copies_fail_return_when_the_program_completes_the_step(room, small):
    """As second copies before the verdict, and after it."""
    link, _ = late_streams.link(small, *RING)
    small.setattr(link, "has_room", lambda size: room)

    def make():
        torch.manual_seed(1)
        params = [torch.nn.Parameter(torch.randn(3000)) for _ in range(3)]
        return params, spillway.torch.offload(params, lr=1e-3, overlap=True, bucket_bytes=1, max_norm=1e6)

    (params, optimizer), (wanted, other) = make(), make()
    begin, failed = _staging._Load.begin, []

    def failing(load, stream):
        if not load.copies.outward:
            failed.append(load)
            raise RuntimeError("no copy")
        begin(load, stream)

    for step in range(6):
        for each, one in ((wanted, other), (params, optimizer)):
            with small.context() as patch:
                if step == 3 and one is optimizer:
                    patch.setattr(_staging._Load, "begin", failing)
                    backward(each)
                    with pytest.raises(RuntimeError, match="no copy"):
                        one.step()
                else:
                    backward(each)
                    one.step()
            # After the exception alone there is something to complete.
            one.settle()
            one.zero_grad()
        assert all(map(torch.equal, params, wanted))
    assert failed
    for one in (optimizer, other):
        one.close()


def test_an_exception_of_a_handler_leaves_no_fence_that_never_ends(small):
    """A handler raises at the begin of each function of the package that a copy calls."""
    link, _ = late_streams.link(small, *RING)
    host, tensor = pageable(link, 3000), torch.zeros(3000)
    link.out(host, tensor)
    for place in itertools.count():
        tensor = torch.full((3000,), float(place))

        def work(tensor=tensor):
            link.out(host, tensor)
            link.fence().synchronize()

        raised = interrupted(work, place, below=True)
        link.out(host, tensor)
        link.fence().synchronize()
        assert torch.equal(host, tensor)
        if not raised:
            break
    assert place > 10
    with pytest.raises(Interrupt):
        raise Interrupt


def test_a_forked_child_copies_without_the_thread(small):
    link, _ = late_streams.link(small, *RING)
    host = pageable(link, 3000).fill_(0)
    gate = Gate(small)
    link.out(host, torch.ones(3000))
    fence = link.fence()
    if (child := os.fork()) == 0:
        code = 1
        try:
            with pytest.raises(UnsupportedError, match="do not end in its forked child"):
                fence.synchronize()
            with pytest.raises(UnsupportedError, match="do not end in its forked child"):
                link.wait(fence)
            # A stream of the parent's is of no use in the child.
            copied = []
            Late.copy = lambda stream, copy_all, to, sources: copied.append(copy_all(to, sources))
            own = torch.zeros(3000)
            link._copy(link._stream, [own], [torch.full((3000,), 2.0)], outward=True)
            code = 0 if copied and bool((own == 2).all()) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.open.set()
    fence.synchronize()
    assert bool(host.all())


def test_the_end_of_the_program_waits_for_its_copies(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import atexit, sys, warnings
            sys.path[:0] = {sys.path!r}
            import pytest, torch
            import late_streams
            warnings.simplefilter("ignore")
            link, _ = late_streams.link(pytest.MonkeyPatch(), 32 << 20, 8 << 20)
            late_streams.Late.delay = 0.05
            host = link.memory((3 << 20,), torch.float32).fill_(0)
            assert link.staging_bytes == 32 << 20 and not host.is_pinned()
            atexit.register(lambda: print("all" if bool(host.all()) else "some", flush=True))
            link.out(host, torch.ones(3 << 20))
            """
        )
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "all\n", ""), done.stderr


def test_a_link_that_goes_ends_its_threads_and_gives_the_blocks_back(small):
    link, driver = late_streams.link(small, *RING)
    host = pageable(link, 3000)
    link.out(host, torch.ones(3000))
    fence = link.fence()
    staging = link._stagings[link._stream]
    ended = staging._worker._ended
    small.undo()
    del link, staging
    gc.collect()
    fence.synchronize()
    ended.wait()
    del fence
    gc.collect()
    assert not driver.live and bool(host.all())
