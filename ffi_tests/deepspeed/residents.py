"""Cases of test_interleave.py for residents, each in a process of its own. Threads replace the GPU.

A case trains an engine with residents beside a plain one, whose sub-groups DeepSpeed steps by Spillway's op. Both have the same
batches, and the same bits after each step."""

import collections
import contextlib
import hashlib
import json
import logging
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import threading
import types
from random import Random

import train

train.become_single_rank()
import deepspeed
import torch
from deepspeed import utils
from deepspeed.accelerator import get_accelerator

from spillway.deepspeed import _interleave_residents, _watched
from spillway.errors import InvalidArgumentError
from spillway.interleave import Interleave

logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
logging.disable(logging.WARNING)
train.without_compiled_collectives()
type(get_accelerator()).is_fp16_supported = lambda self: True

LAYERS, WIDTH = 6, 32
MOMENTS = ("exp_avg", "exp_avg_sq")


class Model(torch.nn.Module):
    """A sub-group for each layer."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x, skipped):
        for index, layer in enumerate(self.layers):
            x = x if index == skipped else torch.tanh(layer(x))
        return x


def engine(residents, dtype="bf16", micro_batches=1, **settings):
    """An engine with this number of residents; None: without Spillway's update."""
    torch.manual_seed(0)
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        dtype: {"enabled": True, **({"initial_scale_power": 8, "hysteresis": 1} if dtype == "fp16" else {})},
        "gradient_clipping": 0.1,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": WIDTH * WIDTH,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {"device": "cpu"},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "steps_per_print": 1 << 30,
    }
    if residents is not None:
        config["spillway"] = {"interleave": {"backend": "host", "residents": residents, **settings}}
    made = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    made.dtype, made.micro_batches = getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[dtype]), micro_batches
    return made


def step(own, number, skipped=-1, factor=1.0):
    """Step `number` of an engine. The layer `skipped` gets no gradient."""
    for micro in range(own.micro_batches):
        torch.manual_seed(100 * number + micro)
        batch = torch.randn(2, WIDTH).to(own.dtype)
        own.backward(own(batch, skipped).float().square().mean() * factor)
        own.step()


def update_of(own):
    return own.optimizer._spillway_interleave


