"""Runs episodes, each in a process of its own, and counts their results.

python -m model --kind tier --seed 7 --moves 200       one episode; its moves are printed if it fails
python -m model --seconds 60                            regression seeds, then fresh ones
python -m model --kind tier --seed 7 --shrink           the fewest steps that fail the same way"""

import argparse
import collections
import ctypes
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time

from . import content
from .episode import Defect, Episode
from .processes import Child, holdings, left_over, status_number

HERE = os.path.dirname(os.path.abspath(__file__))
EPISODE_SECONDS = 240
# Kinds whose writes must take real time.
ON_DISK = ("stopped",)


class Result:
    """The result of an episode: `failure` is None or the description of the failure."""

    def __init__(self, kind, seed, moves, failure, counts, trace, notes):
        self.kind, self.seed, self.moves, self.failure = kind, seed, moves, failure
        self.counts, self.trace, self.notes = counts, trace, notes

    @property
    def sort(self):
        """The description of the failure without its numbers."""
        return re.sub(r"\d+|'[^']*'|\([^)]*\)|/\S+", "N", self.failure or "")[:70]


def kinds():
    from . import disk_kinds, engine_kinds, file_kinds, process_kinds, signal_kinds, state_kinds, ticket_kinds, tier_kinds

    found = {}
    for module in (tier_kinds, ticket_kinds, engine_kinds, process_kinds, signal_kinds, state_kinds, file_kinds, disk_kinds):
        found.update(module.KINDS)
    return found


def run(kind, seed, moves, drop=(), keep=False, spoil=False):
    """Runs one episode; with `spoil` the oracle expects other contents than were written."""
    body, draw = kinds()[kind], random.Random(f"place/{seed}")
    base = tempfile.mkdtemp(prefix="spillway-model-", dir="/dev/shm" if draw.random() < 0.8 and kind not in ON_DISK else None)
    outer = Episode(kind, seed, moves, base, drop)
    outer.spoiled = spoil
    errors = os.path.join(base, "stderr")
    child = Child(outer, _episode, body, errors, name=f"{kind} {seed}")
    failure, notes = None, []
    try:
        for message in child.end(EPISODE_SECONDS):
            notes += message.get("notes", [])
    except Defect as defect:
        failure = str(defect)
    _sweep(child.pid, base)
    with open(os.path.join(base, "trace"), errors="replace") as lines:
        trace = lines.read().splitlines()
    calls = sum(not line.startswith(("#", "    ->", "HANG")) for line in trace)
    outer.counts["in processes that ended before they said more"] += max(0, calls - sum(outer.counts.values()))
    hangs = [line for line in trace if line.startswith("HANG")]
    if hangs and failure is not None:
        failure = f"{failure}; {hangs[0]}"
    if failure is not None and os.path.exists(errors):
        with open(errors, errors="replace") as lines:
            notes += lines.read().splitlines()[-80:]
    os.close(outer._trace)
    if not keep:
        _remove(base)
    return Result(kind, seed, moves, failure, outer.counts, trace, notes)


def _episode(child, body, errors):
    """The process of an episode: warm-up, then the episode, then a check for leaks."""
    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600), 2)
    os.setpgid(0, 0)
    episode = child.episode
    _warm(episode)
    before, names = holdings(), _shared_names()
    if episode.spoiled:
        content.spoil()
    body(episode)
    episode.children = []
    more = left_over(before)
    episode.check(more is None, f"left after the episode: {more}")
    new = _shared_names() - names
    episode.check(not new, f"left in shared memory: {sorted(new)[:5]}")
    child.send(word="notes", notes=[f"resident {status_number('VmRSS')} KiB"])


def _warm(episode):
    """Allocates the resources that a process needs once: the library's threads and tables."""
    import numpy as np

    import spillway
    from spillway import _native

    adam = spillway.Adam(lr=1e-3)
    arrays = [np.zeros(1 << 18, np.float32) for _ in range(4)]
    adam.step([tuple(arrays)])
    start = ctypes.c_void_p()
    _native.check(_native.library().spw_pinned_alloc(None, 8, ctypes.byref(start)))
    _native.check(_native.library().spw_pinned_free(start))
    base = episode.path("warm")
    os.mkdir(base)
    with spillway.Tier([base], job="warm") as tier:
        number = tier.define("warm", [1 << 18])
        tier.wait(tier.put(number, [np.zeros(1 << 18, np.uint8)]))
        tier.commit(1)
    shutil.rmtree(base)


def _shared_names():
    return {name for name in os.listdir("/dev/shm") if "spillway" in name and not name.startswith(("spillway-model-", "spillway-turns"))}


def _sweep(group, base):
    """Kills the processes that a failed episode may have left, by its process group, and unmounts its file systems."""
    with open("/proc/mounts") as lines:
        mounts = [line.split()[1] for line in lines if line.split()[1].startswith(base + "/")]
    for mount in mounts:
        subprocess.run(["fsfreeze", "-u", mount], capture_output=True)
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
    for mount in mounts:
        for _ in range(50):
            if subprocess.run(["umount", mount], capture_output=True).returncode == 0:
                break
            time.sleep(0.1)


