"""Proves that the Python interface of GPUs transfers and steps like the C interface, over the fake driver,
with the bits of steps on the CPU. Memory is kept alive while it is in use. Misuse, and a machine without a
GPU, raise typed exceptions."""

import ast
import gc
import subprocess
import sys
import types
import weakref

import numpy as np
import pytest
from fake_cuda import FakeDriver

import spillway
from spillway import _native_handle
from spillway.deepspeed import _optimizer_ops

SIZES = (1000, 70, 0, 513)
SCALE = 0.5


@pytest.fixture
def desk(fake_driver, request):
    """A fake GPU for this test alone, opened, and a stream of a framework."""
    ordinal = 20 + sum(map(ord, request.node.name)) % 40
    driver = FakeDriver(fake_driver, ordinal)
    with spillway.Gpu(ordinal, chunk_bytes=1024) as gpu:
        stream = driver.stream()
        yield driver, gpu, stream
        driver.synchronize(stream)
    assert driver.faults() == [0, 0]


def normal(n, seed, size=1.0):
    return (np.random.default_rng(seed).standard_normal(n) * size).astype(np.float32)


def bf16(values):
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def locked(values):
    array = spillway.pinned(values.size, "bf16" if values.dtype == np.uint16 else values.dtype.name)
    array[:] = values
    return array


class Layers:
    """Masters, moments, gradients and 16-bit parameters, in ordinary memory."""

    def __init__(self):
        self.param = [normal(n, 1) for n in SIZES]
        self.exp_avg = [np.zeros(n, np.float32) for n in SIZES]
        self.exp_avg_sq = [np.zeros(n, np.float32) for n in SIZES]
        self.grad = [np.zeros(n, np.uint16) for n in SIZES]
        self.copy = [bf16(values) for values in self.param]

    def new_gradients(self, seed):
        for index, grad in enumerate(self.grad):
            grad[:] = bf16(normal(grad.size, 100 * seed + index, 0.1))

    def step(self, adam, scale=SCALE):
        rows = zip(self.param, self.grad, self.exp_avg, self.exp_avg_sq, self.copy)
        return adam.step(list(rows), grad_scale=scale, return_stats=True, uint16_dtype="bf16")


def test_gradients_leave_and_parameters_return(desk):
    driver, gpu, stream = desk
    assert gpu.info().name == "Fake GPU" and gpu.info().copy_engines == 2 and spillway.gpu_count() > 0
    values = bf16(normal(5000, 3))
    device, wide = driver.device(values), spillway.pinned(5000)
    gpu.copy_out(device, wide, after=stream).wait()
    assert (wide.view(np.uint32) >> 16 == values).all()
    narrow = spillway.pinned(5000, "bf16")
    gpu.copy_out(device, narrow, after=driver.record(stream)).wait(timeout=60)
    assert (narrow == values).all()
    other = driver.device(np.zeros(5000, np.uint16))
    gpu.copy_in(wide, other, after=stream).stream_wait(stream)
    driver.synchronize(stream)
    assert (driver.seen(other, values) == values).all()
    driver.free(device, other)


def test_steps_on_the_gpu_have_the_bits_of_the_cpu(desk):
    driver, gpu, stream = desk
    plain, ours, theirs = Layers(), spillway.Adam(lr=1e-2, weight_decay=0.1), spillway.Adam(lr=1e-2, weight_decay=0.1)
    plain.new_gradients(1)
    kinds = ("param", "grad", "exp_avg", "exp_avg_sq", "copy")
    rows = [[driver.device(getattr(plain, kind)[index]) for kind in kinds] for index in range(len(SIZES))]
    for _ in range(3):
        assert gpu.step(ours, rows, stream=stream, grad_scale=SCALE, return_stats=True) == plain.step(theirs)
    for index, row in enumerate(rows):
        for kind, device in zip(kinds, row):
            assert (driver.seen(device, getattr(plain, kind)[index]) == getattr(plain, kind)[index]).all(), kind
        driver.free(*row)


