"""OptimizerStateStore: the bits of a step in memory, whatever the buckets; commits that survive kill -9; directories that other processes
read."""

import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch
from hybrid import BF16, F16, F32, same
from interrupts import Ticking

import spillway
from spillway import _log
from spillway.megatron import OptimizerStateStore, Shard
from spillway.tiered import Tiered
from spillway.torch import AdamW

SIZES = {"a.weight": (1000, BF16), "a.bias": (17, F32), "b.weight": (4096, BF16), "b.bias": (33, F16), "c.weight": (777, BF16)}
OPTIONS = {"betas": (0.9, 0.95), "eps": 1e-8}


class Model:
    """Weights, gradients and groups, with the shards of them."""

    def __init__(self, names=tuple(SIZES)):
        self.weights, self.grads = {}, {}
        self.groups = [{"lr": 1e-2, "weight_decay": decay, **OPTIONS} for decay in (0.1, 0.0)]
        for at, (name, (size, dtype)) in enumerate(SIZES.items()):
            if name in names:
                self.weights[name] = torch.randn(size, generator=torch.Generator().manual_seed(at)).to(dtype)
        self.masters = {name: weight.float().clone() for name, weight in self.weights.items()}

    def shards(self):
        return [
            Shard(name, weight, self.groups[name.endswith("bias")], lambda name=name: self.grads.get(name), self.masters[name])
            for name, weight in self.weights.items()
        ]

    def backward(self, step, dtype=BF16):
        for at, (name, (size, _)) in enumerate(SIZES.items()):
            if name in self.weights:
                self.grads[name] = torch.randn(size, generator=torch.Generator().manual_seed(100 * step + at)).to(dtype)
        for group in self.groups:
            group["lr"] = 1e-2 / (1 + step)

    def copies(self):
        return [weight.clone() for weight in self.weights.values()]


def stored(model, *paths, job="run", **options):
    return OptimizerStateStore(model.shards(), paths or [None], job=job, tier_options={"durability": "process"}, **options)


def train(store, model, steps, dtype=BF16):
    for step in steps:
        model.backward(step, dtype)
        store.step()
    return model.copies()


def in_memory(steps, dtype=BF16, optimizer_class=AdamW, names=tuple(SIZES), **options):
    """The weights of spillway.torch over float32 masters in memory."""
    model = Model(names)
    params = {name: torch.nn.Parameter(master) for name, master in model.masters.items()}
    optimizer = optimizer_class(
        [
            {"params": [param for name, param in params.items() if name.endswith("bias") is bias], **group}
            for bias, group in zip((False, True), model.groups, strict=True)
        ],
        **options,
    )
    for step in steps:
        model.backward(step, dtype)
        for name, param in params.items():
            param.grad = model.grads[name].float()
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        optimizer.step()
    return [params[name].detach().to(weight.dtype) for name, weight in model.weights.items()]


@pytest.mark.parametrize("bucket_bytes", [1, 5000, 64 << 20])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_bits_are_those_of_a_step_in_memory(tmp_path, bucket_bytes, dtype):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    model = Model()
    with stored(model, tmp_path / "one", tmp_path / "two", bucket_bytes=bucket_bytes) as store:
        assert same(train(store, model, range(5), dtype), in_memory(range(5), dtype))
        assert store.steps == 5 and store.committed_step == 0


def check_restores(store, model, folder, expected):
    """Trains three steps and commits, and then ends with these weights, also from a snapshot of the commit."""
    train(store, model, range(3))
    store.commit()
    store.snapshot(folder / "snapshot").wait()
    assert same(train(store, model, range(3, 5)), expected)
    store.restore(folder / "snapshot")
    assert same(train(store, model, range(3, 5)), expected)


@pytest.mark.parametrize("bucket_bytes", [1, 64 << 20])
def test_bf16_moments_have_the_bits_of_bf16_moments_in_memory(tmp_path, bucket_bytes):
    names = tuple(name for name, (_, dtype) in SIZES.items() if dtype is not F16)
    expected = in_memory(range(5), names=names, moment_dtype=BF16)
    further = {"bucket_bytes": bucket_bytes, "swap_options": {"moment_dtype": "bf16", "speeds": [3]}}
    model = Model(names)
    with stored(model, tmp_path, **further) as store:
        check_restores(store, model, tmp_path, expected)
        store.save_to(tmp_path / "saved")
    model = Model(names)
    with stored(model, tmp_path, job="other", **further) as store:
        assert store.load_from(tmp_path / "saved") and same(model.copies(), expected)
    with pytest.raises(spillway.InvalidArgumentError, match="open it with bf16 moments"):
        stored(Model(names), tmp_path, bucket_bytes=bucket_bytes)


