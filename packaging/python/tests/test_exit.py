"""Proves that an interpreter ends cleanly while the library works on its memory: after timeouts, with lost objects, exceptions, daemon
threads, exit handlers and forked children. A lost object keeps the memory of its work until it is closed."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import weakref

import numpy as np
import pytest

import spillway
from spillway import _native, _native_handle
from spillway.stage import Stage

#: Code that starts work in flight: it defines `owner`, `memory` and the calls `timeouts`, which all time out or succeed.
WORK = {
    "put": """
        owner, memory = spillway.Tier([folder], job="exit", durability="process"), np.ones(128 << 20, np.uint8)
        ticket = owner.put(owner.define("e", [memory.nbytes]), [memory])
        timeouts = [lambda: owner.wait(ticket, timeout=0), lambda: owner.close(timeout=0)]
        """,
    "get": """
        owner, memory = spillway.Tier([folder], job="exit", durability="process"), np.ones(128 << 20, np.uint8)
        owner.put(owner.define("e", [memory.nbytes]), [memory])
        owner.commit(1)
        ticket = owner.get(0, [memory])
        timeouts = [lambda: owner.wait(ticket, timeout=0), lambda: owner.close(timeout=0)]
        """,
    "stage": """
        from spillway.stage import Stage
        memory = np.zeros((4, 1 << 20), np.float32)
        owner = Stage([tuple(memory)], spillway.Adam())
        owner.submit(1, event_fd=os.pipe()[0])
        timeouts = [lambda: owner.wait(0), lambda: owner.finish(0)]
        """,
    "running stage": """
        from spillway.stage import Stage
        memory = np.zeros((4, 4 << 20), np.float32)
        owner = Stage([tuple(memory)], spillway.Adam())
        owner.submit(1)
        timeouts = [lambda: owner.wait(0), lambda: owner.finish(0)]
        """,
    "speculation": """
        memory = np.zeros((4, 4 << 20), np.float32)
        owner = spillway.Speculation(2)
        owner.begin(spillway.Adam())
        owner.submit(0, [tuple(memory)])
        owner.submit(1, [tuple(np.zeros((4, 64), np.float32))], event_fd=os.pipe()[0])
        timeouts = [lambda: owner.local_result(0), lambda: owner.wait(1, 0), lambda: owner.finish(0)]
        """,
    "arena": """
        from spillway.arena import Arena
        owner = Arena.create(None, {"r": 1 << 20}, processes=2)
        owner.join(0)
        memory = owner.view("r")
        timeouts = [lambda: owner.read("r", at_least=1, timeout=0), lambda: owner.snapshot("r", at_least=1, timeout=0),
                    lambda: owner.wait_verdict(1, timeout=0)]
        """,
    "swap": """
        tier = spillway.Tier([folder], job="exit", durability="process")
        owner, memory = spillway.Swap(tier, [1 << 20] * 4, huge_pages=False, pin_memory=False), np.zeros(1 << 20, np.float32)
        owner.fill([(None, None, None)] * 4)
        threading.Thread(target=lambda: [owner.step(spillway.Adam(), [(memory, None)] * 4) for _ in range(10**6)], daemon=True).start()
        time.sleep(0.01)
        timeouts = [lambda: tier.close(timeout=0)]
        """,
    "interleave": """
        memory = np.zeros((4, 4 << 20), np.float32)
        half = np.zeros(4 << 20, np.uint16)
        owner = spillway.Interleave([spillway.interleave.Subgroup(memory[0], memory[1], memory[2], half, half.copy())], uint16_dtype="bf16")
        owner.grad_ready(0)
        owner.begin(spillway.Adam())
        timeouts = [lambda: owner.ready(0)]
        """,
    "gpu": """
        from fake_cuda import FakeDriver
        driver = FakeDriver(os.environ["SPILLWAY_CUDA_LIBRARY"], 7)
        owner, memory = spillway.Gpu(7), spillway.pinned(1 << 20)
        copy = owner.copy_out(driver.device(np.zeros(1 << 20, np.float32)), memory, after=driver.stream())
        timeouts = [lambda: copy.wait(0)]
        """,
    "io": """
        from spillway.deepspeed import _io_engine
        memory = np.ones(128 << 20, np.uint8)
        owner, fd = _io_engine.Engine("async_io", 1 << 20, 8), os.open(folder + "/file", os.O_CREAT | os.O_RDWR)
        owner.write(None, fd, 0, memory.ctypes.data, memory.nbytes, memory)
        timeouts = []
        """,
}

#: How the program ends, and the exit status.
ENDINGS = {
    "keeps all": ("", 0),
    "loses all": ("del owner, memory, timeouts; gc.collect()", 0),
    "loses all after timeouts": ("time_out(); del owner, memory, timeouts; gc.collect()", 0),
    "keeps the object after timeouts": ("time_out(); del memory", 0),
    "raises": ("time_out(); raise RuntimeError('of the program')", 1),
    "has a cycle": ("cycle = [owner, memory]; cycle.append(cycle); del owner, memory, timeouts, cycle", 0),
    "has a reference that lives longest": ("time_out(); sys.modules['builtins'].kept = owner; del owner, memory", 0),
    "has an exit handler": ("atexit.register(time_out)", 0),
    "has a daemon thread": (
        "threading.Thread(target=lambda: [time_out() for _ in range(10**9)], daemon=True).start(); time.sleep(0.02)",
        0,
    ),
    "forks": (
        "if not (child := os.fork()): del owner, memory, timeouts; sys.exit(0)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0",
        0,
    ),
}

PROGRAM = """
import atexit, gc, os, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)
sys.path.append({tests!r})
import numpy as np
import spillway
folder = {folder!r}
def time_out():
    for call in timeouts:
        try:
            call()
        except spillway.TimedOutError:
            pass
        except spillway.InvalidArgumentError as error:
            assert "closed" in str(error) or "waited for already" in str(error), error
        except spillway.BusyError:
            pass
{work}
{ending}
"""


@pytest.mark.sampled(cases=18)
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("work", WORK)
def test_an_interpreter_ends_cleanly_while_the_library_works(work, ending, tmp_path, child_environment, request):
    if work == "gpu":
        child_environment = {**child_environment, "SPILLWAY_CUDA_LIBRARY": request.getfixturevalue("fake_driver")}
    code, status = ENDINGS[ending]
    program = PROGRAM.format(tests=str(request.path.parent), folder=str(tmp_path), work=textwrap.dedent(WORK[work]), ending=code)
    ended = subprocess.run([sys.executable, "-c", program], env=child_environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == status, (signal.Signals(-ended.returncode) if ended.returncode < 0 else ended.returncode, ended.stderr)
    assert ("RuntimeError: of the program" in ended.stderr) == (status == 1)
    (tmp_path / "file").unlink(missing_ok=True)


def arrays(size=64):
    return [np.zeros(size, np.float32) for _ in range(4)]


def test_a_wait_for_the_end_frees_no_memory_of_a_job_that_another_thread_submits_meanwhile(monkeypatch):
    library, second = _native.library(), arrays()
    with Stage([tuple(arrays())], spillway.Adam()) as stage:
        stage.submit(1)
        stage.wait()
        stage.commit()
        reader, writer = os.pipe()

        class Between:
            def __getattr__(self, name):
                return getattr(library, name)

            def spw_stage_finish(self, *arguments):
                status = library.spw_stage_finish(*arguments)
                stage.tensors[:] = [tuple(second)]
                stage.submit(2, event_fd=reader)
                return status

        monkeypatch.setattr(_native, "library", Between)
        stage.finish()
        monkeypatch.undo()
        seen = weakref.ref(second.pop())
        stage.tensors.clear()
        second.clear()
        gc.collect()
        assert seen() is not None
        stage.rollback()
        stage.finish()
        gc.collect()
        assert seen() is None
        os.close(reader), os.close(writer)


def test_a_lost_object_whose_close_failed_keeps_its_memory(monkeypatch):
    library, given = _native.library(), arrays()

    class Late:
        def __getattr__(self, name):
            return getattr(library, name)

        def spw_spec_close(self, handle):
            library.spw_spec_close(handle)
            return 23

    speculation = spillway.Speculation(1)
    speculation.begin(spillway.Adam())
    speculation.submit(0, [tuple(given)])
    seen = weakref.ref(given.pop())
    given.clear()
    monkeypatch.setattr(_native, "library", Late)
    with pytest.raises(spillway.TimedOutError):
        speculation.close()
    del speculation
    gc.collect()
    assert seen() is not None


@pytest.mark.parametrize("collected", [False, True])
def test_an_object_whose_destructor_was_interrupted_is_closed_by_the_next_open(tmp_path, monkeypatch, collected):
    """Python drops the exception of a signal handler in a destructor. A tier would stay locked until the process ends."""

    def interrupted(_):
        raise KeyboardInterrupt

    tier, array = spillway.Tier([tmp_path], job="test"), np.zeros(1 << 20, np.uint8)
    tier.put(tier.define("e", [array.nbytes]), [array])
    seen = weakref.ref(array)
    if collected:
        tier.itself = tier
    # pytest's hook would keep the exception, and with its frame the object.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    monkeypatch.setattr(_native_handle._NativeHandle, "__del__", interrupted)
    del tier, array
    gc.collect()
    monkeypatch.undo()
    with spillway.Tier([tmp_path], job="test") as again:
        assert again.opened.step is None
    assert seen() is not None, "no ticket has shown that the memory is free"
    del again
    spillway.Speculation(1).close()
    assert len(_native_handle._open) <= len(_native_handle._destroyed) + 5


def test_a_close_at_the_end_of_the_interpreter_does_not_wait_for_threads_that_run_no_more(child_environment):
    program = """
        import builtins, os, threading, time
        import numpy as np, spillway
        from spillway.stage import Stage
        owner = Stage([tuple(np.zeros((4, 64), np.float32))], spillway.Adam())
        owner.submit(1, event_fd=os.pipe()[0])
        threading.Thread(target=owner.wait, daemon=True).start()
        while not owner._inside:
            time.sleep(0.01)
        class Closes:
            def __del__(self, close=owner.close):
                close()
        builtins.closes = Closes()
        """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=child_environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0 and "threads that have not ended are inside of its calls" in ended.stderr, ended
