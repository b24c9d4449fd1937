"""Episodes of swapped and of speculative steps. A twin does the same with spillway.Adam in memory, and the
bits must be equal."""

import os
import threading

import numpy as np

import spillway

from . import content
from .episode import Defect
from .tier_moves import BUSY, INVALID, TIMEOUT

BF16 = "bf16"


def numbers(generator, count):
    """Float32 numbers of mixed sizes."""
    return (generator.standard_normal(count) * 10.0 ** generator.integers(-6, 3)).astype(np.float32)


def same(ours, twin, what):
    if content.spoil_now():
        twin = twin + twin.dtype.type(1)
    ours, twin = ours.view(np.uint8), twin.view(np.uint8)
    if not np.array_equal(ours, twin):
        first = int(np.flatnonzero(ours != twin)[0])
        raise Defect(f"{what} differs from its twin at byte {first} of {ours.size}, in {(ours != twin).sum()} bytes")


class Swapped:
    """A swap on a tier, and its twin."""

    def __init__(self, episode):
        self.episode, draw = episode, episode.random("swap")
        self.generator = np.random.default_rng(episode.seed)
        self.bases = [episode.path(f"path{n}") for n in range(draw.choice((1, 1, 2)))]
        for base in self.bases:
            os.mkdir(base)
        self.elements = [draw.choice((1, 17, 4096, 20000, 50001)) for _ in range(draw.choice((1, 2, 5)))]
        self.options = {"huge_pages": False, "pin_memory": draw.random() < 0.5, "host_memory": draw.choice((None, None, 1 << 22))}
        self.tier_options = {
            "job": "swap",
            "turns": int(draw.random() < 0.2),
            "block_bytes": draw.choice((4096, 65536)),
            "backend": draw.choice(("auto", "threads")),
        }
        self.half = draw.random() < 0.5
        self.twin = [[numbers(self.generator, n), np.zeros(n, np.float32), np.zeros(n, np.float32)] for n in self.elements]
        self.adam = spillway.Adam(lr=1e-3, weight_decay=0.01)
        self.twin_adam = spillway.Adam(lr=1e-3, weight_decay=0.01)
        self.step_number, self.saved = 0, None

    def open(self):
        self.tier = self.episode.call("open", spillway.Tier, list(self.bases), show=(), **self.tier_options).value
        self.swap = self.episode.call("swap open", spillway.Swap, self.tier, self.elements, show=(), **self.options).value

    def close(self):
        self.episode.call("swap close", self.swap.close)
        self.episode.call("close", self.tier.close)

    def step(self, draw):
        lr, scale = 10.0 ** -draw.randrange(2, 6), draw.choice((1.0, 0.5, 1 / 1024))
        rows, twin_rows = [], []
        for n, (param, first, second) in zip(self.elements, self.twin):
            grad = numbers(self.generator, n)
            weight, twin_weight = (np.zeros(n, np.uint16), np.zeros(n, np.uint16)) if self.half else (None, None)
            rows.append((grad, weight))
            twin_rows.append((param, grad, first, second, *([twin_weight] if self.half else [])))
        self.adam.lr = self.twin_adam.lr = lr
        found = self.episode.call(
            "swap step", self.swap.step, self.adam, rows, grad_scale=scale, return_stats=True, uint16_dtype=BF16, show=(lr, scale)
        ).value
        twin = self.twin_adam.step(twin_rows, grad_scale=scale, return_stats=True, uint16_dtype=BF16)
        self.episode.check(found == twin, f"the step's statistics are {found}, the twin's {twin}")
        for (_, weight), (*_, twin_weight) in zip(rows, twin_rows):
            if self.half:
                same(weight, twin_weight, "a weight")

    def read(self, draw):
        number = draw.randrange(len(self.elements))
        arrays = [np.full(self.elements[number], -7, np.float32) if draw.random() < 0.8 else None for _ in range(3)]
        self.episode.call("swap read", self.swap.read, number, *arrays, show=(number,))
        for name, array, twin in zip(("param", "exp_avg", "exp_avg_sq"), arrays, self.twin[number]):
            if array is not None:
                same(array, twin, f"{name} of subgroup {number}")

    def write(self, draw):
        number = draw.randrange(len(self.elements))
        arrays = [np.abs(numbers(self.generator, self.elements[number])) if draw.random() < 0.5 else None for _ in range(3)]
        self.episode.call("swap write", self.swap.write, number, *arrays, show=(number,))
        for array, twin in zip(arrays, self.twin[number]):
            if array is not None:
                twin[:] = array

    def commit(self, draw):
        self.step_number += 1
        self.episode.call("swap commit", self.swap.commit, self.step_number, b"payload", show=(self.step_number,))
        self.saved = ([[array.copy() for array in row] for row in self.twin], self.twin_adam.step_count, self.step_number)

    def rollback(self, draw):
        if self.saved:
            self.episode.call("swap rollback", self.swap.rollback)
            self.restore()

    def restore(self):
        rows, count, self.step_number = self.saved
        self.twin = [[array.copy() for array in row] for row in rows]
        self.adam.step_count = self.twin_adam.step_count = count

    def stats(self, draw):
        budget = self.swap.budget
        self.episode.call("swap stats", lambda: self.swap.stats(), show=())
        self.episode.check(budget.buffers >= 1, "the operation has no buffer")

    def meddle(self, draw):
        """The tier while an update uses it: no other call commits or rolls it back."""
        for name, arguments in (("commit", (99,)), ("rollback", ())):
            self.episode.call("tier " + name + " under a swap", getattr(self.tier, name), *arguments, may=(BUSY, INVALID))

    def reopen(self, draw):
        if not self.saved:
            return
        self.close()
        self.open()
        self.episode.check(self.tier.opened.step == self.saved[2], f"the open found step {self.tier.opened.step}")
        self.restore()

    def wrong(self, draw):
        """Refused calls change nothing."""
        for arguments in ((self.adam, [(np.zeros(3, np.float32), None)]), (object(), [])):
            self.episode.check(
                not self.episode.call("swap step", self.swap.step, *arguments, may=(INVALID,), show=("wrong",)).ok,
                "a step with wrong tensors succeeded",
            )


