"""Pinned memory under limits of the system: what can be locked is locked, and what does not fit is an error."""

import os
import pathlib
import subprocess
import sys

import spillway

LIMITED = """
import os, resource
import numpy
import spillway
# The other user may not read the files of the package.
spillway._native.library()
resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
if os.getuid() == 0:
    os.setuid(65534)

def locked():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmLck"))

small = [spillway.pinned(1024) for _ in range(3)]
print(locked())
large = spillway.pinned(1 << 20)
print(locked())
# The limit has no room for these bytes: they are not locked.
more = spillway.pinned(2 << 20)
print(locked(), len(more))
del small, large, more
print(locked())
"""


def test_small_allocations_are_locked_as_far_as_the_limit_allows():
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(spillway.__file__).parents[1])}
    ran = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr
    first, second, third, last = ran.stdout.splitlines()
    few, large = int(first), int(second)
    assert few == 3 << 12 and large == few + (4 << 20) and third == f"{large} {2 << 20}" and int(last) == 0
