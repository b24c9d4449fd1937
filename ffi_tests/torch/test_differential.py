"""Ten seconds of the random programs of differential.py. `python ffi_tests/torch/differential.py FIRST COUNT` runs others."""

import differential
import random_programs
import sampled


def test_random_programs_end_as_with_torchs_classes():
    failures = random_programs.failures(differential.failure, 0, 100_000, seconds=sampled.few(10, 60))
    assert not failures, "\n\n".join(failures)
