"""Runs the model: its regression seeds, then others, for SPILLWAY_MODEL_SECONDS (20). The seeds begin at
SPILLWAY_MODEL_SEED, which has a fixed default, so a failure can be reproduced. run.sh draws new seeds."""

import os

from . import runner


def test_the_library_keeps_its_promises_whatever_is_called():
    seconds = float(os.environ.get("SPILLWAY_MODEL_SECONDS", "20"))
    seed = int(os.environ.get("SPILLWAY_MODEL_SEED") or 20261122)
    failed, counts, _ = runner.session(seconds, seed)
    words = [f"python -m model --kind {one.kind} --seed {one.seed} --moves {one.moves}: {one.failure}" for one in failed]
    assert not failed, "\n".join(words)
    assert sum(counts.values()) > 100


def test_the_model_notices_what_is_wrong():
    """A model that never finds anything would pass too, so each oracle receives a wrong result."""
    for kind, seed in (("tier", 1), ("engine", 1), ("pinned", 1), ("swap", 1), ("speculation", 1), ("threads", 1)):
        result = runner.run(kind, seed, 200, spoil=True)
        assert result.failure, f"{kind} did not notice a changed byte"