def test_8_bit_moments_resume_and_restore(tmp_path):
    further = {"bucket_bytes": 1, "swap_options": {"moment_dtype": "int8"}}
    whole = Model()
    with stored(whole, tmp_path, job="whole", **further) as store:
        expected = train(store, whole, range(5))
    model = Model()
    with stored(model, tmp_path, **further) as store:
        check_restores(store, model, tmp_path, expected)
    model = Model()
    with stored(model, tmp_path, **further) as store:
        assert store.resumed_step == 3 and same(train(store, model, range(3, 5)), expected)
    assert not same(expected, in_memory(range(5)))


@pytest.mark.parametrize("scale", [1e6, math.nan])
def test_8_bit_moments_of_a_shard_do_not_depend_on_the_shard_before(scale):
    found = []
    for factor in (1.0, scale):
        weights = [torch.ones(size, dtype=BF16) for size in (33, 40)]
        grads = [torch.full((33,), 1e-3 * factor), torch.full((40,), 1e-3)]
        group = {"lr": 1e-2, "weight_decay": 0.0, **OPTIONS}
        shards = [Shard(name, weight, group, lambda at=at: grads[at]) for at, (name, weight) in enumerate(zip("ab", weights))]
        with OptimizerStateStore(shards, [None], job="run", swap_options={"moment_dtype": "int8"}) as store:
            for _ in range(3):
                store.step()
        found.append(weights[1].clone())
    assert torch.equal(*found) and (found[0] < 1).all()


def test_what_a_store_cannot_pass_to_its_update():
    with pytest.raises(spillway.UnsupportedError, match="the shard 'b.bias' is float16"):
        stored(Model(), swap_options={"moment_dtype": "bf16"})
    with pytest.raises(spillway.InvalidArgumentError, match="swap_options has split_master"):
        stored(Model(), swap_options={"split_master": True})


def test_weight_decay_in_the_gradient():
    model = Model()
    with stored(model, decoupled=False) as store:
        assert same(train(store, model, range(3)), in_memory(range(3), optimizer_class=spillway.torch.Adam))


def test_gradients_are_scaled():
    one, other = Model(), Model()
    with stored(one) as store, stored(other, job="other") as scaled:
        one.backward(0)
        other.grads = {name: (grad.float() * 8).to(BF16) for name, grad in one.grads.items()}
        for group in other.groups:
            group["lr"] = one.groups[0]["lr"]
        store.step()
        scaled.step(grad_scale=1 / 8)
        assert same(one.copies(), other.copies())


def test_a_rollback_and_a_close_return_to_the_last_commit(tmp_path):
    model = Model()
    with stored(model, tmp_path) as store:
        committed = train(store, model, range(3))
        assert store.commit() == 3
        train(store, model, [3])
        store.rollback()
        assert same(model.copies(), committed) and store.steps == 3
        wanted = train(store, model, [3, 4])
    other = Model()
    with stored(other, tmp_path) as store:
        assert (store.resumed_step, store.committed_step, store.steps) == (3, 3, 3) and same(other.copies(), committed)
        assert same(train(store, other, [3, 4]), wanted)


def test_shards_may_come_in_any_order(tmp_path):
    model = Model()
    with stored(model, tmp_path) as store:
        wanted = dict(zip(model.weights, train(store, model, range(2)), strict=True))
        store.commit()
    other = Model()
    with OptimizerStateStore(other.shards()[::-1], [tmp_path], job="run") as store:
        assert store.resumed_step == 2 and all(torch.equal(other.weights[name], weight) for name, weight in wanted.items())


def test_other_shards_are_refused(tmp_path):
    with stored(Model(), tmp_path):
        pass
    renamed = Model()
    shards = [shard._replace(name=f"x{shard.name}") for shard in renamed.shards()]
    with pytest.raises(spillway.InvalidArgumentError, match="the states of other shards"):
        OptimizerStateStore(shards, [tmp_path], job="run")
    with pytest.raises(spillway.SpillwayError):
        stored(Model(["a.weight"]), tmp_path)
    with stored(Model(), tmp_path) as store:
        assert store.resumed_step == 0, "the refusals let go of the tier"