def _remove(base):
    for directory, _, _ in os.walk(base):
        try:
            os.chmod(directory, 0o700)
        except OSError:
            pass
    shutil.rmtree(base, ignore_errors=True)


def shrink(result, seconds=120):
    """Drops steps as long as the episode fails the same way; returns the numbers of the remaining steps."""
    end, drop = time.monotonic() + seconds, set()
    numbers = list(range(result.moves))
    piece = max(1, len(numbers) // 2)
    while piece and time.monotonic() < end:
        at = 0
        while at < len(numbers) and time.monotonic() < end:
            part = set(numbers[at : at + piece])
            again = run(result.kind, result.seed, result.moves, drop | part)
            if again.failure and again.sort == result.sort:
                drop |= part
                numbers = [number for number in numbers if number not in part]
                result = Result(result.kind, result.seed, result.moves, again.failure, again.counts, again.trace, again.notes)
            else:
                at += piece
        piece = piece // 2 if piece > 1 else 0
    return drop, result


def regressions():
    """(kind, seed, moves, why) of the seeds that once failed."""
    with open(os.path.join(HERE, "regressions.txt")) as lines:
        for line in lines:
            if line.strip() and not line.startswith("#"):
                kind, seed, moves, why = line.split(None, 3)
                yield kind, int(seed), int(moves), why.strip()


def fresh(seed, only=None):
    """An endless sequence of episodes."""
    draw, names = random.Random(seed), [name for name in kinds() if only is None or name in only]
    weights = [WEIGHTS.get(name, 1) for name in names]
    while True:
        yield draw.choices(names, weights)[0], draw.randrange(1 << 31), draw.choice((40, 120, 400, 1000))


WEIGHTS = {
    "tier": 12,
    "threads": 4,
    "kill": 6,
    "engine": 8,
    "pinned": 8,
    "swap": 6,
    "speculation": 6,
    "fork": 2,
    "signals": 2,
    "stopped": 0.2,
    "closing": 0.3,
    "unwaited": 0.5,
    "frozen": 0.1,
}


def session(seconds, seed, only=None, stop_at=None, report=print):
    """Runs regression seeds and then new ones for the given time. Returns (all Results
    that failed, counts, episodes)."""
    begun, counts, failed, episodes = time.monotonic(), collections.Counter(), [], collections.Counter()
    queue = [(kind, number, moves) for kind, number, moves, _ in regressions() if only is None or kind in only]
    source = fresh(seed, only)
    report(f"model: seed {seed}, {seconds:.0f} s, {len(queue)} regression seeds first")
    while time.monotonic() - begun < seconds or queue:
        kind, number, moves = queue.pop(0) if queue else next(source)
        started = time.monotonic()
        result = run(kind, number, moves)
        episodes[kind] += 1
        counts.update({f"{kind} | {key}": n for key, n in result.counts.items()})
        if result.failure:
            failed.append(result)
            report(f"FAILED --kind {kind} --seed {number} --moves {moves} ({time.monotonic() - started:.1f} s): {result.failure}")
            if stop_at is not None and len(failed) >= stop_at:
                break
    took = time.monotonic() - begun
    total = sum(counts.values())
    report(
        f"model: {sum(episodes.values())} episodes ({', '.join(f'{k} {n}' for k, n in sorted(episodes.items()))}), "
        f"{total} moves in {took:.0f} s ({total / took:.0f} a second), {len(failed)} failed"
    )
    return failed, counts, episodes


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="model")
    parser.add_argument("--kind", action="append")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--moves", type=int, default=200)
    parser.add_argument("--drop", default="", help="numbers of steps that are left out, as 3,7-9")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--keep", action="store_true", help="leave the episode's directory")
    parser.add_argument("--totals", action="store_true", help="print the moves by kind and outcome")
    given = parser.parse_args(arguments)
    if given.seconds is not None:
        seed = given.seed if given.seed is not None else random.randrange(1 << 31)
        failed, counts, _ = session(given.seconds, seed, given.kind, report=lambda text: print(text, flush=True))
        if given.totals:
            for key, number in sorted(counts.items()):
                print(f"{number:9}  {key}")
        return 1 if failed else 0
    drop = _numbers(given.drop)
    result = run(given.kind[0], given.seed, given.moves, drop, given.keep)
    if result.failure and given.shrink:
        more, result = shrink(result)
        print("shrunk: --drop", _ranges(drop | more))
    print("\n".join(result.trace[-80:]) if result.failure else "")
    print("\n".join(result.notes))
    print(f"{sum(result.counts.values())} moves:", result.failure or "held")
    if given.totals:
        for key, number in sorted(result.counts.items()):
            print(f"{number:9}  {key}")
    return 1 if result.failure else 0


def _numbers(text):
    found = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _ranges(numbers):
    parts, numbers = [], sorted(numbers)
    while numbers:
        last = 0
        while last + 1 < len(numbers) and numbers[last + 1] == numbers[last] + 1:
            last += 1
        parts.append(str(numbers[0]) if not last else f"{numbers[0]}-{numbers[last]}")
        numbers = numbers[last + 1 :]
    return ",".join(parts)
