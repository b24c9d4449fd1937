"""Proves that the public modules have complete annotations, that a type checker reports no error in them, and that
every public class and function has a docstring."""

import inspect
import subprocess
import sys

import pytest

import spillway
import spillway.deepspeed
import spillway.megatron
from spillway import errors, gpu, interleave, optim, pipeline, recording, speculate, swap, tier

mypy = pytest.importorskip("mypy", reason="mypy is not installed: packaging/python_env.sh installs it")


def test_a_type_checker_accepts_the_public_modules(repository, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", tmp_path], cwd=repository / "packaging" / "python", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


PROGRAM = """
import spillway

adam = spillway.Adam(lr=1e-3)
stats = adam.step([], return_stats=True)
reveal_type(stats)
reveal_type((adam.lr, adam.betas, adam.rounding))
with spillway.Tier(["a"], job="x", io_timeout=1.5) as tier:
    reveal_type(tier)
    with spillway.Swap(tier, [1], host_memory=None) as swap:
        reveal_type(swap.stats().rounds)
spillway.Tier(["a"], job=3)
spillway.Adamm
"""


def test_a_program_that_uses_the_package_is_checked(repository, tmp_path):
    """Checks the results that a user's type checker reports: the types of results, a wrong
    argument, an unknown name."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", tmp_path, "--config-file=", "--follow-imports=silent", tmp_path / "program.py"],
        cwd=repository / "packaging" / "python",
        capture_output=True,
        text=True,
    )
    lines = [line.split(": ", 1)[1] for line in done.stdout.splitlines() if "program.py:" in line]
    assert lines == [
        'note: Revealed type is "tuple[bool, float, fallback=spillway.recording.StepStats] | None"',
        'note: Revealed type is "tuple[float, tuple[float, float], str]"',
        'note: Revealed type is "spillway.tier.Tier"',
        'note: Revealed type is "int"',
        'error: Argument "job" to "Tier" has incompatible type "int"; expected "str"  [arg-type]',
        'error: Module has no attribute "Adamm"; maybe "Adam"?  [attr-defined]',
    ], done.stdout


TORCH = """
import torch
import spillway.torch

model = torch.nn.Linear(2, 2)
optimizer = spillway.torch.AdamW(model.parameters(), lr=1e-3, max_norm=1.0, tier=["a", None])
reveal_type(optimizer)
reveal_type(optimizer.grad_norm)
spillway.torch.AdamW(model.parameters(), lr="x")
spillway.torch.Adagrad(model.parameters(), max_nrom=1.0)
spillway.torch.Lion(model.parameters(), host_memory="x")
"""


def test_a_program_that_uses_the_torch_optimizers_is_checked(repository, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "program.py").write_text(TORCH)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", tmp_path, "--config-file=", "--follow-imports=silent", tmp_path / "program.py"],
        cwd=repository / "packaging" / "python",
        capture_output=True,
        text=True,
    )
    lines = [line.split(": ", 1)[1] for line in done.stdout.splitlines() if "program.py:" in line]
    assert lines == [
        'note: Revealed type is "spillway.torch.AdamW"',
        'note: Revealed type is "float | None"',
        'error: Argument "lr" to "AdamW" has incompatible type "str"; expected "float | Tensor"  [arg-type]',
        'error: Unexpected keyword argument "max_nrom" for "Adagrad"; did you mean "max_norm"?  [call-arg]',
        'note: "Adagrad" defined in "spillway.torch"',
        'error: Argument "host_memory" to "Lion" has incompatible type "Literal[\'x\']"; '
        "expected \"int | Literal['auto'] | None\"  [arg-type]",
    ], done.stdout


STRICT = """
from __future__ import annotations
import numpy
import spillway

flat = numpy.zeros(8, numpy.float32)
adam: spillway.Adam = spillway.Adam(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
stats: spillway.StepStats | None = adam.step([(flat, flat, flat, flat)], return_stats=True)
prepared: spillway.Prepared = adam.prepare([(flat, flat, flat, flat)])
with spillway.Recording(prepared) as recording:
    recording.rollback()
squares: float = spillway.grad_stats(flat).sum_squares
with spillway.Tier(["paths"], job="types") as tier:
    with spillway.Swap(tier, [8]) as swap:
        swap.fill([(flat, None, None)])
        stats = swap.step(adam, [(flat, None)], grad_scale=0.5)
        swap.commit(1)
        rounds: int = swap.stats().rounds
with spillway.Speculation(1) as speculation:
    speculation.begin(adam, max_norm=1.0)
    speculation.submit(0, [(flat, flat, flat, flat)])
version: str = spillway.__version__ + spillway.library_version() + spillway.kernel_name()
try:
    spillway.set_num_threads(2)
except spillway.SpillwayError as error:
    text: str = str(error)
"""


def test_a_program_under_strict_rules_needs_no_exception(repository, tmp_path):
    """Under --strict a call of a function without annotations, or a name that is not exported, is an error."""
    (tmp_path / "strict.py").write_text(STRICT)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--cache-dir",
            tmp_path,
            "--config-file=",
            "--follow-imports=silent",
            tmp_path / "strict.py",
        ],
        cwd=repository / "packaging" / "python",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def public():
    """Every public class and function, and the methods that a class defines itself."""
    for module in (
        spillway,
        errors,
        gpu,
        interleave,
        optim,
        pipeline,
        recording,
        speculate,
        swap,
        tier,
        spillway.deepspeed,
        spillway.megatron,
    ):
        for name, value in vars(module).items():
            if name.startswith("_") or not getattr(value, "__module__", "").startswith("spillway"):
                continue
            if inspect.isclass(value) or inspect.isfunction(value):
                yield f"{module.__name__}.{name}", value
            if inspect.isclass(value):
                for member, inner in vars(value).items():
                    if not member.startswith("_") and (inspect.isfunction(inner) or isinstance(inner, property)):
                        yield f"{module.__name__}.{name}.{member}", inner


@pytest.mark.parametrize("name, value", dict(public()).items())
def test_every_public_name_has_a_description(name, value):
    assert (value.__doc__ or "").strip(), f"{name} has no docstring"


@pytest.mark.parametrize(
    "kind", ["Adam", "Adagrad", "Lion", "Signum", "Prepared", "Recording", "Tier", "Swap", "Speculation", "Gpu", "Interleave"]
)
def test_every_class_has_an_example(kind):
    assert "Example:" in getattr(spillway, kind).__doc__
