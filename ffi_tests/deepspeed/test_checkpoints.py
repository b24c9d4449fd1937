"""Proves what happens to checkpoints around a tier. They have the format of a run with states in host memory. A relative nvme_path stays
where it was when the program changes its directory. A checkpoint of DeepSpeed's own swapper goes on on a tier with the same bits.
Checkpoints in torch's old format load too."""

import pathlib

SCRIPT = """
import glob, logging, os, shutil, sys, zipfile
import train
train.become_single_rank()
import deepspeed, torch


def make(offload, block=None):
    torch.manual_seed(0)
    # DeepSpeed's own swapper keeps smaller tensors in memory.
    model = torch.nn.Linear(512, 512, bias=False)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "steps_per_print": 1 << 30,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": offload},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, **({"spillway": block} if block else {})})[0]


def step(engine):
    engine.backward(engine(torch.ones(1, 512).bfloat16()).float().sum())
    engine.step()


os.mkdir("cache")
engines = {"tier": make({"device": "nvme", "nvme_path": "./cache"}, {"pin_memory": False}), "host": make({"device": "cpu"}),
           "swapper": make({"device": "nvme", "nvme_path": os.path.abspath("cache"), "buffer_count": 5}, {"enabled": False})}
os.mkdir("elsewhere")
os.chdir("elsewhere")
for name, engine in engines.items():
    step(engine)
    engine.save_checkpoint(name, tag="t")
for name in ("tier", "host"):
    files = sorted(glob.glob(f"{name}/t/*.pt"))
    print(name, [zipfile.is_zipfile(file) for file in files])
    for file in files:
        torch.load(file, mmap=True, weights_only=False)
tier = engines["tier"]
for _ in range(2):
    step(engines["swapper"])
engines["swapper"].save_checkpoint("swapper", tag="later")
tier.load_checkpoint("swapper", tag="later")


def weights(engine):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [param.detach().clone() for param in engine.module.parameters()]


for _ in range(2):
    print("same", tier.global_steps, all(map(torch.equal, weights(tier), weights(engines["swapper"]))))
    step(tier)
    step(engines["swapper"])
before = tier.optimizer.optimizer_swapper.steps[:]
largest = max(glob.glob("swapper/later/offloaded_tensors/*/exp_avg-*"), key=os.path.getsize)
for change in (lambda: os.truncate(largest, 1000), lambda: shutil.rmtree("swapper/later/offloaded_tensors")):
    change()
    try:
        tier.load_checkpoint("swapper", tag="later")
    except ValueError as error:
        print("refused:", error)
try:
    tier.optimizer._load_universal_checkpoint("universal", True, False)
except ValueError as error:
    print("refused:", error)
assert tier.optimizer.optimizer_swapper.steps == before
step(tier)
print("goes on", tier.global_steps)
for name in ("tier", "host"):
    try:
        engines["swapper"].load_checkpoint(name, tag="t")
    except ValueError as error:
        print("refused:", error)
step(engines["swapper"])
print("swapper goes on", engines["swapper"].global_steps, all(map(torch.equal, weights(tier), weights(engines["swapper"]))))
os.mkdir("resumed")
logging.getLogger("spillway").addHandler(logging.StreamHandler(sys.stdout))
for _ in range(2):
    engine = make({"device": "nvme", "nvme_path": os.path.abspath("resumed")}, {"resume": True, "job": "again", "pin_memory": False})
    step(engine)
    engine.destroy()
"""


def test_checkpoints_around_a_tier(run_forked):
    out = run_forked(SCRIPT, pathlib.Path(__file__).parent)
    assert "tier [True, True]" in out and "host [True, True]" in out
    assert "same 3 True" in out and "same 4 True" in out
    assert "tensor.swp has 1000 bytes, and 1048576 are needed" in out
    assert "refused: the checkpoint was saved with DeepSpeed's own NVMe swapper, and its directory has no copies" in out
    assert "\ngoes on 4\n" in out
    assert out.count("/t has no swap files, which DeepSpeed's NVMe swapper loads") == 2 and "swapper goes on 6 True" in out
    assert out.count("the job 'again' goes on at step 1, with the states on ") == 1
    assert "refused: the universal checkpoint lacks universal/zero/optimizer_state.pt, and 3 more files that this model needs" in out


OLD_FORMAT = """
import glob, os, zipfile
import train
train.become_single_rank()
import deepspeed, torch


def make(offload, **block):
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 512, bias=False)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "steps_per_print": 1 << 30,
        "checkpoint": {"checkpoint_serialization": False},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": offload},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, **block})[0]


def tier(name, **more):
    os.mkdir(name)
    return make({"device": "nvme", "nvme_path": os.path.abspath(name)}, spillway={"pin_memory": False, **more})


def step(engine):
    engine.backward(engine(torch.ones(1, 512).bfloat16()).float().sum())
    engine.step()



saved = {"host": make({"device": "cpu"}), "tier": tier("one"), "snapshot": tier("two", snapshot_checkpoints=True)}
for name, engine in saved.items():
    step(engine)
    engine.save_checkpoint(name, tag="t")
    assert not any(map(zipfile.is_zipfile, glob.glob(f"{name}/t/*.pt"))), name
    step(engine)
for number, name in enumerate(saved):
    for into in (("snapshot", "new") if name == "snapshot" else ("tier", "host")):
        engine = saved[into] if into in saved else tier(f"new-{number}", snapshot_checkpoints=True)
        engine.load_checkpoint(name, tag="t")
        assert engine.global_steps == 1
        step(engine)
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            weights = [param.detach().clone() for param in engine.module.parameters()]
        wanted = weights if not (number or into == "new") and into == "tier" else wanted
        print(name, into, all(map(torch.equal, weights, wanted)))
"""


def test_checkpoints_in_torchs_old_format(run_forked):
    out = run_forked(OLD_FORMAT, pathlib.Path(__file__).parent)
    for pair in ("host tier", "host host", "tier tier", "tier host", "snapshot snapshot", "snapshot new"):
        assert f"{pair} True" in out, out
