"""spillway.torch.Staged in host memory: the bits, state dicts and ways of the class itself."""

import copy
import pickle
import threading

import pytest
import staged_programs
import torch
from offload_runs import Stream
from staged_runs import LateLane, Soap, gradients, parameters, same
from torch import optim

from spillway import InvalidArgumentError, OutOfOrderError, UnsupportedError
from spillway.torch import AdamW, Staged
from spillway.torch._staged.lane import DeviceLane
from spillway.torch._staged.leaves import Leaf

TWO = [(16, 24), (8, 16), (12, 12)]
#: Classes with their options and the shapes of parameters.
CLASSES = {
    "sgd": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "plain sgd": (optim.SGD, {"lr": 0.1}),
    "nadam": (optim.NAdam, {"weight_decay": 0.1}),
    "fused": (optim.AdamW, {"fused": True}),
    "amsgrad": (optim.Adam, {"amsgrad": True, "foreach": True}),
    "adagrad": (optim.Adagrad, {}),
    "adafactor": (optim.Adafactor, {}),
    "rprop": (optim.Rprop, {}),
    "soap": (Soap, {}),
}
if hasattr(optim, "Muon"):
    CLASSES["muon"] = (optim.Muon, {"lr": 1e-2})
BOUNDS = (1, 9000, 1 << 20)


def both(name, bound, **more):
    """The class and Staged of it, each with its parameters."""
    kind, options = CLASSES[name]
    shapes = {"shapes": TWO} if name == "muon" else {}
    ones, others = parameters(**shapes), parameters(**shapes)
    return ones, kind(ones, **options), others, Staged(kind, others, chunk_bytes=bound, **options, **more)


@pytest.fixture
def lane(monkeypatch):
    """A stand-in for a device, with copies that end late."""
    made = LateLane()
    monkeypatch.setattr("spillway.torch._staged.flow.lane_of", lambda device: made)
    yield made
    made.end()


@pytest.mark.parametrize("name", CLASSES)
def test_200_steps_have_the_bits_of_the_class(name):
    ones, theirs, others, ours = both(name, 9000)
    for step in range(200):
        # Parameters without a gradient in some steps, and one that gets its first one late.
        without = {2} if step % 5 == 3 else {1} if step < 4 else set()
        for params, optimizer in ((ones, theirs), (others, ours)):
            gradients(params, step, without)
            optimizer.step()
        assert same(ones, others), step
    assert same(theirs.state_dict(), ours.state_dict())


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("bound", BOUNDS)
def test_late_copies_have_the_bits_of_the_class(name, bound, lane):
    ones, theirs, others, ours = both(name, bound)
    for step in range(12):
        for params, optimizer in ((ones, theirs), (others, ours)):
            gradients(params, step, {2} if step % 5 == 3 else set())
            optimizer.step()
        assert same(ones, others), step
    assert same(theirs.state_dict(), ours.state_dict())


def test_the_device_holds_two_chunks_and_the_host_waits_once_for_each(lane):
    params = parameters(shapes=[(50, 40)] * 8)
    # Two states of 8,000 bytes, and a step count, of each parameter: two of them are a chunk.
    optimizer = Staged(optim.AdamW, params, chunk_bytes=2 * 16_192, foreach=True)
    for step in range(3):
        lane.log.clear()
        gradients(params, step)
        optimizer.step()
    memory, sizes = optimizer.memory(), 2 * 2 * 8000
    assert memory.chunks == 4 and memory.states == 8 * 16_004 == memory.host - 8 * 60
    assert sizes < lane.most <= 2 * memory.largest and memory.largest == 2 * 16_064
    assert sizes < memory.device <= 2 * memory.largest
    assert lane.log.count("wait") == lane.log.count("fetch") == 4
    # The first chunk leaves, and the second one comes before the host waits for the first.
    assert lane.log[:7] == ["fetch", "arrive", "flush", "fetch", "arrive", "flush", "wait"]


