"""DeepSpeed's cpu_adam, served by Spillway."""

from . import _call

SERVED = ("create_adam", "adam_update", "destroy_adam")

_ZENFLOW = "train without ZenFlow, or unset SPILLWAY_DEEPSPEED"
NOT_SERVED = {
    "adam_update_copy": "its copy to a GPU exists up to DeepSpeed 0.14.2; use adam_update and copy the parameter",
    "adam_rollback": "train without SuperOffload, or unset SPILLWAY_DEEPSPEED",
    **dict.fromkeys(("zenflow_adam_create", "zenflow_adam_register_group", "zenflow_adam_destroy",
                     "zenflow_adam_ctrl_size", "zenflow_adam_ctrl_init", "zenflow_adam_run_worker",
                     "zenflow_adam_submit", "zenflow_adam_wait", "zenflow_adam_ctrl_exit"), _ZENFLOW),
}


def create_adam(optimizer_id, alpha, betta1, betta2, eps, weight_decay, adamw_mode, should_log, /):
    """Creates an optimizer under an id, in place of one that is there. The other hyper-parameters come anew with every
    update, and should_log has no effect: see spillway.set_log."""
    _, beta1, beta2, _, _ = _call.numbers(alpha=alpha, betta1=betta1, betta2=betta2, eps=eps, weight_decay=weight_decay)
    return _call.invoke("spw_ds_adam_create", optimizer_id, beta1, beta2, 1 if adamw_mode else 0)


def adam_update(optimizer_id, step, lr, beta1, beta2, epsilon, weight_decay, bias_correction, params, grads, exp_avg,
                exp_avg_sq, /):
    """One step over one tensor, with DeepSpeed's own beta-power state per id."""
    hyper = _call.numbers(lr=lr, beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=weight_decay)
    hyper.append(1 if bias_correction else 0)
    return _call.update("cpu_adam", "spw_ds_adam_update", optimizer_id, step, hyper, params, grads, exp_avg=exp_avg,
                        exp_avg_sq=exp_avg_sq)


def destroy_adam(optimizer_id, /):
    """Destroys an optimizer."""
    return _call.destroy("spw_ds_adam_destroy", optimizer_id)
