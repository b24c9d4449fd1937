"""Proves that ZenFlow runs on Spillway's cpu_adam with the bits of DeepSpeed's compiled op: its worker step by step, and
training runs with and without overlap. Misuse, dead processes and unpatched processes are errors, and never hang."""

import contextlib
import json
import math
import os
import pathlib
import signal
import threading

import pytest
import torch
import torch.multiprocessing
import zenflow_worker
from compiled_ops import vector_width
from interrupts import keyboard_interrupts

HERE = pathlib.Path(__file__).parent
PAIRS = [
    (torch.float32, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
]
ID = 77


@pytest.fixture
def op(served):
    op = served("cpu_adam")
    op.create_adam(ID, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
    yield op
    op.destroy_adam(ID)


def shared(size, dtype, seed=None):
    source = torch.Generator().manual_seed(seed or 0)
    made = torch.zeros(size) if seed is None else torch.randn(size, generator=source)
    return made.to(dtype).share_memory_()


def group(size, param=torch.float32, state=torch.float32, seed=1):
    """param, two gradients, two of each moment, stale."""
    return [
        shared(size, param, seed),
        *(shared(size, param) for _ in range(2)),
        *(shared(size, state) for _ in range(4)),
        shared(size, param),
    ]


def block(op, groups):
    ctrl = torch.zeros(op.zenflow_adam_ctrl_size(), dtype=torch.uint8).share_memory_()
    op.zenflow_adam_ctrl_init(ctrl.data_ptr(), groups)
    return ctrl


def submit(op, ctrl, now_state, step, groups=1, **changed):
    hyper = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "bias_correction": 1, **changed}
    op.zenflow_adam_submit(
        ctrl.data_ptr(), now_state, step, *([value] * groups if not isinstance(value, list) else value for value in hyper.values())
    )


@contextlib.contextmanager
def worker(op, ctrl, groups, start, optimizer_id=ID):
    """A worker in this process's thread or in a forked process."""
    handle = op.zenflow_adam_create(optimizer_id, [])
    for tensors in groups:
        op.zenflow_adam_register_group(handle, *tensors)
    running = start(lambda: op.zenflow_adam_run_worker(handle, ctrl.data_ptr()))
    try:
        yield running
    finally:
        op.zenflow_adam_ctrl_exit(ctrl.data_ptr())
        running.join(60)
        op.zenflow_adam_destroy(handle)


def thread(run):
    started = threading.Thread(target=run, daemon=True)
    started.start()
    return started


def forked(run):
    started = torch.multiprocessing.get_context("fork").Process(target=run, daemon=True)
    started.start()
    return started


def test_the_worker_has_the_bits_of_deepspeeds_worker(served, compiled):
    """Ten groups in one optimizer process each: all pairs of dtypes, other hyper-parameters per group and step."""
    if vector_width() != "AVX512":
        pytest.skip(f"DeepSpeed compiles its {vector_width()} body here; only the AVX512 body fixes every rounding")
    ops = (compiled("cpu_adam"), served("cpu_adam"))
    sides = []
    context = torch.multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))[:2]
    for side, op in enumerate(ops):
        groups = [group(size, *pair, seed=size) for pair in PAIRS for size in (4096, 70_000)]
        ctrl, ready = block(op, len(groups)), context.Event()
        process = context.Process(target=zenflow_worker.work, args=(side == 0, groups, ctrl, ready, cores), daemon=True)
        process.start()
        sides.append((op, groups, ctrl, ready, process))
    for *_, ready, _process in sides:
        assert ready.wait(timeout=300)
    for step in (1, 2, 3, 4, 7, 8, 8):
        now = step & 1
        source = torch.Generator().manual_seed(step)
        gradients = [torch.randn(tensors[0].numel(), generator=source) for tensors in sides[0][1]]
        for op, groups, ctrl, _, _ in sides:
            assert op.zenflow_adam_wait(ctrl.data_ptr(), 0.0) is False
            for tensors, gradient in zip(groups, gradients):
                tensors[1 + now].copy_(gradient)
            count = len(groups)
            submit(
                op,
                ctrl,
                now,
                step,
                count,
                lr=[1e-3 * (1 + i % 3) for i in range(count)],
                weight_decay=[0.1 * (i % 2) for i in range(count)],
                bias_correction=[i % 4 > 0 for i in range(count)],
            )
            assert op.zenflow_adam_wait(ctrl.data_ptr(), 300.0) is True
        for index, (theirs, ours) in enumerate(zip(sides[0][1], sides[1][1])):
            for name, a, b in zip(("param", "grad0", "grad1", "m0", "m1", "v0", "v1", "stale"), theirs, ours):
                assert torch.equal(a, b), f"{name} of group {index} differs at step {step}"
    assert not torch.equal(sides[1][1][0][0], group(4096, seed=4096)[0])
    for op, _, ctrl, _, process in sides:
        op.zenflow_adam_ctrl_exit(ctrl.data_ptr())
        process.join(60)
        assert process.exitcode == 0