def test_steps_of_deepspeeds_adam_on_the_gpu_have_the_bits_of_the_cpu(desk):
    """Also the beta powers, which an id keeps in float32 between steps: step 3 again computes them anew."""
    driver, gpu, stream = desk
    plain, kinds, here, there = Layers(), ("param", "grad", "exp_avg", "exp_avg_sq"), 7001, 7002
    for number in (here, there):
        _optimizer_ops.create_adam(number, 1e-2, 0.9, 0.999, 1e-8, 0.1, True, False)
    plain.new_gradients(1)
    plain.grad = [(grad.astype(np.uint32) << 16).view(np.float32) for grad in plain.grad]
    rows = [[driver.device(getattr(plain, kind)[index]) for kind in kinds] for index in range(len(SIZES))]
    for step in (1, 2, 3, 3, 4):
        for index, row in enumerate(rows):
            numbers = (step, 1e-2, 0.9, 0.999, 1e-8, 0.1, True)
            gpu.ds_step(here, _optimizer_ops.adam_call(*numbers), row, stream=stream)
            _optimizer_ops.adam_update(there, *numbers, *(getattr(plain, kind)[index] for kind in kinds))
    driver.synchronize(stream)
    for index, row in enumerate(rows):
        for kind, device in zip(kinds, row):
            assert (driver.seen(device, getattr(plain, kind)[index]) == getattr(plain, kind)[index]).all(), kind
        driver.free(*row)
    outcome = []
    with pytest.raises(spillway.UnknownIdError):
        gpu.ds_step(7003, _optimizer_ops.adam_call(*numbers), [driver.device(np.zeros(8, np.float32))] * 4, stream=stream, outcome=outcome)
    assert len(outcome) == 1 and outcome != [0]
    for number in (here, there):
        _optimizer_ops.destroy_adam(number)


def test_interleaved_steps_have_the_bits_of_the_cpu(desk):
    driver, gpu, stream = desk
    plain, ours, theirs = Layers(), spillway.Adam(lr=1e-2), spillway.Adam(lr=1e-2)
    grads, copies = [driver.device(grad) for grad in plain.grad], [driver.device(copy) for copy in plain.copy]
    staging, seen = [locked(grad) for grad in plain.grad], [locked(copy) for copy in plain.copy]
    subgroups = [
        spillway.Subgroup(*map(locked, arrays), grad, copy)
        for *arrays, grad, copy in zip(plain.param, plain.exp_avg, plain.exp_avg_sq, grads, copies)
    ]
    sites = [["cpu"] * 4, ["gpu"] * 4, ["gpu", "cpu", "gpu", "resident"], ["resident", "gpu", "cpu", "cpu"]]
    with spillway.Interleave(subgroups, gpu=gpu, chunk=256) as update:
        for number in range(8):
            update.set_plan(sites[number % 4])
            assert update.get_plan() == sites[number % 4]
            plain.new_gradients(number)
            for index in reversed(range(len(SIZES))):
                staging[index][:] = plain.grad[index]
                if SIZES[index]:
                    driver.upload(staging[index], grads[index], stream)
                update.grad_ready(index, stream)
            plain.step(theirs)
            update.begin(ours, grad_scale=SCALE, stream=stream)
            for index in range(len(SIZES)):
                update.stream_wait_params(index, stream)
                gpu.copy_out(copies[index], seen[index], after=stream).stream_wait(stream)
            driver.synchronize(stream)
            assert all((mine == wanted).all() for mine, wanted in zip(seen, plain.copy)), number
        update.set_plan(["cpu"] * 4)
        update.drain()
        assert update.in_flight() == [] and '"traceEvents"' in update.trace()
        for subgroup, wanted in zip(subgroups, zip(plain.param, plain.exp_avg, plain.exp_avg_sq)):
            assert all((mine == right).all() for mine, right in zip(subgroup, wanted))
    assert ours.step_count == theirs.step_count == 8
    driver.free(*grads, *copies)