KILLED = """
import sys, os
sys.path[:0] = {paths!r}
from test_store import Model, stored
model = Model()
store = stored(model, {folder!r})
print(store.resumed_step, flush=True)
for step in range(store.steps, 10**9):
    model.backward(step)
    store.step()
    print("stepped", store.steps, flush=True)
    if step % 2:
        store.commit()
        print("committed", store.steps, flush=True)
"""


def test_a_run_that_is_killed_resumes_at_its_last_commit_with_the_same_bits(tmp_path):
    resumed, reached = None, 0
    for round in range(6):
        code = KILLED.format(paths=[str(pathlib.Path(__file__).parent), *sys.path], folder=str(tmp_path))
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
            lines = [child.stdout.readline()]
            while len(lines) < 5 + 3 * round:
                lines.append(child.stdout.readline())
            os.kill(child.pid, signal.SIGKILL)
            lines += child.stdout.readlines()
        resumed = lines[0].strip()
        assert resumed == ("None" if round == 0 else str(reached)), lines
        said = [int(line.split()[1]) for line in lines[1:] if line.startswith("committed") and line.endswith("\n")]
        model = Model()
        with stored(model, tmp_path) as store:
            reached = store.steps
            # A commit may be complete before it is said.
            assert reached in (said[-1], said[-1] + 2), (reached, lines)
            assert same(model.copies(), in_memory(range(reached)))


@pytest.fixture
def as_ranks(monkeypatch):
    """Stores of one process that say that they are ranks of a job, of which each agrees with itself. test_ranks.py has processes."""
    from spillway import _ranks

    monkeypatch.setattr(_ranks, "gathered", lambda value, world, group=None: [value] * world)


def test_a_directory_is_read_by_other_processes(tmp_path, as_ranks):
    """Two processes write their parts; one process with all shards reads them, and three with other parts."""
    parts, names = [], list(SIZES)
    for rank, own in enumerate((names[:2], names[2:])):
        model = Model(own)
        with stored(model, job=f"run{rank}", rank=rank, world=2) as store:
            train(store, model, range(3))
            assert store.save_to(tmp_path / "saved") == 3
        parts.append(own)
    whole = Model()
    with stored(whole) as store:
        assert store.load_from(tmp_path / "saved") is True and (store.steps, store.committed_step) == (3, 3)
        assert same(whole.copies(), in_memory(range(3)))
        assert same(train(store, whole, [3, 4]), in_memory(range(5)))
    wanted = dict(zip(SIZES, in_memory(range(5)), strict=True))
    for rank, own in enumerate((names[::2], names[1::4], names[3::4])):
        model = Model(own)
        with stored(model, job=f"other{rank}", bucket_bytes=1000) as store:
            store.load_from(tmp_path / "saved")
            train(store, model, [3, 4])
            assert all(torch.equal(weight, wanted[name]) for name, weight in model.weights.items())


class Cut(Model):
    """A model of which a process has some elements of each parameter, as shards of Megatron's DistributedOptimizer."""

    def __init__(self, rank, world):
        super().__init__()
        self.cuts = {}
        for name, (size, _) in SIZES.items():
            begin, end = size * rank // world, size * (rank + 1) // world
            if end > begin:
                self.cuts[f"tp0.{name}[{begin}:{end}]"] = (name, begin, end)

    def shards(self):
        def shard(name, parameter, begin, end):
            weight, master = self.weights[parameter][begin:end], self.masters[parameter][begin:end]
            return Shard(name, weight, self.groups[parameter.endswith("bias")], lambda: self.grads[parameter][begin:end], master)

        return [shard(name, *cut) for name, cut in self.cuts.items()]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (1, 40)])
def test_ranges_of_parameters_are_cut_anew_for_another_number_of_processes(tmp_path, as_ranks, before, after):
    saved, expected, found = tmp_path / "saved", Model(), Model()
    for rank in range(before + 1):
        # The last one is of an earlier save by more processes, whose parts are still there.
        steps = 3 if rank < before else 2
        model = Cut(rank, before) if rank < before else Cut(rank, before + 1)
        with stored(model, job=f"old{rank}", rank=rank, world=before + 1) as store:
            train(store, model, range(steps))
            store.save_to(saved)
        for _, (name, begin, end) in model.cuts.items() if rank < before else ():
            expected.weights[name][begin:end] = model.weights[name][begin:end]
    for rank in range(after):
        model = Cut(rank, after)
        with stored(model, job=f"new{rank}", rank=rank, world=after) as store:
            assert store.load_from(saved) and store.steps == 3
            for name, begin, end in model.cuts.values():
                assert torch.equal(model.weights[name][begin:end], expected.weights[name][begin:end])
            # Moments and masters show in the next step.
            train(store, model, [3])
        for name, begin, end in model.cuts.values():
            found.weights[name][begin:end] = model.weights[name][begin:end]
    assert same(list(found.weights.values()), in_memory(range(4)))


