"""The ways by which a program runs a forward of a model, compiled and not, and random trainings that mix them.

    PYTHONPATH=packaging/python python ffi_tests/torch/compiled_routes.py FIRST COUNT [SECONDS]

runs the trainings FIRST to FIRST + COUNT - 1, and prints each one that fails. The number of a training is the seed of everything in it. An
optimizer may step during backward, have its verdict in the next forward, or have weights that flow. A training with it must have the bits
of one that steps after backward; or it ends in an error."""

from __future__ import annotations

import copy
import random
import tempfile
import traceback
import warnings

import random_programs
import torch

import spillway
import spillway.torch

WIDTH = 8


class Net(torch.nn.Module):
    """A chain of layers of several kinds."""

    def __init__(self, depth=3):
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) if number % 2 else Block() for number in range(depth)
        )

    def parts(self):
        """The parts, in the order of a forward."""
        return [self.first, *self.layers]

    def forward(self, x):
        return chain(self.parts(), x)


class Block(torch.nn.Module):
    """A layer with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return torch.tanh(self.inner(x)) * self.scale


class Wrapper(torch.nn.Module):
    """A model around another one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 1.0


def chain(parts, x):
    """A forward of parts, one after the other."""
    for part in parts:
        x = part(x)
    return x


def _in_place(modules, backend):
    for module in modules:
        module.compile(backend=backend)


def _other(model, backend):
    """Code that another instance of the class has compiled."""
    other = copy.deepcopy(model)
    run = torch.compile(lambda module, x: module(x), backend=backend)
    run(other, torch.ones(2, WIDTH))
    return lambda x: run(model, x)


def _called(model, backend):
    params = dict(model.named_parameters())
    return lambda x: torch.func.functional_call(model, params, (x,))


def _checkpoint(model, backend):
    return lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)


def _linear(model, backend):
    """Weights that are read outside of a forward of their layer."""
    rest = model.parts()[1:]
    return lambda x: chain(rest, torch.nn.functional.linear(x, model.first.weight, model.first.bias))


def _averaged(model, backend):
    """The forward of DistributedDataParallel, in a group of one process."""
    distributed = torch.distributed
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    return torch.nn.parallel.DistributedDataParallel(model)


def _replica(module):
    """A copy whose parameters are results of the module's, as DataParallel makes it for each device."""
    made = module._replicate_for_data_parallel()
    for name, param in module._parameters.items():
        setattr(made, name, None if param is None else param.view_as(param))
    for name, part in module._modules.items():
        made._modules[name] = _replica(part)
    return made


def _replicas(model, backend):
    return lambda x: torch.cat([_replica(model)(part) for part in x.chunk(2)])


def _compiled(make):
    return lambda model, backend: torch.compile(make(model), backend=backend)


def _wrapped(model, backend):
    wrapper = torch.compile(Wrapper(model), backend=backend)
    return lambda x: wrapper(x)


#: By their name: what makes a function of the input from a model and the name of a compiler.
ROUTES = {
    "model": lambda model, backend: model,
    "model.forward": lambda model, backend: lambda x: model.forward(x),
    "parts": lambda model, backend: lambda x: chain(model.parts(), x),
    "wrapper": lambda model, backend: Wrapper(model),
    "compile(model)": _compiled(lambda model: model),
    "compile(function of model)": _compiled(lambda model: lambda x: model(x)),
    "compile(function of model.forward)": _compiled(lambda model: lambda x: model.forward(x)),
    "compile(function of parts)": _compiled(lambda model: lambda x: chain(model.parts(), x)),
    "compile(wrapper)": _wrapped,
    "compile(copy of wrapper's code)": _other,
    "model.compile()": lambda model, backend: (_in_place([model], backend), model)[1],
    "part.compile()": lambda model, backend: (_in_place(model.parts(), backend), model)[1],
    "compiled parts": lambda model, backend: (lambda parts: lambda x: chain(parts, x))(
        [torch.compile(part, backend=backend) for part in model.parts()]
    ),
    "functional_call": _called,
    "checkpoint": _checkpoint,
    "vmap": lambda model, backend: torch.vmap(model),
    "fx": lambda model, backend: torch.fx.symbolic_trace(model),
    "DistributedDataParallel": _averaged,
    "compile(DistributedDataParallel)": _compiled(lambda model: _averaged(model, "")),
    "replicas": _replicas,
    "linear": _linear,
    "compile(linear)": _compiled(lambda model: _linear(model, "")),
}
#: Those that run no forward of a module whose weights they read.
UNSEEN = {
    "traced": lambda model, backend: torch.jit.trace(model, torch.ones(2, WIDTH)),
    "exported": lambda model, backend: torch.export.export(model, (torch.ones(4, WIDTH),), strict=False).module(),
}


def _offload(model, **options):
    return spillway.torch.offload(model, torch.optim.AdamW, lr=0.05, max_norm=0.5, bucket_bytes=1, **options)


def on_tier(model):
    """States on a tier of a directory, which lives as long as the optimizer."""
    place = tempfile.TemporaryDirectory()
    tier = spillway.torch.TierOptions(place.name, part_elements=64)
    made = spillway.torch.AdamW(model.parameters(), lr=0.05, max_norm=0.5, tier=tier, overlap=True)
    made.place = place
    return made