def test_copies_of_a_device_wait_for_what_they_need_and_no_more(monkeypatch):
    class Awaited(Stream):
        synchronized = 0

        def synchronize(self):
            self.synchronized += 1

    program, recorded = Awaited(), []
    monkeypatch.setattr(torch, "Stream", Awaited)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: program)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append((tensor, stream)))
    lane, hosts = DeviceLane(torch.device("cpu")), [torch.ones(3), torch.ones(2, 2, dtype=torch.int8)]
    made, event = lane.fetch([Leaf.of(host) for host in hosts], hosts)
    # The memory of a fetch has no earlier use for which it had to wait.
    assert same(made, hosts) and event == ("event of", lane._in) and not lane._in.waits_for and lane._in is not lane._out
    lane.arrive(event)
    assert program.waits_for == [event]
    back = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int8)]
    assert lane.flush(back, made) == ("event of", lane._out) and lane._out.waits_for == [program] and same(back, hosts)
    lane.replaced(made[:1])
    assert recorded == [(made[0], program)]
    lane.wait(program)
    lane.synchronize()
    assert (program.synchronized, lane._in.synchronized, lane._out.synchronized) == (2, 1, 1)


def test_state_dicts_load_in_both_directions():
    for name in CLASSES:
        ones, theirs, others, ours = both(name, 9000)
        for step in range(6):
            gradients(ones, step)
            theirs.step()
        with torch.no_grad():
            for one, other in zip(ones, others, strict=True):
                other.copy_(one)
        ours.load_state_dict(theirs.state_dict())
        assert same(theirs.state_dict(), ours.state_dict()), name
        for step in range(6, 9):
            for params, optimizer in ((ones, theirs), (others, ours)):
                gradients(params, step)
                optimizer.step()
        assert same(ones, others), name
        back, fresh = both(name, 1)[:2]
        with torch.no_grad():
            for one, other in zip(others, back, strict=True):
                other.copy_(one)
        # The class takes over the tensors, and writes to them.
        fresh.load_state_dict(copy.deepcopy(ours.state_dict()))
        for params, optimizer in ((back, fresh), (others, ours)):
            gradients(params, 20)
            optimizer.step()
        assert same(back, others) and same(fresh.state_dict(), ours.state_dict()), name


def test_a_state_dict_that_the_class_refuses_changes_nothing():
    ones, theirs, others, ours = both("sgd", 1)
    for params, optimizer in ((ones, theirs), (others, ours)):
        gradients(params, 0)
        optimizer.step()
    before, groups = ours.state_dict(), copy.deepcopy(ours.param_groups)
    broken = theirs.state_dict()
    broken["param_groups"][0]["lr"] = 5.0
    broken["state"][4] = {"momentum_buffer": torch.zeros(33).to_sparse()}
    with pytest.raises(UnsupportedError, match=r"\['params'\]\[4\].*no plain memory"):
        ours.load_state_dict(broken)
    with pytest.raises(ValueError, match="doesn't match the size"):
        ours.load_state_dict({"state": {}, "param_groups": [{**broken["param_groups"][0], "params": [0]}]})
    with pytest.raises(InvalidArgumentError, match="state of 77, which none of its groups names"):
        ours.load_state_dict({**theirs.state_dict(), "state": {77: {}}})
    assert same(ours.state_dict(), before) and same(ours.param_groups, groups)


def test_a_load_that_was_interrupted_is_made_again():
    ones, theirs, others, ours = both("nadam", 1)
    for params, optimizer in ((ones, theirs), (others, ours)):
        gradients(params, 0)
        optimizer.step()
    saved = copy.deepcopy(theirs.state_dict())
    keep, left = ours._flow._keep, [3]

    def interrupted(entries):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        keep(entries)

    ours._flow._keep = interrupted
    with pytest.raises(KeyboardInterrupt):
        ours.load_state_dict(saved)
    for call in (ours.step, ours.state_dict):
        with pytest.raises(OutOfOrderError, match="a load was interrupted.*load the state dict again"):
            call()
    ours.load_state_dict(saved)
    for params, optimizer in ((ones, theirs), (others, ours)):
        gradients(params, 1)
        optimizer.step()
    assert same(ones, others) and same(theirs.state_dict(), ours.state_dict())


