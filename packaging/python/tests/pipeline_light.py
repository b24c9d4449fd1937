"""A backend of the pipeline's executor without torch: bytes in place of tensors, and hashes in place of arithmetic. Equal
results mean that every pass read the data that it must read."""

import hashlib


def data(size, *parts):
    """`size` bytes that depend on all parts."""
    digest = hashlib.shake_128(repr(parts).encode())
    return digest.digest(size)


def parameters(plan, unit, step):
    return data(plan.units[unit].param_bytes, "p", unit, step)


def forward(plan, unit, micro_batch, value, step):
    """The input of the next unit."""
    size = plan.units[unit + 1].input_bytes if unit + 1 < len(plan.units) else 8
    return data(size, "f", unit, micro_batch, value, parameters(plan, unit, step))


def activations(plan, unit, micro_batch, value, step):
    return data(plan.units[unit].activation_bytes, "a", unit, micro_batch, value, parameters(plan, unit, step))


def backward(plan, unit, micro_batch, value, gradient, step):
    """The gradient of the unit's input, and that of its parameters."""
    parts = (unit, micro_batch, activations(plan, unit, micro_batch, value, step), gradient, parameters(plan, unit, step))
    return data(plan.units[unit].input_bytes, "d", *parts), data(plan.units[unit].grad_bytes, "g", *parts)


def accumulated(plan, unit, before, gradient):
    return data(plan.units[unit].grad_bytes, "s", before, gradient)


def serial(plan, step):
    """The accumulated gradients of all units, computed one micro-batch after the other."""
    totals = {}
    for micro_batch in range(plan.micro_batches):
        values = [data(plan.units[0].input_bytes, "x", micro_batch, step)]
        for unit in range(len(plan.units)):
            values.append(forward(plan, unit, micro_batch, values[-1], step))
        gradient = None
        for unit in reversed(range(len(plan.units))):
            gradient, own = backward(plan, unit, micro_batch, values[unit], gradient, step)
            totals[unit] = accumulated(plan, unit, totals.get(unit), own)
    return totals


class LightBackend:
    def __init__(self, device):
        self.device = device

    def plan(self, plan):
        self._plan = plan

    def begin(self, step):
        self.step, self.offloaded, self.optimized, self.verdicts = step, {}, [], []

    def finish(self):
        return self.offloaded, self.optimized, self.verdicts

    def input(self, micro_batch):
        return data(self._plan.units[0].input_bytes, "x", micro_batch, self.step)

    @staticmethod
    def size(value):
        if isinstance(value, dict):
            return sum(len(part) for part in value.values())
        return len(value)

    activation_size = gradient_size = size

    @staticmethod
    def encode(value):
        return None, value

    @staticmethod
    def decode(_, value):
        return value

    def fetch(self, first, units):
        return {unit: parameters(self._plan, unit, self.step) for unit in range(first, first + units)}

    def release(self, first, units):
        pass

    def _inputs(self, first, units, micro_batch, value, held):
        inputs = {}
        for unit in range(first, first + units):
            assert held[unit] == parameters(self._plan, unit, self.step)
            inputs[unit] = value
            value = forward(self._plan, unit, micro_batch, value, self.step)
        return value, inputs

    def forward(self, first, units, micro_batch, value, held):
        output, inputs = self._inputs(first, units, micro_batch, value, held)
        return output, inputs, None if self._plan.recompute else self._activations(inputs, micro_batch)

    def _activations(self, inputs, micro_batch):
        # A buffer for each unit, which later passes read, and the input that its content depends on.
        return Activations(inputs, {unit: activations(self._plan, unit, micro_batch, value, self.step) for unit, value in inputs.items()})

    def recompute(self, first, units, micro_batch, value, held):
        return self._activations(self._inputs(first, units, micro_batch, value, held)[1], micro_batch)

    def backward(self, first, units, micro_batch, found, gradient, before, held):
        sums = {}
        for unit in reversed(range(first, first + units)):
            assert found[unit] == activations(self._plan, unit, micro_batch, found.inputs[unit], self.step)
            assert held[unit] == parameters(self._plan, unit, self.step)
            gradient, own = backward(self._plan, unit, micro_batch, found.inputs[unit], gradient, self.step)
            sums[unit] = accumulated(self._plan, unit, before and before[unit], own)
        return gradient, sums

    def offload(self, first, units, sums):
        self.offloaded.update(sums)

    def optimize(self, first, units):
        assert all(unit in self.offloaded for unit in range(first, first + units))
        self.optimized.append((first, units))

    def verdict(self):
        return (self.step + self.device) % 5 != 0

    def validated(self, verdict):
        self.verdicts.append(verdict)


class Activations(dict):
    def __init__(self, inputs, values):
        super().__init__(values)
        self.inputs = inputs
