"""Optimizers over numpy arrays and torch tensors, many tensors per call, without copies.

    adam = spillway.Adam(lr=1e-3)
    adam.step([(param, grad, exp_avg, exp_avg_sq), ...])

To step the same arrays repeatedly, prepare them once. Repeated steps then run no Python loop:

    prepared = adam.prepare([(param, grad, exp_avg, exp_avg_sq, param_bf16), ...])
    stats = prepared.step(grad_scale=1 / loss_scale, return_stats=True)

Arrays are contiguous, in CPU memory, and of one shape per tuple; a flat array matches any shape with as many elements.

| array | dtype |
|---|---|
| param | float32, float16 or bfloat16 |
| grad | float32, float16 or bfloat16 |
| exp_avg, exp_avg_sq | float32, the dtype of a 16-bit param, or bfloat16 for a float32 param whose gradient and copy are not float16 |
| param_copy | float16 or bfloat16; written by the step |

numpy has no bfloat16: a uint16 array with `uint16_dtype="bf16"`, or ml_dtypes.bfloat16."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress, repeat, starmap
from typing import Any, Protocol, TypeVar

from . import _abi, _arguments, _arrays, _native, _tensor_rows
from ._arrays import Array
from ._attributes import Fixed, described
from .errors import InvalidArgumentError
from .recording import Recording, StepStats

_Value = TypeVar("_Value")


class _Option(Protocol[_Value]):
    """The type of an option that a program reads and sets."""

    def __get__(self, instance: Any, owner: Any = None) -> _Value: ...

    def __set__(self, instance: Any, value: _Value) -> None: ...


# Arrays of one tensor: param, grad, the states, and optionally the 16-bit copy (None: no copy).
Tensors = Iterable[Sequence["Array | None"]]


class _Optimizer:
    """Base of the optimizers: holds the C options structure and runs steps."""

    c_name: str
    _options_type: Any
    _states: tuple[str, ...] = ()
    _defaults: dict[str, float] = {}
    #: The options that a program can set, in the order of the constructor.
    _public: tuple[str, ...] = ()

    # Names of C functions, and whether the C options have the number of the step; set for each subclass.
    _step_name: str
    _recorded_step_name: str
    _counts_steps: bool

    def __init_subclass__(cls) -> None:
        cls._step_name, cls._recorded_step_name = f"spw_{cls.c_name}_step", f"spw_undo_{cls.c_name}_step"
        cls._counts_steps = hasattr(cls._options_type, "step")

    # Another attribute would have no effect on a step.
    __slots__ = ("__weakref__", "_options", "step_count")

    def __init__(self, **given: Any):
        self._options = _abi.sized(self._options_type)
        for name, value in self._defaults.items():
            setattr(self._options, name, value)
        for name, value in given.items():
            if value is not None:
                self._set(name, value)
        #: Number of steps done; the next step has this number plus one.
        self.step_count: int = 0

    def step(
        self,
        tensors: Tensors,
        *,
        grad_scale: float = 1.0,
        return_stats: bool = False,
        uint16_dtype: str | None = None,
        number: int | None = None,
    ) -> StepStats | None:
        """Runs one step over all tensors, in place.

        Args:
            tensors: For each tensor a tuple of param, grad, the states, and optionally a 16-bit copy to write.
            grad_scale: Factor of the gradients, such as 1 / loss scale.
            return_stats: Return the statistics of the scaled gradients, from the same pass over memory.
            uint16_dtype: The dtype that uint16 arrays hold: "bf16" or "f16".
            number: Number of the step, from 1 on, on which bias correction depends; None: the previous number plus one.
                Several calls that form one step of a model must pass the same number.

        Returns:
            StepStats with `return_stats`, else None.

        Raises:
            InvalidArgumentError: A tuple or an array does not fit; nothing was written.
            UnsupportedError: The combination of dtypes is not supported; nothing was written."""
        table, _held = tensor_table(self, tensors, uint16_dtype)
        return self._run(ctypes.addressof(table), len(table), grad_scale, return_stats, None, number)

    def prepare(self, tensors: Tensors, *, shadow: Tensors | None = None, uint16_dtype: str | None = None) -> Prepared:
        """Checks tensors once, for repeated steps over them.

        Args:
            tensors: As for step().
            shadow: For each tensor a tuple of param and the states. Steps then write the new values there and leave
                the tensors' own values unchanged.
            uint16_dtype: The dtype that uint16 arrays hold: "bf16" or "f16".

        Returns:
            The Prepared tensors, which keep the arrays' memory alive.

        Raises:
            InvalidArgumentError: A tuple or an array does not fit."""
        return Prepared(self, tensors, shadow, uint16_dtype)

    def __repr__(self) -> str:
        return described(type(self).__name__, lambda: {name: getattr(self, name) for name in (*self._public, "step_count")})

    def _set(self, name: str, value: Any) -> None:
        try:
            setattr(self._options, name, value)
        except (TypeError, ValueError, OverflowError):
            setattr(self._options, name, _arguments.real(f"{type(self).__name__}: {name}", value))

    def options_of_next_step(self, grad_scale: float, number: int | None = None) -> Any:
        """Returns the C options structure for step `number`; None is the step after the last counted one."""
        options = self._options
        try:
            options.grad_scale = grad_scale
        except (TypeError, ValueError, OverflowError):
            self._set("grad_scale", grad_scale)
        if self._counts_steps:
            options.step = self._number(number)
        return options

    def _number(self, number: int | None) -> int:
        if number is None:
            return self.step_count + 1
        return _arguments.between(f"{type(self).__name__}: number", number, 1, (1 << 63) - 1)

    def _run(
        self, table: Any, count: int, grad_scale: float, wanted: bool, recording: Any = None, number: int | None = None
    ) -> StepStats | None:
        # Written for few bytecodes: a step of a small tensor takes less time than this method.
        number = self.step_count + 1 if number is None else self._number(number)
        options = self._options
        try:
            options.grad_scale = grad_scale
        except (TypeError, ValueError, OverflowError):
            self._set("grad_scale", grad_scale)
        if self._counts_steps:
            options.step = number
        out: Any = _abi.sized(_abi.StepStats) if wanted else None
        stats = ctypes.byref(out) if wanted else None
        status: list[int] = []
        try:
            # The call and the store of its status are one step in C: no signal handler runs in between.
            library = _native._library or _native.library()
            if recording is None:
                status.extend(starmap(getattr(library, self._step_name), ((options, table, count, stats),)))
            else:
                step = getattr(library, self._recorded_step_name)
                status.extend(starmap(step, ((recording, options, table, count, stats),)))
            if status[0]:
                _native.check(status[0])
        finally:
            # Also if a signal handler raises after the call: its step is counted.
            if status and not status[0]:
                self.step_count = number
        return StepStats(bool(out.nonfinite), out.sum_squares) if wanted else None


def _option(name: str, doc: str) -> Any:
    return property(lambda self: getattr(self._options, name), lambda self, value: self._set(name, value), doc=doc)


def _choice(name: str, known: dict[str, int], doc: str) -> Any:
    """An option that is one of a few words."""
    words = {number: word for word, number in known.items()}
    choices = " or ".join(f'"{word}"' for word in known)

    def choose(self: _Optimizer, value: Any) -> None:
        if not isinstance(value, str) or value not in known:
            raise InvalidArgumentError(f"{type(self).__name__}: {name} is {value!r}; pass {choices}")
        setattr(self._options, name, known[value])

    return property(lambda self: words[getattr(self._options, name)], choose, doc=doc)


def _betas(doc: str) -> Any:
    """Two decay rates. Both are checked before one is set."""

    def choose(self: _Optimizer, value: Any) -> None:
        kind = type(self).__name__
        first, second = (_arguments.real(f"{kind}: betas", beta) for beta in _pair(value))
        self._options.beta1, self._options.beta2 = first, second

    return property(lambda self: (self._options.beta1, self._options.beta2), choose, doc=doc)


class Adam(_Optimizer):
    """Adam with AdamW's decoupled weight decay by default; weight_decay_mode="l2" is the original Adam.

    A tensor is a tuple (param, grad, exp_avg, exp_avg_sq[, param_copy]). Results are bit-identical on every processor,
    thread count and GPU.

    Args:
        lr: Learning rate; None: 1e-3.
        betas: Decay rates of the two moments; None: 0.9 and 0.999.
        eps: Term added to the denominator; None: 1e-8.
        weight_decay: Weight decay; None: 0.
        weight_decay_mode: "decoupled" multiplies the parameter by 1 - lr * weight_decay (AdamW); "l2" adds
            weight_decay * param to the gradient (torch.optim.Adam).
        bias_correction: Correct the moments for their start at zero.
        rounding: "stochastic" rounds bfloat16 and 8-bit moments of float32 params at random, so that the expected value is exact;
            "nearest" rounds to nearest even.
        rounding_seed: Seed of stochastic rounding. The random bits depend on it, the step and the element's number in
            its tensor: give tensors that are stepped by one call seeds of their own, with an Adam each.

    Raises:
        InvalidArgumentError: An option is not a number, or `weight_decay_mode` or `rounding` is unknown.

    Example:
        adam = spillway.Adam(lr=1e-3, weight_decay=0.01)
        adam.step([(param, grad, exp_avg, exp_avg_sq)])
        adam.lr = 5e-4"""

    __slots__ = ()

    c_name: str = "adam"
    _options_type, _states = _abi.AdamOptions, ("exp_avg", "exp_avg_sq")
    _public = ("lr", "betas", "eps", "weight_decay", "weight_decay_mode", "bias_correction", "rounding", "rounding_seed")
    _defaults = {"step": 1, "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "grad_scale": 1.0}

    def __init__(
        self,
        lr: float | None = None,
        betas: tuple[float | None, float | None] = (None, None),
        eps: float | None = None,
        weight_decay: float | None = None,
        *,
        weight_decay_mode: str = "decoupled",
        bias_correction: bool = True,
        rounding: str = "nearest",
        rounding_seed: int = 0,
    ):
        beta1, beta2 = _pair(betas)
        super().__init__(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
        self.weight_decay_mode, self.bias_correction = weight_decay_mode, bias_correction
        self.rounding, self.rounding_seed = rounding, rounding_seed

    lr: _Option[float] = _option("lr", "Learning rate of the next step.")
    betas: _Option[tuple[float, float]] = _betas("Decay rates of the moments in the next step.")
    eps: _Option[float] = _option("eps", "Term added to the denominator in the next step.")
    weight_decay: _Option[float] = _option("weight_decay", "Weight decay of the next step.")
    weight_decay_mode: _Option[str] = _choice("weight_decay_mode", _abi.WEIGHT_DECAY_MODES, '"decoupled" or "l2".')
    rounding: _Option[str] = _choice("rounding", _abi.ROUNDINGS, 'Rounding of bfloat16 moments: "nearest" or "stochastic".')

    @property
    def bias_correction(self) -> bool:
        """True if the next step corrects the moments for their start at zero."""
        return not self._options.no_bias_correction

    @bias_correction.setter
    def bias_correction(self, value: bool) -> None:
        self._options.no_bias_correction = int(not value)

    @property
    def rounding_seed(self) -> int:
        """Seed of stochastic rounding in the next step."""
        return int(self._options.rounding_seed)

    @rounding_seed.setter
    def rounding_seed(self, value: int) -> None:
        self._options.rounding_seed = _arguments.unsigned(f"{type(self).__name__}: rounding_seed", value)


class Adagrad(_Optimizer):
    """Adagrad as in torch: the weight decay is added to the gradient before the variance is updated.

    A tensor is a tuple (param, grad, exp_avg_sq[, param_copy]).

    Args:
        lr: Learning rate; None: 1e-2.
        lr_decay: Decay of the learning rate per step; None: 0.
        eps: Term added to the denominator; None: 1e-10.
        weight_decay: Weight decay; None: 0.

    Raises:
        InvalidArgumentError: An option is not a number.

    Example:
        spillway.Adagrad(lr=1e-2).step([(param, grad, exp_avg_sq)])"""

    __slots__ = ()

    c_name: str = "adagrad"
    _options_type, _states = _abi.AdagradOptions, ("exp_avg_sq",)
    _public = ("lr", "lr_decay", "eps", "weight_decay")
    _defaults = {"step": 1, "lr": 1e-2, "eps": 1e-10, "grad_scale": 1.0}

    def __init__(self, lr: float | None = None, lr_decay: float | None = None, eps: float | None = None, weight_decay: float | None = None):
        super().__init__(lr=lr, lr_decay=lr_decay, eps=eps, weight_decay=weight_decay)

    lr: _Option[float] = _option("lr", "Learning rate of the next step.")
    lr_decay: _Option[float] = _option("lr_decay", "Decay of the learning rate per step.")
    eps: _Option[float] = _option("eps", "Term added to the denominator in the next step.")
    weight_decay: _Option[float] = _option("weight_decay", "Weight decay of the next step.")


class Lion(_Optimizer):
    """Lion as in its paper.

    A tensor is a tuple (param, grad, exp_avg[, param_copy]).

    Args:
        lr: Learning rate; None: 1e-4.
        betas: The two decay rates of the moment; None: 0.9 and 0.99.
        weight_decay: Decoupled weight decay; None: 0.

    Raises:
        InvalidArgumentError: An option is not a number.

    Example:
        spillway.Lion(lr=1e-4).step([(param, grad, exp_avg)])"""

    __slots__ = ()

    c_name: str = "lion"
    _options_type, _states = _abi.LionOptions, ("exp_avg",)
    _public = ("lr", "betas", "weight_decay")
    _defaults = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "grad_scale": 1.0}

    def __init__(self, lr: float | None = None, betas: tuple[float | None, float | None] = (None, None), weight_decay: float | None = None):
        beta1, beta2 = _pair(betas)
        super().__init__(lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay)

    lr: _Option[float] = _option("lr", "Learning rate of the next step.")
    betas: _Option[tuple[float, float]] = _betas("Decay rates of the moment in the next step.")
    weight_decay: _Option[float] = _option("weight_decay", "Weight decay of the next step.")


class Signum(_Optimizer):
    """SGD by the sign of the momentum (Bernstein et al. 2018): each element moves by lr.

    A tensor is a tuple (param, grad, exp_avg[, param_copy]).

    Args:
        lr: Learning rate; None: 1e-4.
        momentum: Decay rate of exp_avg, the mean of the gradients; None: 0.9.
        weight_decay: Decoupled weight decay; None: 0.

    Raises:
        InvalidArgumentError: An option is not a number.

    Example:
        spillway.Signum(lr=1e-4).step([(param, grad, exp_avg)])"""

    __slots__ = ()

    c_name: str = "signum"
    _options_type, _states = _abi.SignumOptions, ("exp_avg",)
    _public = ("lr", "momentum", "weight_decay")
    _defaults = {"lr": 1e-4, "momentum": 0.9, "grad_scale": 1.0}

    def __init__(self, lr: float | None = None, momentum: float | None = None, weight_decay: float | None = None):
        super().__init__(lr=lr, momentum=momentum, weight_decay=weight_decay)

    lr: _Option[float] = _option("lr", "Learning rate of the next step.")
    momentum: _Option[float] = _option("momentum", "Decay rate of exp_avg in the next step.")
    weight_decay: _Option[float] = _option("weight_decay", "Weight decay of the next step.")


#: The names of the classes of `spillway.torch` that step as the classes above.
TORCH_CLASSES: tuple[str, ...] = ("AdamW", *(kind.__name__ for kind in _Optimizer.__subclasses__()))


class Prepared:
    """Tensors of one optimizer, checked once by its prepare().

    The arrays' memory is kept alive. An array whose storage is replaced (`param.data = ...`, a new `param.grad`) must
    be prepared again.

    Example:
        prepared = adam.prepare([(param, grad, exp_avg, exp_avg_sq)])
        for batch in batches:
            backward(batch)                    # writes into grad
            prepared.step()"""

    optimizer: Fixed[_Optimizer] = Fixed("The optimizer of prepare().")

    def __init__(self, optimizer: _Optimizer, tensors: Tensors, shadow: Tensors | None = None, uint16_dtype: str | None = None):
        # Twice: a read of the fixed attribute takes as long as a step of a few elements.
        self.optimizer = self._optimizer = optimizer
        self._table, self._held = tensor_table(optimizer, tensors, uint16_dtype, shadow)
        self._address, self._count = ctypes.addressof(self._table), len(self._table)

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self._table)

    def __repr__(self) -> str:
        return described("Prepared", lambda: {"tensors": len(self), "elements": self.elements, "optimizer": self.optimizer})

    def step(self, *, grad_scale: float = 1.0, return_stats: bool = False, number: int | None = None) -> StepStats | None:
        """Runs one step of the optimizer over these tensors.

        Args:
            grad_scale: Factor of the gradients.
            return_stats: Return the statistics of the scaled gradients.
            number: Number of the step; None: the optimizer's step count plus one. Prepared lists that form one step of
                a model must pass the same number.

        Returns:
            StepStats with `return_stats`, else None."""
        return self._optimizer._run(self._address, self._count, grad_scale, return_stats, None, number)

    def record(self, mode: str = "delta") -> Recording:
        """Returns a Recording of these tensors, whose steps can be rolled back.

        Args:
            mode: "delta", "shadow" or "arithmetic"; see Recording."""
        return Recording(self, mode)

    @property
    def elements(self) -> int:
        """Number of elements of all tensors together."""
        return sum(row.n for row in self._table)

    def _run(self, grad_scale: float, wanted: bool, recording: Any = None, number: int | None = None) -> StepStats | None:
        return self.optimizer._run(self._address, self._count, grad_scale, wanted, recording, number)


def counter(optimizers: Iterable[_Optimizer], if_any: Iterable[object] = repeat(True)) -> Callable[[], object]:
    """What counts the next step of each optimizer, if `if_any` yields something true then. A second call counts nothing, and no signal
    handler runs between two optimizers."""
    each = list({id(optimizer): optimizer for optimizer in optimizers}.values())
    numbers = [optimizer.step_count + 1 for optimizer in each]
    # A function of C: a signal handler would run at the begin of one of Python.
    return partial(deque, map(setattr, compress(each, if_any), repeat("step_count"), compress(numbers, if_any)), 0)


def tensor_table(
    optimizer: _Optimizer, tensors: Tensors, uint16_dtype: str | None = None, shadow: Tensors | None = None
) -> tuple[Any, list[Any]]:
    """Returns the C table of an optimizer's tensors, and references that keep their memory alive."""
    names = ("param", "grad", *optimizer._states, "param_copy")
    try:
        entries = [tuple(entry) for entry in tensors]
    except TypeError as error:
        raise InvalidArgumentError(f"tensors: {error}; pass a list of tuples of arrays") from error
    table = (_abi.Tensor * len(entries))()
    for index, entry in enumerate(entries):
        _fill(table[index], entry, names, f"tensors[{index}].", uint16_dtype)
    held = _arrays.all_held(entries)
    if shadow is not None:
        held += _fill_shadows(table, optimizer, shadow, entries, uint16_dtype)
    return table, held


