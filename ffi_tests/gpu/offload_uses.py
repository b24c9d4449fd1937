"""Odd but legal uses of the torch optimizers on the device: each must end with the weights of the plain use, or of the same use without
overlap.

    offload_uses.py [CASE...]

Prints one line for each case and exits 1 if one fails."""

import random
import signal
import sys
import tempfile
import time
import traceback

from machine import DEVICE, digest, size, torch_on_device, wait

import spillway.torch

torch = torch_on_device()
WIDTH, LAYERS, LONG = size(512, 128, 16), size(6, 4, 3), size(40, 20, 6)
CASES = {}
_expected = {}


def case(function):
    """Adds a case; its name is that of the function."""
    CASES[function.__name__.removeprefix("_")] = function
    return function


def main():
    torch.use_deterministic_algorithms(True, warn_only=True)
    failed = []
    for name in sys.argv[1:] or CASES:
        start = time.perf_counter()
        try:
            CASES[name]()
            verdict = "ok    "
        except Exception:
            traceback.print_exc(limit=-3)
            verdict = "FAILED"
            failed.append(name)
        print(f"{verdict} {name} ({time.perf_counter() - start:.1f} s)", flush=True)
    print("failed: " + ", ".join(failed) if failed else "all checks passed")
    return 1 if failed else 0


class Block(torch.nn.Module):
    """A residual block, recomputed in backward if `checkpoint`."""

    def __init__(self, checkpoint):
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self._checkpoint = checkpoint

    def forward(self, given):
        work = lambda given: given + self.down(torch.nn.functional.gelu(self.up(given)))
        return torch.utils.checkpoint.checkpoint(work, given, use_reentrant=False) if self._checkpoint else work(given)


class Net(torch.nn.Module):
    """A model of tokens, whose forward returns the loss."""

    def __init__(self, tied=False, checkpoint=False):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, WIDTH)
        self.blocks = torch.nn.ModuleList(Block(checkpoint) for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, 256, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return torch.nn.functional.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def net(dtype=torch.bfloat16, where=DEVICE, **options):
    torch.manual_seed(0)
    return Net(**options).to(dtype).to(where)


def offload(model, **options):
    given = {"lr": 1e-3, "weight_decay": 0.1, "max_norm": 1.0, "bucket_bytes": size(1 << 20, 1 << 18, 1 << 12), **options}
    if "overlap" not in options and "weights" not in options:
        given["overlap"] = True
    return spillway.torch.offload(model, torch.optim.AdamW, model=model, **given)


def loss_of(model, step):
    """The loss of a step; each fourth one is a spike, whose step is clipped."""
    tokens = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(step)).to(DEVICE)
    return model(tokens) * (200.0 if step % 4 == 3 else 1.0)


def train(model, optimizer, steps=10, micro=1, before=None, after=None):
    """Trains, and returns the digest of the weights. `before` and `after` are called around each backward."""
    for step in range(steps):
        if before is not None:
            before()
        for number in range(micro):
            loss_of(model, step * micro + number).backward()
        if after is not None:
            after(model)
        optimizer.step()
        optimizer.zero_grad()
    getattr(optimizer, "settle", lambda: None)()
    wait(torch)
    return digest(model.parameters())


def plain(**options):
    """The weights of the plain use of such a model, without overlap."""
    key = str(options)
    if key not in _expected:
        model = net(**options)
        _expected[key] = train(model, offload(model, overlap=False))
    return _expected[key]


def check(found, wanted):
    if found != wanted:
        raise AssertionError(f"the weights are {found}, and not {wanted}")


def both(options=None, model=net, **how):
    """Trains with and without overlap, in the same way."""
    first, second = model(), model()
    check(train(first, offload(first, **(options or {})), **how), train(second, offload(second, overlap=False, **(options or {})), **how))


def behind(cycles=50_000_000):
    """Makes the device late."""
    if DEVICE != "cpu":
        torch.cuda._sleep(cycles)


def on_side_stream(**options):
    model = net()
    if DEVICE == "cpu":
        return check(train(model, offload(model, **options)), plain())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = train(model, offload(model, **options))
    check(found, plain())


@case
def side_stream():
    on_side_stream()


@case
def side_stream_forward():
    on_side_stream(verdict="forward")


@case
def made_before_the_move():
    model = net(where="cpu")
    optimizer = offload(model)
    model.to(DEVICE)
    check(train(model, optimizer), plain())


@case
def checkpoint_flow():
    model = net(where="cpu", checkpoint=True)
    check(train(model, offload(model, weights="flow", device=DEVICE)), plain())


@case
def tied():
    model = net(tied=True)
    check(train(model, offload(model)), plain(tied=True))


@case
def tied_flow():
    model = net(tied=True, where="cpu")
    check(train(model, offload(model, weights="flow", device=DEVICE)), plain(tied=True))


@case
def delays():
    for options in ({}, {"verdict": "forward"}, {"tail": 3}):
        model = net()
        check(train(model, offload(model, **options), before=behind, after=lambda _: behind()), plain())


