"""Opens and closes engines in one process: python engines.py CASE DIRECTORY. A case that fails raises.

Run by test_engines.py, in a process with SPILLWAY_DEEPSPEED=1."""

import gc
import itertools
import logging
import os
import pathlib
import sys
import time
import weakref

import train

PLACES = {"none": {}, "cpu": {"device": "cpu"}, "nvme": {"device": "nvme"}}
WIDTH = 64


def main():
    case, folder = sys.argv[1:3]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    train.become_single_rank()
    import deepspeed  # noqa: F401

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    CASES[case](pathlib.Path(folder), *sys.argv[3:])
    train.leave_group()


def make(folder, optimizer="nvme", parameters="none", block=None, dtype="bf16", broken=False):
    """An engine of a small model, with its states and parameters in the given places."""
    import deepspeed
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    zero = {"stage": 3, "sub_group_size": 5000, "stage3_param_persistence_threshold": 0}
    for name, place in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        if place != "none":
            zero[name] = {**PLACES[place], **({"nvme_path": str(folder)} if place == "nvme" else {})}
    if parameters != "none":
        zero["offload_param"].update(buffer_count=20, buffer_size=2 * WIDTH * WIDTH)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        dtype: {"enabled": True},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 30,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    }
    if dtype == "fp16":
        config[dtype]["initial_scale_power"] = 8
    if block is not None:
        config["spillway"] = block
    if broken:
        config["scheduler"] = {"type": "No such schedule"}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def step(engine, count=1):
    """Trains, and returns the losses."""
    import torch

    losses = []
    for _ in range(count):
        source = torch.Generator().manual_seed(engine.global_steps)
        batch = torch.randn(4, WIDTH, generator=source).to(next(engine.module.parameters()).dtype)
        loss = engine(batch).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def refused(call, words):
    try:
        call()
    except Exception as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no error that says {words}")


def destroyed(folder, parameters):
    """destroy() closes at once, and closed objects raise an error that says so; a second engine can
    use the same place."""
    from spillway import deepspeed

    for _ in range(2):
        engine = make(folder, parameters=parameters)
        step(engine)
        swapper = engine.optimizer.optimizer_swapper
        assert files(folder) and len(deepspeed.active()["tier"]) == 1
        engine.destroy()
        assert not files(folder), files(folder)
        assert "tier" not in deepspeed.active() and "parameter_tier" not in deepspeed.active()
        refused(lambda: swapper.read(0), "were closed with their engine")
        engine.destroy()


def dropped(folder, parameters):
    """The last reference to an engine closes the objects that it opened, although DeepSpeed keeps engines forever."""
    for _ in range(2):
        engine = make(folder, parameters=parameters)
        step(engine)
        seen = weakref.ref(engine)
        del engine
        gc.collect()
        assert seen() is None and not files(folder), files(folder)


def failed(folder, parameters):
    """An engine whose construction fails leaves nothing open."""
    for _ in range(2):
        refused(lambda: make(folder, parameters=parameters, broken=True), "No such schedule")
        assert not files(folder), files(folder)
    step(make(folder, parameters=parameters))


def beside(folder, parameters):
    """Two engines at the same time on the same path have the same losses as one engine alone."""
    alone = step(make(folder / "alone", parameters=parameters), 4)
    engines = [make(folder / "both", parameters=parameters) for _ in range(2)]
    losses = list(zip(*(itertools.chain.from_iterable(step(engine) for engine in engines) for _ in range(4))))
    assert [list(one) for one in losses] == [alone, alone]
    engines[0].destroy()
    assert files(folder / "both")
    step(engines[1])
    engines[1].destroy()
    assert not files(folder / "both")


def resumable(folder, _):
    """A committed tier survives runs whose configuration has no block for its path, and runs with other names."""
    from spillway import tier

    first = make(folder, block={"resume": True})
    losses = step(first, 2)
    first.destroy()
    held = files(folder)
    assert held and tier.steps([folder], job="deepspeed").last == 2
    for block in (None, {"host_memory": 1 << 30}, {"job": "other"}):
        scratch = make(folder, block=block, parameters="nvme")
        step(scratch)
        assert set(held) < set(files(folder))
        scratch.destroy()
        assert files(folder) == held and tier.steps([folder], job="deepspeed").last == 2
    refused(lambda: make(folder, block={"job": "deepspeed-scratch-1", "resume": True}), "scratch directories")
    again = make(folder, block={"resume": True})
    assert again.global_steps == 2 and len(losses) == 2
    step(again)
    again.destroy()
    assert tier.steps([folder], job="deepspeed").last == 3


def dead(folder, _):
    """The next engine removes the files of a killed process, also if that process had several engines."""
    child = os.fork()
    if not child:
        for number in (1, 2, 3):
            from spillway import tier

            opened = tier.Tier([folder], job=f"deepspeed-scratch-{number}")
            globals().setdefault("keep", []).append(opened)
        os._exit(0)
    os.waitpid(child, 0)
    assert len(files(folder)) >= 9
    engine = make(folder)
    assert {name.split("/")[0] for name in files(folder)} == {"deepspeed-scratch-1"}
    engine.destroy()