def test_ranges_with_a_gap_are_no_state(tmp_path, as_ranks):
    with stored(Cut(0, 3), job="one", world=3) as store:
        store.save_to(tmp_path / "saved")
    with stored(Cut(0, 2), job="two", world=2) as store:
        with pytest.raises(spillway.NoStateError, match=r"no state of shard .*tp0.a.bias\[0:8\]"):
            store.load_from(tmp_path / "saved")


def test_a_saved_part_replaces_the_one_before_and_other_tools_read_it(tmp_path):
    model = Model()
    with stored(model) as store:
        for step in range(3):
            train(store, model, [step])
            store.save_to(tmp_path / "saved")
    assert sorted(os.listdir(tmp_path / "saved")) == ["rank-00000-step-3.safetensors", "rank-00000.json"]
    safetensors = pytest.importorskip("safetensors.torch")
    found = safetensors.load_file(tmp_path / "saved" / "rank-00000-step-3.safetensors")
    assert len(found) == 3 * len(SIZES)
    assert all(torch.equal(found[f"{name}.param"].to(weight.dtype), weight) for name, weight in model.weights.items())


NAMES = ['with "quotes"', "with\nlines", "\u00e9\U0001f600", "__metadata__", "a.param", "a", "\x00", "x" * 10_000, "../../x", "{}"]


