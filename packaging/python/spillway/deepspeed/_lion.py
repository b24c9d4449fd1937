"""Replacement of DeepSpeed's cpu_lion, with the arithmetic of Lion's paper."""

from . import _call

SERVED = ("create_lion", "lion_update", "destroy_lion")
NOT_SERVED = {"lion_update_copy": "it copies to a GPU and exists up to DeepSpeed 0.14.2; use lion_update and copy the parameter"}


def create_lion(optimizer_id, alpha, betta1, betta2, weight_decay, should_log, /):
    """Creates an optimizer, replacing one with the same id. Every update passes the hyper-parameters again. should_log
    has no effect: see spillway.set_log."""
    _call.numbers(alpha=alpha, betta1=betta1, betta2=betta2, weight_decay=weight_decay)
    return _call.invoke("spw_ds_lion_create", optimizer_id)


def lion_update(optimizer_id, step, lr, beta1, beta2, weight_decay, params, grads, exp_avg, /):
    """One step over one tensor."""
    hyper = _call.numbers(lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay)
    return _call.update("cpu_lion", "spw_ds_lion_update", optimizer_id, step, hyper, params, grads, exp_avg=exp_avg)


def destroy_lion(optimizer_id, /):
    """Destroys an optimizer."""
    return _call.destroy("spw_ds_lion_destroy", optimizer_id)
