"""Checks the library on a real driver and GPU. Every kernel gives the bits of the CPU's, streams and events of torch
are accepted, and memory is recognised correctly. Prints one line for each check and exits 1 if one fails.

    check.py [--kernels]       only the checks that launch kernels, for compute-sanitizer"""

import ctypes
import sys
import time

import numpy as np
from machine import available_bytes, size, torch_on_gpu

import spillway

torch = torch_on_gpu()
failures = []


def main():
    first, gpu = open_time()
    again, other = open_time()
    other.close()
    print(f"kernels compiled in {first:.3f} s, with the driver's cache in {again:.3f} s")
    casts(gpu)
    adam(gpu)
    if "--kernels" not in sys.argv[1:]:
        memory(gpu)
        foreign(gpu)
        interleaved(gpu)
    print("failed: " + "; ".join(failures) if failures else "all checks passed")
    return 1 if failures else 0


def open_time():
    start = time.perf_counter()
    gpu = spillway.Gpu(0)
    return time.perf_counter() - start, gpu


def expect(name, good, detail=""):
    print(f"{'ok    ' if good else 'FAILED'} {name} {detail}", flush=True)
    if not good:
        failures.append(name)


def same(mine, wanted):
    """Number of elements with different bits; all 32-bit NaNs count as equal."""
    if mine.dtype == np.float32:
        both = np.isnan(mine) & np.isnan(wanted)
        return int(((mine.view(np.uint32) != wanted.view(np.uint32)) & ~both).sum())
    return int((mine.view(np.uint16) != wanted.view(np.uint16)).sum())


