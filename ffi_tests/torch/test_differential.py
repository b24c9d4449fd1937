"""A minute of the random programs of differential.py, from a new number at each run; the numbers of failed programs are in the message."""

import random

import differential


def test_random_programs_end_as_with_torchs_classes():
    first = random.SystemRandom().randrange(1 << 40)
    failures = differential.failures(first, 100_000, seconds=60)
    assert not failures, "\n\n".join(failures)
