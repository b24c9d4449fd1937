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

A sub-group with a parameter without gradient also steps in step(), as in DeepSpeed.

With "verdict": "forward" in the `superoffload` object of the `spillway` block, step() ends once the norm is known, which
DeepSpeed measures and on which its counters and its scheduler depend. What remains is done before the next use: the steps
and their verdict, and the new weights. Stage 3 uses weights after a gather only, so that gathers complete the step.

With "tail" the sub-groups that backward completes last are on the device: see _superoffload_tail.py."""

import contextlib
import functools
import json
import threading
import weakref

from .._written import facts
from ..errors import InvalidArgumentError, SpillwayError
from . import _rounds, _stage3, _watched
from ._superoffload_tail import DeviceTail
from ._watched import MASTERS


class _Due:
    """A step that is not complete: the factor of its gradients, its tensors, and the step count of each sub-group after it."""

    def __init__(self, factor, versions, counts, gradients, tail):
        self.factor, self.versions, self.counts, self._gradients = factor, versions, counts, gradients
        # The status of the library's call of each sub-group of the tail that was stepped.
        self.tail: dict[int, list[int]] = {sub_group: [] for sub_group in tail}
        # The number of gradients that are scaled, and the version counter of the next one before that.
        self._scaled, self._before = 0, None

    def scale_gradients(self):
        """Scales the gradients like DeepSpeed, which leaves them scaled: a parameter without a new gradient reuses its old one. After an
        interrupt it is called again, and scales the rest."""
        while self.factor != 1.0 and self._scaled < len(self._gradients):
            gradient = self._gradients[self._scaled]
            if self._before is None:
                self._before = gradient._version
            if gradient._version == self._before:
                gradient.mul_(self.factor)
            self._scaled, self._before = self._scaled + 1, None


class _Window:
    """Tracks the gradients that arrived since an optimizer's last step."""

    def __init__(self, stage3):
        self._rounds = stage3.superoffload_cpu_optimizer
        self._reason = _unfit(stage3)
        self._later = self._rounds.settings.verdict == "forward"
        asked = self._rounds.settings.tail
        for name, value, plain in (("verdict", self._rounds.settings.verdict, "step"), ("tail", asked, 0)):
            if value != plain and self._reason is not None:
                raise InvalidArgumentError(f"spillway.superoffload: {name} is {json.dumps(value)}, and {self._reason}")
        if self._reason is None:
            _stage3.warn_of_one_bucket(stage3, "SuperOffload")
        self._stage3 = weakref.ref(stage3)
        self.lock = threading.RLock()
        # The step that is not complete, and if its persistent parameters are not gathered.
        self._due, self._ungathered = None, False
        if self._later:
            _watch_gathers(stage3)
            self._rounds.before_close = weakref.WeakMethod(self.complete)
        self._sub_groups = [group for group, device in sorted(stage3.subgroup_to_device.items()) if device == "cpu"]
        self.tail = DeviceTail(stage3, self._sub_groups, asked)
        self._rounds.tail = self.tail
        self._rounds.arrivals = _stage3.Arrivals(stage3, self._sub_groups)
        self._spans, start = {}, 0
        for group, elements in enumerate(stage3.fp16_partitioned_groups_flat_numel):
            self._spans[group] = slice(start, start + elements)
            start += elements
        self._weights = _stage3.HostWeights(stage3)
        self.end()

    def end(self):
        """Resets the state after a step."""
        self._rounds.waits, self._versions = self._reason is not None, {}
        self._rounds.arrivals.clear()

    def seen(self):
        """Completes the last step, and aborts the round, because other code may read or change the state; all sub-groups then step in
        step()."""
        with self.lock:
            self.complete()
            self._rounds.abandon()

    def changing(self, stage3, params):
        """Called before gradients of these parameters change."""
        rounds = self._rounds
        if any(rounds.arrivals.sub_group(param) in rounds.submitted for param in params):
            self.seen()
        rounds.arrivals.change(params)

    def arrived(self, stage3, params):
        """Called when gradients of these parameters are complete; steps the sub-groups that are complete now."""
        complete = self._rounds.arrivals.complete(params)
        # Those that a reduction completes together are in the order of the layers.
        for sub_group in reversed(complete):
            self.tail.completed(sub_group)
        complete = [group for group in complete if group not in self.tail.members]
        if self._rounds.waits or not complete:
            return
        events = _stage3.copies()
        if not self._rounds.is_open:
            scale, limit = float(stage3.loss_scale), float(stage3.clip_grad or 0.0)
            self._rounds.open(stage3.optimizer.opt_id, self._calls(stage3), scale, limit, self.tail.members)
        for sub_group in complete:
            # The accumulation buffer: no code edits gradients there, so the step can always be rolled back.
            self._submit(stage3, sub_group, stage3.grad_partitions_flat_buffer[self._spans[sub_group]], events)

    def stands(self, stage3):
        """True if the speculative steps are identical to those that step() would do now; otherwise rolls them back."""
        if not self._rounds.is_open:
            return False
        if self._rounds.is_of(self._calls(stage3)) and not _changed(stage3, self._versions):
            return True
        rebound = self.rebound(stage3)
        self._rounds.abandon()
        if rebound:
            self.end()
            raise InvalidArgumentError(
                f"SuperOffload: the moments of sub-group {rebound[0]} were replaced between backward and step(), through "
                "a dictionary that was fetched before; the new ones may hold a step that was rolled back. Fetch "
                "optimizer.state again after backward"
            )
        return False

    def decide(self, stage3, factor):
        """Steps the remaining sub-groups. The norm is known, and the gradients are multiplied by `factor`."""
        for sub_group in self._rounds.missing():
            self._submit(stage3, sub_group, getattr(stage3, MASTERS)[sub_group].grad)
        for sub_group in self.tail.members:
            self.tail.place(stage3, sub_group)
            self._versions[sub_group] = _versions_of(stage3, sub_group)
        gradients = [getattr(stage3, MASTERS)[sub_group].grad for sub_group in self._sub_groups]
        counts = {sub_group: int(_state(stage3, sub_group)["step"]) + 1 for sub_group in self._sub_groups}
        self._due = _Due(factor, self._versions, counts, gradients, self.tail.members)
        if self._later:
            self.tail.asked.pause()
            _rounds.count("deferred")
        else:
            self.complete()

    @property
    def is_deferred(self):
        """True if the next forward completes a step."""
        return self._later

    def complete(self):
        """Gives the verdict of the last step, and the model this rank's new weights. A signal handler may end it anywhere: it is called
        again, and repeats only what changes nothing more."""
        with self.lock:
            if self._due is not None and (stage3 := self._stage3()) is not None:
                self._complete(stage3, self._due)

    def _complete(self, stage3, due):
        import torch

        # A signal handler may have raised after the end.
        if not self._rounds.is_open:
            self._due = None
            return
        # The next forward may be one of an evaluation, whose tensors are of no use in training.
        self.tail.asked.resume()
        with _inside(stage3), torch.inference_mode(False), torch.no_grad():
            try:
                if not self._rounds.is_resolved:
                    if changed := _changed(stage3, due.versions):
                        raise InvalidArgumentError(
                            f"SuperOffload: a tensor of sub-group {changed[0]} was written or replaced after step(), which the next "
                            "forward was to complete; the step was rolled back, and the tensor may have the values from before the "
                            "write. Call spillway.deepspeed.settle(engine) before such a write"
                        )
                    self._rounds.verdict = due.factor
                    self._rounds.resolve()
                # The device steps the tail while the host waits for the others.
                for sub_group, outcome in due.tail.items():
                    if outcome != [0]:
                        number, call = self._rounds.step_of(sub_group, due.factor)
                        self.tail.step(outcome, number, call, getattr(stage3, MASTERS)[sub_group], _state(stage3, sub_group))
                for sub_group, count in due.counts.items():
                    _set_count(_state(stage3, sub_group), count)
                for sub_group in due.tail:
                    stage3._reassign_or_swap_out_partitioned_parameters(sub_group)
                self._rounds.carry_out(functools.partial(self._give, stage3))
                _stage3.wait_for_copies()
            except SpillwayError:
                self._due = None
                self._rounds.drop()
                raise
            due.scale_gradients()
            self._ended(stage3, clipped=self._rounds.clips(due.factor))
            self._rounds.begin()
            self._due = None

    def step_apart(self, stage3, sub_group):
        """Steps a sub-group of the tail in a step without speculation, whose gradients are multiplied already."""
        self.tail.place(stage3, sub_group)
        call, state = _call_of(stage3, sub_group), _state(stage3, sub_group)
        self.tail.step([], stage3.optimizer.opt_id, call, getattr(stage3, MASTERS)[sub_group], state)
        _set_count(state, call.step)

    def start_clock(self, overlaps):
        """The program waits for a step from now on. `overlaps`: all steps on the host have begun in backward."""

        def begun():
            _stage3.wait_for_copies()
            return overlaps and not self._rounds.missing(), self._rounds.began()

        self.tail.asked.start(begun)

    def ended_apart(self, stage3):
        """A step without speculation is over."""
        self._ended(stage3, clipped=False)

    def _ended(self, stage3, clipped):
        self.tail.stop_clock(stage3, clipped)
        self.tail.resize()
        for sub_group in self._sub_groups:
            self.tail.place(stage3, sub_group)
        for sub_group in self.tail.members:
            self._weights.forget(sub_group)

    @contextlib.contextmanager
    def without_gather(self, stage3):
        """Leaves the gather of persistent parameters, with which DeepSpeed ends a step, to settle()."""
        kept = stage3.persistent_parameters
        try:
            stage3.persistent_parameters, self._ungathered = [], True
            yield
        finally:
            stage3.persistent_parameters = kept

    def settle(self, stage3):
        """Completes the last step, with what all ranks do together."""
        import torch

        self.complete()
        if self._ungathered:
            self._ungathered = False
            with torch.inference_mode(False):
                if stage3.persistent_parameters:
                    stage3.persistent_parameters[0].all_gather(stage3.persistent_parameters)

    def _give(self, stage3, sub_group):
        """Gives the model the weights of a sub-group, for which it waits."""
        self._rounds.wait_for(sub_group)
        if not self._weights.publish(sub_group):
            stage3._reassign_or_swap_out_partitioned_parameters(sub_group)

    def rebound(self, stage3):
        """The sub-groups whose moments were replaced since they were submitted, behind the back of `state`."""
        return [
            group
            for group, versions in self._versions.items()
            if [address for _, _, address, *_ in versions[2:]] != [address for _, _, address, *_ in _versions_of(stage3, group)[2:]]
        ]

    def _submit(self, stage3, sub_group, grad, events=()):
        self.tail.place(stage3, sub_group)
        state, master = _state(stage3, sub_group), getattr(stage3, MASTERS)[sub_group]
        self._rounds.start(sub_group, master.data, grad, state["exp_avg"], state["exp_avg_sq"], self._weights.of(sub_group), events)
        self._versions[sub_group] = _versions_of(stage3, sub_group)

    def _calls(self, stage3):
        return {sub_group: _call_of(stage3, sub_group) for sub_group in self._sub_groups}


