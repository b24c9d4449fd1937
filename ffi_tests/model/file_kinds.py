"""Episodes with files that others copy, remove, replace or plant, with full disks, and with a file system that freezes.

The owner is a child of the episode; what it says with success has to be found by the next owner, or its commit has to fail."""

import ctypes
import os
import resource
import shutil
import subprocess
import time

import numpy as np

import spillway

from . import content
from .episode import ANY, Defect
from .processes import Child
from .tier_moves import BUSY, CORRUPT, INVALID, LOCKED, TierMoves
from .tier_oracle import NEVER

LOST, PATH_MISSING = 35, 34
SIZE = 100000


def open_tier(episode, moves, may=(), name="open", limit=15.0, **named):
    return episode.call(name, spillway.Tier, list(moves.bases), may=may, limit=limit, show=named, **{**moves.options, **named})


def write(episode, tier, generation, may=(), extents=2):
    """Puts a generation into every extent; True if all of it was answered with success."""
    good = True
    for n in range(extents):
        extent = episode.call("define", tier.define, f"extent {n}", [SIZE], may=may)
        if not extent.ok:
            return False
        arrays = content.streams(episode.seed, n, generation, [SIZE])
        ticket = episode.call("put", tier.put, extent.value, arrays, may=may, show=(n, generation))
        good = ticket.ok and episode.call("wait", tier.wait, ticket.value, 30, may=may).ok and good
    return good


def read(episode, tier, generations, may=(), extents=2):
    """Reads every extent; each holds one of the generations, whole, or is refused with a status in `may`."""
    for n in range(extents):
        extent = episode.call("define", tier.define, f"extent {n}", [SIZE]).value
        array = np.full(SIZE, 0xEE, np.uint8)
        ticket = episode.call("get", tier.get, extent, [array], may=may, show=(n,))
        if ticket.ok and episode.call("wait", tier.wait, ticket.value, 30, may=may).ok:
            if content.generation_of([array], episode.seed, n, generations, [SIZE]) is None:
                raise Defect(f"extent {n} holds none of the generations {generations}: {content.describe(array, episode.seed)}")


def found_after(episode, moves, committed, name="the next owner"):
    """Another process finds the state of the step, whole."""
    Child(episode, _finds, moves, committed, name=name).end(60)


def _finds(child, moves, committed):
    tier = open_tier(child.episode, moves, mode="resume").value
    child.episode.check(tier.opened.step == committed, f"step {committed} was committed; the open found {tier.opened.step}")
    read(child.episode, tier, [committed])
    child.episode.call("close", tier.close)


def rank(moves, number=0):
    host = os.uname().nodename
    return os.path.join(moves.bases[number], "model", moves.options.get("host") or host, "rank-0")


