"""Replacement of DeepSpeed's cpu_adagrad, with the arithmetic of torch.optim.Adagrad."""

from . import _call

SERVED = ("create_adagrad", "adagrad_update", "destroy_adagrad")
NOT_SERVED = {"adagrad_update_copy": "it copies to a GPU and exists up to DeepSpeed 0.14.2; use adagrad_update and copy the parameter"}


def create_adagrad(optimizer_id, alpha, eps, weight_decay, should_log, /):
    """Creates an optimizer, replacing one with the same id. Every update passes the hyper-parameters again. should_log
    has no effect: see spillway.set_log."""
    _call.numbers(alpha=alpha, eps=eps, weight_decay=weight_decay)
    return _call.invoke("spw_ds_adagrad_create", optimizer_id)


def adagrad_update(optimizer_id, step, lr, eps, weight_decay, params, grads, exp_avg_sq, /):
    """One step over one tensor."""
    hyper = _call.numbers(lr=lr, eps=eps, weight_decay=weight_decay)
    return _call.update("cpu_adagrad", "spw_ds_adagrad_update", optimizer_id, step, hyper, params, grads, exp_avg_sq=exp_avg_sq)


def destroy_adagrad(optimizer_id, /):
    """Destroys an optimizer."""
    return _call.destroy("spw_ds_adagrad_destroy", optimizer_id)
