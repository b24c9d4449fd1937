"""Host memory for copies: cut to exact sizes, page-locked memory registered once, and given back with its last tensor."""

import ctypes
import gc
import os
import pathlib
import subprocess
import sys
import threading
import warnings

import pytest
import torch

import spillway
from spillway import topo
from spillway.errors import UnsupportedError
from spillway.torch import _slabs

MIB = 1 << 20


class Driver:
    """Notes what is registered; refuses after a number of registrations."""

    def __init__(self, most=1000, node=None):
        self.live, self.calls, self.most, self.node = {}, 0, most, node

    def register(self, address, size):
        self.calls += 1
        if self.calls > self.most:
            raise UnsupportedError("no more")
        assert address not in self.live
        self.live[address] = size

    def unregister(self, address):
        del self.live[address]


def locked(driver):
    return _slabs.Slabs(_slabs.LockedPages(driver))


def held(driver, tensor):
    at = tensor.data_ptr()
    return any(start <= at and at + tensor.nbytes <= start + size for start, size in driver.live.items())


def test_small_tensors_share_slabs_and_a_large_one_has_its_own():
    driver = Driver()
    slabs = locked(driver)
    small = [slabs.memory((1000, 3), torch.bfloat16) for _ in range(2000)]
    large = slabs.memory((20 * MIB,), torch.float32)
    assert driver.calls < 16 and all(held(driver, tensor) for tensor in (*small, large))
    assert sorted(driver.live.values())[-1] == 80 * MIB
    for number, tensor in enumerate(small):
        assert tensor.shape == (1000, 3) and tensor.dtype is torch.bfloat16 and tensor.data_ptr() % 64 == 0
        tensor.fill_(number % 250)
    assert all((tensor == number % 250).all() for number, tensor in enumerate(small))
    # What was asked for, alignment, and at most one slab that is not full.
    asked = large.nbytes + sum(tensor.nbytes for tensor in small)
    assert slabs.bytes == sum(driver.live.values()) <= asked + 2000 * 64 + MIB


def test_a_slab_goes_with_its_last_tensor():
    driver = Driver()
    slabs = locked(driver)
    one, other = slabs.memory((10,), torch.float32), slabs.memory((10,), torch.float32)
    view = other.view(2, 5)
    assert driver.calls == 1
    del one, other
    gc.collect()
    assert len(driver.live) == 1
    view.fill_(3)
    del view
    gc.collect()
    assert not driver.live and slabs.bytes == 0
    again = slabs.memory((10,), torch.float32)
    assert len(driver.live) == 1 and held(driver, again)


def test_forty_gigabytes_have_few_registrations_and_little_waste(monkeypatch):
    made = []
    monkeypatch.setattr(_slabs.Pages, "take", lambda self, size, freed: made.append(size) or _Sized(size))
    slabs, keep = _slabs.Slabs(_slabs.Pages()), []
    sizes = [size for _ in range(80) for size in (4096 * 4096 * 2, 3584 * 1021 * 2, 11003 * 4096 * 2, 4096 * 2, 300)] * 4
    for size in sizes:
        keep.append(slabs._place(size)[0])
    assert sum(sizes) > 40e9 and sum(made) <= 1.001 * sum(sizes)
    assert len(made) <= sum(size > 4 * MIB for size in sizes) + 20


class _Sized:
    def __init__(self, size):
        self._size = size

    def __len__(self):
        return self._size


def test_no_elements_take_no_memory():
    driver = Driver()
    tensor = locked(driver).memory((0, 5), torch.float32)
    assert tensor.shape == (0, 5) and not driver.calls


def test_torchs_memory_is_used_where_the_driver_locks_none(monkeypatch):
    slabs, asked = locked(Driver(1)), []
    first = slabs.memory((MIB,), torch.float32)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *given, pin_memory, **named: asked.append(pin_memory) or empty(*given, **named))
    with pytest.warns(UserWarning, match="locks no memory of the library .no more., so page-locked memory comes from torch"):
        second = slabs.memory((MIB,), torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        third = slabs.memory((5,), torch.float32)
    assert first.shape == second.shape and third.shape == (5,) and asked == [True, True]
    del first
    gc.collect()
    assert slabs.bytes == 0


def test_memory_is_pageable_where_neither_the_library_nor_torch_locks_any(monkeypatch):
    slabs, empty = locked(Driver(0)), torch.empty

    def refusing(*given, pin_memory=False, **named):
        if pin_memory:
            raise torch.OutOfMemoryError("no page can be locked")
        return empty(*given, **named)

    monkeypatch.setattr(torch, "empty", refusing)
    monkeypatch.setattr(_slabs, "_told", [])
    with pytest.warns(UserWarning) as told:
        first = slabs.memory((MIB,), torch.float32).fill_(1)
    assert [str(warning.message).split(" (")[0] for warning in told] == ["spillway: the system locks no more memory"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = slabs.memory((5,), torch.float32).fill_(2)
    assert bool((first == 1).all()) and bool((second == 2).all()) and slabs.memory((0,), torch.float32).shape == (0,)
    assert slabs.bytes >= 4 * MIB
    del first, second
    gc.collect()
    assert slabs.bytes == 0


def test_memory_of_the_process_is_private_exact_and_goes_with_its_tensors(tmp_path):
    slabs = _slabs.Slabs(_slabs.Pages())
    one, other = slabs.memory((1000,), torch.float32), slabs.memory((3 * MIB,), torch.float32)
    assert slabs.bytes == 13 * MIB and not one.any() and not one.is_pinned()
    if (child := os.fork()) == 0:
        one.fill_(1)
        os._exit(0)
    os.waitpid(child, 0)
    assert not one.any()
    torch.save(one, tmp_path / "one")
    assert os.path.getsize(tmp_path / "one") < 10_000
    del one, other
    gc.collect()
    assert slabs.bytes == 0


def numa_map(tensor):
    """The line of /proc/self/numa_maps of the mapping that holds a tensor."""
    with open("/proc/self/numa_maps") as maps:
        starts = {int(line.split()[0], 16): line for line in maps}
    return starts[max(start for start in starts if start <= tensor.data_ptr())]


@pytest.mark.skipif(not os.path.exists("/proc/self/numa_maps"), reason="the kernel has no NUMA")
def test_page_locked_slabs_are_whole_and_on_the_node_of_their_device():
    slabs = locked(Driver(node=0))
    small, large = slabs.memory((1000,), torch.float32), slabs.memory((20 * MIB + 3,), torch.float32)
    for tensor in (small, large):
        found = topo.pages_at(tensor.data_ptr(), tensor.nbytes, 0)
        assert found.on_node == found.sampled and " bind:0 " in numa_map(tensor)
    # Of a device without a known node no slab is bound.
    assert " default " in numa_map(locked(Driver()).memory((20 * MIB,), torch.float32))


def run(program, **settings):
    """Runs a program in a process of its own, which has the package of this one."""
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(spillway.__file__).parents[1]), **settings}
    return subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False)


