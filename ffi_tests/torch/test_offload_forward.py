"""spillway.torch.offload with the verdict in the next forward."""

import concurrent.futures
import copy
import gc
import math
import pickle
import weakref

import pytest
import torch
from offload_runs import BUCKETS, Later, offload, offloaded, same, training, values

import spillway
import spillway.torch
from spillway.torch._offload.plan import Plan

#: Random trainings with the verdict in the next forward.
TRAININGS = 100


@pytest.mark.sampled(cases=8)
@pytest.mark.parametrize("seed", range(100, 100 + TRAININGS))
def test_a_verdict_in_the_next_forward_gives_the_bits_of_one_in_step(seed, monkeypatch):
    bucket = BUCKETS[seed % 3]
    waits = training(seed, offloaded(bucket_bytes=bucket, overlap=False))
    if seed % 4 == 1:
        link = Later()
        monkeypatch.setattr("spillway.torch._offload.slot.link_to", lambda param: link)
    same(training(seed, offloaded("forward", bucket_bytes=bucket, overlap=seed % 4 < 3)), waits)


def waiting():
    """A model whose step waits for its next forward, its weights before the step, and those after it."""
    results = []
    for verdict in ("step", "forward"):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
        params = [*model.parameters()]
        before = values(params)
        optimizer = offload(model, lr=0.1, max_norm=0.1, bucket_bytes=1, verdict=verdict)
        model(torch.randn(5, 4)).square().sum().backward()
        with pytest.MonkeyPatch.context() as patch:
            if verdict == "forward":
                # step() waits for nothing.
                patch.delattr(spillway.Speculation, "local_result")
                patch.delattr(spillway.Speculation, "wait")
            optimizer.step()
        # Neither reads parameters.
        optimizer.zero_grad()
        model.zero_grad()
        results.append(values(params))
    assert all(map(torch.equal, before, results[1])) and not any(map(torch.equal, before, results[0]))
    return model, optimizer, results[0]


@pytest.mark.parametrize(
    "use",
    [
        lambda model, optimizer: model(torch.ones(2, 4)),
        lambda model, optimizer: model[2](torch.ones(2, 4)),
        lambda model, optimizer: model.state_dict(),
        lambda model, optimizer: model.load_state_dict({}, strict=False),
        lambda model, optimizer: optimizer.state_dict(),
        lambda model, optimizer: optimizer.state,
        lambda model, optimizer: optimizer.grad_norm,
        lambda model, optimizer: optimizer.skipped,
        lambda model, optimizer: optimizer.settle(),
        lambda model, optimizer: (optimizer.step(), optimizer.settle()),
        lambda model, optimizer: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]}),
        lambda model, optimizer: optimizer.close(),
        lambda model, optimizer: model.eval()(torch.ones(2, 4)),
        lambda model, optimizer: model.forward(torch.ones(2, 4)),
        lambda model, optimizer: model[0].forward(torch.ones(2, 4)),
        lambda model, optimizer: model[0].state_dict(),
        lambda model, optimizer: model[0].load_state_dict({}, strict=False),
        lambda model, optimizer: torch.nn.Sequential(model).load_state_dict({}, strict=False),
        lambda model, optimizer: torch.nn.Sequential(model).state_dict(),
        lambda model, optimizer: next(model.parameters()),
        lambda model, optimizer: next(model[2].parameters(recurse=False)),
        lambda model, optimizer: next(torch.nn.Sequential(model).parameters()),
        lambda model, optimizer: torch.nn.Sequential(*model)(torch.ones(2, 4)),
        lambda model, optimizer: torch.optim.swa_utils.AveragedModel(torch.nn.Sequential(model)),
        lambda model, optimizer: copy.deepcopy(model),
        lambda model, optimizer: copy.deepcopy([model[2]]),
        lambda model, optimizer: pickle.dumps(torch.nn.Sequential(model)),
        lambda model, optimizer: model.to("cpu"),
        lambda model, optimizer: model[0].weight,
        lambda model, optimizer: dict(model[0]._parameters),
        lambda model, optimizer: torch.nn.functional.linear(torch.ones(2, 4), model[0].weight),
        lambda model, optimizer: torch.nn.Linear.forward(model[0], torch.ones(2, 4)),
        lambda model, optimizer: setattr(model[0], "bias", torch.nn.Parameter(torch.ones(4))),
        lambda model, optimizer: torch.nn.utils.parameters_to_vector(model.parameters()),
        lambda model, optimizer: torch.func.functional_call(model, {}, (torch.ones(2, 4),)),
        lambda model, optimizer: torch.jit.trace(model.eval(), torch.ones(2, 4)),
        lambda model, optimizer: torch.export.export(model.eval(), (torch.ones(2, 4),), strict=False),
    ],
)
def test_whatever_uses_a_step_completes_it(use):
    model, optimizer, after = waiting()
    params = [*optimizer.param_groups[0]["params"]]
    use(model, optimizer)
    assert all(map(torch.equal, params, after))
    for part in (model, *model):
        assert type(part._parameters) is dict and (part is model or "forward" not in part.__dict__)
    assert not any(part._forward_pre_hooks for part in model), "hooks of the parts are there while a step waits"