def test_shards_of_any_name_are_read_by_other_tools_and_by_the_store(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    weights = {name: torch.full((8,), float(at)) for at, name in enumerate(NAMES)}
    group = {"lr": 1e-2, "weight_decay": 0.0, **OPTIONS}
    with OptimizerStateStore(
        [Shard(name, weight, group, lambda: None) for name, weight in weights.items()],
        [None],
        job="names",
        tier_options={"durability": "process"},
    ) as store:
        store.save_to(tmp_path / "saved")
        assert store.load_from(tmp_path / "saved")
    found = safetensors.load_file(tmp_path / "saved" / "rank-00000-step-0.safetensors")
    assert found.keys() == {f"{name}.{state}" for name in NAMES for state in ("param", "exp_avg", "exp_avg_sq")}
    assert all(torch.equal(found[f"{name}.param"], weight) for name, weight in weights.items())


@pytest.mark.parametrize(
    "plant", ["rank-00000-step-2.safetensors", "rank-00000-step-2.safetensors.part", "rank-00000.json", "rank-00000.json.part"]
)
def test_a_save_over_a_directory_names_it_and_writes_nothing(tmp_path, plant):
    model = Model()
    with stored(model) as store:
        train(store, model, range(2))
        (tmp_path / plant).mkdir()
        with pytest.raises(IsADirectoryError, match=f"a directory has the name of a file to be written; remove it, or .*{plant}'$"):
            store.save_to(tmp_path)
        assert os.listdir(tmp_path) == [plant]
        (tmp_path / plant).rmdir()
        store.save_to(tmp_path)
        assert store.load_from(tmp_path)


@pytest.mark.parametrize("make", [lambda path: path.write_text("x"), os.mkfifo], ids=["a file", "a FIFO"])
def test_a_path_that_is_no_directory_is_named_as_that(tmp_path, make):
    model, path = Model(), tmp_path / "taken"
    make(path)
    with stored(model) as store:
        before = train(store, model, range(2))
        with pytest.raises(NotADirectoryError, match="it is not a directory; pass another name: .*taken"):
            store.save_to(path)
        for missing in (False, True):
            with pytest.raises(spillway.InvalidArgumentError, match="taken is not a directory; pass one that save_to"):
                store.load_from(path, allow_missing=missing)
        assert same(model.copies(), before) and store.steps == 2


def test_directories_that_cannot_be_loaded_change_nothing(tmp_path):
    model = Model()
    with stored(model) as store:
        before = train(store, model, range(2))
        store.save_to(tmp_path / "saved")
        with pytest.raises(spillway.NoStateError, match="no optimizer states"):
            store.load_from(tmp_path / "nothing")
        assert store.load_from(tmp_path / "nothing", allow_missing=True) is False
        whole = tmp_path / "saved" / "rank-00000-step-2.safetensors"
        content = whole.read_bytes()
        for damaged, reason in [
            (content[:-1], "and its tensors end at byte"),
            (content[:-7] + bytes([content[-7] ^ 1]) + content[-6:], "does not match its checksum"),
        ]:
            whole.write_bytes(damaged)
            with pytest.raises(spillway.CorruptError, match=reason):
                store.load_from(tmp_path / "saved")
            assert same(model.copies(), before) and store.steps == 2
        whole.unlink()
        with pytest.raises(spillway.CorruptError, match="rank-00000-step-2.safetensors is missing"):
            store.load_from(tmp_path / "saved")
        manifest = tmp_path / "saved" / "rank-00000.json"
        for text in ('{"format": 1, "step": 2}', manifest.read_text().replace('"step": 2', '"step": 3')):
            manifest.write_text(text)
            with pytest.raises(spillway.CorruptError, match="rank-00000.json is damaged"):
                store.load_from(tmp_path / "saved")
            assert same(model.copies(), before) and store.steps == 2
        (tmp_path / "saved" / "rank-00000.json").write_text('{"format": 2}')
        with pytest.raises(spillway.InvalidArgumentError, match="format 2"):
            store.load_from(tmp_path / "saved")
        assert same(train(store, model, [2]), in_memory(range(3)))


def test_parts_of_different_steps_and_missing_shards_are_named(tmp_path, as_ranks):
    names = list(SIZES)
    for rank, (own, steps) in enumerate([(names[:2], 2), (names[2:4], 3)]):
        model = Model(own)
        with stored(model, job=f"run{rank}", rank=rank, world=2) as store:
            train(store, model, range(steps))
            store.save_to(tmp_path / "saved")
    with stored(Model(names[:4])) as store, pytest.raises(spillway.InvalidArgumentError, match=r"shards of the steps \[2, 3\]"):
        store.load_from(tmp_path / "saved")
    with stored(Model()) as store, pytest.raises(spillway.NoStateError, match="no state of shard 'c.weight'"):
        store.load_from(tmp_path / "saved")


def test_refresh_sets_the_masters_and_keeps_the_moments():
    model, other = Model(), Model()
    with stored(model) as store, stored(other, job="other") as second:
        train(store, model, range(2))
        train(second, other, range(2))
        with torch.no_grad():
            for weight in model.weights.values():
                weight.mul_(2)
        store.refresh()
        second.refresh({name: weight.float() for name, weight in model.weights.items()})
        assert same(train(store, model, [2]), train(second, other, [2])) and not same(model.copies(), in_memory(range(3)))
        with pytest.raises(spillway.InvalidArgumentError, match="no shard 'x'"):
            store.refresh({"x": torch.zeros(1)})


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda shards: shards[:0], "there are no shards"),
        (lambda shards: shards + shards[:1], "two shards have the name 'a.weight'"),
        (lambda shards: [shards[0]._replace(name="")], "a shard's name is ''"),
        (lambda shards: [shards[0]._replace(name=3)], "a shard's name is 3"),
        (lambda shards: [shards[0]._replace(name="\ud800")], "of valid Unicode"),
        (lambda shards: [shards[0]._replace(weight=torch.zeros(4, dtype=torch.float64))], "torch.float64 of shape"),
        (lambda shards: [shards[0]._replace(weight=torch.zeros(4, 5).t(), master=None)], "pass a contiguous tensor"),
        (lambda shards: [shards[0]._replace(weight=torch.zeros(0))], "with elements"),
        (lambda shards: [shards[0]._replace(master=torch.zeros(3))], "float32 of 1000"),
    ],
)
def test_bad_shards(tmp_path, change, reason):
    with pytest.raises(spillway.InvalidArgumentError, match=reason):
        OptimizerStateStore(change(Model().shards()), [tmp_path], job="run")
    assert os.listdir(tmp_path) == [], "nothing was opened"


