"""OptimizerStateStore: a job continues with another number of data-parallel processes, each with other parts of the parameters. Its weights
have the bits of a run in memory that nothing has interrupted."""

import textwrap

import pytest
from test_ranks import run

#: The shards of a process: its part of every parameter, of which the last processes may have none.
PARTS = """
from test_store import SIZES, in_memory
from spillway.megatron import OptimizerStateStore, Shard

class Part:
    def __init__(self):
        self.model, self.ranges = Model(), {{}}
        for name, (size, _) in SIZES.items():
            share = -(-size // {world})
            start, end = min(share * rank, size), min(share * (rank + 1), size)
            if end > start:
                self.ranges[name] = slice(start, end)
    def shards(self):
        model = self.model
        for name, place in self.ranges.items():
            grad = lambda name=name, place=place: model.grads[name][place]
            group, weight, master = model.groups[name.endswith("bias")], model.weights[name][place], model.masters[name][place]
            yield Shard(f"{{name}}[{{place.start}}:{{place.stop}}]", weight, group, grad, master)
    def has(self, steps):
        expected = dict(zip(SIZES, in_memory(range(steps))))
        return all(torch.equal(self.model.weights[name][place], expected[name][place]) for name, place in self.ranges.items())

part = Part()
def made(job, **options):
    options.update(host=f"node-{{rank}}", rank=rank, world={world}, bucket_bytes=3000, tier_options={{"durability": "process"}})
    return OptimizerStateStore(part.shards(), [folder], job=job, **options)
def train(store, steps):
    for step in steps:
        part.model.backward(step)
        store.step()
"""


@pytest.mark.sampled(cases=1)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_a_run_goes_on_with_another_number_of_processes(before, after, tmp_path):
    code = """
    store = made("first")
    train(store, range(3))
    store.commit()
    with store.snapshot(folder + "/snapshot") as snapshot:
        snapshot.wait()
    train(store, [40])
    print("done")
    store.close()
    """
    codes, outputs = run(tmp_path, PARTS.format(world=before) + textwrap.dedent(code), "first", before)
    assert codes == [0] * before and all(output[0] == "done\n" for output in outputs), outputs
    code = """
    for source in ("first", "snapshot"):
        part = Part()
        store = made("after-" + source, begin_from=folder + "/" + source)
        print(store.resumed_step, store.steps, part.has(3))
        train(store, range(3, 5))
        store.commit()
        print(part.has(5))
        store.close()
    """
    codes, outputs = run(tmp_path, PARTS.format(world=after) + textwrap.dedent(code), "next", after)
    assert codes == [0] * after and all(output[0] == "3 3 True\nTrue\n" * 2 for output in outputs), outputs
