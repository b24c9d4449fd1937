"""The progress of long operations: calls of the program's function, or one line on a terminal after two seconds."""

import io
import threading

import pytest

import spillway
from spillway import _progress
from spillway._progress import Progress, Watched, each
from spillway._snapshot import bytes_to_import


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """The seconds that the progress sees."""
    now = [100.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now[0])
    return now


def test_a_function_gets_every_move_and_no_line_is_written(monkeypatch, clock):
    terminal, told = Terminal(), []
    monkeypatch.setattr("sys.stderr", terminal)
    with Progress("filling", 30, lambda *moved: told.append(moved)) as progress:
        for size in (10, 20):
            clock[0] += 9
            progress.moved(size)
    assert (told, terminal.getvalue()) == ([(10, 30), (30, 30)], "")


def test_a_terminal_gets_a_line_after_two_seconds_that_goes_at_the_end(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Progress("filling the tier", 8 * 10**9) as progress:
        progress.moved(10**9)
        assert terminal.getvalue() == ""
        clock[0] += 3
        progress.moved(10**9)
        progress.moved(10**9)
        assert terminal.getvalue() == "\r\033[Kspillway: filling the tier: 2.0 of 8.0 GB"
    assert terminal.getvalue().endswith("GB\r\033[K")


def test_each_item_moves_the_bytes_that_it_has_before(monkeypatch, clock):
    terminal, sizes = Terminal(), {"a": 10**9, "b": 3 * 10**9}
    monkeypatch.setattr("sys.stderr", terminal)
    for item in each("locking memory", [*sizes], lambda item: sizes[item]):
        clock[0] += 3
        sizes[item] = 0
    lines = [f"\r\033[Kspillway: locking memory: {done} of 4.0 GB" for done in ("1.0", "4.0")]
    assert terminal.getvalue() == "".join(lines) + "\r\033[K"


def test_an_export_tells_its_bytes(tmp_path):
    (tmp_path / "a").mkdir()
    with spillway.Tier([tmp_path / "a"], job="x", durability="process") as tier:
        size = 3 << 20
        tier.wait(tier.put(tier.define("w", [size]), [bytearray(size)]))
        tier.commit(1)
        told = []
        assert tier.export(tmp_path / "export", progress=lambda *moved: told.append(moved)) == 1
        assert told[-1][0] == told[-1][1] >= size and told == sorted(told)
        told.clear()
        with tier.snapshot(tmp_path / "slow", bytes_per_second=4 << 20) as snapshot:
            assert snapshot.wait(progress=lambda *moved: told.append(moved)) == 1
        assert len(told) > 2 and told == sorted(told) and told[0][0] < told[-1][0] == told[-1][1]
        with tier.snapshot(tmp_path / "slower", bytes_per_second=1 << 20) as snapshot, pytest.raises(spillway.TimedOutError):
            snapshot.wait(0.3)


@pytest.fixture
def exports(tmp_path):
    """A directory and a file of the extents "a" and "b" of 1 and 2 MiB."""
    (tmp_path / "tier").mkdir()
    with spillway.Tier([tmp_path / "tier"], job="x", durability="process") as tier:
        for name, size in (("a", 1 << 20), ("b", 2 << 20)):
            tier.wait(tier.put(tier.define(name, [size]), [bytearray(size)]))
        tier.commit(1)
        tier.export(tmp_path / "export")
        with tier.export_tensors(tmp_path / "export.safetensors") as export:
            export.wait()
    return tmp_path / "export", tmp_path / "export.safetensors"


def test_an_import_tells_its_bytes(exports, tmp_path):
    (tmp_path / "other").mkdir()
    with spillway.Tier([tmp_path / "other"], job="y", durability="process") as tier:
        for export in exports:
            told = []
            assert tier.import_from(export, progress=lambda *moved: told.append(moved)) == 1
            assert told[-1] == (3 << 20, 3 << 20) and told == sorted(told)
        told = []
        with pytest.raises(spillway.SpillwayError):
            tier.import_from(tmp_path / "nothing", progress=lambda *moved: told.append(moved))
        assert told == []


def test_bytes_to_import_are_those_of_the_extents_that_are_taken(exports, tmp_path):
    for export in map(str, exports):
        assert [bytes_to_import(export, names) >> 20 for names in (None, ["a"], ["b*"], ["?"], ["."], ["c", "b"])] == [3, 1, 2, 3, 0, 2]
    (tmp_path / "foreign").write_bytes((44).to_bytes(8, "little") + b'{"w":{"dtype":"U8","data_offsets":[10,15]}} ' + bytes(15))
    assert bytes_to_import(str(tmp_path / "foreign"), ["w"]) == 5
    (tmp_path / "damaged").write_bytes(b"\xff" * 20)
    assert [bytes_to_import(str(tmp_path / name), None) for name in ("damaged", "missing")] == [0, 0]


def test_a_call_is_watched_by_a_thread_until_it_ends():
    seen, told, done = threading.Event(), [], iter([5, 15, 99])

    def tell(*moved):
        told.append((*moved, threading.current_thread() is threading.main_thread()))
        if len(told) == 2:
            seen.set()
            assert watched._over.wait(60)

    with Watched("reading", lambda: 50, lambda: next(done), tell) as watched:
        assert seen.wait(60)
    assert told == [(10, 50, False), (50, 50, False), (50, 50, True)]


def test_memory_that_is_taken_and_a_fill_tell_their_bytes(tmp_path):
    told = []

    def tell(*moved):
        told.append(moved)

    memory = spillway.pinned(64 << 18, progress=tell)
    assert told[-1] == (64 << 20, 64 << 20) and told == sorted(told) and len(memory) == 64 << 18
    told.clear()
    with spillway.Tier([tmp_path], job="x", durability="process") as tier, spillway.Swap(tier, [1 << 18] * 3, progress=tell) as swap:
        assert told[-1] == (swap.budget.host_bytes,) * 2 and told == sorted(told)
        told.clear()
        swap.fill([(None, None, None)] * 3, progress=tell)
        assert told[-1] == (9 << 20, 9 << 20) and told == sorted(told)
        with pytest.raises(KeyError):
            swap.fill([(None, None, None)] * 3, progress=lambda *moved: {}[moved])
        swap.commit(1)
        swap.close()
        with pytest.raises(KeyError):
            spillway.Swap(tier, [1 << 18] * 3, progress=lambda *moved: {}[moved])
        spillway.Swap(tier, [1 << 18] * 3).close()


def test_what_the_function_of_a_watched_call_raises_comes_after_the_call():
    raised, calls = threading.Event(), []

    def tell(*moved):
        raised.set()
        raise KeyError(moved)

    with pytest.raises(KeyError), Watched("reading", lambda: 50, lambda: 0, tell):
        assert raised.wait(60)
        calls.append("ended")
    assert calls == ["ended"]


def test_a_failed_call_tells_nothing_more():
    told = []
    with pytest.raises(OSError), Watched("reading", lambda: 50, lambda: 0, lambda *moved: told.append(moved)):
        raise OSError
    assert (50, 50) not in told


def test_a_call_that_nobody_hears_has_no_thread(monkeypatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    before = threading.active_count()
    with Watched("reading", lambda: 50, lambda: pytest.fail("nobody asks")):
        assert threading.active_count() == before


@pytest.mark.parametrize("stderr, rank", [(io.StringIO(), "0"), (None, "0"), (Terminal(), "3")], ids=["file", "closed", "other process"])
def test_nothing_else_gets_a_line(monkeypatch, clock, stderr, rank):
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("LOCAL_RANK", rank)
    with Progress("filling", 10) as progress:
        clock[0] += 9
        progress.moved(10)
    assert stderr is None or stderr.getvalue() == ""


def test_a_terminal_that_has_gone_ends_nothing(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Progress("filling", 10) as progress:
        clock[0] += 9
        terminal.close()
        progress.moved(5)
        progress.moved(5)
