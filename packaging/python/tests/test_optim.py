"""Proves the Python optimizers against formulas in float64 and against torch's conversions: values, statistics,
copies, prepared tables, counters."""

import re

import numpy as np
import pytest

import spillway
from spillway import _abi

torch = pytest.importorskip("torch")


def random_arrays(seed, n, count):
    source = np.random.default_rng(seed)
    return [source.standard_normal(n).astype(np.float32) for _ in range(count)]


def adam_tensors(seed, n):
    param, grad = random_arrays(seed, n, 2)
    return param, grad, np.zeros(n, np.float32), np.zeros(n, np.float32)


def test_adam_follows_the_formula_in_float64():
    """torch's AdamW, step by step, in double precision."""
    param, grad, exp_avg, exp_avg_sq = adam_tensors(0, 1001)
    p, m, v = param.astype(np.float64), np.zeros(1001), np.zeros(1001)
    adam = spillway.Adam(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for step in range(1, 21):
        grad = np.roll(grad, 7) * np.float32(0.9)
        g = grad.astype(np.float64)
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
        p = p * (1 - 1e-2 * 0.1) - 1e-2 * (m / (1 - 0.8**step)) / (np.sqrt(v / (1 - 0.95**step)) + 1e-6)
        adam.step([(param, grad, exp_avg, exp_avg_sq)])
    assert adam.step_count == 20
    np.testing.assert_allclose(param, p, rtol=2e-5, atol=2e-6)


def test_adagrad_follows_the_formula_in_float64():
    param, grad = random_arrays(1, 777, 2)
    exp_avg_sq, p, s = np.zeros(777, np.float32), param.astype(np.float64), np.zeros(777)
    adagrad = spillway.Adagrad(lr=0.1, lr_decay=0.01, eps=1e-8, weight_decay=0.1)
    for step in range(10):
        g = grad + 0.1 * p
        s += g * g
        p -= 0.1 / (1 + step * 0.01) * g / (np.sqrt(s) + 1e-8)
        adagrad.step([(param, grad, exp_avg_sq)])
    np.testing.assert_allclose(param, p, rtol=2e-5, atol=2e-5)


def test_lion_follows_its_paper_and_leaves_a_zero_update_alone():
    param, grad = random_arrays(2, 778, 2)
    grad[:10] = 0
    exp_avg = np.zeros(778, np.float32)
    p, m = param.astype(np.float64), np.zeros(778)
    lion = spillway.Lion(lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(10):
        p = p - 1e-2 * (np.sign(0.9 * m + 0.1 * grad) + 0.1 * p)
        m = 0.99 * m + 0.01 * grad
        lion.step([(param, grad, exp_avg)])
    np.testing.assert_allclose(param, p, rtol=1e-5, atol=1e-5)


def test_signum_follows_its_paper_and_leaves_a_zero_update_alone():
    param, grad = random_arrays(3, 779, 2)
    grad[:10] = 0
    exp_avg = np.zeros(779, np.float32)
    p, m = param.astype(np.float64), np.zeros(779)
    signum = spillway.Signum(lr=1e-2, momentum=0.8, weight_decay=0.1)
    for _ in range(10):
        m = 0.8 * m + 0.2 * grad
        p = p * (1 - 1e-2 * 0.1) - 1e-2 * np.sign(m)
        signum.step([(param, grad, exp_avg)])
    np.testing.assert_allclose(param, p, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(exp_avg, m, rtol=1e-5, atol=1e-6)


def test_every_optimizer_of_the_c_interface_has_a_class_and_every_count_a_field():
    names = {name[4:-5] for name in _abi.PROTOTYPES if re.fullmatch("spw_[a-z]+_step", name)}
    kinds = [kind for kind in vars(spillway).values() if isinstance(kind, type) and hasattr(kind, "c_name")]
    assert {kind.c_name for kind in kinds} == names
    assert {kind.__name__ for kind in kinds} <= {*spillway.__all__}
    counts = [name for name, _ in _abi.Info._fields_ if name.endswith(("_calls", "_elements"))]
    assert counts == [*spillway.OptimizerStats._fields]


@pytest.mark.parametrize("kind, arity", [(spillway.Adam, 4), (spillway.Adagrad, 3), (spillway.Lion, 3), (spillway.Signum, 3)])
def test_a_prepared_table_gives_the_bits_of_single_calls(kind, arity):
    sizes = [1, 15, 16, 17, 1000, 70_001, 0, 3]
    one_by_one = [[a.copy() for a in random_arrays(n, n, arity)] for n in sizes]
    together = [[a.copy() for a in arrays] for arrays in one_by_one]
    for arrays in one_by_one + together:
        arrays[2] = abs(arrays[2])
        arrays[-1] = abs(arrays[-1])
    optimizers = [kind(lr=1e-2) for _ in sizes]
    prepared = kind(lr=1e-2).prepare(tuple(arrays) for arrays in together)
    assert len(prepared) == len(sizes)
    for _ in range(3):
        prepared.step()
        for optimizer, arrays in zip(optimizers, one_by_one):
            optimizer.step([tuple(arrays)])
    for expected, found in zip(one_by_one, together):
        assert [a.tobytes() for a in expected] == [a.tobytes() for a in found]


def test_a_prepared_table_keeps_the_memory_alive_when_the_tensor_gets_another():
    tensors = [torch.ones(100_000) for _ in range(4)]
    first_memory = tensors[0].detach()
    prepared = spillway.Adam(lr=0.1).prepare([tuple(tensors)])
    tensors[0].data = torch.zeros(100_000)
    prepared.step()
    assert (tensors[0] == 0).all() and (first_memory != 1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_16_bit_copy_is_torchs_conversion_of_the_new_parameter(dtype):
    tensors = [torch.from_numpy(a) for a in adam_tensors(3, 4099)]
    copy = torch.zeros(4099, dtype=dtype)
    spillway.Adam(lr=0.1).step([(*tensors, copy)])
    assert torch.equal(copy, tensors[0].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_grad_scale_equals_a_gradient_scaled_before(dtype):
    grad = (torch.randn(5000, generator=torch.Generator().manual_seed(4)) * 100).to(dtype)
    scaled = grad.float() * 0.125
    results = []
    for given, scale in ((grad, 0.125), (scaled, 1.0)):
        tensors = torch.ones(5000), given, torch.zeros(5000), torch.zeros(5000)
        stats = spillway.Adam().step([tensors], grad_scale=scale, return_stats=True)
        results.append((tensors[0].numpy().tobytes(), stats))
    assert results[0] == results[1]
    assert not stats.nonfinite
    assert stats.sum_squares == pytest.approx((scaled.double() ** 2).sum().item(), rel=1e-7)
    assert spillway.grad_stats(grad, scale=0.125) == stats


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 12_345, 99_999])
def test_one_non_finite_gradient_is_seen(bad, place):
    grad = np.ones(100_000, np.float32)
    assert not spillway.grad_stats(grad).nonfinite
    grad[place] = bad
    assert spillway.grad_stats(grad).nonfinite
    arrays = [np.ones(100_000, np.float32) for _ in range(3)]
    assert spillway.Adam().step([(arrays[0], grad, *arrays[1:])], return_stats=True).nonfinite


def test_options_start_at_torchs_defaults_and_can_change_between_steps():
    adam = spillway.Adam()
    assert (adam.lr, adam.betas, adam.eps) == (1e-3, (0.9, 0.999), 1e-8)
    param, grad, exp_avg, exp_avg_sq = (np.ones(64, np.float32) for _ in range(4))
    adam.lr, adam.weight_decay = 0.0, 0.0
    adam.step([(param, grad, exp_avg, exp_avg_sq)])
    assert (param == 1).all() and (exp_avg_sq == 1).all()


def test_a_failed_step_does_not_count():
    adam = spillway.Adam()
    with pytest.raises(spillway.InvalidArgumentError):
        adam.step([(np.ones(4, np.float32),) * 4])
    assert adam.step_count == 0


def test_bias_correction_and_l2_are_what_they_say():
    ones = [np.ones(16, np.float32) for _ in range(2)]
    param, exp_avg, exp_avg_sq = np.ones(16, np.float32), np.zeros(16, np.float32), np.zeros(16, np.float32)
    spillway.Adam(lr=0.1, weight_decay=1.0, weight_decay_mode="l2", bias_correction=False, eps=0.0).step(
        [(param, ones[0], exp_avg, exp_avg_sq)]
    )
    np.testing.assert_allclose(exp_avg, 0.2, rtol=1e-6)
    np.testing.assert_allclose(param, 1 - 0.1 * 0.2 / np.sqrt(0.004), rtol=1e-6)


def test_threads_counters_and_kernel():
    before = spillway.stats()
    spillway.Adam().step([adam_tensors(5, 100)])
    after = spillway.stats()
    assert after.adam_elements - before.adam_elements == 100
    assert after.adam_calls > before.adam_calls
    assert spillway.kernel_name() in ("avx512", "avx2", "sve_bf16", "sve", "neon", "scalar")
    assert spillway.num_threads() >= 1
    with pytest.raises(spillway.InvalidArgumentError):
        spillway.set_num_threads(-1)


def test_log_messages_arrive_with_their_level():
    seen = []
    spillway.set_log(lambda level, message: seen.append((level, message)), "debug")
    try:
        spillway.set_num_threads(1)
        spillway.Adam().step([adam_tensors(6, 200_000)])
    finally:
        spillway.set_log(None)
        spillway.set_num_threads(0)
    assert all(level in ("error", "warn", "info", "debug") and message for level, message in seen)
    with pytest.raises(spillway.InvalidArgumentError):
        spillway.set_log(print, "loud")


def test_calls_that_are_one_step_of_a_model_give_its_number():
    def arrays():
        return [adam_tensors(seed, 33) for seed in range(3)]

    together, apart, prepared = arrays(), arrays(), arrays()
    one, each, lists = spillway.Adam(lr=0.1), spillway.Adam(lr=0.1), spillway.Adam(lr=0.1)
    ready = [lists.prepare([tensor]) for tensor in prepared]
    for number in range(1, 4):
        one.step(together)
        for tensor in apart:
            each.step([tensor], number=number)
        for table in ready:
            table.step(number=number)
    assert one.step_count == each.step_count == lists.step_count == 3
    for expected, *found in zip(together, apart, prepared):
        for tensor in found:
            assert all((left == right).all() for left, right in zip(expected, tensor))
    for wrong in (0, -1, 1.0, "1", 1 << 63):
        with pytest.raises(spillway.InvalidArgumentError, match="number is"):
            each.step([apart[0]], number=wrong)
    assert each.step_count == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: spillway.Adam(lr=10**400),
        lambda: spillway.Adam(lr="a word"),
        lambda: spillway.Adam(betas=(0.9, None, 1)),
        lambda: spillway.Adam(rounding_seed="a word"),
        lambda: spillway.Adam(rounding_seed=1.5),
        lambda: spillway.Adam(rounding_seed=-1),
        lambda: spillway.Adam(rounding=[]),
        lambda: spillway.Adam(weight_decay_mode={}),
        lambda: spillway.Adam(eps=[1]),
        lambda: spillway.Lion(betas=("a", "b")),
        lambda: spillway.Adagrad(lr_decay=10**400),
        lambda: spillway.Adam().step([[np.ones(1, np.float32)] * 4], grad_scale="a word"),
        lambda: spillway.Adam().step([[np.ones(1, np.float32)] * 4], grad_scale=10**400),
        lambda: spillway.Adam().step([[np.ones(1, np.float32)] * 4], number="a word"),
        lambda: spillway.grad_stats(np.ones(1, np.float32), scale="a word"),
        lambda: spillway.accumulate_(np.ones(1, np.float32), np.ones(1, np.float32), scale=10**400),
        lambda: spillway.Adam().prepare([[np.ones(1, np.float32) for _ in range(4)]]).record().redo(grad_scale="a word"),
        lambda: spillway.plan("words", [1]),
        lambda: spillway.plan((1, 1, 1, 1), [-1]),
        lambda: spillway.plan((1, 1, 1, 1), [1], slots=-1),
    ],
)
def test_numbers_that_do_not_fit_are_an_error_of_the_package(make):
    with pytest.raises(spillway.InvalidArgumentError):
        make()
