"""Converts the record of a run's last commit, which older versions of Spillway kept as a pickle, to one that is data.

    python -m spillway.deepspeed.convert_payload --job run7 --i-trust-this-tier /mnt/nvme /mnt/pfs

Unpickling runs any code that the pickle contains. Convert only tiers that no other user could write to. Run the command
for every rank, with --rank, --world and --at-step."""

import argparse
import io

from .. import _console, tier
from ..errors import InvalidArgumentError
from . import _payload


def convert(paths, *, job, trusted=False, host=None, rank=0, world=1, at_step=None):
    """Commits the last step of a tier again, with a data-only record; returns the step. `trusted` confirms that no
    other user could write to the tier; without it nothing is read. With several ranks convert each at the same step,
    the smallest of their last steps."""
    if not trusted:
        raise InvalidArgumentError("convert: reading a pickle runs any code that its writer put there; pass trusted=True if nobody else could "
                                   "write to the tier")
    if world > 1 and at_step is None:
        raise InvalidArgumentError("convert: at_step is missing, which a run of several ranks needs; pass the smallest last step of all ranks, see "
                                   "spillway.tier.steps")
    with tier.Tier(paths, job=job, host=host, rank=rank, world=world, mode="resume", at_step=at_step) as opened:
        record = _payload.load(opened, opened.opened.payload, _unpickled)
        opened.commit(opened.opened.step, _payload.store(opened, record))
        return opened.opened.step


def _unpickled(data):
    import torch
    return torch.load(io.BytesIO(data), weights_only=False)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", help="all paths of the tier")
    parser.add_argument("--job", default="deepspeed")
    parser.add_argument("--host")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--at-step", type=int, help="with several ranks: the smallest last step of all")
    parser.add_argument("--i-trust-this-tier", action="store_true", required=True, dest="trusted",
                        help="nobody else could write to the tier: the record is a pickle, which can run any code")
    options = parser.parse_args(arguments)
    step = convert(options.paths, job=options.job, trusted=options.trusted, host=options.host, rank=options.rank,
                   world=options.world, at_step=options.at_step)
    _console.write(f"step {step} of job {options.job}, rank {options.rank}: the record is data now")


if __name__ == "__main__":
    _console.run(main)
