#!/usr/bin/env python3
"""Writes adam.json, adagrad.json, lion.json and signum.json: inputs and the exact bits that every kernel must give for them.

It shares no code with the kernels: each operation is done on rational numbers and rounded once, to nearest even.
`python3 kernels/golden.py` writes the files; `--check` compares them and writes nothing.

Format. A file has "optimizer" and "cases". A case gives, in this order:
  name, param, state, grad, copy    element types: f32, f16, bf16, or none
  n                                 elements
  options                           the fields of the optimizer's spw_*_options that are not 0, as JSON numbers
                                    that read back exactly as f64; `step` is that of the first step
  exp_avg, exp_avg_sq, param0       bits before the first step; "" where the optimizer keeps no such state
  steps                             for each: grad, then the bits after it: param, exp_avg, exp_avg_sq, param_copy,
                                    nonfinite (0 or 1) and sum_squares (f64)
Bits are lower-case hexadecimal, most significant digit first: 8 digits an f32, 4 an f16 or bf16, 16 an f64, elements
one after the other. `step` counts up by one. Any NaN of f32 or f64 equals any other; those of 16 bits are exact."""

import json
import math
import os
import struct
import sys
from fractions import Fraction

# (exponent bits, mantissa bits)
SHAPES = {"f32": (8, 23), "f16": (5, 10), "bf16": (8, 7)}
NAN = {"f32": 0x7FC00000, "f16": 0x7E00, "bf16": 0x7FC0}
DIGITS = {"f32": 8, "f16": 4, "bf16": 4}


# A number is ("nan",), ("inf", sign) or ("num", sign, Fraction >= 0); sign is 0 or 1 and matters for zero too.


def number(value, sign=None):
    value = Fraction(value)
    return ("num", (value < 0) if sign is None else bool(sign), abs(value))


def widen(bits, dtype):
    exponent_bits, mantissa_bits = SHAPES[dtype]
    sign = bits >> (exponent_bits + mantissa_bits)
    exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = bits & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent == (1 << exponent_bits) - 1:
        return ("nan",) if mantissa else ("inf", bool(sign))
    if exponent == 0:
        return ("num", bool(sign), Fraction(mantissa) * Fraction(2) ** (1 - bias - mantissa_bits))
    return ("num", bool(sign), Fraction(mantissa | 1 << mantissa_bits) * Fraction(2) ** (exponent - bias - mantissa_bits))


def narrow(x, dtype):
    """The bits of a number, rounded to nearest even."""
    exponent_bits, mantissa_bits = SHAPES[dtype]
    bias = (1 << (exponent_bits - 1)) - 1
    top = ((1 << exponent_bits) - 1) << mantissa_bits
    if x[0] == "nan":
        return NAN[dtype]
    sign = int(x[1]) << (exponent_bits + mantissa_bits)
    if x[0] == "inf":
        return sign | top
    if x[2] == 0:
        return sign
    exponent = max(log2_floor(x[2]), 1 - bias)
    steps = round(x[2] / Fraction(2) ** (exponent - mantissa_bits))  # Python rounds halves to even
    bits = (exponent + bias - 1 << mantissa_bits) + steps
    return sign | min(bits, top)


def log2_floor(value):
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


def rounded(x):
    """The same number after one rounding to f32."""
    return widen(narrow(x, "f32"), "f32")


def fma(a, b, c):
    if "nan" in (a[0], b[0], c[0]):
        return ("nan",)
    sign = a[1] != b[1]
    if "inf" in (a[0], b[0]):
        other = b if a[0] == "inf" else a
        if other[0] == "num" and other[2] == 0 or c[0] == "inf" and c[1] != sign:
            return ("nan",)
        return ("inf", sign)
    if c[0] == "inf":
        return c
    product = a[2] * b[2]
    if product == 0 and c[2] == 0:
        return ("num", sign and c[1], Fraction(0))
    total = (-product if sign else product) + (-c[2] if c[1] else c[2])
    return rounded(("num", total < 0, abs(total)))


MINUS_ZERO, ONE = number(0, 1), number(1)


