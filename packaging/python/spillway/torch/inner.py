"""What other parts of Spillway build on: optimizers whose states in host memory have another kind of step. Not for programs.

A subclass of `SpillwayOptimizer` names a subclass of `Memory` in its attribute `_memory`."""

from ._copies import link_to
from ._home import Memory, Recorded
from ._optimizer import SpillwayOptimizer
from ._tensors import CODES, DTensor, name_of, unused_bytes

__all__ = ["CODES", "DTensor", "Memory", "Recorded", "SpillwayOptimizer", "link_to", "name_of", "unused_bytes"]
