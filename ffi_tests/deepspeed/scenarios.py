"""Trains a tiny model by the scenarios of scenarios.json, with DeepSpeed's compiled cpu_adam under plain ZeRO, and with Spillway
in memory, on a tier and under SuperOffload, and compares losses, weights, moments and all that was looked at on the way in bits.

    python scenarios.py                  all scenarios; a line for each that fails, and the counts
    python scenarios.py --list           their names
    python scenarios.py NAME ...         these, with what differs

A scenario is a run of `steps` steps. `at` says what happens in which step, beside forward, backward and step. A process
trains all scenarios of one kind and number of ranks one after another."""

import argparse
import contextlib
import hashlib
import json
import logging
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REFERENCE = "deepspeed"
KINDS = (REFERENCE, "memory", "tier", "super")
WIDTH = 24


# The model and its engine.


def make_model(torch, scenario):
    class Model(torch.nn.Module):
        """Layers that a step can leave out, parameters that two ranks cannot share evenly, and perhaps a frozen or a tied one."""

        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.bias, self.gain = torch.nn.Parameter(torch.zeros(7)), torch.nn.Parameter(torch.ones(1))

        def forward(self, x, skipped=()):
            for index, layer in enumerate(self.layers):
                if index not in skipped:
                    x = x + torch.tanh(layer(x))
            if scenario.get("tied"):
                x = x + torch.tanh(self.layers[0](x))
            head = x[:, :7] if "bias" in skipped else x[:, :7] + self.bias
            return torch.cat([head, x[:, 7:]], dim=1) * self.gain

    model = Model()
    for index in scenario.get("frozen", ()):
        model.layers[index].requires_grad_(False)
    return model


def groups_of(model, scenario):
    """Parameter groups; each says which layers are in it, and the last one has the rest."""
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    groups = []
    for group in scenario.get("groups", ()):
        mine = [name for name, _ in trained if any(name.startswith(f"layers.{index}.") for index in group["layers"])]
        options = {name: value for name, value in group.items() if name != "layers"}
        groups.append({"params": [param for name, param in trained if name in mine], **options})
        trained = [(name, param) for name, param in trained if name not in mine]
    return [*groups, {"params": [param for _, param in trained]}]


def config(scenario, kind, folder):
    dtype, stage = scenario.get("dtype", "bf16"), scenario.get("stage", 3)
    offload = {"device": "nvme", "nvme_path": str(folder)} if kind == "tier" else {"device": "cpu"}
    if kind == "super":
        offload["super_offload"] = True
    zero = {"stage": stage, "offload_optimizer": offload}
    if stage == 3:
        zero.update(sub_group_size=1000, stage3_param_persistence_threshold=0)
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}}
    optimizer["type"] = scenario.get("optimizer", {}).get("type", "AdamW")
    optimizer["params"].update({name: value for name, value in scenario.get("optimizer", {}).items() if name != "type"})
    found = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": scenario.get("accumulate", 1),
             "gradient_clipping": scenario.get("clip", 0.0), "zero_optimization": {**zero, **scenario.get("zero", {})},
             "optimizer": optimizer, "steps_per_print": 1 << 30, **scenario.get("config", {})}
    if dtype != "fp32":
        found[dtype] = {"enabled": True, **scenario.get(dtype, {})}
    if "scheduler" in scenario:
        found["scheduler"] = scenario["scheduler"]
    if kind == "tier":
        found["spillway"] = {"lock": False, **scenario.get("block", {})}
    return found


def make_engine(scenario, kind, folder):
    import deepspeed
    import torch
    torch.manual_seed(0)
    model = make_model(torch, scenario)
    return deepspeed.initialize(model=model, model_parameters=groups_of(model, scenario),
                                config=config(scenario, kind, folder))[0]


# A run.