@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("stage, overlap, offload", [(1, 1, 0), (2, 0, 1), (3, 0, 0), (3, 1, 1)])
def test_training_has_the_bits_of_deepspeeds_op(compiled, starter, native_starter, tmp_path, stage, overlap, offload):
    compiled("cpu_adam")

    def train(starter, **extra):
        environment = {name: value for name, value in os.environ.items() if name not in ("SPILLWAY_LIBRARY", "PYTHONPATH")}
        done = starter.run([HERE / "zenflow.py", stage, overlap, offload], {**environment, "OMP_NUM_THREADS": "1", **extra}, 300)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    ours, theirs = train(starter, SPILLWAY_DEEPSPEED="1", TORCH_EXTENSIONS_DIR=str(tmp_path)), train(native_starter)
    assert "cpu_adam.so" in theirs["compiled_ops"] and not theirs["active"]
    assert not ours["compiled_ops"] and not list(tmp_path.iterdir())
    if overlap:
        assert ours["active"]["zenflow"] == {"submitted": 7, "completed": 7}
    else:
        assert ours["active"]["cpu_adam"]["calls"] == 7
    assert (ours["losses"], ours["sha256"]) == (theirs["losses"], theirs["sha256"])


def test_two_steps_queue_in_order_and_a_third_is_refused(op):
    ctrl, tensors = block(op, 1), group(1000)
    tensors[1].fill_(1.0)
    tensors[2].fill_(-3.0)
    expected = [tensor.clone() for tensor in tensors]
    submit(op, ctrl, 0, 1)
    submit(op, ctrl, 1, 2)
    with pytest.raises(RuntimeError, match="has not begun 2 steps .* call zenflow_adam_wait before"):
        submit(op, ctrl, 0, 3)
    with worker(op, ctrl, [tensors], thread):
        assert op.zenflow_adam_wait(ctrl.data_ptr(), 60.0) and op.zenflow_adam_wait(ctrl.data_ptr(), 60.0)
        assert not op.zenflow_adam_wait(ctrl.data_ptr(), 0.01)
    op.create_adam(ID + 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
    for now, step in ((0, 1), (1, 2)):
        op.adam_update(
            ID + 1, step, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, expected[0], expected[1 + now], expected[3 + now], expected[5 + now]
        )
    expected[7].copy_(expected[0])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tensors, expected))


def test_the_worker_leaves_after_the_queued_steps_and_no_step_follows(op):
    ctrl = block(op, 1)
    submit(op, ctrl, 0, 1)
    op.zenflow_adam_ctrl_exit(ctrl.data_ptr())
    with pytest.raises(RuntimeError, match="submitted after zenflow_adam_ctrl_exit"):
        submit(op, ctrl, 1, 2)
    with worker(op, ctrl, [group(64)], thread) as running:
        running.join(60)
        assert op.zenflow_adam_wait(ctrl.data_ptr(), 60.0)
        with pytest.raises(RuntimeError, match="has left its loop: zenflow_adam_ctrl_exit was called"):
            op.zenflow_adam_wait(ctrl.data_ptr(), 60.0)
    with pytest.raises(RuntimeError, match="has or had an optimizer process"):
        op.zenflow_adam_run_worker(op.zenflow_adam_create(ID, []), ctrl.data_ptr())


def test_a_killed_worker_is_an_error_of_wait_and_submit(op):
    ctrl = block(op, 1)
    with worker(op, ctrl, [group(64)], forked) as process:
        submit(op, ctrl, 0, 1)
        assert op.zenflow_adam_wait(ctrl.data_ptr(), 60.0)
        process.kill()
        # The wait comes first: the system ends a killed process some time after the kill.
        for call in (lambda: op.zenflow_adam_wait(ctrl.data_ptr(), math.inf), lambda: submit(op, ctrl, 1, 2)):
            with pytest.raises(RuntimeError, match=f"optimizer process {process.pid} is dead; 1 of 1 submitted steps were begun"):
                call()


def test_a_stopped_worker_is_a_timeout_and_continues(op):
    ctrl = block(op, 1)
    with worker(op, ctrl, [group(64)], forked) as process:
        submit(op, ctrl, 0, 1)
        assert op.zenflow_adam_wait(ctrl.data_ptr(), 60.0)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        submit(op, ctrl, 1, 2)
        assert op.zenflow_adam_wait(ctrl.data_ptr(), 0.3) is False
        os.kill(process.pid, signal.SIGCONT)
        assert op.zenflow_adam_wait(ctrl.data_ptr(), 60.0)


