"""Proves that ZeRO-3 with interleaved sub-groups gives the bits of ZeRO-3 without them, also with residents, whose states code outside
sees as after the last step; threads replace the GPU. Without a GPU the error says so, and errors in the block name the setting."""

import collections
import json
import pathlib

import pytest
import sampled
from test_train import attempt, train

from spillway.deepspeed import _interleave, _settings
from spillway.errors import InvalidArgumentError

SIZE = ["--stage", "3", "--sub-group-size", "20000"]


def block(**settings):
    return ["--block", json.dumps({"interleave": settings})]


@pytest.fixture
def run(starter, tmp_path):
    def start(*arguments, how=train, **extra):
        return how(starter, tmp_path, *SIZE, *arguments, SPILLWAY_DEEPSPEED="1", **extra)

    return start


def test_the_weights_are_those_of_steps_on_the_cpu(run):
    plain = run()
    assert "interleave" not in plain["active"]
    rates = {"cpu": 1e9, "gpu": 1e10, "h2d": 5e9, "d2h": 5e9}
    for settings in (
        {"plan": "stride", "plan_argument": 2},
        {"plan": "count", "plan_argument": 100, "slots": 1, "chunk": 1000},
        {"plan": "model", "rates": rates, "replan": True},
        {"plan": "model", "rates": rates, "replan": True, "residents": 2},
        {"plan": "stride", "plan_argument": 2, "residents": "auto"},
    ):
        if settings["plan"] == "count":
            settings["plan_argument"] = mixed["active"]["interleave"]["cpu"] // mixed["steps"]  # noqa: F821
        mixed = run(*block(backend="host", **settings))
        assert (mixed["sha256"], mixed["losses"]) == (plain["sha256"], plain["losses"]), settings
        served = mixed["active"]["interleave"]
        assert served["steps"] == mixed["steps"] and served["resident" if "residents" in settings else "gpu"] > 0, served


def test_two_ranks_with_residents_have_the_weights_of_two_without(run, overlay):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    # Without a compiler, which DeepSpeed would use for its collectives.
    path = str(pathlib.Path(overlay).parent)
    plain = run(launcher=launcher, PATH=path)
    ours = run(*block(backend="host", residents=3), launcher=launcher, PATH=path)
    assert (ours["sha256"], ours["losses"]) == (plain["sha256"], plain["losses"])
    assert ours["active"]["interleave"]["resident"] == 3 * ours["steps"]


def test_without_a_gpu_the_reason_is_given(run):
    done, _ = run(*block(), how=attempt, SPILLWAY_CUDA_LIBRARY="libno-such-driver.so.9")
    assert done.returncode != 0 and "NoDeviceError: opening libno-such-driver.so.9: cannot load the CUDA driver library" in done.stderr


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"plans": 1}, "spillway.interleave.plans is unknown; did you mean plan\\?"),
        ({"plan": "best"}, 'plan is \'best\'; "model" or "eq1"'),
        ({"plan": "model"}, "interleave.rates is missing"),
        ({"replan": True}, "interleave.rates is missing"),
        ({"plan_argument": -1}, "plan_argument is -1; an integer from 0"),
        ({"plan_argument": True}, "plan_argument is True"),
        ({"backend": "tpu"}, 'backend is \'tpu\'; "cuda" or "host"'),
        ({"backend": "host", "gradient_transfers": True}, "interleave.gradient_transfers needs the backend"),
        ({"residents": -1}, 'residents is -1; a number of sub-groups, an integer from 0, or "auto"'),
        ({"residents": "all"}, "residents is 'all'; a number"),
        ({"residents": True}, "residents is True; a number"),
        ({"rates": {"cpu": 1e9}}, "interleave.rates.gpu is missing"),
        ({"rates": 3}, "rates is 3; an object"),
    ],
)
def test_what_the_block_gets_wrong_is_named(settings, words):
    with pytest.raises(InvalidArgumentError, match=words):
        _settings.of_interleave({"interleave": settings})


def test_a_block_without_the_object_is_no_concern():
    assert _settings.of_interleave(None) is None and _settings.of_interleave({"host_memory": 1}) is None
    assert _settings.of_interleave({"interleave": {}}) == _settings.InterleaveBlock()
    with pytest.raises(InvalidArgumentError, match="interleave is 'yes'; an object is needed"):
        _settings.of_interleave({"interleave": "yes"})


@pytest.mark.parametrize(
    "case",
    [
        "traffic",
        "accesses_in_a_row",
        "reads",
        "ways_of_steps",
        "writes",
        "held_tensors",
        "checkpoints",
        "threads",
        "forks",
        "ends",
        "bad_numbers",
        "too_little_memory",
        "on_a_gpu",
    ],
)
def test_residents(run_forked, case):
    """The cases of residents.py, which says what each proves."""
    run_forked(f"import residents; residents.{case}()", pathlib.Path(__file__).parent)


def test_random_programs_with_residents(run_forked):
    run_forked(f"import residents; residents.random_programs({sampled.SEED}, {sampled.few(3, 60)})", pathlib.Path(__file__).parent)


def test_interrupts_of_steps_with_residents(run_forked):
    every = sampled.few(29, 3)
    run_forked(f"import residents; residents.interrupts({sampled.SEED % every}, {every})", pathlib.Path(__file__).parent)


class Copies:
    """A GPU whose copies finish when the test decides."""

    def __init__(self):
        self.over = 0

    def copy_out(self, grad, host, after=None):
        gpu = self

        class Copy:
            number, held, waited = len(gpu.made), grad, False

            def done(self):
                return self.number < gpu.over

            def wait(self):
                self.waited = True

        gpu.made.append(Copy())
        return gpu.made[-1]

    made = []


def test_gradients_are_let_go_as_their_copies_end(monkeypatch):
    """The GPU never holds more gradients than copies are in flight, and no gradient of a skipped step."""
    import torch

    update = object.__new__(_interleave.InterleavedUpdate)
    update.gpu, update._copies = Copies(), collections.deque()
    monkeypatch.setattr(_interleave.InterleavedUpdate, "_stream", lambda self: None)
    grad, host = torch.zeros(4), torch.zeros(4)
    for number in range(10):
        update.gpu.over = max(0, number - 2)
        update._copy_out(grad, host)
        assert len(update._copies) <= 3
    left = list(update._copies)
    update.skip()
    assert not update._copies and all(copy.waited for copy in left)