def overrides(stage3):
    """Methods for DeepSpeed's SuperOffloadOptimizer_Stage3, by name."""
    own_cleanup, own_post_step = stage3._loss_scale_update_and_overflow_cleanup, stage3._post_step
    own_clear_flag = stage3.clear_backward_seen_flag

    def partition_grads(self, params_to_release, grad_partitions):
        window = _window(self)
        with _inside(self):
            window.complete()
            window.changing(self, params_to_release)
            # Not SuperOffload's own method, which hands complete gradients to the worker process.
            buffers = super(stage3, self).partition_grads(params_to_release, grad_partitions)
            if self.is_gradient_accumulation_boundary():
                window.arrived(self, params_to_release)
        return buffers

    def cleanup(self):
        if self.overflow:
            with _inside(self):
                self.superoffload_cpu_optimizer.drop()
                _window(self).end()
        return own_cleanup(self)

    def step(self, scaled_global_grad_norm, timer_names):
        window = _window(self)
        with _inside(self):
            factor = _stage3.gradient_factor(self, scaled_global_grad_norm)
            stands = window.stands(self)
            window.start_clock(stands)
            if not stands:
                _rounds.count("waited")
            for sub_group_id in range(len(self.fp16_groups)):
                if stands and self.subgroup_to_device[sub_group_id] == "cpu":
                    continue
                self._prepare_sub_group(sub_group_id, timer_names)
                self.unscale_and_clip_grads(sub_group_id, scaled_global_grad_norm)
                if sub_group_id in window.tail.members:
                    window.step_apart(self, sub_group_id)
                else:
                    super(stage3, self)._optimizer_step(sub_group_id)
                self._reassign_or_swap_out_partitioned_parameters(sub_group_id)
                self._release_sub_group(sub_group_id, timer_names)
            if stands:
                window.decide(self, factor)
            else:
                window.ended_apart(self)
            window.end()

    def post_step(self, timer_names):
        window = _window(self)
        # By the setting, which all ranks have: a rank whose step is not due leaves the gather to the next forward too.
        with window.without_gather(self) if window.is_deferred else contextlib.nullcontext():
            own_post_step(self, timer_names)

    def clear_backward_seen_flag(self):
        # The beginning of the engine's forward.
        if window := _window_of(self):
            window.settle(self)
        own_clear_flag(self)

    def completed(own):
        @functools.wraps(own)
        def method(self, *arguments, **named):
            complete(self)
            return own(self, *arguments, **named)

        return method

    return {
        "partition_grads": partition_grads,
        # The beginning of a step.
        "_wait_for_async_operations": lambda self, timeout_seconds=60: complete(self),
        "_handle_overflow_rollback": lambda self: None,
        "_loss_scale_update_and_overflow_cleanup": cleanup,
        "_step_with_clipping": step,
        "_step_without_clipping": step,
        "_post_step": post_step,
        "clear_backward_seen_flag": clear_backward_seen_flag,
        **{name: completed(getattr(stage3, name)) for name in _COMPLETED if hasattr(stage3, name)},
        MASTERS: _watched.masters(),
    }


