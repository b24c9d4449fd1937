"""Programs that write to parameters, gradients and states in every way that torch has, against the same program with torch's own class.

    PYTHONPATH=packaging/python python ffi_tests/torch/written.py FIRST COUNT [SECONDS]

runs the random programs FIRST to FIRST + COUNT - 1, and prints each one that fails. The number of a program is the seed of everything in
it.

Gradients do not depend on weights here, so that a lost write stays visible: it is a difference of the size of the written value. 16-bit
parameters are compared with float32 masters that torch's class steps.

Before the forward that completes a step, a program writes in one of three manners:
- "settled": after `settle()`.
- "module": through the module, whose read completes the step. The write counts.
- "held": through a tensor that it has held since before the step. The write counts, or the next use of the model is an error."""

from __future__ import annotations

import contextlib
import copy
import random
import traceback
from unittest import mock

import random_programs
import torch
from offload_runs import Later
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import spillway
from spillway import torch as own

F32, BF16 = torch.float32, torch.bfloat16
#: Masters of both sides differ by so much, relative to one and more.
MASTERS_APART = 1e-5
#: The last one is larger than tensors whose words are all weighted.
SHAPES = [(7, 5), (64,), (), (3,), (40, 40), (110, 110)]
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


class Part(torch.nn.Module):
    def __init__(self, shape, other):
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.randn(kind)) for kind in (shape, other))

    def forward(self, total, factors):
        return total + sum((param.float() * factor).sum() for param, factor in zip((self.first, self.second), factors))


class Model(torch.nn.Module):
    """Layers that flow, and one part that stays."""

    def __init__(self, shapes):
        super().__init__()
        self.stays, *layers = (Part(one, other) for one, other in zip(shapes[::2], shapes[1::2]))
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, factors):
        total = self.stays(0.0, factors[:2])
        for number, layer in enumerate(self.layers):
            total = layer(total, factors[2 * number + 2 :])
        return total


# Controls.


class Masters:
    """torch's AdamW over float32 masters of bf16 parameters. A master takes what the program has written: the elements that it does not
    round to, or with `blocks` all elements of blocks of 4,096 in which a bit differs. A master in the middle of two numbers rounds to
    either."""

    def __init__(self, params, blocks):
        self.params, self.blocks = list(params), blocks
        self.masters = [param.detach().float() for param in self.params]
        self.published = [param.detach().clone() for param in self.params]
        self.inner = torch.optim.AdamW(self.masters, **OPTIONS)

    def _followed(self, number):
        """A master that has taken what the program has written."""
        now, master = self.params[number].detach(), self.masters[number]
        if self.blocks:
            parts = zip(*(tensor.flatten().split(4096) for tensor in (now, self.published[number], master)))
            taken = [part if torch.equal(new.view(torch.int16), old.view(torch.int16)) else new.float() for new, old, part in parts]
            return torch.cat(taken).view(master.shape)
        return _taken(master, now)

    def step(self):
        for number, (param, master) in enumerate(zip(self.params, self.masters)):
            master.grad = None
            if param.grad is not None:
                master.copy_(self._followed(number))
                master.grad = param.grad.float()
        self.inner.step()
        with torch.no_grad():
            for number, (param, master) in enumerate(zip(self.params, self.masters)):
                if param.grad is not None:
                    param.copy_(master)
                    self.published[number] = param.detach().clone()

    def states(self):
        return {param: self.inner.state[master] for param, master in zip(self.params, self.masters)}

    def master(self, param):
        return self._followed(self._number(param))

    def round_as(self, param, found):
        """Has the elements of a parameter rounded as `found`, the same one of the other side.

        Both masters are stepped with other roundings, so that one is above the middle of two 16-bit numbers and one is below it. An element
        that differs for another reason is an error."""
        number = self._number(param)
        if number is None:
            return torch.testing.assert_close(found, param, rtol=0, atol=0)
        master, now = self._followed(number), found.detach()
        near = MASTERS_APART * (1 + master.abs())
        wrong = ((master - near).to(now.dtype) > now) | ((master + near).to(now.dtype) < now)
        assert not wrong.any(), f"{wrong.sum()} of {wrong.numel()} elements are not a master of the control, rounded"
        other = param.detach() != now
        # The nearest one that rounds to it; across zero the number itself.
        moved = (now.float().view(torch.int32) + _apart(master, now).clamp(-0x7FFF, 0x7FFF).int()).view(torch.float32)
        moved = torch.where(master.signbit() == now.signbit(), moved, now.float())
        with torch.no_grad():
            self.masters[number].copy_(torch.where(other, moved, self.masters[number]))
            self.published[number] = torch.where(other, now, self.published[number])
            param.copy_(now)

    def _number(self, param):
        return next((number for number, other in enumerate(self.params) if other is param), None)


