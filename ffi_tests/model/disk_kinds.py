"""Episodes with full disks and with a file system that freezes."""

import os
import resource
import subprocess
import time

import numpy as np

import spillway

from . import content
from .episode import ANY
from .file_kinds import SIZE, open_tier, read, write
from .processes import Child
from .tier_moves import BUSY, TierMoves


def full(episode):
    """Limits the data file or the sizes of files, or uses a small file system. Errors must name the limit, and
    committed data must stay."""
    draw = episode.random("full")
    how, mounted = draw.choice(("limit", "rlimit", "tmpfs")), None
    if how == "rlimit" and "file size limit" in episode.without:
        how = "limit"
    base = episode.path("small")
    os.mkdir(base)
    moves = TierMoves(episode, bases=[base], host="here")
    if how == "tmpfs":
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", base], capture_output=True, text=True)
        if mounted.returncode:
            episode.note(f"not run: mount: {mounted.stderr.strip()}")
            how = "limit"
    if how == "limit":
        moves.bases = [spillway.TierPath(base, limit_bytes=1 << 20)]
    try:
        Child(episode, _fills, moves, how, name=f"the owner with a full disk by {how}").end(90)
    finally:
        if mounted is not None and mounted.returncode == 0:
            subprocess.run(["umount", base], check=True)


def _fills(child, moves, how):
    episode, committed, step = child.episode, {}, 0
    may = (20, 21, 27, BUSY)
    if how == "rlimit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    tier = open_tier(episode, moves).value
    now = {}
    for number, draw in episode.steps():
        name = draw.randrange(6)
        extent = episode.call("define", tier.define, f"extent {name}", [SIZE]).value
        arrays = content.streams(episode.seed, name, number + 1, [SIZE])
        ticket = episode.call("put", tier.put, extent, arrays, may=may, show=(name, number + 1))
        if ticket.ok and episode.call("wait", tier.wait, ticket.value, 30, may=may).ok:
            now[name] = number + 1
        else:
            episode.call("rollback", tier.rollback)
            now = dict(committed)
        if draw.random() < 0.3:
            if episode.call("commit", tier.commit, number + 1, may=may).ok:
                committed, step = dict(now), number + 1
        if draw.random() < 0.1:
            episode.call("close", tier.close)
            tier = open_tier(episode, moves).value
            episode.check((tier.opened.step or 0) == step, f"the open found step {tier.opened.step}, {step} was committed")
            now = dict(committed)
        if now and draw.random() < 0.3:
            name = draw.choice(sorted(now))
            extent, array = episode.call("define", tier.define, f"extent {name}", [SIZE]).value, np.zeros(SIZE, np.uint8)
            episode.call("wait", tier.wait, episode.call("get", tier.get, extent, [array], show=(name,)).value)
            episode.check(
                np.array_equal(array, content.make(episode.seed, name, 0, now[name], SIZE)),
                f"extent {name} holds {content.describe(array, episode.seed)}, not generation {now[name]}",
            )
    episode.call("close", tier.close)


def frozen(episode):
    """Freezes the file system of one of two paths for a while. The other path continues, calls keep their timeout,
    and no data is lost."""
    image, base = episode.path("image"), episode.path("frozen")
    os.mkdir(base)
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    for command in (["mkfs.ext4", "-qF", image], ["mount", "-o", "loop", image, base]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            episode.note(f"not run: {' '.join(command[:1])}: {done.stderr.strip()}")
            return
    try:
        moves = TierMoves(episode, bases=[base, episode.path("good")], host="here", io_timeout=5.0)
        child = Child(episode, _freezes, moves, name="the owner with a frozen path")
        child.expect("committed")
        subprocess.run(["fsfreeze", "-f", base], check=True)
        try:
            child.expect("wrote", 120)
        finally:
            subprocess.run(["fsfreeze", "-u", base], check=True)
        child.end(60)
    finally:
        for _ in range(50):
            if subprocess.run(["umount", base], capture_output=True).returncode == 0:
                break
            time.sleep(0.1)


def _freezes(child, moves):
    episode, tier = child.episode, open_tier(child.episode, moves).value
    write(episode, tier, 1, extents=6)
    episode.call("commit", tier.commit, 1)
    child.send(word="committed")
    time.sleep(0.5)
    quick = 15.0
    tickets = []
    for n in range(6):
        extent = episode.call("define", tier.define, f"extent {n}", [SIZE], limit=quick).value
        arrays = content.streams(episode.seed, n, 2, [SIZE])
        answer = episode.call("put", tier.put, extent, arrays, may=ANY, limit=quick, show=(n,))
        if answer.ok:
            tickets.append(answer.value)
    episode.call("paths", tier.paths, limit=quick)
    for ticket in tickets:
        episode.call("wait", tier.wait, ticket, 5, may=ANY, limit=quick)
    child.send(word="wrote")
    time.sleep(0.5)
    answer = episode.call("commit", tier.commit, 2, may=ANY, limit=20)
    read(episode, tier, [1, 2], may=ANY, extents=6)
    episode.call("close", tier.close, 20, may=ANY)
    if answer.ok:
        again = open_tier(episode, moves, mode="resume", may=ANY)
        episode.check(again.ok and again.value.opened.step == 2, f"step 2 was committed; the open: {again.error or again.value.opened}")


KINDS = {"full": full, "frozen": frozen}
