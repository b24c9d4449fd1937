"""Measures what pending work costs the program: copies that wait for a delayed stream, and buckets of a speculation whose event has not
happened. The calls should return at once, take no processor time while they wait, and leave launches of the program as fast as before."""

import statistics
import time

from machine import report, size, torch_on_gpu

import spillway

torch = torch_on_gpu()
COUNT, ELEMENTS = size(200, 8), size(1 << 16, 1 << 8)
#: Cycles of the delay of a stream: about a second.
BEHIND = 1_500_000_000


def main():
    gpu = spillway.Gpu(0)
    idle = _launches()
    lines = [
        {"case": {"pending": "nothing"}, "figures": idle},
        {"case": {"pending": f"{COUNT} copies behind a stream"}, "figures": _copies(gpu)},
        {"case": {"pending": f"{COUNT} buckets of a speculation"}, "figures": _buckets(gpu)},
    ]
    for line in lines:
        line.update(headline="launch_us" if "launch_us" in line["figures"] else "calls_ms", better="lower")
    report("waiting", "What pending copies and buckets cost", gpu, lines, "ffi_tests/gpu/run.sh waiting")


def _behind():
    """A stream that is delayed by about a second."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BEHIND)
    return stream


def _copies(gpu):
    device = [torch.ones(ELEMENTS, device="cuda") for _ in range(COUNT)]
    host = [spillway.pinned(ELEMENTS) for _ in range(COUNT)]
    stream, start, used = _behind(), time.perf_counter(), time.process_time()
    copies = [gpu.copy_out(one, other, after=stream) for one, other in zip(device, host)]
    calls = time.perf_counter() - start
    for copy in copies:
        copy.wait()
    return {"calls_ms": 1e3 * calls, "seconds": time.perf_counter() - start, "processor_seconds": time.process_time() - used}


def _buckets(gpu):
    rows = [
        (torch.zeros(ELEMENTS), torch.empty(ELEMENTS, dtype=torch.bfloat16, pin_memory=True), torch.zeros(ELEMENTS), torch.zeros(ELEMENTS))
        for _ in range(COUNT)
    ]
    with spillway.Speculation(COUNT) as speculation:
        speculation.begin(spillway.Adam(), max_norm=1.0)
        event, stream = torch.cuda.Event(), _behind()
        event.record(stream)
        start, used = time.perf_counter(), time.process_time()
        for bucket, row in enumerate(rows):
            speculation.submit(bucket, [row], after=event, gpu=gpu)
        calls, launches = time.perf_counter() - start, _launches()
        speculation.local_result()
        taken = {"seconds": time.perf_counter() - start, "processor_seconds": time.process_time() - used}
        speculation.resolve_as("commit")
        speculation.finish()
    return {"calls_ms": 1e3 * calls, **launches, **taken}


def _launches():
    """How long a launch of the program's own thread takes, in microseconds."""
    tensor, taken = torch.ones(1 << 10, device="cuda"), []
    for _ in range(size(300, 5)):
        start = time.perf_counter()
        tensor.add_(1)
        taken.append(time.perf_counter() - start)
        time.sleep(0.001)
    return {"launch_us": 1e6 * statistics.median(taken), "worst_launch_us": 1e6 * max(taken)}


if __name__ == "__main__":
    main()
