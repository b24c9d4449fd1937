"""Trains one scenario of scenarios.json: the tiny model, its engine, and the events of a step."""

import contextlib
import hashlib
import os

WIDTH = 32


# The model and its engine.


def make_model(torch, scenario):
    class Model(torch.nn.Module):
        """Has layers that a step can leave out, parameters of one element, of which a second rank has no part, and
        on request a frozen or a tied layer. The size of every sub-group is a multiple of 16 elements: for the
        remainder of a division by 16, DeepSpeed's rounding depends on its compiler."""

        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
            for index in range(16):
                self.register_parameter(f"gain{index}", torch.nn.Parameter(torch.ones(1)))

        def forward(self, x, skipped=()):
            for index, layer in enumerate(self.layers):
                if index not in skipped:
                    x = x + torch.tanh(layer(x))
            if scenario.get("tied"):
                x = x + torch.tanh(self.layers[0](x))
            gains = torch.cat([getattr(self, f"gain{index}") for index in range(16) if f"gain{index}" not in skipped])
            return torch.cat([x[:, : len(gains)] * gains, x[:, len(gains) :]], dim=1)

    model = Model()
    for index in scenario.get("frozen", ()):
        model.layers[index].requires_grad_(False)
    return model


def groups_of(model, scenario):
    """Creates the parameter groups: each names its layers, and the last group has the remaining ones."""
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
    found = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": scenario.get("accumulate", 1),
        "gradient_clipping": scenario.get("clip", 0.0),
        "zero_optimization": {**zero, **scenario.get("zero", {})},
        "optimizer": optimizer,
        "steps_per_print": 1 << 30,
        **scenario.get("config", {}),
    }
    if dtype != "fp32":
        found[dtype] = {"enabled": True, **scenario.get(dtype, {})}
    if "scheduler" in scenario:
        found["scheduler"] = scenario["scheduler"]
    if kind == "tier":
        found["spillway"] = {"pin_memory": False, **scenario.get("block", {})}
    return found


def make_engine(scenario, kind, folder):
    import deepspeed
    import torch

    torch.manual_seed(0)
    model = make_model(torch, scenario)
    return deepspeed.initialize(model=model, model_parameters=groups_of(model, scenario), config=config(scenario, kind, folder))[0]


# A run.


class Run:
    """One scenario in one kind of run."""

    def __init__(self, scenario, kind, folder):
        self.scenario, self.kind, self.folder = scenario, kind, folder
        self.engine, self.seen, self.held = make_engine(scenario, kind, folder), [], []

    def go(self):
        """Trains all steps, and returns the values that are compared."""
        losses = []
        for step in range(1, self.scenario.get("steps", 5) + 1):
            losses.append(self._step(step, self.scenario.get("at", {}).get(str(step), [])))
        found = {
            "losses": losses,
            "skipped": self.engine.skipped_steps,
            "weights": self._digest("weights"),
            "masters": self._digest("masters"),
            "seen": self.seen,
        }
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
        factor = next((float(value) for action, *values in actions if action == "scale" for value in values), 1.0)
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
            run.look(
                {"master": safe_get_full_fp32_param, "grad": safe_get_full_grad}.get(
                    key, lambda param, key=key: safe_get_full_optimizer_state(param, key)
                )(param)
            )


def set_master(run, value):
    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    param = run.param(2)
    safe_set_full_fp32_param(param, torch.full_like(safe_get_full_fp32_param(param), value))


def set_moment(run, key, value):
    import torch
    from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

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
    """A new engine with a changed optimizer configuration resumes from the last commit. Without a tier, the same engine
    takes the changed configuration and continues."""
    changes = dict(changes or {})
    if run.kind == "tier":
        run.engine.destroy()
        run.scenario = {**run.scenario, "optimizer": {**run.scenario.get("optimizer", {}), **changes}}
        run.engine = make_engine(run.scenario, run.kind, run.folder)
        return
    changes.pop("type", None)
    if "adam_w_mode" in changes:
        # The powers of beta are computed anew then; without bias correction they have no effect.
        adam = run.engine.optimizer.optimizer
        adam.ds_opt_adam.create_adam(adam.opt_id, 0.0, 0.9, 0.95, 0.0, 0.0, changes.pop("adam_w_mode"), False)
    for name, value in changes.items():
        set_option(run, name, value)


def groups_seen(run):
    run.seen.append([[group[name] for name in ("lr", "betas", "weight_decay")] for group in optimizer_groups(run)])


ACTIONS = {
    "edit": (edit, "between"),
    "edit_local": (edit_local, "between"),
    "edit_direct": (edit_direct, "between"),
    "hold": (hold, "before"),
    "edit_held": (edit_held, "between"),
    "peek": (peek, "between"),
    "peek_after": (peek, "after"),
    "set_master": (set_master, "after"),
    "set_master_between": (set_master, "between"),
    "set_moment": (set_moment, "after"),
    "set_moment_between": (set_moment, "between"),
    "write_gathered": (write_gathered, "after"),
    "set": (set_option, "before"),
    "set_between": (set_option, "between"),
    "backward_again": (backward_again, "between"),
    "throw_away": (throw_away, "before"),
    "throw_away_reset": (throw_away_reset, "before"),
    "save": (save, "after"),
    "save_between": (save, "between"),
    "load": (load, "after"),
    "load_new": (load_new, "after"),
    "resume": (resume, "after"),
    "groups": (groups_seen, "after"),
    "skip": (None, None),
    "scale": (None, None),
}
