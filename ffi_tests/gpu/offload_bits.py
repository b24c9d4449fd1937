"""Bits of spillway.torch.offload on the device: each way of working against no overlap, and that against a replay of its gradients on the
CPU.

Of 24 steps some are clipped and some have tiny gradients. Prints one line for each way and exits 1 if one differs."""

import contextlib
import sys
import traceback
import warnings
from unittest import mock

from machine import DEVICE, digest, size, torch_on_device, wait

import spillway.torch
from spillway.torch import _copies, _slabs

torch = torch_on_device()
STEPS, WIDTH, DEPTH, BATCH = 24, size(1024, 256, 32), size(8, 4, 3), size(64, 16, 4)
ON_HOST = {"where": "cpu", "device": DEVICE}
WAYS = {
    "overlap": {"overlap": True},
    "overlap again": {"overlap": True},
    'verdict="forward"': {"overlap": True, "verdict": "forward"},
    "tail=3": {"overlap": True, "tail": 3},
    'tail="auto"': {"overlap": True, "tail": "auto"},
    'tail=3, verdict="forward"': {"overlap": True, "tail": 3, "verdict": "forward"},
    'weights="flow"': {"weights": "flow", **ON_HOST},
    'weights="auto"': {"weights": "auto", **ON_HOST},
    'weights="flow", verdict="forward"': {"weights": "flow", "verdict": "forward", **ON_HOST},
}


#: Narrow states, each on the host against a tail on the device, which has kernels of its own for them.
NARROW = {
    "8-bit moments": {"moment_dtype": "int8"},
    "split masters": {"master": "split"},
    "split masters and 8-bit moments": {"master": "split", "moment_dtype": "int8"},
    "split masters, bfloat16 moments rounded at random": {
        "master": "split",
        "moment_dtype": torch.bfloat16,
        "moment_rounding": "stochastic",
    },
}


def main():
    torch.use_deterministic_algorithms(True)
    failed = 0
    for name, options in NARROW.items():
        wanted = _train(torch.bfloat16, None, overlap=False, max_norm=None, **options)
        found = _train(torch.bfloat16, None, overlap=True, max_norm=None, tail=3, **options)
        failed += not _told(f"a tail of {name}", found, wanted)
    for dtype in (torch.bfloat16, torch.float32):
        gradients = []
        wanted = _train(dtype, gradients, overlap=False)
        failed += not _told(f"{dtype}: a replay on the CPU", _replay(dtype, gradients), wanted[0])
        for name, options in WAYS.items():
            try:
                found = _train(dtype, None, **options)
            except Exception:
                traceback.print_exc()
                found = None
            failed += not _told(f"{dtype}: {name}", found, wanted)
        for name in ("overlap", 'verdict="forward"', 'weights="flow"'):
            with _little_locked():
                failed += not _told(f"{dtype}: {name}, in pageable memory", _train(dtype, None, **WAYS[name]), wanted)
    print(f"{failed} failed" if failed else "all checks passed")
    return 1 if failed else 0


@contextlib.contextmanager
def _little_locked():
    """The driver locks 256 KiB at once, and torch nothing: states are in pageable memory, and copies pass through small blocks."""
    register, empty, like = _slabs.CudaDriver.register, torch.empty, torch.empty_like

    def registered(driver, address, size):
        if size > 256 << 10:
            raise spillway.UnsupportedError("the limit of this test")
        register(driver, address, size)

    def unlocked(make):
        def made(*given, pin_memory=False, **options):
            if pin_memory:
                raise RuntimeError("the limit of this test")
            return make(*given, **options)

        return made

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(_slabs.CudaDriver, "register", registered))
        stack.enter_context(mock.patch.object(torch, "empty", unlocked(empty)))
        stack.enter_context(mock.patch.object(torch, "empty_like", unlocked(like)))
        stack.enter_context(mock.patch.dict(_copies._links, clear=True))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield
        if DEVICE != "cpu":
            assert all(link.staging_bytes == 1 << 20 for link in _copies._links.values())


def _told(name, found, wanted):
    print(f"{'ok    ' if found == wanted else 'FAILED'} {name}", flush=True)
    return found == wanted


def _model(dtype):
    torch.manual_seed(0)
    layers = (torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(DEPTH))
    return torch.nn.Sequential(*layers).to(dtype)


def _train(dtype, gradients, where=DEVICE, **options):
    """The digests of the weights and of the states after all steps. Appends the gradients of each step to a list."""
    model = _model(dtype).to(where)
    options = {"lr": 1e-3, "weight_decay": 0.1, "max_norm": 1.0, "bucket_bytes": 3 * WIDTH * WIDTH, **options}
    optimizer = spillway.torch.offload(model, torch.optim.AdamW, model=model, **options)
    for step in range(STEPS):
        given = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1000 + step)).to(DEVICE, dtype)
        loss = (model(given) - given).float().square().mean()
        (loss * (3000.0 if step % 5 == 4 else 1e-3 if step % 7 == 3 else 1.0)).backward()
        if gradients is not None:
            gradients.append([param.grad.detach().cpu().clone() for param in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    optimizer.settle()
    wait(torch)
    states = (state for _, state in sorted(optimizer.state_dict()["state"].items()))
    values = [state[key] for state in states for key in sorted(state) if torch.is_tensor(state[key]) and state[key].numel() > 1]
    found = digest(model.parameters()), digest(values)
    optimizer.close()
    return found


def _replay(dtype, gradients):
    """The digest of the weights after steps of AdamW on the CPU with these gradients."""
    model = _model(dtype)
    beyond = {} if dtype is torch.float32 else {"master": "f32"}
    optimizer = spillway.torch.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, max_norm=1.0, **beyond)
    for given in gradients:
        for param, grad in zip(model.parameters(), given):
            param.grad = grad
        optimizer.step()
    return digest(model.parameters())


if __name__ == "__main__":
    sys.exit(main())
