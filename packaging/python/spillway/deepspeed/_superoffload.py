"""DeepSpeed's SuperOffload on the speculation engine: no second process, no queue, no copy of the gradient, and with
gradient clipping.

DeepSpeed's own sends each sub-group to a worker process as its gradient completes, unless gradients are clipped: then all
wait for the norm. Here a sub-group steps in this process as soon as its gradient is there, clipped or not, and the
norm decides afterwards. The final weights have the bits of the run that waits."""

import ctypes
import os
import weakref

from .. import _abi, _arrays
from ..errors import InvalidArgument
from ..optim import Adam
from ..speculate import Speculation
from . import _lifetime, _ops


# Engines of this process, for active().
_engines = weakref.WeakSet()


class SuperOffloadCPUOptimizer:
    """Steps sub-groups in rounds. Takes what DeepSpeed's own takes; cpuadam_cores_perc, max_grad_numel and pin_memory have
    nothing to act on here: the threads are Spillway's, and the gradient is read where it is."""

    def __init__(self, optimizer_config, cpuadam_cores_perc=0.8, max_grad_numel=1000000, pin_memory=True):
        if not 0 < cpuadam_cores_perc <= 1:
            raise InvalidArgument("cpuadam_cores_perc must be between 0 and 1")
        configs = optimizer_config if isinstance(optimizer_config, list) else [optimizer_config]
        if any(config.get("amsgrad") for config in configs):
            raise InvalidArgument("amsgrad is not supported")
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        self._configs = [dict(config) for config in configs]
        self._id = DeepSpeedCPUAdam.optimizer_id
        DeepSpeedCPUAdam.optimizer_id += 1
        beta1, beta2 = self._configs[0]["betas"]
        _ops.module("cpu_adam").create_adam(self._id, 0.0, beta1, beta2, 0.0, 0.0, True, False)
        weakref.finalize(self, _destroy_adam, self._id, os.getpid())
        _lifetime.opened(self)
        self._engine, self._closed = None, False
        self._sub_groups = []
        self._submitted = set()
        self._open = False
        self.state = {}

    def prepare(self, sub_groups):
        """Names the sub-groups of every round."""
        self._check_open()
        if self._engine is None or sub_groups != self._sub_groups:
            self._retire()
            self._engine, self._sub_groups = Speculation(len(sub_groups), publish="staged"), list(sub_groups)
            _engines.add(self._engine)

    def begin(self, loss_scale, max_norm):
        """Opens a round."""
        self._check_open()
        self._engine.begin(Adam(), grad_scale=1.0 / loss_scale, max_norm=max_norm)
        self._submitted.clear()
        self._open = True

    @property
    def is_open(self):
        """True between begin and the verdict."""
        return self._open

    def missing(self):
        """Sub-groups that have not been submitted in this round."""
        return [sub_group for sub_group in self._sub_groups if sub_group not in self._submitted]

    def async_step(self, param_group_id, sub_group_id, fp32_param, fp32_grad, rollback=False, lr=None):
        """Hands a sub-group over; it steps at once. Parameter and gradient belong to the engine until the verdict."""
        if rollback:
            raise NotImplementedError("Spillway takes steps back by resolve(), all of a round at once")
        config = self._configs[param_group_id]
        state = self.state.setdefault(sub_group_id, {"step": 0})
        if "exp_avg" not in state:
            import torch
            state.update(exp_avg=torch.zeros_like(fp32_param), exp_avg_sq=torch.zeros_like(fp32_param))
        if lr is not None:
            config["lr"] = lr
        arrays = (fp32_param, fp32_grad, state["exp_avg"], state["exp_avg_sq"])
        tensor = _tensor(*arrays)
        self._engine.submit_table(
            "spw_spec_submit_ds_adam", self._sub_groups.index(sub_group_id), [_arrays.held(array) for array in arrays],
            self._id, state["step"] + 1, config["lr"], *config["betas"], config["eps"], config["weight_decay"], 1,
            ctypes.byref(tensor), None)
        self._submitted.add(sub_group_id)

    def get_result(self, expected_event_type=None):
        """Nothing: a step is done where the parameter is, and `wait` says when."""
        return None

    def resolve(self, grad_scale, redo):
        """Lets the steps stand or, with `redo`, has all of them done with this factor on the gradient."""
        self._engine.local_result()
        self._engine.resolve_as("redo" if redo else "commit", grad_scale)
        for sub_group in self._submitted:
            self.state[sub_group]["step"] += 1
        self._open = False

    def abort(self):
        """Takes an open round back: after it no step of the round has happened."""
        if self._open:
            self._engine.abort()
            self._open = False

    def wait(self, sub_group_id):
        """Waits until a sub-group is as the verdict wants it."""
        self._engine.wait(self._sub_groups.index(sub_group_id))

    def finish(self):
        """Waits for all of them."""
        self._engine.finish()

    def stats(self):
        """The engine's counters."""
        return self._engine.stats() if self._engine else {}

    def close(self):
        """Ends the engine; an open round is taken back."""
        self._closed = True
        self._retire()

    def _check_open(self):
        if self._closed:
            raise InvalidArgument("SuperOffload's optimizer was closed with its engine; make a new engine")

    def _retire(self):
        engine, self._engine, self._open = self._engine, None, False
        if engine is not None:
            _engines.discard(engine)
            _add(_retired, engine.stats())
            engine.close()


