"""Proves the schedules of spillway.pipeline from Python, and that real processes run them: the data of every pass, and
the memory that the plan predicts. test_pipeline_torch.py in ffi_tests/torch runs torch modules."""

import importlib.util
import os
import pathlib
import pickle
import random
import signal
import time
import types
from multiprocessing import connection, resource_tracker

import pipeline_light
import pytest
from interrupts import keyboard_interrupts

import spillway
from spillway import pipeline
from spillway.pipeline import _fleet
from spillway.pipeline._fleet import Fleet

DEVICES = 4


@pytest.fixture(scope="module")
def fleet():
    pairs = [(sender, receiver) for sender in range(DEVICES) for receiver in range(DEVICES) if sender != receiver]
    fleet = Fleet(DEVICES, pairs, pipeline_light.LightBackend)
    yield fleet
    fleet.close()


def random_plan(seed):
    """A plan of a random shape with up to DEVICES devices."""
    choose = random.Random(seed)
    schedule = choose.choice(["afab", "1f1b", "decoupled"])
    devices, micro_batches, stages, split = DEVICES, choose.randint(1, 5), choose.randint(1, 7), choose.randint(1, 3)
    if schedule == "1f1b":
        chunks = choose.randint(1, 2)
        stages = devices * chunks
        micro_batches = devices * choose.randint(1, 2) if chunks > 1 else micro_batches
    units = [
        pipeline.Unit(
            forward=choose.choice([0.0, 1.0, 2.0]),
            backward=choose.random() * 3,
            recompute=choose.choice([0.0, 1.0]),
            fetch=choose.random() * 2,
            offload=choose.random(),
            optimizer=choose.random() * 3,
            param_bytes=choose.randrange(5000),
            grad_bytes=choose.randrange(5000),
            activation_bytes=choose.randrange(20_000),
            input_bytes=choose.choice([0, 3, 700, 300_000]),
        )
        for _ in range(stages * split)
    ]
    return pipeline.plan(
        schedule,
        devices=devices,
        micro_batches=micro_batches,
        stages=stages,
        split=split,
        units=units,
        slots=choose.randint(1, 3),
        recompute=True if schedule == "decoupled" else choose.choice([False, True]),
        early_checkpoints=choose.choice([False, True]),
        async_optimizer=choose.choice([False, True]),
        latency=choose.choice([0.0, 0.2]),
        seconds_per_byte=choose.choice([0.0, 1e-6]),
    )


def fixed_plan():
    """A plan in which every device has forward and backward passes."""
    return pipeline.plan(
        "decoupled",
        devices=DEVICES,
        micro_batches=4,
        stages=4,
        split=2,
        units=pipeline.Unit(param_bytes=100, grad_bytes=100, activation_bytes=100, input_bytes=100),
    )


#: The transports of messages.
TRANSPORTS = [
    pytest.param(name, marks=pytest.mark.skipif(name == "gloo" and not importlib.util.find_spec("torch"), reason="torch is not installed"))
    for name in ("pipes", "gloo")
]


@pytest.mark.sampled(cases=15)
@pytest.mark.parametrize("seed", range(50))
def test_processes_run_a_random_plan_with_its_data_and_its_memory(fleet, seed):
    check_plan(fleet, seed)


def test_processes_run_random_plans_over_gloo_and_listen_on_the_loopback_interface_only():
    pytest.importorskip("torch")
    pairs = [(sender, receiver) for sender in range(DEVICES) for receiver in range(DEVICES) if sender != receiver]
    fleet = Fleet(DEVICES, pairs, pipeline_light.LightBackend, "gloo")
    try:
        for seed in range(10):
            check_plan(fleet, seed)
        listening = [address for process in fleet.process_ids() for address in addresses(process)]
        assert len(listening) == DEVICES and set(listening) == {"0100007F"}  # 127.0.0.1
    finally:
        fleet.close()


def addresses(process):
    """The addresses, as /proc writes them, of the sockets of a process that listen."""
    links = [os.path.join(f"/proc/{process}/fd", name) for name in os.listdir(f"/proc/{process}/fd")]
    own = {os.readlink(link) for link in links if os.path.islink(link)}
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{process}/net/{table}") as lines:
            for fields in (line.split() for line in lines):
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                    yield fields[1].split(":")[0]


