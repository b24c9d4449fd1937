"""Random programs of spillway.torch's classes against torch's own: dtypes, layouts, groups, wrappers, schedules, copies, checkpoints,
replaced tensors, scalers, refused steps and signal handlers that raise.

    PYTHONPATH=packaging/python:packaging/python/tests python ffi_tests/torch/differential.py FIRST COUNT [SECONDS]

runs the programs FIRST to FIRST + COUNT - 1, and prints each one that fails. The number of a program is the seed of everything in it.
Parameters that torch steps in both optimizers must have equal bits; the others may differ by rounding."""

from __future__ import annotations

import copy
import io
import pickle
import random
import traceback

import random_programs
import torch
from interrupts import Ticking

from spillway import torch as own

DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
LAYOUTS = ["plain", "plain", "plain", "strided", "offset", "channels_last"]
SHAPES = [(), (0,), (1,), (7,), (5, 3), (300,), (4097,), (2, 3, 4, 5)]
#: Absolute and relative difference after some steps of at most 1e-2. The second moment of a clipped gradient may be the smallest number of
#: float16, whose rounding changes an update by half.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 1.5e-2}


class Wrapper:
    """A wrapper that inherits from its optimizer's class and delegates to it."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("Wrapped", (Wrapper, type(optimizer)), {})

    def step(self, closure=None):
        return self._optimizer.step(closure)

    def load_state_dict(self, state_dict):
        # torch's, called with the wrapper, would give groups and states to the wrapper alone.
        self._optimizer.load_state_dict(state_dict)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


def values(shape, dtype, layout, seed):
    """A random tensor, the same for equal seeds."""
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    real = torch.randn([2, *shape], generator=generator, dtype=torch.float64)
    made = torch.complex(real[0], real[1]).to(dtype) if dtype.is_complex else real[0].to(dtype)
    return laid_out(made, layout)


def laid_out(made, layout):
    if layout == "strided":
        return torch.stack([made, made], -1)[..., 0]
    if layout == "offset":
        return torch.cat([made.new_zeros(3), made.reshape(-1)])[3:].view(made.shape)
    if layout == "channels_last" and made.dim() == 4:
        return made.contiguous(memory_format=torch.channels_last)
    return made


class Side:
    """One of the two optimizers, with its own parameters."""

    def __init__(self, cls, specs, groups, options):
        self.params = [torch.nn.Parameter(values(*spec)) for spec in specs]
        self.optimizer = cls(
            [{"params": [self.params[at] for at in places], **given} for places, given in groups], **copy.deepcopy(options)
        )

    @property
    def inner(self):
        """The optimizer without its wrapper."""
        return self.optimizer._optimizer if isinstance(self.optimizer, Wrapper) else self.optimizer

    def ordered(self):
        """The parameters in the order of the optimizer's groups."""
        return [param for group in self.inner.param_groups for param in group["params"]]


