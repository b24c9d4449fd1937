"""Reads and writes tensors through an aio_handle, DeepSpeed's or Spillway's."""


class Contender:
    """Has one buffer per tensor, allocated by its handle; read and write start all transfers and wait once."""

    def __init__(self, name, module, places, size, setting):
        import torch

        self.setting = setting
        self._name, self._places = name, places
        self._handle = module.aio_handle(*setting)
        example = torch.empty(0, dtype=torch.uint8)
        self._tensors = [self._handle.new_cpu_locked_tensor(size, example) for _ in places]
        for tensor in self._tensors:
            tensor.zero_()

    def read(self):
        self._all(self._handle.async_pread)

    def write(self):
        self._all(self._handle.async_pwrite)

    def compare(self):
        """Checks that the buffers equal the files."""
        for (path, offset), tensor in zip(self._places, self._tensors):
            with open(path, "rb") as file:
                file.seek(offset)
                if file.read(tensor.numel()) != tensor.numpy().tobytes():
                    raise SystemExit(
                        f"bench io: {self._name} has other bytes than {path} at offset {offset}, so their times cannot be compared"
                    )

    def close(self):
        for tensor in self._tensors:
            self._handle.free_cpu_locked_tensor(tensor)
        self._handle = None

    def _all(self, start):
        for (path, offset), tensor in zip(self._places, self._tensors):
            if start(tensor, path, offset) != 0:
                raise SystemExit(f"bench io: {self._name} did not start the transfer of {path}")
        if self._handle.wait() != len(self._tensors):
            raise SystemExit(f"bench io: {self._name} reports fewer finished transfers than tensors")