def test_groups_schedules_closures_and_hooks_are_those_of_a_torch_optimizer():
    runs = []
    for staged in (False, True):
        params, calls = parameters(), []
        groups = [{"params": params[:2], "lr": 0.05}, {"params": params[2:4]}]
        optimizer = Staged(optim.NAdam, groups, chunk_bytes=9000, lr=0.01) if staged else optim.NAdam(groups, lr=0.01)
        schedule = optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.02], total_steps=30)
        optimizer.register_step_pre_hook(lambda own, args, kwargs, calls=calls: calls.append(type(own).__name__[:0] + "pre"))
        optimizer.register_step_post_hook(lambda own, args, kwargs, calls=calls: calls.append("post"))
        losses = []
        for step in range(10):
            if step == 4:
                optimizer.add_param_group({"params": params[4:], "weight_decay": 0.3, "initial_lr": 0.01, "max_lr": 0.02, "min_lr": 1e-5})
                schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            if step == 7:
                optimizer.param_groups[1]["betas"] = (0.8, 0.9)
                params[0].requires_grad_(False)

            def closure(params=params, step=step, optimizer=optimizer):
                optimizer.zero_grad()
                assert torch.is_grad_enabled()
                gradients(params, step, {0} if step >= 7 else set())
                return sum(param.sum() for param in params)

            losses.append(optimizer.step(closure).detach())
            schedule.step()
        runs.append((params, losses, calls, optimizer.state_dict(), [group["lr"] for group in optimizer.param_groups]))
    assert same(runs[0], runs[1]) and runs[1][2] == ["pre", "post"] * 10


def test_hooks_of_state_dicts_are_called_as_torch_calls_them():
    runs = []
    for staged in (False, True):
        params, calls = parameters(), []
        optimizer = Staged(optim.NAdam, params) if staged else optim.NAdam(params)
        gradients(params, 0)
        optimizer.step()
        optimizer.register_state_dict_pre_hook(lambda own, calls=calls: calls.append("before"))
        optimizer.register_state_dict_post_hook(lambda own, saved, calls=calls: {**saved, "more": calls.append("after")})
        optimizer.register_load_state_dict_pre_hook(lambda own, loaded, calls=calls: {**loaded, "state": {0: loaded["state"][0]}})
        optimizer.register_load_state_dict_post_hook(lambda own, calls=calls: calls.append(len(own.state)))
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        gradients(params, 1)
        optimizer.step()
        runs.append((params, calls, optimizer.state_dict()))
    assert same(runs[0], runs[1]) and runs[1][1] == ["before", "after", 1, "before", "after"]


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_scales_and_skips_as_with_the_class(fused):
    runs = []
    for staged in (False, True):
        params = parameters()
        optimizer = Staged(optim.AdamW, params, chunk_bytes=9000, fused=fused) if staged else optim.AdamW(params, fused=fused)
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2), []
        for step in range(6):
            optimizer.zero_grad()
            loss = sum(((param + step) ** 2).sum() for param in params)
            if step == 3:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        runs.append((params, scales, optimizer.state_dict()))
    assert same(runs[0], runs[1]) and runs[1][1][3] < runs[1][1][2]


def test_options_and_attributes_that_the_class_counts_in_count_once_a_step():
    ones, theirs, others, ours = both("soap", 1)
    for step in range(5):
        for params, optimizer in ((ones, theirs), (others, ours)):
            gradients(params, step)
            optimizer.step()
    assert ours.memory().chunks > 3
    assert ours.param_groups[0]["calls"] == theirs.param_groups[0]["calls"] == ours._inner.optimizer.steps == theirs.steps == 5


def test_a_class_counts_in_groups_without_gradients_too():
    runs = []
    for staged in (False, True):
        params = parameters()
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        optimizer = Staged(Soap, groups, chunk_bytes=1) if staged else Soap(groups)
        for step in range(6):
            gradients(params, step, {0, 1} if step % 2 else range(6) if step == 4 else ())
            optimizer.step()
        runs.append((params, optimizer.state_dict(), [group["calls"] for group in optimizer.param_groups]))
    assert same(runs[0], runs[1]) and runs[1][2] == [6, 6]


def test_random_programs_have_the_bits_of_the_class():
    assert [text for seed in range(80) if (text := staged_programs.failure(seed))] == []


