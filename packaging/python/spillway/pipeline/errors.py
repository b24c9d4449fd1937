"""The exception of the runner."""

from __future__ import annotations

from ..errors import SpillwayError


class PipelineError(SpillwayError):
    """A process of a pipeline failed. All its processes have ended; the weights are those of the last sync().

    Attributes:
        device: The device whose process failed first.
        operation: What that process was doing, such as "backward of unit 3 on micro-batch 1"."""

    def __init__(self, message: str, device: int | None = None, operation: str | None = None):
        super().__init__(message)
        self.device: int | None = device
        self.operation: str | None = operation
