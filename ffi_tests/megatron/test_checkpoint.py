"""Checkpoints of a HybridDeviceOptimizer: one that Spillway wrote resumes with Megatron's own code, and the reverse."""

import copy
import io
import subprocess
import sys

import pytest
import torch
from hybrid import BF16, F32, build, parameters, plain, same, train

TOLERANCE = {F32: {"rtol": 1e-5, "atol": 1e-6}, BF16: {"rtol": 1e-2, "atol": 1e-4}}


def saved(optimizer, params):
    """A checkpoint as torch.save writes it: the optimizer's state, and the model."""
    file = io.BytesIO()
    torch.save({"optimizer": plain_state(optimizer.state_dict()), "model": plain(params)}, file)
    return file.getvalue()


def plain_state(value):
    """A state dict with plain tensors, which another process can read."""
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(torch.Tensor)
    if isinstance(value, dict):
        return {key: plain_state(inner) for key, inner in value.items()}
    return [plain_state(inner) for inner in value] if isinstance(value, list) else value


def resumed(checkpoint, **options):
    """Parameters and an optimizer with a checkpoint's content."""
    found = torch.load(io.BytesIO(checkpoint), weights_only=False)
    params = parameters(options.pop("params_dtype"))
    with torch.no_grad():
        for param, value in zip(params, found["model"], strict=True):
            param.copy_(value)
    optimizer = build(params, **options)
    optimizer.load_state_dict(found["optimizer"])
    return params, optimizer


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "not_overlapped"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_each_loads_the_others(installed, dtype, overlap, fraction):
    if dtype is F32:
        options = {"fraction": fraction, "overlap": overlap, "in_fp32": False}
    else:
        options = {"fraction": fraction, "overlap": overlap}
    results = {}
    for writer in (installed.install, installed.uninstall):
        writer()
        params = parameters(dtype)
        optimizer = build(params, **options)
        train(optimizer, params, range(3))
        checkpoint = saved(optimizer, params)
        results[writer.__name__, "uninterrupted"] = train(optimizer, params, range(3, 6))
        for reader in (installed.install, installed.uninstall):
            reader()
            params, optimizer = resumed(checkpoint, params_dtype=dtype, **options)
            results[writer.__name__, reader.__name__] = train(optimizer, params, range(3, 6))
    assert same(results["install", "install"], results["install", "uninterrupted"])
    assert same(results["uninstall", "uninstall"], results["uninstall", "uninterrupted"])
    wanted = results["uninstall", "uninterrupted"]
    for name, trained in results.items():
        for one, other in zip(trained, wanted, strict=True):
            torch.testing.assert_close(one, other, **TOLERANCE[dtype], msg=str(name))


def test_a_state_dict_has_the_keys_and_dtypes_of_megatrons(installed):
    shapes = []
    for writer in (installed.install, installed.uninstall):
        writer()
        params = parameters()
        optimizer = build(params)
        train(optimizer, params, range(2))
        found = optimizer.state_dict()
        shapes.append(
            (
                {number: {key: (value.dtype, value.shape) for key, value in state.items()} for number, state in found["state"].items()},
                found["param_groups"],
            )
        )
    assert shapes[0] == shapes[1]


def test_a_checkpoint_is_read_without_spillway(installed, tmp_path):
    params = parameters()
    optimizer = build(params)
    train(optimizer, params, range(2))
    (tmp_path / "checkpoint").write_bytes(saved(optimizer, params))
    code = (
        "import sys; sys.modules['spillway'] = None\nimport torch\n"
        f"print(len(torch.load({str(tmp_path / 'checkpoint')!r}, weights_only=False)['optimizer']['state']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"{len(params)}\n", done.stderr


def test_a_deep_copy_of_a_state_dict_resumes_with_the_same_bits(installed):
    params = parameters()
    optimizer = build(params)
    train(optimizer, params, range(2))
    kept, weights = copy.deepcopy(optimizer.state_dict()), plain(params)
    wanted = train(optimizer, params, range(2, 5))
    with torch.no_grad():
        for param, value in zip(params, weights, strict=True):
            param.copy_(value)
    optimizer.load_state_dict(kept)
    assert same(train(optimizer, params, range(2, 5)), wanted)


def test_states_that_distributed_optimizer_sets_in_place(installed):
    """DistributedOptimizer loads a checkpoint after a dummy step: it replaces tensors of `state`, and calls
    _sync_hdo_state_to_sub_optimizers."""
    params = parameters()
    optimizer = build(params)
    train(optimizer, params, range(3))
    kept = [{key: value.detach().clone() for key, value in optimizer.state[param].items()} for param in params]
    weights = plain(params)
    wanted = train(optimizer, params, range(3, 6))

    params = parameters()
    optimizer = build(params)
    optimizer.dummy_step()
    with torch.no_grad():
        for param, value, state in zip(params, weights, kept, strict=True):
            param.copy_(value)
            optimizer.state[param].update(state)
    optimizer._sync_hdo_state_to_sub_optimizers()
    assert same(train(optimizer, params, range(3, 6)), wanted)


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_sharded_checkpoint_of_megatron(installed, one_process, tmp_path, monkeypatch):
    """sharded_state_dict of Megatron's FP32Optimizer through megatron.core.dist_checkpointing, written with Spillway and read by both."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")

    def wrapped(params):
        tensor = torch.tensor
        monkeypatch.setattr(torch, "tensor", lambda *args, **options: tensor(*args, **{**options, "device": "cpu"}))
        made = FP32Optimizer(build(params), OptimizerConfig(), lambda optimizer, config: optimizer.dummy_step())
        monkeypatch.setattr(torch, "tensor", tensor)
        return made

    def sharded(params):
        return {f"layer{at}": ShardedTensor.from_rank_offsets(f"layer{at}", param) for at, param in enumerate(params)}

    params = parameters()
    outer = wrapped(params)
    train(outer.optimizer, params, range(3))
    weights = plain(params)
    (tmp_path / "checkpoint").mkdir()
    dist_checkpointing.save({"optimizer": plain_sharded(outer.sharded_state_dict(sharded(params)))}, tmp_path / "checkpoint")
    wanted = train(outer.optimizer, params, range(3, 6))
    for reader in (installed.install, installed.uninstall):
        reader()
        params = parameters()
        outer = wrapped(params)
        loading = {"optimizer": plain_sharded(outer.sharded_state_dict(sharded(params), is_loading=True))}
        with torch.no_grad():
            for param, value in zip(params, weights, strict=True):
                param.copy_(value)
        # Megatron's groups hold the class, which must be torch's: no other one is allowed here.
        with torch.serialization.safe_globals([torch.optim.AdamW]):
            outer.load_state_dict(dist_checkpointing.load(loading, tmp_path / "checkpoint")["optimizer"])
        assert all(int(state["step"]) == 3 for state in outer.optimizer.state.values())
        trained = train(outer.optimizer, params, range(3, 6))
        assert reader is installed.uninstall or same(trained, wanted)
        for one, other in zip(trained, wanted, strict=True):
            torch.testing.assert_close(one, other, **TOLERANCE[BF16])


def plain_sharded(value):
    """A sharded state dict with plain tensors, which can be written."""
    if isinstance(value, dict):
        return {key: plain_sharded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain_sharded(inner) for inner in value]
    if hasattr(value, "data") and hasattr(value, "local_shape") and value.data is not None:
        value.data = value.data.detach().as_subclass(torch.Tensor)
    return value
