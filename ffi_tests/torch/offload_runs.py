"""Trainings with spillway.torch.offload, and what their tests compare."""

import concurrent.futures
import copy
import functools
import math
import random
import time

import torch

import spillway
import spillway.torch
from spillway.torch._codes import decoded
from spillway.torch._copies import HostLink

#: Parameters on the CPU do not overlap unless the program asks for it.
offload = functools.partial(spillway.torch.offload, overlap=True)

#: Bytes of a bucket: one per parameter, some per model, one for all.
BUCKETS = (1, 2000, 1 << 20)


class Net(torch.nn.Module):
    """Layers of which some are used twice, some in some steps only, and some are frozen. Those of the largest width are divided, if
    buckets are small."""

    def __init__(self, chance, dtype):
        super().__init__()
        width = chance.choice((8, 24, 40, 136))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(chance.randint(2, 5)))
        self.scale = torch.nn.Parameter(torch.ones(width))
        self.sometimes = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, 3)
        if chance.random() < 0.3:
            self.layers[0].requires_grad_(False)
        self.shared, self.width = chance.random() < 0.5, width
        self.to(dtype)

    def forward(self, x, sometimes):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        if self.shared:
            x = self.layers[-1](x)
        return self.head(self.sometimes(x) if sometimes else x)


#: Narrow states.
BF16, F32 = torch.bfloat16, torch.float32
NEAREST = {"moment_dtype": BF16}
STOCHASTIC = {"moment_dtype": BF16, "moment_rounding": "stochastic", "rounding_seed": 5}
SPLIT = {"master": "split"}
CODES = {"moment_dtype": "int8", "moment_rounding": "nearest"}
NARROW = {
    "nearest": NEAREST,
    "stochastic": STOCHASTIC,
    "split": SPLIT,
    "split nearest": SPLIT | NEAREST,
    "split random": SPLIT | STOCHASTIC,
    "codes": CODES,
    "codes random": {"moment_dtype": "int8", "rounding_seed": 5},
    "split codes": SPLIT | CODES,
}


def _a_dtype(chance):
    return chance.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))


def dtype_of(seed):
    """The dtype of the parameters of a random training."""
    return _a_dtype(random.Random(seed))


