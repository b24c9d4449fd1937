"""What a torch optimizer says to the library: the rule of its class, and the options of its parameter groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from . import _abi
from .errors import InvalidArgumentError

#: Options of a group that only torch's own step has.
TORCHS = ("amsgrad", "capturable", "differentiable")
#: The mode of weight decay, by whether it is decoupled.
_DECAY = (_abi.WEIGHT_DECAY_L2, _abi.WEIGHT_DECAY_DECOUPLED)


def is_torchs(group: Mapping[str, Any]) -> bool:
    """True if only torch has what a group asks for."""
    return bool(group.get("amsgrad") or group.get("capturable") or group.get("differentiable"))


def put_numbers(options: Any, group: Mapping[str, Any], of: str, names: Iterable[str] = ("lr", "eps", "weight_decay", "betas")) -> None:
    """Writes numbers of a group into the C struct of an optimizer's options, by default those of Adam.

    Args:
        options: The struct. It has a field of each name, and beta1 and beta2 for "betas".
        group: The group.
        of: The group's name in messages.
        names: Names of the numbers.

    Raises:
        InvalidArgumentError: The group lacks one of them, or it is no number."""
    try:
        for name in names:
            if name == "betas":
                options.beta1, options.beta2 = map(float, group[name])
            else:
                setattr(options, name, float(group[name]))
    except KeyError as error:
        raise InvalidArgumentError(f"{of} has no option {error}; set it; nothing was stepped") from None
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        wanted = "two numbers" if name == "betas" else "a number"
        raise InvalidArgumentError(
            f"{of}: {name} is not {wanted}: {type(error).__name__}: {error}; set {wanted}; nothing was stepped"
        ) from None


def but_factor(options: Any) -> bytes:
    """What two steps have in common that differ in the factor of the gradients. The fields of rounding, which are each piece's own, are the
    last ones of a C struct of options."""
    kind: Any = type(options)
    own = kind.from_buffer_copy(options)
    own.grad_scale = 0.0
    return bytes(own)[: kind.rounding.offset if hasattr(kind, "rounding") else None]


class Rule(NamedTuple):
    """An optimizer's rule: what its class brings to a step."""

    #: The name in the C ABI, and the struct of the options there.
    c_name: str
    options_type: Any
    #: The states with their fields in the C struct.
    keys: dict[str, str]
    #: The numbers of a group that a step needs.
    numbers: tuple[str, ...]
    #: States have a step count.
    counted: bool = True
    #: Sparse gradients are left to torch's step.
    sparse: bool = False
    #: Whether weight decay is decoupled, where a group does not say it; None: the struct has no such field.
    decoupled: bool | None = None
    #: The number of a group with which the states begin; none: they begin with zeros.
    start: str = ""

    @property
    def names(self) -> list[str]:
        """The names of the states of a parameter."""
        return [*(["step"] if self.counted else []), *self.keys]

    def put_options(self, options: Any, group: dict[str, Any], number: int, step: int, factor: float) -> None:
        """Writes the C options of a step of a group's parameters.

        Args:
            options: The struct.
            group, number: The group, and its number for messages.
            step: Number of steps that were done.
            factor: Factor of the gradients."""
        put_numbers(options, group, f"param_groups[{number}]", self.numbers)
        if self.decoupled is not None:
            options.weight_decay_mode = _DECAY[bool(group.get("decoupled_weight_decay", self.decoupled))]
        if self.counted:
            options.step = step + 1
        options.grad_scale = -factor if group.get("maximize") else factor
