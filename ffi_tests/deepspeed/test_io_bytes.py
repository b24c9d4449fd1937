"""Proves that Spillway's async_io transfers exactly the requested bytes, for any tensor, and that its files and
those of DeepSpeed's compiled op are interchangeable. Several tensors can be in flight before one wait. Memory stays
mapped while it is in use, and pinned tensors live as long as a view of them. No call holds the GIL."""

import ctypes
import gc
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import spillway
import spillway.deepspeed
from spillway.deepspeed import _io_engine, _io_ops

MIB = 1 << 20


@pytest.fixture
def handle(served):
    return served("async_io").aio_handle(MIB, 8, False, True, 2)


def random_bytes(size, seed=0):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_files_go_both_ways_between_the_two_ops(served, compiled, tmp_path):
    sizes = (1024, 4096, 4096 * 3 + 1024, MIB, 5 * MIB + 2048)
    for threads in (1, 2):
        ours, theirs = (module("async_io").aio_handle(64 << 10, 4, False, True, threads) for module in (served, compiled))
        for writer, reader in ((ours, theirs), (theirs, ours)):
            for seed, size in enumerate(sizes):
                path = str(tmp_path / "file")
                data = random_bytes(size, seed)
                source = writer.new_cpu_locked_tensor(size, data).copy_(data)
                target = reader.new_cpu_locked_tensor(size, data).zero_()
                assert writer.sync_pwrite(source, path) == 1
                assert open(path, "rb").read() == bytes(data.numpy())
                assert reader.async_pread(target, path) == 0 and reader.wait() == 1
                assert torch.equal(target, data)
                os.unlink(path)


def test_new_files_have_the_mode_and_rewritten_ones_the_size_that_deepspeed_gives_them(served, compiled, tmp_path):
    seen = []
    for module in (served, compiled):
        handle, path = module("async_io").aio_handle(), tmp_path / f"file{len(seen)}"
        for size in (8192, 4096):
            handle.sync_pwrite(handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8)).fill_(size % 7), str(path))
        seen.append((path.stat().st_mode, path.stat().st_size, path.read_bytes()))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float64])
def test_tensors_of_any_type_and_place(handle, tmp_path, dtype):
    path = str(tmp_path / "file")
    whole = random_bytes(80_000).view(torch.uint8).to(dtype)
    for tensor in (
        whole,
        whole[1:777],
        whole.view(200, 400),
        whole.view(200, 400).t(),
        whole[::3],
        whole[:1],
        whole[:0],
        whole[5],
        whole.clone().requires_grad_(dtype.is_floating_point),
    ):
        for offset in (0, 1, 512, 4096, 70_001):
            target = torch.zeros_like(tensor)
            assert handle.sync_pwrite(tensor, path, offset) == 1
            assert handle.sync_pread(target, path, offset) == 1
            assert torch.equal(target, tensor)


def test_a_strided_tensor_is_filled_itself_where_deepspeed_fills_a_copy(handle, tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(200)))
    matrix = torch.zeros(20, 10, dtype=torch.uint8)
    assert handle.async_pread(matrix.t(), str(tmp_path / "file")) == 0
    assert not matrix.any()
    handle.wait()
    assert torch.equal(matrix, torch.arange(200, dtype=torch.uint8).view(10, 20).t())


def test_a_descriptor_stays_the_callers(handle, compiled, tmp_path):
    path = tmp_path / "file"
    data = random_bytes(3 * 4096)
    for flags in (0, os.O_DIRECT):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags)
        assert handle.async_pwrite(data, descriptor, 4096) == 0
        assert handle.async_pwrite(data, fd=descriptor) == 0
        assert handle.wait() == 2
        os.close(descriptor)
        assert path.read_bytes()[: 4096 * 3] == bytes(data.numpy())
        path.unlink()


def test_many_tensors_are_under_way_before_one_wait(handle, tmp_path):
    tensors = [random_bytes(4096 + 100 * n, n) for n in range(300)]
    for n, tensor in enumerate(tensors):
        assert handle.async_pwrite(tensor, str(tmp_path / str(n % 7)), n * 50_000) == 0
    assert handle.wait() == 300 and handle.wait() == 0
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    for n, target in enumerate(targets[:-1]):
        handle.async_pread(target, str(tmp_path / str(n % 7)), n * 50_000)
    # As in DeepSpeed, a synchronous call also waits for the earlier ones and counts them.
    assert handle.sync_pread(targets[-1], str(tmp_path / str(299 % 7)), 299 * 50_000) == 300
    assert all(torch.equal(a, b) for a, b in zip(targets, tensors))