def _apart(master, param):
    """How far the bits of float32 numbers are above those of bf16 numbers. Numbers of two signs are up to 2^31 apart."""
    return master.view(torch.int32).long() - (param.view(torch.int16).long() << 16)


def _taken(master, param):
    """A master that has taken the values of its parameter to which it cannot have been rounded."""
    return torch.where((_apart(master, param).abs() <= 0x8000) | (master == param), master, param.float())


class Home:
    """Where an optimizer keeps weights and states.

    Args:
        make: Makes the optimizer of a model.
        dtype: That of the parameters.
        blocks: The control's masters take whole blocks.
        apart: The parameters are on a stand-in for a device, whose copies end later than they are started.
        states: The program can write to the optimizer's states.
        later: The step is completed by the next forward."""

    def __init__(self, make, dtype=F32, blocks=False, apart=False, states=True, later=False, flows=False):
        self.make, self.dtype, self.blocks, self.apart = make, dtype, blocks, apart
        self.states, self.later, self.flows = states, later, flows

    @contextlib.contextmanager
    def place(self):
        with contextlib.ExitStack() as stack:
            if self.apart:
                link = Later(room=True)
                for module in ("_copies", "_offload.slot"):
                    stack.enter_context(mock.patch(f"spillway.torch.{module}.link_to", lambda param: link))
            yield


def _memory(**given):
    return lambda model: own.AdamW(model.parameters(), **OPTIONS, **given)


def _tier(**given):
    options = own.TierOptions([None], part_elements=1500, pin_memory=False, durability="process")
    return lambda model: own.AdamW(model.parameters(), **OPTIONS, tier=options, **given)


def _offload(**given):
    return lambda model: own.offload(model, torch.optim.AdamW, **OPTIONS, **{"bucket_bytes": 300, **given})


