"""The errors that files can cause, one function per case, for either op: io_cases.py spillway|deepspeed

The script is a server: it loads the op once, then reads {"case", "directory", "seconds"} lines and answers
each with the result of a forked child. A case returns the op's result and whether the data is correct, or
raises the op's exception."""

import ctypes
import gc
import json
import os
import resource
import signal
import sys
import threading
import time

import torch
from sampled import few

MIB = 1 << 20
KIB = 1 << 10
EIO = 5
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def pattern(size, seed=1):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def pinned(handle, data):
    return handle.new_cpu_locked_tensor(data.numel(), data).copy_(data)


def holds(path, data, offset=0):
    if not os.path.exists(path):
        return False
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(data.numel()) == bytes(data.numpy())


def write_file(path, data):
    with open(path, "wb") as file:
        file.write(bytes(data.numpy()))


@case
def file_shorter_than_asked(op):
    handle = op.aio_handle(64 * KIB, 4)
    write_file("file", pattern(32 * KIB))
    buffer = pinned(handle, torch.zeros(64 * KIB, dtype=torch.uint8))
    return handle.sync_pread(buffer, "file"), False


@case
def file_truncated_during_the_read(op):
    handle = op.aio_handle(4 * KIB, 1)
    data = pattern(64 * MIB)
    write_file("file", data)
    os.sync()
    buffer = pinned(handle, torch.zeros_like(data))
    handle.async_pread(buffer, "file")
    os.truncate("file", MIB)
    return handle.wait(), torch.equal(buffer, data)


@case
def length_that_is_no_multiple_of_512(op):
    handle = op.aio_handle(64 * KIB, 4)
    data = pattern(1000)
    return handle.sync_pwrite(pinned(handle, data), "file"), holds("file", data)


@case
def offset_that_is_no_multiple_of_512(op):
    handle = op.aio_handle(64 * KIB, 4)
    data = pattern(8 * KIB)
    return handle.sync_pwrite(pinned(handle, data), "file", 100), holds("file", data, 100)


@case
def buffer_at_an_odd_address(op):
    handle = op.aio_handle(64 * KIB, 4)
    data = pattern(8 * KIB)
    write_file("file", data)
    buffer = pinned(handle, torch.zeros(16 * KIB, dtype=torch.uint8))[1 : 8 * KIB + 1]
    return handle.sync_pread(buffer, "file"), torch.equal(buffer, data)


@case
def length_that_the_threads_cannot_share(op):
    handle = op.aio_handle(64 * KIB, 4, False, False, 3)
    data = pattern(8 * KIB)
    return handle.sync_pwrite(pinned(handle, data), "file"), holds("file", data)


@case
def strided_pinned_buffer(op):
    handle = op.aio_handle(64 * KIB, 4)
    data = pattern(8 * KIB)
    write_file("file", data)
    buffer = pinned(handle, torch.zeros(16 * KIB, dtype=torch.uint8))[::2]
    return handle.sync_pread(buffer, "file"), torch.equal(buffer, data)


@case
def read_only_file(op):
    handle = op.aio_handle(64 * KIB, 4)
    write_file("file", pattern(4 * KIB))
    os.chmod("file", 0o444)
    buffer = pinned(handle, pattern(4 * KIB, 2))
    become_nobody()
    return handle.sync_pwrite(buffer, "file"), False


@case
def missing_directory(op):
    handle = op.aio_handle(64 * KIB, 4)
    return handle.sync_pwrite(pinned(handle, pattern(4 * KIB)), "no/file"), False


@case
def full_disk(op):
    handle = op.aio_handle(64 * KIB, 4)
    data = pattern(16 * MIB)
    return handle.sync_pwrite(pinned(handle, data), "file"), holds("file", data)


@case
def file_size_limit(op):
    handle = op.aio_handle(64 * KIB, 4)
    data = pattern(8 * MIB)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, resource.RLIM_INFINITY))
    return handle.sync_pwrite(pinned(handle, data), "file"), holds("file", data)


@case
def unprivileged_user_with_64_kib_of_memlock(op):
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * KIB, 64 * KIB))
    become_nobody()
    handle = op.aio_handle(64 * KIB, 4)
    data = pattern(8 * MIB)
    return handle.sync_pwrite(pinned(handle, data), "file"), holds("file", data)


@case
def libaio_contexts_used_up(op):
    ctypes.CDLL(None).fault_no_contexts()
    handle = op.aio_handle(64 * KIB, 4)
    data = pattern(MIB)
    return handle.sync_pwrite(pinned(handle, data), "file"), holds("file", data)


