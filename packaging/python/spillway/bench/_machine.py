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


def require_memory(parameters, per_parameter):
    """Ends the program if the arrays of a benchmark do not fit into the available memory. The system would otherwise end it,
    or another program."""
    try:
        with open("/proc/meminfo") as info:
            available = next(int(line.split()[1]) for line in info if line.startswith("MemAvailable:")) * 1024
    except (OSError, StopIteration):
        return
    if parameters * per_parameter > available:
        raise SystemExit(f"{parameters} parameters need {parameters * per_parameter / 2**30:.1f} GiB of memory, but "
                         f"{available / 2**30:.1f} GiB are available; pass a smaller number")


def cpu():
    """The processor's name."""
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown"
