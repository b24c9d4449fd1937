"""Proves that settle() gives all processes one outcome, and leaves no job open, after signals, timeouts and wrong arguments."""

import os
import signal
import subprocess
import sys

import pytest
from test_stage import bits, layer

import spillway
import spillway.stage
from spillway.arena import Arena
from spillway.stage import Stage, settle

LATE = """if True:
    import sys
    sys.path.insert(0, sys.argv[2])
    from test_stage import *
    own, before = layer(5000, 9), layer(5000, 9)
    with Arena.open(sys.argv[1], write=True, timeout=60) as arena, Stage([tuple(own)], spillway.Adam()) as stage:
        arena.join(1)
        stage.submit(1)
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            kept = settle([stage], arena=arena, process=1, round=1, timeout=60).kept
        except errors.PeerEndedError:
            kept = "aborted"
        print(kept, bits([own]) == bits([before]), flush=True)
        sys.stdin.readline()"""


class Interrupted(BaseException):
    """A signal handler's exception."""


@pytest.fixture
def late(child_environment):
    """An arena, a stage that is submitted, and a process that settles round 1 after a message."""
    own, name = layer(5000, 3), f"late-{os.getpid()}"
    with Arena.create(name, {"unused": 1}, processes=2) as arena, Stage([tuple(own)], spillway.Adam()) as stage:
        arena.join(0)
        child = subprocess.Popen(
            [sys.executable, "-c", LATE, name, os.path.dirname(__file__)],
            env=child_environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout.readline() == "ready\n"
        stage.submit(1)
        yield arena, stage, own, child
        child.communicate("\n\n")


def told(child):
    child.stdin.write("\n")
    child.stdin.flush()
    return child.stdout.readline().split()


def test_a_process_that_times_out_rolls_the_round_back_for_all(late):
    arena, stage, own, child = late
    before = bits([layer(5000, 3)])
    with pytest.raises(spillway.TimedOutError, match="process 1 has not posted"):
        settle([stage], arena=arena, process=0, round=1, timeout=0.05)
    assert bits([own]) == before and told(child) == ["aborted", "True"]


@pytest.mark.parametrize("moment", ["before the post", "after the post", "after the verdict"])
def test_an_interrupted_process_follows_the_outcome_of_all(late, monkeypatch, moment):
    arena, stage, own, child = late
    before, wait, post, others = bits([layer(5000, 3)]), arena.wait_verdict, arena._post, []

    def interrupted_post(*arguments):
        if moment != "before the post":
            post(*arguments)
        if moment != "after the verdict":
            raise Interrupted

    def interrupted_wait(*arguments, **options):
        others.extend(told(child))
        wait(*arguments, **options)
        raise Interrupted

    monkeypatch.setattr(arena, "_post", interrupted_post)
    monkeypatch.setattr(arena, "wait_verdict", interrupted_wait)
    with pytest.raises(Interrupted):
        settle([stage], arena=arena, process=0, round=1)
    if moment == "after the verdict":
        assert others == ["True", "False"] and bits([own]) != before and stage.state() == "final"
    else:
        assert told(child) == ["aborted", "True"] and bits([own]) == before


def test_an_interrupt_between_two_stages_leaves_none_behind(monkeypatch):
    layers, before = [layer(5000, n) for n in range(3)], [layer(5000, n) for n in range(3)]
    stages = [Stage([tuple(spans)], spillway.Adam()) for spans in layers]
    for stage in stages:
        stage.submit(1)
    through, calls = stages[1]._through, []

    def interrupted(work):
        calls.append(1)
        if len(calls) == 2:
            raise Interrupted
        return through(work)

    monkeypatch.setattr(stages[1], "_through", interrupted)
    with pytest.raises(Interrupted):
        settle(stages)
    assert all(bits([mine]) != bits([old]) for mine, old in zip(layers, before))
    assert [stage.state() for stage in stages] == ["final"] * 3
    [stage.close() for stage in stages]


def is_over(stage):
    return stage.state() in ("missing", "final")


def broken(stages):
    yield from stages
    raise ZeroDivisionError("broken")


@pytest.mark.parametrize("wrong", ["twice", "no stage", "iterator", "no iterator", "reduce", "timeout"])
def test_a_wrong_argument_rolls_back_all_processes(late, wrong):
    arena, stage, own, child = late
    stages, options, words = {
        "twice": ([stage, stage], {}, "names a stage twice"),
        "no stage": ([stage, 7], {}, "stages has a int"),
        "iterator": (broken([stage]), {}, "broken"),
        "no iterator": (7, {}, "not iterable"),
        "reduce": ([stage], {"reduce": 7}, "reduce is a int"),
        "timeout": ([stage], {"timeout": "soon"}, "timeout"),
    }[wrong]
    kind = {"iterator": ZeroDivisionError, "no iterator": TypeError}.get(wrong, spillway.InvalidArgumentError)
    with pytest.raises(kind, match=words):
        settle(stages, arena=arena, process=0, round=1, **options)
    assert told(child) == ["aborted", "True"]
    if wrong == "no iterator":
        stage.rollback()
        stage.finish()
    assert is_over(stage) and bits([own]) == bits([layer(5000, 3)])


def test_a_wrong_argument_leaves_no_stage_open():
    own, before = layer(5000, 1), layer(5000, 1)
    with Stage([tuple(own)], spillway.Adam()) as stage, Arena.create(None, {"unused": 1}, processes=1) as arena:
        for options, words in [
            ({"arena": 7}, "arena is a int"),
            ({"arena": arena, "process": 9, "round": 1}, "process"),
            ({"arena": arena, "process": "a"}, "process is"),
            ({"arena": arena, "round": None}, "round is"),
        ]:
            stage.submit(1)
            with pytest.raises(spillway.InvalidArgumentError, match=words):
                settle([stage], **options)
            assert is_over(stage) and bits([own]) == bits([before])
        stage.submit(1)
        assert settle(iter([stage])).kept and bits([own]) != bits([before])


def test_an_interrupt_at_the_begin_of_settle_leaves_no_stage_open(monkeypatch):
    own, before = layer(5000, 1), layer(5000, 1)
    made = spillway.stage._Settlement.__init__
    calls = []

    def interrupted(*arguments):
        made(*arguments)
        calls.append(1)
        if len(calls) == 1:
            raise Interrupted

    monkeypatch.setattr(spillway.stage._Settlement, "__init__", interrupted)
    with Stage([tuple(own)], spillway.Adam()) as stage:
        stage.submit(1)
        with pytest.raises(Interrupted):
            settle([stage])
        assert is_over(stage) and bits([own]) == bits([before])


def test_a_round_that_was_posted_by_hand_is_refused():
    own, before = layer(5000, 1), layer(5000, 1)
    with Stage([tuple(own)], spillway.Adam()) as stage, Arena.create(None, {"unused": 1}, processes=1) as arena:
        arena.join(0)
        arena.post(0, 1, (False, 1.0))
        stage.submit(1)
        with pytest.raises(spillway.InvalidArgumentError, match="post each round once"):
            settle([stage], arena=arena, round=1)
        assert is_over(stage) and bits([own]) == bits([before])
        stage.submit(1)
        assert settle([stage], arena=arena, round=2).kept


def raise_interrupted(*_):
    raise Interrupted


@pytest.mark.parametrize("moment", ["in reduce", "after reduce"])
def test_a_signal_during_reduce_does_not_change_the_outcome(late, monkeypatch, moment):
    arena, stage, own, child = late
    wait, others = arena.wait_verdict, []

    def waits(*arguments, **options):
        others.extend(told(child))
        return wait(*arguments, **options)

    def reduce(stats):
        if moment == "in reduce":
            signal.raise_signal(signal.SIGUSR1)
        return stats

    monkeypatch.setattr(arena, "wait_verdict", waits)
    if moment == "after reduce":
        read, calls = spillway.stage._Settlement._reduced, []

        def interrupted(settlement):
            calls.append(1)
            if len(calls) == 1:
                raise Interrupted
            return read(settlement)

        monkeypatch.setattr(spillway.stage._Settlement, "_reduced", interrupted)
    old = signal.signal(signal.SIGUSR1, raise_interrupted)
    try:
        with pytest.raises(Interrupted):
            settle([stage], arena=arena, process=0, round=1, reduce=reduce)
        assert signal.getsignal(signal.SIGUSR1) is raise_interrupted
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert others == ["True", "False"] and bits([own]) != bits([layer(5000, 3)]) and stage.state() == "final"


def test_a_second_signal_ends_reduce_and_rolls_this_process_back():
    own, before = layer(5000, 1), layer(5000, 1)

    def reduce(_):
        for _ in range(2):
            signal.raise_signal(signal.SIGUSR1)
        pytest.fail("the second signal was held back")

    old = signal.signal(signal.SIGUSR1, raise_interrupted)
    try:
        with Stage([tuple(own)], spillway.Adam()) as stage:
            stage.submit(1)
            with pytest.raises(Interrupted):
                settle([stage], reduce=reduce)
            assert is_over(stage) and bits([own]) == bits([before])
        assert signal.getsignal(signal.SIGUSR1) is raise_interrupted
    finally:
        signal.signal(signal.SIGUSR1, old)


@pytest.mark.parametrize("answer", [None, 1.0, (True,), ("a", "b"), (False, None)])
def test_a_wrong_answer_of_reduce_rolls_the_steps_back_with_a_message(answer):
    own, before = layer(5000, 1), layer(5000, 1)
    with Stage([tuple(own)], spillway.Adam()) as stage:
        stage.submit(1)
        with pytest.raises(spillway.InvalidArgumentError, match="reduce returned"):
            settle([stage], reduce=lambda mine: answer)
        assert is_over(stage) and bits([own]) == bits([before])
