"""spillway.torch.offload, if a step is interrupted, fails, or is the last one."""

import gc
import itertools
import os
import random
import time
import weakref

import pytest
import torch
from interrupts import Interrupt, OwnInterrupt, Ticking, interrupted, interrupted_in
from offload_runs import Later, backward, offload, trained, values

import spillway
import spillway.torch
from spillway.torch._offload import bucket as bucket_module
from spillway.torch._offload import plan as offload_plan
from spillway.torch._offload import slot as slot_module


def test_an_error_of_the_engine_is_raised_once():
    for broken in ("local_result", "finish"):
        params = [torch.nn.Parameter(torch.ones(5)) for _ in range(3)]
        optimizer = offload(params, lr=0.1, max_norm=1.0, bucket_bytes=1)
        backward(params)
        optimizer.step()
        before, step = values(params), getattr(spillway.Speculation, broken)
        with pytest.MonkeyPatch.context() as patch:

            def failed(self, *arguments, step=step, **options):
                step(self, *arguments, **options)
                raise spillway.SpillwayError("a bucket failed")

            patch.setattr(spillway.Speculation, broken, failed)
            with pytest.raises(spillway.SpillwayError, match="a bucket failed"):
                optimizer.step()
        assert broken == "finish" or all(map(torch.equal, values(params), before))
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        assert not any(map(torch.equal, values(params), before))
        optimizer.close()


@pytest.mark.parametrize(("weights", "error"), [("resident", Interrupt), ("flow", Interrupt), ("resident", OwnInterrupt)])
def test_backward_raises_the_exception_of_a_handler_and_the_next_step_has_its_bits(weights, error):
    """A handler raises at the begin of each function of the package that a backward calls. No exception is lost."""

    def make(weights):
        torch.manual_seed(7)
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)))
        flowing = {} if weights == "resident" else {"weights": weights, "device": "cpu"}
        return model, spillway.torch.offload(model, lr=1e-2, bucket_bytes=1, overlap=True, **flowing)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()

    (model, optimizer), (other, wanted) = make(weights), make("resident")
    for at in range(5000):
        step(model, optimizer)
        step(other, wanted)
        optimizer.settle()
        assert all(map(torch.equal, model.parameters(), other.parameters())), at
        optimizer.zero_grad()
        if not interrupted(model(torch.ones(2, 4)).square().mean().backward, at, below=True, error=error):
            break
    # The last backward ended before that function: each one was tried.
    assert 100 < at < 4999
    optimizer.close()
    wanted.close()


