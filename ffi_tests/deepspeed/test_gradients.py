"""Proves that every way in which a gradient reaches a step under DeepSpeed comes to DeepSpeed's own result, to the bit, for
every place of the optimizer states; or that both refuse it. Masters and moments are compared after every step.

A cell of the table is a way of gradients.py, a place, a dtype, a number of micro-batches and a limit of the norm. The
suite runs a random sample of cells, `make test-long` all of them, and SPILLWAY_CELLS=30 thirty."""

import itertools
import json
import os
import random

import gradients
import sampled

# For each place of the states the run of DeepSpeed alone that it must equal. "tier zero" uses a gradient of zero for a
# parameter without one, so that DeepSpeed's run gets these zeros; the other tiers use its last gradient, as DeepSpeed does.
PLACES = {
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
    "swapper": "swapper",
    "tier": "zero3",
    "tier zero": "zero3",
    "tier split": "zero3",
    "tier resume": "zero3",
    "superoffload": "zero3",
    "superoffload tail": "zero3",
    "interleave": "zero3",
    "interleave residents": "zero3",
}


def cell_of(way, place, dtype, micro_batches, clip, zero=False):
    found = {"way": way, "adapter": place, "dtype": dtype, "micro_batches": micro_batches, "clip": clip, "zero": zero}
    return {**found, "key": json.dumps(list(found.values()))}


def cells():
    """The whole table."""
    for way, place, dtype, micro_batches, clip in itertools.product(
        gradients.WAYS, PLACES, ("bf16", "fp16", *gradients.AUTOCAST), (1, 2, 3), (0.0, 0.02)
    ):
        yield cell_of(way, place, dtype, micro_batches, clip)


def deepspeeds(cell):
    """The cell that DeepSpeed alone runs for comparison."""
    zero = cell["adapter"] == "tier zero"
    return cell_of(cell["way"], PLACES[cell["adapter"]], cell["dtype"], cell["micro_batches"], cell["clip"], zero)


def chosen():
    """A sample that has every way and every place, or as many cells as SPILLWAY_CELLS says."""
    table, wanted = list(cells()), os.environ.get("SPILLWAY_CELLS", "")
    if sampled.LONG:
        return table
    source = random.Random(sampled.SEED)
    source.shuffle(table)
    if wanted:
        return table[: int(wanted)]
    found, ways, places = [], set(gradients.WAYS), 2 * list(PLACES)
    for cell in table:
        if cell["dtype"] in ("bf16", "autocast fp16") and cell["way"] in ways and (cell["adapter"] in places or len(places) == 0):
            found.append(cell)
            ways.discard(cell["way"])
            if places:
                places.remove(cell["adapter"])
    return found


def results(starter, folder, cells):
    """What each cell came to. torch_autocast stays on in a process for the engines after it, so each dtype has a process."""
    found = {}
    for dtype in sorted({cell["dtype"] for cell in cells}):
        given, result = folder / f"{dtype}.json", folder / f"{dtype}-result.json"
        given.write_text(json.dumps([cell for cell in cells if cell["dtype"] == dtype]))
        environment = {name: value for name, value in os.environ.items() if name != "SPILLWAY_LIBRARY"}
        done = starter.run([gradients.__file__, given, folder / dtype, result], {**environment, "OMP_NUM_THREADS": "1"}, 3000)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        found.update(json.loads(result.read_text()))
    return found


def difference(cell, ours, theirs):
    """What is wrong in a cell; None if nothing is."""
    if "error" in ours and any(words in ours["error"] for words in REFUSED.get(cell["adapter"], ())):
        # An error before anything changed.
        return None if ours["digests"] == theirs["digests"][: len(ours["digests"])] else f"refused after a change: {ours}"
    if "error" in theirs:
        return None if "error" in ours else f"DeepSpeed refuses it: {theirs['error']}"
    if "error" in ours:
        return ours["error"]
    served = SERVED.get(cell["adapter"], "cpu_adam")
    if served not in ours["served"]:
        return f"not served: {ours['served']}"
    same = [mine == other for mine, other in zip(ours["digests"], theirs["digests"])]
    return None if all(same) and len(same) == gradients.STEPS else f"the same after each step: {same}"


SERVED = {
    "superoffload": "superoffload",
    "superoffload tail": "superoffload",
    "interleave": "interleave",
    "interleave residents": "interleave",
    **dict.fromkeys(gradients.BLOCKS, "tier"),
    "swapper": "cpu_adam",
}
_OF_INTERLEAVE = ("the model's weights have 32 bits", "torch's gradient scaler unscales")
# What Spillway refuses where DeepSpeed goes on, by place.
REFUSED = {
    "superoffload tail": ("torch's gradient scaler unscales",),
    "interleave": _OF_INTERLEAVE,
    "interleave residents": _OF_INTERLEAVE,
    "tier": ("torch's gradient scaler would step only",),
    "tier resume": ("torch's gradient scaler would step only",),
    "tier split": ("have to be bfloat16",),
}


def test_every_way_of_a_gradient_comes_to_deepspeeds_own_bits(starter, native_starter, compiled, tmp_path):
    compiled("cpu_adam"), compiled("async_io")
    some = chosen()
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    ours = results(starter, tmp_path / "ours", some)
    theirs = results(native_starter, tmp_path / "theirs", list({cell["key"]: cell for cell in map(deepspeeds, some)}.values()))
    wrong = {cell["key"]: found for cell in some if (found := difference(cell, ours[cell["key"]], theirs[deepspeeds(cell)["key"]]))}
    assert ours["active"] and not theirs["active"]
    assert not wrong, f"{len(wrong)} of {len(some)} cells: " + json.dumps(wrong, indent=1)
    refused = sum("error" in ours[cell["key"]] for cell in some)
    print(f"{len(some)} cells, {refused} refused by both or by Spillway with a reason")
    assert refused < len(some) / 3


def test_the_sample_has_every_way_and_every_place():
    some = chosen()
    assert {cell["way"] for cell in some} == set(gradients.WAYS) or os.environ.get("SPILLWAY_CELLS")
    assert len({cell["key"] for cell in cells()}) > 400