def test_one_failure_of_many_is_raised_and_the_handle_goes_on(handle, tmp_path):
    (tmp_path / "short").write_bytes(bytes(10_000))
    (tmp_path / "long").write_bytes(bytes(100_000))
    for name, count in (("long", 5), ("short", 2), ("long", 5)):
        for _ in range(count):
            handle.async_pread(torch.empty(50_000, dtype=torch.uint8), str(tmp_path / name))
    with pytest.raises(spillway.IoError) as caught:
        handle.wait()
    error = caught.value
    assert (error.filename, error.offset, error.bytes, error.errno) == (str(tmp_path / "short"), 0, 50_000, None)
    assert "ends at byte 10000" in str(error) and "1 more operations failed" in str(error)
    assert handle.wait() == 0
    assert handle.sync_pread(torch.empty(50_000, dtype=torch.uint8), str(tmp_path / "long")) == 1


def test_validation_compares_and_raises(handle, tmp_path):
    path, data = str(tmp_path / "file"), random_bytes(9 * MIB)
    assert handle.pwrite(data, path, True, False) == 1
    before = _io_engine.served("async_io")["reads"]
    assert handle.pread(data, path, True, True) == 0
    while _io_engine.served("async_io")["reads"] == before:
        time.sleep(0.001)
    with open(path, "r+b") as file:
        file.seek(8 * MIB + 5)
        file.write(b"\1\2\3\4")
    with pytest.raises(spillway.SpillwayError, match=f"differ in the .* from byte {8 * MIB} of"):
        handle.wait()
    assert handle.pwrite(data, path, True, True) == 0 and handle.wait() == 1
    with pytest.raises(TypeError):
        handle.pread(data, path, True)
    with pytest.raises(TypeError):
        handle.pread(data, path, True, True, 0, 0)


@pytest.mark.parametrize(
    "call, reason",
    [
        (lambda h, p: h.sync_pread([1], p), "buffer is a list"),
        (lambda h, p: h.sync_pwrite(None, p), "buffer is a NoneType"),
        (lambda h, p: h.sync_pread(torch.empty(4, device="meta"), p), "meta"),
        (lambda h, p: h.sync_pwrite(torch.eye(3).to_sparse(), p), "sparse"),
        (lambda h, p: h.sync_pread(torch.empty(4), p, -1), "file_offset is -1"),
        (lambda h, p: h.sync_pread(torch.empty(4), p, 1 << 63), "file_offset is"),
        (lambda h, p: h.sync_pread(torch.empty(4), p, 0.5), "file_offset is 0.5"),
        (lambda h, p: h.sync_pread(torch.empty(4), p + "\0x"), "NUL"),
        (lambda h, p: h.async_pwrite(torch.empty(4), -1), "fd is -1"),
        (lambda h, p: h.async_pwrite(torch.empty(4), fd=1 << 32), "fd is 4294967296"),
        (lambda h, p: h.new_cpu_locked_tensor(-1, torch.empty(1)), "num_elem is -1"),
        (lambda h, p: h.new_cpu_locked_tensor(1 << 60, torch.empty(1)), "exceed|memory"),
        (lambda h, p: h.new_cpu_locked_tensor(1, 2), "example"),
        (lambda h, p: type(h)(0), "block_size is 0"),
        (lambda h, p: type(h)(4096, -3), "queue_depth is -3"),
        (lambda h, p: type(h)(4096, 1, False, False, 0), "intra_op_parallelism is 0"),
    ],
)
def test_bad_input_is_named(handle, tmp_path, call, reason):
    (tmp_path / "file").write_bytes(bytes(100))
    with pytest.raises((spillway.InvalidArgumentError, spillway.SystemCallError), match=reason):
        call(handle, str(tmp_path / "file"))
    assert handle.wait() == 0


