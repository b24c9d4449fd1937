"""Compares Adam on the GPU with the bandwidth of its memory, measured by a copy on the device."""

from machine import alternating, ratio, report, seconds, size, torch_on_gpu

import spillway

torch = torch_on_gpu()
COUNT = size(1 << 30, 1 << 22, 1 << 8)
REPEATS = size(10, 10, 1)


def main():
    gpu, lines, stream = spillway.Gpu(0), [], torch.cuda.current_stream()
    states = [torch.zeros(COUNT, device="cuda") for _ in range(3)]
    source, target = torch.zeros(COUNT, device="cuda"), torch.empty(COUNT, device="cuda")
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("f32", torch.float32)):
        grad = torch.full((COUNT,), 1e-3, dtype=dtype, device="cuda")
        copy = torch.empty(COUNT, dtype=torch.bfloat16 if dtype is torch.float32 else dtype, device="cuda")
        adam = spillway.Adam(weight_decay=0.1)

        def steps(measured):
            for _ in range(REPEATS):
                gpu.step(adam, [(states[0], grad, states[1], states[2], copy)], stream=stream, return_stats=measured)

        taken = alternating(
            {
                "copy": lambda: [target.copy_(source) for _ in range(REPEATS)],
                "step": lambda: steps(False),
                "step with the norm": lambda: steps(True),
            },
            lambda work: seconds(torch, work) / REPEATS,
        )
        limit = 8 * COUNT / taken["copy"]
        moved = (24 + grad.element_size() + copy.element_size()) * COUNT
        lines.append(
            f"{name}: copy on the device {limit / 1e12:6.3f} TB/s, step {moved / taken['step'] / 1e12:6.3f} TB/s, "
            f"{COUNT / taken['step'] / 1e9:7.2f} G parameters/s"
        )
        for kind in ("step", "step with the norm"):
            lines.append(ratio(f"{name}: {kind}, of the copy's bytes per second", moved / taken[kind] / limit, 0.85))
        del grad, copy
    report("adam", f"Adam on the GPU, {COUNT / 2**20:.0f} Mi parameters", gpu, lines, "ffi_tests/gpu/run.sh adam")


if __name__ == "__main__":
    main()