#: Optimizers by their name.
KINDS = {
    "after": lambda model: _offload(model, overlap=False),
    "during": lambda model: _offload(model, overlap=True),
    "forward": lambda model: _offload(model, overlap=True, verdict="forward"),
    "forward, after": lambda model: _offload(model, overlap=False, verdict="forward"),
    "flow": lambda model: _offload(model, weights="flow", device="cpu"),
    "flow and forward": lambda model: _offload(model, weights="flow", device="cpu", verdict="forward", overlap=True),
    "tier": on_tier,
}


def ended(optimizer):
    """Ends an optimizer, what it has put in its model, and the process group of a route."""
    getattr(optimizer, "settle", lambda: None)()
    if getattr(optimizer, "flow", None) is not None:
        optimizer.flow.remove()
    optimizer.close()
    if hasattr(optimizer, "place"):
        optimizer.place.cleanup()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def training(kind, route, when, backend="eager", steps=4):
    """Losses, evaluations and weights of a training whose forwards take one route, which was made and used before or after the optimizer
    was made."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    model, found = Net(), []
    inputs = [torch.randn(4, WIDTH) for _ in range(2 * steps)]
    routes = {**ROUTES, **UNSEEN}

    def made():
        function = routes[route](model, backend)
        function(inputs[0]).square().mean().backward()
        model.zero_grad()
        return function

    run = made() if when == "before" else None
    optimizer = KINDS[kind](model)
    run = made() if run is None else run
    try:
        for step in range(steps):
            loss = run(inputs[2 * step]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            if step % 2 and route not in UNSEEN:
                with torch.no_grad():
                    found.append(run(inputs[2 * step + 1]).sum().item())
    finally:
        ended(optimizer)
    return found, [param.detach().clone() for param in model.parameters()]


class Program:
    """A random training. It does the same for each kind of optimizer."""

    def __init__(self, seed):
        self.chance, self.seed = random.Random(seed), seed
        self.kind = self.chance.choice([kind for kind in KINDS if kind != "after"])

    def run(self, kind):
        """The numbers that the program sees."""
        chance = random.Random(self.seed)
        torch._dynamo.reset()
        torch.manual_seed(self.seed)
        model, seen = Net(chance.randint(1, 3)), []
        names = chance.sample(sorted(ROUTES), 3)
        if "flow" in self.kind:
            # torch's wrapper misses gradients of weights that flow, and raises an error if another route gives it some of them.
            names = ["model" if "DistributedDataParallel" in name else name for name in names]
        if any(name.endswith(".compile()") for name in names):
            # torch traces no part that is compiled in place.
            names = ["model" if name == "fx" else name for name in names]
        backends = [chance.choice(("eager", "eager", "aot_eager")) for _ in names]
        # Those that are made when the optimizer exists.
        late = [chance.random() < 0.4 for _ in names]
        runs = [None if after else ROUTES[name](model, backend) for name, backend, after in zip(names, backends, late)]
        for run in [run for run in runs if run is not None]:
            if chance.random() < 0.7:
                run(torch.randn(3, WIDTH)).sum().backward()
        model.zero_grad()
        optimizer = KINDS[kind](model)
        try:
            runs = [ROUTES[name](model, backend) if run is None else run for run, name, backend in zip(runs, names, backends)]
            for _ in range(chance.randint(3, 6)):
                self._step(chance, model, optimizer, runs, seen)
            seen.append(str(chance.random()))
        finally:
            ended(optimizer)
        return seen, [param.detach().clone() for param in model.parameters()]

    def _step(self, chance, model, optimizer, runs, seen):
        for _ in range(chance.choice((1, 1, 2))):
            loss = chance.choice(runs)(torch.randn(chance.choice((2, 4)), WIDTH)).square().mean()
            loss.backward()
            seen.append(loss.item())
        optimizer.step()
        chance.choice((optimizer, model)).zero_grad()
        use = chance.choice(("", "", "evaluates", "evaluates", "saves", "averages", "copies", "part", "settles"))
        if use == "evaluates":
            with chance.choice((torch.no_grad, torch.inference_mode))():
                seen.append(chance.choice(runs)(torch.randn(2, WIDTH)).sum().item())
        elif use == "saves":
            seen.append([value.sum().item() for value in chance.choice((model, model.first)).state_dict().values()])
        elif use == "averages":
            seen.append([param.sum().item() for param in chance.choice((model, Wrapper(model))).parameters()])
        elif use == "copies":
            seen.append([param.sum().item() for param in copy.deepcopy(chance.choice((model, model.layers))).parameters()])
        elif use == "part":
            with torch.no_grad():
                seen.append(chance.choice(model.parts())(torch.ones(2, WIDTH)).sum().item())
        elif use == "settles":
            getattr(optimizer, "settle", lambda: None)()


def failure(seed):
    """The text of a program that fails; None if it ends as it should."""
    warnings.simplefilter("ignore")
    program = Program(seed)
    try:
        wanted, found = program.run("after"), program.run(program.kind)
    except Exception:
        return f"program {seed}, {program.kind}:\n{traceback.format_exc()}"
    if wanted[0] != found[0]:
        return f"program {seed}, {program.kind}: {wanted[0]}\nand not\n{found[0]}"
    if not all(map(torch.equal, wanted[1], found[1])):
        return f"program {seed}, {program.kind}: other weights"
    return None


if __name__ == "__main__":
    random_programs.main(failure)
