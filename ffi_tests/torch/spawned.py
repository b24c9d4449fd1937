"""Starts the processes of multiprocessing's spawn method by a fork of a process that has imported torch. The import is nine tenths of the
time of a short pipeline.

All else is as with spawn: the process is a child of this one, has the descriptors, environment and directory that spawn gives it, and reads
its pickled arguments. Pipelines that test_pipeline_refusals.py starts in programs of their own are spawned.

    spawned.py DESCRIPTOR     serves a socket, after the imports"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import json
import multiprocessing.util
import os
import socket
import subprocess
import sys
import time

_PR_SET_CHILD_SUBREAPER = 36
#: Descriptors are received above those that a child may ask for.
_ABOVE = 4096


def install(patch):
    """`patch` is the setattr of pytest's monkeypatch."""
    patch(multiprocessing.util, "spawnv_passfds", functools.partial(_start, multiprocessing.util.spawnv_passfds))


def _start(spawn, path, command, passed):
    """Starts a process, and returns its id. multiprocessing also spawns its resource tracker."""
    code = os.fsdecode(command[command.index("-c") + 1])
    if "spawn_main" not in code:
        return spawn(path, command, passed)
    numbers = [1, 2, *passed]
    request = {"code": code, "numbers": numbers, "environment": dict(os.environ), "folder": os.getcwd()}
    connection = _server()
    with _adopting():
        socket.send_fds(connection, [json.dumps(request).encode()], numbers)
        return int(connection.recv(64))


@contextlib.contextmanager
def _adopting():
    """A process whose parent has ended becomes a child of this process."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@functools.cache
def _server():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        # The threads that numpy's BLAS would start would forbid the fork.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environment)

    def close():
        ours.close()
        process.wait(60)

    atexit.register(close)
    return ours


def serve(connection):
    """Answers each request with the id of its process. Returns the request in that process, and None at the end."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 64)
        if not message:
            return None
        assert len(os.listdir("/proc/self/task")) == 1, "a fork would take the locks of other threads along"
        read, write = os.pipe()
        between = os.fork()
        if not between:
            between = os.getpid()
            child = os.fork()
            if child:
                os.write(write, str(child).encode())
                os._exit(0)
            for number in (read, write, connection.fileno()):
                os.close(number)
            connection.detach()
            # The new parent is there once this one has ended.
            while os.getppid() == between:
                time.sleep(0.0005)
            request = json.loads(message)
            _place(descriptors, request["numbers"])
            return request
        os.close(write)
        child = os.read(read, 64)
        os.waitpid(between, 0)
        for number in (read, *descriptors):
            os.close(number)
        connection.send(child)


def _place(descriptors, numbers):
    """Gives each descriptor its number."""
    above = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, number in zip(above, numbers, strict=True):
        os.dup2(each, number)
        os.close(each)


def main():
    import torch.distributed.tensor
    import torch.multiprocessing  # noqa: F401

    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request:
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.argv = ["-c", "--multiprocessing-fork"]
        exec(request["code"], {"__name__": "__main__"})


if __name__ == "__main__":
    main()
