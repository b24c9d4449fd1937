"""The progress of long operations: calls of the program's function, or one line on a terminal after two seconds."""

import io

import pytest

import spillway
from spillway import _progress
from spillway._progress import Progress


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