def _destroy_adam(optimizer_id, process):
    if process == os.getpid():
        _ops.module("cpu_adam").destroy_adam(optimizer_id)


def _add(total, stats):
    for name, value in stats.items():
        total[name] = total.get(name, 0) + value


# Counters of engines that were closed, added up.
_retired = {}


def served():
    """The counters of all engines of this process, added up."""
    total = dict(_retired)
    for engine in list(_engines):
        _add(total, engine.stats())
    return total


def _tensor(param, grad, exp_avg, exp_avg_sq):
    tensor = _abi.sized(_abi.Tensor)
    tensor.param, tensor.n, tensor.param_dtype = _arrays.span(param, "fp32_param", True)
    tensor.grad, _, tensor.grad_dtype = _arrays.span(grad, "fp32_grad", False)
    _arrays.same_shape(grad, param, "fp32_grad", "fp32_param")
    tensor.exp_avg, _, tensor.state_dtype = _arrays.span(exp_avg, "exp_avg", True)
    tensor.exp_avg_sq, _, _ = _arrays.span(exp_avg_sq, "exp_avg_sq", True)
    return tensor


def overrides(stage3):
    """Methods for DeepSpeed's SuperOffloadOptimizer_Stage3, by name."""
    own_partition_grads = stage3.partition_grads
    own_cleanup = stage3._loss_scale_update_and_overflow_cleanup

    def partition_grads(self, params_to_release, grad_partitions):
        """DeepSpeed's own, which hands over each sub-group that is complete, but only where it sees no clipping."""
        boundary = self.is_gradient_accumulation_boundary()
        if boundary and not self.superoffload_cpu_optimizer.is_open:
            _begin(self)
        clip_grad, self.clip_grad = self.clip_grad, 0.0
        try:
            own_partition_grads(self, params_to_release, grad_partitions)
        finally:
            self.clip_grad = clip_grad

    def wait_for_async_operations(self, timeout_seconds=60):
        """Nothing is pending that the verdict would not settle."""
        self.async_cpuadam_num = 0

    def cleanup(self):
        if self.overflow:
            self.superoffload_cpu_optimizer.abort()
            self._submitted_cpu_sub_groups.clear()
        return own_cleanup(self)

    def step(self, scaled_global_grad_norm, timer_names):
        optimizer = self.superoffload_cpu_optimizer
        if not optimizer.is_open:
            _begin(self)
        for sub_group_id in optimizer.missing():
            _submit(self, sub_group_id)
        factor = gradient_factor(self, scaled_global_grad_norm)
        optimizer.resolve(factor, redo=factor != _float(1.0 / self.loss_scale))
        for sub_group_id in range(len(self.fp16_groups)):
            self._prepare_sub_group(sub_group_id, timer_names)
            if self.subgroup_to_device[sub_group_id] == "cpu":
                optimizer.wait(sub_group_id)
            else:
                self.unscale_and_clip_grads(sub_group_id, scaled_global_grad_norm)
                self._optimizer_step(sub_group_id)
            self._reassign_or_swap_out_partitioned_parameters(sub_group_id)
            self._release_sub_group(sub_group_id, timer_names)
        optimizer.finish()

    return {"partition_grads": partition_grads, "_wait_for_async_operations": wait_for_async_operations,
            "_handle_overflow_rollback": lambda self: None, "_loss_scale_update_and_overflow_cleanup": cleanup,
            "_step_with_clipping": step, "_step_without_clipping": step}


def _begin(stage3):
    optimizer = stage3.superoffload_cpu_optimizer
    optimizer.prepare([group for group, device in sorted(stage3.subgroup_to_device.items()) if device == "cpu"])
    optimizer.begin(float(stage3.loss_scale), float(stage3.clip_grad or 0.0))


def _submit(stage3, sub_group_id):
    param_group_id = stage3.sub_group_to_group_id[sub_group_id]
    param = stage3.fp32_partitioned_groups_flat[sub_group_id]
    stage3.superoffload_cpu_optimizer.async_step(param_group_id, sub_group_id, param.data, param.grad.data,
                                                 lr=stage3.optimizer.param_groups[param_group_id]["lr"])


def gradient_factor(stage3, total_norm):
    """What DeepSpeed's unscale_and_clip_grads multiplies a gradient by, in its arithmetic: the norm is an f32 tensor."""
    combined = stage3.loss_scale
    if stage3.clip_grad > 0.0:
        clip = ((total_norm / stage3.loss_scale) + 1e-6) / stage3.clip_grad
        combined = clip.clamp(min=1.0) * stage3.loss_scale
    return _float(1.0 / combined)


def _float(value):
    """A number as the f32 that it is rounded to where it meets a gradient."""
    return ctypes.c_float(float(value)).value
