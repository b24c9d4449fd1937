"""A DistributedOptimizer of Megatron whose states are in an OptimizerStateStore.

Megatron keeps its own step: gradients, clipping, overflow, and the gathering of parameters. Only two calls inside of it are replaced on
this one optimizer: the inner optimizer's step, and the copy of main parameters to the model, which the store's step has done. The store's
states are in no state dict, since they are checkpointed by save_to() and load_from()."""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch

from .. import _ranks
from ..errors import InvalidArgumentError, UnsupportedError
from ..tiered import Chain, new_opening
from ._agreement import CURE, place_of
from ._shards import Shard

#: Settings of Megatron's OptimizerConfig under which its step, or the home of its states, is another one. In a CUDA graph only work of the
#: GPU is repeated.
_REFUSED = (
    "use_precision_aware_optimizer",
    "optimizer_cpu_offload",
    "offload_optimizer_states",
    "reuse_grad_buf_for_mxfp8_param_ag",
    "optimizer_cuda_graph",
)
#: Classes of torch, Transformer Engine and Apex. megatron-core 0.19 may have Lion under a DistributedOptimizer.
_ADAMS = ("Adam", "AdamW", "FusedAdam")


def attach(store_class, optimizer, paths, *, job, prefix=None, **options):
    """See OptimizerStateStore.attach. `prefix` begins the names of the shards; by default it has the model-parallel ranks."""
    options = _ranked(options)
    shards = _ranks.together(options["world"], lambda: _shards(optimizer, prefix), group=options.get("process_group"))
    options.setdefault("decoupled", getattr(optimizer.config, "decoupled_weight_decay", True))
    store = store_class(shards, paths, job=job, **options)
    names = {shard.master.data_ptr(): shard.name for shard in shards}
    _bind(optimizer, store, [(main, names[main.data_ptr()]) for main in _mains(optimizer)])
    _free(optimizer)
    _forget_mains(optimizer)
    try:
        if store.resumed_step is not None:
            # The constructor has written the shards of each process.
            store._gathering(lambda: None)
    except BaseException:
        store.close()
        raise
    return store


def attach_all(store_class, optimizers, paths, *, job, **options):
    """See OptimizerStateStore.attach_all."""
    options = _ranked(options)
    rank, world, group, given = options["rank"], options["world"], options.get("process_group"), options.pop("tier_options", None) or {}
    jobs = [f"{job}-{number}" for number in range(len(optimizers))]
    if options.get("begin_from") is not None:
        raise UnsupportedError(
            "OptimizerStateStore.attach_all: the stores of another run may be of different steps, so begin_from is for attach(); attach "
            "each optimizer with that of its job, JOB-N, commit, and attach_all() at the next start"
        )
    everyone = _ranks.gathered((len(jobs), new_opening()), world, group)
    if len({count for count, _ in everyone}) != 1:
        raise InvalidArgumentError(
            "OptimizerStateStore.attach_all: the processes have different numbers of optimizers; attach() each one, with a "
            "process_group of the processes that have it"
        )
    commits: list[dict[str, int]] = [{} for _ in jobs]
    if "at_step" not in given:
        commits = _ranks.agreed(
            [place_of(paths, name, options.get("host"), rank, world, group, given) for name in jobs], rank, world, CURE, group
        )
    # Their commits may be in flight together.
    given, chain = {"keep_before": len(jobs) > 1, **given}, Chain(everyone[0][1])
    stores = []
    try:
        for name, optimizer, at in zip(jobs, optimizers, commits):
            stores.append(attach(store_class, optimizer, paths, job=name, tier_options={**at, **given}, **options))
        for store in stores:
            store._tiered.chain = chain
    except BaseException:
        for store in stores:
            store.close()
        raise
    return stores


def _ranked(options):
    """The options with this process's rank and the number of processes, by default those of torch.distributed."""
    rank, world = _ranks.own(options.get("process_group"))
    return {"rank": rank, "world": world, **options}


def _shards(optimizer, prefix):
    _check(optimizer)
    return list(shards_of(optimizer, _model_parallel() if prefix is None else prefix))


def _check(optimizer):
    if hasattr(optimizer, "_spillway_store"):
        raise UnsupportedError(
            "OptimizerStateStore: the optimizer has a store already, which has freed its main parameters; build the optimizer again"
        )
    config, asked = optimizer.config, "call OptimizerStateStore.attach without it"
    for name in _REFUSED:
        if getattr(config, name, False):
            raise UnsupportedError(f"OptimizerStateStore: the optimizer has {name}; {asked}")
    if optimizer.is_stub_optimizer:
        raise UnsupportedError("OptimizerStateStore: the optimizer has no parameters; it needs no store")
    if getattr(getattr(optimizer, "ddp_config", None), "use_megatron_fsdp", False):
        raise UnsupportedError(f"OptimizerStateStore: the model uses Megatron FSDP; {asked}")
    if not hasattr(optimizer, "shard_float16_groups"):
        raise UnsupportedError(
            f"OptimizerStateStore: {type(optimizer).__name__} has no shards; attach a store to Megatron's DistributedOptimizer"
        )
    inner = type(optimizer.optimizer).__name__
    if inner not in _ADAMS:
        raise UnsupportedError(f"OptimizerStateStore: the optimizer steps with {inner}, and the store has Adam and AdamW")
    if optimizer.optimizer.state:
        raise UnsupportedError("OptimizerStateStore: the optimizer has states; attach a store before its first step, and before a load")
    for params, shards in zip(optimizer.model_float16_groups, optimizer.shard_float16_groups, strict=True):
        for param, shard in zip(params, shards, strict=True):
            # Megatron makes no shard of a quantized parameter that it cannot divide.
            plain = shard is not None and param.dtype in (torch.bfloat16, torch.float16)
            if not plain or hasattr(param, "_fp8_attrs") or hasattr(param, "_quantizer"):
                raise UnsupportedError(f"OptimizerStateStore: a parameter is quantized, to FP8 or FP4; {asked}")


