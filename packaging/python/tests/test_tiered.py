"""Proves what all optimizers with states on a tier have in common: commits, resumes, closes and ranks."""

import zlib

import pytest

import spillway
from spillway import Swap, _native, _ranks, _safetensors, tiered


def opened(by="one", job="j", paths=(None,), **options):
    place = tiered.Place([spillway.tier.TierPath(path) for path in paths], job)
    return tiered.Tiered("Optimizer", by, place, "begin anew", "another program committed", lambda tier, _: Swap(tier, [100]), **options)


def commit(states, step, facts, payload=b"", wait=True):
    return states.commit(lambda: tiered.Prepared(step, step, facts, payload), wait)


def commits_elsewhere(error):
    """For `_ranks.gathered`: another process agrees with this one about each commit, and its own commit has this error, or None."""
    return lambda own, *_: [own, own if own.call else own._replace(trouble=error)]


def interrupted(status):
    assert status == 0
    raise KeyboardInterrupt


def test_ctrl_c_that_arrives_while_the_library_commits(monkeypatch):
    """Python raises the KeyboardInterrupt once the call has returned; the library has committed then."""
    states = opened()
    states.changes()
    monkeypatch.setattr(_native, "check", interrupted)
    with pytest.raises(KeyboardInterrupt):
        commit(states, 7, {"count": 1}, b"step 7")
    monkeypatch.undo()
    assert (states.commits, states.committed_step, states.changed) == (1, 7, False)
    assert (states.committed.by, states.committed.facts["count"], states.committed.payload) == ("one", 1, b"step 7")
    states.close()


def test_a_handler_that_looks_at_the_states_before_the_library_commits(monkeypatch):
    states = opened()
    states.changes()
    committed = states.swap._commit

    def handled(*arguments):
        states.check()
        committed(*arguments)

    monkeypatch.setattr(states.swap, "_commit", handled)
    commit(states, 7, {"count": 1})
    assert (states.commits, states.committed_step, states.changed) == (1, 7, False)
    states.close()