# Methods before which a step is completed, beside gathers and those that ask for masters or states first.
_COMPLETED = ("checkpoint_event_prologue", "destroy", "load_state_dict", "offload_states", "reload_states")


def complete(stage3):
    """Completes the last step of an optimizer: masters, states, gradients and this rank's weights are those after it."""
    if window := _window_of(stage3):
        window.complete()


def _window_of(stage3):
    """The window of an optimizer; None before its first gradient, and for other optimizers."""
    return getattr(stage3, "__dict__", {}).get("_spillway_window")


def _watch_gathers(stage3):
    """Has the gathers of weights complete a step."""
    owner = weakref.ref(stage3)

    def completed(own):
        @functools.wraps(own)
        def gather(*arguments, **named):
            if (watched := owner()) is not None:
                complete(watched)
            return own(*arguments, **named)

        return gather

    for param in stage3.module.parameters():
        for name in ("all_gather", "all_gather_coalesced"):
            setattr(param, name, completed(getattr(param, name)))


def _window(stage3):
    if "_spillway_window" not in stage3.__dict__:
        window = _Window(stage3)
        _watched.watch(stage3, window)
        stage3._spillway_window = window
    return stage3._spillway_window


def _inside(stage3):
    """While it is open, this thread alone uses masters and states, without an end of the round."""
    _window(stage3)
    return _watched.inside(stage3)