def _fill(slot: Any, entry: tuple[Any, ...], names: tuple[str, ...], prefix: str, uint16_dtype: str | None) -> None:
    """Writes one tuple of arrays into a row of the C table."""
    if len(entry) not in (len(names) - 1, len(names)):
        raise InvalidArgumentError(f"{prefix[:-1]} has {len(entry)} arrays; pass {', '.join(names[:-1])} and optionally {names[-1]}")
    if len(entry) == len(names) and entry[-1] is None:
        names, entry = names[:-1], entry[:-1]
    _tensor_rows.fill(slot, names, entry, [prefix + name for name in names], uint16_dtype)


def _fill_shadows(
    table: Any, optimizer: _Optimizer, shadow: Tensors, tensors: list[tuple[Any, ...]], uint16_dtype: str | None
) -> list[Any]:
    """Writes the shadows into the C table; returns references that keep their memory alive."""
    entries = [tuple(entry) for entry in shadow]
    if len(entries) != len(table):
        raise InvalidArgumentError(f"shadow has {len(entries)} entries for {len(table)} tensors; pass one for each tensor")
    names = ("param", *optimizer._states)
    for index, (slot, entry, own) in enumerate(zip(table, entries, tensors)):
        prefix = f"shadow[{index}]."
        if len(entry) != len(names):
            raise InvalidArgumentError(f"{prefix[:-1]} has {len(entry)} arrays; pass {', '.join(names)}")
        for name, array in zip(names, entry):
            span = _arrays.span(array, prefix + name, True, uint16_dtype)
            _arrays.same_shape(array, own[0], prefix + name, f"tensors[{index}].param")
            _tensor_rows.put(slot, f"shadow_{name}", span, prefix + name)
    return _arrays.all_held(entries)