def digest(tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().float().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def full(own):
    params = list(own.module.parameters())
    masters = [utils.safe_get_full_fp32_param(param) for param in params]
    return digest([*masters, *(utils.safe_get_full_optimizer_state(param, name) for param in params for name in MOMENTS)])


def local(own):
    params = list(own.module.parameters())
    masters = [utils.safe_get_local_fp32_param(param) for param in params]
    return digest([*masters, *(utils.safe_get_local_optimizer_state(param, name) for param in params for name in MOMENTS)])


def of_states(states):
    return digest([state[name] for state in states.values() for name in MOMENTS])


READS = {
    "full": full,
    "local": local,
    "masters": lambda own: digest(own.optimizer.fp32_partitioned_groups_flat),
    "a moment": lambda own: digest([utils.safe_get_full_optimizer_state(own.module.layers[-1].weight, "exp_avg_sq")]),
    "state": lambda own: of_states(own.optimizer.state),
    "state of DeepSpeed's optimizer": lambda own: of_states(own.optimizer.optimizer.state),
    "state dict": lambda own: digest(own.optimizer.state_dict()["fp32_flat_groups"]),
}


def weights(own):
    return digest([param.ds_tensor for param in own.module.parameters()])


def has_residents(own):
    return "resident" in update_of(own)._interleave.get_plan()


class Plans:
    """Notes the plans that updates are given."""

    def __init__(self):
        self.seen, self._own = [], Interleave.set_plan

    def __enter__(self):
        def set_plan(update, placements):
            self.seen.append("".join(placement[0] for placement in placements))
            return self._own(update, placements)

        Interleave.set_plan = set_plan
        return self.seen

    def __exit__(self, *_):
        Interleave.set_plan = self._own


def traffic():
    """A resident's states move when it becomes resident, and when code outside sees them: not in a step."""
    ours = engine(3)
    with Plans() as plans:
        step(ours, 0)
        del plans[:]
        for number in range(1, 6):
            step(ours, number)
            spans = [span for span in json.loads(update_of(ours)._interleave.trace())["traceEvents"] if "subgroup" in span.get("args", {})]
            moved = {span["name"] for span in spans if span["args"]["subgroup"] >= 3}
            assert moved == {f"resident step {index}" for index in range(3, LAYERS)}, moved
        assert plans == []
        full(ours)
        assert plans == ["cgcccc"]
        step(ours, 6)
        assert plans == ["cgcccc", "cgcrrr"]
    assert update_of(ours).counts == {"steps": 7, "cpu": 14, "gpu": 7, "resident": 21}


def accesses_in_a_row():
    """After an access before each of two steps, states stay in host memory until a step that no access precedes."""
    plain, ours = engine(None), engine(3)
    found = []
    for number, looks in enumerate([False, True, True, True, False, False, False, True, False]):
        step(plain, number)
        step(ours, number)
        found.append(has_residents(ours))
        assert not looks or full(ours) == full(plain)
    # The access of step 1 precedes step 2.
    assert found == [True, True, True, False, False, True, True, True, True], found


def reads():
    """Everything that shows states shows those after the last step; without reads of the weights the bits are the same."""
    for residents, settings in ((3, {}), (99, {"plan": "count", "plan_argument": 0}), ("auto", {"plan": "count", "plan_argument": 2})):
        plain, ours, number = engine(None), engine(residents, **settings), 0
        for name, read in READS.items():
            for _ in range(3):
                step(plain, number)
                step(ours, number)
                number += 1
                assert weights(ours) == weights(plain)
            assert has_residents(ours), name
            assert read(ours) == read(plain), name
        assert full(ours) == full(plain)


def ways_of_steps():
    """Steps that are skipped, gradients that are accumulated, and parameters without gradient."""
    for dtype, micro_batches in (("fp16", 1), ("bf16", 3), ("fp16", 2)):
        plain, ours = engine(None, dtype, micro_batches), engine(4, dtype, micro_batches)
        for number in range(9):
            how = {"skipped": number % LAYERS, "factor": float("inf") if dtype == "fp16" and number % 4 == 3 else 1.0}
            for own in (plain, ours):
                step(own, number, **how)
            assert weights(ours) == weights(plain), (dtype, number)
            assert has_residents(ours)
        assert full(ours) == full(plain) and ours.skipped_steps == plain.skipped_steps
        assert (ours.skipped_steps > 0) == (dtype == "fp16")


def write_full(own):
    weight = own.module.layers[-1].weight
    utils.safe_set_full_fp32_param(weight, utils.safe_get_full_fp32_param(weight) * 0.5)
    utils.safe_set_full_optimizer_state(weight, utils.safe_get_full_optimizer_state(weight, "exp_avg") * 0.5, "exp_avg")


def write_local(own):
    weight = own.module.layers[-2].weight
    utils.safe_set_local_fp32_param(weight, utils.safe_get_local_fp32_param(weight) + 0.25)
    utils.safe_set_local_optimizer_state(weight, torch.zeros_like(utils.safe_get_local_optimizer_state(weight, "exp_avg_sq")), "exp_avg_sq")


def write_state(own):
    for state in own.optimizer.state.values():
        state["exp_avg"].mul_(0.5)
        state["exp_avg_sq"] = state["exp_avg_sq"] * 2


def write_masters(own):
    for master in own.optimizer.fp32_partitioned_groups_flat:
        master.data.mul_(1.01)


def set_gradient(own):
    weight = own.module.layers[-1].weight
    torch.manual_seed(3)
    own.backward(own(torch.randn(2, WIDTH).to(own.dtype), -1).float().square().mean())
    utils.safe_set_full_grad(weight, utils.safe_get_full_grad(weight) + 1e-3)
    own.step()


def writes():
    """What is written to masters, states and gradients has its effect."""
    plain, ours, number = engine(None), engine(3), 0
    for write in (write_full, write_local, write_state, write_masters, set_gradient):
        for _ in range(3):
            for own in (plain, ours):
                step(own, number)
            number += 1
        assert has_residents(ours)
        for own in (plain, ours):
            write(own)
        assert has_residents(ours) == (write is set_gradient)
        for own in (plain, ours):
            step(own, number)
        number += 1
        assert weights(ours) == weights(plain), write
    assert full(ours) == full(plain)


def random_programs(seed, count):
    """Random steps, reads, writes and checkpoints: the bits are those of the plain engine."""
    random, folder = Random(seed), tempfile.mkdtemp()
    plans = ({}, {"plan": "count", "plan_argument": 0}, {"plan": "count", "plan_argument": 2, "slots": 1, "chunk": 100})
    try:
        for program in range(count):
            dtype, micro_batches = random.choice(("bf16", "fp16")), random.choice((1, 2))
            plain = engine(None, dtype, micro_batches)
            ours = engine(random.choice((1, 3, 6, "auto")), dtype, micro_batches, **random.choice(plans))
            # A layer without gradient uses its last one, and so not a finite one after a skipped step.
            skips = random.random() < 0.5
            for number in range(30):
                factor = float("inf") if skips and random.random() < 0.1 else 1.0
                how = {"skipped": -1 if skips else random.randrange(-LAYERS, LAYERS), "factor": factor}
                for own in (plain, ours):
                    step(own, number, **how)
                assert weights(ours) == weights(plain), (seed, program, number)
                if random.random() < 0.2:
                    read = READS[random.choice([*READS])]
                    assert read(ours) == read(plain), (seed, program, number)
                if random.random() < 0.1:
                    write = random.choice((write_full, write_local, write_state, write_masters))
                    for own in (plain, ours):
                        write(own)
                if random.random() < 0.1:
                    random.choice((plain, ours)).save_checkpoint(folder, "both")
                    for own in (plain, ours):
                        own.load_checkpoint(folder, "both")
            assert full(ours) == full(plain), (seed, program)
            ours.destroy()
    finally:
        shutil.rmtree(folder)


def held_tensors():
    """A write to a tensor that was fetched before is an error of the next step, or of the next access; no step is lost."""
    plain, ours = engine(None), engine(3)
    for own in (plain, ours):
        step(own, 50)
    held = ours.optimizer.optimizer.state
    master = ours.optimizer.fp32_partitioned_groups_flat[-1]
    tensor, number = held[master]["exp_avg"], 0
    for write, then in (
        (lambda: tensor.mul_(2), lambda: step(ours, 99)),
        (lambda: tensor.mul_(2), lambda: full(ours)),
        (lambda: master.data.__class__.mul_(master.detach(), 2), lambda: full(ours)),
    ):
        for _ in range(2):
            for own in (plain, ours):
                step(own, number)
            number += 1
        write()
        with refused("sub-group 5 was written or replaced while its states were on the GPU"):
            then()
        if then is not None and not has_residents(ours):
            assert full(ours) == full(plain)
        ours.optimizer.reset_cpu_buffers()
        ours.optimizer.micro_step_id = 0


@contextlib.contextmanager
def refused(words):
    try:
        yield
    except InvalidArgumentError as error:
        assert words in str(error), error
    else:
        raise AssertionError("nothing was refused")


def checkpoints():
    """A run resumes with the bits of one that was not interrupted, with other numbers of residents."""
    folder = tempfile.mkdtemp()
    try:
        plain, ours = engine(None), engine(3)
        for number in range(3):
            for own in (plain, ours):
                step(own, number)
        ours.save_checkpoint(folder, "ours")
        plain.save_checkpoint(folder, "plain")
        for number in range(3, 6):
            for own in (plain, ours):
                step(own, number)
        assert full(ours) == full(plain)
        for tag in ("ours", "plain"):
            for residents in (None, 0, 2, 6, "auto"):
                later = engine(residents, **({} if residents is None else {"plan": "count", "plan_argument": 0}))
                step(later, 50)
                later.load_checkpoint(folder, tag)
                for number in range(3, 6):
                    step(later, number)
                assert full(later) == full(plain), (tag, residents)
                later.destroy()
        # A load into an engine whose residents are on the GPU.
        ours.load_checkpoint(folder, "plain")
        step(ours, 3)
        plain.load_checkpoint(folder, "plain")
        step(plain, 3)
        assert full(ours) == full(plain)
    finally:
        shutil.rmtree(folder)


def threads():
    """Another thread that reads sees all states as after one step."""
    plain, ours, steps = engine(None), engine(3), 12
    known = []
    for number in range(steps):
        step(plain, number)
        known.append(full(plain))
    seen, over = [], threading.Event()

    def read():
        while not over.is_set():
            with _watched.inside(ours.optimizer):
                update_of(ours)._return()
                seen.append(full(ours))
            seen.append(READS["masters"](ours))

    masters = {READS["masters"](plain)}
    reader = threading.Thread(target=read)
    step(ours, 0)
    reader.start()
    for number in range(1, steps):
        step(ours, number)
    over.set()
    reader.join()
    assert full(ours) == known[-1] and READS["masters"](ours) in masters
    assert seen and set(seen[::2]) <= set(known)


def forks():
    """A forked process has no states of residents, and says so. It has those in host memory."""
    plain, ours = engine(None), engine(3)
    for own in (plain, ours):
        step(own, 0)

    def without_states():
        for read in (READS["masters"], READS["state"], READS["local"]):
            with refused("this process was forked"):
                read(ours)
        update_of(ours).close()

    assert succeeds_in_child(without_states)
    wanted = READS["masters"](plain), READS["state"](plain)
    assert full(ours) == full(plain)

    def with_states():
        assert (READS["masters"](ours), READS["state"](ours)) == wanted

    assert succeeds_in_child(with_states)


def succeeds_in_child(function):
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            function()
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def ends():
    """After destroy() the masters and moments that were fetched before have the values after the last step."""
    plain, ours = engine(None), engine(3)
    states = [dict(own.optimizer.optimizer.state) for own in (ours, plain)]
    for number in range(3):
        for own in (plain, ours):
            step(own, number)
    assert has_residents(ours)
    for own in (ours, plain):
        own.destroy()
    ours, plain = (digest([*found, *(state[name] for state in found.values() for name in MOMENTS)]) for found in states)
    assert ours == plain


def bad_numbers():
    """A step that is refused changes nothing: the states can be read, and the next step is that of a run without it."""
    plain, ours = engine(None), engine(3)
    for number in range(2):
        for own in (plain, ours):
            step(own, number)
    for name, value, words in (("lr", float("nan"), "lr"), ("betas", (1 - 1e-12, 0.9), "beta1"), ("eps", -1.0, "eps"), ("lr", 1e300, "lr")):
        good = [group[name] for group in ours.optimizer.param_groups]
        for group in ours.optimizer.param_groups:
            group[name] = value
        with refused(words), _watched.inside(ours.optimizer):
            update_of(ours).step(1.0)
        assert full(ours) == full(plain)
        for group, before in zip(ours.optimizer.param_groups, good):
            group[name] = before
    for own in (plain, ours):
        step(own, 2)
    assert full(ours) == full(plain)


class Interrupt(Exception):
    """What the signal handler raises."""


def interrupts(first, every):
    """After an interrupt at any call of the update, all states are those before the step, or all those after it. The interrupts come at the
    calls number `first`, `first + every`, and so on."""

    def raise_interrupt(*_):
        raise Interrupt

    signal.signal(signal.SIGUSR1, raise_interrupt)
    plain, ours = engine(0), engine(3)
    for own in (plain, ours):
        step(own, 0)

    def work(own):
        with _watched.inside(own.optimizer):
            update_of(own).step(1.0)
            for index in range(LAYERS):
                update_of(own).publish(index)

    def train_and_look():
        work(ours)
        work(ours)
        full(ours)
        work(ours)

    at, outcomes = first, collections.Counter()
    while True:
        torch.manual_seed(at)
        for one, other in zip(*(own.optimizer.fp32_partitioned_groups_flat for own in (plain, ours))):
            one.grad.copy_(torch.randn(one.numel()))
            other.grad.copy_(one.grad)
        was_raised = interrupted(train_and_look, at)
        known, steps = {full(plain): 0}, 0
        while full(ours) not in known:
            work(plain)
            steps += 1
            assert steps <= 3, f"at event {at} the states are those of no step"
            known = {full(plain): steps}
        outcomes[steps] += 1
        if not was_raised:
            break
        at += every
    assert set(outcomes) == {0, 1, 2, 3} and at > 300, (at, outcomes)


def interrupted(run, at):
    """Runs run(), and sends a signal at event number `at`: a call of Spillway's package, or the end of one of C. True if it came."""
    package, left = str(pathlib.Path(_watched.__file__).parents[1]), at

    def profile(frame, event, _):
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(package):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGUSR1)

    sys.setprofile(profile)
    try:
        run()
    except Interrupt:
        pass
    finally:
        sys.setprofile(None)
    return left < 0