def check_plan(fleet, seed):
    """Runs a random plan, and compares its data and memory with the prediction."""
    plan = random_plan(seed)
    fleet.set_plan(plan, timeout=300)
    answers = fleet.ask([("step", seed)] * DEVICES, timeout=300)
    offloaded, optimized = {}, []
    for device, ((events, spans), (own, steps, verdicts)) in enumerate(answers):
        predicted = [(change.operation, change.memory, change.freed, change.resident) for change in plan.changes if change.device == device]
        assert [tuple(event) for event in events] == predicted
        offloaded.update(own)
        optimized += steps
        # One of five devices finds fault: with four devices, the verdict is that of the unlucky one.
        assert verdicts == [all((seed + other) % 5 != 0 for other in range(DEVICES))]
        passes = [plan.operations[number] for number, _, _ in spans]
        assert passes == [
            operation
            for operation in plan.operations
            if operation.device == device and operation.kind in ("forward", "backward", "recompute")
        ]
    assert offloaded == pipeline_light.serial(plan, seed)
    assert sorted(optimized) == [(first, plan.backward_split) for first in range(0, len(plan.units), plan.backward_split)]


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_process_is_reported_with_its_operation_and_all_end(transport):
    plan = fixed_plan()
    pairs = {(operation.device, operation.peer) for operation in plan.operations if operation.kind.startswith("send")}
    fleet = Fleet(DEVICES, pairs, SlowBackend, transport)
    ids = fleet.process_ids()
    try:
        fleet.set_plan(plan, timeout=300)
        with pytest.raises(pipeline.PipelineError, match="device 2 .*forward of unit.*SIGKILL") as failure:
            fleet.ask([("step", 1)] * DEVICES, timeout=300)
        assert failure.value.device == 2 and "forward" in failure.value.operation
    finally:
        fleet.close()
    assert all(not alive(process) for process in ids)
    with pytest.raises(spillway.BusyError, match="closed"):
        fleet.ask([("step", 1)] * DEVICES)


class SlowBackend(pipeline_light.LightBackend):
    def forward(self, *arguments):
        if self.device == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(*arguments)


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_error_in_a_pass_is_reported_and_a_stopped_process_times_out(transport):
    plan = fixed_plan()
    pairs = {(operation.device, operation.peer) for operation in plan.operations if operation.kind.startswith("send")}
    for backend, error, words in (
        (FailingBackend, pipeline.PipelineError, "device 1 .*backward of.*ZeroDivisionError"),
        (StoppedBackend, spillway.TimedOutError, "device 0: "),
    ):
        fleet = Fleet(DEVICES, pairs, backend, transport)
        ids = fleet.process_ids()
        try:
            fleet.set_plan(plan, timeout=300)
            with pytest.raises(error, match=words):
                fleet.ask([("step", 1)] * DEVICES, timeout=300 if error is pipeline.PipelineError else 2)
        finally:
            fleet.close()
        assert all(not alive(process) for process in ids)


class ForkingBackend(SlowBackend):
    """Has a child, which inherits all pipes, when it is killed."""

    def forward(self, *arguments):
        if self.device == 2 and not (child := os.fork()):
            time.sleep(1000)
        if self.device == 2:
            pathlib.Path(os.environ["FORKED"]).write_text(str(child))
        return super().forward(*arguments)


