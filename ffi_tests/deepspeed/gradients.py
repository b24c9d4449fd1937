"""Runs cells of the table of test_gradients.py in one process, and writes what each came to.

    gradients.py CELLS FOLDER RESULT      CELLS and RESULT are JSON files

A cell has a way in which gradients reach a step, a place of the optimizer states, a dtype, the micro-batches of a step and
the clipping. Its result is a digest of masters, moments and model weights after each step, or the type of the error."""

import contextlib
import hashlib
import json
import logging
import pathlib
import shutil
import sys
import types

import superoffload
import train

STEPS = 4
NAMES = ("a", "b", "c", "d")
AUTOCAST = {"autocast fp16": "float16", "autocast bf16": "bfloat16"}


def main(cells, folder, result):
    train.become_single_rank()
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
    logging.disable(logging.WARNING)
    # DeepSpeed asks for instructions that the results do not depend on, and for CUDA.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    superoffload.allow_the_cpu()
    found = {}
    for number, cell in enumerate(json.loads(pathlib.Path(cells).read_text())):
        place = pathlib.Path(folder) / str(number)
        place.mkdir(parents=True)
        found[cell["key"]] = outcome(cell, place, deepspeed, torch)
        shutil.rmtree(place, ignore_errors=True)
        pathlib.Path(result).write_text(json.dumps(found))
    module = sys.modules.get("spillway.deepspeed")
    found["active"] = sorted(module.active()) if module else []
    pathlib.Path(result).write_text(json.dumps(found))
    train.leave_group()


def outcome(cell, place, deepspeed, torch):
    run = None
    try:
        run = Run(cell, place, deepspeed, torch)
        for run.number in range(STEPS):
            WAYS[cell["way"]](run)
            run.look()
        return {"digests": run.digests, "served": run.served()}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300], "digests": run.digests if run else []}
    finally:
        if run is not None:
            with contextlib.suppress(Exception):
                run.engine.destroy()


