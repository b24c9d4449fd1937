"""The optimizer process of test_zenflow.py, as DeepSpeed's own: runs a worker of one op over tensors in shared memory."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def work(compiled, groups, ctrl, ready, cores):
    if compiled:
        import compiled_ops

        op = compiled_ops.newest("cpu_adam")
    else:
        from spillway.deepspeed import _hook

        op = _hook.module_of("cpu_adam")
    op.create_adam(0, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
    handle = op.zenflow_adam_create(0, cores)
    for group in groups:
        op.zenflow_adam_register_group(handle, *group)
    ready.set()
    op.zenflow_adam_run_worker(handle, ctrl.data_ptr())
    op.zenflow_adam_destroy(handle)
    op.destroy_adam(0)
