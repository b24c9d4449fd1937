"""Proves that SPILLWAY_DEEPSPEED=1 alone puts Spillway under DeepSpeed. This works in the process, in a
spawned worker, under a second import root and for ops that the CPU accelerator lacks. It also works for the
oldest and the newest version and for another accelerator. install() has the same effect after the import, and
without the variable nothing changes."""

import os
import shutil
import subprocess

import pytest

# DeepSpeed 0.14.0 uses functions that torch and numpy have since removed. Its CPU accelerator imports Intel's packages,
# which do not exist for this torch and are not called. None of these concerns optimizers.
OLD = """
import logging, sys, types
import numpy, torch.distributed.elastic.agent.server.api as api
numpy.BUFSIZE, api.log, api._get_socket_with_port = 8192, logging.getLogger("elastic"), None
for name in ("oneccl_bindings_for_pytorch", "intel_extension_for_pytorch"):
    sys.modules[name] = types.ModuleType(name)
"""

STEP = """
import torch
def step(kind):
    weight = torch.nn.Parameter(torch.ones(1000))
    weight.grad = torch.ones(1000)
    optimizer = kind([weight], lr=0.1)
    optimizer.step()
    assert (weight < 0.95).all(), kind
    return optimizer
"""

ALL_OPS = (
    STEP
    + """
import sys, deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.lion import DeepSpeedCPULion
optimizers = [step(kind) for kind in (DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion)]
op = optimizers[0].ds_opt_adam
assert op.__spillway__ and not hasattr(op, "__file__"), op
active = sys.modules["spillway.deepspeed"].active()
counts = [(active[name]["calls"], active[name]["elements"]) for name in ("cpu_adam", "cpu_adagrad", "cpu_lion")]
maps = open("/proc/self/maps").read()
assert "libspillway.so" in maps and "cpu_adam.so" not in maps and "cpu_lion.so" not in maps
print(deepspeed.__version__, type(deepspeed.accelerator.get_accelerator()).__name__, counts, active["kernel"])
"""
)

IO = """
import sys, torch, deepspeed
import deepspeed.ops.op_builder as builders
builder = builders.AsyncIOBuilder()
handle = builder.load().aio_handle(1 << 20, 8, False, True, 1)
assert builder.is_compatible() and not hasattr(builder.load(), "__file__")
data, copy = torch.arange(5000.0), torch.zeros(5000)
assert handle.sync_pwrite(data, "file") == 1 and handle.sync_pread(copy, "file") == 1 and torch.equal(copy, data)
names = [name for name in ("PinMemoryBuilder", "GDSBuilder") if hasattr(builders, name)]
assert all(getattr(builders, name)().is_compatible() for name in names)
modules = [getattr(builders, name)().load().__name__ for name in names]
maps = open("/proc/self/maps").read()
assert "async_io.so" not in maps and "pin_memory.so" not in maps
print("served", modules, sys.modules["spillway.deepspeed"].active()["async_io"]["written_bytes"])
"""

SERVED_ONCE_EACH = "[(1, 1000), (1, 1000), (1, 1000)]"


@pytest.mark.parametrize("accelerator, name", [("cpu", "CPU_Accelerator"), ("cuda", "CUDA_Accelerator")])
def test_the_newest_deepspeed(run_script, accelerator, name):
    from importlib.metadata import version

    out = run_script(ALL_OPS, accelerator=accelerator)
    assert f"{version('deepspeed')} {name} {SERVED_ONCE_EACH}" in out


@pytest.mark.parametrize("accelerator, name", [("cpu", "CPU_Accelerator"), ("cuda", "CUDA_Accelerator")])
def test_the_oldest_deepspeed(run_script, oldest_deepspeed, accelerator, name):
    out = run_script(OLD + ALL_OPS, oldest_deepspeed, accelerator=accelerator)
    assert f"0.14.0 {name} {SERVED_ONCE_EACH}" in out


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_files_and_pinned_memory_in_the_newest_and_the_oldest_deepspeed(run_script, oldest_deepspeed, accelerator):
    newest = run_script(IO, accelerator=accelerator)
    assert "served ['spillway.deepspeed.pin_memory', 'spillway.deepspeed.gds'] 20000" in newest
    assert "served [] 20000" in run_script(OLD + IO, oldest_deepspeed, accelerator=accelerator)


