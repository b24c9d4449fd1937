"""Proves that stages step to the bits of Adam.step, and that one verdict keeps or rolls back all of them."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import spillway
import spillway.stage
from spillway import errors
from spillway.arena import Arena
from spillway.stage import Stage, cores, settle


def layer(elements, seed, spans=4):
    random = np.random.default_rng(seed)
    return [random.standard_normal(elements, dtype=np.float32), random.standard_normal(elements, dtype=np.float32),
            *(np.zeros(elements, np.float32) for _ in range(spans - 2))]


def bits(layers):
    return [span.tobytes() for spans in layers for span in spans]


def test_sixteen_stages_have_the_bits_of_one_call_and_their_threads_fit_the_pool(child_environment):
    """In a process of its own, whose pool has two threads."""
    code = """if True:
        import sys
        sys.path.insert(0, sys.argv[1])
        from test_stage import *
        layers, serial = ([layer(60_000 + n, n) for n in range(16)] for _ in range(2))
        adam, alone = spillway.Adam(lr=0.01), spillway.Adam(lr=0.01)
        stages = [Stage([tuple(spans)], adam, priority=n % 3, cores=n % 3) for n, spans in enumerate(layers)]
        for step in range(1, 6):
            if step == 3:
                layers[5][1][100] = np.nan
            for stage in stages:
                stage.submit(step)
            outcome = settle(stages)
            if step == 3:
                assert not outcome.kept and outcome.nonfinite
                layers[5][1][100] = serial[5][1][100]
            else:
                assert outcome.kept
                wanted = alone.step([tuple(spans) for spans in serial], number=step, return_stats=True)
                assert abs(wanted.sum_squares - outcome.sum_squares) < 1e-9 * wanted.sum_squares
            assert bits(layers) == bits(serial)
        found = cores()
        assert found.threads == 2 and 1 <= found.peak_threads <= 2 and found.in_use == found.waiting == 0, found
        [stage.close() for stage in stages]
        print("good")"""
    environment = {**child_environment, "SPILLWAY_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code, os.path.dirname(__file__)], env=environment, capture_output=True, text=True)
    assert done.stdout == "good\n", done.stderr


@pytest.mark.parametrize("publish", ["final", "staged"])
def test_copies_in_an_arena_are_those_of_whole_steps(publish):
    own, serial = layer(5000, 1), layer(5000, 1)
    adam, alone, copy = spillway.Adam(lr=0.01), spillway.Adam(lr=0.01), np.zeros(5000, np.uint16)
    with Arena.create(None, {"copies": 10_000}) as arena, Arena.open_fd(arena.fileno()) as reader:
        stage = Stage([(*own, arena.view("copies", "bf16"))], adam, arena=arena, region="copies", uint16_dtype="bf16",
                      publish=publish)
        for step in (1, 2, 3):
            stage.submit(step, lr=0.01 * step, grad_scale=0.5)
            assert not stage.wait(60).nonfinite
            if publish == "final":
                assert reader.read("copies", "bf16", timeout=0)[0] == step - 1
            else:
                with pytest.raises(spillway.TimedOutError):
                    reader.read("copies", "bf16", timeout=0)
            stage.commit()
            stage.finish(60)
            alone.lr = 0.01 * step
            alone.step([(*serial, copy)], grad_scale=0.5, number=step, uint16_dtype="bf16")
            generation, values = reader.read("copies", "bf16", timeout=0)
            assert generation == step and (values == copy).all() and bits([own]) == bits([serial])
        stage.submit(4)
        stage.wait(60)
        stage.rollback()
        stage.finish(60)
        generation, values = reader.read("copies", "bf16", timeout=0)
        assert generation == 3 and (values == copy).all() and bits([own]) == bits([serial])
        with pytest.raises(spillway.InvalidArgumentError, match="target.generation"):
            stage.submit(3)
        stage.close()


@pytest.mark.parametrize("publish", ["final", "staged"])
def test_a_region_has_one_stage_or_writer_at_a_time(publish):
    layers = [layer(500, n) for n in range(2)]
    with Arena.create(None, {"copies": 2000}) as arena:
        view = arena.view("copies", "bf16")
        first, second = (Stage([(*spans, view[500 * n:500 * n + 500])], spillway.Adam(), arena=arena, region="copies",
                               uint16_dtype="bf16", publish=publish) for n, spans in enumerate(layers))
        first.submit(1)
        with pytest.raises(spillway.BusyError, match="or has a stage that will"):
            second.submit(1)
        with pytest.raises(spillway.BusyError):
            arena.write_begin("copies", 1)
        assert settle([first]).kept and arena.region("copies").generation == 1
        second.submit(2)
        assert settle([second]).kept and arena.region("copies").generation == 2
        arena.write_begin("copies", 3)
        arena.write_abort("copies")
        before = bits(layers)
        with pytest.raises(errors.TornError, match="cover only a part"):
            first.submit(3)
        assert bits(layers) == before
        [stage.close() for stage in (first, second)]
        del view, first, second


def test_a_stage_starts_after_its_event():
    own, before = layer(5000, 2), layer(5000, 2)
    reader, writer = os.pipe()
    word = np.zeros(1, np.uint32)
    with Stage([tuple(own)], spillway.Adam()) as stage:
        stage.submit(1, event_fd=reader)
        with pytest.raises(spillway.TimedOutError):
            stage.wait(0.01)
        assert stage.state() == "pending" and bits([own]) == bits([before])
        os.write(writer, b"x")
        stage.wait(60)
        assert stage.state() == "speculative"
        stage.rollback()
        stage.finish(60)
        assert bits([own]) == bits([before])
        stage.submit(1, word=(word.ctypes.data, 1))
        with pytest.raises(spillway.BusyError):
            stage.commit()
        word[0] = 1
        assert stage.wait(60) == stage.verdict
        with pytest.raises(errors.OutOfOrderError):
            stage.submit(2)
    assert bits([own]) == bits([before]), "the close rolls it back"
    os.close(reader), os.close(writer)


def test_a_stage_that_fails_rolls_back_the_others():
    layers, before = [layer(5000, n) for n in range(3)], [layer(5000, n) for n in range(3)]
    stages = [Stage([tuple(spans)], spillway.Adam()) for spans in layers]
    reader, writer = os.pipe()
    for n, stage in enumerate(stages):
        stage.submit(1, event_fd=reader if n == 1 else None)
    os.close(writer)
    with pytest.raises(errors.OutOfOrderError, match="will never be ready"):
        settle(stages, timeout=60)
    assert bits(layers) == bits(before)
    os.close(reader)
    for stage in stages:
        stage.submit(1)
    assert settle(stages).kept and bits(layers) != bits(before)
    [stage.close() for stage in stages]


def test_processes_settle_together(child_environment):
    code = """if True:
        import sys
        sys.path.insert(0, sys.argv[2])
        from test_stage import *
        own, before = layer(5000, 9), layer(5000, 9)
        with Arena.open(sys.argv[1], write=True, timeout=60) as arena, Stage([tuple(own)], spillway.Adam()) as stage:
            arena.join(1)
            for step in (1, 2, 3):
                stage.submit(step)
                print(settle([stage], arena=arena, process=1, round=step, timeout=60).kept, bits([own]) == bits([before]))"""
    own, name = layer(5000, 3), f"stage-{os.getpid()}"
    with Arena.create(name, {"unused": 1}, processes=2) as arena, Stage([tuple(own)], spillway.Adam()) as stage:
        arena.join(0)
        child = subprocess.Popen([sys.executable, "-c", code, name, os.path.dirname(__file__)], env=child_environment,
                                 stdout=subprocess.PIPE, text=True)
        kept = []
        for step in (1, 2, 3):
            own[1][0] = np.inf if step == 1 else 1.0
            stage.submit(step)
            kept.append(settle([stage], arena=arena, process=0, round=step, timeout=60).kept)
        assert kept == [False, True, True]
        assert child.communicate()[0].split() == ["False", "True", "True", "False", "True", "False"]
        # The other process has ended: this one rolls back.
        before = bits([own])
        stage.submit(4)
        with pytest.raises(errors.PeerEndedError):
            settle([stage], arena=arena, process=0, round=4)
        assert bits([own]) == before


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
    """An arena, a stage that is submitted, and a process that settles round 1 when it is told to."""
    own, name = layer(5000, 3), f"late-{os.getpid()}"
    with Arena.create(name, {"unused": 1}, processes=2) as arena, Stage([tuple(own)], spillway.Adam()) as stage:
        arena.join(0)
        child = subprocess.Popen([sys.executable, "-c", LATE, name, os.path.dirname(__file__)], env=child_environment,
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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
        "timeout": ([stage], {"timeout": "soon"}, "timeout")}[wrong]
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
        for options, words in [({"arena": 7}, "arena is a int"), ({"arena": arena, "process": 9, "round": 1}, "process"),
                               ({"arena": arena, "process": "a"}, "process is"), ({"arena": arena, "round": None}, "round is")]:
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


def test_shadows_hold_the_new_state_and_are_exchanged():
    own, serial = layer(5000, 4), layer(5000, 4)
    shadow = [np.empty(5000, np.float32) for _ in range(3)]
    alone = spillway.Adam()
    with Stage([tuple(own)], spillway.Adam(), undo="shadow", shadow=[tuple(shadow)]) as stage:
        for step in (1, 2):
            stage.submit(step)
            assert settle([stage]).kept
            stage.exchange()
            alone.step([tuple(serial)], number=step)
            assert bits([stage.tensors[0]]) == bits([serial])


def test_nodes_reduce_before_the_verdict():
    own, before = layer(5000, 6), layer(5000, 6)
    with Stage([tuple(own)], spillway.Adam()) as stage:
        stage.submit(1)
        outcome = settle([stage], reduce=lambda mine: (True, mine.sum_squares))
        assert not outcome.kept and outcome.nonfinite and bits([own]) == bits([before])
        stage.submit(1)
        outcome = settle([stage], reduce=lambda mine: (False, 2 * mine.sum_squares))
        assert outcome.kept and outcome.sum_squares == 2 * stage.verdict.sum_squares


def test_arguments_are_checked():
    own = layer(10, 1)
    with pytest.raises(spillway.InvalidArgumentError, match="publish"):
        Stage([tuple(own)], spillway.Adam(), publish="speculative")
    with pytest.raises(spillway.InvalidArgumentError, match="pass a spillway.Adam"):
        Stage([tuple(own)], spillway.Lion())
    with pytest.raises(spillway.InvalidArgumentError, match="belong together"):
        Stage([tuple(own)], spillway.Adam(), region="a")
    with Stage([tuple(own)], spillway.Adam()) as stage:
        with pytest.raises(spillway.InvalidArgumentError, match="number is 0"):
            stage.submit(0)
        with pytest.raises(spillway.InvalidArgumentError, match="this Stage has no shadow"):
            stage.exchange()
        with pytest.raises(errors.OutOfOrderError):
            stage.wait()
        for options, words in [({"event_fd": 2**32}, "event_fd is"), ({"word": (own[0].ctypes.data, 2**32)}, "value of word"),
                               ({"word": (2**64, 1)}, "address of word"), ({"generation": 2**64}, "generation is")]:
            with pytest.raises(spillway.InvalidArgumentError, match=words):
                stage.submit(1, **options)
        with pytest.raises(spillway.InvalidArgumentError, match="step is"):
            stage.submit(2**64)
        for timeout in (float("inf"), float("nan")):
            with pytest.raises(spillway.InvalidArgumentError, match="finite number of seconds"):
                stage.finish(timeout)
        assert stage.state() == "missing"
    for options in ({"cores": 2**32 + 1}, {"priority": 2**31}):
        with pytest.raises(spillway.InvalidArgumentError, match="pass an integer"):
            Stage([tuple(own)], spillway.Adam(), **options)
