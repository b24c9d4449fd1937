"""Proves that a running process publishes its figures, and that `python -m spillway watch` and `metrics` show them: of a tier and of states
in host memory, of a process that was killed, and of none. No other user can read or plant a record, and no failure to publish is one of a
step."""

import json
import math
import os
import pathlib
import re
import resource
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest

import spillway
from spillway._live import command, place, prometheus, publisher, reader, screen

JOB = """
import os, sys, time, torch, spillway.torch
kind, folder = sys.argv[1:]
params = [torch.nn.Parameter(torch.ones(5000)), torch.nn.Parameter(torch.ones(100, dtype=torch.bfloat16))]
make = {
    "tier": lambda: spillway.torch.AdamW(params, tier=spillway.torch.TierOptions(folder, job="run7", durability="process")),
    "memory": lambda: spillway.torch.AdamW(params, master="f32"),
    "offload": lambda: spillway.torch.offload(params, torch.optim.AdamW, overlap=False),
    "staged": lambda: spillway.torch.Staged(torch.optim.NAdam, params),
}[kind]
optimizer, steps = make(), 0
while True:
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    steps += 1
    if kind == "tier" and steps % 10 == 0:
        optimizer.commit()
    if steps == 20:
        print("ready", flush=True)
    time.sleep(0.01)
"""


@pytest.fixture
def records(tmp_path, monkeypatch):
    """The directory of records, which only this test has: XDG_RUNTIME_DIR, where /dev/shm has a directory of this user."""
    folder = tmp_path / "records"
    monkeypatch.setattr(place, "directories", lambda: [str(folder)])
    return folder


