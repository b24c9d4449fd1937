"""What the benchmark of I/O compares: an aio_handle, DeepSpeed's or Spillway's, and fio on the same file as a reference for the device's
present bandwidth."""

import json
import shutil
import subprocess

_SETTINGS = [(engine, depth) for engine in ("io_uring", "libaio") for depth in (8, 32)]


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


class Ceiling:
    """Reads or writes the whole file with O_DIRECT, in blocks of 1 MiB, at fio's fastest setting for each direction."""

    def __init__(self, path):
        self._path = path
        fastest = {way: min(_SETTINGS, key=lambda setting: self._seconds(way, setting)) for way in ("read", "write")}
        self.read = lambda: self._seconds("read", fastest["read"])
        self.write = lambda: self._seconds("write", fastest["write"])
        self.setting = " or ".join(f"{engine} {depth}" for engine, depth in dict.fromkeys(fastest.values()))

    def close(self):
        """No-op: fio keeps no data to compare."""

    def _seconds(self, way, setting):
        engine, depth = setting
        command = [
            "fio",
            "--name=ceiling",
            f"--filename={self._path}",
            f"--rw={way}",
            "--bs=1M",
            "--direct=1",
            f"--ioengine={engine}",
            f"--iodepth={depth}",
            "--end_fsync=0",
            "--output-format=json",
        ]
        job = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["jobs"][0]
        return job[way]["runtime"] / 1e3


def fio_installed():
    return shutil.which("fio") is not None
