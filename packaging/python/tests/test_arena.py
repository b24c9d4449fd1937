"""Proves that an arena gives readers of other processes whole steps only, and that a reader is told what is wrong."""

import array
import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

import spillway
from spillway import errors
from spillway.arena import Arena, Verdict, collect

WORDS = 20_000


@pytest.fixture
def name():
    return f"python-{os.getpid()}"


def run(code, *arguments, environment, **options):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], env=environment, stdout=subprocess.PIPE, text=True, **options
    )


def test_two_processes_share_regions_by_name(name, child_environment):
    with Arena.create(name, {"a": 4000, "b": 100}, processes=2) as owner:
        view = owner.view("a", "f32", (10, 100))
        with owner.write("a", generation=4) as torn:
            assert not torn
            view[:] = 2.5
        code = """if True:
            import sys
            from spillway.arena import Arena
            with Arena.open(sys.argv[1], write=True, timeout=60) as arena:
                generation, values = arena.read("a", at_least=4, timeout=60)
                with arena.write("b", generation=1):
                    arena.view("b", "uint8")[:] = 7
                print(generation, values.sum(), arena.info().owner_lives, arena.region("a").generation)"""
        child = run(code, name, environment=child_environment)
        assert child.communicate()[0].split() == ["4", "2500.0", "True", "4"]
        generation, values = owner.read("b", "uint8", at_least=1, timeout=60)
        assert generation == 1 and (values == 7).all()
        del view


def test_a_descriptor_opens_an_arena_without_a_name(child_environment):
    """Over a socket, and by its place in /proc."""
    code = """if True:
        import array, socket, sys
        from spillway.arena import Arena
        _, ancillary, *_ = socket.socket(fileno=int(sys.argv[1])).recvmsg(1, socket.CMSG_SPACE(4))
        fd = array.array("i", ancillary[0][2])[0]
        with Arena.open_fd(fd) as arena:
            print(arena.read("a", "uint8")[1].sum(), arena.info().is_owner)"""
    with Arena.create(None, {"a": 10}) as owner:
        owner.view("a", "uint8")[:] = 3
        ours, theirs = socket.socketpair()
        with ours, theirs:
            child = run(code, theirs.fileno(), environment=child_environment, pass_fds=[theirs.fileno()])
            ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [owner.fileno()]))])
            assert child.communicate()[0].split() == ["30", "False"]
        path = f"/proc/{os.getpid()}/fd/{owner.fileno()}"
        fd = os.open(path, os.O_RDONLY)
        with Arena.open_fd(fd) as other:
            assert not other.view("a", "uint8").flags.writeable
        os.close(fd)


def test_views_are_the_memory_and_keep_it_mapped():
    torch = pytest.importorskip("torch")
    arena = Arena.create(None, {"a": 4000})
    tensor, view = arena.tensor("a", torch.bfloat16, (20, 100)), arena.view("a", "bf16")
    tensor.fill_(1.0)
    assert (view[:2000] == 0x3F80).all() and (view.dtype, tensor.shape) == (np.uint16, (20, 100))
    assert arena.view("a", np.int64).size == 500
    with pytest.raises(spillway.BusyError, match="2 views or tensors of it are alive"):
        arena.close()
    with arena:
        pass
    del tensor
    assert view[0] == 0x3F80
    del view
    arena.close()
    with pytest.raises(spillway.InvalidArgumentError, match="this Arena is closed"):
        arena.info()


WRITER = """if True:
    import sys
    from spillway.arena import Arena
    arena = Arena.open(sys.argv[1], write=True, timeout=60)
    view = arena.view("a", "u8")
    step = arena.region("a").generation
    print("ready", flush=True)
    while True:
        step += 1
        with arena.write("a", step):
            view[:] = step"""


def test_killed_writers_leave_whole_steps_or_an_error(name, child_environment):
    rounds = int(os.environ.get("SPILLWAY_KILL_ROUNDS", 6))
    random = np.random.default_rng(5)
    with Arena.create(name, {"a": WORDS * 8}) as owner:
        last = 0
        for _ in range(rounds):
            writer = run(WRITER, name, environment=child_environment)
            assert writer.stdout.readline() == "ready\n"
            for kill in [False] * random.integers(1, 20) + [True]:
                if kill:
                    writer.kill()
                    writer.wait()
                try:
                    generation, values = owner.read("a", "u8", timeout=60)
                except errors.TornError as error:
                    assert str(writer.pid) in str(error) or not kill
                else:
                    assert (values == generation).all() and generation >= last
                    last = generation
        with owner.write("a", owner.region("a").generation + 1):
            owner.view("a", "u8")[:] = 1
        assert (owner.read("a", "u8")[1] == 1).all()


