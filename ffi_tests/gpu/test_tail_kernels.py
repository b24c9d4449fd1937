"""The library's kernels step the tail of spillway.torch.offload on a CUDA device with the bits of those of the host: split masters, 8-bit
moments and rounding at random, over the test driver, whose device memory torch can read."""

import ctypes
import pathlib
import sys

import pytest

import spillway

torch = pytest.importorskip("torch")
ELEMENTS = (1, 40, 4096, 5000)


sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "packaging" / "python" / "tests"))
from fake_cuda import FakeDriver


@pytest.fixture
def driver(on_cpu, monkeypatch):
    monkeypatch.setenv("SPILLWAY_CUDA_LIBRARY", on_cpu["SPILLWAY_CUDA_LIBRARY"])
    return FakeDriver(on_cpu["SPILLWAY_CUDA_LIBRARY"], 0)


@pytest.fixture
def made(driver):
    """A function that copies a tensor to memory of the test driver."""

    def make(tensor):
        address = ctypes.c_uint64()
        driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(1, tensor.nbytes)))
        memory = (ctypes.c_char * max(1, tensor.nbytes)).from_address(address.value)
        return torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel()).copy_(tensor)

    return make


NARROW = [("f32", "int8"), ("split", "int8"), ("split", "bf16")]
CASES = [*((*kind, random) for kind in NARROW for random in (False, True)), ("f32", "bf16", True), ("split", "f32", False)]


@pytest.mark.parametrize("master, moments, random", CASES)
def test_a_tail_on_a_device_has_the_bits_of_the_host(driver, made, master, moments, random):
    from spillway.torch._offload.slot import Slot
    from spillway.torch._offload.tail import CudaKernels, HostKernels, _DeviceSlots
    from spillway.torch._states import MASTER, Precision

    precision = Precision.of("test", True, moments, "stochastic" if random else "nearest" if moments == "int8" else None, 3, master)

    def part(device):
        slots = []
        for number, elements in enumerate(ELEMENTS):
            torch.manual_seed(number)
            slot = Slot(torch.nn.Parameter(device(torch.randn(elements).bfloat16())), number, precision)
            slot.stays = True
            state = {"step": torch.zeros(()), **slot.new_state()}
            slot.use({name: value if name == "step" else device(value) for name, value in state.items()})
            if slot.note is not None:
                slot.note = slot.note._replace(sums=device(slot.note.sums))
            if master == "f32":
                slot.parts[MASTER].copy_(slot.param.detach())
            slots.append(slot)
        return _DeviceSlots(slots, torch.device("cpu"))

    host, device = part(lambda tensor: tensor.clone()), part(made)
    host.kernels, device.kernels = HostKernels(), CudaKernels(spillway.Gpu(0))
    for step in range(3):
        for one, place in ((host, lambda tensor: tensor), (device, made)):
            for number, slot in enumerate(one.slots):
                torch.manual_seed(100 * step + number)
                slot.grad = place(torch.randn(slot.param.numel()).bfloat16())
            one.step(1.0)
        driver.synchronize(spillway.Stream(0))
        for own, other in zip(host.slots, device.slots):
            assert torch.equal(own.param, other.param)
            assert own.parts.keys() == other.parts.keys()
            assert all(torch.equal(own.parts[name], other.parts[name]) for name in own.parts)
