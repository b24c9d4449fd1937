"""The block of shared memory through which a trainer drives ZenFlow's optimizer process.

Invariants:

- Only the two processes of one run use a block. `create` makes it in the trainer; one worker attaches, once.
- A command lies in one of two slots. The semaphore `free` counts slots that the worker has copied, `ready` counts
  commands that it has not yet taken, and `done` counts steps that are complete. A slot is thus never written and read
  at the same time. A third command before the worker has taken the first is an error, not an overwritten slot.
- Each side stores its process id and start time. Waits are cut into slices; after each, the waiting side checks that
  the other process lives, so a dead process is an error or an end, never an endless wait.
- The first bytes are what DeepSpeed's compiled op expects in its own block: an order to leave. If the worker runs that
  op, because its process is not patched, it leaves at once, and `wait` names the cause."""

import ctypes
import errno
import math
import os
import time

from .. import _arguments
from ..errors import BusyError, InvalidArgumentError, OutOfOrderError, SystemCallError

MOST_GROUPS = 1024
_MAGIC = 0x31574F4C464E455A  # "ZENFLOW1"
_SLOTS = 2
_REASON_BYTES = 1024
# How long a wait lasts before the other process is checked.
_SLICE = 0.1


class _Semaphore(ctypes.Structure):
    """Room for a sem_t; glibc's has 32 bytes."""

    _fields_ = [("room", ctypes.c_uint64 * 8)]


class _Process(ctypes.Structure):
    """A process that is told apart from a later one with the same id."""

    _fields_ = [("pid", ctypes.c_int64), ("started", ctypes.c_uint64)]