def _flow(model):
    flow = own.Flow(model, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    optimizer.keeps = flow
    return optimizer


HOMES = {
    "memory": Home(_memory()),
    "memory bf16 master": Home(_memory(master="f32"), BF16),
    "memory bf16 split": Home(_memory(master="split"), BF16, blocks=True),
    "flow of torch": Home(_flow, flows=True),
    "offload flow": Home(_offload(weights="flow", device="cpu"), flows=True),
    "offload flow overlap": Home(_offload(weights="flow", device="cpu", overlap=True), flows=True),
    "offload flow forward": Home(_offload(weights="flow", device="cpu", verdict="forward"), later=True, flows=True),
}
for _dtype, _name in ((F32, "f32"), (BF16, "bf16")):
    for _overlap in (False, True):
        _text = f"{_name}{' overlap' if _overlap else ''}"
        HOMES[f"tier {_text}"] = Home(_tier(overlap=_overlap), _dtype, states=False)
        HOMES[f"tier device {_text}"] = Home(_tier(overlap=_overlap), _dtype, states=False, apart=True)
        for _verdict in ("step", "forward"):
            _make, _later = _offload(overlap=_overlap, verdict=_verdict), _verdict == "forward"
            HOMES[f"offload {_text} {_verdict}"] = Home(_make, _dtype, later=_later)
            HOMES[f"offload device {_text} {_verdict}"] = Home(_make, _dtype, later=_later, apart=True)
    HOMES[f"offload tail {_name}"] = Home(_offload(tail=2), _dtype)
    HOMES[f"offload tail {_name} forward"] = Home(_offload(tail=2, overlap=True, verdict="forward"), _dtype, later=True)

for _verdict in ("step", "forward"):
    _make, _later = _offload(master="split", overlap=True, verdict=_verdict), _verdict == "forward"
    HOMES[f"offload bf16 split {_verdict}"] = Home(_make, BF16, blocks=True, later=_later)
    HOMES[f"offload device bf16 split {_verdict}"] = Home(_make, BF16, blocks=True, apart=True, later=_later)

# Ways to write. Each gets the model, the name of a parameter, and the values.


def _fused(model, name, value):
    """A fused optimizer changes no version."""
    param = model.get_parameter(name)
    before = param.grad
    param.grad = param.detach() - value
    torch.optim.SGD([param], lr=1.0, fused=True).step()
    param.grad = before


def _vector(model, name, value):
    for own_name, param in model.named_parameters():
        if own_name != name:
            param.data = param.data.clone()
    parts = [value if own_name == name else param.detach() for own_name, param in model.named_parameters()]
    vector_to_parameters(parameters_to_vector(parts), model.parameters())


def _numpy(tensor, value):
    words = torch.int16 if tensor.dtype is BF16 else torch.int32
    tensor.detach().view(-1).view(words).numpy()[...] = value.view(-1).view(words).numpy()


def _copy(tensor, value):
    with torch.no_grad():
        tensor.copy_(value)


def _in_inference_mode(tensor, value):
    with torch.inference_mode():
        tensor.copy_(value)


def _new_data(tensor, value):
    tensor.data = value.clone()


def _in_data(tensor, value):
    tensor.data.copy_(value)


def _of_param(write):
    return lambda model, name, value: write(model.get_parameter(name), value)


#: Ways that write to any tensor.
TENSOR = {"data": _in_data, "new data": _new_data, "copy": _copy, "numpy": _numpy, "inference": _in_inference_mode}
PARAMETER = {
    **{name: _of_param(write) for name, write in TENSOR.items()},
    "vector": _vector,
    "fused": _fused,
    "swap": lambda model, name, value: torch.utils.swap_tensors(model.get_parameter(name), torch.nn.Parameter(value.clone())),
    "load": lambda model, name, value: model.load_state_dict({name: value}, strict=False),
    "load assign": lambda model, name, value: model.load_state_dict({name: value.clone()}, strict=False, assign=True),
}


def _new_grad(param, value):
    param.grad = value.clone()


#: Those that need no module.
HELD = [way for way in PARAMETER if way not in ("load", "load assign")]

GRADIENT = {
    **{name: (lambda write: lambda param, value: write(param.grad, value))(write) for name, write in TENSOR.items()},
    "new": _new_grad,
    "none": lambda param, value: setattr(param, "grad", None),
}


def _new_state(state, key, value):
    state[key] = value.clone()


STATE = {
    **{name: (lambda write: lambda state, key, value: write(state[key], value))(write) for name, write in TENSOR.items()},
    "new": _new_state,
}
#: Other values than those of before, which 16 bits have exactly.
VALUES = {
    "half": lambda tensor: tensor * 0.5,
    "negated": lambda tensor: -tensor,
    "reversed": lambda tensor: tensor.flatten().flip(0).view(tensor.shape) * 2,
    "constant": lambda tensor: torch.full_like(tensor, 0.25),
    "one": lambda tensor: torch.cat([tensor.flatten()[:-1], tensor.flatten()[-1:] * 0.5 + 1]).view(tensor.shape),
}
MANNERS = ("settled", "module", "held")
MOMENTS = ("before the first step", "between steps", "between backward and step", "between step and forward", "between forwards")


class Held:
    """The parameters of a model that a program holds. It reads them without the model."""

    def __init__(self, model):
        self._params = dict(model.named_parameters())
        self.get_parameter, self.named_parameters, self.parameters = self._params.get, self._params.items, self._params.values


class Side:
    """A model with its optimizer."""

    def __init__(self, model, home, control):
        self.model, self.home, self.control = model, home, control
        if not control:
            self.optimizer = home.make(model)
        elif home.dtype is BF16:
            self.optimizer = Masters(model.parameters(), home.blocks)
        else:
            self.optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
        self.names, self.params = zip(*model.named_parameters())
        #: What the program has held since before the last step.
        self.held: Held | None = None

    def states(self):
        return self.optimizer.states() if isinstance(self.optimizer, Masters) else self.optimizer.state

    def backward(self, factors):
        loss = self.model(factors)
        loss.backward()
        return loss.item()

    def forward(self, factors):
        with torch.no_grad():
            return self.model(factors).item()

    def settle(self):
        if hasattr(self.optimizer, "settle"):
            self.optimizer.settle()

    def step(self):
        self.held = Held(self.model)
        self.optimizer.step()

    def write(self, what, way, name, value, held=False):
        model = self.held if held else self.model
        if what == "parameter":
            # No read of the module but that of the way, if the value needs none.
            param = self.held.get_parameter(name) if value == "constant" and self.held is not None else model.get_parameter(name)
            PARAMETER[way](model, name, VALUES[value](param.detach()))
        elif what == "gradient":
            param = model.get_parameter(name)
            GRADIENT[way](param, VALUES[value](param.grad.detach()))
        else:
            state = self.state(name)
            # The second moment has no sign.
            STATE[way](state, "exp_avg", VALUES[value](state["exp_avg"]))

    def has(self, what, name):
        """False if there is no state or no gradient that a program could write to."""
        if what == "gradient":
            return self.model.get_parameter(name).grad is not None
        return what != "state" or bool(self.state(name))

    def state(self, name):
        """The state of a name. The optimizer steps the parameter of the construction."""
        return self.states()[self.params[self.names.index(name)]]

    def close(self):
        if hasattr(self.optimizer, "close"):
            self.optimizer.close()


class Refused(Exception):
    """The optimizer refuses what the program does, by an error that says so."""


#: What the error of a write through a held tensor says.
WRITTEN = "was written to after step"


def run(home, shapes, events, steps, seed, manner="settled"):
    """Runs a program on both sides. `events` has for each step and moment what is written; `manner` is how it writes before the forward
    that completes a step. Raises AssertionError at a difference, and Refused at a clear error."""
    home = HOMES[home]
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    # Values of every size differ by far more than a step changes them.
    model = Model(shapes).to(home.dtype)
    sides = [Side(copy.deepcopy(model), home, True)]
    with home.place():
        sides.append(Side(model, home, False))
        try:
            for step in range(steps):
                _step(sides, events, step, shapes, generator, manner)
            _both(sides, lambda side: side.settle())
            _compare(sides)
        finally:
            sides[1].close()


def _step(sides, events, step, shapes, generator, manner):
    factors = [torch.randn(shape, generator=generator) for shape in shapes]

    def write(moment):
        for what, way, name, value in events.get((step, moment), ()):
            late = moment == "between step and forward"
            if not late or manner == "settled":
                _both(sides, lambda side: side.settle())
            _write(sides, what, way, name, value, late and manner == "held")

    if step == 0:
        write("before the first step")
    if (step, "between forwards") in events:
        _both(sides, lambda side: side.forward(factors))
        write("between forwards")
        _both(sides, lambda side: side.forward(factors))
    _both(sides, lambda side: side.backward(factors))
    write("between backward and step")
    _both(sides, lambda side: side.step())
    for side in sides:
        # A read of the model would complete the step.
        for param in {*side.params, *side.held.parameters()}:
            param.grad = None
    write("between steps")
    write("between step and forward")


def _write(sides, what, way, name, value, held):
    if not sides[0].has(what, name):
        # The model has had another parameter there from the first backward on, or the program has taken its gradient.
        assert not sides[1].has(what, name)
        return
    if what == "parameter" and _is_16(sides) and not (sides[0].home.later and (held or value == "constant")):
        # The value has the same bits on both sides.
        _round_alike(sides, [name])
    _both(sides, lambda side: side.write(what, way, name, value, held))


def _round_alike(sides, names):
    for name in names:
        sides[0].optimizer.round_as(sides[0].model.get_parameter(name), sides[1].model.get_parameter(name))


def _both(sides, work):
    """Does the same on both sides, and compares the results."""
    expected = work(sides[0])
    try:
        found = work(sides[1])
    except spillway.InvalidArgumentError as error:
        raise Refused(str(error)) from None
    if expected is not None:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=0.3 if _is_16(sides) else 1e-2)


