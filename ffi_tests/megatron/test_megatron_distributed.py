"""A DistributedOptimizer of Megatron: with its CPU offload stepped by Spillway, and with its states in an OptimizerStateStore."""

import copy
import pathlib
import subprocess
import sys

import pytest
import torch
from distributed import Training, job_of
from hybrid import same

import spillway
from spillway.megatron import OptimizerStateStore


@pytest.fixture
def job(cpu_as_gpu, tmp_path, monkeypatch):
    """A job of one process."""
    with job_of(tmp_path, monkeypatch.setattr):
        yield


OFFLOADED = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
    "use_precision_aware_optimizer": True,
    "overlap_cpu_optimizer_d2h_h2d": True,
}


def close(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "not_overlapped"])
def test_cpu_offload_has_the_weights_of_megatrons(installed, job, overlap):
    options = {**OFFLOADED, "overlap_cpu_optimizer_d2h_h2d": overlap}
    before = spillway.stats().adam_elements
    ours = Training(with_float32=False, **options)
    trained = ours.train(range(4))
    assert spillway.stats().adam_elements - before == 4 * 2148
    installed.uninstall()
    close(trained, Training(with_float32=False, **options).train(range(4)))
    assert spillway.stats().adam_elements - before == 4 * 2148


def test_megatrons_state_dict_resumes_with_both(installed, job):
    """DistributedOptimizer's state_dict has the step and the groups; its parameter state is read and set by its own methods."""
    ours = Training(with_float32=False, **OFFLOADED)
    ours.train(range(3))
    kept, weights = copy.deepcopy(ours.optimizer.state_dict()), ours.weights()
    states = [
        {key: value.detach().clone() for key, value in ours.optimizer._get_main_param_and_optimizer_states(param).items()}
        for param in ours.model.parameters()
    ]
    assert {group["step"] for group in kept["optimizer"]["param_groups"]} == {3}
    wanted = ours.train(range(3, 6))
    for reader in (installed.install, installed.uninstall):
        reader()
        other = Training(with_float32=False, **OFFLOADED)
        other.optimizer.load_state_dict(copy.deepcopy(kept))
        other.set_weights(weights)
        for param, state in zip(other.model.parameters(), states, strict=True):
            other.optimizer._set_main_param_and_optimizer_states(
                param, {key: value.clone() for key, value in state.items() if key != "step"}
            )
        other.optimizer.optimizer._sync_hdo_state_to_sub_optimizers()
        trained = other.train(range(3, 6))
        close(trained, wanted)
        assert reader is installed.uninstall or same(trained, wanted)


def test_the_store_steps_a_distributed_optimizer(job, tmp_path):
    theirs = Training()
    wanted = theirs.train(range(4))
    ours = Training()
    with OptimizerStateStore.attach(ours.optimizer, [tmp_path], job="states", tier_options={"durability": "process"}) as store:
        mains = [main for group in ours.optimizer.shard_fp32_from_float16_groups for main in group]
        assert mains and all(main.untyped_storage().nbytes() == 0 for main in mains), "the masters' memory on the GPU is free"
        halves = [param for param in ours.model.parameters() if param.dtype is not torch.float32]
        assert halves and not any(hasattr(param, "main_param") for param in halves), "a norm of the parameters reads no freed memory"
        assert all(hasattr(param, "main_param") for param in theirs.model.parameters() if param.dtype is not torch.float32)
        before = spillway.stats().adam_elements
        close(ours.train(range(4)), wanted)
        assert spillway.stats().adam_elements - before == 4 * 2158 and store.steps == 4
        assert ours.optimizer.state_dict() == ours.optimizer.sharded_state_dict({}) == {}
        ours.optimizer.load_state_dict({})


def test_a_resumed_store_has_the_weights_of_the_last_commit(job, tmp_path):
    ours, wanted = Training(), {}
    options = {"job": "states", "tier_options": {"durability": "process"}}
    with OptimizerStateStore.attach(ours.optimizer, [tmp_path], **options) as store:
        for step in range(5):
            wanted[step + 1] = ours.train([step])
            if step == 2:
                store.commit()
                store.save_to(tmp_path / "saved")
    other = Training()
    with OptimizerStateStore.attach(other.optimizer, [tmp_path], **options) as store:
        assert store.resumed_step == store.steps == 3 and same(other.weights(), wanted[3])
        assert same(other.train([3, 4]), wanted[5])
    third = Training()
    with OptimizerStateStore.attach(third.optimizer, [None], job="other") as store:
        assert store.load_from(tmp_path / "saved") and same(third.weights(), wanted[3])
        assert same(third.train([3, 4]), wanted[5])


def test_new_model_weights_become_the_masters(job):
    ours, other = Training(), Training()
    other.set_weights([weight * 2 for weight in other.weights()])
    other.optimizer.reload_model_params()
    with (
        OptimizerStateStore.attach(ours.optimizer, [None], job="one") as store,
        OptimizerStateStore.attach(other.optimizer, [None], job="two"),
    ):
        ours.set_weights(other.weights())
        ours.optimizer.reload_model_params()
        assert all(main.untyped_storage().nbytes() == 0 for group in ours.optimizer.shard_fp32_from_float16_groups for main in group)
        assert store.steps == 0 and same(ours.train(range(2)), other.train(range(2)))