def test_a_state_may_be_deleted_and_given():
    ones, theirs, others, ours = both("nadam", 1 << 20)
    for step in range(6):
        given = copy.deepcopy(theirs.state[ones[0]]) if step == 3 else {}
        for params, optimizer in ((ones, theirs), (others, ours)):
            gradients(params, step)
            if step == 2:
                del optimizer.state[params[1]]
            if step == 3:
                optimizer.state[params[0]] = {**copy.deepcopy(given), "step": torch.tensor(9.0)}
            if step == 4:
                optimizer.state.clear()
            optimizer.step()
        assert same(ones, others), step
    assert same(theirs.state_dict(), ours.state_dict())
    with pytest.raises(InvalidArgumentError, match=r"state_dict\(\)"):
        ours.state[others[0]]["exp_avg"]
    assert "exp_avg" in ours.state[others[0]] and len(ours.state) == len(others)
    ours.state["other"] = {}
    with pytest.raises(InvalidArgumentError, match="no parameter of the groups"):
        ours.step()


def test_states_with_other_strides_and_dtypes_keep_them():
    runs = []
    for staged in (False, True):
        params = [
            torch.nn.Parameter(torch.randn(4, 3, 5, 6, generator=torch.Generator().manual_seed(1)).to(memory_format=torch.channels_last))
        ]
        params += [torch.nn.Parameter(torch.ones(9, dtype=torch.bfloat16)), torch.nn.Parameter(torch.ones(7, dtype=torch.complex64))]
        params.append(torch.nn.Parameter(torch.ones(6, 4, dtype=torch.float64).t()))
        optimizer = Staged(optim.Adam, params, chunk_bytes=1) if staged else optim.Adam(params)
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
            optimizer.step()
        runs.append((params, optimizer.state_dict()))
    assert same(runs[0], runs[1])


def test_a_failed_step_leaves_whole_chunks(lane):
    """The class raises at the third chunk: two are stepped, and the others have their states of before."""

    class Fails(optim.SGD):
        at = None

        @torch.no_grad()
        def step(self, closure=None):
            if any(param is self.at for group in self.param_groups for param in group["params"]):
                raise RuntimeError("the third chunk")
            super().step()

    params, twins = parameters(), parameters()
    optimizer, theirs = Staged(Fails, params, chunk_bytes=1, lr=0.1, momentum=0.9), optim.SGD(twins, lr=0.1, momentum=0.9)
    gradients(params, 0)
    gradients(twins, 0)
    optimizer.step()
    theirs.step()
    before = [param.detach().clone() for param in params]
    gradients(params, 1)
    gradients(twins, 1)
    theirs.step()
    try:
        Fails.at = params[2]
        states = optimizer.state_dict()["state"]
        lane.log.clear()
        with pytest.raises(RuntimeError, match="the third chunk"):
            optimizer.step()
        # The memory of the third chunk is free after what the class has begun there. The second one leaves.
        assert lane.log[-4:] == ["fetch", "arrive", "synchronize", "wait"] and lane.log.count("flush") == 2
    finally:
        Fails.at = None
    stepped, after = theirs.state_dict()["state"], optimizer.state_dict()["state"]
    for number, param in enumerate(params):
        assert same(param.detach(), twins[number].detach() if number < 2 else before[number])
        assert same(after[number], stepped[number] if number < 2 else states[number])
    # The next step steps the others.
    for param in params[:2]:
        param.grad = None
    optimizer.step()
    assert same(params, twins) and same(optimizer.state_dict()["state"], stepped)


def test_a_refused_state_leaves_the_numbers_of_its_chunk():
    """The second parameter of a chunk gets a state that is refused: the step count of the first one, a number, stays with its tensors."""

    class Counts(optim.Optimizer):
        refused = None

        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                state = self.state[param]
                state["step"], state["sum"] = state.get("step", 0) + 1, state.get("sum", torch.zeros_like(param)) + param.grad
                if param is self.refused:
                    state["own"] = param.detach()

    params = parameters()
    optimizer = Staged(Counts, params)
    gradients(params, 0)
    optimizer.step()
    before = optimizer.state_dict()
    Counts.refused = params[1]
    with pytest.raises(UnsupportedError, match="share memory"):
        optimizer.step()
    assert optimizer.memory().chunks == 1 and same(optimizer.state_dict(), before)