def _unfit(stage3):
    """The reason why this optimizer's sub-groups step only in step(); None if they can step earlier."""
    if reason := _stage3.optimizer_lacks(stage3) or _stage3.scaler_lacks(stage3):
        return reason
    if not stage3.grad_partitions_flat_buffer.is_cpu:
        return "gradients are summed up on the GPU"
    return None


def _state(stage3, sub_group):
    """Moments and step of a sub-group in the state dict of DeepSpeed's optimizer."""
    return _stage3.state_of(stage3, getattr(stage3, MASTERS)[sub_group])


def _call_of(stage3, sub_group):
    return _stage3.call_of(stage3, sub_group, int(_state(stage3, sub_group)["step"]) + 1)


def _versions_of(stage3, sub_group):
    """The facts of a sub-group's tensors, which change if the tensors are written or replaced."""
    state, master = _state(stage3, sub_group), getattr(stage3, MASTERS)[sub_group]
    return [facts(tensor) for tensor in (master, master.grad, state["exp_avg"], state["exp_avg_sq"])]


def _changed(stage3, versions):
    """The sub-groups of which a tensor was written or replaced since its versions were taken."""
    return [group for group, before in versions.items() if _versions_of(stage3, group) != before]


def _set_count(state, count):
    """Sets the step count of a sub-group, a number or a tensor."""
    import torch

    if isinstance(state["step"], torch.Tensor):
        state["step"].fill_(count)
    else:
        state["step"] = count
