"""DeepSpeed's SuperOffload on the speculation engine: without a second process, queue or copy of the gradient, and with
gradient clipping.

DeepSpeed's own implementation sends each sub-group to a worker process when its gradient is complete. With gradient
clipping all sub-groups wait for the norm instead. Here a sub-group steps in this process as soon as its gradient is
complete, with or without clipping; the norm confirms or rolls back the step later. Results are bit-identical to plain
ZeRO-3 with offload_optimizer on the device cpu, which waits.

A step before step() is kept only if its inputs stay unchanged until step(). Otherwise the round is rolled back, and
step() steps all sub-groups by DeepSpeed's own code. This happens if

- another backward produces gradients for a sub-group that was stepped;
- code reads or sets masters, moments or gradients, by safe_get_... and safe_set_..., a checkpoint, the list of masters,
  or the optimizer's `state`: it sees the values before the step;
- the learning rate, betas, another option of a group, or a tensor of the optimizer has changed at step().

A sub-group with a parameter without gradient also steps in step(), as in DeepSpeed."""

import contextlib
import weakref

from ..errors import InvalidArgumentError
from . import _rounds, _stage3

_MASTERS = "fp32_partitioned_groups_flat"


class _Window:
    """Tracks the gradients that arrived since an optimizer's last step."""

    def __init__(self, stage3):
        _watch(stage3)
        self._rounds = stage3.superoffload_cpu_optimizer
        self._reason = _unfit(stage3)
        self._sub_groups = [group for group, device in sorted(stage3.subgroup_to_device.items()) if device == "cpu"]
        self._needed = {group: _stage3.with_data(stage3, stage3.fp16_groups[group]) for group in self._sub_groups}
        self._spans, start = {}, 0
        for group, elements in enumerate(stage3.fp16_partitioned_groups_flat_numel):
            self._spans[group] = slice(start, start + elements)
            start += elements
        # The weights in 16 bits that a step writes, and the event of their last copies to the device.
        self._weights, self._published = {}, []
        self.end()

    def end(self):
        """Resets the state after a step."""
        self._waits, self._arrived, self._versions = self._reason is not None, {}, {}

    def interrupt(self):
        """Aborts the round, because other code may read or change the state; all sub-groups then step in step()."""
        if self._arrived:
            self._rounds.abort()
            self._waits = True

    def changing(self, stage3, params):
        """Called before gradients of these parameters change."""
        for param in params:
            sub_group, *_ = stage3.grad_position[stage3.get_param_id(param)]
            if self._rounds.has(sub_group):
                self.interrupt()
            self._arrived.get(sub_group, set()).discard(stage3.get_param_id(param))

    def arrived(self, stage3, params):
        """Called when gradients of these parameters are complete; steps the sub-groups that are complete now."""
        touched = set()
        for param in params:
            sub_group, *_ = stage3.grad_position[stage3.get_param_id(param)]
            self._arrived.setdefault(sub_group, set()).add(stage3.get_param_id(param))
            touched.add(sub_group)
        complete = [group for group in sorted(touched) if self._needed.get(group) and self._needed[group] <= self._arrived[group]]
        if self._waits or not complete:
            return
        events = self._published + copies()
        if not self._rounds.is_open:
            self._rounds.begin(stage3.optimizer.opt_id, self._calls(stage3), float(stage3.loss_scale), float(stage3.clip_grad or 0.0))
        for sub_group in complete:
            # The accumulation buffer: no code edits gradients there, so the step can always be rolled back.
            self._submit(stage3, sub_group, stage3.grad_partitions_flat_buffer[self._spans[sub_group]], events)

    def stands(self, stage3):
        """True if the speculative steps are identical to those that step() would do now; otherwise rolls them back."""
        if not self._rounds.is_open:
            return False
        if self._rounds.is_of(self._calls(stage3)) and all(
            _versions_of(stage3, group) == versions for group, versions in self._versions.items()
        ):
            return True
        rebound = self.rebound(stage3)
        self._rounds.abort()
        if rebound:
            self.end()
            raise InvalidArgumentError(
                f"SuperOffload: the moments of sub-group {rebound[0]} were replaced between backward and step(), through "
                "a dictionary that was fetched before; the new ones may hold a step that was rolled back. Fetch "
                "optimizer.state again after backward"
            )
        return False

    def settle(self, stage3, factor):
        """Steps the remaining sub-groups and gives the verdict."""
        for sub_group in self._rounds.missing():
            self._submit(stage3, sub_group, getattr(stage3, _MASTERS)[sub_group].grad)
        self._rounds.resolve(factor)
        for sub_group in self._sub_groups:
            _state(stage3, sub_group)["step"] += 1

    def publish(self, stage3, sub_group):
        """Gives the model the new weights of a sub-group."""
        if sub_group not in self._weights:
            return stage3._reassign_or_swap_out_partitioned_parameters(sub_group)
        # Half of the bytes of DeepSpeed's copy, which converts the masters.
        stage3.fp16_partitioned_groups_flat[sub_group].data.copy_(self._weights[sub_group], non_blocking=True)
        stage3._unflatten_partitioned_parameters(sub_group)
        self._published = copies()

    def rebound(self, stage3):
        """The sub-groups whose moments were replaced since they were submitted, behind the back of `state`."""
        return [
            group
            for group, versions in self._versions.items()
            if [address for _, address in versions[2:]] != [address for _, address in _versions_of(stage3, group)[2:]]
        ]

    def _submit(self, stage3, sub_group, grad, events=()):
        state, master = _state(stage3, sub_group), getattr(stage3, _MASTERS)[sub_group]
        self._rounds.submit(
            sub_group, master.data, grad, state["exp_avg"], state["exp_avg_sq"], self._weights_of(stage3, sub_group), events
        )
        self._versions[sub_group] = _versions_of(stage3, sub_group)

    def _weights_of(self, stage3, sub_group):
        """Memory for the weights of a sub-group in 16 bits; None if the model has them in float32, or not in memory."""
        import torch

        flat = stage3.fp16_partitioned_groups_flat[sub_group]
        if flat is None or flat.dtype not in (torch.bfloat16, torch.float16):
            return None
        if sub_group not in self._weights:
            self._weights[sub_group] = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=not flat.is_cpu)
        return self._weights[sub_group]

    def _calls(self, stage3):
        return {sub_group: _call_of(stage3, sub_group) for sub_group in self._sub_groups}


