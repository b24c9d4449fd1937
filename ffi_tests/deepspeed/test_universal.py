"""Proves that states on a tier move between numbers of ranks and sub_group_sizes, by way of DeepSpeed's universal checkpoints: every
parameter, master and moment has the same bits, and so has the next step."""

import argparse
import os
import pathlib

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.fixture
def run(starter, overlay, tmp_path):
    """One run of universal.py with a number of ranks; returns what it wrote."""
    import torch

    def run(ranks, *arguments):
        report, extensions = tmp_path / "report.pt", tmp_path / "extensions"
        report.unlink(missing_ok=True)
        extensions.mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if name != "SPILLWAY_LIBRARY"}
        environment.update(OMP_NUM_THREADS="1", SPILLWAY_DEEPSPEED="1", TORCH_EXTENSIONS_DIR=str(extensions), PATH=os.path.dirname(overlay))
        with open(tmp_path / "stderr", "w+") as errors:
            command = [HERE / "universal.py", *map(str, arguments), "--json", report]
            process = starter.start(command, environment, errors, ranks)
            process.wait(300)
            errors.seek(0)
            assert process.returncode == 0, errors.read()[-4000:]
        return torch.load(report)

    return run


def convert(folder):
    """A universal checkpoint of the checkpoint "t" in a folder; the folder then names it as its latest one."""
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(folder / "t"),
            output_folder=str(folder / "universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
    )


def same(one, other):
    import torch

    assert (one["steps"], one["groups"]) == (other["steps"], other["groups"])
    assert one["states"].keys() == other["states"].keys() and len(one["states"]) == 6
    for name, parts in one["states"].items():
        for part, found in zip(parts, other["states"][name], strict=True):
            assert part.any() and torch.equal(part, found), name


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_states_on_a_tier_move_to_other_ranks_and_sub_groups(run, tmp_path, before, after):
    paths = [tmp_path / name for name in ("one", "two")]
    for path in paths:
        path.mkdir()
    tier, saved = ("--where", "tier", "--paths", *paths), tmp_path / "saved"
    old = run(before, *tier, "--sub-group-size", 600, "--steps", 3, "--save", saved)
    convert(saved)
    same(run(after, *tier, "--sub-group-size", 1000, "--load", saved), old)
    if after == 1:
        stepped, split = [
            run(after, *tier, "--sub-group-size", size, "--load", saved, "--steps", 1, *more)
            for size, more in ((100_000, ()), (1000, ("--split-master",)))
        ]
        assert stepped["steps"] == 4
        same(split, stepped)