def test_native_pinning_is_served(run_script):
    """With DS_PIN_MEMORY_BACKEND=native, DeepSpeed's own manager, which frees by address, uses Spillway's memory."""
    out = run_script(
        """
import gc, sys, torch, deepspeed
from deepspeed.accelerator import get_accelerator
pinned = get_accelerator().pin_memory(torch.arange(1000.0).view(10, 100))
assert get_accelerator().is_pinned(pinned) and pinned[3, 7] == 307
active = sys.modules["spillway.deepspeed"].active
print("pinned", active()["pin_memory"]["bytes"])
view = pinned[5:]
del pinned
gc.collect()
assert view[0, 0] == 500 and active()["pin_memory"]["bytes"] == 4000
del view
gc.collect()
print("then", active()["pin_memory"]["bytes"])
""",
        DS_PIN_MEMORY_BACKEND="native",
    )
    assert "pinned 4000" in out and "then 0" in out


def test_gds_is_not_served_by_its_base_class(run_script):
    """GDSBuilder inherits load() from AsyncIOBuilder."""
    out = run_script(
        """
import spillway.deepspeed as spillway
spillway.install("async_io")
from deepspeed.ops.op_builder.gds import GDSBuilder, AsyncIOBuilder
print(AsyncIOBuilder.__new__(AsyncIOBuilder).is_compatible())
GDSBuilder.jit_load = GDSBuilder.load_installed = lambda self, verbose=True: "its own"
import deepspeed.ops.op_builder.pin_memory as pin
pin.PinMemoryBuilder.load = lambda self, verbose=False: None
print("gds:", GDSBuilder().load())
""",
        SPILLWAY_DEEPSPEED="",
    )
    assert "gds: its own" in out


def test_a_spawned_worker(run_script):
    out = run_script(
        STEP
        + """
import multiprocessing, sys
def work(queue):
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    step(DeepSpeedCPUAdam)
    queue.put(sys.modules["spillway.deepspeed"].active()["cpu_adam"])
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    worker = context.Process(target=work, args=(queue,))
    worker.start()
    print("worker:", queue.get(timeout=120))
    worker.join()
"""
    )
    assert "worker: {'calls': 1, 'elements': 1000}" in out


def test_a_second_import_root(run_script, tmp_path):
    """A checkout of DeepSpeed contains a top-level op_builder package."""
    import deepspeed

    builders = os.path.join(os.path.dirname(deepspeed.__file__), "ops", "op_builder")
    shutil.copytree(builders, tmp_path / "root" / "op_builder")
    out = run_script(
        ALL_OPS
        + """
from deepspeed.ops.op_builder import CPUAdamBuilder
print("builder:", CPUAdamBuilder.__module__, CPUAdamBuilder().load() is op)
""",
        tmp_path / "root",
    )
    assert SERVED_ONCE_EACH in out and "builder: op_builder.cpu.cpu_adam True" in out


def test_every_accelerators_builders(run_script):
    """The builders are created without their constructors, some of which search for a vendor's toolkit."""
    out = run_script("""
import importlib, pathlib, deepspeed
from spillway.deepspeed import OPS
root = pathlib.Path(deepspeed.__file__).parent / "ops" / "op_builder"
for path in sorted(path for path in root.rglob("*.py") if path.stem in OPS):
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    module = importlib.import_module(f"deepspeed.ops.op_builder.{name}")
    builder, = [c for c in vars(module).values() if getattr(c, "NAME", None) == path.stem]
    builder = builder.__new__(builder)
    assert builder.is_compatible() and builder.load().__name__ == f"spillway.deepspeed.{path.stem}", path
    print("patched", path.parent.name, path.stem)
""")
    assert out.count("patched") >= 26
    assert all(f"patched {name}" in out for name in ("npu cpu_lion", "supa async_io", "xpu pin_memory", "op_builder gds"))


