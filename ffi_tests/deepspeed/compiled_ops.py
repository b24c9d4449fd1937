"""DeepSpeed's ops as DeepSpeed compiles them, built once into TORCH_EXTENSIONS_DIR.

Loading an op waits while another process builds an op.

    python compiled_ops.py FOLDER     builds the ops of the tests; FOLDER holds the oldest DeepSpeed
"""

import contextlib
import fcntl
import functools
import os
import pathlib
import sys

_BUILDERS = {
    "cpu_adam": "CPUAdamBuilder",
    "cpu_adagrad": "CPUAdagradBuilder",
    "cpu_lion": "CPULionBuilder",
    "async_io": "AsyncIOBuilder",
    "pin_memory": "PinMemoryBuilder",
    "deepspeed_shm_comm": "ShareMemCommBuilder",
}
_SOURCES = {"cpu_adagrad": ["adagrad/cpu_adagrad.cpp"], "cpu_lion": ["lion/cpu_lion.cpp", "lion/cpu_lion_impl.cpp"]}


@functools.cache
def newest(op):
    """The op of the installed DeepSpeed, by its own builder."""
    with _building():
        return _builder(op).load(verbose=False)


@functools.cache
def oldest(op, package):
    """The op from the sources of an old version, with the flags of the installed version's CPU builder: the old
    builder needs CUDA."""
    from torch.utils import cpp_extension

    sources = pathlib.Path(package) / "deepspeed" / "ops" / "csrc"
    with _building():
        return cpp_extension.load(
            name=f"{op}_of_oldest",
            sources=[str(sources / name) for name in _SOURCES[op]],
            extra_include_paths=[str(sources / "includes")],
            with_cuda=False,
            extra_cflags=[*_builder(op).cxx_args(), "-std=c++17"],
        )


def vector_width():
    """ "AVX512", "AVX256" or "SCALAR": the body that DeepSpeed's flags select on this processor."""
    return _builder("cpu_adam").simd_width().removeprefix("-D").strip("_")


def _builder(op):
    import deepspeed.ops.op_builder as builders

    return getattr(builders, _BUILDERS[op])()


@contextlib.contextmanager
def _building():
    folder = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "spillway.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # An interrupted build leaves torch's lock behind, and the next build would wait for it forever.
        for left in folder.glob("*/lock"):
            if not _is_open(left):
                left.unlink(missing_ok=True)
        yield


def _is_open(path):
    """Whether any process has the file open, as torch keeps its lock open during a build."""
    for descriptor in pathlib.Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.path.samefile(descriptor, path):
                return True
    return False


def build_all(package):
    """Builds what the tests load later."""
    for op in _BUILDERS:
        newest(op)
    for op in _SOURCES:
        oldest(op, package)


if __name__ == "__main__":
    build_all(sys.argv[1])
