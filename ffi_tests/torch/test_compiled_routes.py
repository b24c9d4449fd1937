"""Every route of a forward, compiled before and after the optimizer was made, has the weights of the last step, or ends in an error."""

import random

import compiled_routes
import pytest
import random_programs
import sampled
import torch
from compiled_routes import KINDS, ROUTES, UNSEEN, training

import spillway

pytestmark = pytest.mark.filterwarnings("ignore")
_wanted = {}


def wanted(route, when, backend):
    """The numbers of an optimizer that steps after backward."""
    key = (route, when, backend)
    if key not in _wanted:
        _wanted[key] = training("after", route, when, backend)
    return _wanted[key]


@pytest.mark.sampled(cases=45)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "after"])
def test_a_forward_has_the_weights_of_the_last_step(kind, route, when):
    backend = "aot_eager" if kind == "forward" else "eager"
    losses, weights = training(kind, route, when, backend)
    others, other_weights = wanted(route, when, backend)
    assert losses == others and all(map(torch.equal, weights, other_weights))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("route", UNSEEN)
def test_a_backward_of_a_forward_that_did_not_complete_the_step_is_an_error(route, when):
    with pytest.raises(spillway.OutOfOrderError, match="gets a gradient of a forward with old weights.*optimizer.settle"):
        training("forward", route, when)


def test_random_trainings_have_the_bits_of_steps_after_backward():
    failures = random_programs.failures(
        compiled_routes.failure, random.SystemRandom().randrange(1 << 40), 100_000, seconds=sampled.few(10, 60)
    )
    assert not failures, "\n\n".join(failures)
