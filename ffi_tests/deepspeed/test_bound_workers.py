"""Proves that the command for DeepSpeed's launcher gives the ranks of `spillway topo`, and that SuperOffload binds the workers to
the share cpuadam_cores_perc, and the trainer to nothing."""

import json
import os
import pathlib
import re
import subprocess

import pytest

numa = pytest.importorskip("deepspeed.utils.numa")


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def _machine(root, packages, cores, threads, gpus):
    """Packages of one node each. The second processors of all cores follow the first ones."""
    count = packages * cores
    _write(root / "sys/devices/system/cpu/online", f"0-{count * threads - 1}")
    mask = lambda cpus: (
        f"{sum(1 << cpu for cpu in cpus):x}"
        if max(cpus) < 32
        else ",".join(f"{sum(1 << cpu for cpu in cpus) >> 32 * word & 0xFFFFFFFF:08x}" for word in reversed(range(max(cpus) // 32 + 1)))
    )
    own = {}
    for cpu in range(count * threads):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        _write(topology / "core_cpus", mask([cpu % count + count * thread for thread in range(threads)]))
        own.setdefault(cpu % count // cores, []).append(cpu)
    for node, cpus in own.items():
        _write(root / f"sys/devices/system/node/node{node}/cpumap", mask(cpus))
        for cpu in cpus:
            _write(root / f"sys/devices/system/cpu/cpu{cpu}/topology/package_cpus", mask(cpus))
    for gpu in range(gpus):
        folder = root / f"sys/bus/pci/devices/00{gpu}9:01:00.0"
        for name, text in {"class": "0x030200", "vendor": "0x10de", "device": "0x2342", "numa_node": gpu * packages // gpus}.items():
            _write(folder / name, text)


@pytest.mark.parametrize("packages, cores, threads, gpus", [(4, 72, 1, 4), (2, 8, 2, 2), (2, 8, 2, 8), (1, 4, 1, 1)])
def test_deepspeeds_launcher_binds_the_same_cores(tmp_path, monkeypatch, packages, cores, threads, gpus):
    tool = pathlib.Path(os.environ["SPILLWAY_LIBRARY"]).parent / "spillway"
    if not tool.exists():
        pytest.skip("the tool spillway is not built")
    _machine(tmp_path, packages, cores, threads, gpus)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    made = subprocess.run([tool, "topo", "--json", "--root", tmp_path], capture_output=True, text=True, check=True, env=environment)
    found = json.loads(made.stdout)
    assert len(found["ranks"]) == gpus
    cores_of = re.search(r"--bind_core_list (\S+)", found["launch"]["deepspeed"])[1]
    monkeypatch.setattr(numa, "check_for_numactl_pkg", lambda: True)
    monkeypatch.setattr(numa, "get_numa_cores", list)
    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    for rank in found["ranks"]:
        _, command = numa.get_numactl_cmd(cores_of, gpus, rank["rank"])
        bound = numa.parse_range_list(command[command.index("-C") + 1])
        firsts = [cpu for cpu in numa.parse_range_list(rank["cpus"]) if cpu < packages * cores]
        assert bound == firsts and rank["node"] == rank["rank"] * packages // gpus


def test_superoffload_binds_its_workers_to_their_share_and_undoes_it():
    from spillway import topo
    from spillway.deepspeed._rounds import SuperOffloadCPUOptimizer

    own = os.sched_getaffinity(0)
    config = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    optimizer = SuperOffloadCPUOptimizer(config, cpuadam_cores_perc=0.5)
    try:
        assert topo.workers() == topo.split(0.5).workers
        assert os.sched_getaffinity(0) == own
    finally:
        optimizer.close()
    assert topo.workers() == ()
    # A binding of the program stays.
    topo.bind([max(own)])
    SuperOffloadCPUOptimizer(config, cpuadam_cores_perc=0.5).close()
    assert topo.workers() == (max(own),)
    topo.unbind()


def test_arguments_out_of_range_are_refused_and_not_wrapped():
    from spillway import topo
    from spillway.errors import InvalidArgumentError

    for call in (
        lambda: topo.pages_at(0, 4096, 2**32),
        lambda: topo.pages_at(0, 4096, -1),
        lambda: topo.pages_at(0, 2**64, 0),
        lambda: topo.pages_at(0, 4096, 0.5),
        lambda: topo.place(0, 1, share="0.8"),
        lambda: topo.bind([0.9]),
        lambda: topo.read("\0"),
        lambda: topo.node_of_path("\0"),
        lambda: topo.place(0, 0),
        lambda: topo.place(0, 2**32),
    ):
        with pytest.raises(InvalidArgumentError):
            call()
