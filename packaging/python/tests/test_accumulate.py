"""spillway.accumulate_ against numpy in float64, against torch, and with wrong arguments."""

import numpy as np
import pytest

import spillway
from spillway.errors import InvalidArgumentError

torch = pytest.importorskip("torch")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(n, dtype, seed):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("given", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 15, 4097, 200_001])
def test_sums_are_those_of_torch_without_a_scale(to, given, n):
    dst, src = random(n, to, 1), random(n, given, 2)
    expected = (dst.float() + src.float()).to(to)
    assert spillway.accumulate_(dst, src) is None
    assert torch.equal(dst, expected)


def test_a_scaled_sum_has_one_rounding():
    generator = np.random.default_rng(0)
    dst, src = generator.standard_normal(100_000, np.float32), generator.standard_normal(100_000, np.float32)
    # Products of float32 are exact in float64; the sum is rounded twice, which differs only next to a tie.
    expected = (dst.astype(np.float64) + src.astype(np.float64) * np.float64(np.float32(0.3))).astype(np.float32)
    spillway.accumulate_(dst, src, scale=0.3)
    assert np.array_equal(dst, expected)


def test_statistics_are_those_of_the_sum():
    dst, src = [random(n, torch.float32, n) for n in (5, 70_000)], [random(n, torch.bfloat16, n + 1) for n in (5, 70_000)]
    stats = spillway.accumulate_(dst, src, scale=0.5, return_stats=True)
    each = [spillway.grad_stats(array) for array in dst]
    assert stats.sum_squares == sum(one.sum_squares for one in each) and not stats.nonfinite
    src[0][3] = float("inf")
    assert spillway.accumulate_(dst, src, return_stats=True).nonfinite


def test_many_tensors_of_random_sizes_have_the_bits_of_single_calls():
    sizes = np.random.default_rng(1).integers(0, 5000, 500).tolist() + [300_000]
    one, other = ([random(n, torch.bfloat16, at) for at, n in enumerate(sizes)] for _ in range(2))
    src = [random(n, torch.float32, at + 1000) for at, n in enumerate(sizes)]
    spillway.accumulate_(one, src, scale=-1.5)
    for to, given in zip(other, src):
        spillway.accumulate_(to, given, scale=-1.5)
    assert all(torch.equal(a, b) for a, b in zip(one, other))


def test_uint16_arrays_hold_what_is_said():
    dst = torch.zeros(8, dtype=torch.bfloat16)
    words = np.zeros(8, np.uint16)
    src = np.arange(8, dtype=np.float32)
    spillway.accumulate_(words, src, uint16_dtype="bf16")
    spillway.accumulate_(dst, torch.from_numpy(src))
    assert torch.equal(torch.from_numpy(words.view(np.int16)), dst.view(torch.int16))


@pytest.mark.parametrize(
    "dst, src, message",
    [
        (lambda a: a, lambda a: [a], "one of dst and src is an array"),
        (lambda a: [a, a], lambda a: [a], "dst has 2 arrays and src has 1"),
        (lambda a: a, lambda a: a[:50], r"src\[0\]"),
        (lambda a: a, lambda a: a, "overlaps"),
        (lambda a: a[:60], lambda a: a[40:], "overlaps"),
        (lambda a: a, lambda a: a.double(), r"src\[0\]"),
        (lambda a: a[::2], lambda a: a[:50].clone(), r"dst\[0\]"),
        (lambda a: a, lambda a: "no array", r"src\[0\] is a str"),
    ],
)
def test_wrong_arguments_change_nothing(dst, src, message):
    array = torch.arange(100.0)
    with pytest.raises(InvalidArgumentError, match=message):
        spillway.accumulate_(dst(array), src(array))
    assert torch.equal(array, torch.arange(100.0))


def test_a_scale_that_is_not_finite_is_refused():
    with pytest.raises(InvalidArgumentError, match="scale"):
        spillway.accumulate_(torch.zeros(3), torch.ones(3), scale=float("nan"))
