"""Proves that spillway.topo states what hwloc states on this machine, numbers GPUs as torch does, and binds only the library's
threads."""

import os
import pathlib
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

import pytest

import spillway
from spillway import topo


@pytest.fixture(autouse=True)
def unbound():
    yield
    topo.unbind()
    spillway.set_num_threads(0)


def _mask(text):
    """The processors of a mask as hwloc writes it: "0x00000003,,0x1"."""
    words = enumerate(reversed((text or "").split(",")))
    return {32 * at + bit for at, word in words for bit in range(32) if word and int(word, 16) >> bit & 1}


def test_this_machine_is_what_hwloc_says():
    tool = shutil.which("lstopo-no-graphics") or shutil.which("lstopo")
    if tool is None:
        pytest.skip("lstopo of hwloc is not installed")
    text = subprocess.run([tool, "--of", "xml", "--whole-io", "-"], capture_output=True, text=True, check=True).stdout
    hwloc = ElementTree.fromstring(text)
    of = lambda kind: [item for item in hwloc.iter("object") if item.get("type") == kind]
    sets = lambda kind: {frozenset(_mask(item.get("cpuset"))) for item in of(kind)}
    ours = topo.read()
    # hwloc leaves out what this process may not use.
    allowed = set(ours.cpuset)
    assert {int(item.get("os_index")) for item in of("PU")} == allowed
    cut = lambda cpus: frozenset(set(cpus) & allowed)
    assert {cut(package.cpus) for package in ours.packages} - {frozenset()} == sets("Package")
    assert {cut(core) for core in ours.cores} - {frozenset()} == sets("Core")
    assert {(node.id, cut(node.near_cpus), node.memory_bytes) for node in ours.nodes if node.allowed} == {
        (int(item.get("os_index")), frozenset(_mask(item.get("cpuset"))), int(item.get("local_memory") or 0)) for item in of("NUMANode")
    }
    drives = {item.get("pci_busid") for item in of("PCIDev") if item.get("pci_type", "").startswith("0108")}
    assert {device.pci for device in ours.devices if device.kind == "nvme"} == drives


@pytest.fixture
def gpus(tmp_path):
    """A tree with four GPUs on two nodes."""
    for name, text in {
        "sys/devices/system/cpu/online": "0-7",
        "sys/devices/system/node/node0/cpulist": "0-3",
        "sys/devices/system/node/node1/cpulist": "4-7",
    }.items():
        _write(tmp_path / name, text)
    for gpu in range(4):
        folder = tmp_path / f"sys/bus/pci/devices/0000:0{gpu + 1}:00.0"
        for name, text in {"class": "0x030200", "vendor": "0x10de", "device": "0x2330", "numa_node": gpu // 2}.items():
            _write(folder / name, text)
        _write(tmp_path / f"proc/driver/nvidia/gpus/0000:0{gpu + 1}:00.0/information", f"GPU UUID: \t GPU-{'aabc'[gpu]}{gpu}f")
    return tmp_path


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "0,1",
        "3,1",
        "2",
        "1,1",
        "0,7,1",
        "-1",
        "1gpu2,2x",
        " 2 , 0",
        "NoDevFiles",
        "0,,1",
        "x",
        "GPU-b2,GPU-a0",
        "GPU-a",
        "GPU-a1f,GPU-c",
        "GPU-a0,GPU-a0f",
        "GPU-zz",
        "GPU-a0,1",
        "1,GPU-a0",
    ],
)
def test_gpus_have_the_ordinals_that_torch_gives_them(gpus, monkeypatch, value):
    cuda = pytest.importorskip("torch").cuda
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    visible = cuda._parse_visible_devices()
    if visible and isinstance(visible[0], str):
        visible = cuda._transform_uuid_to_ordinals(visible, ["GPU-a0f", "GPU-a1f", "GPU-b2f", "GPU-c3f"])
    expected = []
    for ordinal in visible:
        if ordinal >= 4:
            break
        expected.append(f"0000:0{ordinal + 1}:00.0")
    machine = topo.read(gpus)
    assert [gpu.pci for gpu in machine.gpus] == expected
    if expected:
        node = machine.gpus[0].node
        assert topo.place(0, len(expected), 0.5, root=gpus).cpus[0] in machine.node(node).cpus


@pytest.mark.parametrize("inside", ["", "absent", "file"])
@pytest.mark.parametrize("call", [lambda root: topo.read(root), lambda root: topo.place(0, 1, root=root)])
def test_a_root_without_the_directory_sys_is_refused(tmp_path, inside, call):
    (tmp_path / "file").write_text("")
    with pytest.raises(spillway.InvalidArgumentError, match="root: .* has no directory sys; name the directory of a recorded tree"):
        call(tmp_path / inside)


def test_numbers_are_uncertain_where_the_driver_counts_the_fastest_first(gpus, monkeypatch):
    _write(gpus / "sys/bus/pci/devices/0000:02:00.0/device", "0x1111")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert topo.read(gpus).gpus == (None,) * 4
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert topo.read(gpus).gpus[1].model == 0x1111
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert topo.read(gpus).gpus[0].node == 1


