"""Proves, for a sample of scenarios.json, that Spillway in memory, on a tier and under SuperOffload gives the bits
of DeepSpeed's compiled op under plain ZeRO. To run the whole list: python ffi_tests/deepspeed/scenarios.py, in the
environment of packaging/python_env.sh."""

import scenario_run
import scenarios

SAMPLE = (
    "bf16-clipped",
    "fp16",
    "accumulate",
    "groups-three",
    "l2",
    "missing-clipped",
    "edited",
    "two-backwards",
    "thrown-away-and-reset",
    "overflow",
    "peek-masters",
    "lr-between",
    "checkpoint-same-engine",
    "resume-other-lr",
    "resume-other-mode",
    "two-ranks-missing-fp16",
)


def test_the_list_is_what_it_says():
    known = scenarios.read_scenarios()
    assert len(known) >= 60 and len(known) == (scenarios.HERE / "scenarios.json").read_text().count('{"name"')
    for scenario in known.values():
        actions = [action for step in scenario.get("at", {}).values() for action, *_ in step]
        assert set(actions) <= set(scenario_run.ACTIONS) and set(scenarios.kinds_of(scenario)) <= set(scenarios.KINDS)


def test_a_sample_has_deepspeeds_bits(compiled):
    compiled("cpu_adam")
    known, failed = scenarios.read_scenarios(), []
    passed, _, _ = scenarios.compare([known[name] for name in SAMPLE], lambda *words: failed.append(words) if words[2] else None)
    assert not failed and passed == sum(len(scenarios.kinds_of(known[name])) for name in SAMPLE), failed