def test_a_process_that_an_interrupt_keeps_from_its_report_is_apart(monkeypatch):
    states = opened()
    monkeypatch.setattr(states, "place", states.place._replace(world=2))
    monkeypatch.setattr(_ranks, "gathered", commits_elsewhere(None))

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(states.swap, "_commit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        commit(states, 1, {})
    with pytest.raises(spillway.TierError, match="committed by some processes"):
        states.rollback()
    states.close()


def test_a_payload_fills_the_room_that_the_facts_leave(tmp_path):
    states, facts = opened(paths=[tmp_path]), {"elements": list(range(1000))}
    with pytest.raises(spillway.SpillwayError):
        commit(states, 1, facts, bytes(states.room(facts) + 1))
    room = states.room(facts)
    commit(states, 2, facts, bytes(room))
    states.close()
    again = opened(paths=[tmp_path])
    assert again.resumed_step == 2 and again.committed.by == "one" and again.committed.payload == bytes(room)
    assert {**again.committed.facts, **facts} == again.committed.facts
    again.close()
    with pytest.raises(spillway.InvalidArgumentError, match="another program committed"):
        opened("other", paths=[tmp_path])
    opened(paths=[tmp_path]).close()


def test_a_tier_is_opened_and_closed_in_the_way_of_its_user(tmp_path):
    place = tiered.Place([spillway.tier.TierPath(tmp_path)], "own")
    states = opened(open_tier=place.open_alone, close_tier=spillway.Tier.destroy)
    assert any(tmp_path.rglob("*")) and not states.closed
    states.close()
    states.close()
    assert states.closed and not any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_close_that_was_interrupted_is_ended_by_the_next(tmp_path, monkeypatch):
    states = opened(paths=[tmp_path])

    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(states.swap, "close", interrupt)
        states.close()
    assert not states.closed
    states.close()
    opened(paths=[tmp_path]).close()


@pytest.mark.parametrize("own", [True, False], ids=["committed here", "committed elsewhere"])
def test_nothing_goes_on_after_a_commit_of_some_processes(monkeypatch, own):
    states = opened()
    monkeypatch.setattr(states, "place", states.place._replace(world=2))
    monkeypatch.setattr(_ranks, "gathered", commits_elsewhere("OSError: no disk" if own else None))
    if not own:
        monkeypatch.setattr(states.swap, "_commit", lambda *_: {}["no disk"])
    with pytest.raises(spillway.TierError if own else KeyError, match="no disk"):
        commit(states, 1, {})
    assert states.apart and states.commits == own
    for call in (
        states.changes,
        states.rollback,
        lambda: commit(states, 2, {}),
        lambda: states.read(0, None),
        lambda: states.write(0, None),
    ):
        with pytest.raises(spillway.TierError, match="Optimizer: a step was committed by some processes, and others could not commit it"):
            call()
    states.close()


def test_a_commit_that_failed_everywhere_leaves_the_one_before(monkeypatch):
    states = opened()
    monkeypatch.setattr(states, "place", states.place._replace(world=2))
    monkeypatch.setattr(_ranks, "gathered", lambda own, *_: [own, own])
    with monkeypatch.context() as patch:
        patch.setattr(states.swap, "_commit", lambda *_: {}["no disk"])
        with pytest.raises(KeyError):
            commit(states, 1, {})
    assert not states.apart
    commit(states, 1, {})
    states.close()


FACTS = {
    "a key twice": '["one", {"count": 1, "count": 2}, [2, 4]]',
    "no number": '["one", {"count": NaN}, [2, 4]]',
    "too deep": f'["one", {{"count": {"[" * 400}{"]" * 400}}}, [2, 4]]',
    "no triple": '["one", {"count": 1}]',
    "no numbers of processes": '["one", {"count": 1}, 2]',
    "no list": "7",
    "no object": '["one", [], [2, 4]]',
    "cut off": '["one", {"count": 1',
}


@pytest.mark.parametrize("name", FACTS)
def test_facts_that_no_commit_writes_are_no_record(name):
    def packed(words):
        head = zlib.compress(_safetensors.Header().packed({"format": "spillway-values-1", "value": words}))
        return tiered._MAGIC + b" " * tiered._IDENTITY_BYTES + tiered._LENGTH.pack(len(head)) + head + b"payload"

    assert tiered.Record.unpacked(packed('["one", {"count": 1}, [2, 4]]'), "one") == ("one", {"count": 1}, b"payload", "", 2, 4)
    assert tiered.Record.unpacked(packed(FACTS[name]), "one") is None


def test_facts_that_could_not_be_read_are_not_committed():
    with pytest.raises(spillway.InvalidArgumentError, match="count.*set"):
        tiered.Record("one", {"count": {1}}).packed()


@pytest.mark.parametrize("last, before, step", [((6, 6), (3, 3), 6), ((3, 6), (6, 3), 6), ((3, 6), (None, 3), 3), ((9, 6), (6, 3), 6)])
def test_ranks_resume_at_the_newest_step_that_all_have(monkeypatch, last, before, step):
    everyone = [(spillway.tier.Steps(*steps, False, True),) for steps in zip(last, before)]
    monkeypatch.setattr(_ranks, "gathered", lambda *_: [_ranks.Report("", None, ranks) for ranks in everyone])
    monkeypatch.setattr(_ranks.tier, "steps", lambda *_, **__: everyone[0][0])
    place = tiered.Place([spillway.tier.TierPath(None)], "j", world=2)
    assert _ranks.agreed([place], 0, 2, "begin anew") == [{"at_step": step, "at_tag": 0}]


@pytest.mark.parametrize("first, second", [(100, 900), (900, 100)])
def test_of_two_commits_of_one_step_several_tiers_resume_at_the_first(first, second):
    """Both ranks have committed step 5 again on one tier; a rank was killed before it could on the other tier."""

    def steps(last, before, tag, before_tag):
        return spillway.tier.Steps(last, before, False, True, tag, before_tag)

    # Tags of tiers that are no chain.
    one = steps(5, 5, second, first)
    assert _ranks._common([[one, steps(5, 5, 22, 11)], [one, steps(5, 3, 11, 7)]], "begin anew") == (5, [first, 11])
    assert _ranks._common([[one, steps(5, 3, second, 7)], [one, steps(5, 5, second, first)]], "begin anew") == (5, [second, second])
    assert _ranks._common([[one, steps(5, 3, first, 7)], [one, one]], "begin anew") == (5, [first, first])


def test_a_rank_that_committed_a_step_again_returns_to_the_commit_that_all_ranks_have(monkeypatch, tmp_path):
    """One of two ranks was killed before it could commit the step again."""
    places = []
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        places.append(tiered.Place([spillway.TierPath(tmp_path / str(rank))], "j", rank=rank, world=2))
        with places[rank].open_alone() as opened:
            extent = opened.define("e", [1])
            for content in ("first", "again")[: 2 - rank]:
                opened.wait(opened.put(extent, [bytearray(content[:1].encode())]))
                opened.commit(6, content.encode())
    everyone = [[tuple(spillway.tier.steps(place.paths, job="j", rank=place.rank, world=2))] for place in places]
    monkeypatch.setattr(_ranks, "gathered", lambda *_: [_ranks.Report("", None, ranks) for ranks in everyone])
    assert [steps[:2] for [steps] in everyone] == [(6, 6), (6, None)]
    for place in places:
        [at] = _ranks.agreed([place], place.rank, 2, "begin anew")
        with place.open_alone(at) as opened:
            found = bytearray(1)
            opened.wait(opened.get(opened.define("e", [1]), [found]))
            assert opened.opened.payload == b"first" and found == b"f"


def test_different_commits_of_one_step_are_refused(monkeypatch, tmp_path):
    (tmp_path / "tier").mkdir()
    states = opened(paths=[tmp_path / "tier"])
    states.changes()
    commit(states, 6, {})
    first = states.committed.identity
    commit(states, 6, {})
    assert first != states.committed.identity
    states.close()
    own = _ranks.exchanged
    monkeypatch.setattr(
        _ranks, "exchanged", lambda *given, **named: (lambda found, told: (found, [*told, ("another", "")]))(*own(*given, **named))
    )
    with pytest.raises(spillway.InvalidArgumentError, match="different commits of step 6"):
        opened(paths=[tmp_path / "tier"])
    monkeypatch.undo()
    opened(paths=[tmp_path / "tier"]).close()


@pytest.mark.parametrize(
    "other, words",
    [
        ((7, 8, True), "numbers of a commit: rank 0: 7; rank 1: 8"),
        ((6, 7, True), "numbers of steps: rank 0: 7; rank 1: 6"),
        ((7, 7, False), "wait"),
    ],
)
def test_processes_that_would_commit_different_steps_commit_nothing(monkeypatch, other, words):
    states = opened()
    commit(states, 3, {})
    monkeypatch.setattr(states, "place", states.place._replace(world=2))
    monkeypatch.setattr(_ranks, "gathered", lambda own, *_: [own, own._replace(told=other)])
    states.changes()
    with pytest.raises(spillway.InvalidArgumentError, match=words):
        commit(states, 7, {})
    assert (states.committed_step, states.changed, states.apart) == (3, True, False)
    monkeypatch.undo()
    commit(states, 7, {})
    states.close()


def test_processes_in_different_calls_are_an_error_of_all(monkeypatch):
    states = opened()
    monkeypatch.setattr(states, "place", states.place._replace(world=2))
    monkeypatch.setattr(_ranks, "gathered", lambda own, *_: [own, _ranks.Report("step()", None, 3)])
    with pytest.raises(spillway.OutOfOrderError, match=r"in different calls: rank 0: commit\(\); rank 1: step\(\)"):
        commit(states, 7, {})
    monkeypatch.setattr(_ranks, "gathered", lambda own, *_: [_ranks.Report("commit()", None, (3, 3, True)), own])
    with pytest.raises(spillway.OutOfOrderError, match=r"in different calls: rank 0: commit\(\); rank 1: step\(\)"):
        states.step(lambda: None, lambda: 4)
    assert states.committed_step is None
    states.close()


@pytest.mark.parametrize(
    "everyone",
    [
        [(5, None, True, True), (7, None, True, True)],
        [(5, None, True, True, 11), (5, None, True, True, 22)],
        [(5, None, True, True), (7, None, True, True), (None, None, False, True)],
        [(6, 5, False, True), (None, None, False, True)],
    ],
    ids=["numbers of ranks", "two commits of one step", "and one without", "second commit"],
)
def test_commits_are_not_removed_because_numbers_differ(monkeypatch, everyone):
    everyone = [(spillway.tier.Steps(*steps),) for steps in everyone]
    monkeypatch.setattr(_ranks, "gathered", lambda *_: [_ranks.Report("", None, ranks) for ranks in everyone])
    monkeypatch.setattr(_ranks.tier, "steps", lambda *_, **__: everyone[0][0])
    monkeypatch.setattr(_ranks.tier, "collect", None)
    place = tiered.Place([spillway.tier.TierPath("states")], "j", world=len(everyone))
    with pytest.raises(spillway.InvalidArgumentError, match=r"no committed step in common: rank.* 0.*: step.*nothing was removed.*at_step"):
        _ranks.agreed([place], 0, len(everyone), "pass another job")


def test_a_first_commit_that_not_all_ranks_could_make_is_removed_with_a_warning(monkeypatch, caplog):
    everyone = [(spillway.tier.Steps(5, None, True, True, 11),), (spillway.tier.Steps(None, None, False, True),)]
    monkeypatch.setattr(
        _ranks, "gathered", lambda own, *_: [own, own] if own.told is None else [_ranks.Report("", None, ranks) for ranks in everyone]
    )
    monkeypatch.setattr(_ranks.tier, "steps", lambda *_, **__: everyone[0][0])
    removed = []
    monkeypatch.setattr(_ranks.tier, "collect", lambda directory, **_: removed.append(directory))
    place = tiered.Place([spillway.tier.TierPath("states")], "j", world=2)
    assert _ranks.agreed([place], 0, 2, "") == [{}] and removed == ["states"]
    assert "begins anew: rank 0: step 5; rank 1: no commit" in caplog.text


def test_commits_under_numbers_of_ranks_are_joined_by_a_commit_of_each_under_one_number(monkeypatch, tmp_path):
    """What the error about them says."""
    places = []
    for rank, step in enumerate((5, 7)):
        (tmp_path / str(rank)).mkdir()
        places.append(tiered.Place([spillway.TierPath(tmp_path / str(rank))], "j", rank=rank, world=2))
        with places[rank].open_alone() as made:
            extent = made.define("e", [1])
            made.wait(made.put(extent, [bytearray(b"x")]))
            made.commit(step, b"payload")

    def found():
        return [[tuple(spillway.tier.steps(place.paths, job="j", rank=place.rank, world=2))] for place in places]

    monkeypatch.setattr(_ranks, "gathered", lambda *_: [_ranks.Report("", None, ranks) for ranks in found()])
    with pytest.raises(spillway.InvalidArgumentError, match="rank 0: step 5; rank 1: step 7"):
        _ranks.agreed([places[0]], 0, 2, "begin anew")
    with places[1].open_alone({"at_step": 7}) as again:
        again.commit(5, again.opened.payload)
    for place in places:
        [at] = _ranks.agreed([place], place.rank, 2, "begin anew")
        with place.open_alone(at) as opened:
            content = bytearray(1)
            opened.wait(opened.get(opened.define("e", [1]), [content]))
            assert (opened.opened.step, opened.opened.payload, content) == (5, b"payload", b"x")


def test_an_error_of_many_ranks_names_some_of_them(monkeypatch):
    monkeypatch.setattr(
        _ranks, "gathered", lambda own, world, _: [own, *(own._replace(trouble=f"OSError: disk {rank // 6}") for rank in range(1, world))]
    )
    with pytest.raises(spillway.TierError) as raised:
        _ranks.together(1024, lambda: None)
    assert str(raised.value).endswith(
        "rank gives up too: ranks 1, 2, 3, 4 and 1 more: OSError: disk 0; ranks 6, 7, 8, 9 and 2 more: OSError: disk 1; ranks 12, 13, 14, "
        "15 and 2 more: OSError: disk 2; ranks 18, 19, 20, 21 and 2 more: OSError: disk 3; and 1000 more ranks"
    )


def test_an_open_asks_the_other_ranks_as_often_whatever_they_find(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(_ranks, "gathered", lambda own, *_: (asked.append(own), [own, own])[1])
    place = tiered.Place([spillway.TierPath(tmp_path)], "j", world=2)
    for commits in range(2):
        states = tiered.Tiered("Optimizer", "one", place, "", "", lambda tier, _: Swap(tier, [100]))
        assert len(asked) == 3 and states.commits == 0
        commit(states, 1 + commits, {})
        assert len(asked) == 5
        states.close()
        asked.clear()