def test_slices_of_a_pinned_tensor_are_pinned_and_memory_lives_as_long_as_a_view(served):
    pin = served("pin_memory").pin_handle()
    tensor = pin.new_cpu_locked_tensor(3 * MIB, torch.empty(0, dtype=torch.float32)).fill_(3)
    other = served("async_io").aio_handle()
    assert other.is_pinned(tensor) and pin.is_pinned(tensor[5:-7]) and pin.is_pinned(tensor.view(3, MIB)[1])
    assert not pin.is_pinned(torch.empty(10)) and not pin.is_pinned(tensor.clone())
    view, address = tensor[100:200], tensor.data_ptr()
    assert not pin.free_cpu_locked_tensor(view) and not pin.free_cpu_locked_tensor_by_ptr(12345)
    assert other.free_cpu_locked_tensor(tensor) and not pin.free_cpu_locked_tensor(tensor)
    before = _io_ops.pinned_stats()["bytes"]
    del tensor
    assert (view == 3).all() and _io_ops.pinned_stats()["bytes"] == before
    del view
    gc.collect()
    assert _io_ops.pinned_stats()["bytes"] == before - 12 * MIB
    assert not pin.free_cpu_locked_tensor_by_ptr(address)


def test_dropped_pinned_tensors_go_back_without_being_freed(served):
    pin = served("pin_memory").pin_handle()
    gc.collect()
    before = _io_ops.pinned_stats()["bytes"]
    for size in (1, 4096, MIB, 20 * MIB) * 5:
        pin.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8)).fill_(1)
    assert _io_ops.pinned_stats()["bytes"] == before and _io_ops.pinned_stats()["high_water"] >= 20 * MIB


def test_buffers_may_be_dropped_emptied_or_freed_while_they_are_in_flight(handle, tmp_path):
    """Each slot of the file receives the bytes that its tensor had at submission."""
    path = str(tmp_path / "file")
    for n in range(60):
        tensor = random_bytes(MIB, n)
        if n % 3 == 0:
            pinned = handle.new_cpu_locked_tensor(MIB, tensor).copy_(tensor)
            handle.async_pwrite(pinned, path, n * MIB)
            handle.free_cpu_locked_tensor(pinned)
            del pinned
        else:
            handle.async_pwrite(tensor, path, n * MIB)
        if n % 3 == 1:
            tensor.data = torch.empty(0, dtype=torch.uint8)
        del tensor
        torch.full((MIB,), 255, dtype=torch.uint8)
    assert handle.wait() == 60
    for n in range(60):
        target = torch.empty(MIB, dtype=torch.uint8)
        handle.sync_pread(target, path, n * MIB)
        assert torch.equal(target, random_bytes(MIB, n)), n


def test_no_call_holds_the_gil(handle, tmp_path):
    """The switch interval is an hour, so threads switch only where one releases the GIL. If the counter moved during
    a call, the call released the GIL. The same call through PyDLL, which keeps the GIL, is the control."""
    path, data = str(tmp_path / "file"), random_bytes(64 * MIB)
    handle.sync_pwrite(data, path)
    stop, count = threading.Event(), [0]

    def counter():
        while not stop.is_set():
            count[0] += 1
            time.sleep(0)

    def during(call):
        before = count[0]
        call()
        return count[0] - before

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=counter)
    sys.setswitchinterval(3600)
    try:
        thread.start()
        assert during(lambda: handle.sync_pread(data, path)) > 0
        assert during(lambda: handle.sync_pwrite(data, path)) > 0
        handle.async_pread(data, path)
        assert during(handle.wait) > 0
        handle.async_pread(data, path)
        keeping = ctypes.PyDLL(spillway.library_path())
        io, in_flight = ctypes.c_void_p(handle._engine._in_flight.io), handle._engine._in_flight
        (entry,) = in_flight.entries
        assert during(lambda: keeping.spw_io_wait(io, ctypes.byref(entry.handle), ctypes.c_uint64(1), ctypes.c_int64(-1), None)) == 0
        in_flight.entries.clear()
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()


