"""Proves that an object store works as a path of a tier. Committed data is read back bit for bit, beside a directory
or alone, after a kill and without its server. Errors name the damage, the process that holds the store, or the
fault, and nothing is left behind. Requests to a failing server are retried, a hanging server causes a timeout, and a
truncated answer is never accepted."""

import collections
import ctypes
import errno
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import pytest
from interrupts import Ticking

import spillway
from spillway import tier as tier_module
from spillway.window import Stored, Window

pytest.importorskip("boto3")
import object_store
import test_swap

SIZES = (300_000, 10)
_numbers = itertools.count(1)


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in object_store.VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "nowhere")
    try:
        spillway.Tier(["s3://bucket"], job="test")
    except spillway.UnsupportedError as error:
        pytest.skip(str(error))
    except spillway.InvalidArgumentError as error:
        assert "nowhere" in str(error)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    server = object_store.Server(tmp_path_factory.mktemp("store"))
    yield server
    server.kill()


@pytest.fixture
def store(shared, monkeypatch):
    """A bucket for this test alone: the server, the bucket's name, and a path in it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", shared.endpoint)
    bucket = shared.bucket(f"bucket-{next(_numbers)}")
    return collections.namedtuple("Store", "server bucket path")(shared, bucket, f"s3://{bucket}/some/prefix")


@pytest.fixture
def scripted(monkeypatch):
    """scripted(judge): the path of a store that calls `judge` before each request."""
    servers = []

    def start(judge):
        servers.append(object_store.Scripted(judge))
        monkeypatch.setenv("AWS_ENDPOINT_URL", servers[-1].endpoint)
        return "s3://bucket/prefix"

    yield start
    for server in servers:
        server.close()


def contents(step):
    return [np.random.default_rng([step, n]).integers(0, 256, size, np.uint8) for n, size in enumerate(SIZES)]


def open_tier(paths, **settings):
    return spillway.Tier(paths, job="test", block_bytes=16 << 10, **settings)


def put(tier, step, path=None, extent="weights"):
    number = tier.define(extent, SIZES)
    tier.wait(tier.put(number, contents(step), path=path))
    return number


def get(tier, extent="weights"):
    found = [np.zeros(size, np.uint8) for size in SIZES]
    tier.wait(tier.get(tier.define(extent, SIZES), found))
    return found


def holds(tier, step, extent="weights"):
    return all(np.array_equal(a, b) for a, b in zip(get(tier, extent), contents(step)))


def test_a_proxy_of_the_environment_is_not_asked(store, monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with open_tier([store.path]) as tier:
        put(tier, 1)
        tier.commit(1)


@pytest.mark.parametrize("beside", [True, False])
def test_what_was_committed_is_found_again(store, tmp_path, beside):
    paths = [str(tmp_path), store.path] if beside else [store.path]
    for step in range(1, 5):
        with open_tier(paths) as tier:
            if step > 1:
                assert tier.opened.step == step - 1 and tier.opened.payload == b"step %d" % (step - 1)
                assert holds(tier, step - 1) and holds(tier, step - 1, "other")
            extent = put(tier, step, path=len(paths) - 1)
            other = tier.define("other", SIZES)
            tier.wait(tier.put_striped(other, contents(step), [7] * len(paths)))
            tier.commit(step, b"step %d" % step)
            tier.wait(tier.put(extent, contents(99)))
    with open_tier(paths, mode="resume") as tier:
        assert tier.opened.step == 4 and holds(tier, 4) and tier.verify() == 40
        report = tier.paths()[-1]
        assert report.directory.startswith(store.path + "/test/") and report.health == "healthy" and report.blocks > 20
        assert tier.export(tmp_path / "plain") == 4
        put(tier, 5)
        tier.commit(5)
        assert tier.import_from(tmp_path / "plain") == 4 and holds(tier, 4)
        with pytest.raises(spillway.InvalidArgumentError, match="local directory"):
            tier.export(store.path)
        tier.destroy()
    assert store.server.keys(store.bucket) == []


def test_the_update_on_a_store_has_the_bits_of_one_in_memory(store, tmp_path):
    with test_swap.open_tier([tmp_path, store.path]) as tier, test_swap.open_swap(tier, ratio=[1, 1]) as swap:
        swap.fill([(p, None, None) for p in test_swap.first()])
        adam = spillway.Adam(lr=1e-2, weight_decay=0.1)
        for number in range(1, 4):
            test_swap.step(swap, adam, number)
            swap.commit(number)
        assert test_swap.same(test_swap.everything(swap), test_swap.in_memory(3)[0])
        assert all(path.written_bytes > 100_000 for path in tier.paths())


def test_a_changed_byte_is_named(store):
    with open_tier([store.path]) as tier:
        put(tier, 1)
        tier.commit(1)
        # The file holds the chunk's header, and then its blocks in order.
        key = [key for key in store.server.keys(store.bucket) if "/data/" in key][1]
        content = bytearray(store.server.read(store.bucket, key))
        content[5 * (16 << 10) + 3] ^= 1
        store.server.write(store.bucket, key, content)
        where = rf"s3://{store.bucket}/some/prefix/test/.*/rank-0/data.*\"weights\", block 5 at offset \d+"
        for look in (lambda: get(tier), tier.verify):
            with pytest.raises(spillway.CorruptError, match=where):
                look()


def run_child(environment, code):
    start = f"import os, signal, sys; sys.path[:0] = [{os.path.dirname(__file__)!r}]\nimport test_object_store as t\n"
    return subprocess.Popen([sys.executable, "-c", start + code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_living_owner_is_respected_and_a_dead_one_followed(store, child_environment):
    child = run_child(
        {**child_environment, **os.environ, "PYTHONPATH": child_environment["PYTHONPATH"]},
        f"tier = t.open_tier([{store.path!r}])\n"
        "for step in range(1, 100):\n"
        "    t.put(tier, step)\n"
        "    tier.commit(step)\n"
        "    print(step, flush=True)\n"
        "    step == 3 and sys.stdin.read(1)\n",
    )
    assert [int(child.stdout.readline()) for _ in range(3)] == [1, 2, 3]
    who = f"process {child.pid} on .*delete s3://{store.bucket}/.*/lock/.* to free it"
    with pytest.raises(spillway.TierLockedError, match=who):
        open_tier([store.path])
    with pytest.raises(spillway.TierLockedError):
        tier_module.collect(store.path, job="test")
    child.stdin.write("x")
    child.stdin.flush()
    time.sleep(0.2)
    child.send_signal(signal.SIGKILL)
    # No wait for the process: a zombie is dead.
    last = ([3] + [int(line) for line in child.stdout.read().split()])[-1]
    with open_tier([store.path], mode="resume") as tier:
        assert tier.opened.step in (last, last + 1) and holds(tier, tier.opened.step) and tier.verify() == 20
    assert tier_module.collect(store.path, job="test") and not tier_module.collect(store.path, job="test")
    assert store.server.keys(store.bucket) == [] and child.wait() == -signal.SIGKILL


def test_a_run_goes_on_without_its_server(tmp_path, monkeypatch):
    server = object_store.Server(tmp_path)
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        paths = [str(tmp_path), f"s3://{server.bucket('bucket')}/x"]
        with open_tier(paths) as tier:
            for step in range(1, 6):
                if step == 3:
                    server.kill()
                put(tier, step, path=1)
                tier.commit(step)
                assert holds(tier, step)
            assert [path.health for path in tier.paths()] == ["healthy", "failed"]
        with pytest.raises(spillway.IoError, match="no response"):
            open_tier(paths)
        with open_tier(paths, degraded=True) as tier:
            assert tier.opened.step == 5 and holds(tier, 5)
    finally:
        server.kill()


def test_what_is_missing_is_said(store, monkeypatch):
    with pytest.raises(spillway.NotFoundError, match="s3://no-such-bucket/a.*404"):
        open_tier(["s3://no-such-bucket/a"])
    with pytest.raises(spillway.NoStateError, match=store.path):
        open_tier([store.path], mode="resume")
    assert store.server.keys(store.bucket) == []
    with pytest.raises(spillway.InvalidArgumentError, match="names no bucket"):
        open_tier(["s3:///a"])
    with pytest.raises(spillway.IoError, match="no response from the server"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        open_tier([store.path])
    for name in ("AWS_ENDPOINT_URL", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name)
        monkeypatch.delenv("AWS_REGION", raising=False)
        with pytest.raises(spillway.InvalidArgumentError, match="AWS_REGION" if name == "AWS_ENDPOINT_URL" else name):
            open_tier([store.path])


def test_a_server_in_trouble_is_asked_again(scripted):
    seen = collections.Counter()

    def judge(method, key):
        seen[method, key] += 1
        if "/data/" not in key:
            return None
        if method == "PUT":
            return {1: 503, 2: 500, 3: 429}.get(seen[method, key])
        return "cut" if method == "GET" and seen[method, key] == 1 else None

    with open_tier([scripted(judge)]) as tier:
        put(tier, 1)
        tier.commit(1)
        assert holds(tier, 1) and tier.paths()[0].health == "healthy"
    assert {count for (method, key), count in seen.items() if method == "PUT" and "/data/" in key} == {4}


@pytest.mark.parametrize(
    "status, words",
    [(403, "HTTP 403 Told: by the test"), (500, "HTTP 500 Told: by the test .4 attempts"), (507, "HTTP 507"), (301, "HTTP 301")],
)
def test_a_refusal_is_named(scripted, status, words):
    path = scripted(lambda method, key: status if method == "PUT" and "/data/" in key else None)
    with open_tier([path]) as tier:
        with pytest.raises(spillway.IoError, match=f'writing .* at offset .* of {path}/.*{words}.*"weights"') as caught:
            put(tier, 1)
        expected = {403: "EACCES", 507: "ENOSPC"}.get(status, "EIO")
        assert caught.value.errno == getattr(errno, expected)


def test_a_wrong_key_is_refused(scripted):
    """Answers like a server that does not know the key of a signature; moto accepts all keys."""
    with pytest.raises(spillway.IoError, match="opening s3://bucket/prefix.*HTTP 403") as caught:
        open_tier([scripted(lambda method, key: 403)])
    assert caught.value.errno == errno.EACCES


def test_a_server_that_hangs_is_given_up(scripted):
    path = scripted(lambda method, key: "hang" if method == "PUT" and "/data/" in key else None)
    # The other path is in memory: a sync of a busy disk takes longer than the timeout.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other, open_tier([other, path], io_timeout=5) as tier:
        began = time.monotonic()
        put(tier, 1, path=1)
        tier.commit(1)
        # A request without this timeout would last 60 s.
        assert holds(tier, 1) and time.monotonic() - began < 50
        assert [report.health for report in tier.paths()] == ["healthy", "failed"]


def test_a_handler_ends_a_use_that_waits_for_a_read(scripted):
    gate, opened_late = threading.Event(), []
    gate.set()

    def judge(method, key):
        if method == "GET" and "/data/" in key:
            opened_late.append(not gate.wait(60))

    with open_tier([scripted(judge)]) as tier:
        extent, array = tier.define("layer", [4096]), np.full(4096, 7, np.uint8)
        tier.wait(tier.put(extent, [array]))
        gate.clear()
        with Window([Stored(extent, 0, 4096)], tier=tier) as window, Ticking() as ticking:
            with pytest.raises(spillway.TimedOutError, match="unit 0 is still being read; use it again"):
                window.use(0, timeout=0)
            assert ticking.during(lambda: window.use(0), after=0.05) is None and ticking.count == 1
            gate.set()
            assert ctypes.string_at(window.use(0), 4096) == array.tobytes()
            window.release(0)
            with pytest.raises(spillway.InvalidArgumentError, match="not in use"):
                window.release(0)
            assert window.stats().uses == 1 and opened_late and not any(opened_late)