@pytest.mark.parametrize("closed", [False, True])
def test_a_second_store_of_an_optimizer_is_refused(job, closed):
    """The first store has freed the memory of the masters, which a second one would read."""
    ours, alone = Training(), Training()
    with (
        OptimizerStateStore.attach(ours.optimizer, [None], job="first") as store,
        OptimizerStateStore.attach(alone.optimizer, [None], job="alone"),
    ):
        ours.train([0])
        if closed:
            store.close()
        with pytest.raises(spillway.UnsupportedError, match="has a store already"):
            OptimizerStateStore.attach(ours.optimizer, [None], job="second")
        if closed:
            with pytest.raises(spillway.InvalidArgumentError, match="closed"):
                ours.train([1])
        else:
            alone.train([0])
            assert same(ours.train([1]), alone.train([1])) and store.steps == 2


def test_optimizers_that_a_store_cannot_step(installed, job):
    stepped = Training()
    stepped.train([0])
    for training, reason in [
        (stepped, "attach a store before its first step"),
        (Training(with_float32=False, **OFFLOADED), "use_precision_aware_optimizer"),
    ]:
        with pytest.raises(spillway.UnsupportedError, match=reason):
            OptimizerStateStore.attach(training.optimizer, [None], job="states")


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda optimizer: setattr(optimizer.config, "optimizer_cuda_graph", True), "has optimizer_cuda_graph"),
        (lambda optimizer: setattr(optimizer, "optimizer", torch.optim.SGD([torch.zeros(1)])), "steps with SGD"),
        (lambda optimizer: optimizer.shard_float16_groups[0].__setitem__(0, None), "a parameter is quantized"),
        (lambda optimizer: delattr(optimizer, "shard_float16_groups"), "attach a store to Megatron's DistributedOptimizer"),
    ],
    ids=["captured", "not_adam", "quantized", "not_distributed"],
)
def test_optimizers_of_newer_versions_that_a_store_cannot_step(job, change, reason):
    training = Training()
    change(training.optimizer)
    with pytest.raises(spillway.UnsupportedError, match=reason):
        OptimizerStateStore.attach(training.optimizer, [None], job="states")
    mains = [main for group in training.optimizer.shard_fp32_from_float16_groups for main in group]
    assert all(main.untyped_storage().nbytes() for main in mains), "a refusal changes nothing"


#: A data-parallel process. After each call that replaces the states, its model must have every element of the commit's weights.
RANK = """
import os, sys
sys.path[:0] = {paths!r}
rank, world, folder, overlap = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "overlap"
import torch
from distributed import Training, job_of
from hybrid import same
from spillway.bench import _gpu_on_cpu
from spillway.megatron import OptimizerStateStore

def training():
    parallel = dict(overlap_param_gather=True, overlap_grad_reduce=True, bucket_size=1000, align_param_gather=False) if overlap else dict()
    return Training(parallel=parallel, **dict(overlap_param_gather=True) if overlap else dict())

def attached(of):
    [store] = OptimizerStateStore.attach_all([of.optimizer], [folder + "/tier"], job="run", tier_options=dict(durability="process"))
    return store

def seen(of):
    of.parallel.zero_grad_buffer()
    return of.weights(), float(of.parallel())

def all_same(one, other):
    return same(one[0], other[0]) and one[1] == other[1]

_gpu_on_cpu.install()
with job_of(folder, setattr, rank, world):
    ours = training()
    store = attached(ours)
    initial = seen(ours)
    ours.train(range(3))
    # With overlap this gathers.
    ours.parallel()
    wanted = seen(ours)
    everyone = [None] * world
    torch.distributed.all_gather_object(everyone, wanted[1])
    assert len(set(everyone)) == 1 and not same(wanted[0], initial[0])
    store.commit()
    store.save_to(folder + "/saved")
    store.snapshot(folder + "/snapshot").wait()
    torch.distributed.barrier()
    calls = dict(
        rollback=store.rollback, restore=lambda: store.restore(folder + "/snapshot"), load_from=lambda: store.load_from(folder + "/saved")
    )
    for name, call in calls.items():
        for in_flight in (False, True) if overlap else (False,):
            ours.train([7])
            if in_flight:
                ours.parallel.zero_grad_buffer()
                ours.parallel.start_param_sync()
            call()
            assert same(ours.weights(), wanted[0]), name
            assert float(ours.parallel()) == wanted[1], name
            assert all_same(seen(ours), wanted), name
    ours.train([3, 4])
    ours.parallel()
    later = seen(ours)
    assert not same(later[0], wanted[0])
    store.rollback()
    store.close()
    other = training()
    assert all_same(seen(other), initial)
    store = attached(other)
    assert store.resumed_step == 3 and same(other.weights(), wanted[0]) and all_same(seen(other), wanted)
    other.train([3, 4])
    other.parallel()
    assert all_same(seen(other), later)
    store.close()
    torch.distributed.barrier()
print("whole")
"""


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize("gather, world", [("at once", 2), ("overlap", 3)])
def test_the_model_has_all_weights_of_the_commit_in_every_process(tmp_path, gather, world):
    (tmp_path / "tier").mkdir()
    code = RANK.format(paths=[str(pathlib.Path(__file__).parent), *sys.path])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(world), str(tmp_path), gather],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    assert all(output[0].endswith("whole\n") for output in outputs), outputs