class Run:
    """One scenario in one kind of run."""

    def __init__(self, scenario, kind, folder):
        self.scenario, self.kind, self.folder = scenario, kind, folder
        self.engine, self.seen, self.held = make_engine(scenario, kind, folder), [], []

    def go(self):
        """All steps; what is compared."""
        losses = []
        for step in range(1, self.scenario.get("steps", 5) + 1):
            losses.append(self._step(step, self.scenario.get("at", {}).get(str(step), [])))
        found = {"losses": losses, "skipped": self.engine.skipped_steps, "weights": self._digest("weights"),
                 "masters": self._digest("masters"), "seen": self.seen}
        if not self.scenario.get("no_moments"):
            found["moments"] = self._digest("moments")
        self.engine.destroy()
        return found

    def _step(self, step, actions):
        self._act(actions, "before")
        for micro in range(self.scenario.get("accumulate", 1)):
            loss = self._backward(step, micro, actions)
            if micro == self.scenario.get("accumulate", 1) - 1:
                self._act(actions, "between")
            self.engine.step()
        self._act(actions, "after")
        return loss.item().hex()

    def _backward(self, step, micro, actions):
        import torch
        source = torch.Generator().manual_seed(1000 * int(os.environ["RANK"]) + 10 * step + micro)
        dtype = next(self.engine.module.parameters()).dtype
        batch = torch.randn(4, WIDTH, generator=source).to(dtype)
        skipped = [name for action, *names in actions if action == "skip" for name in names]
        factor = next((float(value) for action, value in actions if action == "scale"), 1.0) \
            if any(action == "scale" for action, *_ in actions) else 1.0
        loss = self.engine(batch, skipped).float().square().mean()
        self.engine.backward(loss * factor)
        return loss

    def _act(self, actions, when):
        for name, *arguments in actions:
            action, moment = ACTIONS.get(name, (None, None))
            if moment == when:
                action(self, *arguments)

    def param(self, index=0):
        return self.engine.module.layers[index].weight

    def look(self, *tensors):
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.detach().float().contiguous().numpy().tobytes())
        self.seen.append(digest.hexdigest()[:16])

    def _digest(self, what):
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
        digest = hashlib.sha256()
        for param in self.engine.module.parameters():
            if what == "weights":
                gathered = deepspeed.zero.GatheredParameters([param]) if hasattr(param, "ds_id") else contextlib.nullcontext()
                with gathered:
                    digest.update(param.detach().float().contiguous().numpy().tobytes())
            elif param.requires_grad:
                for key in ("exp_avg", "exp_avg_sq") if what == "moments" else (None,):
                    full = safe_get_full_optimizer_state(param, key) if key else safe_get_full_fp32_param(param)
                    digest.update(full.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


def optimizer_groups(run):
    return run.engine.optimizer.param_groups


def edit(run, factor, index=0):
    from deepspeed.utils import safe_get_full_grad, safe_set_full_grad
    param = run.param(index)
    safe_set_full_grad(param, safe_get_full_grad(param) * factor)


def edit_local(run, factor):
    from deepspeed.utils import safe_get_local_grad, safe_set_local_grad
    param = run.param()
    safe_set_local_grad(param, safe_get_local_grad(param) * factor)


def edit_direct(run, factor):
    for master in run.engine.optimizer.fp32_partitioned_groups_flat:
        master.grad.mul_(factor)


def hold(run):
    run.held = [master.grad for master in run.engine.optimizer.fp32_partitioned_groups_flat]


def edit_held(run, factor):
    for grad in run.held:
        grad.mul_(factor)


def peek(run, *keys):
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
    for param in (run.param(0), run.param(3)):
        for key in keys:
            run.look({"master": safe_get_full_fp32_param, "grad": safe_get_full_grad}.get(
                key, lambda param, key=key: safe_get_full_optimizer_state(param, key))(param))


def set_master(run, value):
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
    import torch
    param = run.param(2)
    safe_set_full_fp32_param(param, torch.full_like(safe_get_full_fp32_param(param), value))


def set_moment(run, key, value):
    from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state
    import torch
    param = run.param(1)
    safe_set_full_optimizer_state(param, torch.full_like(safe_get_full_optimizer_state(param, key), value), key)


def write_gathered(run, value):
    import deepspeed
    with deepspeed.zero.GatheredParameters([run.param(3)], modifier_rank=0):
        if int(os.environ["RANK"]) == 0:
            run.param(3).data.fill_(value)


def set_option(run, name, value):
    for group in optimizer_groups(run):
        group[name] = tuple(value) if isinstance(value, list) else value


def backward_again(run, seed):
    run._backward(100 + seed, 0, [])


def throw_away(run, seed):
    run._backward(100 + seed, 0, [])
    run.engine.zero_grad()


def throw_away_reset(run, seed):
    throw_away(run, seed)
    run.engine.optimizer.zero_grad()


def save(run):
    run.engine.save_checkpoint(str(run.folder / "saved"), tag="one")


def load(run):
    assert run.engine.load_checkpoint(str(run.folder / "saved"), tag="one")[0]


def load_new(run, changes=None):
    run.engine.destroy()
    run.scenario = {**run.scenario, **(changes or {})}
    run.engine = make_engine(run.scenario, run.kind, run.folder)
    load(run)


def resume(run, changes=None):
    """A new engine with another optimizer's configuration goes on at the last commit. Where there is no tier the same engine goes
    on with that."""
    changes = dict(changes or {})
    if run.kind == "tier":
        run.engine.destroy()
        run.scenario = {**run.scenario, "optimizer": {**run.scenario.get("optimizer", {}), **changes}}
        run.engine = make_engine(run.scenario, run.kind, run.folder)
        return
    changes.pop("type", None)
    if "adam_w_mode" in changes:
        # Anew, as powers of beta are then: without bias correction they count for nothing.
        adam = run.engine.optimizer.optimizer
        adam.ds_opt_adam.create_adam(adam.opt_id, 0.0, 0.9, 0.95, 0.0, 0.0, changes.pop("adam_w_mode"), False)
    for name, value in changes.items():
        set_option(run, name, value)


def groups_seen(run):
    run.seen.append([[group[name] for name in ("lr", "betas", "weight_decay")] for group in optimizer_groups(run)])


ACTIONS = {"edit": (edit, "between"), "edit_local": (edit_local, "between"), "edit_direct": (edit_direct, "between"),
           "hold": (hold, "before"), "edit_held": (edit_held, "between"), "peek": (peek, "between"),
           "peek_after": (peek, "after"), "set_master": (set_master, "after"), "set_master_between": (set_master, "between"),
           "set_moment": (set_moment, "after"), "set_moment_between": (set_moment, "between"),
           "write_gathered": (write_gathered, "after"), "set": (set_option, "before"), "set_between": (set_option, "between"),
           "backward_again": (backward_again, "between"), "throw_away": (throw_away, "before"),
           "throw_away_reset": (throw_away_reset, "before"), "save": (save, "after"), "save_between": (save, "between"),
           "load": (load, "after"), "load_new": (load_new, "after"), "resume": (resume, "after"), "groups": (groups_seen, "after"),
           "skip": (None, None), "scale": (None, None)}


# A process that trains scenarios of one kind.


def worker(kind, folder):
    """Reads names, and writes a line of JSON for each."""
    import train
    import torch
    torch.set_num_threads(1)
    if kind != REFERENCE:
        import spillway.deepspeed
        spillway.deepspeed.install()
    train.become_single_rank()
    import deepspeed
    import deepspeed.comm.torch
    from deepspeed.accelerator import get_accelerator
    deepspeed.comm.torch.build_shm_op = lambda: None
    # Matrices of 16 bits are multiplied by slow code where a processor has none of its own; DeepSpeed refuses that.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    logging.disable(logging.WARNING)
    import superoffload
    superoffload.allow_the_cpu()
    scenarios = read_scenarios()
    for line in sys.stdin:
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
    from spillway.deepspeed import _superoffload
    return _superoffload.served()


class Worker:
    """The processes of the ranks of one kind of run."""

    def __init__(self, kind, ranks, folder):
        self.kind, self.processes = kind, []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks),
                       "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                       "PYTHONPATH": os.pathsep.join([str(ROOT / "packaging" / "python"), str(HERE)]),
                       "PYTHONWARNINGS": "ignore"}
        environment.pop("SPILLWAY_DEEPSPEED", None)
        for rank in range(ranks):
            self.processes.append(subprocess.Popen(
                [sys.executable, __file__, "--worker", kind, str(folder)], text=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}))

    def run(self, name):
        """What a scenario came to."""
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(name + "\n")
                process.stdin.flush()
        said = []
        for line in self.processes[0].stdout:
            if line.startswith('{"') and f'"name": "{name}"' in line:
                return json.loads(line)
            said.append(line)
        return {"error": "the process ended: " + "".join(said[-20:]), "seconds": 0.0}

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


