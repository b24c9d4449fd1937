"""Streams of the CPU, for torchao's CPUOffloadOptimizer, which asks for those of CUDA."""


class StreamOfTheCpu:
    """Stands in for a CUDA stream: its work is done when the call returns."""

    def wait_stream(self, other):
        pass

    def record_event(self):
        return self

    def synchronize(self):
        pass