@pytest.mark.parametrize("kind", ["memory", "tier", "step", "forward", "flow"])
def test_gradients_are_on_after_an_interrupt_at_each_place_of_torchs_own_guards(kind, tmp_path):
    """A handler raises at the begin of each function of torch.no_grad(), and after each C function that it calls."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)))
    if kind in ("memory", "tier"):
        tier = {} if kind == "memory" else {"tier": spillway.torch.TierOptions([tmp_path], job="test")}
        optimizer = spillway.torch.AdamW(model.parameters(), lr=1e-2, max_norm=1.0, **tier)
    else:
        kinds = {"flow": {"weights": "flow", "device": "cpu"}, "forward": {"verdict": "forward"}, "step": {}}
        optimizer = spillway.torch.offload(model, lr=1e-2, bucket_bytes=1, max_norm=1.0, **kinds[kind])

    def step():
        optimizer.step()
        # A forward completes the step.
        model(torch.ones(2, 4))
        optimizer.state_dict()

    at, raised = 0, True
    while raised:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        raised = interrupted_in(step, at, os.path.join(os.path.dirname(torch.__file__), "autograd"))
        assert torch.is_grad_enabled(), at
        at += 1
    # Each place was tried.
    assert at > 4
    optimizer.close()


@pytest.mark.parametrize("tail", range(4))
def test_weights_that_a_program_writes_after_an_interrupted_step_stay(tail):
    params = [torch.nn.Parameter(torch.ones(5)) for _ in range(3)]
    optimizer = offload(params, lr=0.1, bucket_bytes=1, tail=tail)
    backward(params)
    optimizer.step()
    publish, published = bucket_module.Bucket.publish, []

    def interrupted(self, *given):
        if len(published) == 1:
            raise KeyboardInterrupt
        published.append(publish(self, *given))

    backward(params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket_module.Bucket, "publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    with torch.no_grad():
        params[1].fill_(7.0)
    optimizer.state_dict()
    assert torch.equal(params[1], torch.full((5,), 7.0)) and torch.equal(params[0], params[2]) and params[0].lt(0.85).all()
    optimizer.zero_grad()
    params[1].sum().backward()
    optimizer.step()
    assert params[1].lt(7.0).all() and params[1].gt(6.5).all()


@pytest.mark.parametrize("times", [1, 2])
def test_no_backward_completes_a_step_that_an_exception_interrupted(times):
    """step() completes it while the exception passes; if that is interrupted too, the next backward is an error that says what to do."""

    def trained(interrupted):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        optimizer = offload(model, lr=0.1, max_norm=1.0, bucket_bytes=1)
        calls, publish = iter(range(times)), bucket_module.Bucket.publish

        def raises(bucket, *given):
            places = publish(bucket, *given)
            if next(calls, None) is not None:
                raise KeyboardInterrupt
            return places

        for step in range(3):
            model(torch.ones(2, 4)).square().mean().backward()
            if interrupted and step == 1:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(bucket_module.Bucket, "publish", raises)
                    with pytest.raises(KeyboardInterrupt):
                        optimizer.step()
                if times == 2:
                    optimizer.zero_grad()
                    with pytest.raises(spillway.OutOfOrderError, match="an exception has interrupted the last step.*optimizer.settle"):
                        model(torch.ones(2, 4)).square().mean().backward()
                    optimizer.settle()
            else:
                optimizer.step()
            optimizer.zero_grad()
        return values(model.parameters())

    assert all(map(torch.equal, trained(False), trained(True)))


def test_a_closed_optimizer_has_completed_the_step_whose_verdict_was_known():
    whole = [torch.nn.Parameter(torch.ones(5)) for _ in range(3)]
    closed = [torch.nn.Parameter(torch.ones(5)) for _ in range(3)]
    for params in (whole, closed):
        optimizer = offload(params, lr=0.1, bucket_bytes=1)
        backward(params)
        if params is closed:
            with pytest.MonkeyPatch.context() as patch:

                def interrupt(*_):
                    raise KeyboardInterrupt

                patch.setattr(offload_plan.Plan, "complete", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
        else:
            optimizer.step()
        optimizer.close()
    assert all(map(torch.equal, whole, closed))


def test_an_optimizer_that_is_dropped_leaves_no_hook_and_no_memory():
    model = torch.nn.Linear(2, 2)
    optimizer = offload(model)
    optimizer.close()
    assert all(not param._post_accumulate_grad_hooks for param in model.parameters())
    other = offload(model)
    memory = [weakref.ref(slot) for slot in other._slots.values()]
    model(torch.ones(1, 2)).sum().backward()
    other.step()
    del other
    gc.collect()
    assert len(memory) == 2 and not any(slot() for slot in memory)
    model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize(("tail", "apart"), [(0, False), (4, False), (12, False), (0, True)])
@pytest.mark.parametrize("verdict", ["step", "forward"])
def test_a_step_that_a_signal_interrupts_happens_or_does_not(verdict, tail, apart, monkeypatch):
    """A handler raises at a random moment of backward or step. Afterwards weights and states are those of the counted number of steps.
    `apart`: the parameters are on a stand-in for a device, with second copies of weights."""
    if apart:
        link = Later(room=True)
        monkeypatch.setattr(slot_module, "link_to", lambda param: link)

    def gradients(model, step):
        torch.manual_seed(step)
        model(torch.randn(4, 32)).square().mean().backward()

    def make():
        torch.manual_seed(7)
        model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)))
        max_norm = 100.0 if apart else 0.05
        return model, offload(model, lr=1e-2, max_norm=max_norm, bucket_bytes=1, verdict=verdict, tail=tail)

    steps = 15
    model, optimizer = make()
    after = [[p.detach().clone() for p in model.parameters()]]
    begun = time.perf_counter()
    for step in range(steps):
        gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.settle()
        after.append([p.detach().clone() for p in model.parameters()])

    duration = (time.perf_counter() - begun) / steps

    model, optimizer = make()
    chance, done = random.Random(1), 0

    def step():
        gradients(model, done)
        optimizer.step()

    with Ticking() as ticking:
        for attempt in itertools.count():
            if done == steps:
                break
            optimizer.zero_grad()
            begun, seen = time.perf_counter(), ticking.count
            # Every second attempt is left alone, so that a slow machine gets on.
            ticking.during(step, after=chance.uniform(1e-6, duration)) if attempt % 2 else step()
            if ticking.count == seen:
                # Other work on the machine may end meanwhile.
                duration = min(duration, time.perf_counter() - begun)
            # torch may leave gradients off if `no_grad` ends by an exception of a handler.
            torch.set_grad_enabled(True)
            counts = {int(state["step"]) for state in optimizer.state.values()} or {0}
            assert len(counts) == 1 and counts <= {done, done + 1}, counts
            done = counts.pop()
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), after[done])), done
    assert ticking.count > 1 and (not apart or link.placed)


def test_parameters_without_elements_and_a_closed_optimizer():
    params, optimizer = trained((0, 4), 3, ())
    assert int(optimizer.state[params[0]]["step"]) == 2
    optimizer.close()
    with pytest.raises(spillway.InvalidArgumentError, match="closed"):
        optimizer.step()


@pytest.mark.parametrize("after", range(8))
def test_an_interrupted_change_of_states_is_done_again(monkeypatch, after):
    """A signal handler may raise while a step takes over the memory or the states of a parameter: here at a call of `local`."""
    use, local = slot_module.Slot.use, slot_module.local

    def interrupted_use(slot, state):
        calls = iter(range(after))

        def raises(tensor):
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return local(tensor)

        monkeypatch.setattr(slot_module, "local", raises)
        try:
            use(slot, state)
        finally:
            monkeypatch.setattr(slot_module, "local", local)

    def run(interrupted):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4, bias=False)
        optimizer = spillway.torch.offload(model, lr=0.1, overlap=False)

        def step():
            model.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            if interrupted:
                monkeypatch.setattr(slot_module.Slot, "use", interrupted_use)
                try:
                    return optimizer.step()
                except KeyboardInterrupt:
                    pass
                finally:
                    monkeypatch.setattr(slot_module.Slot, "use", use)
            optimizer.step()

        step()
        loaded = optimizer.state_dict()
        for state in loaded["state"].values():
            state["exp_avg"].fill_(5.0)
            state["step"].fill_(7.0)
        optimizer.load_state_dict(loaded)
        step()
        return [model.weight.detach(), *(state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq", "step"))]

    assert all(map(torch.equal, run(False), run(True)))
