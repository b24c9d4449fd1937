"""Adam on the device over few large and many small tensors, against torch's fused and foreach steps."""

import statistics
import time

from machine import ROUNDS, report, size, torch_on_gpu

import spillway

torch = torch_on_gpu()
SHAPES = size([(1, 1 << 28), (64, 1 << 20), (500, 1 << 16), (2000, 4096), (10000, 1000)], [(1, 1 << 10), (8, 64)])


def main():
    gpu = spillway.Gpu(0)
    lines = [_row(gpu, tensors, elements) for tensors, elements in SHAPES]
    report("adam_tensors", "Adam on the GPU over few large and many small tensors", gpu, lines, "ffi_tests/gpu/run.sh kernels")


def _row(gpu, tensors, elements):
    rows = [tuple(torch.rand(elements, device="cuda") for _ in range(4)) for _ in range(tensors)]
    adam, stream = spillway.Adam(lr=1e-3), torch.cuda.current_stream()
    taken = {
        "": _milliseconds(lambda: gpu.step(adam, rows, stream=stream)),
        "with_norm_": _milliseconds(lambda: gpu.step(adam, rows, stream=stream, return_stats=True)),
        **{f"torch_{kind}_": _milliseconds(_torch_step(rows, kind)) for kind in ("fused", "foreach")},
    }
    figures = {f"{name}{what}ms": round(value, 4) for name, both in taken.items() for what, value in zip(("", "host_"), both)}
    figures["torch_fused_ratio"] = round(taken["torch_fused_"][0] / taken[""][0], 3)
    return {"case": {"tensors": tensors, "elements": elements}, "figures": figures, "headline": "torch_fused_ratio", "better": "higher"}


def _torch_step(rows, kind):
    params = [torch.nn.Parameter(row[0].as_subclass(torch.Tensor)) for row in rows]
    for param, row in zip(params, rows):
        param.grad = row[1].as_subclass(torch.Tensor)
    return torch.optim.AdamW(params, lr=1e-3, **{kind: True}).step


def _milliseconds(work):
    """Medians of the time until the device has finished, and of the time of the call."""
    whole, host = [], []
    for _ in range(ROUNDS + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - start)
    return 1e3 * statistics.median(whole[2:]), 1e3 * statistics.median(host[2:])


if __name__ == "__main__":
    main()