def mul(a, b):
    product = fma(a, b, MINUS_ZERO)  # -0 + product keeps the product's own zero
    if product[0] == "num" and product[2] == 0:
        return ("num", a[1] != b[1], Fraction(0))
    return product


def add(a, b):
    return fma(a, ONE, b)


def negative(x):
    return x if x[0] == "nan" else (x[0], not x[1], *x[2:])


def div(a, b):
    if "nan" in (a[0], b[0]) or a[0] == b[0] == "inf":
        return ("nan",)
    sign = a[1] != b[1]
    if a[0] == "inf":
        return ("inf", sign)
    if b[0] == "inf":
        return ("num", sign, Fraction(0))
    if b[2] == 0:
        return ("nan",) if a[2] == 0 else ("inf", sign)
    return rounded(("num", sign, a[2] / b[2]))


def sqrt(x):
    if x[0] == "nan" or x[0] == "num" and x[2] == 0 or x == ("inf", False):
        return x
    if x[1]:
        return ("nan",)
    # 40 bits more than the result has, and one that says whether more follow.
    shift = 160 + 2 * abs(log2_floor(x[2]))
    scaled = x[2] * 4**shift
    root = math.isqrt(scaled.numerator // scaled.denominator)
    exact = Fraction(root * root) == scaled
    return rounded(("num", False, Fraction(2 * root + (0 if exact else 1), 2 ** (shift + 1))))


def f32(value):
    """A coefficient: f64 to f32."""
    return rounded(number(value, math.copysign(1, value) < 0))


# The optimizers, element by element. Each gives the new (p, m, v).


def power(base, step):
    return float(Fraction(base) ** step)


def adam(o, step):
    correction1, correction2 = 1.0, 1.0
    if not o["no_bias_correction"]:
        correction1, correction2 = 1.0 - power(o["beta1"], step), 1.0 - power(o["beta2"], step)
    b1, b2, eps = f32(o["beta1"]), f32(o["beta2"]), f32(o["eps"])
    rest1, rest2 = f32(1.0 - o["beta1"]), f32(1.0 - o["beta2"])
    inverse, size = f32(1.0 / math.sqrt(correction2)), f32(-o["lr"] / correction1)
    decay, l2 = o["weight_decay"], o["weight_decay_mode"] == 1

    def element(p, m, v, g):
        if decay and l2:
            g = fma(p, f32(decay), g)
        m = fma(g, rest1, mul(m, b1))
        v = fma(mul(g, g), rest2, mul(v, b2))
        d = fma(sqrt(v), inverse, eps)
        if decay and not l2:
            p = fma(p, f32(-o["lr"] * decay), p)
        return fma(div(m, d), size, p), m, v

    return element


def adagrad(o, step):
    size = f32(-(o["lr"] / (1.0 + (step - 1) * o["lr_decay"])))
    decay, eps = f32(o["weight_decay"]), f32(o["eps"])

    def element(p, m, v, g):
        if o["weight_decay"]:
            g = fma(p, decay, g)
        v = fma(g, g, v)
        return fma(div(g, add(sqrt(v), eps)), size, p), m, v

    return element


def lion(o, step):
    b1, b2, lr = f32(o["beta1"]), f32(o["beta2"]), f32(o["lr"])
    rest1, rest2, decay = f32(1.0 - o["beta1"]), f32(1.0 - o["beta2"]), f32(-o["lr"] * o["weight_decay"])

    def element(p, m, v, g):
        c = fma(g, rest1, mul(m, b1))
        if o["weight_decay"]:
            p = fma(p, decay, p)
        step = c if c[0] == "nan" or c[0] == "num" and c[2] == 0 else ("num", c[1], lr[2])
        return add(p, negative(step)), fma(g, rest2, mul(m, b2)), v

    return element


def signum(o, step):
    b, lr = f32(o["momentum"]), f32(o["lr"])
    rest, decay = f32(1.0 - o["momentum"]), f32(-o["lr"] * o["weight_decay"])

    def element(p, m, v, g):
        m = fma(g, rest, mul(m, b))
        if o["weight_decay"]:
            p = fma(p, decay, p)
        step = m if m[0] == "nan" or m[0] == "num" and m[2] == 0 else ("num", m[1], lr[2])
        return add(p, negative(step)), m, v

    return element


# The sum of squares: tiles of 4096 elements, 256 lanes a tile, trees above both.


def sum_squares(grads):
    if any(g[0] == "nan" for g in grads):
        return 1, math.nan
    if any(g[0] == "inf" for g in grads):
        return 1, math.inf

    def tile(part):
        lanes = [0.0] * 256
        for i, g in enumerate(part):
            lanes[i % 256] = float(g[2] * g[2] + Fraction(lanes[i % 256]))
        half = 128
        while half:
            lanes = [lanes[i] + lanes[i + half] for i in range(half)]
            half //= 2
        return lanes[0]

    def tree(sums):
        if len(sums) == 1:
            return sums[0]
        left = 1 << (len(sums) - 1).bit_length() - 1
        return tree(sums[:left]) + tree(sums[left:])

    return 0, tree([tile(grads[at : at + 4096]) for at in range(0, len(grads), 4096)])


# Inputs.

SPECIAL_F32 = [
    0x00000000,
    0x80000000,
    0x00000001,
    0x80000001,
    0x007FFFFF,
    0x00800000,
    0x7F7FFFFF,
    0xFF7FFFFF,
    0x7F800000,
    0xFF800000,
    0x7FC00000,
    0x3F808000,
    0x3F818000,
    0x477FF000,
    0x33000000,
    0x00008000,
]


class Random:
    def __init__(self, seed):
        self.state = seed

    def bits(self):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return self.state >> 32


def inputs(random, n, dtype, positive, specials):
    def one():
        kind, bits = random.bits(), random.bits()
        if specials and kind % 4 == 0:
            x = SPECIAL_F32[bits % len(SPECIAL_F32)]
        elif specials and kind % 4 == 1:
            x = (bits << 1 | kind >> 31) & 0xFFFFFFFF
        else:
            x = (bits & 0x807FFFFF) | (126 - kind % 12) << 23
        x &= 0x7FFFFFFF if positive else 0xFFFFFFFF
        return narrow(widen(x, "f32"), dtype)

    return [one() for _ in range(n)]


def hexed(values, dtype):
    return "".join(f"{bits:0{DIGITS[dtype]}x}" for bits in values)


RULES = {"adam": (adam, True, True), "adagrad": (adagrad, False, True), "lion": (lion, True, False), "signum": (signum, True, False)}


def case(optimizer, name, dtypes, n, steps, options, specials=False):
    make, has_m, has_v = RULES[optimizer]
    param, state, grad, copy = dtypes
    random = Random(hash_of(optimizer + name))
    p = inputs(random, n, param, False, specials)
    m = inputs(random, n, state, False, specials) if has_m else []
    v = inputs(random, n, state, True, specials) if has_v else []
    out = {
        "name": name,
        "param": param,
        "state": state,
        "grad": grad,
        "copy": copy,
        "n": n,
        "options": options,
        "param0": hexed(p, param),
        "exp_avg": hexed(m, state),
        "exp_avg_sq": hexed(v, state),
        "steps": [],
    }
    scale = f32(options["grad_scale"])
    for step in range(steps):
        g = inputs(random, n, grad, False, specials)
        scaled = [mul(widen(x, grad), scale) for x in g]
        element = make(options, options.get("step", 1) + step)
        zero = number(0)
        new = [
            element(widen(p[i], param), widen(m[i], state) if has_m else zero, widen(v[i], state) if has_v else zero, scaled[i])
            for i in range(n)
        ]
        p = [narrow(x[0], param) for x in new]
        m = [narrow(x[1], state) for x in new] if has_m else []
        v = [narrow(x[2], state) for x in new] if has_v else []
        copied = [narrow(x[0], copy) for x in new] if copy != "none" else []
        nonfinite, squares = sum_squares(scaled)
        out["steps"].append(
            {
                "grad": hexed(g, grad),
                "param": hexed(p, param),
                "exp_avg": hexed(m, state),
                "exp_avg_sq": hexed(v, state),
                "param_copy": hexed(copied, copy) if copied else "",
                "nonfinite": nonfinite,
                "sum_squares": struct.pack(">d", squares).hex(),
            }
        )
    return out


def hash_of(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


MIXED = ("f32", "f32", "bf16", "bf16")
ALL = [
    ("f32", "f32", "f32", "none"),
    ("f32", "f32", "f32", "f16"),
    ("f32", "f32", "f32", "bf16"),
    ("f32", "f32", "f16", "none"),
    ("f32", "f32", "f16", "f16"),
    ("f32", "f32", "f16", "bf16"),
    ("f32", "f32", "bf16", "none"),
    ("f32", "f32", "bf16", "f16"),
    MIXED,
    ("f16", "f32", "f16", "none"),
    ("f16", "f16", "f16", "none"),
    ("bf16", "f32", "bf16", "none"),
    ("bf16", "bf16", "bf16", "none"),
]


def files():
    adam0 = {
        "weight_decay_mode": 0,
        "step": 1,
        "lr": 1e-3,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "grad_scale": 1.0,
        "no_bias_correction": 0,
    }
    adagrad0 = {"step": 1, "lr": 1e-2, "lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0, "grad_scale": 1.0}
    lion0 = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "grad_scale": 1.0}
    signum0 = {"lr": 1e-4, "momentum": 0.9, "weight_decay": 0.0, "grad_scale": 1.0}
    starts = {"adam": adam0, "adagrad": adagrad0, "lion": lion0, "signum": signum0}
    for optimizer, start in starts.items():
        decayed = {**start, "weight_decay": 0.1, "grad_scale": 0.37, "lr": 1e-2}
        cases = [case(optimizer, "types " + " ".join(types), types, 35, 2, decayed) for types in ALL]
        cases += [
            case(optimizer, "specials " + " ".join(types), types, 50, 2, decayed, True)
            for types in (ALL[0], MIXED, ALL[4], ALL[10], ALL[12])
        ]
        cases.append(case(optimizer, "defaults", ALL[0], 17, 5, start))
        cases.append(case(optimizer, "no decay, loss scale", MIXED, 33, 5, {**start, "grad_scale": 2.0**-16}))
        cases.append(case(optimizer, "lanes of the sum", ALL[12], 600, 1, decayed))
        cases.append(case(optimizer, "denormal coefficients", ALL[0], 20, 2, {**decayed, "lr": 1e-38, "grad_scale": 1e-39}))
        if optimizer == "adam":
            for mode in (0, 1):
                for uncorrected in (0, 1):
                    cases.append(
                        case(
                            optimizer,
                            f"decay mode {mode}, no_bias_correction {uncorrected}",
                            MIXED,
                            33,
                            5,
                            {**decayed, "weight_decay_mode": mode, "no_bias_correction": uncorrected},
                        )
                    )
            cases.append(case(optimizer, "l2 specials", ALL[0], 50, 2, {**decayed, "weight_decay_mode": 1}, True))
            cases.append(case(optimizer, "late step", ALL[0], 17, 2, {**decayed, "step": 100000, "beta2": 0.95}))
        if optimizer == "adagrad":
            cases.append(case(optimizer, "lr decay", ALL[0], 17, 5, {**decayed, "lr_decay": 0.01, "step": 7}))
        if optimizer == "lion":
            cases.append(case(optimizer, "tiles of the sum", ALL[12], 8200, 1, decayed))
        body = ",\n".join(json.dumps(one) for one in cases)
        yield optimizer + ".json", f'{{"optimizer": "{optimizer}", "cases": [\n{body}\n]}}\n'


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    stale = []
    for name, text in files():
        path = os.path.join(here, name)
        if "--check" not in sys.argv:
            with open(path, "w", encoding="ascii") as out:
                out.write(text)
        with open(path, encoding="ascii") as committed:
            if committed.read() != text:
                stale.append(name)
    if stale:
        sys.exit(
            f"{', '.join(stale)} in kernels/ differ from the exact results; run python3 kernels/golden.py, which writes them, "
            "and look at the change"
        )


if __name__ == "__main__":
    main()
