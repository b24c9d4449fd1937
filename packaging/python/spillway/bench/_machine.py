"""Facts of this machine: the processor, and DeepSpeed's compiled ops."""

import os
import sys

import spillway

from . import _progress


def prepare_with_torch(options):
    """The settings of the report of a benchmark of torch's tensors, and torch."""
    _progress.stage("loading torch")
    import torch

    return settings(torch, options), torch


def settings(torch, options):
    """The settings of the report of a benchmark that uses torch."""
    return {
        "kernel": spillway.kernel_name(),
        "rounds": options.rounds,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
    }


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
    except Exception as error:  # whatever keeps the op from building is a reason to continue without it
        return None, f"not measured: {error}"


# Share of the available memory that a benchmark may use: the interpreter, torch and temporary copies need the rest.
_SHARE = 0.85


def require_memory(parameters, per_parameter):
    """Ends the program if the arrays of a benchmark do not fit into the available memory. The system would otherwise end it,
    or another program."""
    if not has_memory(parameters, per_parameter):
        raise SystemExit(
            f"{parameters} parameters need {parameters * per_parameter / _SHARE / 2**30:.1f} GiB of available memory, but "
            f"{_available() / 2**30:.1f} GiB are available; pass a smaller number"
        )


def has_memory(parameters, per_parameter):
    """True if arrays of `per_parameter` bytes for each parameter fit into the available memory."""
    available = _available()
    return available is None or parameters * per_parameter <= available * _SHARE


def _available():
    """Bytes of available memory; None where the system does not tell."""
    try:
        with open("/proc/meminfo") as info:
            return next(int(line.split()[1]) for line in info if line.startswith("MemAvailable:")) * 1024
    except (OSError, StopIteration):
        return None


def cpu():
    """The processor's name."""
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown"
