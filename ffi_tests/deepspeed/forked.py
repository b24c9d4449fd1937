"""Runs scripts in children of a process that has imported torch and DeepSpeed. The imports are nine tenths of a
short run's time.

The settings of that process, such as SPILLWAY_DEEPSPEED=1 or LD_PRELOAD, are in its environment from its start; its .pth
file ran before the imports, as in any other process. It forks before any thread exists. Each child has its own
arguments, environment and output.

    forked.py DESCRIPTOR MODULE     serves a socket, after import_all() of a module"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time

#: The signal at which a run writes where its threads are.
SHOW = signal.SIGXCPU


class Starter:
    """Starts runs one after the other from this process.

    `settings` are further variables of the process that imports, and import_all() of `module` does the imports. What
    reads a variable during the imports has its value from there and not from the run's environment, with one exception:
    a run has the OpenMP threads of its own OMP_NUM_THREADS. With `session`, Ctrl-C on the terminal does not reach the runs, and kill() ends
    all of them with what they started."""

    def __init__(self, python, module="forked", session=False, **settings):
        self.python, self._run = python, None
        environment = {name: value for name, value in os.environ.items() if name not in ("SPILLWAY_LIBRARY", "PYTHONPATH")}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [python, __file__, str(theirs.fileno()), module],
                pass_fds=[theirs.fileno()],
                env={**environment, "OMP_NUM_THREADS": "1", **settings},
                stdout=subprocess.DEVNULL,
                start_new_session=session,
            )

    def start(self, command, environment, stderr, ranks=1):
        """Starts a script with its arguments on the given number of ranks. The result is like a Popen whose standard
        output is a pipe."""
        read, write = os.pipe()
        run = self._begin(command, environment, write, stderr.fileno(), ranks)
        os.close(write)
        run.stdout = open(read)
        return run

    def run(self, command, environment, seconds, ranks=1):
        """Runs a script on the given number of ranks until all end, and returns the same result as subprocess.run."""
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            begun = self._begin(command, environment, output.fileno(), errors.fileno(), ranks)
            try:
                status = begun.wait(seconds)
            except subprocess.TimeoutExpired:
                begun.show_threads()
                errors.seek(0)
                raise AssertionError(f"{command} has not ended within {seconds} s; its threads are at\n{errors.read()[-8000:]}") from None
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(command, status, output.read(), errors.read())

    def _begin(self, command, environment, stdout, stderr, ranks):
        self._end()
        request = {"command": list(map(str, command)), "environment": environment, "ranks": ranks}
        socket.send_fds(self._socket, [json.dumps(request).encode()], [stdout, stderr])
        self._run = Run(self._socket)
        return self._run

    def _end(self):
        """Ends a run that a timeout or an exception of its test has left."""
        if self._run and self._run.returncode is None:
            self._run.kill()
            self._run.wait(60)

    def close(self):
        self._end()
        self._socket.close()
        self._process.wait(60)

    def kill(self):
        """Ends the process and all of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._run = None
        self.close()


class Run:
    def __init__(self, connection):
        self._socket, self.returncode = connection, None
        self._pids = self._receive(300)

    def wait(self, seconds):
        if self.returncode is None:
            self.returncode = self._receive(seconds)
        return self.returncode

    def show_threads(self):
        """Has each rank write the calls of its threads to standard error."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SHOW)
        time.sleep(2)

    def kill(self):
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _receive(self, seconds):
        self._socket.settimeout(seconds)
        try:
            return json.loads(self._socket.recv(1 << 10))
        except TimeoutError:
            raise subprocess.TimeoutExpired("a forked run", seconds) from None


def main():
    remember_processor()
    importlib.import_module(sys.argv[2]).import_all()
    # Children then collect only their own garbage: a collection of all modules takes half a second.
    gc.collect()
    gc.freeze()
    command = serve(socket.socket(fileno=int(sys.argv[1])))
    if command:
        # OpenMP has read the variable already, and more threads in this process would forbid the fork.
        if os.environ.get("OMP_NUM_THREADS", "1") != "1":
            import torch

            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        faulthandler.register(SHOW, all_threads=True)
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


def remember_processor():
    """DeepSpeed asks for the processor for each optimizer, and the answer takes a second: this process asks once, and its
    children not at all. Where DeepSpeed is not installed the module may be missing too."""
    try:
        import cpuinfo
    except ImportError:
        return
    found = cpuinfo.get_cpu_info()
    cpuinfo.get_cpu_info = lambda: found


def import_all():
    """Also imports the modules that DeepSpeed would import when it creates an engine."""
    import deepspeed.runtime.zero.muon.muon_optimizer
    import deepspeed.runtime.zero.stage3  # noqa: F401
    import setuptools  # noqa: F401
    import torch._dynamo  # noqa: F401


def serve(connection):
    """Answers each request with the process ids of the run, and later with its exit status. In a child,
    returns the child's command."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 2)
        if not request:
            return None
        assert len(os.listdir("/proc/self/task")) == 1, "a fork would take the locks of other threads along"
        request = json.loads(request)
        pids = []
        for places in ranks(request["ranks"]):
            pids.append(os.fork())
            if not pids[-1]:
                connection.close()
                for number, descriptor in enumerate(descriptors, 1):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                os.environ.clear()
                os.environ.update(request["environment"] | places)
                return request["command"]
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(json.dumps(pids).encode())
        connection.send(json.dumps(ended(pids)).encode())


def ranks(count):
    """The environment variables that torch's launcher sets for each of several ranks."""
    if count == 1:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        for rank in range(count)
    ]


def ended(pids):
    """The exit status of the rank that failed first, or 0. The other ranks are terminated after a failure."""
    running, failure = set(pids), 0
    while running:
        pid, status = os.wait()
        running.remove(pid)
        if status and not failure:
            failure = os.waitstatus_to_exitcode(status)
            for other in running:
                os.kill(other, signal.SIGTERM)
    return failure


if __name__ == "__main__":
    main()
