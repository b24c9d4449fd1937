"""fio on the same file, as a reference for the device's present bandwidth."""

import json
import shutil
import subprocess

_SETTINGS = [(engine, depth) for engine in ("io_uring", "libaio") for depth in (8, 32)]


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


def installed():
    return shutil.which("fio") is not None