def test_a_node_that_the_system_refuses_is_one_warning_and_no_error(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\nfrom spillway.torch import _slabs\nslabs = _slabs.Slabs(_slabs.Pages(900))\n"
        "kept = [slabs.memory((1 << 20,), torch.float32).fill_(number) for number in range(3)]\n"
        "assert all((tensor == number).all() for number, tensor in enumerate(kept))\n"
    )
    done = run(program, SPILLWAY_LOG="warn")
    assert done.returncode == 0 and done.stderr.count("cannot bind pinned memory to NUMA node 900") == 1, done.stderr


def test_memory_is_taken_where_no_thread_of_the_library_starts(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, spillway\nfrom spillway import topo\nfrom spillway.torch import _slabs\n"
        "tensor = _slabs.Slabs(_slabs.Pages()).memory((20 << 20,), torch.float32)\n"
        "assert topo.pages_at(tensor.data_ptr(), tensor.nbytes, 0).absent == 0\n"
    )
    done = run(program, SPILLWAY_NUM_THREADS="none")
    assert done.returncode == 0, done.stderr


def test_tensors_of_several_threads_have_memory_of_their_own():
    slabs, made, before = _slabs.Slabs(_slabs.Pages()), [], sys.getswitchinterval()

    def work():
        made.extend([slabs.memory((16,), torch.float32) for _ in range(5000)])

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    starts = sorted(tensor.data_ptr() for tensor in made)
    assert len(starts) == 15000 and all(one + 64 <= other for one, other in zip(starts, starts[1:]))


@pytest.mark.parametrize("elements", [2_200_000, 1600 * 1600, 3_000_001])
def test_many_tensors_of_one_size_waste_nothing(elements):
    slabs = _slabs.Slabs(_slabs.Pages())
    kept = [slabs.memory((elements,), torch.bfloat16) for _ in range(20)]
    assert slabs.bytes <= 1.001 * sum(tensor.nbytes for tensor in kept)


def _states(elements, narrow):
    """Bytes of the gradient, the weights and the states of a bfloat16 parameter, as offload() takes them."""
    moments = [elements, elements, -(-elements // 32) * 2, -(-elements // 32) * 2, elements * 2] if narrow else [elements * 4] * 3
    return [elements * 2, elements * 2, *moments]


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(
    "shapes",
    [
        [1 << 20] * 96,
        [3 << 19] * 300,
        [1 << 16] * 2000,
        [100_000] * 2000,
        [300_001] * 300,
        [*[1 << 18, 1 << 16, 1 << 16, 1 << 18, *[917_504] * 3, 4096, 4096] * 32, 8_208_384, 8_208_384],
        [*[2048 * 2048] * 4, 2048 * 64, *[1408 * 2048] * 192, 2048, 2048],
    ],
    ids=["1 Mi", "1.5 Mi", "64 Ki", "100,000", "300,001", "a small Llama", "experts"],
)
def test_the_states_of_a_model_waste_at_most_half_a_hundredth(shapes, narrow, monkeypatch):
    made = []
    monkeypatch.setattr(_slabs.Pages, "take", lambda size, freed: made.append(size) or _Sized(size))
    slabs, sizes = _slabs.Slabs(_slabs.Pages), [size for elements in shapes for size in _states(elements, narrow)]
    kept = [slabs._place(size)[0] for size in sizes]
    assert len(kept) == len(sizes) and sum(made) <= 1.005 * sum(sizes)


def test_a_registration_ends_before_its_memory_does():
    seen = []

    class Looking(Driver):
        def unregister(self, address):
            super().unregister(address)
            seen.append(ctypes.string_at(address, 4))

    slabs = locked(Looking())
    slabs.memory((4,), torch.int8).fill_(65)
    gc.collect()
    assert seen == [b"AAAA"] and slabs.bytes == 0
