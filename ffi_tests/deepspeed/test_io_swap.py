"""Proves that the parts of DeepSpeed that use its handles work with Spillway's. The parts are the gradient swapper,
the buffer pools, the fast checkpoint writer with one and with two buffers, and the benchmark engine of
deepspeed.nvme. Training runs through the optimizer and parameter swappers are in test_train.py."""

# The fast writer needs DeepSpeed's utils op, which the CPU accelerator does not have; one function of it is used.
UTILS = """
import types, deepspeed.io.fast_file_writer as writer
class Utils:
    def load(self):
        flat = lambda tensors: [tensor.contiguous().view(torch.uint8).flatten() for tensor in tensors]
        return types.SimpleNamespace(cast_to_byte_tensor=lambda given: flat(given) if isinstance(given, list) else flat([given])[0])
writer.UtilsBuilder = Utils
"""


def test_the_gradient_swapper_and_the_buffer_pools(run_forked):
    out = run_forked("""
import os, pathlib, torch, deepspeed, deepspeed.comm as dist
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
dist.init_distributed("gloo", init_method=f"file://{os.getcwd()}/rendezvous", rank=0, world_size=1)
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.swap_tensor import async_swapper, utils
handle = AsyncIOBuilder().load().aio_handle(1 << 20, 8, False, True, 1)
manager = utils.SwapBufferManager(num_elems=100_000, count=3, dtype=torch.float32, aio_handle=handle)
assert all(handle.is_pinned(buffer) and not buffer.any() for buffer in manager.all_buffers)
swapper = async_swapper.AsyncTensorSwapper(aio_handle=handle, numel_alignment=256, timers=None)
swapper.add_buffers(manager.allocate(num_elems=100_000, count=2, dtype=torch.float32))
gradients = [torch.randn(1000 + 777 * n) for n in range(40)]
swapper.swap_out_tensors(gradients, [f"gradient{n}" for n in range(40)])
manager.free(swapper.release_buffers())
pool = utils.SwapBufferPool(manager.allocate(num_elems=100_000, count=1, dtype=torch.float32), aio_handle=handle)
for n, gradient in enumerate(gradients):
    padded = -(-gradient.numel() // 256) * 256
    if not pool.has_space(padded):
        pool.reset()
    swapped, computed = pool.allocate_tensor(gradient.numel(), f"gradient{n}", padded)
    utils.swap_in_tensors(handle, [swapped], [f"gradient{n}"])
    assert handle.wait() == 1 and torch.equal(computed, gradient), n
print("swapped", len(list(pathlib.Path(".").glob("gradient*"))))
""")
    assert "swapped 40" in out


def test_the_fast_checkpoint_writer(run_forked, tmp_path):
    """The writer's files equal those of torch.save, for sizes around the buffer's; it writes through
    a descriptor with O_DIRECT."""
    out = run_forked(
        "import torch, deepspeed\n"
        + UTILS
        + """
from deepspeed.io import FastFileWriter, FastFileWriterConfig
from deepspeed.ops.op_builder import AsyncIOBuilder
handle = AsyncIOBuilder().load().aio_handle(1 << 16, 8, False, True, 2)
for double in (False, True):
    for size in (1, 10_000, 65_536, 1_000_000):
        state = {"weight": torch.randn(size), "step": size, "moments": [torch.randn(size).bfloat16()] * 2}
        buffer = handle.new_cpu_locked_tensor(1 << 18, torch.empty(0, dtype=torch.uint8))
        config = FastFileWriterConfig(dnvme_handle=handle, pinned_tensor=buffer, double_buffer=double)
        out = FastFileWriter("fast", config)
        torch.save(state, out, _use_new_zipfile_serialization=False)
        out.close()
        torch.save(state, "plain", _use_new_zipfile_serialization=False)
        found = torch.load("fast")
        assert torch.equal(found["weight"], state["weight"]) and torch.equal(found["moments"][1], state["moments"][1])
        assert open("fast", "rb").read() == open("plain", "rb").read()
        import os; os.unlink("fast")
print("written")
"""
    )
    assert "written" in out


def test_the_checkpoint_engine_with_native_pinning(run_forked):
    out = run_forked(
        "import torch, types, deepspeed\n"
        + UTILS
        + """
from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
from deepspeed.runtime.model_checkpointing import constants as names
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
config = types.SimpleNamespace(checkpoint_config={names.CHECKPOINT_SERIALIZATION: False, names.CHECKPOINT_WRITER: {
    names.CHECKPOINT_WRITER_TYPE: "FAST", names.CHECKPOINT_IO_BUFFER_SIZE: 1 << 20, names.CHECKPOINT_IO_BUFFER_DOUBLE: True,
    names.CHECKPOINT_IO_MULTIPLIER: 1, names.CHECKPOINT_IO_STATISTICS: False}}, aio_config=get_aio_config({}))
ranks = types.SimpleNamespace(world_size=1, rank=0, global_rank=0)
engine = FastCheckpointEngine(config, ranks, False)
state = {"weight": torch.randn(500_001), "name": "x"}
engine.save(state, "checkpoint")
assert torch.equal(engine.load("checkpoint")["weight"], state["weight"])
import sys
print("saved", sys.modules["spillway.deepspeed"].active()["async_io"]["failed"])
""",
        DS_PIN_MEMORY_BACKEND="native",
    )
    assert "saved 0" in out


def test_the_benchmark_engine(run_forked):
    """deepspeed.nvme: pread and pwrite with async, then wait; and the basic functions of the module."""
    out = run_forked("""
import types, torch, deepspeed
from deepspeed.nvme import ds_aio_handle, ds_aio_basic
import os
os.mkdir("files")
arguments = types.SimpleNamespace(mapping_list=[(0, "files")], read=False, io_size=1 << 20, total_loops=2, use_gds=False,
    different_file_each_iteration=True, io_parallel=2, block_size=1 << 16, queue_depth=8, single_submit=False,
    sequential_requests=False, gpu=False, slow_bounce_buffer=False, use_accelerator_pin_memory=False, validate=True)
engine = ds_aio_handle.AIOHandle_Engine(arguments, 0, False)
for loop in range(2):
    engine.write(arguments, 0, loop)
for loop in range(2):
    engine.read(arguments, 0, loop)
engine.fini()
print("ran", sorted(os.path.getsize(f"files/{name}") for name in os.listdir("files")))
""")
    assert "ran [1048576, 1048576]" in out