@case
def delays_flow():
    model = net(where="cpu")
    check(train(model, offload(model, weights="flow", device=DEVICE), before=behind), plain())


@case
def random_delays():
    for options in ({}, {"verdict": "forward", "tail": 2}):
        chance = random.Random(5)
        late = lambda *_: behind(chance.randrange(20_000_000))
        model, other = net(), net()
        found = train(model, offload(model, **options), LONG, before=late, after=late)
        check(found, train(other, offload(other, overlap=False), LONG))


@case
def clipped_by_the_program():
    both({"max_norm": None}, after=lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))


@case
def edited_gradients():
    both(after=lambda model: [param.grad.mul_(0.5) for param in model.parameters()])


@case
def accumulated():
    both(micro=3)


@case
def gradients_overwritten_after_step():
    for options in ({}, {"verdict": "forward"}):
        model = net()
        optimizer = offload(model, **options)
        for step in range(10):
            loss_of(model, step).backward()
            optimizer.step()
            for param in model.parameters():
                param.grad.fill_(float("nan"))
            optimizer.zero_grad(set_to_none=False)
        optimizer.settle()
        wait(torch)
        check(digest(model.parameters()), plain())


@case
def memory_used_again():
    model = net()
    optimizer, kept = offload(model), []
    for step in range(10):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        kept[:] = [torch.full((1 << 12,), float(step), device=DEVICE, dtype=torch.bfloat16) for _ in range(40)]
    wait(torch)
    check(digest(model.parameters()), plain())


@case
def grad_scaler():
    found = []
    for options in ({}, {"overlap": False}, {"verdict": "forward"}):
        model = net(torch.float16)
        optimizer = offload(model, **options)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**17, growth_interval=3)
        for step in range(12):
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        optimizer.settle()
        wait(torch)
        found.append((digest(model.parameters()), scaler.get_scale()))
    check(found[0], found[1])
    check(found[2], found[1])


@case
def two_optimizers():
    first, second = net(), net()
    pairs = (first, offload(first)), (second, offload(second, verdict="forward"))
    for step in range(10):
        for model, optimizer in pairs:
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    for model, optimizer in pairs:
        optimizer.settle()
        wait(torch)
        check(digest(model.parameters()), plain())


@case
def resumed():
    model = net()
    optimizer = offload(model)
    train(model, optimizer, 5)
    weights, states = {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict()
    other = net()
    other.load_state_dict(weights)
    resumed = offload(other)
    resumed.load_state_dict(states)
    check(train(other, resumed, 5), train(model, optimizer, 5))


@case
def nearly_full():
    model = net()
    optimizer = offload(model)
    train(model, optimizer, 2)
    if DEVICE != "cpu":
        free, _ = torch.cuda.mem_get_info()
        filled = torch.empty(int(free - (220 << 20)) // 4, device=DEVICE)
        train(model, optimizer, 4)
        del filled
    else:
        train(model, optimizer, 4)


def half_frozen(where=DEVICE):
    model = net(where=where)
    for param in model.blocks.parameters():
        param.requires_grad_(False)
    return model


@case
def frozen():
    both(model=half_frozen)


@case
def frozen_flow():
    model, flowing = half_frozen(), half_frozen("cpu")
    check(train(flowing, offload(flowing, weights="flow", device=DEVICE)), train(model, offload(model)))


@case
def on_a_tier():
    for options in ({}, {"overlap": True}):
        model = net()
        with tempfile.TemporaryDirectory() as directory:
            given = {"lr": 1e-3, "weight_decay": 0.1, "max_norm": 1.0, "tier": directory}
            optimizer = spillway.torch.AdamW(model.parameters(), **given, **options)
            found = train(model, optimizer)
            optimizer.commit()
            optimizer.close()
        check(found, plain())


@case
def interrupted():
    """A signal handler that raises, at any moment of backward and step: the weights stay finite, and the program goes on."""

    class Stop(Exception):
        pass

    armed, chance = [False], random.Random(1)

    def stop(*_):
        if armed[0]:
            armed[0] = False
            raise Stop

    model = net()
    optimizer, before = offload(model), signal.signal(signal.SIGALRM, stop)
    try:
        for step in range(30):
            try:
                armed[0] = True
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0005, 0.012))
                loss_of(model, step).backward()
                optimizer.step()
            except Stop:
                pass
            except RuntimeError as error:
                # torch's backward after an interrupted step.
                if "modified by an inplace operation" not in str(error):
                    raise
            finally:
                armed[0] = False
                signal.setitimer(signal.ITIMER_REAL, 0)
            optimizer.zero_grad()
    finally:
        signal.signal(signal.SIGALRM, before)
    if not all(torch.isfinite(param).all() for param in model.parameters()):
        raise AssertionError("a weight is not finite")


@case
def compiled():
    if DEVICE == "cpu":
        # It needs a C compiler there, and minutes.
        return both()
    first, second = net(), net()
    check(train(torch.compile(first), offload(first), 6), train(torch.compile(second), offload(second, overlap=False), 6))


if __name__ == "__main__":
    sys.exit(main())
