"""The process of a device: takes orders from the parent process, and ends with it.

Invariants:
- The process ends when the parent closes the pipe, or when the parent has ended. A pipe alone does not show the second
  case: a forked child of the parent, and a program that this child executes, may hold the parent's end of the pipe. The
  id of the parent process does: the system changes it.
- A process that was created by the parent's main thread is killed by the system when the parent has ended, also while it is
  stopped. The system looks at the creating thread, and another thread may end before the process does."""

from __future__ import annotations

import ctypes
import mmap
import operator
import os
import queue
import signal
import struct
import threading
import traceback
from collections.abc import Callable
from concurrent import futures
from typing import Any

from ._channels import Channels, Endpoint, PeerGoneError
from ._executor import Executor

#: Bytes of a device in the shared table of progress: the number of the present command's operation plus 1, 0 between
#: steps; and the same of the present pass, 0 without a pass.
SLOT = 16


class SharedMemory:
    """Anonymous shared memory that child processes inherit. It has no name, so that nothing is left when all processes
    have ended."""

    def __init__(self, size: int):
        self.size = max(size, 1)
        self.fd = os.memfd_create("spillway-pipeline")
        try:
            os.ftruncate(self.fd, self.size)
            self.map = mmap.mmap(self.fd, self.size)
        except BaseException:
            os.close(self.fd)
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing import reduction

        return _mapped, (reduction.DupFd(self.fd), self.size)

    def close(self) -> None:
        """Closes the descriptor and unmaps the memory; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.map.close()


def _mapped(fd: Any, size: int) -> SharedMemory:
    memory = SharedMemory.__new__(SharedMemory)
    memory.size, memory.fd = size, fd.detach()
    memory.map = mmap.mmap(memory.fd, size)
    return memory


#: Period in seconds at which a process without orders looks whether its parent lives.
_PARENT_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1
#: Frames of a traceback in a message: the innermost ones.
_FRAMES = 20


def main(
    device: int,
    parent: int,
    control: Any,
    progress: SharedMemory,
    endpoint: Endpoint,
    dies_with_parent: bool,
    make_backend: Callable[[int], Any],
) -> None:
    """Body of a process, a child of process `parent`. An order is a tuple: ("plan", plan), ("step", inputs), ("call", name, arguments) or
    ("verdict", verdict). Each but a verdict has one answer: ("done", result) or ("failed", operation, is_peer, text)."""
    if dies_with_parent:
        _die_with_parent()
    # Ctrl-C reaches every process of the terminal. The parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders, verdicts = queue.SimpleQueue[Any](), queue.SimpleQueue[bool]()
    threading.Thread(target=_listen, args=(parent, control, orders, verdicts), daemon=True).start()
    present = [-1]

    def record(number: int, is_pass: bool = False) -> None:
        if not is_pass:
            present[0] = number
        struct.pack_into("<Q", progress.map, device * SLOT + 8 * is_pass, number + 1)

    def validate(verdict: bool) -> Callable[[], bool]:
        control.send(("verdict", verdict))
        return verdicts.get

    backend = executor = channels = None
    while True:
        kind, *rest = orders.get()
        try:
            channels = channels or Channels(endpoint.open())
            backend = backend or make_backend(device)
            result = None
            if kind == "plan":
                if executor is not None:
                    executor.close()
                backend.plan(rest[0])
                executor = Executor(rest[0], device, backend, channels, record, validate)
            elif kind == "step":
                backend.begin(*rest)
                result = (executor.run() if executor else None, backend.finish())
            else:
                result = operator.attrgetter(rest[0])(backend)(*rest[1])
            control.send(("done", result))
        except BaseException as error:
            control.send(("failed", present[0], isinstance(error, PeerGoneError), _words(error)))
        record(-1)


def _die_with_parent() -> None:
    """Makes the system kill this process when the thread that created it ends. A process that SIGSTOP has stopped ends too, which no
    code of its own could do."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _words(error: BaseException) -> str:
    """The error with the traceback of the user's code: without the frames of this package and of the thread pool."""
    own = (os.path.dirname(__file__) + os.sep, futures.__path__[0] + os.sep)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(own)]
    frames = frames or traceback.extract_tb(error.__traceback__)[-1:]
    return f"{type(error).__name__}: {error}\n" + "".join(traceback.format_list(frames[-_FRAMES:])).rstrip()


def _listen(parent: int, control: Any, orders: queue.SimpleQueue[Any], verdicts: queue.SimpleQueue[bool]) -> None:
    while True:
        try:
            while not control.poll(_PARENT_SECONDS):
                if os.getppid() != parent:
                    os._exit(0)
            order = control.recv()
        except (EOFError, OSError):
            # The parent closed the pipeline, or has ended.
            os._exit(0)
        if order[0] == "verdict":
            verdicts.put(order[1])
        else:
            orders.put(order)