def swap(episode):
    """Steps, reads, writes, commits, rollbacks and reopens of a swapped update."""
    swapped = Swapped(episode)
    swapped.open()
    episode.call("swap fill", swapped.swap.fill, [tuple(row) for row in swapped.twin], show=())
    for _, draw in episode.steps():
        name = draw.choices(("step", "read", "write", "commit", "rollback", "stats", "reopen", "wrong"), (10, 10, 3, 4, 3, 1, 1, 1))[0]
        getattr(swapped, name)(draw)
    for number in range(len(swapped.elements)):
        swapped.read(episode.random("end", number))
    swapped.commit(None)
    swapped.reopen(None)
    for number in range(len(swapped.elements)):
        swapped.read(episode.random("end", number))
    swapped.close()


def speculation(episode):
    """Rounds whose buckets arrive in any order, by events, from two threads; a twin waits for the
    norm and steps once."""
    draw, generator = episode.random("speculation"), np.random.default_rng(episode.seed)
    count, publish = draw.choice((1, 2, 5)), draw.choice(("final", "staged", "speculative"))
    engine = episode.call("spec open", spillway.Speculation, count, publish=publish).value
    sizes = [[draw.choice((1, 100, 5000, 70001)) for _ in range(draw.choice((1, 3)))] for _ in range(count)]
    state = [[_tensor(generator, n) for n in row] for row in sizes]
    twin = [[tuple(array.copy() for array in tensor) for tensor in row] for row in state]
    adam, twin_adam = spillway.Adam(lr=1e-3), spillway.Adam(lr=1e-3)
    for number, draw in episode.steps():
        if number % 4:
            continue
        _round(episode, draw, generator, engine, adam, twin_adam, state, twin)
        for row, twin_row in zip(state, twin):
            for tensor, twin_tensor in zip(row, twin_row):
                for name, ours, theirs in zip(("param", "grad", "exp_avg", "exp_avg_sq", "copy"), tensor, twin_tensor):
                    if name != "grad":
                        same(ours, theirs, name)
    if draw.random() < 0.3:
        engine.begin(adam)
        engine.submit(0, state[0], uint16_dtype=BF16)
    episode.call("spec close", engine.close)


def _tensor(generator, n):
    return (numbers(generator, n), np.zeros(n, np.float32), np.zeros(n, np.float32), np.zeros(n, np.float32), np.zeros(n, np.uint16))