@pytest.mark.sampled(values=1)
@pytest.mark.parametrize("descriptors", [True, False], ids=["descriptors of processes", "none"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_process_is_reported_while_a_child_of_it_lives(transport, descriptors, tmp_path, monkeypatch):
    if not descriptors:

        def refused(_):
            raise PermissionError

        monkeypatch.setattr(os, "pidfd_open", refused)
    monkeypatch.setenv("FORKED", str(tmp_path / "child"))
    plan = fixed_plan()
    pairs = {(operation.device, operation.peer) for operation in plan.operations if operation.kind.startswith("send")}
    # The first process that Python spawns opens a descriptor that stays.
    resource_tracker.ensure_running()
    before = len(os.listdir("/proc/self/fd"))
    fleet = Fleet(DEVICES, pairs, ForkingBackend, transport)
    try:
        fleet.set_plan(plan, timeout=300)
        with pytest.raises(pipeline.PipelineError, match="device 2 .*forward of unit.*SIGKILL"):
            fleet.ask([("step", 1)] * DEVICES, timeout=300)
        child = int((tmp_path / "child").read_text())
        assert alive(child)
        os.kill(child, signal.SIGKILL)
    finally:
        fleet.close()
    assert len(os.listdir("/proc/self/fd")) == before


class FailingBackend(pipeline_light.LightBackend):
    def backward(self, *arguments):
        if self.device == 1:
            raise ZeroDivisionError("on purpose")
        return super().backward(*arguments)


class StoppedBackend(pipeline_light.LightBackend):
    def optimize(self, *arguments):
        if self.device == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().optimize(*arguments)


class InterruptingBackend(pipeline_light.LightBackend):
    def forward(self, *arguments):
        if self.device == 1:
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(1000)
        return super().forward(*arguments)


class ClosingBackend(pipeline_light.LightBackend):
    """Tells the test that a pass has begun, and never ends it."""

    def forward(self, *arguments):
        os.kill(os.getppid(), signal.SIGUSR1)
        time.sleep(1000)


class SilentBackend(pipeline_light.LightBackend):
    """Never ends a pass."""

    def forward(self, *arguments):
        time.sleep(1000)


def started(backend, transport="pipes"):
    plan = fixed_plan()
    pairs = {(operation.device, operation.peer) for operation in plan.operations if operation.kind.startswith("send")}
    fleet = Fleet(DEVICES, pairs, backend, transport)
    fleet.set_plan(plan, timeout=300)
    return fleet, fleet.process_ids()


@pytest.fixture
def interrupts():
    with keyboard_interrupts():
        yield


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_interrupt_and_a_close_by_a_handler_end_all_processes(interrupts, transport):
    fleet, ids = started(InterruptingBackend, transport)
    with pytest.raises(KeyboardInterrupt):
        fleet.ask([("step", 1)] * DEVICES, timeout=300)
    assert fleet.closed and all(not alive(process) for process in ids)

    fleet, ids = started(ClosingBackend, transport)
    before = signal.signal(signal.SIGUSR1, lambda *_: fleet.close())
    try:
        with pytest.raises(spillway.BusyError, match="closed"):
            fleet.ask([("step", 1)] * DEVICES, timeout=300)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert all(not alive(process) for process in ids)


def test_a_close_between_two_waits_ends_a_call():
    fleet, ids = started(SilentBackend)
    look, looks = fleet._answers, []

    def answers(*arguments):
        looks.append(1)
        assert len(looks) < 10, "the call goes on with a pipeline that is closed"
        # As a signal handler would, which runs between two waits.
        fleet.close()
        return look(*arguments)

    fleet._answers = answers
    with pytest.raises(spillway.BusyError, match="closed"):
        fleet.ask([("step", 1)] * DEVICES, timeout=300)
    assert len(looks) == 1 and all(not alive(process) for process in ids)


def test_no_wait_is_long_because_a_signal_just_before_it_does_not_end_it(monkeypatch):
    fleet, ids = started(pipeline_light.LightBackend)
    waits = []
    monkeypatch.setattr(
        _fleet,
        "connection",
        types.SimpleNamespace(wait=lambda sources, timeout=None: waits.append(timeout) or connection.wait(sources, timeout)),
    )
    for timeout in (300, None):
        fleet.ask([("step", 1)] * DEVICES, timeout)
    fleet.close()
    assert waits and all(timeout is not None and timeout <= 1 for timeout in waits)
    assert all(not alive(process) for process in ids)


def test_a_forked_child_can_neither_use_nor_end_the_processes():
    fleet, ids = started(pipeline_light.LightBackend)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            fleet.ask([("step", 1)] * DEVICES)
        except spillway.UnsupportedError:
            fleet.close()
            status = 7
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(fleet.ask([("step", 1)] * DEVICES, timeout=300)) == DEVICES
    del fleet
    assert all(not alive(process) for process in ids)


#: Ways in which another process holds the ends of a parent's pipes: nobody, a forked child, a program that a child executes.
HOLDERS = {
    "nobody": "0",
    "child": "os.fork() or time.sleep(1000)",
    "program": """os.fork() or (
        [os.set_inheritable(int(name), True) for name in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + name)],
        os.execvp('sleep', ['sleep', '1000']))""",
}


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("holder", HOLDERS)
def test_processes_end_with_a_parent_that_is_killed(tmp_path, child_environment, holder, stopped):
    import subprocess
    import sys

    program = tmp_path / "parent.py"
    program.write_text(
        "import os, sys, time\n"
        f"sys.path.insert(0, {os.path.dirname(pipeline_light.__file__)!r})\n"
        "import pipeline_light\n"
        "from spillway.pipeline._fleet import Fleet\n"
        "if __name__ == '__main__':\n"
        "    fleet = Fleet(2, [(0, 1)], pipeline_light.LightBackend)\n"
        # The first answer of a process comes after it has asked for the signal.
        "    fleet.ask([('call', 'begin', (0,))] * 2, 300)\n"
        f"    holder = {HOLDERS[holder]}\n"
        "    print(holder, *fleet.process_ids(), flush=True)\n"
        "    time.sleep(1000)\n"
    )
    parent = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True, env=child_environment)
    held, *ids = [int(word) for word in parent.stdout.readline().split()]
    for process in ids if stopped else ():
        os.kill(process, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    try:
        assert len(ids) == 2
        end = time.monotonic() + 60
        while any(alive(process) for process in ids):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert not held or alive(held)
    finally:
        for process in [held] * bool(held) + [process for process in ids if alive(process)]:
            os.kill(process, signal.SIGKILL)


def alive(process):
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_figures_of_the_paper():
    unit = pipeline.Unit(forward=0.5, backward=1, fetch=1, offload=1, optimizer=2)
    mobius = pipeline.plan("afab", devices=4, micro_batches=4, stages=8, split=2, units=unit, recompute=True)
    sysx = pipeline.plan("decoupled", devices=4, micro_batches=4, stages=8, split=2, units=unit)
    assert round(mobius.iteration_bubble_ratio, 2) == 0.47 and sysx.iteration_bubble_ratio == 0.25
    assert round(mobius.passes_bubble_ratio, 4) == 0.2727 and round(sysx.passes_bubble_ratio, 4) == 0.1111
    gpipe = pipeline.plan("afab", devices=4, micro_batches=4, stages=4)
    dapple = pipeline.plan("1f1b", devices=4, micro_batches=4, stages=4)
    for found in (gpipe, dapple):
        assert found.passes_bubble_ratio == pytest.approx(3 / 7) and found.closed_bubble_ratio == pytest.approx(3 / 7)


def test_a_rollback_costs_what_the_paper_computes():
    """Section 5.6: 53 % once in 100 iterations is 0.53 %. The cost falls with the batch, as in Figure 14."""
    found = pipeline.rollback_cost(iteration=10, rollback=4, exposed=1.3, every=100)
    assert found.per_event == pytest.approx(0.53) and found.mean == pytest.approx(0.0053)
    unit = pipeline.Unit(forward=0.5, backward=1, fetch=1, offload=1, optimizer=2)
    costs = [
        pipeline.rollback_cost(
            pipeline.plan("decoupled", devices=4, micro_batches=micro_batches, stages=8, split=2, units=unit).iteration_seconds,
            4 * unit.optimizer,
            unit.optimizer,
        ).per_event
        for micro_batches in (4, 8, 16, 32)
    ]
    assert costs == sorted(costs, reverse=True) and costs[0] > costs[-1]


@pytest.mark.parametrize(
    "change, name",
    [
        ({"iteration": 0}, "iteration"),
        ({"rollback": -1}, "rollback"),
        ({"exposed": float("nan")}, "exposed"),
        ({"every": 0.5}, "every"),
        ({"iteration": "10"}, "iteration"),
        ({"iteration": 1e-308, "rollback": 1e308}, "iteration"),
        ({"every": float("inf")}, "every"),
    ],
)
def test_a_cost_of_rollbacks_that_cannot_be_is_refused_by_name(change, name):
    with pytest.raises(spillway.InvalidArgumentError, match=name):
        pipeline.rollback_cost(**{"iteration": 10, "rollback": 4, "exposed": 1.3, "every": 100, **change})


def test_the_picture_of_the_docs_is_that_of_its_plan(repository):
    """SPILLWAY_BLESS=1 writes it anew."""
    unit = pipeline.Unit(forward=0.5, backward=1, fetch=1, offload=1, optimizer=2)
    text = pipeline.plan("decoupled", devices=4, micro_batches=4, stages=8, split=2, units=unit).to_svg()
    picture = repository / "docs" / "pipeline.svg"
    if os.environ.get("SPILLWAY_BLESS"):
        picture.write_text(text)
    assert picture.read_text() == text


def test_a_plan_is_an_object_that_can_be_sent_and_drawn():
    plan = pipeline.plan("decoupled", devices=2, micro_batches=2, stages=2, split=2)
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert plan.to_svg(400).startswith("<svg") and plan.closed_bubble_ratio == pytest.approx(1 / 7)
    assert [operation.describe() for operation in plan.operations if operation.kind == "send_checkpoint"] == [
        "send of the checkpoint of unit 0 on micro-batch 0 (to device 1)",
        "send of the checkpoint of unit 0 on micro-batch 1 (to device 1)",
        "send of the checkpoint of unit 3 on micro-batch 0 (to device 0)",
        "send of the checkpoint of unit 3 on micro-batch 1 (to device 0)",
    ]


@pytest.mark.parametrize(
    "change, name",
    [
        ({"devices": 0}, "devices"),
        ({"micro_batches": -1}, "micro_batches"),
        ({"stages": 2**32}, "stages"),
        ({"split": 1.5}, "split"),
        ({"stages": 2**31, "split": 2**31}, "stages"),
        ({"schedule": "gpipe"}, "schedule"),
        ({"recompute": False}, "recompute"),
        ({"latency": -1.0}, "latency"),
        ({"units": []}, "unit_count"),
        ({"units": pipeline.Unit(forward=float("nan"))}, "forward"),
        ({"units": pipeline.Unit(param_bytes=2**64)}, "param_bytes"),
        ({"slots": 0}, "slots"),
    ],
)
def test_arguments_that_cannot_be_are_refused_by_name(change, name):
    arguments = {"schedule": "decoupled", "devices": 2, "micro_batches": 2, "stages": 2, **change}
    with pytest.raises(spillway.InvalidArgumentError, match=name):
        pipeline.plan(arguments.pop("schedule"), **arguments)