def test_a_stopped_writer_is_waited_for(name, child_environment):
    code = """if True:
        import os, signal, sys
        from spillway.arena import Arena
        with Arena.open(sys.argv[1], write=True, timeout=60) as arena, arena.write("a", 1):
            print("ready", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)"""
    with Arena.create(name, {"a": 10}) as owner:
        writer = run(code, name, environment=child_environment)
        assert writer.stdout.readline() == "ready\n"
        with pytest.raises(spillway.TimedOutError, match=f"process {writer.pid} is writing region"):
            owner.read("a", "uint8", timeout=0.05)
        writer.send_signal(signal.SIGCONT)
        assert owner.read("a", "uint8", at_least=1, timeout=60)[0] == 1
        assert writer.wait() == 0


def test_an_exception_in_a_write_leaves_the_region_torn():
    with Arena.create(None, {"a": 10}) as arena:
        with pytest.raises(KeyError), arena.write("a", 1):
            raise KeyError
        with pytest.raises(errors.TornError, match='region "a"'):
            arena.read("a", "uint8")
        with arena.write("a", 1) as torn:
            assert torn
        snapshot = arena.snapshot("a", at_least=1)
        arena.validate("a", snapshot)
        assert arena.write_begin("a", 2) is False
        arena.write_abort("a", restored=True)
        with pytest.raises(errors.ChangedError):
            arena.validate("a", snapshot)
        assert arena.read("a", "uint8")[0] == 1


