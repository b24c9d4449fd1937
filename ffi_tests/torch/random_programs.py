"""Runs random programs one after another. The number of a program is the seed of everything in it."""

import sys
import time


def failures(failure, first, count, seconds=float("inf"), show=None):
    """The texts of the programs that fail, of `count` programs from number `first` on, or as many as begin within the seconds.

    Args:
        failure: Returns the text of a program that fails, and None for another one.
        show: Is called with each text at once, and with a count at the end."""
    end, found, seed = time.monotonic() + seconds, [], first
    for seed in range(first, first + count):
        text = failure(seed)
        if text is not None:
            found.append(text)
            if show is not None:
                show(text)
        if time.monotonic() >= end:
            break
    if show is not None:
        show(f"{seed + 1 - first} programs, {len(found)} failed")
    return found


def main(failure):
    """Arguments: FIRST COUNT [SECONDS]. Exit status 1: a program failed."""
    first, count, *seconds = sys.argv[1:]
    sys.exit(bool(failures(failure, int(first), int(count), *map(float, seconds), show=lambda text: print(text, flush=True))))