def attacks(episode):
    """Each round: an owner commits, its files are attacked, and it commits again: with an error, or found by the next owner."""
    for number in range(max(1, episode.moves // 40)):
        if number in episode.drop:
            continue
        draw = episode.random("attack", number)
        bases = [episode.path(f"round{number}.{n}") for n in range(draw.choice((1, 2)))]
        moves = TierMoves(episode, bases=bases, host="here")
        how = draw.choice([how for how in ATTACKS if how not in episode.without])
        episode.note(f"# attack {how}")
        Child(episode, _owner, moves, how, name=f"the owner under {how!r}").end(60)


def _owner(child, moves, how):
    episode, tier = child.episode, open_tier(child.episode, moves).value
    write(episode, tier, 1)
    episode.call("commit", tier.commit, 1)
    ATTACKS[how](episode, moves)
    if how in ("copy", "read the lock"):
        other = Child(episode, _second, moves, name=f"a second opener after {how!r}")
        other.end(30)
    good = write(episode, tier, 2, may=ANY)
    answer = episode.call("commit", tier.commit, 2, b"", may=ANY)
    if good and answer.ok:
        read(episode, tier, [2])
    else:
        read(episode, tier, [1, 2], may=ANY)
    closed = episode.call("close", tier.close, 20, may=ANY)
    if answer.ok and closed.ok:
        found_after(episode, moves, 2, f"the next owner after {how!r} and a commit that succeeded")


def _second(child, moves):
    answer = open_tier(child.episode, moves, may=(LOCKED,), name="second process opens")
    child.episode.check(not answer.ok, "a second process opened the tier while its owner lives")


def _copy(episode, moves):
    """A backup by the owner itself, which opens and closes the file `lock` too."""
    shutil.copytree(moves.bases[0], episode.path("backup"), dirs_exist_ok=True)


def _read_lock(episode, moves):
    with open(os.path.join(rank(moves), "lock"), "rb") as lock:
        lock.read(1 << 16)


def _remove_all(episode, moves):
    for number in range(len(moves.bases)):
        shutil.rmtree(os.path.join(moves.bases[number], "model"))


def _remove_data(episode, moves):
    for number in range(len(moves.bases)):
        os.unlink(os.path.join(rank(moves, number), "data"))


def _remove_superblocks(episode, moves):
    for number in range(len(moves.bases)):
        for name in ("superblock.0", "superblock.1"):
            path = os.path.join(rank(moves, number), name)
            if os.path.exists(path):
                os.unlink(path)


def _replace_data(episode, moves):
    for number in range(len(moves.bases)):
        path = os.path.join(rank(moves, number), "data")
        shutil.copyfile(path, path + ".new")
        os.rename(path + ".new", path)


def _replace_directory(episode, moves):
    for number in range(len(moves.bases)):
        path = rank(moves, number)
        os.rename(path, path + ".old")
        shutil.copytree(path + ".old", path)


def _move_away(episode, moves):
    for number in range(len(moves.bases)):
        os.rename(rank(moves, number), rank(moves, number) + ".away")


def _one_path(episode, moves):
    shutil.rmtree(os.path.join(moves.bases[-1], "model"))


def _read_only(episode, moves):
    for number in range(len(moves.bases)):
        os.chmod(rank(moves, number), 0o500)
        os.chmod(os.path.join(rank(moves, number), "data"), 0o400)


ATTACKS = {"copy": _copy, "read the lock": _read_lock, "remove all": _remove_all, "remove data": _remove_data,
           "remove superblocks": _remove_superblocks, "replace data": _replace_data, "replace directory": _replace_directory,
           "move away": _move_away, "remove one path": _one_path, "read-only": _read_only}


def planted(episode):
    """Links, FIFOs and directories under the fixed names before an open: nothing outside the tier changes, nothing hangs."""
    for number in range(max(1, episode.moves // 20)):
        if number in episode.drop:
            continue
        draw = episode.random("plant", number)
        moves = TierMoves(episode, bases=[episode.path(f"plant{number}")], host="here")
        after = draw.random() < 0.4
        what = draw.choice([what for what in ("link", "hard link", "fifo", "directory", "dangling") if what not in episode.without])
        name = draw.choice(("lock", "data", "superblock.0", "superblock.1"))
        episode.note(f"# plant {what} {name} {'after a commit' if after else ''}")
        Child(episode, _plants, moves, what, name, after, name=f"the opener of a planted {what} {name}").end(60)


def _plants(child, moves, what, name, after):
    episode = child.episode
    os.makedirs(rank(moves), exist_ok=True)
    if after:
        tier = open_tier(episode, moves).value
        write(episode, tier, 1)
        episode.call("commit", tier.commit, 1)
        episode.call("close", tier.close)
    target, victim = os.path.join(rank(moves), name), episode.path(f"victim{os.path.basename(moves.bases[0])}")
    with open(victim, "wb") as file:
        file.write(b"the victim's own words " * 1000)
    before = open(victim, "rb").read()
    if os.path.exists(target):
        os.unlink(target)
    {"link": lambda: os.symlink(victim, target), "hard link": lambda: os.link(victim, target), "fifo": lambda: os.mkfifo(target),
     "directory": lambda: os.mkdir(target), "dangling": lambda: os.symlink(victim + ".new", target)}[what]()
    answer = open_tier(episode, moves, may=ANY)
    if answer.ok:
        tier = answer.value
        generation = (tier.opened.step or 0) + 1
        if write(episode, tier, generation, may=ANY) and episode.call("commit", tier.commit, generation, may=ANY).ok:
            read(episode, tier, [generation])
        episode.call("close", tier.close, 20, may=ANY)
    episode.check(open(victim, "rb").read() == before, f"a planted {what} named {name} let the open change a file outside the tier")
    episode.check(not os.path.exists(victim + ".new"), f"a planted {what} named {name} let the open make a file outside the tier")


def degraded(episode):
    """Paths that are gone, unreadable or blank at an open: refused, or what is there is right; never an empty tier by chance."""
    for number in range(max(1, episode.moves // 30)):
        if number in episode.drop:
            continue
        draw = episode.random("degraded", number)
        moves = TierMoves(episode, bases=[episode.path(f"gone{number}.{n}") for n in range(draw.choice((1, 2)))], host="here")
        how = draw.choice(("away", "blank superblocks", "no superblocks", "torn superblock"))
        name = f"the opener of {len(moves.bases)} paths, the last with {how!r}"
        episode.note(f"# {name}")
        Child(episode, _degrades, moves, how, draw.random() < 0.6, name=name).end(60)


def _degrades(child, moves, how, flag):
    episode = child.episode
    tier = open_tier(episode, moves).value
    for step in (1, 2):
        write(episode, tier, step, extents=6)
        episode.call("commit", tier.commit, step)
    on_last = tier.paths()[-1].blocks
    episode.call("close", tier.close)
    last, gone = len(moves.bases) - 1, moves.bases[-1]
    files = [os.path.join(rank(moves, last), f"superblock.{n}") for n in range(2)]
    if how == "away":
        os.rename(gone, gone + ".away")
    elif how == "no superblocks":
        [os.unlink(path) for path in files]
    else:
        for path in files[:2 if how == "blank superblocks" else 1]:
            os.truncate(path, 0) if how == "torn superblock" else _blank(path)
    torn = how == "torn superblock"
    answer = open_tier(episode, moves, may=ANY, degraded=flag)
    if not answer.ok:
        episode.check(not torn or answer.status in (CORRUPT, PATH_MISSING, 31, 32), f"one torn superblock of two: {answer.error}")
        if len(moves.bases) == 2 and flag and how == "away":
            raise Defect(f"a degraded open without one of two paths failed: {answer.error}")
        return
    tier = answer.value
    episode.check(tier.opened.step is not None,
                  f"two steps are committed, {how!r} on the last of {len(moves.bases)} paths, degraded={flag}: the open found "
                  f"nothing and made an empty tier of {len(tier.paths())} paths")
    legal = [2] if not torn else [1, 2]
    episode.check(tier.opened.step in legal, f"the open found step {tier.opened.step}, legal are {legal}")
    if on_last and not torn:
        episode.check(flag, "an open without a path that has blocks succeeded without degraded")
    if torn:
        read(episode, tier, [tier.opened.step], extents=6)
    else:
        read(episode, tier, [2], may=(LOST, PATH_MISSING, CORRUPT), extents=6)
    episode.call("close", tier.close)


def _blank(path):
    with open(path, "r+b") as file:
        file.write(bytes(os.path.getsize(path)))


def full(episode):
    """A limit on the data file, on the sizes of files, or a small file system: errors say so, what was committed stays."""
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
            episode.check(np.array_equal(array, content.make(episode.seed, name, 0, now[name], SIZE)),
                          f"extent {name} holds {content.describe(array, episode.seed)}, not generation {now[name]}")
    episode.call("close", tier.close)


def frozen(episode):
    """One of two paths on a file system that is frozen for a while: the other goes on, calls keep their time, nothing is lost."""
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
        moves = TierMoves(episode, bases=[base, episode.path("good")], host="here", stall_seconds=1.0)
        child = Child(episode, _freezes, moves, name="the owner with a frozen path")
        child.expect("committed")
        subprocess.run(["fsfreeze", "-f", base], check=True)
        try:
            child.expect("wrote", 40)
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
    quick = 8.0
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


KINDS = {"attacks": attacks, "planted": planted, "degraded": degraded, "full": full, "frozen": frozen}
