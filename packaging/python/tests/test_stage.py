"""Proves that stages step to the bits of Adam.step, and that one verdict keeps or rolls back all of them."""

import os
import subprocess
import sys

import numpy as np
import pytest

import spillway
from spillway import errors
from spillway.arena import Arena
from spillway.stage import Stage, cores, settle  # noqa: F401, of the programs in strings


def layer(elements, seed, spans=4):
    random = np.random.default_rng(seed)
    return [
        random.standard_normal(elements, dtype=np.float32),
        random.standard_normal(elements, dtype=np.float32),
        *(np.zeros(elements, np.float32) for _ in range(spans - 2)),
    ]


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
        stage = Stage([(*own, arena.view("copies", "bf16"))], adam, arena=arena, region="copies", uint16_dtype="bf16", publish=publish)
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
        first, second = (
            Stage(
                [(*spans, view[500 * n : 500 * n + 500])],
                spillway.Adam(),
                arena=arena,
                region="copies",
                uint16_dtype="bf16",
                publish=publish,
            )
            for n, spans in enumerate(layers)
        )
        first.submit(1)
        with pytest.raises(spillway.BusyError, match="or has a stage that will"):
            second.submit(1)
        with pytest.raises(spillway.BusyError):
            arena.write_begin("copies", 1)
        first.wait(60)
        for end in (arena.write_end, lambda name: arena.write_abort(name, restored=True)):
            with pytest.raises(spillway.InvalidArgumentError, match="belongs to a stage"):
                end("copies")
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
    with pytest.raises(errors.OutOfOrderError, match=r"settle: stages\[1\]: the job of the stage will never be ready"):
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
        child = subprocess.Popen(
            [sys.executable, "-c", code, name, os.path.dirname(__file__)], env=child_environment, stdout=subprocess.PIPE, text=True
        )
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
        for options, words in [
            ({"event_fd": 2**32}, "event_fd is"),
            ({"word": (own[0].ctypes.data, 2**32)}, "value of word"),
            ({"word": (2**64, 1)}, "address of word"),
            ({"generation": 2**64}, "generation is"),
        ]:
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
