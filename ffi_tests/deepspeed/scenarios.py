"""Trains a tiny model by the scenarios of scenarios.json, and compares the results bit for bit.
The reference is DeepSpeed's compiled cpu_adam under plain ZeRO; Spillway runs in memory, on a tier and under
SuperOffload. The script compares losses, weights, moments and all values that a scenario reads.

    python scenarios.py                  all scenarios; a line for each that fails, and the counts
    python scenarios.py --list           their names
    python scenarios.py NAME ...         only these scenarios, with their differences

A scenario is a run of `steps` steps. `at` lists the events of a step other than forward, backward and step. A
process trains all scenarios of one kind and number of ranks one after another."""

import argparse
import contextlib
import json
import logging
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback

from scenario_run import Run

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REFERENCE = "deepspeed"
KINDS = (REFERENCE, "memory", "tier", "super")
# Seconds after which a run counts as hung: a hundred times its duration on an idle machine.
_PATIENCE = 200


# A process that trains scenarios of one kind.


def worker(kind, folder, names):
    """Trains the scenarios of these names, and writes a line of JSON for each."""
    import torch
    import train

    torch.set_num_threads(1)
    if kind != REFERENCE:
        import spillway.deepspeed

        spillway.deepspeed.install()
    train.become_single_rank()
    from deepspeed.accelerator import get_accelerator

    train.without_compiled_collectives()
    # A processor without 16-bit instructions multiplies these matrices with slow code, which DeepSpeed refuses.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    logging.disable(logging.WARNING)
    import superoffload

    superoffload.allow_the_cpu()
    scenarios = read_scenarios()
    for line in names:
        name = line.strip()
        place = pathlib.Path(folder) / name
        place.mkdir(exist_ok=True)
        began, found = time.monotonic(), {}
        before = counters(kind)
        try:
            found = Run(scenarios[name], kind, place).go()
        except Exception:
            found = {"error": traceback.format_exc(limit=-6)}
        after = counters(kind)
        found["rounds"] = {key: after[key] - before.get(key, 0) for key in after if isinstance(after[key], int)}
        found.update(name=name, seconds=round(time.monotonic() - began, 2))
        shutil.rmtree(place, ignore_errors=True)
        if os.environ["RANK"] == "0":
            print(json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(0)


def counters(kind):
    if kind != "super":
        return {}
    from spillway.deepspeed import _rounds

    return _rounds.served()


class Nursery:
    """A process that imports torch and DeepSpeed once and forks the workers. The imports take longer than a short run."""

    def __init__(self, folder):
        self._folder, self._count, self._lock = folder, 0, threading.Lock()
        environment = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "packaging" / "python"), str(HERE)]),
        }
        environment.pop("SPILLWAY_DEEPSPEED", None)
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--nursery"], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def start(self, kind, place, environment):
        """Forks a process that runs worker(). Returns its process id and pipes to its standard input and output."""
        with self._lock:
            self._count += 1
            pipes = [str(self._folder / f"{self._count}-{way}") for way in ("in", "out")]
            for pipe in pipes:
                os.mkfifo(pipe)
            self._process.stdin.write(json.dumps([kind, str(place), pipes, environment]) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline()), open(pipes[0], "w"), open(pipes[1])

    def close(self):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def nursery():
    """Forks a worker for each line."""
    import forked

    forked.remember_processor()
    forked.import_all()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in iter(sys.stdin.readline, ""):
        kind, place, pipes, environment = json.loads(line)
        assert len(os.listdir("/proc/self/task")) == 1, "a fork would take the locks of other threads along"
        child = os.fork()
        if not child:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.environ.update(environment)
            os.dup2(os.open(pipes[0], os.O_RDONLY), 0)
            os.dup2(os.open(pipes[1], os.O_WRONLY), 1)
            os.dup2(1, 2)
            worker(kind, place, open(0))
        print(child, flush=True)


class Worker:
    """The processes of the ranks of one kind of run."""

    def __init__(self, nursery, kind, ranks, place):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.processes = [nursery.start(kind, place, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)]

    def run(self, name):
        """The result of one scenario."""
        for _, orders, _ in self.processes:
            with contextlib.suppress(BrokenPipeError):
                orders.write(name + "\n")
                orders.flush()
        said, late = [], threading.Timer(_PATIENCE, self._kill)
        late.start()
        try:
            for line in self.processes[0][2]:
                if line.startswith('{"') and f'"name": "{name}"' in line:
                    return json.loads(line)
                said.append(line)
        finally:
            late.cancel()
        return {"error": f"the process ended, or was killed after {_PATIENCE} s: " + "".join(said[-20:]), "seconds": 0.0}

    def _kill(self):
        for process, _, _ in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def close(self):
        self._kill()
        for _, *pipes in self.processes:
            for pipe in pipes:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