def test_deepspeed_reports_the_ops_as_compatible(run_script):
    out = run_script(
        "import deepspeed; ops = deepspeed.ops.__compatible_ops__\nfrom spillway.deepspeed import OPS\nprint([ops[name] for name in OPS])"
    )
    assert "[True, True, True, True, True, True]" in out


def test_no_compiler_is_needed(run_script, overlay):
    out = run_script(ALL_OPS, PATH=os.path.dirname(overlay))
    assert SERVED_ONCE_EACH in out


def test_install_after_the_import_and_uninstall(run_script, oldest_deepspeed):
    """Also for the oldest version, where the importing modules hold builders that cannot load."""
    code = (
        """
import deepspeed, sys
import spillway.deepspeed as spillway
from deepspeed.ops.op_builder import CPUAdamBuilder
native = CPUAdamBuilder.load
assert spillway.active() == {}
spillway.install(); spillway.install("cpu_adam"); spillway.install(ops=["cpu_lion", "cpu_adam"])
assert sum(type(finder).__module__ == "spillway._import_hook" for finder in sys.meta_path) == 1
assert CPUAdamBuilder.load is not native
"""
        + ALL_OPS
        + """
spillway.uninstall()
assert CPUAdamBuilder.load is native and spillway.active() == {}
from deepspeed.ops.op_builder import CPULionBuilder
assert "_spillway_op" not in vars(CPULionBuilder)
step.__globals__["optimizers"][0].step()
try: spillway.install("cpu_lamb")
except ValueError as error: print(error)
"""
    )
    for prelude, paths in (("", ()), (OLD, (oldest_deepspeed,))):
        out = run_script(prelude + code, *paths, SPILLWAY_DEEPSPEED="0")
        assert SERVED_ONCE_EACH in out and "unknown ops ['cpu_lamb']" in out


def test_only_the_ops_asked_for(run_script):
    out = run_script(
        """
import spillway.deepspeed as spillway
spillway.install("cpu_adam")
from deepspeed.ops.op_builder import CPUAdamBuilder, CPULionBuilder
print("adam", "load" in vars(CPUAdamBuilder), "lion", "load" in vars(CPULionBuilder), sorted(spillway.active()))
""",
        SPILLWAY_DEEPSPEED="",
    )
    assert "adam True lion False ['cpu_adam', 'kernel']" in out


def test_nothing_happens_when_off(run_script):
    out = run_script(
        """
import sys, deepspeed
from deepspeed.ops.op_builder import CPUAdamBuilder
print(CPUAdamBuilder.load.__module__, [name for name in sys.modules if name.startswith("spillway")])
""",
        SPILLWAY_DEEPSPEED="0",
    )
    assert "deepspeed.ops.op_builder.builder []" in out


def test_a_module_is_as_if_loaded_by_its_own_loader(run_script):
    out = run_script("""
import inspect
import deepspeed.ops.op_builder.cpu.cpu_adam as module
print(type(module.__loader__).__name__, type(module.__spec__.loader).__name__, "NAME" in inspect.getsource(module))
""")
    assert "SourceFileLoader SourceFileLoader True" in out


def test_a_library_that_cannot_be_loaded_is_a_clear_error_and_not_the_native_op(overlay, tmp_path):
    code = "from deepspeed.ops.adam import DeepSpeedCPUAdam; import torch\nDeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(1))])"
    done = subprocess.run(
        [overlay, "-c", code],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "SPILLWAY_DEEPSPEED": "1",
            "SPILLWAY_LIBRARY": str(tmp_path / "gone.so"),
            "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
        },
    )
    assert done.returncode != 0 and "gone.so" in done.stderr and "SPILLWAY_LIBRARY" in done.stderr