def test_a_failing_step_is_raised_in_the_trainer_with_its_reason(op):
    ctrl, failures = block(op, 1), []

    def run_and_keep(run):
        def kept():
            try:
                run()
            except RuntimeError as error:
                failures.append(error)

        return thread(kept)

    with worker(op, ctrl, [group(64)], run_and_keep, optimizer_id=987_654):
        submit(op, ctrl, 0, 1)
        for call in (lambda: op.zenflow_adam_wait(ctrl.data_ptr(), 60.0), lambda: submit(op, ctrl, 0, 1)):
            with pytest.raises(RuntimeError, match="left its loop: UnknownIdError: .*987654"):
                call()
    assert "987654" in str(failures[0])


def test_the_number_of_groups_is_compared(op):
    ctrl = block(op, 2)
    with pytest.raises(ValueError, match="1 groups were submitted, and the control block is for 2"):
        submit(op, ctrl, 0, 1)
    handle = op.zenflow_adam_create(ID, [])
    op.zenflow_adam_register_group(handle, *group(8))
    with pytest.raises(ValueError, match="1 groups are registered, and the control block is for 2"):
        op.zenflow_adam_run_worker(handle, ctrl.data_ptr())
    with pytest.raises(RuntimeError, match="1 groups are registered"):
        op.zenflow_adam_wait(ctrl.data_ptr(), 60.0)
    op.zenflow_adam_destroy(handle)


def test_the_largest_number_of_groups(op):
    with pytest.raises(ValueError, match="num_groups is 1025; pass an integer from 0 to 1024"):
        block(op, 1025)
    ctrl, tensors = block(op, 1024), group(16)
    handle = op.zenflow_adam_create(ID, [])
    for _ in range(1024):
        op.zenflow_adam_register_group(handle, *tensors)
    with pytest.raises(ValueError, match="at most 1024 groups"):
        op.zenflow_adam_register_group(handle, *tensors)
    running = thread(lambda: op.zenflow_adam_run_worker(handle, ctrl.data_ptr()))
    submit(op, ctrl, 0, 1, 1024)
    assert op.zenflow_adam_wait(ctrl.data_ptr(), 60.0)
    op.zenflow_adam_ctrl_exit(ctrl.data_ptr())
    running.join(60)
    op.zenflow_adam_destroy(handle)


@pytest.mark.parametrize(
    "now_state, step, changed, message",
    [
        (2, 1, {}, "now_state is 2"),
        (-1, 1, {}, "now_state is -1"),
        (0, 0, {}, "step is 0"),
        (0, 1, {"lr": math.nan}, "group 0: .*lr"),
        (0, 1, {"beta1": 1.0}, "group 0: beta1"),
        (0, 1, {"eps": -1.0}, "group 0: .*eps"),
        (0, 1, {"weight_decay": -0.1}, "group 0: .*weight_decay"),
        (0, 1, {"bias_correction": 2}, "bias_correction is 2"),
        (0, 1, {"lr": [1e-3, 1e-3]}, r"have \[1, 2\] values"),
        (0, 1, {"eps": ["x"]}, "eps is 'x'"),
    ],
)
def test_wrong_arguments_are_refused_before_the_worker_sees_them(op, now_state, step, changed, message):
    ctrl = block(op, 1)
    with pytest.raises(ValueError, match=message):
        submit(op, ctrl, now_state, step, **changed)
    with worker(op, ctrl, [group(64)], thread):
        submit(op, ctrl, 0, 1)
        assert op.zenflow_adam_wait(ctrl.data_ptr(), 60.0)