# The comparison.


def read_scenarios():
    """Scenarios by name."""
    return {scenario["name"]: scenario for scenario in json.loads((HERE / "scenarios.json").read_text())}


def kinds_of(scenario):
    """The kinds of run that a scenario is compared in."""
    if "kinds" in scenario:
        return tuple(scenario["kinds"])
    return KINDS[1:] if scenario.get("stage", 3) == 3 else ("memory",)


COMPARED = ("losses", "skipped", "weights", "masters", "moments", "seen")


def differences(scenario, reference, found):
    """What of a run is not as DeepSpeed's, in words."""
    if "error" in found or "error" in reference:
        return [found.get("error") or "the reference: " + reference["error"]]
    wrong = [f"{key} {found.get(key)}, not {reference.get(key)}" for key in COMPARED if found.get(key) != reference.get(key)]
    rounds = found["rounds"]
    if "speculated" in scenario and rounds and bool(rounds.get("buckets_speculated")) != scenario["speculated"]:
        wrong.append(f"sub-groups were {'not ' * scenario['speculated']}stepped in backward: {rounds}")
    return wrong


def compare(scenarios, report):
    """Runs scenarios; (passed, failed, the longest) of the comparisons. `report(name, kind, words)` is told of each."""
    passed, failed, longest = 0, 0, (0.0, "")
    with tempfile.TemporaryDirectory(prefix="spillway-scenarios-") as folder:
        for ranks in sorted({scenario.get("ranks", 1) for scenario in scenarios}):
            some = [scenario for scenario in scenarios if scenario.get("ranks", 1) == ranks]
            kinds = [kind for kind in KINDS if kind == REFERENCE or any(kind in kinds_of(scenario) for scenario in some)]
            found = run_all(some, kinds, ranks, pathlib.Path(folder))
            for scenario in some:
                for kind in kinds_of(scenario):
                    words = differences(scenario, found[REFERENCE][scenario["name"]], found[kind][scenario["name"]])
                    passed, failed = passed + (not words), failed + bool(words)
                    report(scenario["name"], kind, words)
                longest = max(longest, *((found[kind][scenario["name"]]["seconds"], f"{scenario['name']} ({kind})")
                                         for kind in (REFERENCE, *kinds_of(scenario))))
    return passed, failed, longest


