"""Classes, parameters and comparisons for the tests of spillway.torch.Staged."""

import concurrent.futures
import time
import weakref

import torch

from spillway import torch as own
from spillway.torch._staged.lane import Lane


class Soap(torch.optim.Optimizer):
    """An optimizer as SOAP and Shampoo are: states of other shapes than the parameter, in lists and dictionaries, numbers and None among
    them. The first step makes some states, the third one others, and one of them grows."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.95), period=4):
        super().__init__(params, {"lr": lr, "betas": betas, "period": period, "calls": 0})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.steps += 1
        for group in self.param_groups:
            group["calls"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, self.state[param], **{key: group[key] for key in ("lr", "betas", "period")})
        return loss

    def _step(self, param, state, lr, betas, period):
        grad = param.grad.float()
        flat = grad.reshape(grad.shape[0], -1) if grad.dim() > 1 else grad.reshape(1, -1)
        if not state:
            state.update(
                step=0, m=torch.zeros_like(grad), sides=[torch.zeros(n, n) for n in flat.shape], basis=None, notes={"refreshed": 0}
            )
            return
        state["step"] += 1
        left, right = state["sides"]
        left.lerp_(flat @ flat.T, 1 - betas[1])
        right.lerp_(flat.T @ flat, 1 - betas[1])
        if state["step"] == 2:
            # Memory that the state did not have before.
            state["v"], state["history"] = torch.zeros_like(flat), torch.zeros(1)
        if state["basis"] is None or state["step"] % period == 0:
            state["basis"] = tuple(torch.linalg.eigh(side + 1e-6 * torch.eye(len(side)))[1] for side in state["sides"])
            state["notes"] = {"refreshed": state["step"]}
            if "history" in state:
                state["history"] = torch.cat([state["history"], grad.norm().reshape(1)])
        state["m"].lerp_(grad, 1 - betas[0])
        first, second = state["basis"]
        turned = first.T @ state["m"].reshape(flat.shape) @ second
        if "v" in state:
            state["v"].mul_(betas[1]).addcmul_(turned, turned, value=1 - betas[1])
            turned = turned / (state["v"].sqrt() + 1e-8)
        param.add_((first @ turned @ second.T).reshape(param.shape).to(param.dtype), alpha=-lr)


SHAPES = [(16, 24), (24,), (8, 16), (3, 4, 5), (33,), (12, 12)]


def parameters(seed=0, shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradients(params, step, without=()):
    generator = torch.Generator().manual_seed(1000 + step)
    for number, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = None if number in without else grad


def same(ones, others):
    """True if two states, state dicts or lists of them are equal, bit by bit, with the same types."""
    if type(ones) is not type(others):
        return False
    if isinstance(ones, torch.Tensor):
        if hasattr(ones, "__tensor_flatten__") and type(ones) not in (torch.Tensor, torch.nn.Parameter):
            names, context = ones.__tensor_flatten__()
            return context == others.__tensor_flatten__()[1] and all(same(getattr(ones, name), getattr(others, name)) for name in names)
        alike = ones.dtype is others.dtype and ones.shape == others.shape and ones.stride() == others.stride()
        return alike and torch.equal(ones, others)
    if isinstance(ones, dict):
        return ones.keys() == others.keys() and all(same(ones[key], others[key]) for key in ones)
    if isinstance(ones, (list, tuple)):
        return len(ones) == len(others) and all(map(same, ones, others))
    return ones == others


def options(directory):
    return own.TierOptions(directory, pin_memory=False, durability="process")


class LateLane(Lane):
    """A lane whose copies are done by two threads, one for each direction, some time after they were started: as on streams of a device.

    Attributes:
        most: Most bytes of fetched tensors that were alive at once.
        log: What was asked of the lane, in its order."""

    def __init__(self):
        self._in, self._out = (concurrent.futures.ThreadPoolExecutor(1) for _ in range(2))
        self._last, self._alive, self.most, self.log = [], 0, 0, []
        #: The memory of the fetch of each event, and that of the chunk that is stepped, which the device may use until a wait.
        self._fetched, self._used = {}, {}
        self._present = []

    def end(self):
        self._in.shutdown()
        self._out.shutdown()

    def _start(self, stream, to, sources):
        pairs = [(each.detach(), source.detach()) for each, source in zip(to, sources, strict=True)]

        def run():
            time.sleep(0.002)
            for each, source in pairs:
                each.data.copy_(source)

        self._last.append(stream.submit(run))
        return self._last[-1]

    def fetch(self, leaves, hosts):
        made = [leaf.empty() for leaf in leaves]
        for tensor in made:
            # What is read before it has arrived is found.
            tensor.fill_(85)
            self._alive += tensor.nbytes
            weakref.finalize(tensor.untyped_storage(), self._freed, tensor.nbytes)
        self.most = max(self.most, self._alive)
        self.log.append("fetch")
        event = self._start(self._in, made, hosts)
        self._fetched[event] = [(weakref.ref(tensor.untyped_storage()), tensor.data_ptr()) for tensor in made if tensor.numel()]
        return made, event

    def replaced(self, tensors):
        gone = {tensor.data_ptr() for tensor in tensors}
        self._present = [(memory, address) for memory, address in self._present if address not in gone]

    def _freed(self, size):
        self._alive -= size

    def arrive(self, event):
        self.log.append("arrive")
        event.result()
        self._present = self._fetched.pop(event)

    def flush(self, hosts, tensors):
        self.log.append("flush")
        event = self._start(self._out, hosts, tensors)
        self._used[event] = self._present
        return event

    def wait(self, event):
        self.log.append("wait")
        used = self._used.pop(event)
        assert all(memory() is not None for memory, _ in used), "memory of the device is free before its last use"
        event.result()
        if self._present is used:
            self._present = []

    def synchronize(self):
        self.log.append("synchronize")
        for event in self._last:
            event.result()