def test_wrong_pointers_handles_and_tensors_are_refused(op):
    empty = torch.zeros(op.zenflow_adam_ctrl_size(), dtype=torch.uint8)
    for call in (op.zenflow_adam_ctrl_exit, lambda pointer: op.zenflow_adam_wait(pointer, 0.0)):
        for pointer, message in (
            (0, "control_ptr is 0x0"),
            (empty.data_ptr() + 1, "aligned"),
            (empty.data_ptr(), "was not made by Spillway"),
        ):
            with pytest.raises(ValueError, match=message):
                call(pointer)
    ctrl = block(op, 1)
    with pytest.raises(ValueError, match="timeout_s is NaN"):
        op.zenflow_adam_wait(ctrl.data_ptr(), math.nan)
    with pytest.raises(KeyError, match="no ZenFlow worker has the handle 12345"):
        op.zenflow_adam_run_worker(12345, empty.data_ptr())
    op.zenflow_adam_destroy(12345)
    handle = op.zenflow_adam_create(ID, [])
    for place, wrong, message in (
        (0, torch.zeros(8, 2).t(), "not contiguous"),
        (2, torch.zeros(4), "shape"),
        (1, torch.zeros(8, dtype=torch.bfloat16), "dtype"),
        (7, torch.zeros(4), "stale"),
        (7, torch.zeros(8, dtype=torch.float16), "stale"),
        (4, torch.zeros(9), "exp_avg"),
    ):
        tensors = group(8)
        tensors[place] = wrong
        with pytest.raises(ValueError, match=message):
            op.zenflow_adam_register_group(handle, *tensors)
    op.zenflow_adam_register_group(handle, *group(8)[:7], None)
    op.zenflow_adam_destroy(handle)


def test_a_block_in_use_is_not_made_anew(op):
    ctrl = block(op, 1)
    with worker(op, ctrl, [group(64)], thread):
        submit(op, ctrl, 0, 1)
        assert op.zenflow_adam_wait(ctrl.data_ptr(), 60.0)
        with pytest.raises(RuntimeError, match="in use by the ZenFlow optimizer process"):
            op.zenflow_adam_ctrl_init(ctrl.data_ptr(), 1)


def test_a_worker_ends_with_its_trainer(op):
    """The trainer is killed; its worker, a process of its own, then returns from its loop. Tensors are made before the
    forks, because torch's threads do not exist in a forked process."""
    read, write = os.pipe()
    ctrl, handle = block(op, 1), op.zenflow_adam_create(ID, [])
    op.zenflow_adam_register_group(handle, *group(64))

    def trainer():
        op.zenflow_adam_ctrl_init(ctrl.data_ptr(), 1)
        if os.fork() == 0:
            op.zenflow_adam_run_worker(handle, ctrl.data_ptr())
            os.write(write, b"worker returned")
            os._exit(0)
        submit(op, ctrl, 0, 1)
        assert op.zenflow_adam_wait(ctrl.data_ptr(), 60.0)
        os.write(write, b"trainer stepped")
        signal.pause()

    process = forked(trainer)
    os.close(write)
    assert os.read(read, 15) == b"trainer stepped"
    process.kill()
    assert os.read(read, 15) == b"worker returned"
    os.close(read)
    op.zenflow_adam_destroy(handle)


def test_a_worker_of_deepspeeds_compiled_op_leaves_and_is_named(op, compiled):
    """The worker's process is not patched, so DeepSpeed's op gets Spillway's control block."""
    theirs, ctrl = compiled("cpu_adam"), block(op, 1)
    handle = theirs.zenflow_adam_create(0, [])
    theirs.zenflow_adam_run_worker(handle, ctrl.data_ptr())
    theirs.zenflow_adam_destroy(handle)
    for call in (lambda: op.zenflow_adam_wait(ctrl.data_ptr(), 60.0), lambda: submit(op, ctrl, 0, 1)):
        with pytest.raises(RuntimeError, match="uses DeepSpeed's compiled cpu_adam.*SPILLWAY_DEEPSPEED=1"):
            call()


def test_steps_run_on_the_cores_of_the_worker_with_a_thread_for_each(op, monkeypatch):
    import spillway
    from spillway.deepspeed import _zenflow

    seen, core = [], max(os.sched_getaffinity(0))
    monkeypatch.setattr(_zenflow._Group, "publish", lambda _group: seen.append((os.sched_getaffinity(0), spillway.num_threads())))
    before = spillway.num_threads()
    for cores, expected in (
        ([core], ({core}, 1)),
        ([core] * 3, ({core}, 3)),
        ([], (os.sched_getaffinity(0), 1)),
        ([(1 << 31) - 1, -5], (os.sched_getaffinity(0), 2)),
    ):
        ctrl = block(op, 1)
        handle = op.zenflow_adam_create(ID, cores)
        op.zenflow_adam_register_group(handle, *group(64))
        submit(op, ctrl, 0, 1)
        op.zenflow_adam_ctrl_exit(ctrl.data_ptr())
        op.zenflow_adam_run_worker(handle, ctrl.data_ptr())
        assert seen.pop() == expected
        op.zenflow_adam_destroy(handle)
    assert spillway.num_threads() == before


@pytest.fixture
def interrupts():
    with keyboard_interrupts():
        yield


def test_a_signal_interrupts_a_wait(op, interrupts):
    ctrl = block(op, 1)
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        op.zenflow_adam_wait(ctrl.data_ptr(), 60.0)
    timer.join()