def overrides(stage3):
    """Methods for DeepSpeed's SuperOffloadOptimizer_Stage3, by name."""
    own_cleanup = stage3._loss_scale_update_and_overflow_cleanup

    def partition_grads(self, params_to_release, grad_partitions):
        window = _window(self)
        window.changing(self, params_to_release)
        with _inside(self):
            # Not SuperOffload's own method, which hands complete gradients to the worker process.
            buffers = super(stage3, self).partition_grads(params_to_release, grad_partitions)
            if self.is_gradient_accumulation_boundary():
                window.arrived(self, params_to_release)
        return buffers

    def cleanup(self):
        if self.overflow:
            self.superoffload_cpu_optimizer.abort()
            _window(self).end()
        return own_cleanup(self)

    def step(self, scaled_global_grad_norm, timer_names):
        rounds, window = self.superoffload_cpu_optimizer, _window(self)
        with _inside(self):
            factor = _stage3.gradient_factor(self, scaled_global_grad_norm)
            stands = window.stands(self)
            if stands:
                window.settle(self, factor)
            else:
                _rounds.count_waited()
            for sub_group_id in range(len(self.fp16_groups)):
                self._prepare_sub_group(sub_group_id, timer_names)
                if stands and self.subgroup_to_device[sub_group_id] == "cpu":
                    rounds.wait(sub_group_id)
                    window.publish(self, sub_group_id)
                else:
                    self.unscale_and_clip_grads(sub_group_id, scaled_global_grad_norm)
                    super(stage3, self)._optimizer_step(sub_group_id)
                    self._reassign_or_swap_out_partitioned_parameters(sub_group_id)
                self._release_sub_group(sub_group_id, timer_names)
            if stands:
                rounds.finish()
                _scale_gradients(self, factor, scaled_global_grad_norm)
            window.end()

    return {
        "partition_grads": partition_grads,
        "_wait_for_async_operations": lambda self, timeout_seconds=60: None,
        "_handle_overflow_rollback": lambda self: None,
        "_loss_scale_update_and_overflow_cleanup": cleanup,
        "_step_with_clipping": step,
        "_step_without_clipping": step,
        _MASTERS: _masters(),
    }


