"""Episodes with files that another program copies, removes, replaces or creates, and with missing paths.

The owner is a child of the episode. The next owner must find what the owner reported as a success, or
the commit must fail."""

import os
import shutil

import numpy as np

import spillway

from . import content
from .episode import ANY, Defect
from .processes import Child
from .tier_moves import CORRUPT, LOCKED, TierMoves

LOST, PATH_MISSING = 35, 34
SIZE = 100000


def open_tier(episode, moves, may=(), name="open", limit=15.0, **named):
    return episode.call(name, spillway.Tier, list(moves.bases), may=may, limit=limit, show=named, **{**moves.options, **named})


def write(episode, tier, generation, may=(), extents=2):
    """Puts a generation into every extent; returns True if every put succeeded."""
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
    """Reads every extent. Each holds exactly one of the generations, or is refused with a status in `may`."""
    for n in range(extents):
        extent = episode.call("define", tier.define, f"extent {n}", [SIZE]).value
        array = np.full(SIZE, 0xEE, np.uint8)
        ticket = episode.call("get", tier.get, extent, [array], may=may, show=(n,))
        if ticket.ok and episode.call("wait", tier.wait, ticket.value, 30, may=may).ok:
            if content.generation_of([array], episode.seed, n, generations, [SIZE]) is None:
                raise Defect(f"extent {n} holds none of the generations {generations}: {content.describe(array, episode.seed)}")


def found_after(episode, moves, committed, name="the next owner"):
    """Another process finds the complete state of the step."""
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
    """Each round: an owner commits, its files are attacked, and it commits again. The commit fails, or the next
    owner finds it."""
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
    """A backup by the owner's own process, which also opens and closes the file `lock`."""
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


ATTACKS = {
    "copy": _copy,
    "read the lock": _read_lock,
    "remove all": _remove_all,
    "remove data": _remove_data,
    "remove superblocks": _remove_superblocks,
    "replace data": _replace_data,
    "replace directory": _replace_directory,
    "move away": _move_away,
    "remove one path": _one_path,
    "read-only": _read_only,
}


def planted(episode):
    """Creates links, FIFOs and directories with the fixed names before an open. Nothing outside the tier may change,
    and no call may hang."""
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
    {
        "link": lambda: os.symlink(victim, target),
        "hard link": lambda: os.link(victim, target),
        "fifo": lambda: os.mkfifo(target),
        "directory": lambda: os.mkdir(target),
        "dangling": lambda: os.symlink(victim + ".new", target),
    }[what]()
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
    """Paths are missing, unreadable or blank at an open. The open is refused, or its contents are correct; it never
    returns an empty tier by mistake."""
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
        for path in files[: 2 if how == "blank superblocks" else 1]:
            os.truncate(path, 0) if how == "torn superblock" else _blank(path)
    torn = how == "torn superblock"
    answer = open_tier(episode, moves, may=ANY, degraded=flag)
    if not answer.ok:
        episode.check(not torn or answer.status in (CORRUPT, PATH_MISSING, 31, 32), f"one torn superblock of two: {answer.error}")
        if len(moves.bases) == 2 and flag and how == "away":
            raise Defect(f"a degraded open without one of two paths failed: {answer.error}")
        return
    tier = answer.value
    episode.check(
        tier.opened.step is not None,
        f"two steps are committed, {how!r} on the last of {len(moves.bases)} paths, degraded={flag}: the open found "
        f"nothing and made an empty tier of {len(tier.paths())} paths",
    )
    legal = [2] if not torn else [1, 2]
    episode.check(tier.opened.step in legal, f"the open found step {tier.opened.step}; possible are {legal}")
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


KINDS = {"attacks": attacks, "planted": planted, "degraded": degraded}
