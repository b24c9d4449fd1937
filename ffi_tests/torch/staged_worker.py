"""A process of test_staged_tier.py that trains with its states on a tier until it is killed: TIER, the number of steps between commits, and
"beside" for commits that go on beside the next steps."""

import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2] / "packaging" / "python")]

from staged_runs import Soap, gradients, options, parameters

from spillway.torch import Staged


def main(directory, interval, way):
    params = parameters()
    optimizer = Staged(Soap, params, chunk_bytes=9000, tier=options(directory))
    for step in range(optimizer.resumed_step or 0, 10_000):
        # A parameter that has its first step late, and one that has none in some steps.
        gradients(params, step, {1} if step < 5 else {3} if step % 3 == 0 else ())
        optimizer.step()
        if step % int(interval) == 0:
            optimizer.commit(payload=str(step + 1).encode(), wait=way != "beside")
        print(step + 1, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