class Run:
    """An engine and the data of one cell."""

    def __init__(self, cell, place, deepspeed, torch):
        self.cell, self.torch, self.number, self.digests = cell, torch, 0, []
        self.utils, self.width = deepspeed.utils, width(cell)
        torch.manual_seed(0)
        model = torch.nn.Module()
        for name in NAMES:
            model.add_module(name, torch.nn.Linear(self.width, self.width, bias=False))
        if cell["way"] == "frozen":
            model.b.weight.requires_grad_(False)
        model.forward = types.MethodType(forward, model)
        self.source = torch.Generator().manual_seed(1)
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.engine = deepspeed.initialize(model=model, model_parameters=parameters, config=config(cell, place))[0]
        self.params = {name: getattr(self.engine.module, name).weight for name in NAMES}
        # Parameters whose gradients the program set since the last step.
        self.given = set()
        if cell.get("zero"):
            self._step_without_gradients_as_zeros()

    @property
    def micro_batches(self):
        return self.cell["micro_batches"]

    def loss(self, use=NAMES, factor=1.0):
        dtype = {"bf16": self.torch.bfloat16, "fp16": self.torch.float16}.get(self.cell["dtype"], self.torch.float32)
        batch = self.torch.randn(2, self.width, generator=self.source).to(dtype)
        return self.engine(batch, use).float().square().mean() * factor

    def backward(self, use=NAMES, factor=1.0):
        self.engine.backward(self.loss(use, factor))

    def micro(self, step=True, **how):
        """A micro-batch of an engine that counts them itself."""
        self.backward(**how)
        if step:
            self.engine.step()

    def value(self):
        return self.torch.randn(self.width, self.width, generator=self.source) * 1e-2

    def set(self, name, value=None):
        self.given.add(name)
        self.utils.safe_set_full_grad(self.params[name], self.value() if value is None else value)

    def _step_without_gradients_as_zeros(self):
        """Makes DeepSpeed use a gradient of zero for parameters that got none since the last step."""
        optimizer, own_step = self.engine.optimizer, self.engine.optimizer.step

        def step(*arguments):
            self.zero_missing()
            own_step(*arguments)
            if not optimizer.overflow:
                self.given.clear()

        optimizer.step = step

    def zero_missing(self):
        """Gives zeros to each parameter without a gradient since the last step."""
        optimizer = self.engine.optimizer
        for name, param in self.params.items():
            if param.requires_grad and name not in self.given and optimizer.get_param_id(param) not in optimizer.norm_for_param_grads:
                index, offset, count = optimizer.grad_position[optimizer.get_param_id(param)]
                optimizer.fp32_partitioned_groups_flat[index].grad.narrow(0, offset, count).zero_()

    def change_gradients(self, names, function):
        """DeepSpeed's update of gradients by a function of them."""
        if self.cell.get("zero"):
            self.zero_missing()
        self.given.update(names)
        self.utils.safe_update_full_grad_vectorized([self.params[name] for name in names], function)

    def look(self):
        digest = hashlib.sha256()
        for parameter in self.params.values():
            if not parameter.requires_grad:
                continue
            shown = [
                self.utils.safe_get_full_fp32_param(parameter),
                *(self.utils.safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")),
            ]
            for tensor in shown:
                digest.update(b"none" if tensor is None else tensor.float().contiguous().numpy().tobytes())
        self.digests.append(digest.hexdigest()[:16])

    def served(self):
        module = sys.modules.get("spillway.deepspeed")
        return sorted(module.active()) if module else []


def width(cell):
    """DeepSpeed's swapper keeps tensors below 2^18 elements in memory."""
    return 512 if cell["adapter"] == "swapper" else 16


def forward(self, x, use):
    for name in use:
        x = getattr(self, name)(x).tanh()
    return x


def config(cell, place):
    adapter, dtype = cell["adapter"], cell["dtype"]
    stage = int(adapter[4:]) if adapter.startswith("zero") else 3
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    if stage == 3:
        zero.update(sub_group_size=2 * width(cell) ** 2, stage3_param_persistence_threshold=0)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": cell["micro_batches"],
        "gradient_clipping": cell["clip"],
        "zero_optimization": zero,
        "steps_per_print": 1 << 30,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    }
    if dtype in AUTOCAST:
        settings["torch_autocast"] = {"enabled": True, "dtype": AUTOCAST[dtype]}
    else:
        settings[dtype] = {"enabled": True, **({"initial_scale_power": 8, "hysteresis": 1} if dtype == "fp16" else {})}
    if cell["way"].startswith("unmanaged"):
        settings["managed_gradient_accumulation"] = False
    if adapter.startswith("interleave"):
        residents = 2 if adapter.endswith("residents") else 0
        settings["spillway"] = {"interleave": {"backend": "host", "plan": "stride", "plan_argument": 2, "residents": residents}}
    if adapter == "interleave residents":
        stay_in_spite_of_looks()
    if adapter.startswith("superoffload"):
        zero["offload_optimizer"].update(super_offload=True, cpuadam_cores_perc=0.8)
        settings["spillway"] = {"superoffload": {"tail": 2 if adapter.endswith("tail") else 0}}
    if adapter in BLOCKS:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(place), "buffer_count": 8}
        settings["spillway"] = BLOCKS[adapter]
    return settings


def stay_in_spite_of_looks():
    """Has residents on the device in each step, although the states are compared after each."""
    from spillway.deepspeed import _interleave_residents

    _interleave_residents._MOST_IN_A_ROW = STEPS + 1


BLOCKS = {
    "swapper": {"enabled": False},
    "tier": {"missing_gradients": "stale", "pin_memory": False},
    "tier zero": {"pin_memory": False},
    "tier split": {"missing_gradients": "stale", "pin_memory": False, "split_master": True},
    "tier resume": {"missing_gradients": "stale", "pin_memory": False, "resume": True, "durability": "process"},
}


# Each function is one step of training in one way.


def plain(run, last=lambda: None, between=lambda micro: None, **how):
    for micro in range(run.micro_batches):
        run.backward(**how)
        last() if micro == run.micro_batches - 1 else between(micro)
        run.engine.step()


