"""Proves that Spillway's cpu_adam gives the bits of DeepSpeed's compiled AVX-512 op. The test compares parameters
and both moments after every step, for every pair of dtypes. Lengths are multiples of 16, because DeepSpeed's scalar
tail depends on the compiler. The same numbers agree with torch.optim within float tolerance."""

import itertools

import pytest
import torch
from compiled_ops import vector_width

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
PAIRS = [(F32, F32), (F16, F32), (F16, F16), (BF16, F32), (BF16, BF16)]
LENGTHS = [16, 48, 16 * 1001, 131_072 + 16]
_ids = itertools.count(1_000_000)

# (step, beta1, beta2): a plain run first, then the patterns of resuming, of several parameters per step, and
# of a changed beta.
STRAIGHT = [(step, 0.9, 0.999) for step in range(1, 51)]
IRREGULAR = (
    [(step, 0.9, 0.999) for step in (1, 1, 1, 2, 2, 3, 7, 8, 8, 100, 101, 5, 6, 6, 1)]
    + [(step, 0.8, 0.99) for step in (2, 3, 3, 9, 10)]
    + [(11, 0.9, 0.99), (12, 0.9, 0.99), (1000, 0.95, 0.99)]
)


@pytest.fixture(autouse=True, scope="module")
def the_same_body(compiled):
    if vector_width() != "AVX512":
        pytest.skip(f"DeepSpeed compiles its {vector_width()} body here; only the AVX512 body fixes every rounding")


def tensors(n, param_dtype, state_dtype, seed):
    source = torch.Generator().manual_seed(seed)
    return [
        torch.randn(n, generator=source).to(param_dtype),
        None,
        torch.zeros(n, dtype=state_dtype),
        torch.zeros(n, dtype=state_dtype),
    ], source


def bits(tensor):
    return tensor.view(torch.int32 if tensor.dtype is F32 else torch.int16)


def run_both(ops, schedule, setup, gradient, adamw=True, lr=1e-3, eps=1e-8, weight_decay=0.0, bias_correction=True):
    """Gives both ops the same inputs and compares all bits after every step."""
    optimizer_id = next(_ids)
    sides = []
    for op in ops:
        op.create_adam(optimizer_id, lr, schedule[0][1], schedule[0][2], eps, weight_decay, adamw, False)
        sides.append(setup())
    for index, (step, beta1, beta2) in enumerate(schedule):
        for op, (arrays, source) in zip(ops, sides):
            arrays[1] = gradient(arrays[0], source, index)
            op.adam_update(optimizer_id, step, lr * (1 + index % 3), beta1, beta2, eps, weight_decay, bias_correction, *arrays)
        for name, ours, theirs in zip(("params", "grads", "exp_avg", "exp_avg_sq"), *[side[0] for side in sides]):
            same = (bits(ours) == bits(theirs)) | (ours.isnan() & theirs.isnan())
            assert same.all(), f"{name} differs at update {index} (step {step}), {(~same).sum()} of {same.numel()}"
    for op in ops:
        op.destroy_adam(optimizer_id)
    return sides[0][0]


def normal(param, source, _index):
    return (torch.randn(param.numel(), generator=source) * 0.1).to(param.dtype)


