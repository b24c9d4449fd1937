"""Which buckets are complete, as gradients arrive, are forgotten, and arrive again."""

import random

from spillway._early.arrivals import Arrivals


def test_a_bucket_is_complete_once_it_lacks_no_gradient():
    arrivals = Arrivals({"left": [1, 2], "right": [2, 3], "empty": []})
    assert arrivals.note([1]) == [] and arrivals.note([2]) == ["left"] and arrivals.note([3, 9]) == ["right"]
    assert {*arrivals} == {1, 2, 3, 9}


def test_a_gradient_that_arrives_again_completes_nothing_else():
    arrivals = Arrivals({"left": [1, 2]})
    assert arrivals.note([1]) == arrivals.note([1]) == []
    assert arrivals.note([2]) == arrivals.note([1]) == ["left"]


def test_what_was_forgotten_is_lacking_and_clear_forgets_all():
    arrivals = Arrivals({"left": [1, 2]})
    arrivals.note([1])
    arrivals.forget([1, 7])
    assert arrivals.note([2]) == [] and arrivals.note([1]) == ["left"]
    arrivals.clear()
    assert not arrivals and arrivals.note([2]) == [] and arrivals.note([1]) == ["left"]


def test_random_arrivals_have_the_answers_of_sets():
    choice = random.Random(1)
    needed = {bucket: {*choice.sample(range(12), choice.randint(1, 6))} for bucket in range(5)}
    arrivals, there = Arrivals(needed), set()
    for _ in range(2_000):
        some = choice.sample(range(12), choice.randint(1, 3))
        match choice.choice(["note", "note", "note", "forget", "clear"]):
            case "note":
                there |= {*some}
                expected = {bucket for bucket, own in needed.items() if own <= there and own & {*some}}
                assert {*arrivals.note(some)} == expected
            case "forget":
                there -= {*some}
                arrivals.forget(some)
            case "clear" if choice.random() < 0.2:
                there.clear()
                arrivals.clear()
        assert {*arrivals} == there
