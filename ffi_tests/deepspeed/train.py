"""Trains a small byte-level GPT on real text under DeepSpeed ZeRO.
Its optimizer states are in CPU memory; with --nvme DIRECTORY its states, gradients and parameters are in files.

Only the report at the end of the script mentions Spillway. With SPILLWAY_DEEPSPEED=1, Spillway serves optimizer
steps, I/O and pinned memory, and the process must not hold a compiled op of DeepSpeed. With --native, DeepSpeed's
own ops are used. Runs are deterministic for a fixed OMP_NUM_THREADS, so equal hashes mean bit-identical training.
DS_ACCELERATOR=cuda trains on a GPU."""

import argparse
import atexit
import hashlib
import importlib
import json
import logging
import os
import pathlib
import socket
import sys
import sysconfig
import time
import warnings

os.environ.setdefault("DS_ACCELERATOR", "cpu")
warnings.filterwarnings("ignore", category=FutureWarning)

import torch
from torch import nn
from torch.nn import functional as F


def main():
    options = arguments()
    become_single_rank()
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    torch.manual_seed(options.seed)
    model = Gpt(options.dim, options.layers, options.context)
    parameters = sum(p.numel() for p in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(options))
    mode = "DeepSpeed's compiled op" if options.native else "Spillway"
    place = f"and parameters in files in {options.nvme}" if options.nvme else "in CPU memory"
    print(
        f"ZeRO stage {options.stage}, optimizer states {place}, {parameters / 1e6:.2f} M parameters, "
        f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}, optimizer: {mode}",
        flush=True,
    )
    losses, rate = train(engine, options)
    report = {
        "stage": options.stage,
        "native": options.native,
        "deepspeed": deepspeed.__version__,
        "files": files_in(options.nvme),
        "parameters": parameters,
        "steps": len(losses),
        "steps_per_second": rate,
        "losses": losses,
        "sha256": weights_hash(engine.module),
        "active": active(),
        "compiled_ops": compiled_ops(),
    }
    if options.native:
        import compiled_ops as builds

        report["width"] = builds.vector_width()
    finish(report, options)
    leave_group()


