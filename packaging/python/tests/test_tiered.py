"""Proves what all optimizers with states on a tier have in common: commits, resumes, closes and ranks."""

import zlib

import pytest

import spillway
from spillway import Swap, _native, _ranks, _safetensors, tiered


def opened(by="one", job="j", paths=(None,), **options):
    place = tiered.Place([spillway.tier.TierPath(path) for path in paths], job)
    return tiered.Tiered("Optimizer", by, place, "begin anew", "another program committed", lambda tier, _: Swap(tier, [100]), **options)


def interrupted(status):
    assert status == 0
    raise KeyboardInterrupt


def test_ctrl_c_that_arrives_while_the_library_commits(monkeypatch):
    """Python raises the KeyboardInterrupt once the call has returned; the library has committed then."""
    states = opened()
    states.changes()
    monkeypatch.setattr(_native, "check", interrupted)
    with pytest.raises(KeyboardInterrupt):
        states.commit(7, {"count": 1}, b"step 7")
    monkeypatch.undo()
    assert (states.commits, states.committed_step, states.changed) == (1, 7, False)
    assert (states.committed.by, states.committed.facts["count"], states.committed.payload) == ("one", 1, b"step 7")
    states.close()


def test_a_handler_that_looks_at_the_states_before_the_library_commits(monkeypatch):
    states = opened()
    states.changes()
    commit = states.swap._commit

    def handled(*arguments):
        states.check()
        commit(*arguments)

    monkeypatch.setattr(states.swap, "_commit", handled)
    states.commit(7, {"count": 1})
    assert (states.commits, states.committed_step, states.changed) == (1, 7, False)
    states.close()


def test_a_process_that_an_interrupt_keeps_from_its_report_is_apart(monkeypatch):
    states = opened()
    monkeypatch.setattr(states, "place", states.place._replace(world=2))

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(states.swap, "_commit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        states.commit(1, {})
    with pytest.raises(spillway.TierError, match="committed by some processes"):
        states.rollback()
    states.close()


def test_a_payload_fills_the_room_that_the_facts_leave(tmp_path):
    states, facts = opened(paths=[tmp_path]), {"elements": list(range(1000))}
    with pytest.raises(spillway.SpillwayError):
        states.commit(1, facts, bytes(states.room(facts) + 1))
    room = states.room(facts)
    states.commit(2, facts, bytes(room))
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
    from spillway import _ranks

    states = opened()
    monkeypatch.setattr(states, "place", states.place._replace(world=2))
    monkeypatch.setattr(_ranks, "gathered", lambda trouble, world, group: [trouble, "OSError: no disk" if own else None])
    if not own:
        monkeypatch.setattr(states.swap, "_commit", lambda *_: {}["no disk"])
    with pytest.raises(spillway.TierError if own else KeyError, match="no disk"):
        states.commit(1, {})
    assert states.apart and states.commits == own
    for call in (
        states.changes,
        states.rollback,
        lambda: states.commit(2, {}),
        lambda: states.read(0, None),
        lambda: states.write(0, None),
    ):
        with pytest.raises(spillway.TierError, match="Optimizer: a step was committed by some processes, and others could not commit it"):
            call()
    states.close()


def test_a_commit_that_failed_everywhere_leaves_the_one_before(monkeypatch):
    from spillway import _ranks

    states = opened()
    monkeypatch.setattr(states, "place", states.place._replace(world=2))
    monkeypatch.setattr(_ranks, "gathered", lambda trouble, world, group: [trouble, trouble])
    with monkeypatch.context() as patch:
        patch.setattr(states.swap, "_commit", lambda *_: {}["no disk"])
        with pytest.raises(KeyError):
            states.commit(1, {})
    assert not states.apart
    states.commit(1, {})
    states.close()


FACTS = {
    "a key twice": '["one", {"count": 1, "count": 2}]',
    "no number": '["one", {"count": NaN}]',
    "too deep": f'["one", {{"count": {"[" * 400}{"]" * 400}}}]',
    "no pair": '["one"]',
    "no list": "7",
    "no object": '["one", []]',
    "cut off": '["one", {"count": 1',
}


@pytest.mark.parametrize("name", FACTS)
def test_facts_that_no_commit_writes_are_no_record(name):
    def packed(words):
        head = zlib.compress(_safetensors.Header().packed({"format": "spillway-values-1", "value": words}))
        return tiered._MAGIC + b" " * tiered._IDENTITY_BYTES + tiered._LENGTH.pack(len(head)) + head + b"payload"

    assert tiered.Record.unpacked(packed('["one", {"count": 1}]'), "one") == ("one", {"count": 1}, b"payload", "")
    assert tiered.Record.unpacked(packed(FACTS[name]), "one") is None


def test_facts_that_could_not_be_read_are_not_committed():
    with pytest.raises(spillway.InvalidArgumentError, match="count.*set"):
        tiered.Record("one", {"count": {1}}).packed()


@pytest.mark.parametrize("last, before, step", [((6, 6), (3, 3), 6), ((3, 6), (6, 3), 6), ((3, 6), (None, 3), 3), ((9, 6), (6, 3), 6)])
def test_ranks_resume_at_the_newest_step_that_all_have(monkeypatch, last, before, step):
    everyone = [(spillway.tier.Steps(*steps, False, True),) for steps in zip(last, before)]
    monkeypatch.setattr(_ranks, "gathered", lambda value, *_: everyone if isinstance(value, list) else [None] * 2)
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
    monkeypatch.setattr(_ranks, "gathered", lambda value, *_: everyone if isinstance(value, list) else [None] * 2)
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
    states.commit(6, {})
    first = states.committed.identity
    states.commit(6, {})
    assert first != states.committed.identity
    states.close()
    monkeypatch.setattr(_ranks, "gathered", lambda value, *_: [value, "another"] if isinstance(value, str) else [value])
    with pytest.raises(spillway.InvalidArgumentError, match="different commits of step 6"):
        opened(paths=[tmp_path / "tier"])
    monkeypatch.undo()
    opened(paths=[tmp_path / "tier"]).close()