def several_backwards(run):
    for micro in range(run.micro_batches):
        run.backward()
        run.backward()
        run.engine.step()


def set_local(run):
    part = run.utils.safe_get_local_grad(run.params["c"])
    plain(run, lambda: run.utils.safe_set_local_grad(run.params["c"], run.torch.full_like(part, 1e-3)))


def set_unused(run):
    plain(run, lambda: run.set("b"), use="acd")


def set_only(run):
    """Backward gives no gradient to the whole sub-group of the parameter that is set."""
    plain(run, lambda: run.set("b"), use="cd")


def edited_between(run):
    """A gradient is set, and backward goes on."""
    run.backward()
    run.set("a")
    if run.micro_batches > 1:
        run.engine.step()
    for _ in range(max(1, run.micro_batches - 1)):
        run.backward()
        run.engine.step()


def edited_before_the_last(run):
    """A gradient is set, and backward goes on without that parameter."""
    plain(run, between=lambda micro: run.set("b"), use="acd" if run.number % 2 else "abcd")


def partly(run):
    """A parameter has a gradient in the first micro-batch alone."""
    for micro in range(run.micro_batches):
        run.micro(use="acd" if micro and run.number else "abcd")


def unused_at_times(run):
    plain(run, use="acd" if run.number % 2 else "abcd")


def unused_longer(run):
    plain(run, use="cd" if run.number in (1, 2) else "abcd")


def vectorized(run):
    plain(run, lambda: run.change_gradients("abd", lambda gradient, param: gradient * 0.5 + 1e-3))


def vectorized_unused(run):
    """The function gets what counts for a parameter without a gradient: zeros, or the gradient of an earlier step."""
    plain(run, lambda: run.change_gradients("b", lambda gradient, param: gradient * 0.5 + 1e-3), use="acd" if run.number % 2 else "abcd")


def coalesced(run, inside=lambda: None):
    with run.engine.coalesce_grad_reduction():
        for _ in range(run.micro_batches):
            run.backward()
        inside()
    for _ in range(run.micro_batches):
        run.engine.step()


def own_boundary(run, last=lambda: None, between=lambda: None, use=None):
    for micro in range(run.micro_batches + 1):
        at = micro == run.micro_batches
        run.engine.set_gradient_accumulation_boundary(at)
        run.backward(use="abcd" if use is None else use(micro))
        last() if at else between()
    run.engine.step()


def as_accelerate(run):
    """The steps of accelerate's DeepSpeedEngineWrapper.backward."""
    from accelerate.utils.deepspeed import DeepSpeedEngineWrapper

    wrapper = DeepSpeedEngineWrapper(run.engine)
    for micro in range(run.micro_batches + 1):
        wrapper.backward(run.loss(), sync_gradients=micro == run.micro_batches)


def unmanaged(run, last=lambda: None, between=lambda: None, use=None):
    for micro in range(run.micro_batches + 1):
        run.backward(use="abcd" if use is None else use(micro))
        between()
    last()
    run.engine.step()


def overflow(run, last=lambda: None, use=None):
    factor = float("inf") if run.number == 1 else 1.0
    plain(run, last, factor=factor, use=use or "abcd")


def overflow_then_unused(run):
    overflow(run, use="acd" if run.number == 2 else "abcd")


def overflow_edited(run):
    overflow(run, lambda: run.set("b"), use="acd")


def read_between(run):
    def read():
        for param in run.params.values():
            run.utils.safe_get_full_grad(param)
            run.utils.safe_get_full_optimizer_state(param, "exp_avg")
            run.utils.safe_get_full_fp32_param(param)

    # Before the first step DeepSpeed has no moments to read.
    plain(run, read if run.number else lambda: None)


def edited_by_reading(run):
    plain(run, lambda: run.set("c", 2 * run.utils.safe_get_full_grad(run.params["c"]).float()))


def state_between(run):
    def look():
        for state in inner(run).state.values():
            sum(value.sum() for value in state.values() if hasattr(value, "sum"))

    plain(run, look)