class Update:
    """An update whose GPU has memory for `most` residents."""

    def __init__(self, most):
        self.most, self.plan, self.asked = most, ["cpu"] * 4, []

    def get_plan(self):
        return list(self.plan)

    def set_plan(self, plan):
        self.asked.append(list(plan))
        found, left = list(plan), self.most
        for index in reversed(range(len(plan))):
            if plan[index] == "resident":
                found[index] = "resident" if left else "cpu"
                left = max(0, left - 1)
        self.plan = found


def too_little_memory():
    """Where the GPU has memory for fewer residents, the step goes on, and no later step asks again."""
    for most in (0, 1):
        found, update = _interleave_residents.Residents(3, 4, None), Update(most)
        found.plan, found.plan_at_home = ["cpu", "resident", "resident", "resident"], ["cpu"] * 4
        for _ in range(3):
            found.admit(update, lambda index: [])
        assert len(update.asked) == 1 and found.plan == ["cpu"] * (4 - most) + ["resident"] * most

    def full_device(grad, device=None):
        if len(found._gradients) == 2:
            raise torch.OutOfMemoryError
        return grad.clone()

    masters = [torch.nn.Parameter(torch.zeros(4)) for _ in range(5)]
    for master in masters:
        master.grad = torch.zeros(4)
    found, own = _interleave_residents.Residents(4, 5, None), torch.empty_like
    torch.empty_like = full_device
    try:
        found.open(masters)
    finally:
        torch.empty_like = own
    assert found.number == 2 and found.gradient(2, None) is None and found.gradient(3, None) is not None