def _model_parallel() -> str:
    """The ranks of this process in the groups that divide the model: processes of other ranks have other parameters of the same name."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return ""
    ranks = {
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "ep": parallel_state.get_expert_model_parallel_rank(),
    }
    return "".join(f"{name}{rank}." for name, rank in ranks.items())


def shards_of(optimizer: Any, prefix: str) -> Iterator[Shard]:
    """The shards of this process. A name has the parameter and the elements of it that the shard has."""
    names = {
        param: f"{prefix}chunk{number}.{name}"
        for number, chunk in enumerate(optimizer.model_chunks)
        for name, param in chunk.named_parameters()
    }
    groups = zip(
        optimizer.optimizer.param_groups,
        optimizer.model_float16_groups,
        optimizer.shard_fp32_from_float16_groups,
        optimizer.model_fp32_groups,
        optimizer.shard_fp32_groups,
        strict=True,
    )
    for number, (_, halves, masters, floats, parts) in enumerate(groups):
        group = _Group(optimizer, number)
        for param, main in [*zip(halves, masters, strict=True), *zip(floats, parts, strict=True)]:
            places = optimizer._get_model_param_range_map(param)
            inside, world = places["param"], places["gbuf_world_in_bucket"]
            buffer, _, bucket = optimizer.model_param_gbuf_map[param]
            weight = optimizer.buffers[buffer].buckets[bucket].param_data.view(-1)[world.start : world.end]
            yield Shard(f"{names[param]}[{inside.start}:{inside.end}]", weight, group, _grad_of(main), main.detach())


class _Group(dict):
    """The hyper-parameters of a group as they are now: Megatron may replace its groups."""

    def __init__(self, optimizer, number):
        super().__init__()
        self._optimizer, self._number = optimizer, number

    def __getitem__(self, name):
        return self._optimizer.optimizer.param_groups[self._number][name]


def _gathering(optimizer, place):
    """See OptimizerStateStore: writes shards, and has Megatron gather the parameters of all data-parallel processes. The forward reads what
    was gathered, also with overlap_param_gather, because Megatron gathers again after the next step only."""

    def gathered(write):
        groups = _bucket_groups(optimizer)
        for group in groups:
            if group.param_gather_handle is not None:
                # A gather in flight would overwrite the shards. This call waits for it, and begins no other.
                group.start_param_sync(force_sync=True)
        place.together(write)
        for group in groups:
            group.start_param_sync(force_sync=True)

    return gathered


def _bucket_groups(optimizer):
    """The groups of buckets that Megatron gathers, for this optimizer's parameters. Other optimizers may have other groups of processes."""
    own = {id(bucket) for buffer in optimizer.buffers for bucket in buffer.buckets}
    return [
        group
        for chunk in optimizer.model_chunks
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
        if any(id(bucket) in own for bucket in group.buckets)
    ]


def _grad_of(main):
    return lambda: main.grad


def _mains(optimizer):
    return [main for group in optimizer.shard_fp32_from_float16_groups for main in group]


def _free(optimizer):
    """Frees the memory of the main parameters. Their gradients stay where Megatron puts them."""
    for main in _mains(optimizer):
        main.untyped_storage().resize_(0)


def _forget_mains(optimizer):
    """Removes the references of model parameters to main parameters: a read of freed memory ends the process. Readers, such as the logged
    norm of the parameters, then take the parameter itself."""
    for param in (param for group in optimizer.model_float16_groups for param in group):
        for name in ("main_param", "main_param_sharded"):
            if hasattr(param, name):
                delattr(param, name)


def _bind(optimizer, store, named):
    reload, optimizer._spillway_store = optimizer.reload_model_params, store
    store._gathering = _gathering(optimizer, store._place)

    def step(self, closure=None):
        store.step()

    def copied(self):
        """The store's step wrote the model's parameters."""

    def reload_model_params(self, *args, **kwargs):
        for main in _mains(self):
            main.untyped_storage().resize_(main.numel() * main.element_size())
        try:
            reload(*args, **kwargs)
            store.refresh({name: main for main, name in named})
        finally:
            _free(self)

    def state_dict(self, *args, **kwargs):
        return {"grad_scaler": self.grad_scaler.state_dict()} if self.grad_scaler else {}

    def load_state_dict(self, state_dict):
        if self.grad_scaler and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])

    for method in (reload_model_params, state_dict, load_state_dict):
        setattr(optimizer, method.__name__, MethodType(method, optimizer))
    optimizer.sharded_state_dict = MethodType(state_dict, optimizer)
    optimizer._copy_main_params_to_model_params = MethodType(copied, optimizer)
    optimizer.optimizer.step = MethodType(step, optimizer.optimizer)