def _round(episode, draw, generator, engine, adam, twin_adam, state, twin):
    for row, twin_row in zip(state, twin):
        for tensor, twin_tensor in zip(row, twin_row):
            tensor[1][:] = numbers(generator, len(tensor[1]))
            if draw.random() < 0.03:
                tensor[1][0] = np.inf
            twin_tensor[1][:] = tensor[1]
    # A copy is defined only after its step counts: a round that counts nothing leaves it undefined
    # for "staged" and "speculative".
    before = [[tensor[4].copy() for tensor in row] for row in twin]
    limit, scale = draw.choice((0.0, 1e-3, 1.0, 1e9)), draw.choice((1.0, 0.5, 1 / 4096))
    episode.call("spec begin", engine.begin, adam, max_norm=limit, grad_scale=scale)
    refused = episode.call("spec begin", engine.begin, adam, may=(41, BUSY))
    episode.check(not refused.ok, "begin succeeded while a round was open")
    order = list(range(len(state)))
    draw.shuffle(order)
    abort = draw.random() < 0.1
    events = _submit(episode, draw, engine, state, order[:-1] if abort else order)
    if not abort:
        for bucket in order[:1]:
            again = episode.call("spec submit", engine.submit, bucket, state[bucket], uint16_dtype=BF16, may=(44,), show=("again",))
            episode.check(not again.ok, "a bucket was submitted twice")
    if events and draw.random() < 0.5:
        episode.call("spec local_result", engine.local_result, 0.001, may=(TIMEOUT, 43))
    for event in events:
        os.eventfd_write(event, 1)
    if abort:
        episode.call("spec abort", engine.abort)
        verdict = None
    else:
        total = episode.call("spec local_result", engine.local_result, draw.choice((None, 20.0))).value
        if draw.random() < 0.3:
            verdict = draw.choice(("commit", "skip", "redo")) if not total.nonfinite else "skip"
            factor = scale * 0.5 if verdict == "redo" else scale
            episode.call("spec resolve_as", engine.resolve_as, verdict, factor)
        else:
            outcome = episode.call("spec resolve", engine.resolve, total, show=()).value
            verdict, factor = _verdict(total, limit, scale)
            episode.check(
                outcome.verdict == verdict,
                f"the verdict is {outcome.verdict}, the twin's {verdict}: {outcome}, {total}, limit {limit}, scale {scale}",
            )
        for bucket in draw.sample(order, draw.randrange(len(order) + 1)):
            episode.call("spec wait", engine.wait, bucket, draw.choice((None, 20.0)))
            episode.call("spec bucket_state", engine.bucket_state, bucket)
        episode.call("spec finish", engine.finish, draw.choice((None, 20.0)))
        episode.call("spec rolled_back_buckets", engine.rolled_back_buckets)
    for event in events:
        os.close(event)
    if verdict in ("commit", "redo"):
        twin_adam.step([tensor for row in twin for tensor in row], grad_scale=factor, uint16_dtype=BF16)
    else:
        # Nothing counts; the contents of the copies are then undefined.
        for row, twin_row, old in zip(state, twin, before):
            for tensor, twin_tensor, copy in zip(row, twin_row, old):
                tensor[4][:] = twin_tensor[4][:] = copy


def _verdict(total, limit, scale):
    """SuperOffload's rule, as the header documents it: the factor is computed in f64 and rounded to f32 once."""
    if total.nonfinite:
        return "skip", 0
    norm = float(np.sqrt(np.float64(total.sum_squares)))
    if limit == 0 or norm <= limit and scale * min(1.0, limit / (norm + 1e-6)) == scale:
        return "commit", scale
    factor = scale * min(1.0, limit / (norm + 1e-6))
    same_factor = np.float32(factor) == np.float32(scale)
    return ("commit", scale) if same_factor else ("redo", float(np.float32(factor)))


def _submit(episode, draw, engine, state, order):
    events, table = [], {}
    for bucket in order:
        if draw.random() < 0.4:
            table[bucket] = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            events.append(table[bucket])

    failures = []

    def some(buckets):
        try:
            for bucket in buckets:
                episode.call(
                    "spec submit", engine.submit, bucket, state[bucket], event_fd=table.get(bucket), uint16_dtype=BF16, show=(bucket,)
                )
        except BaseException as error:
            failures.append(error)

    if draw.random() < 0.5:
        some(order)
    else:
        halves = [threading.Thread(target=some, args=(order[n::2],)) for n in range(2)]
        for half in halves:
            half.start()
        for half in halves:
            half.join(60)
    if failures:
        raise failures[0]
    return events


KINDS = {"swap": swap, "speculation": speculation}