def test_a_missing_gradient_is_named_before_anything_is_stepped():
    model = Model()
    with stored(model) as store:
        before = train(store, model, [0])
        for wrong, reason in [(None, "no gradient"), (torch.zeros(3), "a gradient of 3 elements for 33")]:
            model.backward(1)
            model.grads["b.bias"] = wrong
            with pytest.raises(spillway.InvalidArgumentError, match=rf"shard 'b.bias' has {reason}"):
                store.step()
            assert same(model.copies(), before) and store.steps == 1
        assert same(train(store, model, [1]), in_memory(range(2)))


def test_a_group_without_hyper_parameters_is_named():
    model = Model()
    with stored(model) as store:
        for name, wrong in [("lr", "fast"), ("betas", None), ("eps", None), ("lr", 10**400), ("eps", torch.ones(2))]:
            model.backward(0)
            right, model.groups[1][name] = model.groups[1][name], wrong
            with pytest.raises(spillway.InvalidArgumentError, match="group of shard 'a.bias'"):
                store.step()
            model.groups[1][name] = right
        del model.groups[1]["weight_decay"]
        with pytest.raises(spillway.InvalidArgumentError, match="'weight_decay'"):
            store.step()
        model.groups[1]["weight_decay"] = 0.0
        assert same(train(store, model, range(2)), in_memory(range(2)))


def test_the_first_step_of_a_store_logs_a_line(monkeypatch):
    model, lines = Model(), []
    monkeypatch.setattr(_log, "_said", set())
    spillway.set_log(lambda level, message: lines.append(message), "info")
    try:
        with stored(model) as store:
            train(store, model, range(2))
    finally:
        spillway.set_log(None)
    assert [line for line in lines if " served by " in line] == [
        f"megatron: OptimizerStateStore served by libspillway {spillway.library_version()}, kernel {spillway.kernel_name()}"
    ]


def test_a_closed_store_a_copy_and_a_second_process(tmp_path):
    import copy

    model = Model()
    store = stored(model, tmp_path)
    with pytest.raises(spillway.TierLockedError):
        stored(Model(), tmp_path)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(store)
    child = os.fork()
    if not child:
        model.backward(0)
        try:
            store.step()
        except spillway.UnsupportedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert same(train(store, model, range(2)), in_memory(range(2)))
    store.close()
    store.close()
    with pytest.raises(spillway.InvalidArgumentError, match="this OptimizerStateStore is closed"):
        train(store, model, [2])


def test_an_interrupt_leaves_a_store_that_counts_its_steps(tmp_path):
    """Signals whose handler raises, at random moments of a step: afterwards the store steps on, or returns to its last commit."""

    def steps(model, store):
        for step in range(1000):
            model.backward(step)
            store.step()
            time.sleep(0)

    with Ticking() as ticking:
        for tenth_ms in range(1, 40, 3):
            model = Model()
            with stored(model, job=f"run{tenth_ms}") as store:
                store.commit()
                ticking.during(lambda: steps(model, store), after=tenth_ms / 10_000)  # noqa: B023
                # torch.no_grad does not restore the mode if the handler raises in its own exit.
                torch.set_grad_enabled(True)
                done = store.steps
                try:
                    values = train(store, model, range(done, done + 2))
                except spillway.SpillwayError:
                    store.rollback()
                    values, done = train(store, model, range(2)), 0
                assert same(values, in_memory(range(done + 2)))
        assert ticking.count > 5


def test_shards_whose_weights_overlap_are_refused():
    whole = torch.zeros(30)
    group = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}

    def store(*ranges):
        return OptimizerStateStore(
            [Shard(f"w[{start}:{end}]", whole[start:end], group, lambda n=end - start: torch.ones(n)) for start, end in ranges],
            [None],
            job="run",
        )

    for ranges in ([(0, 15), (14, 30)], [(0, 30), (10, 20)], [(5, 9), (4, 8)], [(20, 25), (0, 22)]):
        first, second = sorted(ranges)
        with pytest.raises(
            spillway.InvalidArgumentError, match=rf"'w\[{first[0]}:{first[1]}\]' and 'w\[{second[0]}:{second[1]}\]' overlap"
        ):
            store(*ranges)
    with store((15, 30), (0, 15)) as whole_store:
        whole_store.step()
    assert (whole != 0).all()


