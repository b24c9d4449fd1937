"""spillway.torch.Flow: a model whose weights flow to the device has the bits of one that stays there, whatever the order of its parts; no
more than its slots are on the device; every gradient is in host memory when backward returns."""

import concurrent.futures
import copy
import functools
import pickle
import random

import late_streams
import pytest
import torch
from offload_runs import Later
from torch.utils.checkpoint import checkpoint

import spillway
import spillway.torch
from spillway.torch import Flow, _staging
from spillway.torch._offload import flow as flow_module

WIDTH = 16


class Layer(torch.nn.Module):
    """A layer with a parameter that is used by views, one by a derived weight, and a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.direction = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, x, again=None, *, add=None):
        x = torch.tanh(self.linear(x)) * self.scale
        x = x if add is None else x + add
        x = x @ (self.direction / self.direction.norm())
        return {"x": x, "other": (x * 2, 7)}


class Model(torch.nn.Module):
    """Layers in a random order, some used twice, some not, with tied weights at the ends."""

    def __init__(self, layers=5):
        super().__init__()
        self.embed = torch.nn.Embedding(11, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))
        self.head = torch.nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, order, how=""):
        x = self.embed(ids)
        skip = None
        for number in order:
            layer = self.layers[number]
            if how:
                found = checkpoint(layer, x, use_reentrant=how == "reentrant")
            else:
                found = layer(x, add=skip)
            x, skip = found["x"], found["other"][0]
        return self.head(x)


pytestmark = pytest.mark.filterwarnings("ignore:spillway. the system locks no more memory")


def pair(seed=0, layers=5, **options):
    """Two equal models, of which the second flows."""
    torch.manual_seed(seed)
    model = Model(layers)
    other = copy.deepcopy(model)
    return model, other, Flow(other, "cpu", **options)


def bits(tensors):
    return [None if tensor is None else tensor.detach().view(-1).view(torch.uint8).tolist() for tensor in tensors]


def same(model, other):
    assert bits(model.parameters()) == bits(other.parameters())
    assert bits(p.grad for p in model.parameters()) == bits(p.grad for p in other.parameters())


def on_device(flow):
    return sum(weight.on_device.untyped_storage().nbytes() for unit in flow.units for weight in unit.weights)


@pytest.fixture(params=["at once", "later", "staged"])
def copies(request, monkeypatch):
    if request.param == "later":
        monkeypatch.setattr(flow_module, "new_link", lambda device: Later())
    elif request.param == "staged":
        # The system locks blocks of 2 KiB, and nothing else.
        monkeypatch.setattr(_staging, "_MOST", 2048)
        link, _ = late_streams.link(monkeypatch, 1 << 20, 2048)
        monkeypatch.setattr(flow_module, "new_link", lambda device: staged(type(link)(torch.device("cuda", 0))))


def staged(link):
    """A link that has pageable memory."""
    link.memory((1000,), torch.float32)
    return link


@pytest.mark.parametrize("how", ["", "reentrant", "not reentrant"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_random_orders_give_the_bits_of_weights_that_stay(copies, how, slots):
    chance = random.Random(slots)
    model, other, flow = pair(slots=slots)
    whole = max(unit.bytes for unit in flow.units)
    optimizers = [torch.optim.AdamW(own.parameters(), lr=0.01) for own in (model, other)]
    for step in range(8):
        order = chance.choices(range(5), k=chance.randint(1, 7)) if step % 2 else range(5)
        ids = torch.randint(11, (3, 4))
        for _ in range(chance.choice((1, 2))):
            losses = [own(ids, order, how).square().mean() for own in (model, other)]
            assert losses[0].item() == losses[1].item()
            assert on_device(flow) <= slots * whole
            [loss.backward() for loss in losses]
            assert on_device(flow) == 0
        same(model, other)
        for own in optimizers:
            own.step()
            own.zero_grad()
        if chance.random() < 0.3:
            with torch.no_grad(), torch.inference_mode(chance.random() < 0.5):
                assert torch.equal(model(ids, order), other(ids, order))
    same(model, other)
    assert flow.peak_bytes <= (slots if not how else slots + 1) * whole


def test_a_step_fetches_each_layer_for_each_pass_and_begins_before_the_use():
    model, other, flow = pair(slots=2, layers=6)
    whole = flow.units[0].bytes
    for step in range(4):
        fetched, late = flow.fetched_bytes, flow.late
        other(torch.zeros(1, 2, dtype=torch.long), range(6)).sum().backward()
        moved = flow.fetched_bytes - fetched - (flow._rest.bytes if step == 0 else 0)
        # Of the second pass, the layers that the first one used last are there.
        assert moved == (6 + 6 - 2) * whole
        # From the second step on, only the first use of a step has no use before it.
        assert step == 0 or flow.late - late == 1
    assert flow.peak_bytes == 2 * whole


def test_a_layer_that_does_not_wait_for_its_weights_computes_something_else(monkeypatch):
    monkeypatch.setattr(flow_module, "new_link", lambda device: Later())
    monkeypatch.setattr(Later, "wait", lambda self, fence: None)
    # Nothing is freed, so that no copy writes to memory of others.
    model, other, flow = pair(slots=5)
    ids = torch.zeros(1, 2, dtype=torch.long)
    with torch.no_grad():
        assert not torch.equal(other(ids, range(5)), model(ids, range(5)))
    flow._up.fence().synchronize()


def test_the_parameters_of_the_program_are_in_host_memory_outside_of_a_forward():
    model, other, flow = pair()
    inside = []
    other.layers[1].linear.register_forward_hook(lambda module, args, output: inside.append(module.weight))
    params = list(other.parameters())
    other(torch.zeros(1, 2, dtype=torch.long), range(5))
    assert all(mine is own for mine, own in zip(other.parameters(), params))
    assert inside[0] is not other.layers[1].linear.weight and torch.equal(other.layers[1].linear.weight, model.layers[1].linear.weight)


def test_a_state_dict_goes_both_ways():
    model, other, _ = pair()
    assert all(torch.equal(mine, own) for mine, own in zip(model.state_dict().values(), other.state_dict().values()))
    with torch.no_grad():
        [param.add_(1) for param in model.parameters()]
    ids = torch.zeros(1, 2, dtype=torch.long)
    other(ids, range(5))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(ids, range(5)), other(ids, range(5)))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_the_model_is_a_plain_model(how):
    model, other, flow = pair()
    copied = copy.deepcopy(other) if how == "deepcopy" else pickle.loads(pickle.dumps(other))
    ids, fetched = torch.ones(1, 2, dtype=torch.long), flow.fetched_bytes
    assert torch.equal(copied(ids, range(5)), model(ids, range(5))) and flow.fetched_bytes == fetched
    flow.remove()
    assert torch.equal(other(ids, range(5)), model(ids, range(5))) and flow.fetched_bytes == fetched and on_device(flow) == 0


def test_an_error_in_forward_or_backward_leaves_no_layer_in_use(copies):
    model, other, flow = pair()
    ids = torch.ones(1, 2, dtype=torch.long)

    def fails(*_):
        raise ZeroDivisionError

    hook = other.layers[3].linear.register_forward_hook(fails)
    with pytest.raises(ZeroDivisionError):
        other(ids, range(5))
    hook.remove()
    assert not any(unit.users for unit in flow.units)
    hook = other.layers[2].linear.register_full_backward_hook(fails)
    with pytest.raises(ZeroDivisionError):
        other(ids, range(5)).sum().backward()
    hook.remove()
    [param.__setattr__("grad", None) for param in other.parameters()]
    other(ids, range(5)).sum().backward()
    model(ids, range(5)).sum().backward()
    # A gradient of the backward that has raised may have been on its way.
    assert on_device(flow) == 0 and not any(unit.users for unit in flow.units)


def test_a_backward_after_a_step_is_torchs_error():
    model, other, _ = pair()
    ids = torch.ones(1, 2, dtype=torch.long)
    loss = other(ids, range(5)).sum()
    with torch.no_grad():
        [param.add_(1) for param in other.parameters()]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_frozen_layers_and_inputs_without_gradients():
    model, other, flow = pair()
    for own in (model, other):
        own.embed.weight.requires_grad_(False)
        own.layers[1].requires_grad_(False)
        own.layers[3].linear.weight.requires_grad_(False)
    ids = torch.ones(1, 2, dtype=torch.long)
    [own(ids, range(5)).square().sum().backward() for own in (model, other)]
    same(model, other)
    assert on_device(flow) == 0


def test_layers_that_are_kept_are_copied_once_per_change():
    model, other, flow = pair()
    whole = flow.units[0].bytes
    kept = Flow(copy.deepcopy(model), "cpu", keep_bytes=2 * whole + 1)
    assert [unit.kept for unit in kept.units] == [True, True, False, False, False]
    torch.manual_seed(0)
    other = Model()
    flow = Flow(other, "cpu", keep_bytes=None)
    ids = torch.ones(1, 2, dtype=torch.long)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for step in range(3):
        fetched = flow.fetched_bytes
        other(ids, range(5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step:
            assert flow.fetched_bytes - fetched == flow._rest.bytes + 5 * whole


@pytest.mark.sampled
@pytest.mark.parametrize("weights", ["flow", "auto"])
@pytest.mark.parametrize("verdict", ["step", "forward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("narrow", [{}, {"moment_dtype": "int8", "master": "split"}], ids=["wide", "narrow"])
def test_offload_with_weights_that_flow(copies, weights, verdict, dtype, overlap, narrow):
    torch.manual_seed(3)
    models = [Model().to(dtype)]
    models.append(copy.deepcopy(models[0]))
    make = functools.partial(spillway.torch.offload, kind=torch.optim.AdamW, lr=0.01, max_norm=0.5, bucket_bytes=2000, overlap=overlap)
    make = functools.partial(make, **narrow)
    optimizers = [make(models[0]), make(models[1], weights=weights, device="cpu", verdict=verdict)]
    for step in range(6):
        ids = torch.randint(11, (3, 4))
        for model, optimizer in zip(models, optimizers):
            factor = 1000 if step == 3 else 1
            for part in range(2 if step == 2 else 1):
                (model(ids, [0, 1, 2, 1, 4]).float().square().mean() * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert optimizers[0].grad_norm == optimizers[1].grad_norm
    same(*models)
    assert torch.equal(models[0](ids, range(5)), models[1](ids, range(5)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Flow(7), "pass a torch.nn.Module"),
        (lambda: Flow(Model(), "cpu", slots=0), "slots is 0"),
        (lambda: Flow(Model(), "cpu", keep_bytes=-1), "keep_bytes is -1"),
        (lambda: Flow(torch.nn.Linear(2, 2), "cpu"), "units=\\[...\\]"),
        (lambda: Flow(Model(), "cpu", units=[7]), "units\\[0\\] is a int"),
        (lambda: Flow((own := Model()), "cpu", units=[own.layers[0], own.layers[0].linear]), "another unit inside"),
        (lambda: Flow((own := Model()), "cpu", units=[own.layers[0]] * 2), "twice"),
        (lambda: Flow((own := Model()), "cpu", units=[own.layers]), "has no forward"),
        (lambda: Flow(Model(), "cpu", slots=None), "slots is None"),
        (lambda: copy.deepcopy(Flow(Model(), "cpu")), "cannot be copied"),
        (lambda: Flow(torch.nn.Sequential(torch.nn.Linear(2, 2, device="meta")), "cpu"), "no memory yet"),
        (lambda: spillway.torch.offload(Model(), weights="float"), "'resident', 'flow' or 'auto'"),
        (lambda: spillway.torch.offload(Model(), device="cpu"), "device is for weights"),
        (lambda: spillway.torch.offload(Model().parameters(), weights="flow"), "pass model="),
    ],
)
def test_wrong_arguments(call, words):
    with pytest.raises((spillway.InvalidArgumentError, spillway.errors.UnsupportedError, TypeError), match=words):
        call()


class Blocks(torch.nn.Module):
    """Parts that are called one after the other with the losses that they add."""

    def __init__(self, *parts):
        super().__init__()
        self.first, self.parts, self.last = torch.nn.Linear(4, 4), torch.nn.ModuleList(parts), torch.nn.Linear(4, 1)

    def forward(self, x):
        x, more = self.first(x), []
        for part in self.parts:
            x = part(x, more)
        return self.last(x).sum() + sum(more)


class Block(torch.nn.Module):
    def __init__(self, act=None):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.act = act or torch.nn.ReLU(inplace=True)
        self.seen, self.returns_weight = None, False

    def forward(self, x, more):
        if self.returns_weight:
            return self.linear.weight
        x = self.linear(self.act(x + 1)) + x
        self.seen = self.linear.weight.square().sum()
        more.append(x.mean())
        return x


def blocks(seed=1):
    torch.manual_seed(seed)
    model = Blocks(*(Block() for _ in range(3)))
    other = copy.deepcopy(model)
    return model, other, Flow(other, "cpu"), torch.randn(3, 4)


def test_what_a_layer_keeps_is_read_in_backward_after_its_weights_have_left():
    """A loss of a layer that is no output, its change of a list, its in-place operation, and a penalty on gradients."""
    model, other, flow, x = blocks()
    for own in (model, other):
        given = x.clone().requires_grad_()
        loss = own(given)
        (slope,) = torch.autograd.grad(loss, given, create_graph=True)
        (loss + slope.square().sum() + own.parts[0].seen).backward()
        assert given.grad is not None
    same(model, other)
    assert on_device(flow) == 0


@pytest.mark.parametrize("fused", [False, True])
def test_a_fused_optimizer_steps_weights_that_stay_and_weights_that_flow(fused):
    model, other, flow, x = blocks()
    flow._keep(flow.units[0].bytes)
    optimizers = [torch.optim.AdamW(own.parameters(), lr=0.1, fused=fused) for own in (model, other)]
    for _ in range(3):
        losses = [own(x) for own in (model, other)]
        assert losses[0].item() == losses[1].item()
        for loss, optimizer, own in zip(losses, optimizers, (model, other)):
            loss.backward()
            with torch.no_grad():
                own(x)
            optimizer.step()
            optimizer.zero_grad()
    same(model, other)


def test_parameters_that_the_program_has_put_into_the_model_are_used():
    model, other, _, x = blocks()
    zeros = {name: torch.zeros_like(param) for name, param in other.named_parameters()}
    assert torch.func.functional_call(other, zeros, (x,)).item() == 0.0
    other.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)
    with torch.no_grad():
        [param.mul_(2) for param in model.parameters()]
    assert other(x).item() == model(x).item()
    other.parts[0].linear.bias = None
    model.parts[0].linear.bias = None
    assert other(x).item() == model(x).item()


def test_frozen_parameters_and_hooks_and_attributes_of_parameters():
    model, other, flow, x = blocks()
    torch.manual_seed(2)
    frozen = copy.deepcopy(model)
    frozen.parts[1].requires_grad_(False)
    flowing = copy.deepcopy(frozen)
    Flow(flowing, "cpu")
    for own in (frozen, flowing):
        own.parts[0].linear.weight.register_hook(lambda grad: grad * 0)
        own.parts[0].linear.weight.scale = 2.0
        own.parts[0].register_forward_pre_hook(lambda part, _: print(part.linear.weight.scale))
        own(x).backward()
        own.parts[1].requires_grad_(True)
        own(x).backward()
    same(frozen, flowing)
    assert not flowing.parts[0].linear.weight.grad.any()


def test_a_write_to_a_weight_inside_of_a_forward_stays():
    model, other, _, x = blocks()

    def clamped(part, *_):
        with torch.no_grad():
            part.linear.weight.clamp_(-0.05, 0.05)

    for own in (model, other):
        own.parts[0].register_forward_pre_hook(clamped)
        own(x).backward()
    same(model, other)


def test_an_interrupt_in_a_forward_leaves_the_parameters_in_host_memory():
    model, other, flow, x = blocks()

    def interrupts(*_):
        raise KeyboardInterrupt

    hook = other.parts[1].linear.register_forward_hook(interrupts)
    with pytest.raises(KeyboardInterrupt):
        other(x)
    hook.remove()
    assert bits(other.state_dict().values()) == bits(model.state_dict().values())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    [own(x).backward() for own in (model, other)]
    same(model, other)


def test_units_of_lists_in_lists_and_parts_of_several_layers():
    torch.manual_seed(0)
    shared = torch.nn.Linear(4, 4)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Sequential(shared)]) for _ in range(3))
    flow = Flow(model, "cpu")
    # The parameters of the part that all layers have stay.
    assert [len(unit.weights) for unit in flow.units] == [2, 0, 2, 0, 2, 0] and len(flow._rest.weights) == 2


def test_a_layer_that_returns_its_weight_is_an_error_and_so_is_a_conversion():
    model, other, flow, x = blocks()
    other.parts[0].returns_weight = True
    with pytest.raises(spillway.InvalidArgumentError, match="returns its parameter"):
        other(x)
    other.parts[0].returns_weight = False
    other.double()
    with pytest.raises(spillway.InvalidArgumentError, match="convert a model before"):
        other(x.double())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_forward_itself_is_computed_again_with_the_weights_of_the_device(reentrant):
    """As in transformers, whose layers run their own forward again, without the hooks of modules."""

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
            self.head = torch.nn.Linear(4, 4)

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(lambda x, layer=layer: layer.forward(x).tanh(), x, use_reentrant=reentrant)
            return checkpoint(lambda x: self.head(x).square(), x, use_reentrant=reentrant).sum()

    torch.manual_seed(0)
    model = Checkpointed()
    other = copy.deepcopy(model)
    flow, x = Flow(other, "cpu"), torch.randn(2, 4, requires_grad=True)
    shown = []
    for layer in (*other.layers, other.head):
        plain = layer.forward.plain
        layer.forward.plain = lambda x, layer=layer, plain=plain: shown.append(layer.weight is not flow_host(flow, layer)) or plain(x)
    [own(x).backward() for own in (model, other)]
    same(model, other)
    assert shown == [True] * 10 and on_device(flow) == 0


def flow_host(flow, layer):
    return next(weight.on_host for weight in flow.weights.values() if (layer, "weight") in weight.places)


def test_parts_that_stay_have_the_weights_of_the_device_outside_of_the_models_forward():
    model, other, flow, x = blocks()
    seen = []
    plain = other.first.forward.plain
    other.first.forward.plain = lambda x: seen.append(other.first.weight is not flow_host(flow, other.first)) or plain(x)
    assert torch.equal(other.first(x), model.first(x)) and seen == [True]


def test_hooks_of_the_program_for_saved_tensors_within_a_layer():
    class Hooked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                return self.linear(x).tanh()

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Hooked() for _ in range(4)))
    other, x = copy.deepcopy(model), torch.randn(2, 4, requires_grad=True)
    Flow(other, "cpu")
    [own(x).sum().backward() for own in (model, other)]
    same(model, other)


def test_a_backward_inside_of_a_backward_leaves_the_weights_of_the_outer_one():
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
            with torch.enable_grad():
                for part in (x[:1], x[1:]):
                    torch.autograd.backward(part @ weight, grad[:1] if part is x[:1] else grad[: len(part)])
            return x.grad, weight.grad

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return Inner.apply(x, self.weight).tanh()

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Layer() for _ in range(4)))
    other, x = copy.deepcopy(model), torch.randn(2, 4, requires_grad=True)
    flow = Flow(other, "cpu")
    [own(x).sum().backward() for own in (model, other)]
    same(model, other)
    assert on_device(flow) == 0


def test_what_is_refused_of_threads_a_second_flow_and_a_trace():
    model, other, flow, x = blocks()
    with pytest.raises(spillway.InvalidArgumentError, match="flow already"):
        Flow(other, "cpu")
    found = []

    def runs(*_):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(other, x).exception())

    hook = other.parts[1].linear.register_forward_hook(runs)
    other(x)
    hook.remove()
    assert isinstance(found[0], spillway.InvalidArgumentError) and "another thread" in str(found[0])
    with pytest.raises(spillway.errors.UnsupportedError, match="traced"):
        torch.jit.trace(other, (x,))
    [own(x).backward() for own in (model, other)]
    same(model, other)
    flow.remove()
    assert "forward" not in other.__dict__ and other(x).item() == model(x).item()


def test_a_parameter_that_is_frozen_before_backward_gets_no_gradient():
    model, other, _, x = blocks()
    for own in (model, other):
        loss = own(x)
        own.parts[1].requires_grad_(False)
        loss.backward()
    same(model, other)


class Reader(torch.nn.Module):
    """A part that reads the weight of the part in it, as transformers' Mamba does."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.inner.weight).tanh() * self.scale


