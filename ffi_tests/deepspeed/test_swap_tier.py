"""Proves that ZeRO-3 with its optimizer states on a tier equals the run with states in host memory: losses, master
weights and 16-bit weights are the same, bit for bit. Checkpoints of either load in the other and lose nothing. A run
that is killed at any moment resumes at its last commit, with the bits of an uninterrupted run."""

import functools
import json
import os
import pathlib
import random
import shutil
import signal
import types

import pytest
from tiered_runs import attempt, finished

from spillway.errors import TierError
from spillway.tier import Steps, Tier, steps

HERE = pathlib.Path(__file__).parent


@pytest.fixture
def train(starter, tmp_path):
    return lambda *arguments, **how: finished(starter, tmp_path, *arguments, **how)


@pytest.fixture(scope="session")
def in_host(starter, tmp_path_factory):
    """The run with states in host memory, once for each set of arguments."""
    folder = tmp_path_factory.mktemp("host")
    return functools.cache(lambda *arguments: finished(starter, folder, *arguments))


@pytest.fixture
def refused(starter, tmp_path):
    def run(*arguments, **how):
        status, output, _ = attempt(starter, tmp_path, *arguments, **how)
        assert status == 1, output
        return output

    return run


@pytest.fixture
def paths(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return [tmp_path / "a", tmp_path / "b"]


SPLIT = '{"split_master": true}'


def same(one, other):
    return all(one[name] == other[name] for name in ("losses", "sha256", "published", "skipped", "steps"))


RUNS = {
    "bf16": [],
    "unclipped": ["--clip", "0"],
    "three groups": ["--groups", "--accumulate", "2"],
    # Unclipped: after two overflows in a row no sub-group is submitted early until a step is not clipped.
    "fp16": ["--dtype", "fp16", "--steps", "12", "--clip", "0"],
}

# Runs in which a sub-group consists of several parts that share the step number of DeepSpeed's call, and runs whose
# master weights are split.
PARTED = ("unclipped", "three groups", "split")
RUNS["split"] = RUNS["three groups"]


def needs_fp16():
    """DeepSpeed refuses fp16 on a processor that lacks fp16 instructions."""
    torch = pytest.importorskip("torch")
    if not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("DeepSpeed has no fp16 on this processor")


@pytest.mark.parametrize("name", RUNS)
def test_the_bits_are_those_of_states_in_host_memory(train, in_host, paths, name):
    if name == "fp16":
        needs_fp16()
    parted = {**({"part_elements": 5000} if name in PARTED else {}), "split_master": name == "split"}
    on_tier = train("--paths", *paths, "--block", json.dumps({"ratio": [2, 1], **parted}), *RUNS[name])
    assert same(on_tier, in_host(*RUNS[name]))
    (tier,) = on_tier["active"]["tier"]
    assert tier["subgroups"] > 5 and tier["cached"] == 0 and tier["commits"] == 0
    a, b = (path["blocks"] for path in tier["paths"])
    assert a > b > 0 and on_tier["active"]["async_io"]["written_bytes"] == 0
    # Each step transfers 12 or 10 bytes per parameter to and from the tier, and no gradients. The initial
    # state is written once.
    steps = on_tier["steps"] - on_tier["skipped"]
    assert tier["flushed"] == steps * tier["parts"] and tier["fetched"] == tier["flushed"]
    assert (tier["parts"] > 2 * tier["subgroups"]) == (name in PARTED)
    assert (on_tier["skipped"] > 0) == (name == "fp16")
    assert not any(path.is_file() for folder in paths for path in folder.rglob("*")), "scratch is removed at the end"


@pytest.mark.parametrize("name", RUNS)
def test_a_step_during_backward_has_these_bits_too(train, in_host, paths, name):
    if name == "fp16":
        needs_fp16()
    parted = {**({"part_elements": 5000} if name in PARTED else {}), "split_master": name == "split"}
    # Gradients become complete one sub-group after the other; by DeepSpeed's default all do so at the end of backward.
    early = [] if name == "three groups" else ["--reduce_bucket", "12000"]
    block = json.dumps({"overlap": True, "host_memory": 950000 if name in PARTED else 1830000, **parted})
    on_tier = train("--paths", *paths, "--block", block, *early, *RUNS[name])
    assert same(on_tier, in_host(*RUNS[name]))
    (tier,) = on_tier["active"]["tier"]
    assert tier["submitted_early"] > 0 and tier["hits"] > 0
    assert not any(path.is_file() for folder in paths for path in folder.rglob("*")), "scratch is removed at the end"


@pytest.mark.parametrize("name", ["bf16", "unclipped", "three groups"])
@pytest.mark.parametrize("overlap", [False, True])
def test_weights_on_a_device_get_two_bytes_each_and_backward_waits_for_no_copy(train, in_host, paths, name, overlap):
    parted = {"part_elements": 5000, "host_memory": 950000} if name in PARTED else {"host_memory": 1830000}
    block = json.dumps({"overlap": overlap, **parted})
    early = [] if name == "three groups" else ["--reduce_bucket", "12000"]
    on_tier = train("--paths", *paths, "--device", "--block", block, *early, *RUNS[name])
    assert same(on_tier, in_host(*RUNS[name]))
    (tier,) = on_tier["active"]["tier"]
    assert (tier["submitted_early"] > 0) == overlap
    assert on_tier["waits"] == {"backward": 0, "step": 1} and on_tier["copied"] == ["torch.bfloat16"]


@pytest.mark.parametrize(
    "more",
    [{"part_elements": 5000}, {"overlap": True, "host_memory": 1000000, "speeds": [3, 1]}, {"split_master": True, "overlap": True}],
    ids=["at once", "overlap", "split"],
)
def test_bf16_moments_are_those_of_host_memory_rounded_after_each_step(train, in_host, paths, more):
    arguments = [*RUNS["three groups"], "--round-moments"]
    on_tier = train("--paths", *paths, "--block", json.dumps({"moment_dtype": "bf16", **more}), *arguments)
    assert same(on_tier, in_host(*arguments)) and not same(on_tier, in_host(*RUNS["three groups"]))


@pytest.mark.parametrize(
    "more",
    [{"part_elements": 5000}, {"overlap": True, "host_memory": 1000000, "speeds": [3, 1]}, {"split_master": True, "overlap": True}],
    ids=["at once", "overlap", "split"],
)
def test_8_bit_moments_have_the_same_bits_however_they_are_stepped(train, in_host, paths, more):
    arguments, block = RUNS["three groups"], {"moment_dtype": "int8"}
    reference = train("--paths", *paths, "--block", json.dumps({**block, "part_elements": more.get("part_elements", 2 << 20)}), *arguments)
    assert same(train("--paths", *paths, "--block", json.dumps({**block, **more}), *arguments), reference)
    wide = in_host(*arguments)
    assert not same(reference, wide)
    assert all(abs(ours - theirs) < 0.05 for ours, theirs in zip(reference["losses"], wide["losses"], strict=True))


@pytest.mark.parametrize("moment_dtype", ["bf16", "int8"])
def test_states_with_narrow_moments_resume_and_load(train, refused, in_host, paths, tmp_path, moment_dtype):
    arguments = ["--seed-each-step", *(["--round-moments"] if moment_dtype == "bf16" else [])]
    block = {"moment_dtype": moment_dtype, "resume": True}
    one = json.dumps({"moment_dtype": moment_dtype})
    whole = in_host(*arguments) if moment_dtype == "bf16" else train("--paths", *paths, "--block", one, *arguments)
    train("--paths", *paths, "--block", json.dumps(block), *arguments, "--steps", 5)
    resumed = train("--paths", *paths, "--block", json.dumps({**block, "overlap": True}), *arguments)
    assert resumed["began_at"] == 5 and resumed["sha256"] == whole["sha256"]
    other = f'moment_dtype "{moment_dtype}", and this run has "f32"'
    assert other in refused("--paths", *paths, "--block", json.dumps({"resume": True}), *arguments)
    snapshots = {"moment_dtype": moment_dtype, "snapshot_checkpoints": True}
    save = [*arguments, "--save_at", 4, "--save", tmp_path / "saved"]
    train("--paths", *paths, "--block", json.dumps(snapshots), *save)
    load = [*arguments, "--load", tmp_path / "saved"]
    loaded = train("--paths", *paths, "--block", json.dumps(snapshots), *load)
    assert loaded["began_at"] == 4 and loaded["sha256"] == whole["sha256"]
    assert other in refused("--paths", *paths, "--block", '{"snapshot_checkpoints": true}', *load)


def test_an_ordinary_configuration_keeps_its_states_on_nvme_path(train, in_host, paths):
    host = in_host()
    for pipeline in ([], ["--pipeline"]):
        found = train("--paths", paths[0], "--block", "none", *pipeline)
        assert same(found, host) and len(found["active"]["tier"][0]["paths"]) == 1
    own = train("--paths", paths[0], "--block", '{"enabled": false}')
    assert same(own, host) and "tier" not in own["active"]


def test_a_checkpoint_of_deepspeeds_own_swapper_resumes_with_all_states(train, paths, tmp_path):
    """DeepSpeed alone loses Adam's moments and step numbers there."""
    own = ["--seed-each-step", "--block", '{"enabled": false}', "--dim", "512", "--layers", "1", "--sub_group", 1 << 20]
    whole = train("--paths", paths[0], *own, "--save_at", 4, "--save", tmp_path / "saved")
    resumed = train("--paths", paths[1], *own, "--load", tmp_path / "saved")
    assert resumed["began_at"] == 4 and resumed["losses"] == whole["losses"][4:]
    assert (resumed["sha256"], resumed["published"]) == (whole["sha256"], whole["published"])


def test_a_cache_saves_what_it_holds(train, in_host, paths):
    cached = train("--paths", *paths, "--block", '{"host_memory": 2400000}')
    assert same(cached, in_host())
    (tier,) = cached["active"]["tier"]
    assert 0 < tier["cached"] < tier["subgroups"] and tier["hits"] == (tier["rounds"] - 1) * tier["cached"]


def test_parameters_on_a_tier_as_well(train, paths, tmp_path):
    (tmp_path / "parameters").mkdir()
    large = ["--params", tmp_path / "parameters", "--dim", "512", "--layers", "1", "--steps", "4", "--sub_group", 1 << 20]
    on_tier, found = train("--paths", *paths, "--block", '{"part_elements": 100000}', *large), train(*large)
    assert same(on_tier, found) and on_tier["active"]["async_io"]["written_bytes"] == 0
    # With the block the files are on its paths, otherwise at the place that the configuration names.
    for report, count in ((on_tier, 2), (found, 1)):
        (tier,) = report["active"]["parameter_tier"]
        assert len(tier["paths"]) == count and sum(path["written_bytes"] for path in tier["paths"]) > 10 << 20
    own = train("--paths", *paths, "--block", '{"enabled": false}', *large)
    assert same(own, found) and own["active"]["async_io"]["written_bytes"] > 10 << 20
    assert not any(path.is_file() for folder in paths for path in folder.rglob("*parameters*"))


@pytest.fixture
def both(overlay):
    """How two ranks are started."""
    # If a compiler is installed, DeepSpeed builds its collectives for several ranks.
    return {"ranks": 2, "PATH": os.path.dirname(overlay)}


def test_two_ranks_that_end_and_go_on(train, paths, both):
    host, resume = train(**both), ("--paths", *paths, "--block", '{"resume": true}')
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert train(*resume, "--steps", "5", launcher=launcher, **both)["losses"] == host["losses"][:5]
    last = train(*resume, **both)
    assert last["began_at"] == 5 and last["losses"] == host["losses"][5:]
    assert (last["sha256"], last["published"]) == (host["sha256"], host["published"])


def killed_between_commits(starter, folder, both, rank, step, *arguments):
    """A run of two ranks of which one committed a step and the other died before its commit."""
    marker = folder / "committed"
    marker.unlink(missing_ok=True)
    status, output, _ = attempt(starter, folder, *arguments, "--die", rank, step, marker, **both)
    assert status == -signal.SIGKILL and marker.exists(), output


# (rank, step) of two deaths before a commit: in the first step and in a later one, or in some step and in the first one
# after the resume.
KILLED = {
    "cached": (((1, 1), (0, 4)), 1800000, False, ()),
    "unclipped": (((0, 3), (1, 3)), None, True, ("--clip", "0", "--accumulate", "2")),
}


@pytest.mark.parametrize("name", KILLED)
def test_ranks_killed_between_their_commits_go_on_at_the_step_of_both(starter, train, paths, tmp_path, both, name):
    kills, memory, split, more = KILLED[name]
    further = {"split_master": split, "overlap": split}
    block = json.dumps({"resume": True, "host_memory": memory, "part_elements": 20000, **further})
    tiered = ("--paths", *paths, "--block", block, "--steps", "8", *more)
    whole = train("--steps", "8", *more, **both)
    for rank, step in kills:
        killed_between_commits(starter, tmp_path, both, rank, step, *tiered)
    last = train(*tiered, **both)
    assert last["began_at"] == kills[-1][1] - 1 and last["losses"] == whole["losses"][last["began_at"] :]
    assert (last["sha256"], last["published"]) == (whole["sha256"], whole["published"])


def test_ranks_killed_beside_their_commits_go_on_at_a_step_of_both(starter, train, paths, tmp_path, both):
    """Both are killed after some step, and the commit of each may have ended or not."""
    block = json.dumps({"resume": True, "background_commits": True, "part_elements": 20000, "overlap": True})
    tiered, chance = ("--paths", *paths, "--block", block, "--steps", "10", "--progress"), random.Random(3)
    whole = train("--steps", "10", **both)
    for step in (2, 5, 7):
        status, output, _ = attempt(starter, tmp_path, *tiered, kill_after=step, delay=0.3 * chance.random(), **both)
        assert status == -9, output
    last = train(*tiered, **both)
    assert last["began_at"] >= 6 and last["losses"] == whole["losses"][last["began_at"] :]
    assert (last["sha256"], last["published"]) == (whole["sha256"], whole["published"])


def test_ranks_without_a_common_step_are_refused_and_keep_what_they_have(starter, train, paths, tmp_path, both):
    tiered = ("--paths", *paths, "--block", '{"resume": true}', "--steps", "5")
    killed_between_commits(starter, tmp_path, both, 1, 3, *tiered)
    apart = [(folder, tmp_path / f"apart-{folder.parents[2].name}") for path in paths for folder in path.rglob("rank-1")]
    for folder, away in apart:
        folder.rename(away)
    status, output, _ = attempt(starter, tmp_path, *tiered, **both)
    assert status != 0 and "rank 0: step 3, and step 2 before it; rank 1: no commit; ranks [1] found no tier" in output, output
    for folder, away in apart:
        shutil.rmtree(folder, ignore_errors=True)
        away.rename(folder)
    last = [steps([str(path) for path in paths], job="deepspeed", rank=rank, world=2).last for rank in (0, 1)]
    assert last == [3, 2]


def test_the_step_at_which_ranks_go_on(monkeypatch):
    from spillway import _ranks

    nothing, began = Steps(None, None, False, False), Steps(None, None, False, True)
    first, fifth, sixth = Steps(1, None, True, True), Steps(5, 4, False, True), Steps(6, 5, False, True)
    assert _ranks._common([[fifth], [sixth]], "load a checkpoint") == (5, [0])
    assert _ranks._common([[sixth], [fifth], [sixth]], "load a checkpoint") == (5, [0])
    assert _ranks._common([[first], [began]], "load a checkpoint") == (None, [0])
    for apart in ([first, nothing], [first, sixth], [fifth, began], [sixth, nothing, sixth], [began, nothing, first]):
        with pytest.raises(ValueError, match="no committed step in common: ranks? 0"):
            _ranks._common([[steps] for steps in apart], "load a checkpoint")
    # A failure on one rank makes all ranks fail, and no rank is left waiting.
    undone = []
    monkeypatch.setattr(_ranks, "gathered", lambda own, world, group=None: [own, own._replace(trouble="OSError: no disk")])
    with pytest.raises(TierError, match="another rank failed, so this rank gives up too: rank 1: OSError: no disk"):
        _ranks.together(2, lambda: "opened", undone.append)
    with pytest.raises(KeyError, match="mine"):
        _ranks.together(2, lambda: {}["mine"], undone.append)
    assert undone == ["opened"] and _ranks.together(1, lambda: "alone") == "alone"


def test_a_commit_that_could_not_be_taken_up_is_refused():
    from spillway.deepspeed import _engine_state, _tier

    swapper = _tier.TierSwapper.__new__(_tier.TierSwapper)
    swapper._tiered = types.SimpleNamespace(closed=False, committed_step=5, place=types.SimpleNamespace(world=2), finish=lambda: None)
    engine = types.SimpleNamespace(
        optimizer=types.SimpleNamespace(optimizer_swapper=swapper), global_steps=5, micro_steps=8, gradient_accumulation_steps=lambda: 4
    )
    with pytest.raises(ValueError, match="step 5 is already committed"):
        _engine_state.commit(engine)
    engine.global_steps, engine.micro_steps = 6, 11
    with pytest.raises(ValueError, match="gradients a commit does not store"):
        _engine_state.commit(engine)
    # A caller that sets the boundaries calls step() once for several micro-batches.
    engine.managed_gradient_accumulation, engine._is_gradient_accumulation_boundary = lambda: True, True
    for micro_step, ran, between in ((0, False, False), (0, True, True), (1, False, True)):
        engine.optimizer.micro_step_id, engine.optimizer._epilogue_ran_this_backward = micro_step, ran
        assert _engine_state._between_micro_batches(engine) == between
    engine.managed_gradient_accumulation, engine._is_gradient_accumulation_boundary = lambda: False, None
    assert _engine_state._between_micro_batches(engine)


@pytest.mark.parametrize("interval, resume, at, commits", [(1, True, 400, 1), (1, True, 500, 0), (0, True, 400, 0), (1, False, 400, 0)])
def test_what_a_checkpoint_brought_is_committed_unless_that_is_left_to_the_caller(monkeypatch, interval, resume, at, commits):
    from spillway.deepspeed import _engine, _tier, _versions

    made = []
    monkeypatch.setattr(_engine, "commit", made.append)
    swapper = _tier.TierSwapper.__new__(_tier.TierSwapper)
    swapper._tiered = types.SimpleNamespace(closed=False, committed_step=500, finish=lambda: None)
    swapper.settings = types.SimpleNamespace(resume=resume, commit_interval=interval)
    own = {name: lambda *_: ("checkpoint", {}) for name in _versions.methods("engine")}
    load = _engine.overrides(type("Engine", (), own))["load_checkpoint"]
    engine = types.SimpleNamespace(optimizer=types.SimpleNamespace(optimizer_swapper=swapper), global_steps=at)
    assert load(engine, "folder") == ("checkpoint", {}) and len(made) == commits


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_of_deepspeeds_own_swapper_goes_on_on_a_tier(train, paths, tmp_path, both, ranks):
    """Large sub-groups are copies of swap files in it, small ones are in the checkpoint itself."""
    large = ["--dim", "512", "--layers", "1", "--steps", "4", "--sub_group", 1 << 20, "--seed-each-step"]
    further = both if ranks == 2 else {}
    save = ["--save", tmp_path / "own", "--save_at", 2]
    own = train("--paths", paths[0], "--block", '{"enabled": false}', *large, *save, **further)
    assert {folder.name for folder in (tmp_path / "own").glob("*/offloaded_tensors/rank*")} == {f"rank{rank:02}" for rank in range(ranks)}
    assert list((tmp_path / "own").glob("*/offloaded_tensors/rank00/exp_avg_sq-*.tensor.swp"))
    for block in ('{"part_elements": 100000}', SPLIT):
        found = train("--paths", *paths, "--block", block, *large, "--load", tmp_path / "own", **further)
        assert found["began_at"] == 2 and (found["sha256"], found["published"]) == (own["sha256"], own["published"])


def test_a_swap_file_that_one_rank_lacks_is_an_error_of_all_ranks(train, paths, tmp_path, both):
    large = ["--dim", "512", "--layers", "1", "--steps", "4", "--sub_group", 1 << 20, "--seed-each-step"]
    train("--paths", paths[0], "--block", '{"enabled": false}', *large, "--save", tmp_path / "own", "--save_at", 2, **both)
    next((tmp_path / "own").glob("*/offloaded_tensors/rank01/exp_avg_sq-*.tensor.swp")).unlink()
    with pytest.raises(AssertionError) as failed:
        train("--paths", *paths, "--block", SPLIT, *large, "--load", tmp_path / "own", **both)
    assert "tensor.swp has 0 bytes" in str(failed.value) and "Connection closed" not in str(failed.value)


def test_checkpoints_load_in_either_kind_of_run(train, paths, tmp_path):
    """All four conversions from one kind of run to the other give the same bits after the load."""
    on_tier = train("--paths", *paths, "--block", SPLIT, "--seed-each-step", "--save", tmp_path / "tier", "--save_at", 5)
    of_host = train("--seed-each-step", "--save", tmp_path / "host", "--save_at", 5)
    assert same(on_tier, of_host)
    on_again = train("--paths", *paths, "--block", SPLIT, "--seed-each-step", "--load", tmp_path / "tier")
    host_from_tier, host_from_host = (train("--seed-each-step", "--load", tmp_path / kind) for kind in ("tier", "host"))
    resumable = '{"split_master": true, "resume": true, "overlap": true}'
    tier_from_host = train("--paths", *paths, "--block", resumable, "--seed-each-step", "--load", tmp_path / "host")
    assert host_from_host["began_at"] == 5
    assert all(same(found, host_from_host) for found in (host_from_tier, tier_from_host, on_again))
    assert tier_from_host["active"]["tier"][0]["commits"] == 1 + 3, "what was loaded is committed, and each step"


@pytest.mark.parametrize(
    "interval, kills, split, background", [(1, [2, 9, 14], False, False), (3, [7, 13], True, False), (1, [3, 9], True, True)]
)
def test_a_killed_run_goes_on_at_its_last_commit(starter, train, in_host, paths, tmp_path, interval, kills, split, background):
    further = {"split_master": split, "overlap": split, "background_commits": background}
    block = json.dumps({"resume": True, "commit_interval": interval, "host_memory": 2400000, **further})
    arguments = ("--steps", "18", "--progress")
    whole, chance, began_at = in_host(*arguments), random.Random(interval), []
    for step in kills:
        status, output, _ = attempt(
            starter, tmp_path, "--paths", *paths, "--block", block, *arguments, kill_after=step, delay=chance.random()
        )
        assert status == -9, output
        began_at.append(int(output.split("step ", 1)[1].split("\n", 1)[0]) - 1)
    last = train("--paths", *paths, "--block", block, *arguments)
    assert (last["sha256"], last["published"]) == (whole["sha256"], whole["published"])
    assert last["losses"] == whole["losses"][last["began_at"] :]
    began_at.append(last["began_at"])
    # The tier holds a commit at least as new as the reported step, or the one before if the last one goes on, and complete commits only.
    assert began_at[0] == 0 and all((step - background) // interval * interval <= at for step, at in zip(kills, began_at[1:]))
    assert all(at % interval == 0 for at in began_at) and last["active"]["tier"][0]["resumed_at"] == last["began_at"]
    with Tier([str(path) for path in paths], job="deepspeed", mode="resume") as tier:
        assert any(extent.name.endswith("-split") for extent in tier.extents()) == split


def test_a_commit_with_other_settings_is_refused_by_the_names_of_these(train, refused, paths):
    train("--paths", *paths, "--block", '{"resume": true}', "--steps", "2")
    found = refused("--paths", *paths, "--block", '{"resume": true, "split_master": true, "part_elements": 5000}', "--steps", "3")
    assert "the tier was written with part_elements 2097152, and this run has 5000, split_master false, and this run has true" in found
    # 3 million elements do not change the parts of smaller sub-groups.
    larger = '{"resume": true, "part_elements": 3000000}'
    assert train("--paths", *paths, "--block", larger, "--steps", "3")["began_at"] == 2


def test_without_resume_the_paths_are_scratch(train, in_host, paths):
    assert train("--paths", *paths, "--block", '{"resume": true}', "--steps", "3")["active"]["tier"][0]["commits"] == 3
    anew = train("--paths", *paths)
    assert anew["began_at"] == 0 and same(anew, in_host())


def test_states_and_gradients_are_seen_and_set_between_steps(run_forked, paths):
    """DeepSpeed's functions that read one parameter give the same values on the tier as in host memory."""
    text = (HERE / "fragments.py").read_text()
    beside = '{"overlap": true, "host_memory": 600000}'
    kinds = (("", "{}"), (str(paths[0]), "{}"), (str(paths[1]), SPLIT), (str(paths[1]), beside))
    host, *on_tier = (run_forked(text, HERE, PLACE=place, BLOCK=block, OMP_NUM_THREADS="1") for place, block in kinds)
    assert [host, host, host] == on_tier and "exp_avg_sq" in host and host.count("\n") > 40


def test_mistakes_name_themselves(refused, paths):
    assert "job" in refused("--paths", *paths, "--block", '{"job": "a/b"}')


def test_bf16_moments_need_no_float16_weights(refused, paths):
    needs_fp16()
    assert "use one of these, or float32 moments" in refused("--paths", *paths, "--block", '{"moment_dtype": "bf16"}', "--dtype", "fp16")


def test_a_split_master_needs_bfloat16_weights(refused, paths):
    needs_fp16()
    assert "have to be bfloat16 in host memory" in refused("--paths", *paths, "--block", SPLIT, "--dtype", "fp16")


def test_weights_that_move_between_backward_and_step_take_back_the_steps_that_write_them(run_forked, tmp_path):
    """offload_states() empties DeepSpeed's list of weights, while a thread may submit a sub-group that has begun during backward."""
    found = run_forked(
        f"""
import pathlib
import train, superoffload
train.become_single_rank()
import deepspeed, spillway, torch
superoffload.allow_the_cpu()


def trained(name, moves):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    path = pathlib.Path({str(tmp_path)!r}) / name
    path.mkdir()
    zero = {{"stage": 3, "sub_group_size": 1100, "reduce_bucket_size": 1100, "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {{"device": "nvme", "nvme_path": str(path)}}}}
    config = {{"train_micro_batch_size_per_gpu": 2, "bf16": {{"enabled": True}}, "steps_per_print": 1 << 30, "zero_optimization": zero,
              "spillway": {{"paths": [str(path)], "overlap": True}}, "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-2}}}}}}
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    for step in range(4):
        engine.backward(engine(torch.ones(2, 32, dtype=torch.bfloat16)).float().square().mean())
        if moves and step % 2:
            engine.offload_states()
            engine.reload_states()
        engine.step()
    weights = torch.cat([param.ds_tensor.clone().view(-1) for param in model.parameters()])
    engine.destroy()
    return weights


print(torch.equal(trained("plain", False), trained("moving", True)))
""",
        HERE,
    )
    assert found == "True\n"