def _masters():
    """DeepSpeed's list of master weights, as a property that aborts the round before code outside these methods sees
    it."""

    def get(self):
        window = self.__dict__.get("_spillway_window")
        if window is not None and not self.__dict__.get("_spillway_inside"):
            window.interrupt()
        try:
            return self.__dict__[_MASTERS]
        except KeyError:
            raise AttributeError(_MASTERS) from None

    def put(self, value):
        self.__dict__[_MASTERS] = value

    return property(get, put)


def _watch(stage3):
    """Makes `state` of DeepSpeed's optimizer a property that aborts the round before code outside these methods sees it."""
    optimizer, owner = stage3.optimizer, weakref.ref(stage3)
    kind = type(optimizer)

    def get(self):
        watched = owner()
        window = None if watched is None else watched.__dict__.get("_spillway_window")
        if window is not None and not watched.__dict__.get("_spillway_inside"):
            window.interrupt()
        return self.__dict__["state"]

    def put(self, value):
        self.__dict__["state"] = value

    optimizer.__class__ = type(
        kind.__name__, (kind,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "state": property(get, put)}
    )


def _window(stage3):
    if "_spillway_window" not in stage3.__dict__:
        stage3._spillway_window = _Window(stage3)
    return stage3._spillway_window


@contextlib.contextmanager
def _inside(stage3):
    before, stage3._spillway_inside = stage3.__dict__.get("_spillway_inside", False), True
    try:
        yield
    finally:
        stage3._spillway_inside = before


def _unfit(stage3):
    """The reason why this optimizer's sub-groups step only in step(); None if they can step earlier."""
    if reason := _stage3.optimizer_lacks(stage3) or _stage3.scaler_lacks(stage3):
        return reason
    if not stage3.grad_partitions_flat_buffer.is_cpu:
        return "gradients are summed up on the GPU"
    return None


def _state(stage3, sub_group):
    """Moments and step of a sub-group in the state dict of DeepSpeed's optimizer."""
    return _stage3.state_of(stage3, getattr(stage3, _MASTERS)[sub_group])


def _call_of(stage3, sub_group):
    return _stage3.call_of(stage3, sub_group, int(_state(stage3, sub_group)["step"]) + 1)


def _versions_of(stage3, sub_group):
    """Version counters and addresses of a sub-group's tensors, which change if the tensors are written or replaced."""
    state, master = _state(stage3, sub_group), getattr(stage3, _MASTERS)[sub_group]
    return [(tensor._version, tensor.data_ptr()) for tensor in (master, master.grad, state["exp_avg"], state["exp_avg_sq"])]


def _scale_gradients(stage3, factor, norm):
    """Scales the gradients like DeepSpeed, which leaves them scaled: a parameter without a new gradient reuses its old
    one."""
    if factor != 1.0:
        for sub_group, device in stage3.subgroup_to_device.items():
            if device == "cpu":
                stage3.unscale_and_clip_grads(sub_group, norm)


def copies():
    """The event of the copies of gradients from the GPU that were started before; none if they are done."""
    from deepspeed.accelerator import get_accelerator

    stream = get_accelerator().current_stream()
    return [] if stream is None else [stream.record_event()]