def train(engine, options):
    """Steps until the count or the time is used up. Returns the losses and the steps per second
    after the first step."""
    batches = Batches(options)
    losses, start = [], time.monotonic()
    for step in range(1, options.steps + 1):
        loss = engine(batches.next().to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step == 1:
            first = time.monotonic()
        over = options.seconds and time.monotonic() - start > options.seconds
        rate = (step - 1) / (time.monotonic() - first) if step > 1 else 0.0
        progress(step, options.steps, losses, rate, last=over or step == options.steps)
        if over:
            break
    return losses, rate


def progress(step, steps, losses, rate, last):
    if not (last or sys.stdout.isatty() or step == 1 or step % 20 == 0):
        return
    line = f"  step {step:4d}/{steps}  loss {mean(losses[-10:]):.4f}  {rate:5.2f} steps/s"
    print(line, end="\r" if sys.stdout.isatty() and not last else "\n", flush=True)


def finish(report, options):
    """Makes the first rank print the results of the run. Each rank exits non-zero if the run did
    not prove its claim."""
    first, last = mean(report["losses"][:5]), mean(report["losses"][-5:])
    if int(os.environ["RANK"]) == 0:
        print(f"  loss {first:.4f} -> {last:.4f}, {report['steps_per_second']:.2f} steps/s")
        print(f"  active: {json.dumps(report['active'])}")
        print(f"  compiled ops of DeepSpeed in this process: {', '.join(report['compiled_ops']) or 'none'}")
        print(f"  sha256 of the final weights: {report['sha256']}", flush=True)
        if options.json:
            pathlib.Path(options.json).write_text(json.dumps(report))
    served = report["active"].get("cpu_adam", {}).get("calls", 0)
    needed = ["cpu_adam.so"] + ["async_io.so", "pin_memory.so"] * bool(options.nvme)
    if options.native and (served or not set(needed) <= set(report["compiled_ops"])):
        sys.exit("train.py --native: DeepSpeed's compiled ops did not run; unset SPILLWAY_DEEPSPEED")
    if not options.native and (not served or report["compiled_ops"]):
        sys.exit("train.py: Spillway did not run every step; install the wheel and set SPILLWAY_DEEPSPEED=1")
    if options.nvme and not options.native:
        moved = report["active"]["async_io"]
        if not (moved["read_bytes"] and moved["written_bytes"]) or moved["failed"]:
            sys.exit("train.py: Spillway's async_io did not transfer the files; install the wheel and set SPILLWAY_DEEPSPEED=1")
    if report["steps"] >= 20 and last >= first:
        sys.exit("train.py: the loss did not fall")


def active():
    """The parts that Spillway served; empty if Spillway is not loaded."""
    module = sys.modules.get("spillway.deepspeed")
    return module.active() if module else {}


def compiled_ops():
    """Libraries that DeepSpeed compiled and this process has mapped."""
    names = ("cpu_adam.so", "cpu_adagrad.so", "cpu_lion.so", "fused_adam.so", "async_io.so", "pin_memory.so", "deepspeed_shm_comm.so")
    mapped = {line.split()[-1].rsplit("/", 1)[-1] for line in pathlib.Path("/proc/self/maps").read_text().splitlines()}
    return sorted(name for name in mapped if name in names)


def weights_hash(module):
    """sha256 over the float32 master weights, in the order of the parameters."""
    from deepspeed.utils import safe_get_full_fp32_param

    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(safe_get_full_fp32_param(parameter).contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def files_in(folder):
    """Bytes of the files that DeepSpeed keeps under a folder, by kind."""
    kinds = {}
    for path in pathlib.Path(folder).rglob("*.swp") if folder else ():
        kind = path.relative_to(folder).parts[1]
        kinds[kind] = kinds.get(kind, 0) + path.stat().st_size
    return kinds


def config(options):
    zero = {"stage": options.stage, "offload_optimizer": {"device": "cpu", "pin_memory": os.environ["DS_ACCELERATOR"] != "cpu"}}
    if options.sub_group_size:
        zero["sub_group_size"] = options.sub_group_size
    if options.nvme:
        # Tensors below 1 MiB stay in memory. A buffer is large enough for every parameter.
        zero = {
            "stage": 3,
            "sub_group_size": 4 << 20,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": options.nvme,
                "buffer_count": 14 if options.pipeline else 5,
                "pipeline_read": options.pipeline,
                "pipeline_write": options.pipeline,
            },
            "offload_param": {
                "device": "nvme",
                "nvme_path": options.nvme,
                "buffer_count": 12,
                "buffer_size": 4 * options.dim * options.dim,
            },
        }
    return {
        "train_micro_batch_size_per_gpu": options.batch,
        **precision(options.dtype),
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": options.lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        # tiered.py tests Spillway's own tier; these runs test DeepSpeed's swappers on Spillway's files.
        "spillway": {"enabled": False},
        "steps_per_print": 1 << 30,
        **({"spillway": json.loads(options.block)} if options.block else {}),
    }


def precision(dtype):
    """DeepSpeed's setting of the dtype of parameters and gradients; it has none for fp32."""
    return {} if dtype == "fp32" else {dtype: {"enabled": True}}


class Batches:
    """Random windows, from a fixed seed, of Python's own library sources as bytes."""

    def __init__(self, options, limit=4 << 20):
        sources = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(path.read_bytes() for path in sources)[:limit]
        if len(text) < 100_000:
            sys.exit("train.py: the sources of Python's standard library, from which it trains, are not installed on this machine")
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._window = torch.arange(options.context + 1)
        self._batch = options.batch
        self._random = torch.Generator().manual_seed(options.seed)

    def next(self):
        starts = torch.randint(len(self._text) - len(self._window), (self._batch, 1), generator=self._random)
        return self._text[starts + self._window].long()


class Gpt(nn.Module):
    """A byte-level decoder; returns the loss of predicting each next byte."""

    def __init__(self, dim, layers, context):
        super().__init__()
        self.token = nn.Embedding(256, dim)
        self.position = nn.Parameter(torch.randn(context, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 256, bias=False)

    def forward(self, window):
        x = self.token(window[:, :-1]) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), window[:, 1:].flatten())


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.heads = max(1, dim // 64)
        self.norm_attention, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.project = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.norm_mlp(x))


def become_single_rank():
    """A process group of one, on a free port of the loopback, unless a launcher has set one up."""
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def without_compiled_collectives():
    """Makes several ranks use torch.distributed, instead of the collectives in shared memory that DeepSpeed compiles in minutes."""
    # As an attribute of deepspeed.comm this module is hidden by torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None


def leave_group():
    """Ends the process after Python's exit handlers, without destroying C++ threads. Their destruction sometimes
    aborts one of several ranks ("terminate called without an active exception"); the cause is unknown."""
    torch.distributed.barrier()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def rate(moments):
    """Steps per second after the first step, from the moments at which the steps ended."""
    return (len(moments) - 1) / (moments[-1] - moments[0]) if len(moments) > 1 else 0.0


def mean(values):
    return sum(values) / len(values)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, choices=(2, 3), default=2)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seconds", type=float, default=0, help="stop after this time; 0: no limit")
    parser.add_argument("--native", action="store_true", help="expect DeepSpeed's compiled op")
    parser.add_argument("--nvme", metavar="DIRECTORY", help="ZeRO-3 with states and parameters in files there")
    parser.add_argument("--pipeline", action="store_true", help="with --nvme: states are read and written ahead")
    parser.add_argument("--sub-group-size", type=int, help="parameters of a sub-group of ZeRO-3")
    parser.add_argument("--block", metavar="JSON", help="the spillway block of the configuration")
    parser.add_argument("--json", help="write the report to this file")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of parameters and gradients")
    for name, value in (("dim", 256), ("layers", 6), ("context", 128), ("batch", 8), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    if options.nvme:
        options.stage = 3
    return options


if __name__ == "__main__":
    main()