class Group(ctypes.Structure):
    """Hyper-parameters of one parameter group."""

    _fields_ = [(name, ctypes.c_float) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")] + [("bias_correction", ctypes.c_uint32)]


class _Slot(ctypes.Structure):
    _fields_ = [("now_state", ctypes.c_int64), ("step", ctypes.c_int64), ("groups", Group * MOST_GROUPS)]


class _Decoy(ctypes.Structure):
    """The start of DeepSpeed's own block: two semaphores and a command."""

    _fields_ = [("value", ctypes.c_uint32), ("rest", ctypes.c_uint32 * 15), ("command", ctypes.c_int32), ("padding", ctypes.c_int32 * 15)]


class _Block(ctypes.Structure):
    _fields_ = [
        ("decoy", _Decoy),
        ("magic", ctypes.c_uint64),
        ("groups", ctypes.c_uint64),
        ("submitting", _Semaphore),
        ("free", _Semaphore),
        ("ready", _Semaphore),
        ("done", _Semaphore),
        ("attaching", _Semaphore),
        ("owner", _Process),
        ("worker", _Process),
        ("submitted", ctypes.c_uint64),
        ("taken", ctypes.c_uint64),
        ("leave", ctypes.c_uint32),
        ("failed", ctypes.c_uint32),
        ("reason", ctypes.c_char * _REASON_BYTES),
        ("slots", _Slot * _SLOTS),
    ]


SIZE = ctypes.sizeof(_Block)
_LEAVE_COMMAND = 1
_libc = None


def create(pointer, groups):
    """Makes a block for this number of groups, in memory of SIZE bytes that this process owns."""
    groups = _arguments.between("num_groups", groups, 0, MOST_GROUPS)
    block = _at(pointer)
    if block.magic == _MAGIC and block.worker.pid and _lives(block.worker):
        raise BusyError(
            f"the control block is in use by the ZenFlow optimizer process {block.worker.pid}; end it with "
            "zenflow_adam_ctrl_exit, or pass another block"
        )
    ctypes.memset(ctypes.addressof(block), 0, SIZE)
    for name, value in (("submitting", 1), ("free", _SLOTS), ("ready", 0), ("done", 0), ("attaching", 1)):
        if _library().sem_init(ctypes.byref(getattr(block, name)), 1, value):
            raise _system_error("creating a semaphore")
    block.groups, block.owner = groups, _this_process()
    block.decoy.value, block.decoy.command = 1, _LEAVE_COMMAND
    block.magic = _MAGIC


def submit(pointer, now_state, step, groups):
    """Passes a step to the worker, and does not wait for it."""
    block = _made(pointer)
    if len(groups) != block.groups:
        raise InvalidArgumentError(
            f"{len(groups)} groups were submitted, and the control block is for {block.groups}; pass one value per group"
        )
    _raise_failure(block, "submitting a step")
    if not _try(block.submitting):
        raise BusyError(
            "another thread or process is submitting a step on this control block, or died while it did; submit from one thread at a time"
        )
    try:
        if block.leave:
            raise OutOfOrderError(
                "a step was submitted after zenflow_adam_ctrl_exit; create a control block with "
                "zenflow_adam_ctrl_init and start a process for it"
            )
        if not _try(block.free):
            raise BusyError(
                f"the ZenFlow optimizer process has not begun {_SLOTS} steps that were submitted before; call "
                "zenflow_adam_wait before the next submit"
            )
        slot = block.slots[block.submitted % _SLOTS]
        slot.now_state, slot.step = now_state, step
        slot.groups[: len(groups)] = groups
        if block.owner.pid != os.getpid():
            block.owner = _this_process()
        block.submitted += 1
        _post(block.ready)
    finally:
        _post(block.submitting)


def wait(pointer, seconds):
    """True once a step is complete; False after `seconds`. Raises if the worker has ended."""
    block = _made(pointer)
    if math.isnan(seconds):
        raise InvalidArgumentError("timeout_s is NaN; pass seconds")
    until = time.monotonic() + max(seconds, 0.0)
    while True:
        if _wait(block.done, min(_SLICE, max(until - time.monotonic(), 0.0))):
            return True
        try:
            _raise_failure(block, "waiting for a step")
        except SystemCallError:
            # The worker may have completed a step between the wait and the check.
            if _try(block.done):
                return True
            raise
        if time.monotonic() >= until:
            return False


def leave(pointer):
    """Makes the worker return after the steps that were submitted."""
    block = _made(pointer)
    block.leave = 1
    _post(block.ready)


class Attached:
    """The worker's side of a block. A context manager: an error inside is reported to the trainer."""

    def __init__(self, pointer, groups):
        block = _made(pointer)
        if not _try(block.attaching):
            raise BusyError("the control block has or had an optimizer process; create it anew with zenflow_adam_ctrl_init")
        self._block, self._groups = block, groups

    def __enter__(self):
        self._block.worker = _this_process()
        if self._groups != self._block.groups:
            error = InvalidArgumentError(f"{self._groups} groups are registered, and the control block is for {self._block.groups}")
            try:
                self._fail(error)
                raise error
            finally:
                # The error refers to this frame by its traceback.
                del error
        return self

    def __exit__(self, _kind, error, _trace):
        self._fail(error)

    def _fail(self, error):
        if error is not None:
            text = f"{type(error).__name__}: {error}".encode("utf-8", "replace")[: _REASON_BYTES - 1]
            self._block.reason = text.decode("utf-8", "ignore").encode()
        self._block.failed = 1

    def steps(self):
        """Yields (now_state, step, hyper-parameters of each group) for every submitted step. The step counts as
        complete when the next one is asked for. Ends on `leave`, or when the trainer has ended."""
        block = self._block
        while self._next():
            if block.taken == block.submitted:
                return
            slot = block.slots[block.taken % _SLOTS]
            command = slot.now_state, slot.step, [Group.from_buffer_copy(slot.groups[i]) for i in range(block.groups)]
            block.taken += 1
            _post(block.free)
            yield command
            _post(block.done)

    def _next(self):
        while not _wait(self._block.ready, _SLICE):
            if not _lives(self._block.owner):
                return False
        return True


def _at(pointer):
    pointer = _arguments.unsigned("control_ptr", pointer)
    if pointer == 0 or pointer % ctypes.alignment(_Block):
        raise InvalidArgumentError(f"control_ptr is {pointer:#x}; pass the address of {SIZE} bytes, aligned to {ctypes.alignment(_Block)}")
    return _Block.from_address(pointer)


def _made(pointer):
    block = _at(pointer)
    if block.magic != _MAGIC:
        raise InvalidArgumentError(
            "the control block was not made by Spillway's zenflow_adam_ctrl_init; both processes have to use "
            "Spillway's cpu_adam, so set SPILLWAY_DEEPSPEED=1 for both"
        )
    return block


def _raise_failure(block, doing):
    """Raises if no further step will be completed, with the reason."""
    if block.failed:
        reason = block.reason.decode("utf-8", "replace") or "zenflow_adam_ctrl_exit was called"
        raise SystemCallError(f"{doing}: the ZenFlow optimizer process {block.worker.pid} has left its loop: {reason}")
    if block.worker.pid and not _lives(block.worker):
        raise SystemCallError(
            f"{doing}: the ZenFlow optimizer process {block.worker.pid} is dead; {block.taken} of "
            f"{block.submitted} submitted steps were begun. Look for a kill by the system (out of memory)"
        )
    if block.decoy.value == 0:
        raise SystemCallError(
            f"{doing}: the ZenFlow optimizer process uses DeepSpeed's compiled cpu_adam, because it is not "
            "patched; set SPILLWAY_DEEPSPEED=1, or call install() at module level"
        )


def _this_process():
    pid = os.getpid()
    return _Process(pid, _start_of(pid) or 0)


def _lives(process):
    """False only if the process has ended for sure."""
    try:
        return _start_of(process.pid) == process.started
    except OSError as error:
        return not isinstance(error, (FileNotFoundError, ProcessLookupError))


def _start_of(pid):
    """The start time of a process in clock ticks; None if only its exit status is left."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _try(semaphore):
    return _library().sem_trywait(ctypes.byref(semaphore)) == 0


def _post(semaphore):
    if _library().sem_post(ctypes.byref(semaphore)):
        raise _system_error("posting a semaphore")


def _wait(semaphore, seconds):
    """True if the semaphore was taken within `seconds`. A signal ends the wait early, so that its handler runs."""
    if seconds <= 0:
        return _try(semaphore)
    now = time.clock_gettime_ns(_library().clock)
    whole, part = divmod(now + int(seconds * 1e9), 1_000_000_000)
    if _library().timed_wait(ctypes.byref(semaphore), ctypes.byref(_Time(whole, part))) == 0:
        return True
    if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
        raise _system_error("waiting for a semaphore")
    return False


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _Libc:
    """The semaphores of the C library. Each call releases the GIL."""

    def __init__(self):
        libc = ctypes.CDLL(None, use_errno=True)
        self.sem_init, self.sem_post, self.sem_trywait = libc.sem_init, libc.sem_post, libc.sem_trywait
        self.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
        self.sem_post.argtypes = self.sem_trywait.argtypes = [ctypes.c_void_p]
        # A C library without sem_clockwait has only the clock that may be set while a wait lasts.
        self.clock = time.CLOCK_MONOTONIC if hasattr(libc, "sem_clockwait") else time.CLOCK_REALTIME
        if self.clock == time.CLOCK_MONOTONIC:
            libc.sem_clockwait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
            self.timed_wait = lambda semaphore, end: libc.sem_clockwait(semaphore, self.clock, end)
        else:
            self.timed_wait = libc.sem_timedwait
            self.timed_wait.argtypes = [ctypes.c_void_p, ctypes.c_void_p]


def _library():
    global _libc
    if _libc is None:
        _libc = _Libc()
    return _libc


def _system_error(doing):
    number = ctypes.get_errno()
    return SystemCallError(f"{doing} of ZenFlow's control block: {os.strerror(number)}")
