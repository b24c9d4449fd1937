"""A job whose states are on a tier continues with another number of processes. Each reads the elements that it has now from the commits of
the processes that had them. Its steps then have the bits of a run of one process that nothing has interrupted."""

import pathlib
import shutil

import processes
import pytest

torch = pytest.importorskip("torch")
WORKER = pathlib.Path(__file__).with_name("reshard_worker.py")


def run(world, folder, phase, dtype, placement, *source):
    return processes.run(WORKER, world, folder, phase, dtype, placement, *source)


def holds(world, folder, phase, dtype, placement, *source):
    done = run(world, folder, phase, dtype, placement, *source)
    assert done.stdout.count(f"{phase} holds\n") == world, done


@pytest.mark.sampled(cases=3)
@pytest.mark.parametrize(
    ("before", "after", "dtype", "placement"),
    [
        (2, 1, "float32", "fsdp"),
        (1, 2, "bfloat16", "fsdp"),
        (4, 2, "bfloat16", "fsdp"),
        (2, 3, "float32", "fsdp"),
        (3, 4, "bfloat16", "last"),
        (4, 4, "float32", "replicas"),
        (2, 3, "bfloat16", "plain"),
    ],
)
def test_a_run_goes_on_with_another_number_of_processes(before, after, dtype, placement, tmp_path):
    holds(before, tmp_path, "first", dtype, placement)
    kept = {path: path.read_bytes() for path in (tmp_path / "first").rglob("*") if path.is_file()}
    for source in ("first", "snapshot"):
        holds(after, tmp_path, "next", dtype, placement, source)
    assert all(path.read_bytes() == content for path, content in kept.items()), "the run that was read has changed"
    holds(before, tmp_path, "again", dtype, placement)


def test_other_placements_of_the_same_parameters_take_the_same_elements(tmp_path):
    holds(4, tmp_path, "first", "float32", "replicas")
    holds(3, tmp_path, "next", "float32", "last", "first")
    holds(2, tmp_path, "next", "float32", "fsdp", "snapshot")


def test_a_process_that_is_killed_while_it_reads_leaves_both_runs_as_they_are(tmp_path):
    holds(4, tmp_path, "first", "float32", "fsdp")
    done = run(2, tmp_path, "killed", "float32", "fsdp", "first")
    assert done.returncode != 0 and "killed holds" not in done.stdout and "AssertionError" not in done.stderr, done
    holds(2, tmp_path, "next", "float32", "fsdp", "first")
    holds(4, tmp_path, "again", "float32", "fsdp")


@pytest.mark.sampled(cases=2)
@pytest.mark.parametrize("source", ["first", "snapshot"])
@pytest.mark.parametrize("rank", [1, 2])
def test_a_missing_rank_is_named(rank, source, tmp_path):
    holds(3, tmp_path, "first", "float32", "fsdp")
    gone = tmp_path / source / (f"node-{rank}/rank-{rank}" if source == "first" else f"rank-{rank}")
    shutil.move(gone, tmp_path / "elsewhere")
    done = run(2, tmp_path, "refused", "float32", "fsdp", source)
    errors = [line for line in done.stdout.splitlines() if line.startswith("refused:")]
    assert len(errors) == 2 and all(f"rank-{rank}" in error for error in errors), done
    shutil.move(tmp_path / "elsewhere", gone)
    holds(2, tmp_path, "next", "float32", "fsdp", source)


def test_another_model_and_a_directory_without_a_run_are_refused(tmp_path):
    holds(2, tmp_path, "first", "float32", "fsdp")
    for dtype, source, words in (("bfloat16", "first", "torch.float32 of shape (65, 33)"), ("float32", "nothing", "has no tier")):
        done = run(1, tmp_path, "refused", dtype, "fsdp", source)
        assert words in done.stdout, done


def test_a_group_of_some_processes_opens_with_five_calls_of_its_own(tmp_path):
    holds(3, tmp_path, "group", "float32", "fsdp")