@pytest.fixture
def commands(child_environment, tmp_path):
    """Runs a command of `python -m spillway`."""

    def run(*arguments, **extra):
        done = subprocess.run(
            [sys.executable, "-m", "spillway", *arguments], env={**child_environment, **extra}, capture_output=True, text=True, timeout=60
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


@pytest.fixture
def job(child_environment, tmp_path):
    """Starts a job; returns its process after some steps, the later ones of which publish."""
    pytest.importorskip("torch")
    started = []

    def start(kind, **extra):
        folder = tmp_path / "tier"
        folder.mkdir(exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-c", JOB, kind, str(folder)], env={**child_environment, **extra}, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (\S+)')
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\[\\"n])*)"')


def parsed(text):
    """The samples of Prometheus' text format, by name and labels. Every metric has its HELP and TYPE once, before its samples, and its
    samples stand together; counters end in _total; no sample stands twice."""
    assert text.endswith("\n")
    helped, kinds, samples, current = set(), {}, {}, None
    for line in text.splitlines():
        assert line
        if line.startswith("# HELP "):
            _, _, name, said = line.split(" ", 3)
            assert NAME.fullmatch(name) and name not in helped and said
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name in helped and name not in kinds and kind in ("counter", "gauge") and (kind == "counter") is name.endswith("_total")
            kinds[name], current = kind, name
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            name, labels, value = match[1], match[2] or "", float(match[3])
            assert name == current and math.isfinite(value)
            pairs = tuple((key, re.sub(r"\\(.)", lambda one: {"n": "\n"}.get(one[1], one[1]), said)) for key, said in LABEL.findall(labels))
            assert len({key for key, _ in pairs}) == len(pairs) and (name, pairs) not in samples
            samples[name, pairs] = value
    assert set(kinds) == helped
    return {name: {frozenset(pairs): value for (own, pairs), value in samples.items() if own == name} for name, _ in samples}


def of(samples, name, **labels):
    """The values of a metric whose labels have these."""
    return [value for pairs, value in samples[name].items() if set(labels.items()) <= pairs]


def settled(read, is_good):
    """What `read` returns once it is good; the job publishes once a second."""
    for _ in range(300):
        if is_good(found := read()):
            return found
        time.sleep(0.1)
    raise AssertionError(found)


def test_a_tier_is_watched_by_its_process_and_by_its_directories(job, commands, tmp_path):
    process = job("tier")
    read = lambda: parsed(commands("metrics", str(process.pid)).stdout)
    samples = settled(read, lambda found: of(found, "spillway_commits_total")[0] >= 1)
    assert of(samples, "spillway_steps_total", kind="AdamW", pid=str(process.pid))[0] >= 10
    assert of(samples, "spillway_step_seconds_total")[0] >= of(samples, "spillway_last_step_seconds")[0] > 0
    assert of(samples, "spillway_committed_step")[0] >= 10 and of(samples, "spillway_memory_bytes", where="host", of="buffers")[0] > 0
    assert of(samples, "spillway_path_written_bytes_total")[0] > 0 and of(samples, "spillway_exposed_seconds_total")[0] >= 0
    assert of(samples, "spillway_path_health", state="healthy") == [1] and of(samples, "spillway_path_health", state="failed") == [0]
    folder = tmp_path / "tier"
    (tmp_path / "link").symlink_to(folder)
    for given in (folder, folder / "run7", next((folder / "run7").iterdir()), tmp_path / "link", f"{folder}/"):
        done = commands("watch", str(given), "--count", "1")
        assert done.returncode == 0 and f"process {process.pid} " in done.stdout and "tier run7, rank 0 of 1" in done.stdout, done
        assert re.search(r"healthy, read .*, write .* GB/s$", done.stdout, re.M) and "exposed" in done.stdout and "commits" in done.stdout
    other = commands("watch", str(tmp_path), "--count", "1")
    assert (other.returncode, other.stdout) == (1, "") and "no process" in other.stderr and other.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "kind, said, sizes",
    [
        ("memory", "AdamW", {("host", "moments"): 8 * 5100, ("host", "masters"): 400}),
        ("offload", "offload, AdamW", {("host", "moments"): 8 * 5100, ("host", "masters"): 400}),
        ("staged", "Staged, NAdam", {}),
    ],
)
def test_states_in_host_memory_are_watched_by_their_process(job, commands, kind, said, sizes):
    process = job(kind)
    settled(lambda: parsed(commands("metrics", str(process.pid)).stdout), lambda found: of(found, "spillway_steps_total")[0] > 1)
    done = commands("watch", str(process.pid), "--count", "2", "--interval", "1.2")
    assert (
        done.returncode == 0
        and done.stdout.count(f"process {process.pid} ") == 2
        and f"{said}, states in host memory: step " in done.stdout
    )
    first, second = map(int, re.findall(r": step (\d+),", done.stdout))
    assert second > first > 1
    samples = parsed(commands("metrics", str(process.pid)).stdout)
    assert all(of(samples, "spillway_memory_bytes", where=where, of=kind) == [size] for (where, kind), size in sizes.items())


def test_a_process_that_was_killed_is_told_from_one_that_lives(job, commands):
    process = job("memory")
    watching = subprocess.Popen(
        [sys.executable, "-m", "spillway", "watch", str(process.pid), "--interval", "0.1"],
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(spillway.__file__).parents[1])},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert f"process {process.pid} " in watching.stdout.readline()
    process.kill()
    # Not before the wait: a zombie has ended too.
    settled(lambda: commands("metrics", str(process.pid)), lambda done: done.returncode == 1)
    process.wait()
    rest, _ = watching.communicate(timeout=60)
    assert watching.returncode == 0 and "has ended" in rest
    done = commands("watch", str(process.pid))
    assert done.returncode == 1 and "has ended; these are its last figures" in done.stdout and "AdamW" in done.stdout
    done = commands("metrics", str(process.pid))
    assert (done.returncode, done.stdout) == (1, "") and "has ended" in done.stderr


def test_a_process_that_ends_removes_its_record(job, commands):
    process = job("memory")
    process.send_signal(signal.SIGINT)
    process.wait()
    done = commands("watch", str(process.pid))
    assert (done.returncode, done.stdout) == (1, "") and "there is no such process" in done.stderr


def test_a_job_that_publishes_nothing_is_an_error_with_the_reason(job, commands):
    process = job("memory", SPILLWAY_WATCH="0")
    done = commands("watch", str(process.pid))
    assert done.returncode == 1 and "runs with SPILLWAY_WATCH=0" in done.stderr and done.stderr.count("\n") == 1
    for wrong in ("nowhere", "", "-", "12x", "99999999999"):
        done = commands("watch", "--", wrong)
        assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1, done
    assert commands("metrics").returncode == commands("watch", "1", "--count", "x").returncode == 2
    assert commands("watch", "1", "--interval", "0").returncode == 2


class Owner:
    """An optimizer that describes itself."""

    def __init__(self, described=None):
        self.described = described or {}

    def figures(self):
        return publisher.Figures("Test", self, lambda owner: owner.described)


@pytest.fixture
def fresh(monkeypatch):
    """A publisher that has published nothing."""
    made = publisher.Publisher()
    monkeypatch.setattr(publisher, "_publisher", made)
    yield made
    made.end()


def published(folder):
    return sorted(name for name in os.listdir(folder) if name.endswith(".json"))


def test_a_record_is_published_at_most_once_a_second(records, fresh):
    owner = Owner()
    figures = owner.figures()
    for _ in range(100):
        figures.stepped(time.perf_counter())
    (name,) = published(records)
    assert json.loads((records / name).read_text())["optimizers"][0]["steps"] == 1
    assert stat.S_IMODE(records.stat().st_mode) == 0o700 and stat.S_IMODE((records / name).stat().st_mode) == 0o600
    fresh.due = 0.0
    figures.stepped(time.perf_counter())
    assert json.loads((records / name).read_text())["optimizers"][0]["steps"] == 101
    assert os.listdir(records) == [name]


def test_an_optimizer_that_has_gone_is_not_published(records, fresh):
    owner = Owner()
    figures = owner.figures()
    figures.stepped(0.0)
    del owner, figures
    fresh.publish(0.0)
    assert json.loads((records / published(records)[0]).read_text())["optimizers"] == []


def test_an_optimizer_that_cannot_tell_its_figures_has_its_steps(records, fresh):
    owner = Owner()
    # As if the code were that of the package.
    figures = publisher.Figures("Test", owner, eval("lambda owner: owner.nothing", {"__name__": "spillway.test"}))
    figures.stepped(0.0)
    assert json.loads((records / published(records)[0]).read_text())["optimizers"][0]["steps"] == 1


def test_an_error_of_a_signal_handler_is_not_lost(records, fresh, monkeypatch):
    owner = Owner()
    figures = publisher.Figures("Test", owner, lambda owner: owner.nothing)
    with pytest.raises(AttributeError):
        figures.stepped(0.0)
    assert figures.steps == 1
    monkeypatch.setattr(place, "this_process", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        owner.figures().stepped(0.0)


def test_a_forked_child_has_a_record_of_its_own_and_leaves_that_of_its_parent(records, fresh):
    owner = Owner()
    figures = owner.figures()
    figures.stepped(0.0)
    before = published(records)
    child = os.fork()
    if not child:
        ending = 1
        try:
            assert publisher._publisher is not fresh and publisher._publisher.sources.list() == []
            publisher._publisher.end()
            own = Owner()
            mine = own.figures()
            mine.stepped(0.0)
            assert len(published(records)) == 2
            publisher._publisher.end()
            ending = 0
        finally:
            os._exit(ending)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert published(records) == before


def _foreign(folder):
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)


def _open_to_all(folder):
    folder.mkdir()
    folder.chmod(0o777)


def _link(folder):
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


def _file(folder):
    folder.write_text("")


@pytest.mark.parametrize("planted", [_foreign, _open_to_all, _link, _file], ids=lambda one: one.__name__)
def test_a_directory_that_others_may_use_is_not_used(records, fresh, planted, monkeypatch):
    if planted is _foreign and os.geteuid():
        pytest.skip("only root gives a directory to another user")
    planted(records)
    owner = Owner()
    figures = owner.figures()
    figures.stepped(0.0)
    assert figures.steps == 1 and fresh.due > time.perf_counter() + publisher.INTERVAL
    assert not [name for _, _, names in os.walk(records.parent, followlinks=True) for name in names if name.endswith(".json")]
    with pytest.raises(spillway.NotFoundError, match="records"):
        reader.find(str(os.getpid()))
    # The next directory takes its place.
    second = records.parent / "second"
    monkeypatch.setattr(place, "directories", lambda: [str(records), str(second)])
    figures.stepped(0.0)
    assert not second.exists()
    fresh.due = 0.0
    figures.stepped(0.0)
    assert len(published(second)) == 1 and [record.pid for record in reader.find(str(os.getpid()))] == [os.getpid()]


def test_a_full_or_missing_disk_is_no_failure_of_a_step(records, fresh, monkeypatch, tmp_path):
    owner = Owner()
    figures = owner.figures()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        figures.stepped(0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert figures.steps == 1 and os.listdir(records) == []
    for missing in ("/proc/nothing", "/nowhere/nothing", "/dev/null/nothing", str(tmp_path / ("x" * 300))):
        monkeypatch.setattr(publisher, "_publisher", publisher.Publisher())
        monkeypatch.setattr(place, "directories", lambda: [missing])
        figures.stepped(0.0)
    assert figures.steps == 5


def _planted(records, of=(), **changed):
    """A record of this process in which something is changed; `of`: what is changed of the process."""
    records.mkdir(mode=0o700, exist_ok=True)
    process = place.this_process()._replace(**dict(of))
    record = {"format": place.FORMAT, "time": time.time(), "command": "job", "optimizers": [], **changed}
    with place.opened(str(records)) as folder:
        place.write(folder, process, json.dumps(record).encode())
    return records / process.file


@pytest.mark.parametrize(
    "optimizers",
    [
        None,
        7,
        [3, "x", None],
        [{"kind": 3, "steps": "many", "memory": [1], "paths": {"a": 1}, "directories": 5}],
        [{"kind": "a\x1b[2J", "steps": -1, "seconds": True, "memory": {"host": {"x": "y"}, "device": 3}, "paths": [1, {"name": 5}]}],
        [{"kind": 'q"\\\n', "where": "\ud800", "steps": 10**400, "exposed_seconds": "x", "commits": [], "directories": ["\0", 5, ""]}],
    ],
)
def test_any_values_of_a_record_are_shown(records, optimizers):
    _planted(records, optimizers=optimizers, time="now", command="x\ny\x1b")
    (record,) = reader.find(str(os.getpid()))
    told = "\n".join(line.text for line in screen.lines(record, record))
    assert "\x1b" not in told and f"process {os.getpid()}  x?y?" in told
    assert of(parsed(prometheus.text([record])), "spillway_record_age_seconds", pid=str(os.getpid()))
    with pytest.raises(spillway.NotFoundError):
        reader.find(str(records))


def test_what_is_no_record_is_not_read(records):
    path = _planted(records)
    content = path.read_bytes()
    assert reader.find(str(os.getpid()))

    def lacks():
        with pytest.raises(spillway.NotFoundError):
            reader.find(str(os.getpid()))

    for other in (b"", b"{}", b"\xff\x00", content[:-1], b"[" * 10**5, b'{"format": 99}', b" " * (place.MOST_BYTES + 1)):
        path.write_bytes(other)
        lacks()
    path.unlink()
    os.mkfifo(path)
    lacks()
    path.unlink()
    (records / "other").write_bytes(content)
    path.symlink_to("other")
    lacks()
    path.unlink()
    path.mkdir()
    lacks()


def test_only_the_record_of_the_living_process_with_a_number_is_read(records):
    process = place.this_process()
    _planted(records, of={"start": process.start - 1})
    with pytest.raises(spillway.NotFoundError, match="has not ended a step"):
        reader.find(str(os.getpid()))
    _planted(records, of={"start": 5, "namespace": 1})
    (record,) = reader.find(str(os.getpid()))
    assert record.lives is None and "in another container" in next(iter(screen.lines(record, None))).text
    _planted(records)
    (record,) = reader.find(str(os.getpid()))
    assert record.lives is True and record.start == process.start


def test_of_processes_that_have_ended_the_newest_with_a_number_is_read(records):
    ended = subprocess.Popen(["true"])
    ended.wait()
    for start, told in ((7, 300.0), (8, 100.0), (9, 200.0)):
        _planted(records, of={"number": ended.pid, "start": start}, time=told)
    (record,) = reader.find(str(ended.pid))
    assert record.start == 7 and record.lives is False and "has ended" in next(iter(screen.lines(record, None))).text


@pytest.mark.parametrize("by", ["number", "directory"])
def test_a_watch_ends_with_its_process_where_an_earlier_one_left_a_record(records, capsys, tmp_path, by):
    living = subprocess.Popen(["sleep", "60"])
    start = place.start_of(living.pid)
    tier = [{"kind": "AdamW", "directories": [str(tmp_path / "tier")]}]
    (tmp_path / "tier").mkdir()
    _planted(records, of={"number": living.pid, "start": start - 1}, command="earlier", optimizers=tier)
    own = _planted(records, of={"number": living.pid, "start": start}, command="watched", optimizers=tier)

    def end():
        time.sleep(0.5)
        own.unlink()
        living.kill()
        living.wait()

    ending = threading.Thread(target=end)
    ending.start()
    try:
        code = command.watch([str(living.pid) if by == "number" else str(tmp_path / "tier"), "--interval", "0.1"])
    finally:
        ending.join()
    told = capsys.readouterr().out.splitlines()
    assert code == 0 and told[-1] == f"process {living.pid} has ended" and "watched" in told[0]
    assert not [line for line in told if "earlier" in line]


def test_records_of_dead_processes_are_removed_after_an_hour_and_foreign_ones_after_a_week(records, fresh):
    process, now = place.this_process(), time.time()
    hours, weeks = now - 2 * publisher.KEEPS_DEAD, now - 2 * publisher.KEEPS_FOREIGN
    for start, namespace, told in ((1, process.namespace, hours), (2, process.namespace, now), (3, 1, hours), (4, 1, weeks)):
        os.utime(_planted(records, of={"start": start, "namespace": namespace}), (told, told))
    (records / "9-9-9.json.7.part").write_text("")
    os.utime(records / "9-9-9.json.7.part", (hours, hours))
    Owner().figures().stepped(0.0)
    # One of another namespace may live, and one that died just now may be watched.
    assert sorted(os.listdir(records)) == sorted(
        [process._replace(start=2).file, process._replace(start=3, namespace=1).file, process.file]
    )


def test_rates_are_those_since_the_figures_before():
    path = reader.Path("/mnt/a", "draining", 3 * 10**9, 10**9, 2.0, 1.0)
    one = reader.Optimizer("AdamW", "tier", 10, 5.0, 0.5, 1.0, 2, 8, {("host", "buffers"): 10**9}, [path])
    record = reader.Published(7, 1, "train.py", True, 0.0, 100.0, [one], [])
    told = [line.text for line in screen.lines(record, None)]
    assert "step 10, last 500.0 ms, mean 500.0 ms, exposed 100.0 ms a step, 2 commits, the last of step 8" in told[1]
    assert told[2:] == ["    memory: host buffers 1.000 GB", "    /mnt/a: draining, read 1.50 GB/s, write 1.00 GB/s"]
    later = one._replace(steps=12, seconds=9.0, exposed_seconds=1.4, paths=[path._replace(read_bytes=7 * 10**9, reading_seconds=3.0)])
    told = [line.text for line in screen.lines(record._replace(time=101.0, optimizers=[later]), record)]
    assert "step 12, last 500.0 ms, mean 2.0 s, exposed 200.0 ms a step" in told[1] and "read 4.00 GB/s, write idle" in told[3]
    # A record that is shown again has the same rates.
    seen = command._Seen()
    shown = [[line.text for line in seen.lines([one])] for one in (record, record, *[record._replace(time=101.0, optimizers=[later])] * 2)]
    assert shown[0] == shown[1] != shown[2] == shown[3] == told
    # A process that began anew has no figures before.
    told = [line.text for line in screen.lines(record._replace(time=101.0, start=2), record)]
    assert "mean 500.0 ms" in told[1]


def test_on_a_terminal_rich_shows_the_lines_and_without_it_they_are_plain(records, fresh, tmp_path):
    pytest.importorskip("rich")
    Owner({"where": "states here"}).figures()
    _planted(records, optimizers=[{"kind": "AdamW", "where": "here", "steps": 3, "seconds": 1.0}])
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "rich.py").write_text("raise ImportError")
    code = (
        "import sys; from spillway._live import place, command; place.directories = lambda: [sys.argv[1]]; "
        "sys.exit(command.watch([sys.argv[2], '--count', '2', '--interval', '0.1']))"
    )
    root = str(pathlib.Path(spillway.__file__).parents[1])
    shown = {}
    for name, paths in (("rich", root), ("plain", f"{tmp_path / 'without'}:{root}")):
        master, slave = os.openpty()
        arguments = [sys.executable, "-c", code, str(records), str(os.getpid())]
        environment = {**os.environ, "PYTHONPATH": paths, "TERM": "xterm", "COLUMNS": "200"}
        assert subprocess.run(arguments, env=environment, stdout=slave, stderr=subprocess.PIPE, timeout=60).returncode == 0
        os.close(slave)
        shown[name] = os.read(master, 65536).decode()
        os.close(master)
        assert "AdamW, here: step 3" in shown[name]
    assert "\x1b" in shown["rich"] and "\x1b" not in shown["plain"]


def test_what_a_step_waited_is_a_part_of_its_seconds(records, fresh):
    figures = Owner().figures()
    figures.stepped(time.perf_counter())
    assert "exposed_seconds" not in figures.told()
    begun = time.perf_counter() - 1.0
    for waited in (0.25, 100.0, -1.0):
        before = figures.exposed_seconds or 0.0, figures.seconds
        figures.stepped(begun, waited)
        exposed, seconds = figures.exposed_seconds - before[0], figures.seconds - before[1]
        assert exposed == pytest.approx(min(max(waited, 0.0), seconds)) and figures.last_seconds == pytest.approx(seconds)
    # The rest of a step, which a later call completes.
    before = figures.steps, figures.last_seconds
    figures.completed(time.perf_counter() - 2.0, 2.0)
    assert figures.steps == before[0] and figures.last_seconds >= before[1] + 2.0
    assert figures.exposed_seconds < figures.seconds


def test_waits_outside_of_steps_are_not_exposed(tmp_path):
    torch = pytest.importorskip("torch")
    import spillway.torch

    param = torch.nn.Parameter(torch.ones(200_000))
    optimizer = spillway.torch.AdamW([param], tier=spillway.torch.TierOptions(str(tmp_path), job="run"), overlap=True)
    for _ in range(5):
        param.sum().backward()
        optimizer.step()
        optimizer.commit()
    tiered = optimizer._home.tiered
    assert 0 <= tiered._figures.exposed_seconds <= tiered._figures.seconds
    assert tiered._figures.exposed_seconds < tiered.swap.stats().exposed_seconds
    optimizer.close()


def test_the_forward_that_completes_a_step_counts_with_it():
    torch = pytest.importorskip("torch")
    import spillway.torch

    model = torch.nn.Linear(100, 100)
    optimizer = spillway.torch.offload(model, torch.optim.AdamW, model=model, verdict="forward", max_norm=1.0)
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    before = optimizer._figures.seconds
    model(torch.ones(1, 100))
    assert optimizer._figures.steps == 1 and optimizer._figures.seconds > before
    assert 0 < optimizer._figures.exposed_seconds <= optimizer._figures.seconds
    optimizer.close()


def test_two_threads_may_publish_at_once(records, fresh):
    owners = [Owner() for _ in range(8)]
    figures = [owner.figures() for owner in owners]

    def many(own):
        for _ in range(50):
            own._due = fresh.due = 0.0
            own.stepped(0.0)

    threads = [threading.Thread(target=many, args=(own,)) for own in figures]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fresh.due < time.perf_counter() + 2 * publisher.INTERVAL
    assert sum(own.steps for own in figures) == 400 and len(published(records)) == len(os.listdir(records)) == 1
    (record,) = reader.find(str(os.getpid()))
    assert len(record.optimizers) == 8