@pytest.mark.parametrize("value, nodes", [(None, (0, 0, 1, 1)), ("3,0", (1, 0)), ("", ())])
def test_memory_for_a_gpu_is_that_of_its_node(gpus, monkeypatch, value, nodes):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert tuple(topo._node_of_gpu(ordinal, gpus) for ordinal in range(len(nodes))) == nodes
    assert topo._node_of_gpu(len(nodes), gpus) is None


def test_memory_is_not_bound_where_there_is_one_node_or_no_topology(gpus, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (gpus / "sys/devices/system/node/node1/cpulist").unlink()
    (gpus / "sys/devices/system/node/node1").rmdir()
    assert topo.read(gpus).gpus[0].node == 0 and topo._node_of_gpu(0, gpus) is None
    assert topo._node_of_gpu(0, tmp_path / "absent") is None


def _workers_become(expected):
    """True once the affinities of the workers are these: a worker binds itself when it first runs."""
    return _comes(lambda: _workers() == expected)


def _comes(condition):
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def _workers():
    """The affinities of the library's workers in this process."""
    found = set()
    for task in pathlib.Path("/proc/self/task").iterdir():
        try:
            name, status = (task / "comm").read_text(), (task / "status").read_text()
        except OSError:
            continue
        if name.startswith("spillway-"):
            found.add(next(line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list:")))
    return found


def _step(numpy):
    p, g, m, v = (numpy.zeros(1 << 20, numpy.float32) for _ in range(4))
    spillway.Adam().step([(p, g, m, v)])


def test_only_the_librarys_threads_are_bound_and_the_binding_is_undone():
    numpy = pytest.importorskip("numpy")
    own = os.sched_getaffinity(0)
    last = max(own)
    spillway.set_num_threads(3)
    topo.bind([last])
    assert topo.workers() == (last,)
    _step(numpy)
    assert _workers_become({str(last)})
    assert os.sched_getaffinity(0) == own
    child = os.fork()
    if child == 0:
        _step(numpy)
        os._exit(0 if topo.workers() == (last,) and _workers_become({str(last)}) and os.sched_getaffinity(0) == own else 1)
    assert os.waitpid(child, 0)[1] == 0
    topo.unbind()
    assert topo.workers() == ()
    _step(numpy)
    assert _comes(lambda: len(_workers() - {str(last)}) == 1)


@pytest.mark.parametrize(
    "cpus, words",
    [
        ([], "names no processor"),
        ([1000], "1000"),
        ("0-", "not a list"),
        ("a", "not a list"),
        ("-1", "not a list"),
        ([70000], "not a list"),
    ],
)
def test_processors_that_cannot_be_bound_are_refused(cpus, words):
    with pytest.raises(spillway.InvalidArgumentError, match=words):
        topo.bind(cpus)
    assert topo.workers() == ()


def test_the_number_of_workers_is_that_of_the_bound_cores():
    last = max(os.sched_getaffinity(0))
    topo.bind([last])
    assert spillway.num_threads() == 1 + (len(os.sched_getaffinity(0)) > 1)
    spillway.set_num_threads(5)
    assert spillway.num_threads() == 5


def test_split_divides_what_this_process_may_use(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    own = tuple(sorted(os.sched_getaffinity(0)))
    cores = topo.split(0.8)
    assert cores.cpus == own and set(cores.trainer) | set(cores.workers) == set(own)
    assert topo.split(1.0).workers == own
    if len(own) > 1:
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert topo.split().cpus == topo.place(1, 2).cpus != topo.place(0, 2).cpus
    for share in (0, -1, 1.5, float("nan")):
        with pytest.raises(spillway.InvalidArgumentError):
            topo.split(share)
    with pytest.raises(spillway.InvalidArgumentError):
        topo.place(2, 2)
    with pytest.raises(spillway.InvalidArgumentError):
        topo.place(0, 1, scope="socket")


def test_a_rank_that_its_launcher_bound_shares_its_processors_with_no_rank(child_environment):
    own = os.sched_getaffinity(0)
    if len(own) < 2:
        pytest.skip("needs two processors")
    program = (
        "from spillway import topo\nimport spillway, numpy\nprint(topo.read().bound, topo.split(1.0).cpus)\n"
        "p, g, m, v = (numpy.zeros(70000, numpy.float32) for _ in range(4))\nspillway.Adam().step([(p, g, m, v)])"
    )
    environment = {**child_environment, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "SPILLWAY_LOG": "info"}
    last = max(own)
    bound = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {last}),
    )
    assert bound.stdout == f"True ({last},)\n" and "the launcher has bound this rank" in bound.stderr, bound
    free = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert free.stdout.startswith("False") and "2 local ranks" in free.stderr, free


def test_pages_of_an_array_are_counted():
    numpy = pytest.importorskip("numpy")
    array = numpy.ones(1 << 20, numpy.uint8)
    nodes = [node.id for node in topo.read().nodes]
    counts = [topo.pages(array, node) for node in nodes]
    assert sum(count.on_node for count in counts) + counts[0].absent == counts[0].sampled >= 256
    assert topo.pages(array, max(nodes) + 1).on_node == 0


def test_a_path_without_a_drive_is_unknown_and_a_missing_one_an_error(tmp_path):
    assert topo.node_of_path("/proc") is None or len(topo.read().nodes) == 1
    with pytest.raises(spillway.NotFoundError):
        topo.node_of_path(tmp_path / "absent")
