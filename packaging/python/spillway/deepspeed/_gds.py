"""Replacement of DeepSpeed's gds: transfers between GPU tensors and files through pinned host memory."""

from __future__ import annotations

from ._handle import gds_handle as gds_handle

SERVED = ("gds_handle",)
NOT_SERVED: dict[str, str] = {}
