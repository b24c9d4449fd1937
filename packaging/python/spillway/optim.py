"""Adam, Adagrad and Lion over numpy arrays and torch tensors, many tensors per call, without copies.

    adam = spillway.Adam(lr=1e-3)
    adam.step([(param, grad, exp_avg, exp_avg_sq), ...])

To step the same arrays repeatedly, prepare them once. Repeated steps then run no Python loop:

    prepared = adam.prepare([(param, grad, exp_avg, exp_avg_sq, param_bf16), ...])
    stats = prepared.step(grad_scale=1 / loss_scale, stats=True)
"""

import ctypes
from typing import NamedTuple

from . import _abi, _arrays, _native
from .errors import InvalidArgument
from .recording import Recording


class StepStats(NamedTuple):
    """Statistics of a step's scaled gradients: whether any is Inf or NaN, and the sum of their squares."""

    nonfinite: bool
    sum_squares: float


class _Optimizer:
    """Base of the optimizers: holds the C options structure and runs steps."""

    _states = ()

    def __init__(self, **given):
        self._options = _native.initialised(self._options_type, f"spw_{self.c_name}_options_init")
        for name, value in given.items():
            if value is not None:
                self._set(name, value)
        self.step_count = 0

    def step(self, tensors, *, grad_scale=1.0, stats=False, uint16_as=None, number=None):
        """Runs one step over all tensors. Each entry is a tuple of param, grad, the states and optionally a 16-bit copy
        to write.

        `grad_scale` multiplies the gradients. With stats=True the call returns StepStats of the scaled gradients, else
        None. `uint16_as` names the dtype of uint16 arrays, such as "bf16".

        `number` is the step number, from 1 on; None is the previous number plus one. Bias correction depends on it.
        Several calls that form one step of a model must pass the same number."""
        return self.prepare(tensors, uint16_as=uint16_as).step(grad_scale=grad_scale, stats=stats, number=number)

    def prepare(self, tensors, *, shadow=None, uint16_as=None):
        """Checks the tensors once and keeps their addresses and their memory for repeated steps.

        `shadow` has a tuple of param and the states for each tensor. Steps then write the new values there and leave
        the tensors' own values unchanged."""
        return Prepared(self, tensors, shadow, uint16_as)

    def _set(self, name, value):
        try:
            setattr(self._options, name, value)
        except TypeError as error:
            raise InvalidArgument(f"{name} is {value!r}; a number is needed") from error

    def options_of_next_step(self, grad_scale, number=None):
        """The C options structure for step `number`; None is the step after the last counted one."""
        self._set("grad_scale", grad_scale)
        if hasattr(self._options, "step"):
            self._options.step = self._number(number)
        return self._options

    def _number(self, number):
        if number is None:
            return self.step_count + 1
        if not isinstance(number, int) or not 1 <= number < 1 << 63:
            raise InvalidArgument(f"number is {number!r}; the number of a step, from 1 on, is needed")
        return number

    def _run(self, table, count, grad_scale, wanted, recording=None, number=None):
        number = self._number(number)
        options = self.options_of_next_step(grad_scale, number)
        out = _abi.sized(_abi.StepStats) if wanted else None
        arguments = ctypes.byref(options), table, count, ctypes.byref(out) if wanted else None
        if recording is None:
            _native.check(getattr(_native.library(), f"spw_{self.c_name}_step")(*arguments))
        else:
            _native.check(getattr(_native.library(), f"spw_undo_{self.c_name}_step")(recording, *arguments))
        self.step_count = number
        return StepStats(bool(out.nonfinite), out.sum_squares) if wanted else None


def _option(name, doc):
    return property(lambda self: getattr(self._options, name), lambda self, value: self._set(name, value), doc=doc)


class Adam(_Optimizer):
    """Adam. The default is AdamW's decoupled weight decay ("decoupled"); "l2" adds the decay to the gradient.

    A tensor is a tuple (param, grad, exp_avg, exp_avg_sq[, param_copy]). Options that are None keep torch's
    defaults."""

    c_name, _options_type, _states = "adam", _abi.AdamOptions, ("exp_avg", "exp_avg_sq")

    def __init__(self, lr=None, betas=(None, None), eps=None, weight_decay=None, *, weight_decay_mode="decoupled",
                 bias_correction=True):
        if weight_decay_mode not in _abi.WEIGHT_DECAY_MODES:
            raise InvalidArgument(f"weight_decay_mode is {weight_decay_mode!r}; \"decoupled\" or \"l2\" expected")
        beta1, beta2 = _pair(betas)
        super().__init__(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
                         weight_decay_mode=_abi.WEIGHT_DECAY_MODES[weight_decay_mode],
                         no_bias_correction=int(not bias_correction))

    lr = _option("lr", "learning rate of the next step")
    eps = _option("eps", "term added to the denominator")
    weight_decay = _option("weight_decay", "weight decay of the next step")
    betas = property(lambda self: (self._options.beta1, self._options.beta2), doc="decay rates of the moments")


class Adagrad(_Optimizer):
    """Adagrad as in torch: the weight decay is added to the gradient before the variance is updated.

    A tensor is a tuple (param, grad, exp_avg_sq[, param_copy])."""

    c_name, _options_type, _states = "adagrad", _abi.AdagradOptions, ("exp_avg_sq",)

    def __init__(self, lr=None, lr_decay=None, eps=None, weight_decay=None):
        super().__init__(lr=lr, lr_decay=lr_decay, eps=eps, weight_decay=weight_decay)

    lr = _option("lr", "learning rate of the next step")
    weight_decay = _option("weight_decay", "weight decay of the next step")