class Rereader(torch.nn.Module):
    """A layer that computes its part again in backward."""

    def __init__(self):
        super().__init__()
        self.part = Reader()

    def forward(self, x):
        return x + checkpoint(self.part, x, use_reentrant=False)


def test_a_part_that_is_computed_again_has_the_weights_of_the_parts_in_it():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Rereader() for _ in range(3)))
    other = copy.deepcopy(model)
    flow = Flow(other, "cpu")
    x = torch.randn(4, WIDTH)
    [own(x).sum().backward() for own in (model, other)]
    same(model, other)
    assert on_device(flow) == 0


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_counts_for_the_parameters_that_have_a_gradient(fused):
    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
    model.forward = lambda x: [part(x).square().mean() for part in model]
    other = copy.deepcopy(model)
    other.forward = lambda x: [part(x).square().mean() for part in other]
    flow = Flow(other, "cpu", units=[*other])
    x = torch.randn(4, WIDTH)
    for own in (model, other):
        optimizer = torch.optim.AdamW(own.parameters(), fused=fused)
        for _ in range(3):
            first, second = own(x)
            first.backward()
            optimizer.step()
            optimizer.zero_grad()
            # Its graph is of weights that the step had no gradient for.
            second.backward()
            optimizer.step()
            optimizer.zero_grad()
    same(model, other)
    flow.remove()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("owner, name", [("Saving", "leave"), ("Weight", "hide")])
def test_an_interrupt_in_the_end_of_a_forward_leaves_the_parameters_in_host_memory(owner, name, times):
    model, other, flow, x = blocks()
    target, left = getattr(flow_module, owner), [times]
    call = getattr(target, name)

    def interrupted(self, *arguments):
        if left[0]:
            left[0] -= 1
            raise KeyboardInterrupt
        return call(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            other(x)
    if times == 1:
        assert {*other.parameters()} == {*flow.weights}
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    [own(x).backward() for own in (model, other)]
    assert {*other.parameters()} == {*flow.weights} and not flow.running
    same(model, other)