@case
def io_uring_refused_by_seccomp(op):
    refuse_io_uring()
    return round_trip(op)


@case
def io_uring_switched_off(op):
    os.environ["SPILLWAY_IO"] = "threads"
    return round_trip(op)


def round_trip(op):
    handle = op.aio_handle(64 * KIB, 4)
    data = pattern(MIB)
    said = handle.sync_pwrite(pinned(handle, data), "file")
    buffer = pinned(handle, torch.zeros_like(data))
    handle.sync_pread(buffer, "file")
    backend = sys.modules["spillway.deepspeed._io_engine"].describe() if op.__name__.startswith("spillway") else "threads"
    return said, holds("file", data) and torch.equal(buffer, data) and backend.startswith("threads")


@case
def wait_with_nothing_under_way(op):
    return op.aio_handle(64 * KIB, 4).wait(), True


@case
def handle_dropped_with_a_write_under_way(op):
    handle = op.aio_handle(64 * KIB, 4)
    data = pattern(16 * MIB)
    buffer = pinned(handle, data)
    handle.async_pwrite(buffer, "file")
    del handle
    gc.collect()
    return "dropped", holds("file", data)


@case
def two_dimensional_tensor_in_ordinary_memory(op):
    handle = op.aio_handle(64 * KIB, 4)
    data = pattern(64 * KIB)
    said = handle.sync_pwrite(data.view(256, 256), "file")
    return said, holds("file", data) and handle.sync_pwrite(pinned(handle, data), "file") == 1


@case
def handles_come_and_go_while_other_threads_run(op):
    """Creates many handles and uses each once, while two threads keep the GIL busy and collect garbage. DeepSpeed gets
    fewer, because the system takes tens of milliseconds to destroy a libaio context."""
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            sum(range(100))

    def collecting():
        while not stop.is_set():
            gc.collect()
            time.sleep(0)

    gc.freeze()
    threads = [threading.Thread(target=work, daemon=True) for work in (busy, collecting)]
    [thread.start() for thread in threads]
    sys.setswitchinterval(1e-4)
    data = pattern(4 * KIB)
    for _ in range(few(1000, 10_000) if op.__name__.startswith("spillway") else few(50, 300)):
        handle = op.aio_handle(4 * KIB, 1)
        said = handle.sync_pwrite(data.clone(), "file")
        if hasattr(handle, "__dict__"):
            handle.cycle = [handle]  # The garbage collector drops the handle, in any thread.
        del handle
    stop.set()
    [thread.join() for thread in threads]
    gc.collect()
    return said, holds("file", data)