def test_a_step_that_waits_keeps_its_optimizer_and_a_copy_of_the_model_does_not():
    model, optimizer, after = waiting()
    kept, params = weakref.ref(optimizer), optimizer.param_groups[0]["params"]
    del optimizer
    gc.collect()
    assert kept() is not None and not any(map(torch.equal, params, after))
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    gc.collect()
    assert kept() is None and all(map(torch.equal, params, after)) and not model._forward_pre_hooks
    assert all(map(torch.equal, other.parameters(), after)) and type(other[0]._parameters) is dict
    other(torch.ones(2, 4))


def test_a_write_to_a_parameter_whose_step_waits_is_an_error():
    model, optimizer, _ = waiting()
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].zero_()
    with pytest.raises(spillway.InvalidArgumentError, match="parameter 0 was written to after step.*optimizer.settle"):
        model(torch.ones(2, 4))
    # Nothing was stepped, and the value of the program stays.
    assert not optimizer.state_dict()["state"][0]["step"] and not model[0].weight.any()
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    optimizer.settle()
    assert int(optimizer.state[model[0].weight]["step"]) == 1


def test_a_backward_of_a_forward_before_the_step_is_torchs_error():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = offload(model, verdict="forward")
    losses = [model(torch.randn(2, 4)).sum() for _ in range(2)]
    losses[0].backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[1].backward()


def test_a_refused_step_is_an_error_of_the_next_forward():
    model, optimizer, after = waiting()
    loss = model(torch.randn(5, 4)).sum()
    (loss * math.nan).backward()
    optimizer.step()
    with pytest.raises(spillway.InvalidArgumentError, match="has Inf or NaN; nothing was stepped"):
        model(torch.ones(2, 4))
    assert all(map(torch.equal, model.parameters(), after)) and {int(state["step"]) for state in optimizer.state.values()} == {1}


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_compiled_once():
    losses = []
    for verdict in ("step", "forward"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 4))
        optimizer = offload(model, lr=0.1, max_norm=0.1, verdict=verdict)
        graphs = []

        def keep(graph, _, graphs=graphs):
            graphs.append(graph)
            return graph

        compiled = torch.compile(model, backend=keep)
        for _ in range(12):
            loss = compiled(torch.randn(5, 4)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert len(graphs) == 1
    assert losses[:12] == losses[12:] and losses[11] < losses[0]


def test_forwards_of_several_threads_complete_one_step():
    for _ in range(30):
        model = torch.nn.Linear(50, 50)
        optimizer = spillway.torch.offload(model, lr=0.1, max_norm=1.0, verdict="forward")
        model(torch.ones(2, 50)).sum().backward()
        optimizer.step()
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            list(pool.map(model, [torch.ones(2, 50)] * 3))
        optimizer.close()


def test_a_model_that_is_dropped_while_a_step_waits_leaves_no_memory():
    def of_model():
        model = torch.nn.Linear(50, 50)
        optimizer = spillway.torch.offload(model, lr=0.1, max_norm=1.0, verdict="forward")
        model(torch.ones(2, 50)).sum().backward()
        optimizer.step()
        return [*map(weakref.ref, (model, optimizer, model.weight))]

    kept = of_model()
    gc.collect()
    assert not any(one() for one in kept)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["written", "measured", "resolve", "_give", "finish", "complete", "begin"])
def test_a_signal_in_the_completion_of_a_step_leaves_the_rest_to_the_next_forward(name, when, monkeypatch):
    class Interrupt(Exception):
        pass

    def trained(interrupts):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
        optimizer = offload(model, lr=0.1, max_norm=0.1, bucket_bytes=1, verdict="forward")
        for step in range(3):
            if interrupts and step == 2:
                with pytest.MonkeyPatch.context() as patch:
                    call = getattr(Plan, name)

                    def interrupted(self, *arguments):
                        if when == "before":
                            raise Interrupt
                        call(self, *arguments)
                        raise Interrupt

                    patch.setattr(Plan, name, interrupted)
                    with pytest.raises(Interrupt):
                        model(torch.ones(2, 8))
            model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.settle()
        counts = {int(state["step"]) for state in optimizer.state.values()}
        return [p.detach().clone() for p in model.parameters()], counts, optimizer.grad_norm

    (plain, *rest), (others, *other_rest) = trained(False), trained(True)
    assert all(map(torch.equal, plain, others)) and rest == other_rest


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("tail", [0, 2])
@pytest.mark.parametrize("verdict", ["step", "forward"])
def test_what_a_program_writes_to_a_master_between_steps_counts(verdict, tail, skips):
    """Also after a step that was skipped: no weights were written since, which the master would have to follow."""

    def trained(**options):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).to(torch.bfloat16)
        optimizer = spillway.torch.offload(model, lr=0.01, skip_nonfinite=True, bucket_bytes=1, model=model, **options)
        for step in range(4):
            loss = model(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean()
            (loss * (math.nan if skips and step == 1 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                optimizer.settle()
                with torch.no_grad():
                    for param in model.parameters():
                        optimizer.state[param]["master_param"].mul_(0.5)
        optimizer.settle()
        return values(model.parameters())

    assert all(map(torch.equal, trained(overlap=True, verdict=verdict, tail=tail), trained(overlap=False)))
