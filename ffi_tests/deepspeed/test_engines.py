"""Proves that engines can be opened and closed repeatedly in one process. The objects that an engine opened close
with engine.destroy(), with its last reference, with a failure of deepspeed.initialize and with the process. Two
engines at a time on one path do not disturb each other, and resumed runs keep their commits. Checkpoints load
between all places of states and parameters. Fifty engines leave nothing behind."""

import os
import pathlib

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.fixture
def case(starter, tmp_path):
    def run(*arguments, seconds=300):
        folder, extensions = tmp_path / "work", tmp_path / "extensions"
        folder.mkdir(), extensions.mkdir()
        environment = {name: value for name, value in os.environ.items() if name != "SPILLWAY_LIBRARY"}
        environment.update(OMP_NUM_THREADS="1", SPILLWAY_DEEPSPEED="1", TORCH_EXTENSIONS_DIR=str(extensions))
        done = starter.run([HERE / "engines.py", arguments[0], folder, *arguments[1:]], environment, seconds)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        assert not list(extensions.iterdir()), "DeepSpeed compiled something"
        left = [path for path in folder.rglob("*") if path.is_file() and "-scratch-" in str(path)]
        assert not left, "the end of the process closes what is open"
        return done.stdout

    return run


@pytest.mark.parametrize("parameters", ["none", "nvme"])
@pytest.mark.parametrize("name", ["destroyed", "dropped", "failed", "beside"])
def test_engines_close_what_they_opened(case, name, parameters):
    case(name, parameters)


@pytest.mark.parametrize("name", ["resumable", "dead", "superoffload", "published"])
def test_engines_keep_and_remove_what_they_should(case, name):
    case(name, "")


# Places of parameters and states when the checkpoint is saved, and when it is loaded.
@pytest.mark.parametrize(
    "before, after",
    [
        ("none-cpu", "cpu-nvme"),
        ("cpu-nvme", "none-cpu"),
        ("nvme-nvme", "nvme-nvme"),
        ("cpu-cpu", "nvme-nvme"),
        ("nvme-nvme", "cpu-cpu"),
        ("none-nvme", "nvme-nvme"),
    ],
)
def test_a_checkpoint_goes_on_in_other_places(case, before, after):
    case("checkpoint", before, after)


def test_fifty_engines_leave_nothing_behind(case):
    case("fifty", "50", seconds=900)
