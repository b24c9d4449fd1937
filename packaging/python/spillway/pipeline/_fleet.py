"""The processes of a pipeline, as their parent sees them.

Invariants:
- A failure of one process ends all: they are killed and reaped before the exception is raised. A signal handler that raises
  meanwhile leaves processes, which the next close() ends.
- The first cause is reported. A process whose peer has ended is no cause.
- Shared memory has no name. Processes end when their parent has ended, however it ended, also while another process
  holds the parent's end of a pipe.
- The end of a process is noticed although a child of it lives on. Such a child holds its ends of all pipes, so no pipe shows the end,
  neither a control pipe nor multiprocessing's sentinel.
- A forked child of the parent ends no process: multiprocessing does not know these processes, because it would end them
  when such a child exits."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import signal
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection
from typing import Any

from .. import _arguments
from ..errors import BusyError, InvalidArgumentError, TimedOutError, UnsupportedError
from . import _gloo, _pipes, _worker
from ._plan import Plan
from .errors import PipelineError

#: How messages travel.
TRANSPORTS = {"pipes": _pipes, "gloo": _gloo}
#: Seconds in which the first cause may arrive after a process reported that its peer has ended.
_CAUSE_SECONDS = 5.0
#: Period in seconds at which a wait for an exit code looks for it.
_POLL_SECONDS = 0.01
#: Longest single wait in seconds. A signal that arrives just before the system's call does not end the call, and Python runs its handler
#: after it. On a system without descriptors of processes, the processes are looked at with this period.
_LOOK_SECONDS = 0.2


class Fleet:
    """Starts a process for each device.

    Args:
        devices: Number of devices.
        pairs: The pairs (from, to) of devices with messages.
        make_backend: Called in each process with its device; can be pickled.
        transport: A key of TRANSPORTS."""

    def __init__(self, devices: int, pairs: Iterable[tuple[int, int]], make_backend: Callable[[int], Any], transport: str = "pipes"):
        context = multiprocessing.get_context("spawn")
        self._process_id = os.getpid()
        self._asking, self._ending, self._closing, self._dead = threading.Lock(), threading.RLock(), False, False
        self._plan: Plan | None = None
        self._processes: list[Any] = []
        self._controls: list[Any] = []
        #: For each process a descriptor that is readable once it has ended; none on a system without them.
        self._watches: list[int] = []
        self._progress = _worker.SharedMemory(devices * _worker.SLOT)
        ends: list[Any] = []
        main_thread = threading.current_thread() is threading.main_thread()
        # Ends the processes when this object is forgotten, and at exit.
        self._owned = (self._process_id, self._processes, self._controls, self._watches, self._progress)
        weakref.finalize(self, _end, *self._owned)
        try:
            endpoints = TRANSPORTS[transport].connect(devices, set(pairs))
            ends += endpoints
            for device, endpoint in enumerate(endpoints):
                ours, theirs = context.Pipe()
                self._controls.append(ours)
                ends.append(theirs)
                process = context.Process(
                    target=_worker.main,
                    name=f"spillway device {device}",
                    daemon=True,
                    args=(device, self._process_id, theirs, self._progress, endpoint, main_thread, make_backend),
                )
                process.start()
                self._processes.append(process)
                getattr(multiprocessing.process, "_children", set()).discard(process)
            self._watches.extend(_watches(self._processes))
        except BaseException:
            self.kill()
            raise
        finally:
            for end in ends:
                end.close()

    @property
    def closed(self) -> bool:
        """True after close() or a failure."""
        return self._dead

    def process_ids(self) -> list[int]:
        """Returns the ids of the processes, by device.

        Raises:
            BusyError: The pipeline is closed."""
        self._check_owner()
        self._check_open()
        return [process.pid for process in self._processes]

    def _check_owner(self) -> None:
        if self._process_id != os.getpid():
            raise UnsupportedError(
                f"this pipeline was opened by process {self._process_id} and is not usable in its forked child; open a new one in the child"
            )

    def _check_open(self) -> None:
        if self.closed:
            raise BusyError("this pipeline is closed, because of close() or a failure; open a new one")

    def set_plan(self, plan: Plan, timeout: float | None = None) -> None:
        """Makes all devices run another plan."""
        self._plan = plan
        self.ask([("plan", plan)] * len(self._processes), timeout)

    def ask(self, orders: Sequence[tuple[Any, ...]], timeout: float | None = None) -> list[Any]:
        """Gives each device an order, and returns their results.

        Raises:
            PipelineError: A process failed.
            TimedOutError: Not all devices answered in time. All processes have ended.
            BusyError: Another thread waits for answers, or the pipeline is closed. Nothing was done.
            InvalidArgumentError: The timeout is negative or not finite. Nothing was done."""
        self._check_owner()
        given, timeout = timeout, _arguments.seconds(timeout)
        if given is not None and (isinstance(given, (str, bytes)) or float(given) < 0):
            raise InvalidArgumentError(f"timeout is {given!r}; pass at least 0 seconds, or None for no limit")
        self._check_open()
        if not self._asking.acquire(blocking=False):
            raise BusyError("another thread is in a call of this pipeline; use it from one thread at a time")
        try:
            return self._ask(orders, None if timeout is None else time.monotonic() + timeout)
        except BaseException as error:
            # A step that ended halfway cannot continue, whatever ended it.
            self.kill()
            if self._closing and isinstance(error, Exception):
                raise BusyError("another thread closed this pipeline during the call; its step did not end") from None
            raise
        finally:
            self._asking.release()

    def _ask(self, orders: Sequence[tuple[Any, ...]], deadline: float | None) -> list[Any]:
        for device, order in enumerate(orders):
            self._send(device, order)
        results: dict[int, Any] = {}
        verdicts: list[bool] = []
        failures: list[tuple[int, int, bool, str]] = []
        while len(results) < len(orders):
            # A signal handler may have closed the pipeline between two waits.
            self._check_open()
            for device, answer in self._answers(results, deadline, failures):
                if answer[0] == "verdict":
                    verdicts.append(answer[1])
                    if len(verdicts) == len(orders):
                        for other in range(len(orders)):
                            self._send(other, ("verdict", all(verdicts)))
                elif answer[0] == "done":
                    results[device] = answer[1]
                else:
                    failures.append((device, *answer[1:]))
                    if not answer[2]:
                        raise self._failure(*failures[-1])
                    limit = time.monotonic() + _CAUSE_SECONDS
                    deadline = limit if deadline is None else min(deadline, limit)
        return [results[device] for device in range(len(orders))]

    def _send(self, device: int, order: tuple[Any, ...]) -> None:
        try:
            self._controls[device].send(order)
        except OSError:
            # The process has ended; _answers() reports it.
            pass

    def _answers(self, results: dict[int, Any], deadline: float | None, failures: list[Any]) -> list[tuple[int, Any]]:
        waiting = [device for device in range(len(self._processes)) if device not in results]
        sources = {self._controls[device]: device for device in waiting}
        ended: dict[Any, int] = {watch: device for device, watch in enumerate(self._watches)}
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = connection.wait([*sources, *ended], _LOOK_SECONDS if left is None else min(left, _LOOK_SECONDS))
        if not self._watches and not ready:
            ended = {process: device for device, process in enumerate(self._processes) if process.exitcode is not None}
            ready = list(ended)
        # An answer that a process gave before it ended comes first. It may have come after the wait looked at its pipe.
        if not any(source in sources for source in ready):
            ready = connection.wait([*sources], 0) or ready
        if not ready and (left is None or left > _LOOK_SECONDS):
            return []
        if not ready:
            if failures:
                raise self._failure(*failures[0])
            behind = "; ".join(f"device {device}: {self._present(device)}" for device in waiting)
            raise TimedOutError(f"a pipeline step timed out, and its processes were ended. Without an answer: {behind}")
        answers = []
        for source in ready:
            device = sources.get(source)
            if device is not None:
                try:
                    answers.append((device, source.recv()))  # type: ignore[union-attr, call-arg]
                except (EOFError, OSError):
                    ended[source] = device
        if not answers:
            device = ended[ready[0]]
            raise self._failure(device, self._number(device), False, _exit_words(self._exit_code(device)))
        return answers

    def _exit_code(self, device: int) -> int | None:
        """The exit code of a process, for which it waits a while: a process may close its pipe before it ends."""
        limit = time.monotonic() + _CAUSE_SECONDS
        while (code := self._processes[device].exitcode) is None and time.monotonic() < limit:
            time.sleep(_POLL_SECONDS)
        return code

    def _number(self, device: int) -> int:
        """The operation that a device is at: its pass, else the command that it waits for."""
        command, computing = struct.unpack_from("<QQ", self._progress.map, device * _worker.SLOT)
        return (computing or command) - 1

    def _present(self, device: int) -> str:
        return self._describe(self._number(device))

    def _describe(self, number: int) -> str:
        if self._plan is None or number < 0:
            return "between two steps"
        return self._plan.operations[number].describe()

    def _failure(self, device: int, number: int, _is_peer: bool, text: str) -> PipelineError:
        doing = self._describe(number)
        return PipelineError(
            f"the pipeline process of device {device} failed ({doing}): {text}. All its processes were ended; open a new "
            "pipeline from the last weights",
            device,
            doing,
        )

    def kill(self) -> None:
        """Ends and reaps all processes. Does nothing in a forked child."""
        if self._process_id == os.getpid():
            self._dead = True
            with self._ending:
                _end(*self._owned)

    def close(self) -> None:
        """Ends all processes. May be called again, also after a signal handler has raised in it."""
        self._closing = True
        self.kill()


def _watches(processes: Iterable[Any]) -> list[int]:
    found: list[int] = []
    try:
        for process in processes:
            found.append(os.pidfd_open(process.pid))
    except (AttributeError, OSError):
        # An old kernel, a system call filter, or no descriptor is left.
        while found:
            os.close(found.pop())
    return found


def _end(owner: int, processes: list[Any], controls: list[Any], watches: list[int], progress: _worker.SharedMemory) -> None:
    """Ends and reaps the processes that are left. An interrupted call is completed by the next one."""
    if owner != os.getpid():
        return
    for process in processes:
        process.kill()
    while processes:
        process = processes[-1]
        process.join()
        # A signal handler may have closed the pipeline meanwhile.
        if process in processes:
            processes.remove(process)
            process.close()
    for control in controls:
        control.close()
    while watches:
        os.close(watches.pop())
    progress.close()


def _exit_words(code: int | None) -> str:
    if code is None:
        return "closed its pipe without an answer"
    if code is not None and code < 0:
        try:
            return f"ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"ended by signal {-code}"
    return f"ended with exit status {code}"