@case
def signals_to_every_thread(op):
    """A timer at 5 kHz whose signal also goes to every thread of the process."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    handle = op.aio_handle(64 * KIB, 4)
    data = pattern(4 * MIB)
    source, target = pinned(handle, data), pinned(handle, torch.zeros_like(data))
    handle.sync_pwrite(source, "file")
    stop = threading.Event()

    def storm():
        libc, me = ctypes.CDLL(None), os.getpid()
        while not stop.is_set():
            for task in os.listdir("/proc/self/task"):
                libc.syscall(234 if os.uname().machine == "x86_64" else 131, me, int(task), signal.SIGALRM)
            time.sleep(0.0002)

    threading.Thread(target=storm, daemon=True).start()
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    intact = True
    for turn in range(40):
        target.zero_()
        said = handle.sync_pwrite(source, "file")
        handle.sync_pread(target, "file")
        intact = intact and torch.equal(target, data)
    signal.setitimer(signal.ITIMER_REAL, 0)
    stop.set()
    return said, intact


def every_request(op, fault):
    """Repeats a workload of writes and reads with the fault in its first request, then in its second, and so on to
    the last. Returns the number of runs that raised, and whether that is correct. An error must raise; a fault that
    can be resumed must not raise and must leave all data in place."""
    os.environ["SPILLWAY_IO"] = "threads"
    libc = ctypes.CDLL(None)
    libc.fault_arm.argtypes = [ctypes.c_long, ctypes.c_int]
    handle = op.aio_handle(16 * KIB, 4)
    tensors = [pattern(64 * KIB, seed) for seed in range(4)]
    sources, targets = [pinned(handle, data) for data in tensors], [pinned(handle, data) for data in tensors]
    nth, told, honest = 0, 0, True
    while True:
        nth += 1
        for target in targets:
            target.zero_()
        libc.fault_arm(nth, fault)
        try:
            for number, source in enumerate(sources):
                handle.async_pwrite(source, "file", number * 64 * KIB)
            handle.wait()
            for number, target in enumerate(targets):
                handle.async_pread(target, "file", number * 64 * KIB)
            handle.wait()
            if not libc.fault_struck():
                return f"told {told} of {nth - 1}", honest and nth > 16 and told == (nth - 1 if fault == EIO else 0)
            # The control's faults are in the results that it receives, so a completion that it accepts as a
            # success is lost data.
            honest = honest and op.__name__.startswith("spillway") and all(map(torch.equal, targets, tensors))
        except OSError as error:
            told += 1
            honest = honest and error.errno == fault and error.filename == "file" and error.bytes > 0
            handle.wait()


@case
def an_error_in_each_request(op):
    return every_request(op, EIO)


@case
def a_short_transfer_in_each_request(op):
    return every_request(op, -1)


@case
def an_interruption_in_each_request(op):
    return every_request(op, 4)


@case
def file_size_limit_at_each_tensor(op):
    """Writes eight tensors to one file with a size limit after the first, the second, and so on. The tensors below
    the limit are stored, and the wait raises the error."""
    handle = op.aio_handle(64 * KIB, 4)
    tensors = [pattern(512 * KIB, seed) for seed in range(8)]
    sources = [pinned(handle, data) for data in tensors]
    told, below = 0, True
    for limit in range(8):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit * 512 * KIB, resource.RLIM_INFINITY))
        failures = 0
        for number, source in enumerate(sources):
            try:
                handle.async_pwrite(source, f"file{limit}", number * 512 * KIB)
            except OSError as error:
                failures += error.errno == 27 and error.filename == f"file{limit}"
        try:
            handle.wait()
        except OSError as error:
            failures += error.errno == 27
        told += failures > 0
        below = below and all(holds(f"file{limit}", data, n * 512 * KIB) for n, data in enumerate(tensors[:limit]))
    return f"told {told} of 8", told == 8 and below


@case
def file_truncated_at_each_tensor(op):
    handle = op.aio_handle(64 * KIB, 4)
    told = 0
    for limit in range(8):
        write_file("file", pattern(limit * 64 * KIB))
        buffers = [pinned(handle, torch.zeros(64 * KIB, dtype=torch.uint8)) for _ in range(8)]
        for number, buffer in enumerate(buffers):
            handle.async_pread(buffer, "file", number * 64 * KIB)
        try:
            handle.wait()
        except OSError as error:
            told += error.filename == "file" and error.offset == limit * 64 * KIB
    return f"told {told} of 8", told == 8


def become_nobody():
    """The op must have done all work that requires root before this call; after the call,
    /proc/self must stay readable."""
    if os.getuid() == 0:
        os.chmod(".", 0o777)
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)


def refuse_io_uring():
    """A seccomp filter as containers have it: io_uring_setup returns EPERM, and all other calls are allowed."""

    class Filter(ctypes.Structure):
        _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]

    class Program(ctypes.Structure):
        _fields_ = [("len", ctypes.c_uint16), ("filter", ctypes.POINTER(Filter))]

    allow, refuse = 0x7FFF0000, 0x00050000 | 1
    filters = (Filter * 4)(Filter(0x20, 0, 0, 0), Filter(0x15, 0, 1, 425), Filter(0x06, 0, 0, refuse), Filter(0x06, 0, 0, allow))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(Program(4, filters)), 0, 0) == 0


def load(name):
    if name == "spillway":
        from spillway.deepspeed import _hook

        return _hook.module_of("async_io")
    from compiled_ops import newest

    return newest("async_io")


def run(op, name, directory, seconds):
    """Runs a case in a forked child. Returns {"raised", "message"} or {"said", "intact"}, or how the child ended."""
    answer, answer_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(answer)
        os.chdir(directory)
        output = os.open("output", os.O_WRONLY | os.O_CREAT, 0o666)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            said, intact = CASES[name](op)
            result = {"said": said, "intact": bool(intact)}
        except Exception as error:
            result = {"raised": type(error).__name__, "message": str(error), "errno": getattr(error, "errno", None)}
        os.write(answer_end, json.dumps(result).encode())
        os._exit(0)
    os.close(answer_end)
    end = time.monotonic() + seconds
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(answer)
            return {"hung": True}
        time.sleep(0.005)
    text = os.read(answer, 65536)
    os.close(answer)
    return json.loads(text) if text else {"status": ended[1]}


def main():
    op = load(sys.argv[1])
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(run(op, request["case"], request["directory"], request["seconds"])), flush=True)


if __name__ == "__main__":
    main()
