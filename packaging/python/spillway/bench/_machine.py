"""Facts of this machine: the processor, and DeepSpeed's compiled ops."""

import os
import sys


def deepspeed_op(builder):
    """DeepSpeed's compiled op and its version, or None and the reason."""
    from spillway import deepspeed as hook
    hook.uninstall()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', '')}"
    try:
        import deepspeed
        from deepspeed.ops import op_builder
        return getattr(op_builder, builder)().load(verbose=False), deepspeed.__version__
    except Exception as error:  # whatever keeps the op from building is a reason to go on without it
        return None, f"not measured: {error}"


def cpu():
    """The processor's name."""
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown"