def _is_16(sides):
    return sides[0].home.dtype is BF16


def _compare(sides):
    control, tested = sides
    if _is_16(sides):
        _round_alike(sides, [name for name, _ in control.model.named_parameters()])
    apart = 0 if _is_16(sides) else 1e-5
    for (name, one), other in zip(control.model.named_parameters(), tested.model.parameters()):
        torch.testing.assert_close(other, one, rtol=apart, atol=apart, msg=lambda text, name=name: f"{name}: {text}")
    saved = tested.optimizer.state_dict()["state"]
    for number, (one, other) in enumerate(zip(control.params, tested.params)):
        state = control.states().get(one)
        if state:
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(saved[number][key].float(), state[key].float(), rtol=1e-4, atol=1e-5)
        if _is_16(sides) and (found := _master(tested.optimizer, other, saved.get(number))) is not None:
            torch.testing.assert_close(found, control.optimizer.master(one), rtol=MASTERS_APART, atol=MASTERS_APART)


def _master(optimizer, param, state):
    """The master of a parameter; None if the optimizer has none to show."""
    if hasattr(optimizer, "master"):
        return optimizer.master(param)
    master = (state or {}).get("master_param")
    # The next step has it follow what the program has written.
    return None if master is None else _taken(master, param.detach())


# Random programs.