def run_all(scenarios, kinds, ranks, folder):
    """What every scenario came to, by kind and name. Two kinds run at a time."""
    import concurrent.futures

    def run_kind(kind):
        place, found = folder / f"{kind}-{ranks}", {}
        place.mkdir()
        running = Worker(kind, ranks, place)
        try:
            for scenario in scenarios:
                if kind == REFERENCE or kind in kinds_of(scenario):
                    found[scenario["name"]] = running.run(scenario["name"])
                    if "error" in found[scenario["name"]]:
                        # What it left, such as a rank that waits for the other, is not for the next one.
                        running.close()
                        running = Worker(kind, ranks, place)
            return found
        finally:
            running.close()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return dict(zip(kinds, pool.map(run_kind, kinds)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--worker", nargs=2, metavar=("KIND", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(*options.worker)
    known = read_scenarios()
    if options.list:
        print("\n".join(known))
        return 0
    chosen = [known[name] for name in options.names] if options.names else list(known.values())
    began = time.monotonic()
    passed, failed, (seconds, name) = compare(chosen, say)
    print(f"{len(chosen)} scenarios, {passed} comparisons equal, {failed} not, {time.monotonic() - began:.0f} s; "
          f"the longest run took {seconds} s: {name}")
    return failed > 0


def say(name, kind, words):
    if words:
        print(f"{name}, {kind}:\n  " + "\n  ".join(words), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