def state_replaced(run):
    def replace():
        for state in inner(run).state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state:
                    state[name].data = state[name].data.clone()

    plain(run, replace)


def inner(run):
    return run.engine.optimizer.optimizer


def partitions(run, use=None):
    """The dictionary of gradients, changed in place."""

    def change():
        if run.cell.get("zero"):
            run.zero_missing()
        for group in run.engine.optimizer.get_fp32_grad_partitions().values():
            for gradient in group.values():
                gradient.mul_(0.5)

    plain(run, change, use=use or NAMES)


def partitions_unused(run):
    partitions(run, "acd" if run.number % 2 else "abcd")


def read_unused(run):
    """The program sets a multiple of the gradient that it reads, of a parameter that has none at times."""

    def change():
        if run.cell.get("zero"):
            run.zero_missing()
        run.set("b", run.utils.safe_get_full_grad(run.params["b"]).float() * 0.5 + 1e-3)

    plain(run, change, use="acd" if run.number % 2 else "abcd")


def by_hand(run):
    """The caller scales the loss and calls backward itself."""
    for _ in range(run.micro_batches):
        run.engine.scale(run.loss()).backward()
        run.engine.step()


def set_after_step(run):
    plain(run, use="acd")
    run.set("b")


def zeroed(run):
    """The caller drops the gradients of a first backward."""
    run.backward()
    run.engine.optimizer.zero_grad()
    plain(run)


def without_sync(run):
    with run.engine.no_sync():
        run.backward()
    run.backward()
    run.engine.step()


def other_rate(run):
    def change():
        for group in run.engine.optimizer.param_groups:
            group["lr"] *= 0.5

    plain(run, change)


def set_with_norm(run):
    """The norm of a gradient that the program sets by the local function counts for clipping."""
    part = run.utils.safe_get_local_grad(run.params["b"])
    plain(run, lambda: run.utils.safe_set_local_grad(run.params["b"], run.torch.full_like(part, 1.0)), use="acd")


WAYS = {
    "backward": plain,
    "several backwards": several_backwards,
    "by hand": by_hand,
    "frozen": lambda run: plain(run, use="acd"),
    "set full": lambda run: plain(run, lambda: run.set("a")),
    "set local": set_local,
    "set local unused": set_with_norm,
    "set unused": set_unused,
    "set only": set_only,
    "set zero": lambda run: plain(run, lambda: run.set("a", run.torch.zeros(run.width, run.width))),
    "edited between": edited_between,
    "edited before the last": edited_before_the_last,
    "edited by reading": edited_by_reading,
    "set after step": set_after_step,
    "vectorized": vectorized,
    "vectorized unused": vectorized_unused,
    "partitions": partitions,
    "partitions unused": partitions_unused,
    "read unused": read_unused,
    "partly": partly,
    "unused at times": unused_at_times,
    "unused longer": unused_longer,
    "coalesced": coalesced,
    "coalesced edited": lambda run: coalesced(run, lambda: run.set("a")),
    "own boundary": own_boundary,
    "own boundary edited": lambda run: own_boundary(run, between=lambda: run.set("a")),
    "own boundary set": lambda run: own_boundary(run, lambda: run.set("a")),
    "own boundary unused": lambda run: own_boundary(run, use=lambda micro: "abcd" if not micro else "acd"),
    "accelerate": as_accelerate,
    "unmanaged": unmanaged,
    "unmanaged edited": lambda run: unmanaged(run, between=lambda: run.set("a")),
    "unmanaged set unused": lambda run: unmanaged(run, lambda: run.set("b"), use=lambda micro: "acd"),
    "unmanaged partly": lambda run: unmanaged(run, use=lambda micro: "abcd" if not micro else "acd"),
    "overflow": overflow,
    "overflow edited": overflow_edited,
    "overflow then unused": overflow_then_unused,
    "read between": read_between,
    "state read": state_between,
    "state replaced": state_replaced,
    "zeroed": zeroed,
    "no sync": without_sync,
    "other rate": other_rate,
}


if __name__ == "__main__":
    main(*sys.argv[1:])
