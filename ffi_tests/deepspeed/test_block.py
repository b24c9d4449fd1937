"""Proves that a `spillway` block is checked for every configuration. A misspelt setting, a wrong value and a setting
without effect each raise an error. The error names the setting, the fault and the remedy."""

import pathlib
import types

import pytest

from spillway.deepspeed import _settings
from spillway.deepspeed._settings import of_tier
from spillway.errors import InvalidArgumentError
from spillway.tier import Tier

SWAP = "spillway.host_memory is 'x'; a number of bytes, an integer from 1 to 9223372036854775807, or \"auto\""


@pytest.fixture
def folders(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return [str(tmp_path / "a"), str(tmp_path / "b")]


@pytest.mark.parametrize(
    "block, words",
    [
        (7, "spillway is 7, not an object"),
        ("yes", "spillway is 'yes', not an object"),
        (None, "spillway is None, not an object"),
        ({"\ud800": 1}, "spillway has a key that is not valid Unicode; the settings are background_commits"),
        ({"host_memor": 1}, "spillway.host_memor is unknown; did you mean host_memory\\? The settings are background_commits, begin_from"),
        ({"resume": 1}, "spillway.resume is 1; true or false is needed"),
        ({"host_memory": "x"}, SWAP),
        ({"host_memory": True}, "spillway.host_memory is True; a number of bytes"),
        ({"host_memory": -1}, "host_memory is -1; a number"),
        ({"host_memory": 0}, "host_memory is 0; a number"),
        ({"durability": "none"}, "spillway.durability is 'none'; \"data\" or"),
        ({"part_elements": 0}, "part_elements is 0; an integer from 1"),
        ({"paths": []}, "spillway.paths is \\[\\]; a list of directories.*leave it out for nvme_path alone"),
        ({"paths": "x"}, "spillway.paths is 'x'; a list"),
        ({"paths": [7]}, "spillway.paths\\[0\\] is 7"),
        ({"paths": [{"directory": "x"}]}, "spillway.paths\\[0\\].path is missing.*paths\\[0\\].directory is unknown"),
        ({"paths": [{"path": "x", "limit_bytes": "9G"}]}, "spillway.paths\\[0\\].limit_bytes is '9G'; a number of bytes"),
        (
            {"paths": ["/var", "/var/"]},
            "spillway.paths\\[1\\] is '/var/', the same directory as spillway.paths\\[0\\]; name each path once",
        ),
        ({"ratio": ["a", 1]}, "spillway.ratio\\[0\\] is 'a'; a list with a number from 0 for each path"),
        ({"speeds": [0, 0]}, "spillway.speeds is .*above 0"),
        ({"speeds": [1, 2, 3], "paths": ["/tmp", "/var"]}, "speeds has 3 numbers for 2 paths"),
        ({"ratio": [0, 0]}, "spillway.ratio is .*above 0"),
        ({"ratio": [1], "paths": ["/tmp", "/var"]}, "ratio has 1 numbers for 2 paths"),
        ({"commit_interval": 2}, 'spillway.commit_interval is 2, but nothing is committed without "resume": true'),
        ({"background_commits": True}, "spillway.background_commits is true, but nothing is committed"),
        ({"durability": "full"}, 'spillway.durability is "full", but nothing is committed'),
        ({"missing_gradients": "old"}, 'spillway.missing_gradients is \'old\'; "zero" or "stale"'),
        ({"io_timeout_seconds": float("inf")}, "spillway.io_timeout_seconds is inf"),
        ({"job": ""}, "spillway.job is ''; a name"),
        ({"io_timeout_seconds": 1e300}, "spillway.io_timeout_seconds is 1e\\+300; 0, or a number of seconds from 0.001"),
        ({"io_timeout_seconds": 1e-9}, "spillway.io_timeout_seconds is 1e-09; 0, or a number of seconds from 0.001"),
        ({"paths": ["a\0b"]}, "spillway.paths\\[0\\].path is 'a.x00b'; a directory .* without NUL"),
        (
            {"paths": [{"path": "x", "limit_bytes": 1 << 64}]},
            "spillway.paths\\[0\\].limit_bytes is 18446744073709551616; a number of bytes",
        ),
        ({"paths": [{"path": "x", "reserve_bytes": 1 << 63}]}, "spillway.paths\\[0\\].reserve_bytes is 9223372036854775808"),
        ({"host_memory": 1 << 64}, "spillway.host_memory is 18446744073709551616; a number of bytes"),
        ({"part_elements": 1 << 64}, "spillway.part_elements is 18446744073709551616"),
        ({"commit_interval": 1 << 64, "resume": True}, "spillway.commit_interval is 18446744073709551616"),
        ({"interleave": {"plan_argument": 1 << 64}}, "spillway.interleave.plan_argument is 18446744073709551616; an integer"),
        ({"interleave": {"slots": 1 << 32}}, "spillway.interleave.slots is 4294967296; an integer"),
        ({"superoffload": {"verdict": "next"}}, 'spillway.superoffload.verdict is \'next\'; "step" or "forward" is needed'),
        ({"superoffload": {"tails": 1}}, "spillway.superoffload.tails is unknown; did you mean tail. The settings are tail, verdict"),
        ({"superoffload": {"tail": -1}}, 'spillway.superoffload.tail is -1; a number of sub-groups, an integer from 0, or "auto" is'),
        ({"superoffload": {"tail": "all"}}, "spillway.superoffload.tail is 'all'; a number of sub-groups"),
        ({"superoffload": {"tail": True}}, "spillway.superoffload.tail is True; a number of sub-groups"),
        ({"interleave": {"chunk": 1 << 64}}, "spillway.interleave.chunk is 18446744073709551616"),
        ({"job": ".."}, "spillway.job is '..'; a name of at most 200 bytes"),
        ({"host": "a/b"}, "spillway.host is 'a/b'; a name"),
        ({"job": "x" * 201}, "spillway.job is 'xxx.*'; a name of at most 200 bytes"),
        ({"enabled": False, "job": "x"}, 'spillway.job has no effect with "enabled": false; take job out'),
        ({"enabled": False, "resume": True, "paths": ["x"]}, "take paths, resume out, or enabled"),
    ],
)
def test_what_is_wrong_is_named(block, words):
    with pytest.raises(InvalidArgumentError, match=words):
        _settings.read(block)


NAMES = ["..", ".", ".a", "a/b", "a\nb", "a\x7fb", "a\x85b", "-", " ", "é", "a.b", "job 7", "x" * 200, "\u200b"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_accepted_if_the_library_accepts_it(name):
    def taken(make):
        try:
            make()
        except InvalidArgumentError:
            return False
        return True

    assert taken(lambda: _settings.read({"job": name})) == taken(lambda: Tier([None], job=name).close())


def test_relative_paths_are_fixed_when_they_are_read(folders, monkeypatch):
    monkeypatch.chdir(folders[0])
    found = [of_tier({"paths": ["../b"]}, None), of_tier(None, "../b"), of_tier({}, "./new")]
    assert [path.directory for given in found for path in given.paths] == [folders[1], folders[1], f"{folders[0]}/new"]
    with pytest.raises(InvalidArgumentError, match="nvme_path is 'a.x00b'; a path without NUL"):
        of_tier({}, "a\0b")


def test_a_block_becomes_settings(folders):
    given = of_tier({"paths": [{"path": folders[0], "limit_bytes": 5}, folders[1]], "ratio": (2, 1)}, None)
    assert [path.limit_bytes for path in given.paths] == [5, 0] and given.ratio == [2, 1]
    assert of_tier(None, folders[0]) == of_tier({}, folders[0]) and of_tier({}, folders[0]).paths[0].directory == folders[0]
    assert [path.directory for path in of_tier({"paths": [folders[0], "s3://bucket/x"]}, None).paths] == [folders[0], "s3://bucket/x"]
    with pytest.raises(InvalidArgumentError, match="neither nvme_path nor spillway.paths"):
        of_tier({}, None)
    with pytest.raises(InvalidArgumentError, match="goes into spillway.paths"):
        of_tier(None, "s3:/bucket/x")
    with pytest.raises(InvalidArgumentError, match="spillway.job is 'a-scratch-1'"):
        of_tier({"job": "a-scratch-1"}, folders[0])


def zero(stage, optimizer=None, parameters=None):
    def offload(device):
        return device and types.SimpleNamespace(device=device)

    return types.SimpleNamespace(stage=stage, offload_optimizer=offload(optimizer), offload_param=offload(parameters))


def superoffload():
    found = zero(3, "cpu")
    found.offload_optimizer.super_offload = True
    return found


@pytest.mark.parametrize(
    "block, configuration, words",
    [
        ({"resume": True}, zero(3, "cpu"), "spillway.resume is for optimizer states on a tier.*stage 3 and the device cpu"),
        ({"host_memory": 1, "pin_memory": False}, zero(2, "cpu"), "spillway.host_memory .*stage 2.*take host_memory, pin_memory out"),
        ({"paths": ["/tmp"]}, zero(0), "spillway.paths .*stage 0 and the device none"),
        ({"split_master": True, "paths": ["/tmp"]}, zero(3, "cpu", "nvme"), "spillway.split_master is for"),
        ({"interleave": {}}, zero(2, "cpu"), "spillway.interleave needs zero_optimization with stage 3"),
        ({"interleave": {}}, zero(3, "nvme"), "spillway.interleave needs .* the device nvme"),
        ({"superoffload": {}}, zero(3, "cpu"), "spillway.superoffload needs .* with super_offload"),
    ],
)
def test_what_nothing_would_serve_is_an_error(block, configuration, words):
    with pytest.raises(InvalidArgumentError, match=words):
        _settings.refuse_unserved(_settings.read(block), configuration)


@pytest.mark.parametrize(
    "block, configuration",
    [
        ({}, zero(0)),
        ({"enabled": False}, zero(2, "cpu")),
        ({"enabled": False, "interleave": {}}, zero(3, "cpu")),
        ({"host_memory": 1}, zero(3, "nvme")),
        ({"paths": ["/tmp"], "job": "x"}, zero(3, "cpu", "nvme")),
        ({"interleave": {}}, zero(3, "cpu")),
        ({"superoffload": {"verdict": "forward"}}, superoffload()),
        ({"enabled": False, "superoffload": {}}, superoffload()),
    ],
)
def test_what_is_served_is_none(block, configuration):
    _settings.refuse_unserved(_settings.read(block), configuration)


def test_an_engine_checks_its_block(run_forked, folders):
    """The check applies to every stage and device, before anything is created."""
    assert run_forked(
        f"""
import train
train.become_single_rank()
import deepspeed, torch
FOLDER = {folders[0]!r}


def make(zero, block):
    model = torch.nn.Linear(8, 8)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config={{
        "train_micro_batch_size_per_gpu": 1, "bf16": {{"enabled": True}}, "zero_optimization": zero, "spillway": block,
        "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-3}}}}, "steps_per_print": 1 << 30}})


CPU, NVME = {{"device": "cpu"}}, {{"device": "nvme", "nvme_path": FOLDER}}
for zero, block in (({{"stage": 0}}, {{"cach_bytes": 1}}), ({{"stage": 2, "offload_optimizer": CPU}}, "yes"),
                    ({{"stage": 3, "offload_optimizer": CPU}}, {{"resume": True}}),
                    ({{"stage": 3, "offload_optimizer": NVME}}, {{"paths": [{{"path": FOLDER, "limit_bytes": 1000}}]}})):
    try:
        make(zero, block)
    except Exception as error:
        print(type(error).__name__, str(error).split(";")[0].replace(FOLDER, "FOLDER"))
make({{"stage": 3, "offload_optimizer": NVME}}, {{"pin_memory": False}})
""",
        pathlib.Path(__file__).parent,
    ).splitlines()[-4:] == [
        "InvalidArgumentError spillway.cach_bytes is unknown",
        "InvalidArgumentError spillway is 'yes', not an object",
        "InvalidArgumentError spillway.resume is for optimizer states on a tier, which need zero_optimization with stage 3 and "
        "offload_optimizer on the device nvme",
        "InvalidArgumentError spillway.paths[0].limit_bytes is 1000: too small for the optimizer states of this rank, which take 864 "
        "bytes, rounded up to whole blocks",
    ]