def test_gradients_in_host_memory(desk):
    """Gradients as in ZeRO-3: 32 bits wide, and fetched by the GPU where the GPU steps. That of the last subgroup is also on the device, to
    which another stream copies it, and so the subgroup may be resident."""
    driver, gpu, stream = desk
    plain, ours, theirs = Layers(), spillway.Adam(lr=1e-2), spillway.Adam(lr=1e-2)
    plain.grad = [np.zeros(n, np.float32) for n in SIZES]
    copies, homes, seen = ([make(copy) for copy in plain.copy] for make in (driver.device, lambda copy: spillway.pinned(copy.size), locked))
    last, other = driver.device(plain.grad[3]), driver.stream()
    subgroups = [
        spillway.Subgroup(*map(locked, arrays), grad, copy, home)
        for *arrays, grad, copy, home in zip(plain.param, plain.exp_avg, plain.exp_avg_sq, (None, None, None, last), copies, homes)
    ]
    with spillway.Interleave(subgroups, gpu=gpu, transfer_dtype="delivered", fetch_gradients=True) as update:
        for number in range(6):
            update.set_plan(["gpu", "cpu", "gpu", ("gpu", "resident", "cpu")[number // 2]])
            for index, home in enumerate(homes):
                plain.grad[index][:] = home[:] = normal(home.size, number + 10 * index)
            driver.upload(homes[3], last, other)
            for index in range(len(SIZES)):
                update.grad_ready(index, other if index == 3 else stream)
            plain.step(theirs)
            update.begin(ours, grad_scale=SCALE, stream=stream)
            for index in range(len(SIZES)):
                update.stream_wait_params(index, stream)
                gpu.copy_out(copies[index], seen[index], after=stream).stream_wait(stream)
            driver.synchronize(stream)
            assert all((mine == wanted).all() for mine, wanted in zip(seen, plain.copy)), number
        with pytest.raises(spillway.InvalidArgumentError, match="makes subgroup 1 resident"):
            update.set_plan(["cpu", "resident", "cpu", "cpu"])
        update.drain()
        for subgroup, wanted in zip(subgroups, zip(plain.param, plain.exp_avg, plain.exp_avg_sq)):
            assert all((mine == right).all() for mine, right in zip(subgroup, wanted))
    driver.free(last, *copies)


def test_without_a_gpu_threads_take_its_part(monkeypatch):
    plain, ours, theirs = Layers(), spillway.Adam(lr=1e-2), spillway.Adam(lr=1e-2)
    model = Layers()
    rows = zip(model.param, model.exp_avg, model.exp_avg_sq, model.grad, model.copy)
    with spillway.Interleave([spillway.Subgroup(*row) for row in rows], uint16_dtype="bf16") as update:
        rates = spillway.Rates(cpu=2e9, gpu=25e9, h2d=13.75e9, d2h=13.75e9)
        found = spillway.plan(rates, SIZES)
        assert found.exposed_seconds <= found.serial_seconds
        update.set_plan(spillway.plan(rates, SIZES, mode="count", argument=2).placements)
        assert update.get_plan().count("gpu") == 2
        update.calibrate(rates)
        for number in range(4):
            for layers in (plain, model):
                layers.new_gradients(number)
            for index in range(len(SIZES)):
                update.release_params(index)
                update.grad_ready(index)
            plain.step(theirs)
            update.begin([ours] * len(SIZES), grad_scale=SCALE)
            update.finish()
            assert all((mine == wanted).all() for mine, wanted in zip(model.copy, plain.copy))
            assert update.ready(0)
            update.replan()
        with pytest.raises(spillway.InvalidArgumentError, match="placements"):
            update.set_plan(["nowhere"] * 4)
        with pytest.raises(spillway.InvalidArgumentError, match="stream"):
            update.grad_ready(0, spillway.Stream(1))
    with pytest.raises(spillway.InvalidArgumentError, match="closed"):
        update.finish()


def test_an_interleaved_update_keeps_the_memory_of_a_tensor_that_gets_another():
    torch = pytest.importorskip("torch")
    memory = [np.zeros(100, np.float32) for _ in range(5)]
    seen, tensors = [weakref.ref(array) for array in memory], [torch.from_numpy(array) for array in memory]
    del memory
    with spillway.Interleave([spillway.Subgroup(*tensors[:4], tensors[4].view(torch.bfloat16)[:100])]):
        for tensor in tensors:
            tensor.data = torch.zeros(100)
        gc.collect()
        assert all(reference() is not None for reference in seen)
    gc.collect()
    assert all(reference() is None for reference in seen)


@pytest.mark.parametrize("publish", ["final", "staged", "speculative"])
def test_speculation_waits_for_the_gpu_and_publishes_to_it(desk, publish):
    driver, gpu, stream = desk
    plain, ours, theirs = Layers(), spillway.Adam(lr=1e-2), spillway.Adam(lr=1e-2)
    on_gpu = 3
    kinds = ("param", "grad", "exp_avg", "exp_avg_sq", "copy")
    tail = [driver.device(getattr(plain, kind)[on_gpu]) for kind in kinds]
    model = Layers()
    grads = [driver.device(grad) for grad in plain.grad]
    host, staged, seen = ([locked(copy) for copy in plain.copy] for _ in range(3))
    copies = [driver.device(copy) for copy in plain.copy]
    # The first copy of the library page-locks the memory, here for those of the framework too.
    gpu.copy_out(copies[0], seen[0], after=stream).wait()
    with spillway.Speculation(len(SIZES), publish=publish) as speculation:
        for index in range(on_gpu):
            speculation.publish_to(index, gpu, iter([(staged[index], copies[index], stream)]))
        for number in range(6):
            plain.new_gradients(number)
            speculation.begin(ours, grad_scale=SCALE, max_norm=(0.0, 0.5)[number % 2])
            for index in reversed(range(len(SIZES))):
                target = tail[1] if index == on_gpu else grads[index]
                source = locked(plain.grad[index])
                if SIZES[index]:
                    driver.upload(source, target, stream)
                driver.synchronize(stream)
                if index == on_gpu:
                    speculation.submit_gpu(index, gpu, iter([tail]), stream=stream, after=stream)
                    continue
                gpu.copy_out(target, host[index], after=stream).stream_wait(stream)
                after = stream if index % 2 else driver.record(stream)
                row = model.param[index], host[index], model.exp_avg[index], model.exp_avg_sq[index], staged[index]
                speculation.submit(index, [row], after=after, gpu=gpu, uint16_dtype="bf16")
            outcome = speculation.resolve(speculation.local_result())
            assert outcome.verdict == ("commit", "redo")[number % 2]
            plain.step(theirs, outcome.grad_scale)
            for index in range(len(SIZES)):
                speculation.stream_wait_params(index, stream)
                gpu.copy_out(tail[4] if index == on_gpu else copies[index], seen[index], after=stream).stream_wait(stream)
            driver.synchronize(stream)
            assert all((mine == wanted).all() for mine, wanted in zip(seen, plain.copy)), number
            speculation.finish()
    driver.free(*tail, *grads, *copies)


def test_misuse_has_names(desk):
    driver, gpu, stream = desk
    device = driver.device(bf16(normal(10, 1)))
    with pytest.raises(spillway.InvalidArgumentError, match="are not pinned"):
        gpu.copy_out(device, np.zeros(10, np.float32))
    with pytest.raises(spillway.InvalidArgumentError, match="host has 9 elements, device 10"):
        gpu.copy_out(device, spillway.pinned(9))
    with pytest.raises(spillway.InvalidArgumentError, match="device is a ndarray"):
        gpu.copy_out(np.zeros(10, np.float32), spillway.pinned(10))
    with pytest.raises(spillway.InvalidArgumentError, match="is 0; record the event first"):
        gpu.copy_out(device, spillway.pinned(10), after=spillway.Event(0))
    with pytest.raises(spillway.InvalidArgumentError, match="cuda_event"):
        gpu.copy_out(device, spillway.pinned(10), after=object())
    with pytest.raises(spillway.InvalidArgumentError, match="ordinal"):
        spillway.Gpu(1 << 20)
    with spillway.Speculation(1) as speculation:
        speculation.begin(spillway.Adam())
        with pytest.raises(spillway.InvalidArgumentError, match="after is given without gpu"):
            speculation.submit(0, [], after=stream)
        speculation.abort()
    driver.free(device)
    gpu.close()
    with pytest.raises(spillway.InvalidArgumentError, match="closed"):
        gpu.info()


def test_a_step_on_the_gpu_is_counted_if_a_handler_raises_after_the_call(desk, monkeypatch):
    driver, gpu, stream = desk
    row, adam = [driver.device(normal(100, seed)) for seed in range(4)], spillway.Adam()

    def interrupted(outcome, function, *arguments):
        own(outcome, function, *arguments)
        raise KeyboardInterrupt

    own = _native_handle.record
    monkeypatch.setattr(_native_handle, "record", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu.step(adam, [row], stream=stream)
    driver.synchronize(stream)
    assert adam.step_count == 1
    driver.free(*row)


def test_numbers_that_do_not_fit_are_named(desk):
    driver, gpu, stream = desk
    device = driver.device(normal(10, 1))
    for make in (
        lambda: spillway.pinned(-1),
        lambda: spillway.pinned(1.5),
        lambda: spillway.pinned("a word"),
        lambda: spillway.pinned(2**70),
        lambda: spillway.Gpu(-1),
        lambda: spillway.Gpu("a word"),
        lambda: spillway.Gpu(0, chunk_bytes=-1),
        lambda: gpu.copy_out(spillway.DeviceArray(-1, 10, "float32"), spillway.pinned(10), after=stream),
        lambda: gpu.copy_out(device, spillway.pinned(10), after=spillway.Stream(-1)),
        lambda: gpu.copy_out(device, spillway.pinned(10), after=stream).wait(timeout="a word"),
        lambda: gpu.step(spillway.Adam(), [[device] * 4], shadow=[[device] * 3] * 2, stream=stream),
        lambda: gpu.step(spillway.Adam(), [[device] * 4], shadow=[[device]], stream=stream),
    ):
        with pytest.raises(spillway.InvalidArgumentError):
            make()
    assert spillway.pinned(0).size == 0
    driver.free(device)


@pytest.fixture
def torch_on(monkeypatch):
    """Replaces sys.modules["torch"] with a torch that uses CUDA, with this current stream on this GPU alone."""

    def make(stream, ordinal):
        class Tensor:
            def __init__(self, array, index=ordinal):
                self.dtype, self.is_cuda, self._array = f"torch.{array.dtype}", True, array
                self.device = types.SimpleNamespace(index=index)

            def is_contiguous(self):
                return True

            def data_ptr(self):
                return self._array.address

            def numel(self):
                return self._array.elements

        cuda = types.SimpleNamespace(
            is_available=lambda: True, is_initialized=lambda: True, current_stream=lambda index=None: {None: stream, ordinal: stream}[index]
        )
        monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=Tensor, cuda=cuda))
        return Tensor

    return make


def test_without_a_stream_work_follows_the_current_one_of_torch(desk, torch_on):
    """The current stream still writes the memory that the copy reads; only an order between the two
    streams prevents old bytes."""
    driver, gpu, stream = desk
    torch_on(stream, gpu.ordinal)
    plain, theirs, ours = Layers(), spillway.Adam(lr=1e-2), spillway.Adam(lr=1e-2)
    plain.new_gradients(1)
    source, wide = locked(plain.grad[0]), spillway.pinned(SIZES[0])
    kinds = ("param", "grad", "exp_avg", "exp_avg_sq", "copy")
    row = [driver.device(getattr(plain, kind)[0]) for kind in kinds]
    # This copy registers the memory.
    gpu.copy_out(row[0], wide).wait()
    driver.upload(source, row[1], stream)
    gpu.copy_out(row[1], wide).wait()
    assert (wide.view(np.uint32) >> 16 == plain.grad[0]).all()
    plain.new_gradients(2)
    source[:] = plain.grad[0]
    driver.upload(source, row[1], stream)
    gpu.step(ours, [row], grad_scale=SCALE)
    plain.step(theirs)
    driver.synchronize(stream)
    assert (driver.seen(row[0], plain.param[0]) == plain.param[0]).all()
    driver.free(*row)


def test_a_tensor_of_another_gpu_is_refused(desk, torch_on):
    driver, gpu, stream = desk
    tensor = torch_on(stream, gpu.ordinal)
    device = driver.device(np.zeros(10, np.float32))
    gpu.copy_out(tensor(device), spillway.pinned(10)).wait()
    with pytest.raises(spillway.InvalidArgumentError, match="device is on device .*this Gpu is number"):
        gpu.copy_out(tensor(device, gpu.ordinal + 1), spillway.pinned(10))
    with pytest.raises(spillway.InvalidArgumentError, match=r"tensors\[0\].param is on device"):
        gpu.step(spillway.Adam(), [[tensor(device, gpu.ordinal + 1)] * 4])
    driver.free(device)


def test_a_dropped_copy_keeps_its_device_memory_until_it_is_over(desk):
    driver, gpu, stream = desk
    device = driver.device(np.zeros(10, np.float32))
    gpu.copy_out(device, spillway.pinned(10), after=stream)
    gc.collect()
    ((ticket, ((_, held, _), _)),) = gpu._held.items()
    assert held is device
    for _ in range(3):
        last = gpu.copy_out(device, spillway.pinned(10), after=stream)
    assert ticket not in gpu._held and last.done() in (True, False)
    last.wait()
    assert last.done()
    driver.free(device)


def test_spans_of_a_step_on_the_gpu_may_not_overlap(desk):
    driver, gpu, stream = desk
    row = [driver.device(np.zeros(10, np.float32)) for _ in range(4)]
    with pytest.raises(spillway.InvalidArgumentError, match=r"tensors\[1\].\w+: overlaps tensors\[0\]"):
        gpu.step(spillway.Adam(), [row, row], stream=stream)
    driver.free(*row)


def test_pinned_arrays_live_as_long_as_their_views():
    first = spillway.pinned(1000, "float16")
    view = first[10:20]
    view[:] = 3
    del first
    gc.collect()
    assert (view == 3).all() and view.dtype == np.float16


def test_no_driver_is_an_error_of_its_own(child_environment):
    script = (
        "import spillway\n"
        "try:\n    spillway.Gpu()\n"
        "except spillway.NoDeviceError as error:\n    print(error.status, isinstance(error, spillway.GpuError))"
    )
    child_environment["SPILLWAY_CUDA_LIBRARY"] = "libno-such-driver.so.9"
    done = subprocess.run([sys.executable, "-c", script], env=child_environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["50", "True"], done.stderr


def test_rates_are_measured_on_memory_that_is_registered(repository):
    """Opening the update registers the states; copies from memory that is not registered block."""
    program = ast.parse((repository / "ffi_tests" / "gpu" / "bench_update.py").read_text())
    main = next(node for node in program.body if getattr(node, "name", None) == "main")
    lines = {
        name: min(call.lineno for call in ast.walk(main) if isinstance(call, ast.Call) and name in ast.unparse(call.func))
        for name in ("Interleave", "measure_rates")
    }
    assert lines["Interleave"] < lines["measure_rates"]


def test_the_script_for_gpu_machines_says_that_there_is_none(repository, child_environment, tmp_path):
    folder = repository / "ffi_tests" / "gpu"
    for script in folder.glob("*.py"):
        compile(script.read_text(), script.name, "exec")
    child_environment.update(SPILLWAY_CUDA_LIBRARY="libno-such-driver.so.9", LOGS=str(tmp_path), SPILLWAY_PYTHON=sys.executable)
    done = subprocess.run(["sh", folder / "run.sh"], env=child_environment, capture_output=True, text=True)
    assert done.returncode == 77 and done.stdout.startswith("gpu: skipped: opening libno-such-driver.so.9"), done