class Program:
    """The program of a seed."""

    def __init__(self, seed):
        self.seed, self.chance = seed, random.Random(seed)
        chance = self.chance
        self.name = chance.choice(["Adam", "AdamW", "Adagrad"])
        self.specs = [
            (chance.choice(SHAPES), chance.choice(DTYPES), chance.choice(LAYOUTS), 100 * seed + at) for at in range(chance.randrange(1, 7))
        ]
        if chance.random() < 0.5:
            self.specs = [(shape, torch.float32 if dtype.is_complex else dtype, "plain", at) for shape, dtype, _, at in self.specs]
        places = list(range(len(self.specs)))
        cut = chance.randrange(len(places) + 1)
        self.groups = [(part, self.group_options()) for part in (places[:cut], places[cut:]) if part]
        self.options = {"lr": chance.choice([1e-2, 1e-3]), "foreach": chance.choice([None, True, False]), "maximize": chance.random() < 0.2}
        if any(dtype is torch.float16 for _, dtype, *_ in self.specs):
            # torch divides in 16 bits, where its default is 0.
            self.options["eps"] = 1e-2
        self.max_norm = chance.choice([None, None, 0.5, 10.0])
        self.fused_scaler = False
        beyond = {} if self.max_norm is None else {"max_norm": self.max_norm}
        self.sides = [
            Side(getattr(torch.optim, self.name), self.specs, self.groups, self.options),
            Side(getattr(own, self.name), self.specs, self.groups, {**self.options, **beyond}),
        ]
        self.log = [f"{self.name} {self.options} {beyond} {self.groups} {self.specs}"]

    def group_options(self):
        chance, given = self.chance, {}
        if chance.random() < 0.5:
            given["lr"] = chance.choice([1e-2, 5e-3])
        if chance.random() < 0.5:
            given["weight_decay"] = chance.choice([0.0, 0.1])
        if self.name != "Adagrad" and chance.random() < 0.2:
            given["betas"] = (0.8, 0.95)
        if self.name != "Adagrad" and chance.random() < 0.15:
            given["amsgrad"] = True
        return given

    def run(self):
        for step in range(self.chance.randrange(2, 7)):
            event = self.chance.choice(
                [
                    "none",
                    "none",
                    "copy",
                    "pickle",
                    "load",
                    "exchange",
                    "replace",
                    "schedule",
                    "wrap",
                    "refuse",
                    "signal",
                    "append",
                    "absent",
                    "shared",
                    "closure",
                    "write",
                    "state dtype",
                ]
            )
            self.log.append(f"step {step}: {event}")
            self.event(event, step)
            self.set_grads(step, event)
            if event == "signal":
                self.interrupted()
            elif event == "closure":
                for side in self.sides:
                    if side is self.sides[0]:
                        self.clip_as_ours()
                    assert side.optimizer.step(lambda: 3.5) == 3.5
            else:
                self.clip_as_ours()
                for side in self.sides:
                    side.optimizer.step()
            self.compare()

    def set_grads(self, step, event):
        absent = {at for at in range(len(self.specs)) if event == "absent" and self.chance.random() < 0.5}
        for side in self.sides:
            for at, (param, (shape, dtype, layout, seed)) in enumerate(zip(side.params, self.specs)):
                param.grad = None if at in absent else values(shape, dtype, layout, seed + 7919 * (step + 1))

    def clip_as_ours(self):
        """torch clips before its step what spillway.torch clips within it."""
        grads = [param.grad for param in self.sides[0].params if param.grad is not None]
        if self.max_norm is not None and grads:
            # clip_grad_norm_ computes the norm of 16-bit gradients in 16 bits.
            wide = [grad.to(torch.complex128 if grad.is_complex() else torch.float64) for grad in grads]
            norm = float(torch.stack([torch.linalg.vector_norm(grad) for grad in wide]).square().sum().sqrt())
            for grad in grads:
                grad.mul_(min(1.0, self.max_norm / (norm + 1e-6)))

    def event(self, event, step):
        for side in self.sides:
            if event in ("copy", "pickle"):
                places = [next(at for at, own in enumerate(side.params) if own is param) for param in side.ordered()]
                side.optimizer = copy.deepcopy(side.inner) if event == "copy" else pickle.loads(pickle.dumps(side.inner))
                for at, param in zip(places, side.ordered()):
                    side.params[at] = param
            elif event == "load":
                buffer = io.BytesIO()
                torch.save(side.optimizer.state_dict(), buffer)
                buffer.seek(0)
                side.optimizer.load_state_dict(torch.load(buffer, weights_only=True))
            elif event == "schedule":
                for group in side.inner.param_groups:
                    group["lr"] = group["lr"] * 0.5
            elif event == "wrap" and not isinstance(side.optimizer, Wrapper):
                side.optimizer = Wrapper(side.optimizer)
            elif event == "append" and step < 3:
                spec = ((6,), torch.float32, "plain", 100 * self.seed + 50 + step)
                side.params.append(torch.nn.Parameter(values(*spec)))
                side.optimizer.add_param_group({"params": [side.params[-1]]})
                if side is self.sides[1]:
                    self.specs = [*self.specs, spec]
        if event == "exchange":
            saved = [copy.deepcopy(side.optimizer.state_dict()) for side in self.sides]
            for side, state in zip(self.sides, saved[::-1]):
                # The options of the implementation are each side's own.
                side.optimizer.load_state_dict(state)
        elif event == "replace":
            self.replace()
        elif event == "refuse":
            self.refuse(step)
        elif event == "shared":
            for side in self.sides:
                for state in side.inner.state.values():
                    if "step" in state and self.seed % 2:
                        state["step"].share_memory_()
        elif event == "write":
            with torch.no_grad():
                for side in self.sides:
                    side.params[0].mul_(0.5)
        elif event == "state dtype":
            for side in self.sides:
                for state in side.inner.state.values():
                    if "step" in state and isinstance(state["step"], torch.Tensor):
                        state["step"] = state["step"].clone().reshape([1] if self.seed % 2 else [])

    def replace(self):
        at, what = self.chance.randrange(len(self.specs)), self.chance.choice(["data", "state", "state data", "tensor"])
        for side in self.sides:
            param = side.params[at]
            state = side.inner.state.get(param)
            if what == "data":
                param.data = param.data.clone(memory_format=torch.preserve_format)
            elif what == "state" and state:
                state.update({key: value.clone(memory_format=torch.preserve_format) for key, value in state.items()})
            elif what == "state data" and state:
                for value in state.values():
                    value.data = value.data.clone(memory_format=torch.preserve_format)
            elif what == "tensor" and state:
                side.inner.state[param] = dict(state)

    def refuse(self, step):
        """A step of ours that is refused, at a random place."""
        side = self.sides[1]
        self.set_grads(step + 100, "refuse")
        at = self.chance.randrange(len(side.params))
        param = side.params[at]
        group = next(group for group in side.inner.param_groups if any(param is own for own in group["params"]))
        state, key = side.inner.state.get(param) or {}, self.chance.choice(["lr", "state", "shape"])
        before = self.bits(side)
        if key == "lr":
            kept, group["lr"] = group["lr"], "a word"
        elif state.get("exp_avg", state.get("sum")) is not None and param.numel() > 1:
            name = "exp_avg" if "exp_avg" in state else "sum"
            kept, state[name] = state[name], None if key == "state" else torch.zeros(param.numel() + 1, dtype=param.dtype)
        else:
            return
        try:
            side.optimizer.step()
        except Exception:
            pass
        else:
            raise AssertionError(f"the step was not refused: {key} of parameter {at}")
        finally:
            if key == "lr":
                group["lr"] = kept
            else:
                state[name] = kept
        assert self.bits(side) == before, f"the refused step changed something: {key} of parameter {at}"

    @staticmethod
    def bits(side):
        found = []
        for param in side.params:
            state = side.inner.state.get(param) or {}
            if state and float(state["step"]):
                found.append([(key, bytes_of(value)) for key, value in state.items()])
            found.append((bytes_of(param), None if param.grad is None else bytes_of(param.grad)))
        return [part for part in found if part]

    def interrupted(self):
        """A step of ours during which a handler raises. Only where Spillway steps everything is it whole or not done."""
        self.clip_as_ours()
        theirs, ours = self.sides
        # A copied parameter is contiguous, and its gradient need not be.
        served = all(
            dtype in TOLERANCE and param.is_contiguous() and (param.grad is None or param.grad.is_contiguous())
            for param, (_, dtype, _, _) in zip(ours.params, self.specs)
        )
        if not served or any(group.get("amsgrad") for group in ours.inner.param_groups) or not any(p.grad is not None for p in ours.params):
            for side in self.sides:
                side.optimizer.step()
            return
        theirs.optimizer.step()
        stepped = [param for param in ours.params if param.grad is not None]
        wanted = [self.count(ours, param) + 1 for param in stepped]
        for _ in range(50):
            with Ticking() as ticking:
                ticking.during(ours.optimizer.step, after=random.Random(self.seed + len(self.log)).uniform(1e-5, 1e-3))
            # A handler that raises while `no_grad` ends leaves gradients off, also in torch's own step.
            torch.set_grad_enabled(True)
            # A state dict is made after the optimizer has noted what the library has done.
            ours.optimizer.state_dict()
            counts = [self.count(ours, param) for param in stepped]
            if counts == wanted:
                return
            assert all(count == goal - 1 for count, goal in zip(counts, wanted)), f"half a step was counted: {counts}, {wanted}"
        ours.optimizer.step()

    @staticmethod
    def count(side, param):
        state = side.inner.state.get(param)
        return float(state["step"]) if state else 0.0

    def compare(self):
        theirs, ours = self.sides
        for at, (one, other) in enumerate(zip(theirs.params, ours.params)):
            self.close(one, other, f"parameter {at}")
            state, mine = theirs.inner.state.get(one) or {}, ours.inner.state.get(other) or {}
            assert not state or set(state) == set(mine), f"states of parameter {at}: {set(state)}, {set(mine)}"
            for key in state:
                if key == "step":
                    assert float(state[key]) == float(mine[key]), f"step of parameter {at}: {state[key]}, {mine[key]}"
                else:
                    self.close(state[key], mine[key], f"{key} of parameter {at}")

    def close(self, one, other, what):
        assert one.dtype is other.dtype and one.shape == other.shape, f"{what}: {one.dtype}, {other.dtype}, {one.shape}, {other.shape}"
        by = TOLERANCE.get(one.dtype, 1e-12 if one.dtype is torch.float64 else 1e-5)
        if self.max_norm is not None:
            by = max(by, 1e-5)
        torch.testing.assert_close(one, other, rtol=by, atol=by, equal_nan=True, msg=lambda text: f"{what}: {text}")


def bytes_of(value):
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if value.numel() == 0:
        return str(tuple(value.shape))
    value = torch.empty(value.numel(), dtype=value.dtype).copy_(value.detach().reshape(-1))
    return (torch.view_as_real(value).reshape(-1) if value.is_complex() else value).view(torch.uint8).numpy().tobytes()


def failure(seed):
    """The text of the failure of a program; None if it passes."""
    program = None
    try:
        program = Program(seed)
        program.run()
    except Exception:
        return "\n".join([f"program {seed}", *(program.log if program is not None else []), traceback.format_exc(limit=-6)])
    return None


if __name__ == "__main__":
    random_programs.main(failure)