def test_a_write_to_a_state_dict_is_refused_until_it_is_loaded():
    params = parameters()
    optimizer = Staged(optim.NAdam, params)
    gradients(params, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"].zero_()
    with pytest.raises(InvalidArgumentError, match="a state of .*was written to in a state dict"):
        optimizer.step()
    optimizer.load_state_dict(saved)
    optimizer.step()


def test_two_in_a_process_and_no_copies():
    pairs = [both("nadam", 1), both("soap", 9000)]
    for step in range(5):
        for ones, theirs, others, ours in pairs:
            for params, optimizer in ((ones, theirs), (others, ours)):
                gradients(params, step)
                optimizer.step()
    assert all(same(ones, others) for ones, _, others, _ in pairs)
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        for what in (pairs[0][3], pairs[0][3].state[pairs[0][2][0]]):
            with pytest.raises(TypeError, match=r"state_dict\(\)"):
                call(what)
    told = repr(pairs[0][3])
    assert told.startswith("Staged (\n    cls: NAdam\n    chunk_bytes: 1\nParameter Group 0") and isinstance(pairs[0][3], optim.Optimizer)


def test_states_of_torchao_keep_their_classes():
    torchao = pytest.importorskip("torchao.optim")
    ones, others = (parameters(shapes=[(64, 128), (32,), (128, 64)]) for _ in range(2))
    theirs, ours = torchao.AdamW8bit(ones, lr=1e-2), Staged(torchao.AdamW8bit, others, chunk_bytes=20_000, lr=1e-2)
    for step in range(200):
        for params, optimizer in ((ones, theirs), (others, ours)):
            gradients(params, step)
            optimizer.step()
        assert same(ones, others), step
    saved = ours.state_dict()
    assert same(theirs.state_dict(), saved) and type(saved["state"][0]["exp_avg"]).__name__ == "OptimState8bit"
    ours.load_state_dict(theirs.state_dict())
    assert same(theirs.state_dict(), ours.state_dict())


@pytest.mark.parametrize("on_tier", [False, True])
def test_a_thread_that_reads_states_changes_no_bits_and_sees_whole_steps(on_tier, tmp_path):
    ones, others = parameters(), parameters()
    theirs = optim.NAdam(ones)
    ours = Staged(optim.NAdam, others, chunk_bytes=600, tier=str(tmp_path) if on_tier else None)
    read, failed, stop = [], [], threading.Event()

    def reads():
        try:
            while not stop.is_set():
                read.append({float(state["step"]) for state in ours.state_dict()["state"].values()})
        except Exception as error:
            failed.append(error)

    reader = threading.Thread(target=reads)
    reader.start()
    for step in range(60):
        for params, optimizer in ((ones, theirs), (others, ours)):
            gradients(params, step)
            optimizer.step()
    stop.set()
    reader.join()
    ours.close()
    assert not failed and same(ones, others)
    assert read and all(len(steps) <= 1 for steps in read)


def test_the_entry_of_another_parameter_is_refused_and_nothing_is_lost():
    params = parameters()
    optimizer = Staged(optim.SGD, params, lr=0.1, momentum=0.9)
    gradients(params, 0)
    optimizer.step()
    before = optimizer.state_dict()
    one, other = params[:2]
    optimizer.state[one], optimizer.state[other] = optimizer.state[other], optimizer.state[one]
    gradients(params, 1)
    with pytest.raises(InvalidArgumentError, match="set a dict with the states"):
        optimizer.step()
    optimizer.state[one], optimizer.state[other] = optimizer.state[other], optimizer.state[one]
    assert same(before, optimizer.state_dict())
    for change in (lambda state: state.__setitem__("momentum_buffer", one), lambda state: state.__delitem__("momentum_buffer")):
        with pytest.raises(InvalidArgumentError, match="load_state_dict"):
            change(optimizer.state[one])


def test_a_class_that_rounds_by_the_numbers_of_its_parameters_is_refused():
    with pytest.raises(UnsupportedError, match="rounds moments at random"):
        Staged(AdamW, parameters(), moment_dtype="int8")
    ones, others = parameters(), parameters()
    theirs = AdamW(ones, moment_dtype="int8", moment_rounding="nearest")
    ours = Staged(AdamW, others, chunk_bytes=600, moment_dtype="int8", moment_rounding="nearest")
    for step in range(5):
        for params, optimizer in ((ones, theirs), (others, ours)):
            gradients(params, step)
            optimizer.step()
    assert same(ones, others)
