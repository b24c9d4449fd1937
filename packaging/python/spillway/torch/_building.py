"""The table of the present tensors: it is built of the parameters that Spillway serves, and again after a change that a table cannot
take."""

from __future__ import annotations

from typing import Any

import torch

from .. import _abi
from ..errors import SpillwayError, UnsupportedError
from ._parts import part_of
from ._precision import LOW, master_of
from ._rows import Row, check_complete, check_kinds, check_memory, check_state, check_versions, is_served, lay_out, local, name_of
from ._table import Table
from ._torch_step import TorchStep, check_layout, is_torchs


class Building(TorchStep):
    """Base of the optimizers of this package; not for direct use."""

    #: The options struct of each class.
    _options_type: Any
    #: Whether a group asks for torch's own step, for each group of the present table.
    _flags: list[bool]
    #: Why this optimizer cannot leave a parameter to torch's step, and what to do.
    _rest_words = (
        "is stepped by torch, which cannot roll a step back and keeps no moments or masters of other dtypes; leave out undo, "
        "moment_dtype and master, or pass contiguous CPU parameters and gradients of 16 or 32 bits"
    )

    def _current(self) -> Table:
        """The table of the present tensors."""
        table = self._table
        flags = [is_torchs(group) for group in self.param_groups]
        # Another default device must not apply to the table.
        with torch._C.DisableTorchFunction():
            if table is None or flags != self._flags or not table.refresh() or self._rest_changed():
                self._forget_low_bits()
                table = self._table = None
                table = self._build()
                if not table.refresh():
                    raise SpillwayError(f"{type(self).__name__}: parameters, gradients or states change while a step reads them")
                # In this order: a signal handler may raise in between.
                self._flags = flags
                self._table = table
        return table

    def _build(self) -> Table:
        rows, rest = [], []
        for number, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                grad = getattr(param, self._grad_name, None)
                if grad is None:
                    continue
                name = name_of(group, number, index)
                check_layout(grad, name, type(self).__name__, self._sparse)
                check_kinds(self.state.get(param, {}), (*self._keys, self._precision.master_state[0]), name)
                if is_torchs(group) or not is_served(param, grad, name):
                    # States lie in the order of the parameters, as torch creates them.
                    self.state[param]
                    rest.append((number, index))
                else:
                    rows.append(self._row(number, index, name))
        if rest and (self.undo or self._precision.beyond_torch):
            number, index = rest[0]
            raise UnsupportedError(f"{name_of(self.param_groups[number], number, index)} {self._rest_words}")
        check_memory(rows, self.param_groups)
        self._rest = rest
        return Table(
            self,
            rows,
            self._keys,
            self._new_options,
            own_options=self._precision.stochastic,
            master=self._precision.master_state[0],
            grad_name=self._grad_name,
        )

    def _row(self, number: int, index: int, name: str) -> Row:
        group = self.param_groups[number]
        param = group["params"][index]
        states, master = self._states_of(group, param, name), None
        if self._precision.has_master(param):
            key, dtype = self._precision.master_state
            if key == LOW and param.dtype is not torch.bfloat16:
                raise UnsupportedError(
                    f'{name} is {param.dtype}, and master="split" is for torch.bfloat16; pass master="f32", or cast the parameter'
                )
            lay_out(param, self.state[param], [key])
            master = master_of(self._precision, param, self.state[param])
            check_state(local(param), master, key, name, (dtype,))
        row = Row(number, index, local(param), local(getattr(param, self._grad_name)), states, master, self._copy_of(param))
        if self.undo or master is not None:
            check_versions([row.param, row.grad, *states, *([] if master is None else [master])], name)
        return row

    def _copy_of(self, param: torch.Tensor) -> torch.Tensor | None:
        """The 16-bit tensor to which a step of a float32 parameter also writes."""
        return None

    def _new_options(self, place: tuple[int, int]) -> Any:
        options = _abi.sized(self._options_type)
        if self._precision.stochastic:
            number, index = place
            before = sum(len(group["params"]) for group in self.param_groups[:number])
            param = self.param_groups[number]["params"][index]
            options.rounding = _abi.ROUNDINGS["stochastic"]
            # Different parts of one parameter must not get the same random bits, and replicas of a part must.
            options.rounding_seed = (self._precision.seed + (part_of(param) << 32) + before + index) % 2**64
        return options

    def _states_of(self, group: dict[str, Any], param: torch.Tensor, name: str) -> tuple[torch.Tensor, ...]:
        state = self.state[param]
        if not state:
            # Made apart: a signal handler that raises leaves all states or none.
            new: dict[str, Any] = {}
            self._new_state(group, param, new)
            state.update(new)
        lay_out(param, state, list(self._keys))
        check_complete(state, self._state_names(), name)
        states = tuple(local(state[key]) for key in self._keys)
        precision = self._precision
        dtypes = (precision.of_moments(param),) if precision.beyond_torch else (torch.float32, param.dtype)
        for key, tensor in zip(self._keys, states):
            check_state(local(param), tensor, key, name, dtypes)
        return states

    def _zeros(self, param: torch.Tensor) -> torch.Tensor:
        """A moment at the start."""
        return torch.zeros_like(param, dtype=self._precision.of_moments(param), memory_format=torch.preserve_format)

    def _new_state(self, group: dict[str, Any], param: torch.Tensor, state: dict[str, Any]) -> None:
        """Creates the states of a parameter, as torch's class does."""
        raise NotImplementedError