# The comparison.


def read_scenarios():
    """Scenarios by name."""
    return {scenario["name"]: scenario for scenario in json.loads((HERE / "scenarios.json").read_text())}


def kinds_of(scenario):
    """The kinds of run that are compared for a scenario."""
    if "kinds" in scenario:
        return tuple(scenario["kinds"])
    return KINDS[1:] if scenario.get("stage", 3) == 3 else ("memory",)


COMPARED = ("losses", "skipped", "weights", "masters", "moments", "seen")


def differences(scenario, reference, found):
    """A message that names the values of a run that differ from DeepSpeed's."""
    if "error" in found or "error" in reference:
        return [found.get("error") or "the reference: " + reference["error"]]
    wrong = [f"{key} {found.get(key)}, not {reference.get(key)}" for key in COMPARED if found.get(key) != reference.get(key)]
    rounds = found["rounds"]
    if "speculated" in scenario and rounds and bool(rounds.get("buckets_speculated")) != scenario["speculated"]:
        wrong.append(f"sub-groups were {'not ' * scenario['speculated']}stepped in backward: {rounds}")
    return wrong


def compare(scenarios, report):
    """Runs scenarios and compares them. Returns the number of comparisons passed and failed, and the longest time of a
    run. Calls `report(name, kind, message)` for each comparison."""
    passed, failed, longest = 0, 0, (0.0, "")
    with tempfile.TemporaryDirectory(prefix="spillway-scenarios-") as folder, contextlib.closing(Nursery(pathlib.Path(folder))) as source:
        for ranks in sorted({scenario.get("ranks", 1) for scenario in scenarios}):
            some = [scenario for scenario in scenarios if scenario.get("ranks", 1) == ranks]
            kinds = [kind for kind in KINDS if kind == REFERENCE or any(kind in kinds_of(scenario) for scenario in some)]
            found = run_all(some, kinds, ranks, source, pathlib.Path(folder))
            for scenario in some:
                for kind in kinds_of(scenario):
                    words = differences(scenario, found[REFERENCE][scenario["name"]], found[kind][scenario["name"]])
                    passed, failed = passed + (not words), failed + bool(words)
                    report(scenario["name"], kind, words)
                longest = max(
                    longest,
                    *(
                        (found[kind][scenario["name"]]["seconds"], f"{scenario['name']} ({kind})")
                        for kind in (REFERENCE, *kinds_of(scenario))
                    ),
                )
    return passed, failed, longest


def run_all(scenarios, kinds, ranks, source, folder):
    """The results of all scenarios, by kind and name. Two kinds run at a time."""
    import concurrent.futures

    def run_kind(kind):
        place, found = folder / f"{kind}-{ranks}", {}
        place.mkdir()
        running = Worker(source, kind, ranks, place)
        try:
            for scenario in scenarios:
                if kind == REFERENCE or kind in kinds_of(scenario):
                    found[scenario["name"]] = running.run(scenario["name"])
                    if "error" in found[scenario["name"]]:
                        # The processes of the failed run, such as a rank that waits for the other, must not
                        # serve the next run.
                        running.close()
                        running = Worker(source, kind, ranks, place)
            return found
        finally:
            running.close()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return dict(zip(kinds, pool.map(run_kind, kinds)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--nursery", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.nursery:
        return nursery()
    known = read_scenarios()
    if options.list:
        print("\n".join(known))
        return 0
    chosen = [known[name] for name in options.names] if options.names else list(known.values())
    began = time.monotonic()
    passed, failed, (seconds, name) = compare(chosen, say)
    print(
        f"{len(chosen)} scenarios, {passed} comparisons equal, {failed} not, {time.monotonic() - began:.0f} s; "
        f"the longest run took {seconds} s: {name}"
    )
    return failed > 0


def say(name, kind, words):
    if words:
        print(f"{name}, {kind}:\n  " + "\n  ".join(words), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