def _pair(betas: Any) -> tuple[float | None, float | None]:
    try:
        first, second = betas
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"betas is {betas!r}; pass a pair of numbers") from error
    return first, second


def grad_stats(grad: Array, *, scale: float = 1.0, uint16_dtype: str | None = None) -> StepStats:
    """Returns the statistics of one gradient, without a step.

    Args:
        grad: A contiguous array in CPU memory; float32, float16 or bfloat16.
        scale: Factor of the gradient.
        uint16_dtype: The dtype that a uint16 array holds: "bf16" or "f16".

    Raises:
        InvalidArgumentError: `grad` is not such an array.

    Example:
        norm = spillway.grad_stats(grad).sum_squares ** 0.5"""
    row, out = _abi.sized(_abi.Tensor), _abi.sized(_abi.StepStats)
    row.grad, row.n, row.grad_dtype = _arrays.span(grad, "grad", False, uint16_dtype)
    _native.call("spw_grad_stats", ctypes.addressof(row), 1, _arguments.real("scale", scale), ctypes.byref(out))
    return StepStats(bool(out.nonfinite), out.sum_squares)


def accumulate_(
    dst: Array | list[Array], src: Array | list[Array], *, scale: float = 1.0, return_stats: bool = False, uint16_dtype: str | None = None
) -> StepStats | None:
    """Adds gradients to accumulated gradients, in place: dst += src * scale, with one rounding.

    Args:
        dst: A contiguous array in CPU memory, float32, float16 or bfloat16, or a list of such arrays.
        src: An array of the same shape, in any of these dtypes, or as many arrays.
        scale: Factor of the added gradients.
        return_stats: Return the statistics of the sums, from the same pass over memory.
        uint16_dtype: The dtype that uint16 arrays hold: "bf16" or "f16".

    Returns:
        StepStats with `return_stats`, else None.

    Raises:
        InvalidArgumentError: An array does not fit, or overlaps another one; nothing was written.

    Example:
        stats = spillway.accumulate_(total, param.grad, return_stats=True)"""
    if isinstance(dst, (list, tuple)) != isinstance(src, (list, tuple)):
        raise InvalidArgumentError("accumulate_: one of dst and src is an array, the other a list; pass two of a kind")
    to_all: Sequence[Any] = dst if isinstance(dst, (list, tuple)) else [dst]
    given_all: Sequence[Any] = src if isinstance(src, (list, tuple)) else [src]
    if len(to_all) != len(given_all):
        raise InvalidArgumentError(f"accumulate_: dst has {len(to_all)} arrays and src has {len(given_all)}; pass as many of both")
    pairs = list(zip(to_all, given_all))
    table = (_abi.GradTensor * len(pairs))()
    for at, (row, (to, given)) in enumerate(zip(table, pairs)):
        row.struct_size = ctypes.sizeof(_abi.GradTensor)
        row.dst, row.n, row.dst_dtype = _arrays.span(to, f"dst[{at}]", True, uint16_dtype)
        row.src, count, row.src_dtype = _arrays.span(given, f"src[{at}]", False, uint16_dtype)
        _arrays.same_shape(given, to, f"src[{at}]", f"dst[{at}]")
    scale, out = _arguments.real("scale", scale), _abi.sized(_abi.StepStats) if return_stats else None
    _native.call("spw_grad_accumulate", ctypes.addressof(table), len(pairs), scale, ctypes.byref(out) if out else None)
    return None if out is None else StepStats(bool(out.nonfinite), out.sum_squares)