class Stream:
    """A CUDA stream, which notes what waits for what."""

    def __init__(self, _=None):
        self.waited = []

    def wait_stream(self, other):
        self.waited.append(other)


def on_a_gpu():
    """On a GPU, "auto" leaves a tenth of its memory free, and the gradients of those that are resident in a step are copied on a stream of
    their own, after the work of the step's stream. CUDA is a stub."""
    sizes, own_stream, copying = [10, 20, 30, 40], Stream(), []

    @contextlib.contextmanager
    def stream(entered):
        copying.append(entered)
        yield

    cuda, own_like = torch.cuda, torch.empty_like
    # 16 bytes for each of 40 and 30 parameters, and not for 20 more, are free beside the tenth.
    free = 100 + 16 * 70 + 16 * 19
    stubs = {"Stream": Stream, "stream": stream, "mem_get_info": lambda device: (free, 1000), "memory_reserved": lambda device: 0}
    before = {name: getattr(cuda, name) for name in (*stubs, "max_memory_allocated")}
    vars(cuda).update(stubs, max_memory_allocated=lambda device: 0)
    torch.empty_like = lambda grad, device: own_like(grad, device="cpu" if device == torch.device("cuda", 0) else None)
    try:
        masters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
        for index, master in enumerate(masters):
            master.grad = torch.full_like(master, index + 1.0)
        found = _interleave_residents.Residents("auto", 4, types.SimpleNamespace(ordinal=0))
        for steps, number in ((0, 0), (1, 0), (2, 2), (9, 2)):
            found.choose(steps, masters)
            assert found.number == number
        found.open(masters)
        streams = found.upload(["cpu", "gpu", "cpu", "resident"], masters, own_stream)
        assert [*streams] == [3] and streams[3].waited == [own_stream] and copying == [streams[3]]
        assert found.gradient(3, None).equal(masters[3].grad) and found.gradient(1, "own") == "own"
    finally:
        vars(cuda).update(before)
        torch.empty_like = own_like
