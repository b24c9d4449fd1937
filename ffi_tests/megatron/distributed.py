"""Megatron's DistributedDataParallel and DistributedOptimizer over a small model, in one process or several, on the GPU of
spillway.bench._gpu_on_cpu."""

import contextlib

import torch

from spillway.bench import _gpu_on_cpu as gpu

_TYPES = {torch.bfloat16: "torch.cuda.BFloat16Tensor", torch.float16: "torch.cuda.HalfTensor", torch.float32: "torch.cuda.FloatTensor"}


class CudaIsCpu(torch.overrides.TorchFunctionMode):
    """Tensors that are asked for on a GPU are made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


@contextlib.contextmanager
def job_of(folder, set_attribute, rank=0, world=1):
    """A process of a job, whose tensors say that they are on a GPU."""
    of_type = torch.Tensor.type
    set_attribute(torch.cuda, "current_device", lambda: "cpu")
    set_attribute(torch.cuda, "synchronize", lambda *_: None)
    # Megatron refuses parameters that are views and of other types.
    set_attribute(gpu.OnGpu, "_base", None)
    set_attribute(torch.Tensor, "type", lambda tensor, *to: of_type(tensor, *to) if to else _TYPES[tensor.dtype])
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world)
    from megatron.core import parallel_state
    from megatron.core.optimizer import optimizer_config

    # Megatron asks for Transformer Engine, whose optimizer steps the GPU's share.
    set_attribute(optimizer_config, "is_te_min_version", lambda version: True)
    parallel_state.initialize_model_parallel()
    try:
        with CudaIsCpu():
            yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


class Model(torch.nn.Module):
    """Three parameters, two of which are in bfloat16."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        generator = torch.Generator().manual_seed(0)
        for name, size, dtype in (("weight", (64, 32), torch.bfloat16), ("bias", 100, torch.bfloat16), ("scale", 10, torch.float32)):
            param = gpu.parameter(torch.randn(size, generator=generator).to(dtype))
            param._is_param = True
            self.register_parameter(name, param)

    def forward(self):
        """A number that depends on each element of the parameters."""
        return sum((param.double() * torch.arange(param.numel()).view(param.shape)).sum() for param in self.parameters())


class Training:
    """A model and its optimizer, as Megatron builds them.

    Args:
        options: Of Megatron's OptimizerConfig; `parallel` has those of its DistributedDataParallelConfig."""

    def __init__(self, with_float32=True, parallel=None, **options):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=True, params_dtype=torch.bfloat16)
        self.model = Model(config)
        if not with_float32:
            del self.model.scale
        self.parallel = DistributedDataParallel(
            config, DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True, **(parallel or {})), self.model
        )
        self.chained = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                weight_decay=0.1,
                adam_beta2=0.95,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
                clip_grad=1.0,
                **options,
            ),
            [self.parallel],
        )
        (self.optimizer,) = self.chained.chained_optimizers

    def train(self, steps):
        """Steps with gradients that depend on the step; returns the weights."""
        for step in steps:
            self.parallel.zero_grad_buffer()
            generator = torch.Generator().manual_seed(step)
            for param in self.model.parameters():
                param.main_grad.copy_(torch.randn(param.shape, generator=generator))
            for group in self.chained.param_groups:
                group["lr"] = 1e-2 / (1 + step)
            for bucket in self.parallel.bucket_groups:
                # As at the end of a backward that reduces gradients: the next forward gathers the parameters.
                bucket.param_gather_dispatched = False
            assert self.chained.step()[0]
        return self.weights()

    def weights(self):
        """Copies of the weights."""
        return [param.detach().as_subclass(torch.Tensor).clone() for param in self.model.parameters()]

    def set_weights(self, values):
        """Replaces the weights."""
        with torch.no_grad():
            for param, value in zip(self.model.parameters(), values, strict=True):
                param.copy_(value)