class Lion(_Optimizer):
    """Lion as in its paper. A tensor is a tuple (param, grad, exp_avg[, param_copy])."""

    c_name, _options_type, _states = "lion", _abi.LionOptions, ("exp_avg",)

    def __init__(self, lr=None, betas=(None, None), weight_decay=None):
        beta1, beta2 = _pair(betas)
        super().__init__(lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay)

    lr = _option("lr", "learning rate of the next step")
    weight_decay = _option("weight_decay", "weight decay of the next step")


class Prepared:
    """Tensors of one optimizer, checked once. Their memory is kept alive. An array whose storage is replaced
    (`param.data = ...`, a new `param.grad`) must be prepared again."""

    def __init__(self, optimizer, tensors, shadow=None, uint16_as=None):
        self.optimizer = optimizer
        self._table, self._held = tensor_table(optimizer, tensors, uint16_as, shadow)

    def __len__(self):
        return len(self._table)

    def step(self, *, grad_scale=1.0, stats=False, number=None):
        """Runs one step of the optimizer over these tensors; with stats=True returns StepStats. See the optimizer's
        step() for `number`: prepared lists that form one step of a model must pass the same number."""
        return self._run(grad_scale, stats, number=number)

    def record(self, mode="delta"):
        """A Recording, whose steps can be rolled back, of mode "delta", "shadow" or "arithmetic"."""
        return Recording(self, mode)

    @property
    def elements(self):
        """Number of elements of all tensors together."""
        return sum(row.n for row in self._table)

    def _run(self, grad_scale, stats, recording=None, number=None):
        return self.optimizer._run(ctypes.addressof(self._table), len(self._table), grad_scale, stats, recording, number)


def tensor_table(optimizer, tensors, uint16_as=None, shadow=None):
    """The C table of an optimizer's tensors, and references that keep their memory alive."""
    names = ("param", "grad", *optimizer._states, "param_copy")
    try:
        entries = [tuple(entry) for entry in tensors]
    except TypeError as error:
        raise InvalidArgument(f"tensors: {error}; a list of tuples of arrays is needed") from error
    table = (_abi.Tensor * len(entries))()
    for index, entry in enumerate(entries):
        _fill(table[index], entry, names, f"tensors[{index}].", uint16_as)
    held = [_arrays.held(array) for entry in entries for array in entry if array is not None]
    if shadow is not None:
        held += _fill_shadows(table, optimizer, shadow, entries, uint16_as)
    return table, held


def _fill(slot, entry, names, prefix, uint16_as):
    """Writes one tuple of arrays into a row of the C table."""
    if len(entry) not in (len(names) - 1, len(names)):
        raise InvalidArgument(f"{prefix[:-1]} has {len(entry)} arrays; {', '.join(names[:-1])}"
                              f" and perhaps {names[-1]} expected")
    slot.struct_size = ctypes.sizeof(_abi.Tensor)
    for name, array in zip(names, entry):
        if name == "param_copy" and array is None:
            continue
        argument = prefix + name
        address, count, code = _arrays.span(array, argument, name != "grad", uint16_as)
        if name == "param":
            slot.n = count
        else:
            _arrays.same_shape(array, entry[0], argument, prefix + "param")
        setattr(slot, name, address)
        field = _DTYPE_FIELDS[name]
        if field == "state_dtype" and slot.state_dtype not in (_abi.DTYPE_NONE, code):
            raise InvalidArgument(f"{argument} has another dtype than {prefix}exp_avg")
        setattr(slot, field, code)


def _fill_shadows(table, optimizer, shadow, tensors, uint16_as):
    """Writes the shadows into the C table; returns references that keep their memory alive."""
    entries = [tuple(entry) for entry in shadow]
    if len(entries) != len(table):
        raise InvalidArgument(f"shadow has {len(entries)} entries for {len(table)} tensors")
    names = ("param", *optimizer._states)
    for index, (slot, entry, own) in enumerate(zip(table, entries, tensors)):
        prefix = f"shadow[{index}]."
        if len(entry) != len(names):
            raise InvalidArgument(f"{prefix[:-1]} has {len(entry)} arrays; {', '.join(names)} expected")
        for name, array in zip(names, entry):
            address, _, code = _arrays.span(array, prefix + name, True, uint16_as)
            _arrays.same_shape(array, own[0], prefix + name, f"tensors[{index}].param")
            if code != getattr(slot, _DTYPE_FIELDS[name]):
                raise InvalidArgument(f"{prefix}{name} has another dtype than tensors[{index}].{name}")
            setattr(slot, f"shadow_{name}", address)
    return [_arrays.held(array) for entry in entries for array in entry]


_DTYPE_FIELDS = {"param": "param_dtype", "grad": "grad_dtype", "exp_avg": "state_dtype", "exp_avg_sq": "state_dtype",
                 "param_copy": "copy_dtype"}


def _pair(betas):
    try:
        first, second = betas
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"betas is {betas!r}; a pair of numbers is needed") from error
    return first, second


def grad_stats(grad, *, scale=1.0, uint16_as=None):
    """StepStats of one gradient multiplied by `scale`, without a step."""
    address, count, code = _arrays.span(grad, "grad", False, uint16_as)
    out = _abi.sized(_abi.StepStats)
    _native.check(_native.library().spw_grad_stats(address, code, count, scale, ctypes.byref(out)))
    return StepStats(bool(out.nonfinite), out.sum_squares)