def test_an_owner_that_was_killed_is_collected_on_request(name, child_environment):
    code = """if True:
        import os, signal, sys
        from spillway.arena import Arena
        arena = Arena.create(sys.argv[1], {"a": 10})
        print("ready", flush=True)
        sys.stdin.read()"""
    owner = run(code, name, environment=child_environment, stdin=subprocess.PIPE)
    assert owner.stdout.readline() == "ready\n"
    with pytest.raises(errors.ArenaExistsError, match=f"process {owner.pid} owns it"):
        Arena.create(name, {"a": 10}, collect=True)
    with pytest.raises(errors.ArenaExistsError):
        collect(name)
    owner.kill()
    owner.communicate()
    with pytest.raises(errors.PeerEndedError, match=f"process {owner.pid}, has ended"):
        Arena.open(name)
    with pytest.raises(errors.ArenaExistsError, match="left it behind"):
        Arena.create(name, {"a": 10})
    with Arena.open(name, orphan=True) as orphan:
        assert orphan.read("a", "uint8")[0] == 0
    Arena.create(name, {"a": 10}, collect=True).close()
    with pytest.raises(errors.ArenaMissingError):
        Arena.open(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes the effective user")
def test_a_name_that_its_owner_may_not_remove_stays_with_a_warning(name, child_environment):
    code = """if True:
        import os, sys
        from spillway.arena import Arena
        arena = Arena.create(sys.argv[1], {"a": 10})
        os.seteuid(65534)
        arena.close()"""
    owner = run(code, name, environment={**child_environment, "SPILLWAY_LOG": "warn"}, stderr=subprocess.PIPE)
    assert f'arena "{name}": its name stays' in owner.communicate()[1] and owner.returncode == 0
    collect(name)


def test_processes_exchange_verdicts(name, child_environment):
    code = """if True:
        import sys
        from spillway.arena import Arena
        with Arena.open(sys.argv[1], write=True, timeout=60) as arena:
            arena.join(1)
            for round in range(1, 50):
                arena.post(1, round, (round == 7, 2.0), failed=round == 9)
                print(*arena.wait_verdict(round, timeout=60))"""
    with Arena.create(name, {"a": 10}, processes=2) as arena:
        arena.join(0)
        child = run(code, name, environment=child_environment)
        found = []
        for round in range(1, 50):
            arena.post(0, round, (False, 1.0))
            found.append(arena.wait_verdict(round, timeout=60))
        assert [" ".join(map(str, one)) for one in found] == child.communicate()[0].splitlines()
        assert found[0] == Verdict(False, 0, 3.0) and found[8].failed == 1 and found[6].nonfinite
        arena.post(0, 50, (False, 1.0))
        with pytest.raises(errors.PeerEndedError, match="ended before it posted"):
            arena.wait_verdict(50)


def test_arguments_are_checked(name):
    with pytest.raises(spillway.InvalidArgumentError, match="options.name"):
        Arena.create("a/b", {"a": 1})
    with pytest.raises(spillway.InvalidArgumentError, match="region_count"):
        Arena.create(None, {})
    with pytest.raises(spillway.InvalidArgumentError, match="bytes"):
        Arena.create(None, {"a": -1})
    with Arena.create(None, {"a": 10}, huge=True) as arena:
        assert arena.info().huge or "huge pages" in arena.info().notes
        with pytest.raises(spillway.InvalidArgumentError, match='no region "b"'):
            arena.region("b")
        with pytest.raises(spillway.InvalidArgumentError, match="not inside a region of 10 bytes"):
            arena.read_into("a", bytearray(10), offset=1)
        for number in (-1, 2**64 + 1):
            with pytest.raises(spillway.InvalidArgumentError, match="pass an integer from 0 to 18446744073709551615"):
                arena.write_begin("a", number)
        with pytest.raises(spillway.InvalidArgumentError, match="with 16 elements, but the region has 2"):
            arena.view("a", "f32", (4, 4))
        assert [region.name for region in arena.regions()] == ["a"]


def test_a_length_of_minus_one_is_the_rest_of_the_region():
    torch = pytest.importorskip("torch")
    with Arena.create(None, {"a": 4096}) as arena:
        whole = arena.view("a")
        whole[:] = np.arange(1024)
        assert np.array_equal(arena.view("a", "f32", (32, -1)), whole.reshape(32, -1))
        assert arena.view("a", "f32", -1).shape == (1024,) and arena.view("a", "f32", (0, 3)).shape == (0, 3)
        assert torch.equal(arena.tensor("a", "f32", (-1, 8)), torch.from_numpy(whole).reshape(-1, 8))
        assert arena.view("a", "f32", np.int64(7)).shape == (7,)
        for shape, words in [
            ((3, -1), "no multiple of 3"),
            ((0, -1), "no multiple of 0"),
            ((-1, -1), "one may be -1"),
            ((-2, 4), "at least 0"),
            ((-2, -4), "at least 0"),
            (1.5, "at least 0"),
            ((33, 32), "with 1056 elements"),
        ]:
            for call in (arena.view, arena.tensor):
                with pytest.raises(spillway.InvalidArgumentError, match=words):
                    call("a", "f32", shape)
        del whole


def test_what_c_cannot_hold_is_refused_and_not_shortened(name):
    with Arena.create(None, {"a": 64}, processes=1) as arena:
        for call in (
            lambda: arena.join(2**32),
            lambda: arena.join(-1),
            lambda: arena.join("0"),
            lambda: arena.post(2**32, 1, (False, 1.0)),
            lambda: Arena.open_fd(2**32 + arena.fileno()),
            lambda: Arena.create(None, {"a": 1}, processes=2**32),
            lambda: Arena.create(None, {"a": 1}, node=2**32),
            lambda: Arena.create(None, {"a": 2**64 + 8}),
        ):
            with pytest.raises(spillway.InvalidArgumentError, match="pass an integer from"):
                call()
        for call in (
            lambda: arena.region("a\0b"),
            lambda: Arena.create(name + "\0b", {"a": 1}),
            lambda: Arena.create(None, {"a\0b": 1}),
            lambda: Arena.open(name + "\0b"),
            lambda: collect("\0"),
            lambda: Arena.open(b"name"),
        ):
            with pytest.raises(spillway.InvalidArgumentError, match="without NUL"):
                call()
        with arena.write("a", 1):
            arena.view("a", "u1")[:] = 0x41
        for dtype in ("O", object, np.dtype([("x", "O")]), "V0", "U0", "nothing"):
            for call in (arena.read, arena.view):
                with pytest.raises(spillway.InvalidArgumentError, match="dtype"):
                    call("a", dtype)
        for timeout in (float("inf"), float("nan"), "soon"):
            with pytest.raises(spillway.InvalidArgumentError, match="finite number of seconds"):
                arena.read("a", timeout=timeout)
        assert arena.read("a", "u1", timeout=1e300)[1][0] == 0x41


def test_a_handler_that_raises_while_a_view_ends_does_not_keep_the_arena_open():
    arena = Arena.create(None, {"x": 4096})
    view = arena.view("x")

    def raising(frame, event, argument):
        if frame.f_code.co_name == "_remove":
            sys.settrace(None)
            raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(raising)
    del view
    sys.settrace(before)
    arena.close()