def on_gpu(array):
    """A copy on the GPU; uint16 holds bfloat16 patterns."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).cuda()
    return torch.from_numpy(array).cuda()


def from_gpu(tensor):
    host = tensor.cpu()
    return host.view(torch.int16).numpy().view(np.uint16) if tensor.dtype is torch.bfloat16 else host.numpy()


def round_to(values, kind):
    """Converts f32 to 16 bits, to nearest even; every NaN becomes one pattern."""
    bits = values.view(np.uint32)
    if kind == np.uint16:
        rounded = ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    return np.where(np.isnan(values), np.uint16(0x7E00), rounded.view(np.uint16)).view(np.float16)


def widen(values):
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def casts(gpu):
    stream = torch.cuda.current_stream()
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    for name, values in (("bf16", every), ("fp16", every.view(np.float16))):
        device, wide = on_gpu(values), spillway.pinned(values.size)
        gpu.copy_out(device, wide, after=stream).wait()
        wrong = same(wide, widen(values))
        expect(f"all 65,536 values of {name} widened", wrong == 0, f"{wrong} differ")
    count, source = size(1 << 24, 1 << 16), np.random.default_rng(1)
    for turn in range(size(6, 1)):
        values = source.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
        if turn == 0:
            smallest = min(count, 1 << 15)
            values[:smallest] = np.arange(smallest, dtype=np.uint32).view(np.float32)
        host = spillway.pinned(count)
        host[:] = values
        for name, kind, dtype in (("bf16", np.uint16, torch.bfloat16), ("fp16", np.float16, torch.float16)):
            device = torch.empty(count, dtype=dtype, device="cuda")
            torch.cuda.synchronize()
            gpu.copy_in(host, device).wait()
            wrong = same(from_gpu(device), round_to(values, kind))
            expect(f"{count} random bit patterns rounded to {name}, turn {turn}", wrong == 0, f"{wrong} differ")


def adam(gpu):
    """All gradient and copy types, both decays, in place and with a shadow; ordinary, tiny, huge and zero values."""
    count = size(1 << 22, 1 << 14)
    source = np.random.default_rng(2)
    for mode in ("decoupled", "l2"):
        for grad in (np.float32, np.uint16, np.float16):
            for copy in (None, np.uint16, np.float16):
                plain = [source.standard_normal(count).astype(np.float32) for _ in range(2)] + [np.zeros(count, np.float32)] * 2
                param, gradient, exp_avg, exp_avg_sq = (
                    plain[0],
                    round_or_keep(mixed(plain[1], source), grad),
                    plain[2].copy(),
                    plain[3].copy(),
                )
                tensors = [param, gradient, exp_avg, exp_avg_sq] + ([np.zeros(count, copy)] if copy else [])
                device = [on_gpu(array) for array in tensors]
                ours, theirs = (spillway.Adam(lr=1e-2, weight_decay=0.1, weight_decay_mode=mode) for _ in range(2))
                for _ in range(3):
                    mine = gpu.step(ours, [device], stream=torch.cuda.current_stream(), grad_scale=0.25, return_stats=True)
                    wanted = theirs.step([tuple(tensors)], grad_scale=0.25, return_stats=True, uint16_dtype="bf16")
                wrong = [same(from_gpu(mine_), wanted_) for mine_, wanted_ in zip(device, tensors)]
                name = f"adam {mode} gradient {np.dtype(grad).name} copy {np.dtype(copy).name if copy else 'none'}"
                expect(name, not any(wrong) and mine == wanted, f"{wrong} differ, {mine} and {wanted}")
    shadowed(gpu, count, source)


def shadowed(gpu, count, source):
    tensors = [source.standard_normal(count).astype(np.float32) for _ in range(3)] + [np.zeros(count, np.float32)]
    tensors[2] = np.zeros(count, np.float32)
    device = [on_gpu(array) for array in tensors]
    shadow = [torch.empty(count, device="cuda") for _ in range(3)]
    gpu.step(spillway.Adam(), [device], shadow=[shadow], stream=torch.cuda.current_stream())
    torch.cuda.synchronize()
    before = [same(from_gpu(device[at]), tensors[at]) for at in (0, 2, 3)]
    spillway.Adam().step([tuple(tensors)])
    after = [same(from_gpu(made), tensors[at]) for made, at in zip(shadow, (0, 2, 3))]
    expect("adam with a shadow", not any(before + after), f"{before} {after}")


def mixed(values, source):
    scale = np.exp2(source.integers(-120, 20, values.size).astype(np.float32))
    values = (values * scale).astype(np.float32)
    values[::97] = 0
    return values


def round_or_keep(values, kind):
    return (
        values
        if kind == np.float32
        else np.nan_to_num(round_to(np.clip(values, -1e4, 1e4), kind))
        if kind == np.float16
        else round_to(values, kind)
    )


def memory(gpu):
    device = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()

    def taken(array):
        try:
            gpu.copy_out(device[: array.size], array).wait()
            return True
        except spillway.InvalidArgumentError as error:
            assert "not pinned" in str(error), error
            return False

    expect("torch's pinned memory is taken", taken(torch.empty(1 << 20, pin_memory=True).numpy()))
    plain = np.zeros(1 << 20, np.float32)
    expect("pageable memory is refused", not taken(plain))
    driver = ctypes.CDLL("libcuda.so.1")
    page = plain[(-plain.ctypes.data % 4096) // 4 :][: (1 << 19)]
    half = page[: page.size // 2]
    status = driver.cuMemHostRegister_v2(ctypes.c_void_p(half.ctypes.data), ctypes.c_size_t(half.nbytes), 1)
    expect("half an array was registered by its owner", status == 0, f"cuMemHostRegister {status}")
    expect("its registered half is taken", taken(half))
    expect("all of it is refused", not taken(page))
    driver.cuMemHostUnregister(ctypes.c_void_p(half.ctypes.data))
    combined = ctypes.c_void_p()
    status = driver.cuMemHostAlloc(ctypes.byref(combined), ctypes.c_size_t(1 << 20), 4)
    array = np.frombuffer((ctypes.c_char * (1 << 20)).from_address(combined.value), np.float32)
    print(f"     write-combined memory (cuMemHostAlloc {status}): {'taken' if taken(array) else 'refused'}")
    driver.cuMemFreeHost(combined)
    room = min(1 << 30, available_bytes() // 4)
    start = time.perf_counter()
    large = spillway.pinned(room // 4)
    allocated = time.perf_counter()
    taken(large[:1])
    print(
        f"     {room >> 20} MiB: {room / (allocated - start) / 1e9:.2f} GB/s to allocate and touch, "
        f"{room / (time.perf_counter() - allocated) / 1e9:.2f} GB/s to register with the driver"
    )


def foreign(gpu):
    event = torch.cuda.Event()
    print(f"     an event of torch before its first record is {event.cuda_event}")
    side, count = torch.cuda.Stream(), size(1 << 26, 1 << 20)
    host, device = spillway.pinned(count), torch.zeros(count, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        device.fill_(3)
        event.record(side)
    gpu.copy_out(device, host, after=event).wait()
    expect("a copy waits for an event of torch", bool((host == 3).all()))
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        device.fill_(4)
    copy = gpu.copy_out(device, host, after=side)
    copy.stream_wait(side)
    with torch.cuda.stream(side):
        device.fill_(5)
    torch.cuda.synchronize()
    copy.wait()
    expect("a copy waits for a stream, and a stream for the copy", bool((host == 4).all()))


def interleaved(gpu):
    """100 steps with another plan at each step and 1 to 3 slots, compared with the CPU."""
    sizes, stream = [size(1 << 20, 4096) + 17 * at for at in range(6)], torch.cuda.current_stream()
    for slots in (1, 2, 3):
        source = np.random.default_rng(slots)
        plain = [[source.standard_normal(n).astype(np.float32), np.zeros(n, np.float32), np.zeros(n, np.float32)] for n in sizes]
        copies = [np.zeros(n, np.uint16) for n in sizes]
        grads = [torch.zeros(n, dtype=torch.bfloat16, device="cuda") for n in sizes]
        params = [torch.zeros(n, dtype=torch.bfloat16, device="cuda") for n in sizes]
        pinned = [[spillway.pinned(n) for _ in range(3)] for n in sizes]
        for mine, theirs in zip(pinned, plain):
            for to, values in zip(mine, theirs):
                to[:] = values
        subgroups = [spillway.Subgroup(*mine, grad, param) for mine, grad, param in zip(pinned, grads, params)]
        ours, theirs, wrong = spillway.Adam(), spillway.Adam(), 0
        with spillway.Interleave(subgroups, gpu=gpu, slots=slots, chunk=1 << 18) as update:
            for _ in range(size(100, 10)):
                update.set_plan([("cpu", "gpu", "gpu", "resident")[source.integers(4)] for _ in sizes])
                for at, n in enumerate(sizes):
                    grads[at].normal_()
                    update.grad_ready(at, stream)
                rows = [(*row, from_gpu(grad), copy) for row, grad, copy in zip(plain, grads, copies)]
                theirs.step([(p, g, m, v, c) for p, m, v, g, c in rows], uint16_dtype="bf16")
                update.begin(ours, stream=stream)
                for at in range(len(sizes)):
                    update.stream_wait_params(at, stream)
                    wrong += same(from_gpu(params[at]), copies[at])
            update.set_plan(["cpu"] * len(sizes))
            update.drain()
        wrong += sum(same(a, b) for mine, right in zip(pinned, plain) for a, b in zip(mine, right))
        expect(f"interleaved update, {slots} slots", wrong == 0, f"{wrong} differ")


if __name__ == "__main__":
    sys.exit(main())