def test_a_synchronous_call_gets_its_own_outcome_though_another_thread_waits_first(handle, tmp_path, monkeypatch):
    (tmp_path / "short").write_bytes(bytes(100))
    wait, of_other_thread = handle._engine.wait, []

    def after_another_thread():
        thread = threading.Thread(target=lambda: of_other_thread.append(wait()))
        thread.start()
        thread.join()
        return wait()

    monkeypatch.setattr(handle._engine, "wait", after_another_thread)
    with pytest.raises(spillway.IoError, match="ends at byte 100"):
        handle.sync_pread(torch.zeros(65_536, dtype=torch.uint8), str(tmp_path / "short"))
    assert of_other_thread == [0]
    handle.async_pread(torch.zeros(100, dtype=torch.uint8), str(tmp_path / "short"))
    assert handle.wait() == 0 and of_other_thread == [0, 1]


def test_threads_that_share_a_handle_each_get_their_own_outcomes(handle, tmp_path):
    (tmp_path / "good").write_bytes(bytes(range(256)) * 256)
    (tmp_path / "short").write_bytes(bytes(100))
    wrong = []

    def work(number):
        for turn in range(40):
            buffer, short = torch.zeros(65_536, dtype=torch.uint8), (turn + number) % 5 == 0
            try:
                handle.sync_pread(buffer, str(tmp_path / ("short" if short else "good")))
                told = False
            except spillway.IoError:
                told = True
            if told != short or not short and bytes(buffer.numpy()) != bytes(range(256)) * 256:
                wrong.append((number, turn, told))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong and handle.wait() == 0


def test_a_forked_child_has_its_own_engine(handle, tmp_path):
    path, data = str(tmp_path / "file"), random_bytes(MIB)
    handle.async_pwrite(data, path)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        code = 1
        try:
            assert handle.wait() == 0
            assert handle.sync_pwrite(data, path + "child") == 1
            assert _io_engine.served("async_io")["writes"] == 1
            code = 0
        finally:
            os._exit(code)
    assert handle.wait() == 1
    assert os.waitpid(child, 0)[1] == 0
    assert open(path, "rb").read() == open(path + "child", "rb").read() == bytes(data.numpy())


def test_an_interrupted_wait_can_be_repeated(handle, tmp_path):
    """SIGINT during a wait raises KeyboardInterrupt; a later wait still covers the operations in flight."""
    path, data = str(tmp_path / "file"), random_bytes(64 * MIB)
    for n in range(8):
        handle.async_pwrite(data, path, n * 64 * MIB)
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            handle.wait()
            time.sleep(1)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert handle.wait() <= 8
    assert not handle._engine._in_flight.entries


def test_a_dropped_handle_finishes_what_it_began_and_reports_what_failed(tmp_path):
    """Runs in a process of its own, because the test checks what Python prints for an exception in a destructor."""
    code = f"""
import torch
from spillway.deepspeed import _hook
aio = _hook.module_of("async_io")
def begin(path, reads):
    handle = aio.aio_handle()
    buffer = torch.full((1 << 20,), 7, dtype=torch.uint8)
    (handle.async_pread if reads else handle.async_pwrite)(buffer, path)
    return handle
begin({str(tmp_path / "written")!r}, False)
print(open({str(tmp_path / "written")!r}, "rb").read() == b"\\7" * (1 << 20))
open({str(tmp_path / "short")!r}, "wb").write(b"abc")
begin({str(tmp_path / "short")!r}, True)
at_exit = begin({str(tmp_path / "short")!r}, True)
"""
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(spillway.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0 and done.stdout == "True\n", done.stderr
    assert done.stderr.count(f"reading 1048576 bytes at offset 0 of {tmp_path / 'short'}: the file ends at byte 3") == 2


def test_active_counts_what_was_served(served, tmp_path):
    spillway.deepspeed.install()
    try:
        before = spillway.deepspeed.active()
        handle = served("async_io").aio_handle()
        handle.sync_pwrite(random_bytes(5000), str(tmp_path / "file"))
        during = spillway.deepspeed.active()
        handle.sync_pread(torch.empty(3000, dtype=torch.uint8), str(tmp_path / "file"))
        del handle
        after = spillway.deepspeed.active()
    finally:
        spillway.deepspeed.uninstall()
    change = {name: after["async_io"][name] - before["async_io"][name] for name in after["async_io"]}
    assert change == {"reads": 1, "writes": 1, "read_bytes": 3000, "written_bytes": 5000, "failed": 0}
    assert during["io"].startswith(("io_uring", "threads")) and "locked_bytes" in after["pin_memory"]
