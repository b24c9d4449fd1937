"""Compares copies of gradients to host memory and of parameters back with the copy engine's own
speed and with torch."""

import numpy as np
from machine import alternating, ratio, report, seconds, size, torch_on_gpu

import spillway

torch = torch_on_gpu()
COUNT = size(1 << 30, 1 << 24, 1 << 8)


def main():
    gpu, lines = spillway.Gpu(0), []
    wide, narrow = spillway.pinned(COUNT), spillway.pinned(COUNT, "bf16")
    wide32 = torch.from_numpy(wide)
    source32 = torch.zeros(COUNT, device="cuda")
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        grad = torch.zeros(COUNT, dtype=dtype, device="cuda")
        native = narrow if dtype is torch.bfloat16 else narrow.view(np.float16)
        pageable = torch.zeros(COUNT)
        taken = alternating(
            {
                "peak": lambda: wide32.copy_(source32, non_blocking=True),
                "f32 wire": lambda: gpu.copy_out(grad, wide).wait(),
                "native wire": lambda: gpu.copy_out(grad, native).wait(),
                "torch, pinned": lambda: wide32.copy_(grad),
                "torch, pageable": lambda: pageable.copy_(grad),
                "in, f32 wire": lambda: gpu.copy_in(wide, grad).wait(),
                "in, native wire": lambda: gpu.copy_in(native, grad).wait(),
            },
            lambda work: seconds(torch, work),
        )
        for what, took in taken.items():
            lines.append(f"{name} {what:<20} {COUNT / took / 1e9:8.3f} G parameters/s")
        lines += [
            ratio(f"{name}: f32 wire of the pinned copy's peak", taken["peak"] / taken["f32 wire"], 0.9),
            ratio(f"{name}: f32 wire against host32.copy_(gpu16), pinned", taken["torch, pinned"] / taken["f32 wire"], 5),
            ratio(f"{name}: f32 wire against host32.copy_(gpu16), pageable", taken["torch, pageable"] / taken["f32 wire"], 5),
            ratio(f"{name}: native wire against f32 wire", taken["f32 wire"] / taken["native wire"], 1.8),
        ]
        del grad, pageable
    lines.append(f"link as measured and kept: {gpu.measure_link(remeasure=True)}")
    report("transfer", f"Transfers of {COUNT / 2**20:.0f} Mi parameters", gpu, lines, "ffi_tests/gpu/run.sh transfer")


if __name__ == "__main__":
    main()
