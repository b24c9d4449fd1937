"""Proves that a checkpoint whose optimizer states are a snapshot of the tier has the bits of one with the states in it, that training goes
on while it is written, and that `latest` names it only once it is finished."""

import json
import os
import pathlib

import pytest
from test_swap_tier import both, paths, refused, same, train  # noqa: F401
from tiered_runs import attempt

SAVE = ("--seed-each-step", "--save_at", 4, "--steps", 7)


def block(**more):
    return json.dumps({"snapshot_checkpoints": True, "part_elements": 20000, **more})


@pytest.mark.parametrize("more", [{}, {"split_master": True, "overlap": True, "resume": True}], ids=["plain", "split"])
def test_a_snapshot_has_the_bits_of_a_checkpoint(train, paths, tmp_path, more):  # noqa: F811
    # Steps and commits go on while it is written.
    slow = block(snapshot_bytes_per_second=2_000_000, **more)
    saves = train("--paths", *paths, "--block", slow, *SAVE, "--save", tmp_path / "tier")
    of_host = train(*SAVE, "--save", tmp_path / "host")
    assert same(saves, of_host) and (tmp_path / "tier" / "latest").read_text() == "global_step4"
    (states,) = (tmp_path / "tier" / "global_step4").glob("*optim_states.pt")
    assert states.stat().st_size < 100_000 < sum(file.stat().st_size for file in states.parent.glob("spillway-snapshot/*.bin"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    from_tier = train("--paths", elsewhere, "--block", block(**more), "--seed-each-step", "--load", tmp_path / "tier")
    from_host = train("--seed-each-step", "--load", tmp_path / "host")
    assert from_tier["began_at"] == 4 and same(from_tier, from_host)


def test_the_snapshots_of_two_ranks(train, paths, tmp_path, both):  # noqa: F811
    of_host = train(*SAVE, "--save", tmp_path / "host", **both)
    saves = train("--paths", *paths, "--block", block(), *SAVE, "--save", tmp_path / "tier", **both)
    assert same(saves, of_host) and (tmp_path / "tier" / "latest").read_text() == "global_step4"
    assert sorted(os.listdir(tmp_path / "tier" / "global_step4" / "spillway-snapshot")) == ["rank-0", "rank-1"]
    found = train("--paths", *paths, "--block", block(), "--seed-each-step", "--load", tmp_path / "tier", **both)
    assert same(found, train("--seed-each-step", "--load", tmp_path / "host", **both))


def test_a_run_that_is_killed_leaves_no_latest_and_what_is_not_finished_is_refused(starter, train, refused, paths, tmp_path):  # noqa: F811
    never = block(snapshot_bytes_per_second=1000)
    arguments = ("--paths", *paths, "--block", never, *SAVE, "--progress", "--save", tmp_path / "saved")
    status, output, _ = attempt(starter, tmp_path, *arguments, kill_after=6, delay=0.5)
    assert status == -9, output
    folder = tmp_path / "saved" / "global_step4"
    assert not (tmp_path / "saved" / "latest").exists() and not (folder / "spillway-snapshot").exists()
    assert list(folder.glob("spillway-snapshot.*.partial"))
    (tmp_path / "saved" / "latest").write_text("global_step4")
    load = ("--seed-each-step", "--load", tmp_path / "saved")
    assert "is no finished snapshot" in refused("--paths", *paths, "--block", block(), *load)
    assert "snapshot of a tier, and this run has none" in refused(*load)
    # The same checkpoint, saved again.
    train("--paths", *paths, "--block", block(), *SAVE, "--save", tmp_path / "saved")
    train("--paths", *paths, "--block", block(), *SAVE, "--save", tmp_path / "saved")
    assert train("--paths", *paths, "--block", block(), *load)["began_at"] == 4
    assert "part_elements 20000, and this run has 10000" in refused("--paths", *paths, "--block", block(part_elements=10000), *load)


@pytest.fixture
def run(starter, tmp_path):
    """Runs a case of snapshots.py."""

    def run(case, ranks=1, **extra):
        environment = {name: value for name, value in os.environ.items() if name != "SPILLWAY_LIBRARY"}
        environment.update(
            {"OMP_NUM_THREADS": "1", "SPILLWAY_DEEPSPEED": "1", "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"), **extra}
        )
        script = pathlib.Path(__file__).with_name("snapshots.py")
        with open(tmp_path / "stderr", "w+") as errors:
            process = starter.start([script, case, tmp_path], environment, errors, ranks)
            output, status = process.stdout.read(), process.wait(300)
            errors.seek(0)
            assert status == 0, output[-2000:] + errors.read()[-4000:]

    return run


def test_a_failed_or_interrupted_write_of_weights_blocks_no_later_save(run):
    run("transfers")


def test_a_damaged_snapshot_leaves_the_run_as_it_was(run, both):  # noqa: F811
    run("damaged_content")
    run("damaged_files", **both)


def test_an_interrupted_save_under_an_old_tag_leaves_no_mixed_checkpoint(run):
    run("mixed_tags")


def test_an_interrupted_wait_leaves_the_snapshot_going(run):
    run("interrupted_waits")


def test_a_load_without_optimizer_states_keeps_the_masters(run):
    run("masters_only")


def test_a_setting_without_effect_is_refused(refused, paths):  # noqa: F811
    assert "snapshot_bytes_per_second has no effect" in refused("--paths", *paths, "--block", '{"snapshot_bytes_per_second": 5}')
