"""Proves that the library reached through Python gives the golden bits under kernels/, which no kernel computed.

The format is told at the head of kernels/golden.py. The stateless calls are the ones under test."""

import ctypes
import json
import math
import struct

import numpy as np
import pytest

import spillway
from spillway import _abi, _native

OPTIMIZERS = {"adam": spillway.Adam, "adagrad": spillway.Adagrad, "lion": spillway.Lion, "signum": spillway.Signum}
_FORMATS = {"f32": np.uint32, "f16": np.uint16, "bf16": np.uint16}
_NAN_F32 = 0x7F800000


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_case(repository, optimizer):
    cases = json.loads((repository / "kernels" / f"{optimizer}.json").read_text())["cases"]
    assert len(cases) > 10
    for case in cases:
        run(optimizer, case)


def run(optimizer, case):
    options = OPTIMIZERS[optimizer]().options_of_next_step(1.0)
    for name, value in case["options"].items():
        setattr(options, name, value)
    n, copy_dtype = case["n"], case["copy"]
    spans = {
        "param": decode(case["param0"], case["param"]),
        "exp_avg": decode(case["exp_avg"], case["state"]),
        "exp_avg_sq": decode(case["exp_avg_sq"], case["state"]),
        "param_copy": np.zeros(n, _FORMATS[copy_dtype]) if copy_dtype != "none" else None,
    }
    for number, step in enumerate(case["steps"]):
        grad = decode(step["grad"], case["grad"])
        stats = _abi.sized(_abi.StepStats)
        if hasattr(options, "step"):
            options.step = case["options"]["step"] + number
        tensor = record(case, spans, grad, n)
        _native.check(
            getattr(_native.library(), f"spw_{optimizer}_step")(ctypes.byref(options), ctypes.addressof(tensor), 1, ctypes.byref(stats))
        )
        where = f"{optimizer}, case {case['name']}, update {number}"
        for name, dtype in (
            ("param", case["param"]),
            ("exp_avg", case["state"]),
            ("exp_avg_sq", case["state"]),
            ("param_copy", copy_dtype),
        ):
            if spans[name] is not None:
                assert same(spans[name], decode(step[name], dtype)), f"{where}: {name}"
        assert stats.nonfinite == step["nonfinite"], where
        (expected,) = struct.unpack(">d", bytes.fromhex(step["sum_squares"]))
        assert stats.sum_squares == expected or math.isnan(expected) and math.isnan(stats.sum_squares), where


def record(case, spans, grad, n):
    address = {name: span.ctypes.data if span is not None else None for name, span in {**spans, "grad": grad}.items()}
    codes = {"none": _abi.DTYPE_NONE, **_abi.DTYPES}
    return _abi.Tensor(
        struct_size=ctypes.sizeof(_abi.Tensor),
        param_dtype=codes[case["param"]],
        state_dtype=codes[case["state"]],
        grad_dtype=codes[case["grad"]],
        copy_dtype=codes[case["copy"]],
        n=n,
        **address,
    )


def decode(text, dtype):
    """Big-endian hexadecimal as an array of bits; None where there is none."""
    if not text:
        return None
    kind = _FORMATS[dtype]
    return np.frombuffer(bytes.fromhex(text), np.dtype(kind).newbyteorder(">")).astype(kind)


def same(found, expected):
    """Equal bits; any NaN of f32 equals any other."""
    if found.dtype != np.uint32:
        return bool((found == expected).all())
    nan = ((found & 0x7FFFFFFF) > _NAN_F32) & ((expected & 0x7FFFFFFF) > _NAN_F32)
    return bool(((found == expected) | nan).all())
