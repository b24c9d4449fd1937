"""Replacement of DeepSpeed's cpu_adam."""

import ctypes

from .. import _native
from . import _call, _undo

SERVED = ("create_adam", "adam_update", "adam_rollback", "destroy_adam")
NOT_SERVED = {"adam_update_copy": "it copies to a GPU and exists up to DeepSpeed 0.14.2; use adam_update and copy the parameter"}


def create_adam(optimizer_id, alpha, betta1, betta2, eps, weight_decay, adamw_mode, should_log, /):
    """Creates an optimizer, replacing one with the same id. Every update passes the other hyper-parameters again.
    should_log has no effect: see spillway.set_log."""
    _, beta1, beta2, _, _ = _call.numbers(alpha=alpha, betta1=betta1, betta2=betta2, eps=eps, weight_decay=weight_decay)
    _undo.forget(_call.identity(optimizer_id))
    return _call.invoke("spw_ds_adam_create", optimizer_id, beta1, beta2, 1 if adamw_mode else 0)


def adam_update(optimizer_id, step, lr, beta1, beta2, epsilon, weight_decay, bias_correction, params, grads, exp_avg, exp_avg_sq, /):
    """One step over one tensor, with DeepSpeed's beta powers per id; recorded if it may be rolled back."""
    call = _call_of(step, lr, beta1, beta2, epsilon, weight_decay, bias_correction)
    optimizer_id = _call.identity(optimizer_id)
    tensor = _call.tensor(params, grads, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    update = _native.library().spw_ds_adam_update
    if _undo.wanted(optimizer_id):
        with _undo.recording(optimizer_id, tensor, True) as recording:
            _native.check(update(recording, optimizer_id, ctypes.byref(call), ctypes.byref(tensor)))
    else:
        _native.check(update(None, optimizer_id, ctypes.byref(call), ctypes.byref(tensor)))
    _call.count("cpu_adam", tensor.n)
    return 0


def adam_rollback(optimizer_id, step, lr, beta1, beta2, epsilon, weight_decay, bias_correction, params, grads, exp_avg, exp_avg_sq, /):
    """Rolls back the step that adam_update did with the same arguments: bit for bit if it was recorded, else by the
    inverse formula. The formula raises for Inf and NaN, where DeepSpeed's own overwrites parameters."""
    call = _call_of(step, lr, beta1, beta2, epsilon, weight_decay, bias_correction)
    optimizer_id = _call.identity(optimizer_id)
    tensor, exact = _call.tensor(params, grads, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq), ctypes.c_uint32()
    with _undo.recording(optimizer_id, tensor, False) as recording:
        _native.call("spw_ds_adam_rollback", recording, optimizer_id, ctypes.byref(call), ctypes.byref(tensor), ctypes.byref(exact))
    _undo.rolled_back(optimizer_id, bool(exact.value))
    return 0


def destroy_adam(optimizer_id, /):
    """Destroys an optimizer."""
    _undo.forget(_call.identity(optimizer_id))
    return _call.destroy("spw_ds_adam_destroy", optimizer_id)


def _call_of(step, lr, beta1, beta2, epsilon, weight_decay, bias_correction):
    numbers = _call.numbers(lr=lr, beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=weight_decay)
    return _call.adam_call(_call.integer(step, "step", 1 << 64), *numbers, 1 if bias_correction else 0)
