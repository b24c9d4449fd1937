"""Contents that name their origin: every 16 bytes contain the seed, extent, stream, generation and position.

If a buffer mixes two generations, two extents or two positions, the description lists them."""

import random

import numpy as np

CELL = 16
_spoiled = False


def spoil():
    """For tests of the model: after this call, every fifth new array has its last byte changed."""
    global _spoiled
    _spoiled = True


def spoil_now():
    return _spoiled and random.random() < 0.2


def make(seed, extent, stream, generation, size):
    """The bytes of one stream of one generation of an extent, as a writable array."""
    cells = -(-size // CELL)
    words = np.empty((cells, 4), np.uint32)
    words[:, 0] = _mark(seed)
    words[:, 1] = extent << 8 | stream
    words[:, 2] = generation
    words[:, 3] = np.arange(cells, dtype=np.uint32)
    array = words.reshape(-1).view(np.uint8)[:size]
    if size and spoil_now():
        array[-1] ^= 1
    return array


def streams(seed, extent, generation, sizes):
    """One array for each stream."""
    return [make(seed, extent, stream, generation, size) for stream, size in enumerate(sizes)]


def generation_of(arrays, seed, extent, allowed, sizes):
    """The generation among `allowed` whose contents the arrays hold, or None."""
    for generation in sorted(allowed, reverse=True):
        if all(
            np.array_equal(array, make(seed, extent, stream, generation, size))
            for stream, (array, size) in enumerate(zip(arrays, sizes))
            if array is not None
        ):
            return generation
    return None


def describe(array, seed, limit=6):
    """A description of an array as runs of cells that have one origin."""
    whole = len(array) // CELL
    if not whole:
        return f"{len(array)} bytes: {bytes(array).hex()}"
    words = np.ascontiguousarray(array[: whole * CELL]).view(np.uint32).reshape(-1, 4)
    shift = words[:, 3].astype(np.int64) - np.arange(whole)
    keys = np.column_stack([words[:, :3].astype(np.int64), shift])
    starts = np.flatnonzero(np.r_[True, (keys[1:] != keys[:-1]).any(axis=1)])
    runs = [f"from byte {start * CELL}: {_origin(keys[start], words[start], seed)}" for start in starts[:limit]]
    return "; ".join(runs) + (f"; and {len(starts) - limit} more runs" if len(starts) > limit else "")


def _origin(key, words, seed):
    if not words[:3].any():
        return "zeros"
    if words[0] == words[1] == words[2]:
        return f"the buffer's own filling {words[0]:#x}"
    if words[0] != _mark(seed):
        return f"bytes that this model never wrote ({words.tobytes().hex()})"
    moved = f", {key[3] * CELL} bytes from its place" if key[3] else ""
    return f"generation {words[2]} of stream {words[1] & 255} of extent {words[1] >> 8}{moved}"


def _mark(seed):
    return (seed * 2654435761 + 0x53505749) & 0xFFFFFFFF
