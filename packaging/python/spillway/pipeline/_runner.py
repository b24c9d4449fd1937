"""Trains a torch model in a pipeline of processes on one machine, by a schedule of plan()."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .. import _arguments
from .._attributes import Fixed, described
from ..errors import InvalidArgumentError
from . import _torch
from ._fleet import TRANSPORTS, Fleet
from ._plan import Plan, Unit, plan
from ._stage_optimizer import StageOptimizer, refuse_parameter
from ._store import Store
from ._torch import seed_of

__all__ = ["Pipeline", "StepReport", "measure", "seed_of"]


class StepReport(NamedTuple):
    """Results of a step.

    Attributes:
        loss: Mean loss of the micro-batches.
        losses: Loss of each micro-batch.
        committed: False if a gradient had Inf or NaN: no weight has changed then.
        passes_seconds: Measured seconds from the first pass to the last.
        bubble_ratio: Measured idle time of the devices between the two, as a fraction.
        memory: For each device the measured changes of memory, in order: (operation, kind, freed, bytes afterwards)."""

    loss: float
    losses: list[float]
    committed: bool
    passes_seconds: float
    bubble_ratio: float
    memory: list[list[tuple[int, str, bool, int]]]


class Pipeline:
    """Trains units in processes, one for each device, by a schedule. Parameters are in shared host memory; each process
    fetches those of its present and next stage. One thread uses a Pipeline at a time.

    The processes are started by multiprocessing's spawn method: a script needs `if __name__ == "__main__":`. Units, loss
    and optimizer are pickled. Random numbers, as of dropout, are the same in a forward pass and its recomputation.

    Args:
        units: The modules of the model, in order: an nn.Sequential or a list. Each maps one tensor to one tensor.
        loss: Called as loss(output, target) for each micro-batch; returns a scalar.
        optimizer: Called with the parameters of a stage; returns its optimizer, such as
            functools.partial(spillway.pipeline.StageAdamW, lr=1e-3).
        sample: An input of one micro-batch. All micro-batches have its shape and dtype.
        schedule: As for plan().
        devices: Number of processes.
        micro_batches: Number of micro-batches of a step.
        split: Units per forward stage.
        recompute: As for plan().
        early_checkpoints: As for plan().
        async_optimizer: As for plan(). Such an optimizer needs rollback(), unless check_finite is False.
        slots: As for plan().
        seed: Seed of the random numbers; see seed_of().
        threads: Number of threads of torch in each process. Weights are bit-identical for one number of threads.
        check_finite: Validate gradients: a step with Inf or NaN changes no weight.
        transport: How messages travel between the processes: "pipes", or "gloo" for torch.distributed's Gloo on the loopback
            interface.

    Attributes:
        plan: The Plan, with measured costs.

    Raises:
        InvalidArgumentError: The schedule is not possible, or an argument does not fit.
        PipelineError: A process failed.

    Example:
        with spillway.pipeline.Pipeline(units, loss, optimizer, sample, devices=2, micro_batches=4, split=2) as pipeline:
            for inputs, targets in batches:
                print(pipeline.step(inputs, targets).loss)
            pipeline.sync()"""

    plan: Fixed[Plan] = Fixed("The Plan, with measured costs.")

    def __init__(
        self,
        units: Sequence[torch.nn.Module] | torch.nn.Sequential,
        loss: Callable[..., torch.Tensor],
        optimizer: Callable[..., torch.optim.Optimizer],
        sample: torch.Tensor,
        *,
        schedule: str = "decoupled",
        devices: int = 2,
        micro_batches: int = 4,
        split: int = 1,
        recompute: bool | None = None,
        early_checkpoints: bool = True,
        async_optimizer: bool | None = None,
        slots: int = 2,
        seed: int = 0,
        threads: int = 1,
        check_finite: bool = True,
        transport: str = "pipes",
    ):
        self._units = list(units)
        for name, value in (
            ("devices", devices),
            ("micro_batches", micro_batches),
            ("split", split),
            ("slots", slots),
            ("threads", threads),
        ):
            if _arguments.unsigned(f"Pipeline: {name}", value, 31) == 0:
                raise InvalidArgumentError(f"Pipeline: {name} is 0; pass a number of at least 1")
        _arguments.one_of("Pipeline: transport", transport, TRANSPORTS)
        if not self._units or len(self._units) % split:
            raise InvalidArgumentError(f"Pipeline: there are {len(self._units)} units; pass a multiple of split, {split}")
        _refuse_tier(optimizer)
        _refuse_for_stage(optimizer, self._units)
        self.plan = plan(
            schedule,
            devices=devices,
            micro_batches=micro_batches,
            stages=len(self._units) // split,
            split=split,
            units=measure(self._units, sample),
            slots=slots,
            recompute=recompute,
            early_checkpoints=early_checkpoints,
            async_optimizer=async_optimizer,
        )
        _refuse_unusable(optimizer, check_finite and self.plan.async_optimizer)
        self._sample, self._step, self._steps, self._closed = sample, 0, 0, False
        self._store = Store(self._units)
        pairs = {(one.device, one.peer) for one in self.plan.operations if one.kind.startswith("send") and one.peer is not None}
        try:
            maker = _torch.Maker(self._units, loss, optimizer, self._store, seed, threads, check_finite)
            self._fleet = Fleet(devices, pairs, maker, transport)
            self._fleet.set_plan(self.plan)
        except BaseException:
            self._store.close()
            raise
        first = {(one.kind, one.first_unit): one.device for one in self.plan.operations}
        self._input_device, last = first["forward", 0], len(self._units) - self.plan.backward_split
        self._target_devices = {first["backward", last], first["forward", len(self._units) - split]}

    def __repr__(self) -> str:
        def facts() -> dict[str, Any]:
            plan = self.plan
            return {"schedule": plan.schedule, "devices": plan.devices, "micro_batches": plan.micro_batches, "steps": self._steps}

        return described("Pipeline", facts, "closed" if self.__dict__.get("_closed", True) else "open")

    def step(self, inputs: torch.Tensor, targets: torch.Tensor, timeout: float | None = None) -> StepReport:
        """Runs a step.

        Args:
            inputs: The inputs of all micro-batches; the first dimension is divided into micro_batches parts.
            targets: The targets, divided in the same way.
            timeout: Seconds; None: no limit.

        Raises:
            InvalidArgumentError: The inputs do not have the shapes of the sample, there are no targets, or the timeout is negative
                or not finite. Nothing was done.
            PipelineError: A process failed. All processes have ended.
            TimedOutError: The step did not end in time. All processes have ended."""
        parts = [self._divided(tensor, name) for tensor, name in ((inputs, "inputs"), (targets, "targets"))]
        for part in parts[0]:
            if part.shape != self._sample.shape or part.dtype != self._sample.dtype:
                raise InvalidArgumentError(
                    f"step: a micro-batch of inputs has shape {tuple(part.shape)} and {part.dtype}; the sample has "
                    f"{tuple(self._sample.shape)} and {self._sample.dtype}"
                )
        orders = []
        for device in range(self.plan.devices):
            given = (parts[0] if device == self._input_device else [], parts[1] if device in self._target_devices else [])
            orders.append(("step", self._step, self._steps, pickle.dumps(tuple(dict(enumerate(some)) for some in given))))
        answers = self._fleet.ask(orders, timeout)
        committed = all(backend[1] for _, backend in answers)
        self._step, self._steps = self._step + 1, self._steps + committed
        losses: dict[int, float] = {}
        for _, backend in answers:
            losses.update(backend[0])
        ordered = [losses[micro_batch] for micro_batch in range(self.plan.micro_batches)]
        spans = [span for (_, device_spans), _ in answers for span in device_spans]
        seconds = max(end for _, _, end in spans) - min(start for _, start, _ in spans)
        busy = sum(end - start for _, start, end in spans)
        return StepReport(
            sum(ordered) / len(ordered),
            ordered,
            committed,
            seconds,
            1 - busy / (seconds * self.plan.devices),
            [[tuple(event) for event in events] for (events, _), _ in answers],
        )

    def _divided(self, tensor: torch.Tensor, name: str) -> list[torch.Tensor]:
        count = self.plan.micro_batches
        if isinstance(tensor, torch.Tensor) and (tensor.layout is not torch.strided or tensor.is_meta):
            raise InvalidArgumentError(f"step: {name} is a tensor of {tensor.layout} on {tensor.device}; pass one with strides and values")
        if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0 or not tensor.shape[0] or tensor.shape[0] % count:
            raise InvalidArgumentError(
                f"step: {name} must be a tensor whose first dimension is a multiple of {count} micro-batches, and not 0"
            )
        return [part.detach().cpu().clone() for part in tensor.chunk(count)]

    def set_options(self, **options: Any) -> None:
        """Sets options of all optimizers, such as lr, from the next step on.

        Raises:
            InvalidArgumentError: An optimizer has no such option or cannot step with the value, or the value cannot be pickled.
                Nothing was done."""
        self._apply("set_options", options)

    def state_dict(self) -> dict[int, Any]:
        """Returns the states of the optimizers, by the first unit of their stage."""
        states: dict[int, Any] = {}
        for data in self._fleet.ask([("call", "optimizers.state_dicts", ())] * self.plan.devices):
            states.update(pickle.loads(data))
        return states

    def load_state_dict(self, state: dict[int, Any]) -> None:
        """Loads states that state_dict() returned in a pipeline of the same stages.

        Raises:
            InvalidArgumentError: The states are those of other stages or parameters, or an optimizer cannot step with them.
                Nothing was done."""
        stages = sorted(
            {
                one.first_unit
                for one in self.plan.operations
                if one.kind == "optimize"
                and any(self._store.is_trained(unit) for unit in range(one.first_unit, one.first_unit + one.units))
            }
        )
        if not isinstance(state, dict) or set(state) != set(stages):
            given = sorted(state, key=repr) if isinstance(state, dict) else type(state).__name__
            raise InvalidArgumentError(f"load_state_dict: the states are of the stages {given}; pass those of {stages}, from state_dict()")
        self._apply("load_state_dict", state)

    def _apply(self, name: str, value: Any) -> None:
        """Calls a method of every device, after no device has refused the value: a refusal leaves the pipeline as it is."""
        try:
            data = pickle.dumps(value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InvalidArgumentError(f"{name}: the values must be picklable, for the processes of the devices: {error}") from error
        refusals = self._fleet.ask([("call", "optimizers.refusal", (name, data))] * self.plan.devices)
        for refusal in refusals:
            if refusal:
                raise InvalidArgumentError(refusal)
        self._fleet.ask([("call", f"optimizers.{name}", (data,))] * self.plan.devices)

    def process_ids(self) -> list[int]:
        """Returns the ids of the processes, by device."""
        return self._fleet.process_ids()

    @torch.no_grad()
    def sync(self) -> None:
        """Copies the weights into the parameters of the units. Works after a step that failed too, if no optimizer of that
        step had begun, or all had ended.

        Raises:
            TornError: The weights are those of half a step.
            InvalidArgumentError: The pipeline is closed."""
        if self._closed:
            raise InvalidArgumentError("sync: this pipeline is closed; call sync() before close()")
        self._store.check_whole(self._steps)
        for number, unit in enumerate(self._units):
            for ours, theirs in zip(self._store.tensors(number), unit.parameters()):
                theirs.copy_(ours)

    def close(self) -> None:
        """Ends all processes. May be called again, also after a signal handler has raised in it."""
        self._closed = True
        self._fleet.close()
        self._store.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError("a Pipeline cannot be copied or pickled; open another one")


def measure(units: Sequence[torch.nn.Module], sample: torch.Tensor) -> list[Unit]:
    """Measures the costs of units with one micro-batch, on copies of the modules.

    Args:
        units: The modules.
        sample: An input of one micro-batch."""
    costs, value = [], sample
    with torch.random.fork_rng(devices=[]):
        for number, original in enumerate(units):
            module = copy.deepcopy(original)
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            leaf = value.detach().clone().requires_grad_(number > 0 and value.is_floating_point())
            saved: dict[int, int] = {}
            own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()} | {leaf.untyped_storage().data_ptr()}

            def pack(tensor: torch.Tensor, own: set[int] = own, saved: dict[int, int] = saved) -> torch.Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in own:
                    saved[storage.data_ptr()] = storage.nbytes()
                return tensor

            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                output = _torch._checked(number, module, leaf)
                if output.requires_grad:
                    output.backward(torch.zeros_like(output))
            for name, buffer in module.named_buffers():
                if not torch.allclose(buffers[name], buffer, rtol=0, atol=0, equal_nan=True):
                    raise _torch.changes_buffer(number, name)
            forward, backward = _seconds(module, leaf.detach(), leaf.requires_grad)
            costs.append(
                Unit(
                    forward=forward,
                    backward=backward,
                    recompute=forward,
                    param_bytes=sum(parameter.nbytes for parameter in module.parameters()),
                    grad_bytes=sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad),
                    activation_bytes=sum(saved.values()),
                    input_bytes=leaf.numel() * leaf.element_size(),
                )
            )
            value = output.detach()
    return costs


def _seconds(module: torch.nn.Module, value: torch.Tensor, requires_grad: bool) -> tuple[float, float]:
    """The shortest of three forward and backward passes, after one that was not timed."""
    forward, backward = [], []
    for _ in range(3):
        leaf = value.clone().requires_grad_(requires_grad)
        with torch.enable_grad():
            start = time.perf_counter()
            output = module(leaf)
            middle = time.perf_counter()
            if output.requires_grad:
                output.backward(torch.zeros_like(output))
            end = time.perf_counter()
        forward.append(middle - start)
        backward.append(end - middle)
    return min(forward), min(backward)


def _refuse_tier(optimizer: Callable[..., Any]) -> None:
    if getattr(optimizer, "keywords", {}).get("tier") is not None:
        raise InvalidArgumentError(
            "Pipeline: the optimizer has tier=, but the optimizers of several stages cannot share the job of a tier; leave out tier"
        )


def _refuse_for_stage(optimizer: Callable[..., Any], units: Sequence[torch.nn.Module]) -> None:
    """Refuses parameters that the step of a StageAdam or StageAdamW would refuse, which would end the pipeline."""
    kind = getattr(optimizer, "func", optimizer)
    if isinstance(kind, type) and issubclass(kind, StageOptimizer):
        for number, unit in enumerate(units):
            for name, parameter in unit.named_parameters():
                refuse_parameter(f"Pipeline: {kind.__name__}", f"parameter {name} of unit {number}", parameter)


def _refuse_unusable(optimizer: Callable[..., Any], rolls_back: bool) -> None:
    """Refuses an optimizer that cannot step one parameter, or not roll the step back."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    try:
        made = optimizer([parameter])
    except Exception:
        if rolls_back:
            raise
        # It may need the parameters of a whole stage: the processes tell.
        return
    try:
        made.step()
    except Exception as error:
        raise InvalidArgumentError(
            f"Pipeline: {type(made).__name__} cannot step with these options: {type(error).__name__}: {error}"
        ) from error
    if not rolls_back:
        return
    if not hasattr(made, "rollback") or not getattr(made, "undo", True):
        raise InvalidArgumentError(
            f"Pipeline: {type(made).__name__} cannot roll back a step, which asynchronous optimizers need; pass "
            "spillway.pipeline.StageAdamW, or spillway.torch.AdamW with undo=True, or async_optimizer=False, "
            "or check_finite=False"
        )