def program(seed):
    """The arguments of `run` for the random program of a seed."""
    chance = random.Random(seed)
    home = chance.choice(list(HOMES))
    shapes = [chance.choice(SHAPES) for _ in range(2 * chance.randint(2, 4))]
    names = [name for name, _ in Model(shapes).named_parameters()]
    written: set[tuple[str, int]] = set()
    steps, events, manner = chance.randint(2, 6), {}, chance.choice(("settled", "settled", "module", "held"))
    for _ in range(chance.randint(1, 6)):
        moment, step = chance.choice(MOMENTS), chance.randrange(steps)
        ways = {"parameter": PARAMETER}
        if moment == "between backward and step":
            ways["gradient"] = GRADIENT
        if HOMES[home].states and step and moment != "between step and forward":
            ways["state"] = STATE
        what = chance.choice(list(ways))
        # A parameter that the model has no more gets no gradients.
        way = chance.choice([way for way in ways[what] if way not in ("swap", "load assign") or len(events) == 0])
        if moment == "between step and forward" and manner == "held" and way not in HELD:
            way = "copy"
        event = what, way, chance.choice(names), chance.choice(list(VALUES))
        # A second write can give an element its value of before: a 16-bit one keeps its master or not, as the step has looked in between.
        interval = event[2], step + (moment in ("between steps", "between step and forward"))
        if HOMES[home].dtype is BF16 and what == "parameter" and interval in written:
            continue
        written.add(interval)
        events.setdefault((step, moment), []).append(event)
    return {"home": home, "shapes": shapes, "events": events, "steps": steps, "seed": seed, "manner": manner}


def failure(seed):
    """The text of a program that fails; None if it passes, or if a write to a held parameter is refused, as it may be."""
    given = program(seed)
    try:
        run(**given)
    except Refused as error:
        if not (given["manner"] == "held" and HOMES[given["home"]].later and WRITTEN in str(error)):
            return f"program {seed}: {given}\nrefused: {error}"
    except Exception:
        return f"program {seed}: {given}\n{traceback.format_exc(limit=-3)}"
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    random_programs.main(failure)