@pytest.mark.parametrize("part", ["weight", "master"])
def test_a_shard_without_memory_is_refused(part):
    freed = torch.zeros(30)
    freed.untyped_storage().resize_(0)
    tensors = {"weight": torch.zeros(30), "master": torch.zeros(30)}
    for tensor in (freed, torch.zeros(30, device="meta")):
        shard = Shard("w", group={}, grad=lambda: None, **{**tensors, part: tensor})
        with pytest.raises(spillway.InvalidArgumentError, match=f"the {part} of shard 'w' has no memory"):
            OptimizerStateStore([shard], [None], job="run")


def test_a_save_commits_the_step(tmp_path):
    model = Model()
    with stored(model) as store:
        saved = train(store, model, range(3))
        assert store.committed_step == 0 and store.save_to(tmp_path / "saved") == 3 and store.committed_step == 3
        train(store, model, [3])
        store.rollback()
        assert same(model.copies(), saved) and store.steps == 3


def test_ctrl_c_that_arrives_while_the_library_commits(tmp_path, monkeypatch):
    """Python raises the KeyboardInterrupt once the call has returned; the library has committed then."""

    def interrupted(status):
        assert status == 0
        raise KeyboardInterrupt

    model = Model()
    with stored(model, tmp_path) as store:
        committed = train(store, model, range(2))
        monkeypatch.setattr(spillway._native, "check", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.commit()
        monkeypatch.undo()
        train(store, model, [2])
        store.rollback()
        assert same(model.copies(), committed) and (store.steps, store.committed_step) == (2, 2)


def test_a_store_whose_construction_fails_at_the_weights_lets_go_of_the_tier(tmp_path, monkeypatch):
    from spillway.megatron import _shards

    with stored(Model(), tmp_path):
        pass

    def failed(*_):
        raise RuntimeError("the GPU is lost")

    with monkeypatch.context() as patched:
        patched.setattr(_shards.Bucket, "publish", failed)
        with pytest.raises(RuntimeError, match="the GPU is lost") as raised:
            stored(Model(), tmp_path)
    with stored(Model(), tmp_path) as store:
        assert store.resumed_step == 0 and raised.value


def test_a_snapshot_is_written_beside_steps_and_restored_with_its_bits(tmp_path):
    model = Model()
    (tmp_path / "snapshots").mkdir()
    with stored(model) as store:
        train(store, model, range(2))
        store.commit()
        with store.snapshot(tmp_path / "snapshots" / "two", bytes_per_second=1_000_000, keep=1) as snapshot:
            after = train(store, model, range(2, 4))
            assert snapshot.wait() == 2
        assert store.restore(tmp_path / "snapshots" / "two") == store.steps == store.committed_step == 2
        assert same(train(store, model, range(2, 4)), after)
        before = model.copies()
        with pytest.raises(spillway.NoStateError, match="no finished snapshot"):
            store.restore(tmp_path)
        store.commit()
        with store.snapshot(tmp_path / "snapshots" / "four", keep=1) as snapshot:
            snapshot.wait()
        assert [found.name for found in (tmp_path / "snapshots").iterdir()] == ["four"] and same(model.copies(), before)
    with stored(other := Model()) as store:
        assert store.restore(tmp_path / "snapshots" / "four") == 4 and same(other.copies(), before)
    with stored(Model(["a.weight"])) as store, pytest.raises(spillway.InvalidArgumentError, match="states of other shards"):
        store.restore(tmp_path / "snapshots" / "four")


@pytest.mark.parametrize("call", ["rollback", "restore", "refresh"])
def test_what_an_interrupt_leaves_of_two_steps_is_never_committed(tmp_path, monkeypatch, call):
    model = Model()
    with stored(model, tmp_path, bucket_bytes=1) as store:
        train(store, model, range(2))
        store.commit()
        committed = model.copies()
        store.snapshot(tmp_path / "snapshot").wait()
        train(store, model, range(2, 3))
        name = "write" if call == "refresh" else "read"
        calls, plain = [], getattr(Tiered, name)

        def interrupted(*arguments, **keywords):
            calls.append(name)
            if len(calls) in (2, 3):
                raise KeyboardInterrupt
            plain(*arguments, **keywords)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Tiered, name, interrupted)
            store.restore(tmp_path / "snapshot") if call == "restore" else getattr(store, call)()
        for use in (store.step, store.commit, lambda: store.save_to(tmp_path / "saved")):
            with pytest.raises(spillway.OutOfOrderError, match="was interrupted"):
                use()
        store.rollback()
        assert same(model.copies(), committed)
        assert same(train(store, model, range(2, 5)), in_memory(range(5)))
