"""Proves that spillway.pipeline trains torch modules to the bits of a serial run: forward and backward passes in other
processes, recomputation with the same random numbers, gradients in the order of the micro-batches, and validated steps."""

import functools
import gc
import os
import signal

import pytest
import spawned
import torch

import spillway
from spillway import pipeline
from spillway.torch import AdamW

DIM = 16
ADAMW = functools.partial(AdamW, lr=0.01, undo=True)
#: The same by the jobs of spillway.stage.
STAGE = functools.partial(pipeline.StageAdamW, lr=0.01)


class Noisy(torch.nn.Module):
    def __init__(self, into, out):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(into, out), torch.nn.LayerNorm(out)
        self.drop = torch.nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(torch.nn.functional.gelu(self.norm(self.linear(x))))


def model(units, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(Noisy(DIM, DIM) for _ in range(units)))


def batches(steps, micro_batches, seed=1):
    random = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(3 * micro_batches, DIM, generator=random), torch.randn(3 * micro_batches, DIM, generator=random)) for _ in range(steps)
    ]


def serial(units, steps, micro_batches, stage, spoil=None):
    """Trains without a pipeline, in one process. Returns the losses."""
    optimizers = [ADAMW([p for unit in units[first : first + stage] for p in unit.parameters()]) for first in range(0, len(units), stage)]
    losses = []
    for step, (inputs, targets) in enumerate(steps):
        for micro_batch, (x, target) in enumerate(zip(inputs.chunk(micro_batches), targets.chunk(micro_batches))):
            for number, unit in enumerate(units):
                torch.manual_seed(pipeline.seed_of(7, step, micro_batch, number))
                x = unit(x)
            loss = torch.nn.functional.mse_loss(x, target)
            losses.append(loss.item())
            (loss / micro_batches).backward()
        for optimizer in optimizers:
            if step != spoil:
                optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """The processes of pipelines are forked from one that has imported torch."""
    spawned.install(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SHAPES = [
    ("decoupled", {"devices": 2, "micro_batches": 3, "split": 2}, 8),
    ("decoupled", {"devices": 3, "micro_batches": 2, "split": 1, "slots": 1}, 5),
    ("afab", {"devices": 2, "micro_batches": 4, "split": 2, "recompute": True}, 8),
    ("afab", {"devices": 2, "micro_batches": 2, "recompute": False}, 6),
    ("1f1b", {"devices": 2, "micro_batches": 5, "recompute": False, "slots": 1}, 2),
    ("1f1b", {"devices": 2, "micro_batches": 4, "recompute": True, "async_optimizer": True}, 4),
]


@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize("schedule, options, count", SHAPES, ids=lambda value: str(value))
def test_weights_and_losses_are_those_of_the_serial_run_to_the_bit(schedule, options, count):
    micro_batches = options["micro_batches"]
    steps = batches(3, micro_batches)
    ours, theirs = model(count), model(count)
    with pipeline.Pipeline(ours, torch.nn.functional.mse_loss, ADAMW, steps[0][0][:3], schedule=schedule, seed=7, **options) as runner:
        reports = [runner.step(*step, timeout=300) for step in steps]
        runner.sync()
        for device, events in enumerate(reports[-1].memory):
            assert events == [
                (change.operation, change.memory, change.freed, change.resident)
                for change in runner.plan.changes
                if change.device == device
            ]
        stage = runner.plan.backward_split
    losses = serial(theirs, steps, micro_batches, stage)
    assert [loss for report in reports for loss in report.losses] == losses
    for left, right in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(left, right)
    assert all(report.committed and 0 <= report.bubble_ratio < 1 for report in reports)


class Transposed(torch.nn.Module):
    """Its output has other strides. Kernels for such inputs may round in another order."""

    def forward(self, x):
        return x.t().contiguous().t()


class Half(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(DIM, DIM, dtype=torch.bfloat16)

    def forward(self, x):
        return self.linear(x.bfloat16()).float()


def mixed():
    torch.manual_seed(2)
    frozen = torch.nn.Linear(DIM, DIM)
    frozen.requires_grad_(False)
    return [torch.nn.Linear(DIM, DIM), Half(), Transposed(), frozen, torch.nn.ReLU(), torch.nn.Linear(DIM, DIM)]


@pytest.mark.parametrize(
    "schedule, options, kind", [("afab", {"devices": 3, "recompute": False}, ADAMW), ("decoupled", {"devices": 3, "split": 2}, STAGE)]
)
def test_strides_16_bit_parameters_frozen_units_and_units_without_parameters_keep_the_bits(schedule, options, kind):
    steps, ours, theirs = batches(3, 2), mixed(), mixed()
    with pipeline.Pipeline(
        ours, torch.nn.functional.mse_loss, kind, steps[0][0][:3], schedule=schedule, micro_batches=2, seed=7, **options
    ) as runner:
        for step in steps:
            runner.step(*step, timeout=300)
        runner.sync()
    trained = [unit for unit in theirs if any(parameter.requires_grad for parameter in unit.parameters())]
    optimizers = [ADAMW(unit.parameters()) for unit in trained]
    for inputs, targets in steps:
        for x, target in zip(inputs.chunk(2), targets.chunk(2)):
            for unit in theirs:
                x = unit(x)
            (torch.nn.functional.mse_loss(x, target) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for left, right in zip(ours, theirs):
        assert all(torch.equal(one, other) for one, other in zip(left.parameters(), right.parameters()))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_gradient_with_inf_changes_no_weight_of_any_stage(asynchronous):
    steps = batches(3, 2)
    steps[1][1][0, 0] = float("inf")
    ours, theirs = model(4), model(4)
    with pipeline.Pipeline(
        ours, torch.nn.functional.mse_loss, ADAMW, steps[0][0][:3], micro_batches=2, split=2, seed=7, async_optimizer=asynchronous
    ) as runner:
        committed = [runner.step(*step, timeout=300).committed for step in steps]
        runner.sync()
    assert committed == [True, False, True]
    serial(theirs, steps, 2, 1, spoil=1)
    assert all(torch.equal(left, right) for left, right in zip(ours.parameters(), theirs.parameters()))


class Local(torch.nn.Module):
    """Its gradient overflows in its own unit only: the other stages of the same step are finite."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(DIM))

    def forward(self, x):
        return x + Overflow.apply(self.weight) * 0


class Overflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, float("inf"))


def test_stages_that_stepped_are_rolled_back_when_another_device_finds_inf():
    units = [*model(3), Local()]
    before = [parameter.clone() for unit in units for parameter in unit.parameters()]
    with pipeline.Pipeline(units, torch.nn.functional.mse_loss, STAGE, torch.ones(3, DIM), micro_batches=2, split=2) as runner:
        assert not runner.step(*batches(1, 2)[0], timeout=300).committed
        runner.sync()
    after = [parameter for unit in units for parameter in unit.parameters()]
    assert all(torch.equal(left, right) for left, right in zip(before, after))


class Kill(torch.nn.Module):
    """Ends its process in a later pass of some process. The pass of the measurement does not count."""

    def __init__(self, victim):
        super().__init__()
        self.linear, self.victim, self.parent = torch.nn.Linear(DIM, DIM), victim, os.getpid()

    def forward(self, x):
        if os.getpid() != self.parent and torch.is_grad_enabled():
            os.kill(os.getpid(), signal.SIGKILL)
        return self.linear(x)


def memory_files():
    """Shared memory without a name that this process maps, or has open."""
    with open("/proc/self/maps") as maps:
        mapped = [line.split(maxsplit=5)[5].strip() for line in maps if "memfd:" in line]
    found = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sorted(mapped + [os.readlink(path) for path in found if os.path.islink(path) and "memfd:" in os.readlink(path)])


def test_a_killed_stage_process_is_reported_and_nothing_is_left():
    units = [*model(3), Kill(None)]
    before = [parameter.clone() for unit in units for parameter in unit.parameters()]
    shared = memory_files()
    runner = pipeline.Pipeline(units, torch.nn.functional.mse_loss, ADAMW, torch.ones(3, DIM), micro_batches=2, split=2)
    ids = runner.process_ids()
    with pytest.raises(pipeline.PipelineError, match="device 0 .*recompute of unit 3 on micro-batch 0.*SIGKILL") as failure:
        runner.step(*batches(1, 2)[0], timeout=300)
    assert failure.value.device == 0
    assert not any(os.path.exists(f"/proc/{process}") for process in ids)
    runner.sync()  # no optimizer had begun
    with pytest.raises(spillway.BusyError):
        runner.step(*batches(1, 2)[0])
    assert memory_files() != shared
    runner.close()
    del runner, failure
    gc.collect()
    # The memory has no name, and this process maps it no longer: the system has freed it.
    assert memory_files() == shared
    after = [parameter for unit in units for parameter in unit.parameters()]
    assert all(torch.equal(left, right) for left, right in zip(before, after))


class KillInStep(AdamW):
    """Ends its process in the second step, with half of the parameters written."""

    def step(self, closure=None):
        super().step(closure)
        if self.state[self.param_groups[0]["params"][0]]["step"] == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def test_weights_of_half_a_step_are_refused():
    units, first = model(4), batches(2, 2)
    make = functools.partial(KillInStep, lr=0.01, undo=True)
    runner = pipeline.Pipeline(units, torch.nn.functional.mse_loss, make, torch.ones(3, DIM), micro_batches=2, split=2)
    runner.step(*first[0], timeout=300)
    runner.sync()
    before = [parameter.clone() for parameter in units.parameters()]
    with pytest.raises(pipeline.PipelineError, match="SIGKILL"):
        runner.step(*first[1], timeout=300)
    with pytest.raises(spillway.errors.TornError, match="half a step"):
        runner.sync()
    runner.close()
    assert all(torch.equal(left, right) for left, right in zip(before, units.parameters()))


class Statistics(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(DIM)

    def forward(self, x):
        return self.norm(x)


@pytest.mark.parametrize(
    "unit, words",
    [
        (Statistics(), "changes its buffer norm."),
        (torch.nn.InstanceNorm1d(3, track_running_stats=True), "changes its buffer running_mean"),
        (torch.nn.LSTM(DIM, DIM), "returned a tuple"),
        (torch.nn.ReLU(inplace=True), "in place|leaf Variable"),
    ],
)
def test_units_that_cannot_be_recomputed_are_refused(unit, words):
    with pytest.raises((spillway.UnsupportedError, RuntimeError), match=words):
        pipeline.Pipeline([*model(1), unit], torch.nn.functional.mse_loss, ADAMW, torch.ones(3, DIM))


def test_arguments_that_do_not_fit_are_refused():
    units, sample = model(4), torch.ones(3, DIM)
    shared = torch.nn.Linear(DIM, DIM)
    for arguments, words in [
        (([shared, shared], torch.nn.functional.mse_loss, ADAMW, sample), "belongs to unit 0 too"),
        (([], torch.nn.functional.mse_loss, ADAMW, sample), "0 units"),
        ((units, lambda *_: None, ADAMW, sample), "picklable"),
        ((units, torch.nn.functional.mse_loss, torch.optim.AdamW, sample), "cannot roll back"),
    ]:
        with pytest.raises(spillway.InvalidArgumentError, match=words):
            pipeline.Pipeline(*arguments)
    with pipeline.Pipeline(units, torch.nn.functional.mse_loss, ADAMW, sample, micro_batches=2, split=2) as runner:
        with pytest.raises(spillway.InvalidArgumentError, match="multiple of 2"):
            runner.step(torch.ones(3, DIM), torch.ones(3, DIM))
        with pytest.raises(spillway.InvalidArgumentError, match="shape"):
            runner.step(torch.ones(4, DIM), torch.ones(4, DIM))
        runner.step(torch.ones(6, DIM), torch.ones(6, DIM), timeout=300)
        state = runner.state_dict()
        assert sorted(state) == [0, 1, 2, 3] and float(state[0]["state"][0]["step"]) == 1
        runner.load_state_dict(state)
        runner.set_options(lr=0.5)
        assert runner.state_dict()[3]["param_groups"][0]["lr"] == 0.5


class Sometimes(torch.nn.Module):
    """Uses a parameter for some micro-batches, and another one for none. The sample uses the first one, or does not."""

    def __init__(self):
        super().__init__()
        self.linear, self.gain, self.idle = (
            torch.nn.Linear(DIM, DIM),
            torch.nn.Parameter(torch.ones(DIM)),
            torch.nn.Parameter(torch.ones(3)),
        )

    def forward(self, x):
        return self.linear(x) * self.gain if x[0, 0] > 0 else self.linear(x)


class Tied(torch.nn.Module):
    """Uses one parameter twice."""

    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(DIM, DIM), torch.nn.Linear(DIM, DIM)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


def irregular():
    torch.manual_seed(3)
    return [Sometimes(), Tied(), Sometimes(), Tied()]


@pytest.mark.parametrize("sign", [1, -1])
def test_parameters_that_some_micro_batches_do_not_use_and_tied_ones_keep_the_bits(sign):
    steps, ours, theirs = batches(3, 2), irregular(), irregular()
    for inputs, _ in steps:
        inputs[:3, 0], inputs[3:, 0] = sign, -sign
    with pipeline.Pipeline(ours, torch.nn.functional.mse_loss, ADAMW, steps[0][0][:3], micro_batches=2, split=2, seed=7) as runner:
        for step in steps:
            runner.step(*step, timeout=300)
        runner.sync()
    serial(theirs, steps, 2, 1)
    for left, right in zip(ours, theirs):
        assert all(torch.equal(one, other) for one, other in zip(left.parameters(), right.parameters()))


def test_parameters_that_share_memory_are_refused_and_parts_of_one_buffer_are_not():
    def two():
        return [torch.nn.Linear(DIM, DIM), torch.nn.Linear(DIM, DIM)]

    same, shifted, apart = two(), two(), two()
    same[1].weight = torch.nn.Parameter(same[0].weight.data)
    flat = torch.randn(3 * DIM * DIM)
    for unit, start in ((shifted[0], 0), (shifted[1], DIM), (apart[0], 0), (apart[1], DIM * DIM)):
        unit.weight = torch.nn.Parameter(flat[start : start + DIM * DIM].view(DIM, DIM))
    for units in (same, shifted):
        with pytest.raises(spillway.InvalidArgumentError, match="parameter weight of unit 1 shares memory with parameter weight of unit 0"):
            pipeline.Pipeline(units, torch.nn.functional.mse_loss, ADAMW, torch.ones(3, DIM))
    pipeline.Pipeline(apart, torch.nn.functional.mse_loss, ADAMW, torch.ones(3, DIM)).close()


class Foreign:
    """Can be pickled by this process, and not be unpickled by another one."""

    def __reduce__(self):
        return os.getpgid, (2**31 - 1,)


def test_refused_arguments_leave_the_pipeline_usable():
    units, step = model(4), batches(1, 2)[0]
    with pipeline.Pipeline(units, torch.nn.functional.mse_loss, ADAMW, torch.ones(3, DIM), micro_batches=2, split=2) as runner:
        state = runner.state_dict()
        fewer = {**state, 0: {**state[0], "param_groups": [{**state[0]["param_groups"][0], "params": [0]}]}}
        for call, words in [
            (lambda: runner.set_options(nope=1), "no option nope"),
            (lambda: runner.set_options(params=[]), "no option params"),
            (lambda: runner.set_options(lr=lambda: 1), "picklable"),
            (lambda: runner.set_options(lr=Foreign()), "unpickle"),
            (lambda: runner.load_state_dict({}), r"stages \[\]"),
            (lambda: runner.load_state_dict(None), "stages NoneType"),
            (lambda: runner.load_state_dict(dict.fromkeys(state)), "parameter groups"),
            (lambda: runner.load_state_dict(fewer), "parameter groups"),
            (lambda: runner.step(*step, timeout=float("inf")), "finite"),
            (lambda: runner.step(*step, timeout=float("nan")), "finite"),
        ]:
            with pytest.raises(spillway.InvalidArgumentError, match=words):
                call()
        assert runner.step(*step, timeout=1e10).committed
    with pytest.raises(spillway.BusyError, match="closed"):
        runner.process_ids()
    for option in ("split", "devices", "micro_batches", "slots", "threads"):
        for value in (0, -1, 1.5):
            with pytest.raises(spillway.InvalidArgumentError, match=f"Pipeline: {option} is"):
                pipeline.Pipeline(units, torch.nn.functional.mse_loss, ADAMW, torch.ones(3, DIM), **{option: value})


class Mistaken(torch.nn.Module):
    """Raises in the processes of the devices."""

    def __init__(self):
        super().__init__()
        self.linear, self.parent = torch.nn.Linear(DIM, DIM), os.getpid()

    def forward(self, x):
        return self.linear(x if os.getpid() == self.parent else x[:, 1:])


def test_an_exception_in_a_unit_has_the_traceback_of_the_unit():
    with (
        pipeline.Pipeline(
            [*model(3), Mistaken()], torch.nn.functional.mse_loss, ADAMW, torch.ones(3, DIM), micro_batches=2, split=2
        ) as runner,
        pytest.raises(pipeline.PipelineError, match="shapes cannot be multiplied") as failure,
    ):
        runner.step(*batches(1, 2)[0], timeout=300)
    assert "x if os.getpid() == self.parent else x[:, 1:]" in str(failure.value) and "in forward" in str(failure.value)
    assert "_executor" not in str(failure.value)