def training(seed, make):
    """Losses, norms and final tensors of a random training. `make(params, model, **options)` makes the optimizer."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    dtype = _a_dtype(chance)
    model = Net(chance, dtype)
    options = {
        "lr": 10 ** chance.uniform(-4, -1.5),
        "max_norm": chance.choice((None, 0.02, 1.0, 50.0)),
        "skip_nonfinite": chance.random() < 0.5,
    }
    params = [p for p in model.parameters() if p.requires_grad]
    if chance.random() < 0.5:
        decay = [p for p in params if p.dim() > 1]
        params = [{"params": decay, "weight_decay": 0.1}, {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = make(params, model, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step) if chance.random() < 0.5 else None
    data, seen, verdicts, awaited = torch.Generator().manual_seed(seed), [], [], []

    def heard(action):
        """The result of what gives the verdict of a step; None if it is refused."""
        awaited.clear()
        try:
            result = action()
            verdicts.append(None if optimizer.grad_norm is None else (optimizer.skipped, optimizer.grad_norm))
            return result
        except spillway.InvalidArgumentError as error:
            assert "Inf or NaN" in str(error)
            verdicts.append("refused")

    for _ in range(chance.randint(4, 9)):
        events = {name for name in EVENTS if chance.random() < 0.12}
        micro = chance.choice((1, 1, 1, 2, 3))
        for number in range(micro):
            used = chance.random() < 0.7
            x = torch.randn(5, model.width, generator=data).to(dtype)

            def loss_of(x=x, used=used, events=events):
                found = heard(lambda: model(x, used)) if awaited else None
                loss = (model(x, used) if found is None else found).float().square().mean()
                return loss * 300 if "spike" in events else loss

            outer = getattr(optimizer, "accumulating", None)
            if number < micro - 1 and outer is not None and chance.random() < 0.5:
                with outer():
                    loss_of().backward()
            else:
                loss = loss_of()
                loss.backward()
                seen.append(loss.item())
        for name in sorted(events - {"spike", "closure"}):
            EVENTS[name](model, optimizer, chance)
        if "closure" in events:

            def closure(loss_of=loss_of):
                loss = loss_of()
                loss.backward()
                return loss

            arguments = (closure,)
        else:
            arguments = ()
        if getattr(optimizer, "_next", None) is None:
            heard(lambda arguments=arguments: optimizer.step(*arguments))
        else:
            optimizer.step(*arguments)
            awaited.append(True)
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad(set_to_none=chance.random() < 0.7)
        if "weights" in events:
            if awaited:
                heard(optimizer.settle)
            # This changes no version.
            chance.choice(list(model.parameters())).data.mul_(0.9)
    if awaited:
        heard(optimizer.settle)
    state = optimizer.state_dict()["state"]
    tensors = [p.detach() for p in model.parameters()]
    tensors += [decoded(state[key])[name] for key in sorted(state) for name in ("exp_avg", "exp_avg_sq", "step")]
    return (seen, verdicts), tensors


def _some(model, chance):
    return chance.choice([p for p in model.parameters() if p.grad is not None])


def _edit(model, optimizer, chance):
    _some(model, chance).grad.mul_(0.5)


def _replace(model, optimizer, chance):
    param = _some(model, chance)
    param.grad = torch.full_like(param.grad, 0.25)


def _remove(model, optimizer, chance):
    _some(model, chance).grad = None


def _inf(model, optimizer, chance):
    _some(model, chance).grad.flatten()[0] = math.inf


def _weights(model, optimizer, chance):
    with torch.no_grad():
        _some(model, chance).mul_(0.75)


def _data(model, optimizer, chance):
    param = _some(model, chance)
    param.data = param.detach() * 0.5


def _grad_data(model, optimizer, chance):
    _some(model, chance).grad.data.mul_(0.5)


def _clip(model, optimizer, chance):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def _rate(model, optimizer, chance):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def _reload(model, optimizer, chance):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _look(model, optimizer, chance):
    list(optimizer.state.values())


def _load_weights(model, optimizer, chance):
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})


#: What a program does between backward and step.
EVENTS = {
    "spike": None,
    "closure": None,
    "edit": _edit,
    "replace": _replace,
    "remove": _remove,
    "inf": _inf,
    "weights": _weights,
    "data": _data,
    "grad data": _grad_data,
    "clip": _clip,
    "rate": _rate,
    "reload": _reload,
    "look": _look,
    "load weights": _load_weights,
}


def offloaded(verdict="step", **more):
    return lambda params, model, **options: offload(params, torch.optim.AdamW, verdict=verdict, model=model, **options, **more)


def same(one, other):
    # As text and as bytes: NaN is not equal to itself.
    assert repr(one[0]) == repr(other[0])
    assert [bits(tensor) for tensor in one[1]] == [bits(tensor) for tensor in other[1]]


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


class Later(HostLink):
    """A link whose copies are done in their order by a thread, some time after they were started: as on a stream of a device."""

    is_apart = True

    def __init__(self, room=False):
        self._stream, self._last = concurrent.futures.ThreadPoolExecutor(1), None
        self.room, self.placed = room, 0

    def end(self):
        """Ends the thread, after its copies."""
        self._stream.shutdown()

    def has_room(self, size):
        return self.room

    def bring_second(self, copies, hosts):
        for copy_of, host in zip(copies, hosts, strict=True):
            self._start(copy_of, host, at_once=False)
        return self.fence()

    def place_all(self, tensors, copies, fence):
        self.placed += 1
        fence.synchronize()
        self.back_all(tensors, copies)

    def _start(self, to, value, at_once=True):
        # What the program writes to host memory meanwhile is copied too; work on a device comes in its order.
        frozen, memory = value.clone() if at_once else value, to.detach().data
        torch.autograd.graph.increment_version(to)

        def run():
            time.sleep(0.001)
            memory.copy_(frozen)

        self._last = self._stream.submit(run)

    def out(self, host, tensor):
        self._start(host, tensor)

    def out_all(self, hosts, tensors):
        for host, tensor in zip(hosts, tensors, strict=True):
            self.out(host, tensor)

    def back_all(self, tensors, hosts):
        for tensor, host in zip(tensors, hosts, strict=True):
            self.back(tensor, host)

    def bring(self, tensor, host):
        self._start(tensor, host, at_once=False)

    def back(self, tensor, host):
        self._start(tensor, host)
        # Later work on the device sees it.
        self._last.result()

    def fence(self):
        last = self._last

        class Fence:
            def synchronize(self):
                last.result()

            def query(self):
                return last.done()

        return Fence()

    def wait(self, fence):
        fence.synchronize()


class Stream:
    """A stand-in for the stream of a device. It keeps what it was told to wait for."""

    def __init__(self, device=None):
        self.waits_for = []

    def wait_stream(self, other):
        self.waits_for.append(other)

    wait_event = wait_stream

    def record_event(self):
        return ("event of", self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def run(optimizer_of, dtype=torch.float32, steps=6, spike=3, seed=1, model=None):
    """A plain training; the model, the optimizer, and norms."""
    torch.manual_seed(seed)
    model = model or torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).to(dtype)
    optimizer, norms = optimizer_of(model), []
    for step in range(steps):
        loss = model(torch.randn(8, 16).to(dtype)).float().square().mean() * (100 if step == spike else 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm)
    return model, optimizer, norms


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


def trained(*shapes, **options):
    """Parameters and their optimizer after two steps."""
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = offload(params, lr=0.1, **options)
    for _ in range(2):
        backward(params)
        optimizer.step()
        optimizer.zero_grad()
    return params, optimizer


def backward(params):
    sum((param * (place + 1)).sum() for place, param in enumerate(params)).backward()


def values(params):
    return [param.detach().clone() for param in params]
