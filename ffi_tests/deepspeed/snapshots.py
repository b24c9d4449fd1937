"""Cases of test_snapshots.py that need a program of their own: interrupts, failures and damage around checkpoints whose optimizer states
are a snapshot of the tier. The argument names the case. Paths are below the working directory."""

import os
import sys

import train

train.become_single_rank()
train.without_compiled_collectives()

import deepspeed
import torch

import spillway

RANK = int(os.environ["RANK"])
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def make(path="tier", seed=0, **block):
    """An engine; `path=None` has its states in host memory."""
    offload = {"device": "cpu"}
    if path is not None:
        os.makedirs(path, exist_ok=True)
        offload = {"device": "nvme", "nvme_path": path}
        block = {"spillway": {"paths": [path], "snapshot_checkpoints": True, **block}}
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 64))
    return deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "steps_per_print": 1 << 30,
            "zero_optimization": {"stage": 3, "sub_group_size": 3000, "offload_optimizer": offload},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
            **block,
        },
    )[0]


def step(engine, count=1):
    for _ in range(count):
        source = torch.Generator().manual_seed(100 * engine.global_steps + RANK)
        engine.backward(engine(torch.randn(2, 64, generator=source).bfloat16()).float().square().mean())
        engine.step()


def save(engine, tag="t"):
    """Returns once the snapshot is finished."""
    engine.save_checkpoint("saved", tag=tag)
    engine.optimizer.optimizer_swapper.snapshots.wait()


def load(engine, tag="t", **named):
    assert engine.load_checkpoint("saved", tag=tag, **named)[0]


def states(engine):
    """Masters, moments, step counts, and the model's weights."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = []
    for param in engine.module.parameters():
        found += [safe_get_full_fp32_param(param).clone()]
        found += [safe_get_full_optimizer_state(param, name).clone() for name in ("exp_avg", "exp_avg_sq")]
        with deepspeed.zero.GatheredParameters([param]):
            found.append(param.data.float().clone())
    return [*found, *(torch.tensor(float(state["step"])) for state in engine.optimizer.optimizer.state.values())]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def of_host(count):
    """The states of the run in host memory after some steps."""
    engine = make(None)
    step(engine, count)
    found = states(engine)
    engine.destroy()
    return found


def raises(kind, work, words=""):
    try:
        work()
    except kind as error:
        assert words in str(error), error
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def once(owner, name, error, after=0):
    """The function raises instead of a call, after some that it serves, and serves all later ones."""
    own, left = getattr(owner, name), [after]

    def function(*arguments, **named):
        left[0] -= 1
        if left[0] >= 0:
            return own(*arguments, **named)
        setattr(owner, name, own)
        raise error

    setattr(owner, name, function)


@case
def transfers():
    for function, error in (("_outcome", KeyboardInterrupt()), ("put", spillway.IoError("the disk is full"))):
        engine = make(split_master=True)
        step(engine)
        once(spillway.Tier, function, error, after=2)
        raises(type(error), lambda: engine.save_checkpoint("saved"))
        step(engine)
        save(engine)
        step(engine)
        load(engine)
        assert same(states(engine), of_host(2))
        engine.destroy()


def damage(how):
    """Damages this rank's part of the snapshot "t"."""
    folder = "saved/t/spillway-snapshot" + (f"/rank-{RANK}" if os.environ["WORLD_SIZE"] != "1" else "")
    file = f"{folder}/extent-00000.stream-0.bin"
    if how == "missing":
        os.unlink(file)
    elif how == "truncated":
        os.truncate(file, os.path.getsize(file) - 1)
    elif how == "changed":
        with open(file, "r+b") as content:
            content.seek(100)
            content.write(b"ZZZZ")