def superoffload(folder, _):
    """SuperOffload's optimizer closes with its engine."""
    import superoffload

    superoffload.allow_the_cpu()
    import deepspeed as real
    import torch

    from spillway import deepspeed
    from spillway.deepspeed import _rounds

    for way in ("destroy", "drop"):
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        engine = real.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_micro_batch_size_per_gpu": 4,
                "bf16": {"enabled": True},
                "steps_per_print": 1 << 30,
                "zero_optimization": {
                    "stage": 3,
                    "sub_group_size": 5000,
                    "stage3_param_persistence_threshold": 0,
                    "offload_optimizer": {"device": "cpu", "super_offload": True},
                },
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            },
        )[0]
        step(engine)
        assert len(_rounds._engines) == 1 and deepspeed.active()["superoffload"]["commits"] > 0
        if way == "destroy":
            engine.destroy()
            assert not len(_rounds._engines)
            refused(lambda: engine.optimizer.superoffload_cpu_optimizer.open(0, {}, 1.0, 0.0), "closed with its engine")  # noqa: F821
        del engine, model
        gc.collect()
        assert not len(_rounds._engines)


def checkpoint(folder, before, after):
    """A checkpoint of an engine with its parameters and states in one pair of places is loaded by an engine with
    another pair in this process. The weights, moments and losses are those of the run that continued."""
    from deepspeed.accelerator import get_accelerator

    dtype = "fp16" if get_accelerator().is_fp16_supported() else "bf16"
    first = make(folder / "nvme", *reversed(before.split("-")), dtype=dtype)
    step(first, 3)
    first.save_checkpoint(str(folder / "saved"))
    kept = state(first)
    wanted = step(first, 3)
    last = state(first)
    first.destroy()
    del first
    second = make(folder / "nvme", *reversed(after.split("-")), dtype=dtype)
    assert second.load_checkpoint(str(folder / "saved"))[0] and second.global_steps == 3
    compare(state(second), kept, 0.0, 0.0)
    losses = step(second, 3)
    # torch's Adam and DeepSpeed's Adam round differently, and a load computes the powers of beta anew.
    assert all(abs(one - other) <= 1e-3 * abs(other) for one, other in zip(losses, wanted, strict=True)), (losses, wanted)
    compare(state(second), last, 2e-3, 1e-5)
    second.destroy()
    assert not list(files(folder / "nvme")), files(folder / "nvme")


def state(engine):
    """Master weights and moments of every parameter, by name."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    return {
        (name, part): (safe_get_full_fp32_param(param) if part == "param" else safe_get_full_optimizer_state(param, part)).clone()
        for name, param in engine.module.named_parameters()
        for part in ("param", "exp_avg", "exp_avg_sq")
    }


def compare(one, other, rtol, atol):
    import torch

    assert one.keys() == other.keys() and len(one) == 18
    for key in one:
        torch.testing.assert_close(one[key], other[key], rtol=rtol, atol=atol, msg=lambda text, key=key: f"{key}: {text}")


def fifty(folder, count):
    """Engines that were created, trained and destroyed leave nothing behind: the process holds no more after all
    than after the fifth."""
    seen = []
    for number in range(int(count)):
        engine = make(folder, parameters="nvme")
        step(engine)
        engine.destroy()
        del engine
        gc.collect()
        seen.append(measure(folder))
        if number in (0, int(count) - 1):
            print(seen[-1], flush=True)
    first, settled, last = seen[0], seen[4], seen[-1]
    for name in ("VmLck", "descriptors", "threads", "files", "locks"):
        assert last[name] <= settled[name] <= max(first[name], settled[name]), (name, first, settled, last)
        assert last[name] <= first[name], (name, first, last)
    # The limit covers 45 engines with a megabyte of state and buffers each: allocators keep some memory, but a leak of
    # each engine's memory would exceed the limit.
    assert last["VmRSS"] - settled["VmRSS"] < 24 << 10, (first, settled, last)


def measure(folder):
    status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    maps = [os.readlink(link) for link in pathlib.Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return {
        "VmRSS": int(status["VmRSS"].split()[0]),
        "VmLck": int(status["VmLck"].split()[0]),
        "threads": lasting_threads(),
        "descriptors": len(maps),
        "locks": len(list(folder.rglob("lock"))),
        "files": len(files(folder)),
    }


def lasting_threads():
    """Number of threads, without that of a call with a time limit, which ends a moment after the call's result."""
    counts = []
    for _ in range(10):
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.01)
    return min(counts)


def published(folder, _):
    """The steps of engines, and of their tiers, are published."""
    from spillway._live import publisher, reader

    for place in ("cpu", "nvme"):
        engine = make(folder, place)
        step(engine, 2)
        publisher._publisher.publish(0.0)
        (record,) = reader.find(str(os.getpid()))
        told = {one.kind: one for one in record.optimizers}
        assert (told["DeepSpeed engine"].steps, told["DeepSpeed engine"].where) == (2, "ZeRO stage 3"), told
        tiers = [one for one in record.optimizers if one.paths]
        assert [(one.steps, one.paths[0].health) for one in tiers] == ([(2, "healthy")] if place == "nvme" else []), tiers
        del record, told, tiers
        engine.destroy()
        del engine
        gc.collect()


CASES = {case.__name__: case for case in (destroyed, dropped, failed, beside, resumable, dead, superoffload, checkpoint, fifty, published)}

if __name__ == "__main__":
    sys.exit(main())
