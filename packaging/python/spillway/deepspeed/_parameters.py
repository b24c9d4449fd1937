"""Stores ZeRO-3's 16-bit parameters on a tier, instead of the files of DeepSpeed's AsyncPartitionedParameterSwapper.

The swapper's buffers and bookkeeping stay DeepSpeed's; each of its files becomes an extent of a tier. The tier uses the
paths of the `spillway` block, or offload_param's nvme_path without one. Every read is checked, and writes move to
another path when a path fails."""

from __future__ import annotations

import gc
import os
import weakref

from .. import _files
from ..errors import InvalidArgumentError
from ..tier import Tier
from ..tiered import Handles
from . import _installed, _lifetime, _scratch

# All stores of this process, for active().
_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def overrides(swapper):
    """Methods for DeepSpeed's AsyncPartitionedParameterSwapper, by name."""
    own_configure, own_path = swapper._configure_aio, swapper.get_path

    def configure(self, ds_config):
        from . import _settings

        own_configure(self, ds_config)
        block = getattr(ds_config, "_param_dict", {}).get("spillway")
        settings = _settings.of_tier(_lifetime.block() if block is None else block, self.swap_config.nvme_path)
        if settings.enabled and not getattr(self, "use_gds", False):
            # The tier ends with the engine, see _lifetime.
            store = self._spillway_store = Store(settings)
            # Files that other code reads are there, also after a change of the working directory.
            self.swap_folder = os.path.abspath(self.swap_folder)
            self.aio_read_handle = TierHandle(self.aio_read_handle, store)
            self.aio_write_handle = TierHandle(self.aio_write_handle, store)

    def get_path(self, param, must_exist=False):
        path = own_path(self, param, must_exist)
        if must_exist and isinstance(self.aio_read_handle, TierHandle):
            self.aio_read_handle.store.write_file(path)
        return path

    return {"_configure_aio": configure, "get_path": get_path}


class Store:
    """A tier for the lifetime of the run, with an extent per file name."""

    def __init__(self, settings):
        from deepspeed import comm as dist

        if _stores:
            # An unreferenced store may still hold its tier.
            gc.collect()
        place = _scratch.place_of(settings, f"{settings.job}-parameters", dist.get_rank(), dist.get_world_size())
        self._handles = Handles(_scratch.open_scratch(place), Tier.destroy)
        self._extents = {}
        weakref.finalize(self, Handles.close, self._handles)
        _lifetime.opened(self)
        _stores.add(self)

    @property
    def tier(self):
        """The open tier."""
        if self._handles.closed:
            raise InvalidArgumentError(
                "the parameters on the tier were closed with their engine; make a new model and engine, and load a checkpoint"
            )
        return self._handles.tier

    def close(self):
        """Removes the tier's files and closes it."""
        _stores.discard(self)
        self._handles.close()

    def put(self, path, buffer):
        """Starts a write; returns a ticket of the tier."""
        extent, size = self._extents.get(path, (None, None))
        if extent is None:
            size = buffer.numel() * buffer.element_size()
            extent = self.tier.define(os.path.basename(path), [size])
            self._extents[path] = extent, size
        return self.tier.put(extent, [buffer])

    def get(self, path, buffer):
        """Starts a read of an earlier write; returns a ticket of the tier."""
        if path not in self._extents:
            raise InvalidArgumentError(f"{path} was never written to the tier of parameters; write it before it is read")
        extent, size = self._extents[path]
        return self.tier.get(extent, [buffer.flatten()[: size // buffer.element_size()]])

    def write_file(self, path):
        """Writes the content to a plain file, for code that reads the file by its name."""
        _, size = self._extents[path]
        content = bytearray(size)
        self.tier.wait(self.tier.get(self._extents[path][0], [content]))
        with _files.create(path, replace=True) as file:
            file.write(content)

    def report(self):
        """Entry for active()."""
        return {"paths": [path._asdict() for path in self.tier.paths()], "parameters": len(self._extents)}


class TierHandle:
    """The methods of an aio_handle that DeepSpeed's swapper uses; memory comes from the wrapped handle."""

    def __init__(self, own, store):
        self._own, self.store, self._tickets = own, store, []

    def __getattr__(self, name):
        return getattr(self._own, name)

    def async_pwrite(self, buffer, path, offset=0):
        """Starts writing a whole file."""
        self._tickets.append(self.store.put(_whole(path, offset), buffer))
        return 0

    def async_pread(self, buffer, path, offset=0):
        """Starts reading a whole file."""
        self._tickets.append(self.store.get(_whole(path, offset), buffer))
        return 0

    def wait(self):
        """Waits for all operations and returns their number. Raises the first failure after all have ended."""
        tickets, self._tickets = self._tickets, []
        failures = []
        for ticket in tickets:
            try:
                self.store.tier.wait(ticket)
            except Exception as error:
                failures.append(error)
        if failures:
            try:
                raise failures[0]
            finally:
                # Their tracebacks refer to the list.
                failures.clear()
        return len(tickets)


def served():
    """Reports of this process's parameter tiers, for active()."""
    return [store.report() for store in _stores]


_installed.counted(lambda: {"parameter_tier": found} if (found := served()) else {})


def _whole(path, offset):
    if offset != 0:
        raise InvalidArgumentError(f"{path}: offset {offset}; parameters are read and written whole")
    return path