def damaged(how, last, **block):
    """Loads a damaged snapshot after 4 steps, of which `last` were not committed. The run goes on as if it had loaded nothing."""
    engine = make(**block)
    step(engine, 2)
    save(engine)
    if RANK == int(os.environ["WORLD_SIZE"]) - 1:
        damage(how)
    torch.distributed.barrier()
    if not last:
        # Nothing was committed to this tier.
        engine.destroy()
        engine = make("new", **block)
        step(engine, 2)
    step(engine, last or 2)
    before = states(engine)
    raises(spillway.TierError, lambda: load(engine))
    assert engine.global_steps == 4 and same(states(engine), before)
    step(engine)
    assert same(states(engine), of_host(5))
    engine.destroy()


@case
def damaged_content():
    for split in (False, True):
        damaged("changed", 2, split_master=split)
    damaged("changed", 2, overlap=True)
    damaged("changed", 0)


@case
def damaged_files():
    damaged("truncated", 2, split_master=True)
    damaged("missing", 0)


@case
def mixed_tags():
    from spillway.deepspeed import _checkpoints

    engine = make()
    step(engine, 2)
    # Interrupts after DeepSpeed has written the model's file.
    for error, words in ((spillway.NoStateError, "no finished snapshot"), (spillway.InvalidArgumentError, "a save under this tag was")):
        save(engine)
        if error is spillway.InvalidArgumentError:
            step(engine)
        once(_checkpoints.Snapshots, "begin", KeyboardInterrupt())
        raises(KeyboardInterrupt, lambda: save(engine))
        raises(error, lambda: load(engine), words)
    before = states(engine)
    save(engine)
    # The same in a run that saves no snapshots.
    other = make("other", snapshot_checkpoints=False)
    step(other, 2)
    once(other, "_save_zero_checkpoint", KeyboardInterrupt())
    raises(KeyboardInterrupt, lambda: other.save_checkpoint("saved", tag="t"))
    raises(spillway.InvalidArgumentError, lambda: load(engine), "the model of step 2 and the optimizer states of step 3")
    assert same(states(engine), before) and engine.global_steps == 3
    save(engine)
    load(engine)
    assert same(states(engine), before)
    # A commit that is refused leaves the checkpoint of before.
    step(engine)
    spillway.deepspeed.client_state(engine)["function"] = print
    raises(spillway.InvalidArgumentError, lambda: save(engine))
    del spillway.deepspeed.client_state(engine)["function"]
    load(engine)
    assert same(states(engine), before)
    other.destroy()
    engine.destroy()


@case
def interrupted_waits():
    from spillway._snapshot import Snapshot

    engine = make(snapshot_bytes_per_second=200_000)
    step(engine)
    engine.save_checkpoint("saved", tag="first")
    once(Snapshot, "wait", KeyboardInterrupt())
    raises(KeyboardInterrupt, lambda: engine.save_checkpoint("saved", tag="second"))
    step(engine)
    save(engine, "second")
    load(engine, "first")
    step(engine, 2)
    assert same(states(engine), of_host(3))
    engine.save_checkpoint("saved", tag="third")
    once(Snapshot, "wait", KeyboardInterrupt())
    raises(KeyboardInterrupt, engine.destroy)
    engine.destroy()
    engine.destroy()
    with open("saved/latest") as latest:
        assert latest.read() == "third"
    engine = make(seed=3)
    load(engine, "third")
    assert same(states(engine), of_host(3))
    engine.destroy()


@case
def masters_only():
    engine = make()
    step(engine, 2)
    save(engine)
    engine.optimizer.optimizer_swapper.purge_state()
    before = states(engine)
    other = make("other", seed=3)
    step(other)
    load(other, load_optimizer_states=False)
    assert other.global_steps == 2 and same(states(other), before)
    assert same(before[: 4 * 6 : 4], of_host(2)[: 4 * 6 : 4]) and not any(moment.any() for moment in before[1 : 4 * 6 : 4])
    step(engine)
    step(other)
    assert same(states(other), states(engine))
    engine.destroy()
    other.destroy()


if __name__ == "__main__":
    os.chdir(sys.argv[2])
    CASES[sys.argv[1]]()
    train.leave_group()