@pytest.mark.sampled
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("adamw", [True, False], ids=["AdamW", "L2"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(str(d)[6:] for d in pair))
def test_fifty_steps(served, compiled, pair, adamw, bias_correction, weight_decay):
    ops = served("cpu_adam"), compiled("cpu_adam")
    for n in LENGTHS:
        final = run_both(
            ops,
            STRAIGHT,
            lambda: tensors(n, *pair, seed=n),
            normal,
            adamw=adamw,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
        )
        assert not torch.equal(final[0], tensors(n, *pair, seed=n)[0][0])


@pytest.mark.parametrize("adamw", [True, False], ids=["AdamW", "L2"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(str(d)[6:] for d in pair))
def test_repeated_and_jumping_steps_and_changed_betas(served, compiled, pair, adamw):
    run_both(
        (served("cpu_adam"), compiled("cpu_adam")), IRREGULAR, lambda: tensors(4096, *pair, seed=1), normal, adamw=adamw, weight_decay=0.1
    )


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(str(d)[6:] for d in pair))
def test_zeros_denormals_huge_and_non_finite_gradients(served, compiled, pair):
    """The payload of NaNs is not compared: DeepSpeed keeps it in float16, and Spillway writes the default payload."""
    special = torch.tensor(
        [0.0, -0.0, 1e-45, -1e-40, 1e-38, 6e-8, 1e-20, 3e38, -3e38, 65504.0, 1e-6, 1.0, float("inf"), float("-inf"), float("nan"), -1.0]
    )

    def gradient(param, source, index):
        picked = torch.randint(len(special), (param.numel(),), generator=source)
        return special[picked].to(param.dtype) if index % 2 else normal(param, source, index)

    run_both((served("cpu_adam"), compiled("cpu_adam")), STRAIGHT[:12], lambda: tensors(4096, *pair, seed=2), gradient, weight_decay=0.01)


@pytest.mark.parametrize("lr, eps", [(1.0, 1e-8), (1e-6, 1e-3), (0.0, 1e-8), (3e-4, 0.0)])
def test_other_hyper_parameters(served, compiled, lr, eps):
    run_both(
        (served("cpu_adam"), compiled("cpu_adam")),
        STRAIGHT[:20],
        lambda: tensors(2048, F32, F32, seed=3),
        normal,
        lr=lr,
        eps=eps,
        weight_decay=0.1,
    )


def test_two_parameters_of_one_optimizer_share_its_state(served, compiled):
    """Calls the op as DeepSpeed does: the same step once for every parameter, on one id."""
    results = []
    for op in (served("cpu_adam"), compiled("cpu_adam")):
        optimizer_id = next(_ids)
        op.create_adam(optimizer_id, 1e-3, 0.9, 0.999, 1e-8, 0.01, True, False)
        first, second = tensors(160, F32, F32, seed=4), tensors(320, F32, F32, seed=5)
        for step in range(1, 31):
            for arrays, source in (first, second):
                arrays[1] = normal(arrays[0], source, step)
                op.adam_update(optimizer_id, step, 1e-3, 0.9, 0.999, 1e-8, 0.01, True, *arrays)
        results.append([bits(arrays[i]) for arrays, _ in (first, second) for i in (0, 2, 3)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_the_comparison_can_fail(served, compiled):
    """The comparison detects a change of one unit in the last place of one gradient."""
    calls = itertools.count()

    def gradient(param, source, index):
        grad = normal(param, source, index)
        if next(calls) == 4:
            grad[7] = torch.nextafter(grad[7], torch.tensor(9.0))
        return grad

    with pytest.raises(AssertionError, match="differs"):
        run_both((served("cpu_adam"), compiled("cpu_adam")), STRAIGHT[:10], lambda: tensors(64, F32, F32, seed=6), gradient)


@pytest.mark.parametrize("adamw, kind", [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_torch_agrees_within_float_tolerance(served, adamw, kind):
    source = torch.Generator().manual_seed(7)
    ours = torch.randn(10_007, generator=source)
    theirs = torch.nn.Parameter(ours.clone())
    torch_optimizer = kind([theirs], lr=1e-2, weight_decay=0.1)
    states = [torch.zeros_like(ours), torch.zeros_like(ours)]
    op, optimizer_id = served("cpu_adam"), next(_ids)
    op.create_adam(optimizer_id, 1e-2, 0.9, 0.999, 1e-8, 0.1, adamw, False)
    for step in range(1, 51):
        theirs.grad = torch.randn(10_007, generator=source)
        op.adam_update(optimizer_id, step, 1e-2, 0.9, 0.999, 1e-8, 0.1, True, ours, theirs.grad, *states)
        torch_optimizer.step()
    torch.testing.assert_close(ours, theirs.data, rtol=2e-5, atol=2e-6)
