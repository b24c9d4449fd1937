"""DeepSpeed's gds, served by Spillway: tensors on a GPU to and from files through pinned host memory."""

from ._handle import gds_handle

SERVED = ("gds_handle",)
NOT_SERVED = {}
