"""A step that is refused changes no bit of a parameter, state or gradient and no step count, wherever the refusal is: at any parameter, by
the library or by torch's share, with clipping, a scaler or a record. The next step has the bits of a run without the refusal."""

import copy
import random

import pytest
import torch

import spillway
from spillway import torch as own

KINDS = {
    "f32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "f16": (torch.float16, False),
    "f64": (torch.float64, False),
    "complex": (torch.complex64, False),
    "strided": (torch.float32, True),
}
SERVED = ("f32", "bf16", "f16")
SHAPES = [(5, 3), (40,), (1,), (300,)]


def tensor(kind, shape, seed):
    dtype, strided = KINDS[kind]
    generator = torch.Generator().manual_seed(seed)
    real = torch.randn([2, *shape], generator=generator, dtype=torch.float64)
    value = torch.complex(real[0], real[1]).to(dtype) if dtype.is_complex else real[0].to(dtype)
    return torch.stack([value, value], -1)[..., 0] if strided else value


class Run:
    """An optimizer of random parameters, groups and options; equal seeds make equal runs."""

    def __init__(self, seed):
        chance = random.Random(seed)
        self.name = chance.choice(["Adam", "AdamW", "Adagrad", "Lion", "Signum"])
        options, kinds = {}, list(KINDS)
        if chance.random() < 0.4:
            options["max_norm"] = 0.5
        if chance.random() < 0.3:
            options["skip_nonfinite"] = True
        if self.name in ("Lion", "Signum"):
            kinds.remove("complex")
        if chance.random() < 0.4:
            kinds = ["f32", "bf16", "f16"]
            options[chance.choice(["undo", "skip_nonfinite"])] = True
            if chance.random() < 0.5:
                options["master"] = "f32"
        self.kinds = ["f32", *(chance.choice(kinds) for _ in range(chance.randrange(1, 5)))]
        chance.shuffle(self.kinds)
        self.params = [torch.nn.Parameter(tensor(kind, chance.choice(SHAPES), 10 * seed + at)) for at, kind in enumerate(self.kinds)]
        cut = chance.randrange(len(self.params) + 1)
        groups = [{"params": part, "lr": 1e-2 * (at + 1)} for at, part in enumerate((self.params[:cut], self.params[cut:])) if part]
        self.optimizer = getattr(own, self.name)(groups, **options)
        self.scaled, self.seed, self.options = chance.random() < 0.3, seed, options
        self.steps = chance.randrange(3)
        for step in range(self.steps):
            self.set_grads(step)
            self.optimizer.step()
        self.set_grads(9)

    def set_grads(self, step):
        for at, (kind, param) in enumerate(zip(self.kinds, self.params)):
            param.grad = tensor(kind, param.shape, 1000 * self.seed + 10 * step + at)
        if self.scaled:
            self.optimizer.grad_scale, self.optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)

    def group_of(self, at):
        return next(group for group in self.optimizer.param_groups if any(param is self.params[at] for param in group["params"]))

    def bits(self):
        """The bytes of all tensors."""
        found = {}
        for at, param in enumerate(self.params):
            found[at, "param"], found[at, "grad"] = raw(param), raw(param.grad)
            found.update({(at, key): raw(value) for key, value in (self.optimizer.state.get(param) or {}).items()})
        return found


def raw(value):
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_meta:
        return repr(value)
    value = torch.empty(value.numel(), dtype=value.dtype).copy_(value.detach().reshape(-1))
    return (
        str(value.dtype),
        tuple(value.shape),
        (torch.view_as_real(value) if value.is_complex() else value).view(-1).view(torch.uint8).tolist(),
    )


def options_out_of_range(run, at):
    group = run.group_of(at)
    wrong = [("lr", -1.0), ("lr", float("inf")), ("lr", "a word"), ("lr", None), ("weight_decay", -1.0), ("weight_decay", float("nan"))]
    if "betas" in group:
        wrong += [("betas", (0.9, 1 - 1e-12)), ("betas", (0.9,)), ("betas", None)]
    if "eps" in group:
        wrong += [("eps", 1e-60), ("eps", "a word")]
    for key, value in wrong:
        yield (
            f"{key} {value!r}",
            lambda key=key, value=value: group.__setitem__(key, value),
            lambda key=key, before=group[key]: group.__setitem__(key, before),
        )


def states_that_do_not_fit(run, at):
    param = run.params[at]
    state = run.optimizer.state.get(param) or {}
    for key, value in list(state.items()):
        if key == "step":
            wrong = [torch.tensor([1.0, 2.0]), "a word"] if run.kinds[at] in SERVED else []
        else:
            other = torch.float64 if value.dtype is not torch.float64 else torch.float32
            wrong = [None, torch.zeros(7, dtype=value.dtype), torch.zeros_like(value, device="meta")]
            # torch itself takes second moments of other dtypes.
            strict = run.kinds[at] in SERVED or (run.name in ("Adam", "AdamW") and key == "exp_avg" and not value.is_complex())
            wrong += [value.to(other)] if strict else []
        for number, bad in enumerate(wrong):
            yield (
                f"{key} {number}",
                lambda key=key, bad=bad: state.__setitem__(key, bad),
                lambda key=key, value=value: state.__setitem__(key, value),
            )
        # An empty state is that of a new parameter.
        if key != "master_param" and len(state) > 1:
            yield f"without {key}", lambda key=key: state.pop(key), lambda key=key, value=value: put_back(state, key, value)


def put_back(state, key, value):
    """In the order of before, which is the order of the keys of a new state."""
    rest = {other: state.pop(other) for other in list(state)}
    state.update({**({key: value} if key == "step" else {}), **rest, key: value})


def gradients_that_do_not_fit(run, at):
    param, grad = run.params[at], run.params[at].grad

    def give(value):
        param.grad = None
        param.grad = value

    if run.kinds[at] in SERVED:
        odd = torch.frombuffer(bytearray(param.nbytes + 1), dtype=param.dtype, offset=1).view(param.shape)
        yield "odd address", lambda: give(odd), lambda: give(grad)
        yield "its own parameter", lambda: give(param.detach()), lambda: give(grad)
    if run.name != "Adagrad" and not grad.is_complex():
        yield "sparse", lambda: give(grad.to_sparse()), lambda: give(grad)
    if run.options.get("max_norm") and not run.options.get("skip_nonfinite"):
        bad = grad.clone()
        bad.view(-1)[-1] = float("nan")
        yield "NaN", lambda: give(bad), lambda: give(grad)


def refusals(run):
    for at in range(len(run.params)):
        if run.kinds[at] in SERVED:
            yield from ((at, *refusal) for refusal in options_out_of_range(run, at))
        yield from ((at, *refusal) for refusal in states_that_do_not_fit(run, at))
        yield from ((at, *refusal) for refusal in gradients_that_do_not_fit(run, at))


def refused_everywhere(seed):
    """Refuses a step at every place of a run, one after another; returns the number of refusals."""
    run, expected, number = Run(seed), Run(seed), 0
    for at, what, break_it, mend_it in list(refusals(run)):
        where = f"seed {seed}, {run.name}, {run.options}, {run.kinds}, parameter {at}: {what}"
        break_it()
        before = run.bits()
        try:
            run.optimizer.step()
        except Exception as error:
            assert not isinstance(error, AssertionError)
        else:
            raise AssertionError(f"{where}: not refused")
        after = run.bits()
        # A refused first step may have created states as they are before a step.
        changed = [key for key in (after if run.steps else before) if before.get(key) != after.get(key)]
        assert not changed, f"{where}: changed {changed}"
        mend_it()
        number += 1
    run.optimizer.step()
    expected.optimizer.step()
    assert run.bits() == expected.bits(), f"seed {seed}: the step after the refusals differs"
    return number


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_a_refused_step_changes_nothing_at_any_place(first):
    assert sum(refused_everywhere(seed) for seed in range(first, first + 10)) > 50


def test_a_refusal_in_the_group_of_the_library_leaves_the_parameters_of_torch_alone():
    one, two = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = own.AdamW([one, two], lr=0.1, max_norm=0.5)
    one.grad, two.grad = one.detach(), torch.ones(1, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"params'\]\[0\]"):
        optimizer.step()
    assert two.item() == 1 and two.grad.item() == 1 and not optimizer.state[two]


def test_an_option_that_is_refused_names_its_group():
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = own.AdamW([{"params": params[:2]}, {"params": params[2:], "lr": 1e-3}])
    for param in params:
        param.grad = torch.ones(2)
    optimizer.step()
    for number, option, value, words in [
        (0, "lr", -1.0, "lr: -1"),
        (1, "lr", -1.0, "lr: -1"),
        (1, "betas", (0.9, 1.0), r"betas\[1\]: 1"),
        (0, "eps", -1.0, "eps: -1"),
        (1, "eps", "a word", "not a number"),
        (0, "weight_decay", None, "not a number"),
    ]:
        before = copy.deepcopy(optimizer.param_groups[number][option])
        optimizer.param_groups[number][option] = value
        with pytest.raises(ValueError, match=rf"param_groups\[{number}\].*{words}"):
            optimizer.step()
        optimizer.param_groups[number][option] = before
    optimizer.step()


@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"skip_nonfinite": True}])
def test_a_gradient_at_an_odd_address_names_its_parameter(options):
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = own.AdamW(params, **options)
    params[0].grad, params[1].grad = torch.ones(2), torch.frombuffer(bytearray(9), dtype=torch.float32, count=2, offset=1)
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['params'\]\[1\].*not aligned"):
        optimizer.step()


@pytest.mark.parametrize("value", [None, 3, "a word"])
def test_a_state_that_is_none_names_its_parameter(value):
    params = [torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    for at, param in enumerate(params):
        for change in (
            lambda optimizer: optimizer.state.__setitem__(param, value),
            lambda optimizer: optimizer.state[param].update(exp_avg=value),
        ):
            optimizer = own.AdamW(params)
            for other in params:
                other.grad = torch.ones_like(other)
            optimizer.step()
            change(optimizer)
            before = [other.detach().clone() for other in params]
            with pytest.raises(Exception, match=rf"param_groups\[0\]\['params'\]\[{at}\]"):
                optimizer.step()
            assert all(torch.equal(one, other) for one, other in zip(params, before))


@pytest.mark.parametrize("options", [{"undo": True}, {"master": "f32"}, {"master": "split"}])
def test_an_inference_tensor_among_the_states_names_its_parameter(options):
    param = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = own.AdamW([param], **options)
    param.grad = torch.ones_like(param)
    optimizer.step()
    with torch.inference_mode():
        optimizer.state[param]["exp_avg"] = torch.zeros_like(optimizer.state[param]["exp_avg"])
    before = param.detach().clone()
    with pytest.raises(ValueError, match=r"params'\]\[0\].*inference tensor"):
        optimizer.step()
    assert torch.equal(param, before)


def _mixed(*, served=1, rest=2, cls=own.AdamW, dtype=torch.float64, **options):
    """An optimizer after one step, with parameters that Spillway steps and others that torch steps."""
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(served)] + [
        torch.nn.Parameter(torch.ones(4, dtype=dtype)) for _ in range(rest)
    ]
    optimizer = cls(params, lr=0.1, **options)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return params, optimizer


def _inference(params, optimizer):
    with torch.inference_mode():
        states = {key: value.clone() for key, value in optimizer.state[params[-1]].items()}
    optimizer.state[params[-1]].update(states)


def _expanded(params, optimizer):
    optimizer.state[params[-1]]["exp_avg"] = torch.zeros(1, dtype=torch.float64).expand(4)


def _fused_for_complex(params, optimizer):
    group = optimizer.param_groups[0]
    del group["params"][-1]
    optimizer.param_groups.append({**group, "params": [params[-1]], "fused": True})


def _count_of(value):
    return lambda params, optimizer: optimizer.state[params[-1]]["step"].fill_(value)


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize(
    "dtype, spoil",
    [
        (torch.float64, _inference),
        (torch.float64, _expanded),
        (torch.complex64, _fused_for_complex),
        (torch.float64, _count_of(-5.0)),
        (torch.float64, _count_of(float("nan"))),
    ],
)
def test_what_only_torchs_real_step_refuses_changes_nothing(dtype, spoil, max_norm):
    params, optimizer = _mixed(dtype=dtype, max_norm=max_norm)
    spoil(params, optimizer)
    tensors = [tensor for param in params for tensor in (param, param.grad, *optimizer.state[param].values())]
    before = [tensor.detach().clone() for tensor in tensors]
    with pytest.raises((ValueError, NotImplementedError, RuntimeError), match="params'.*nothing was stepped"):
        optimizer.step()
    assert all(torch.allclose(old, tensor, rtol=0, atol=0, equal_nan=True) for old, tensor in zip(before, tensors))


def test_lion_refuses_complex_parameters_before_it_steps_others():
    params = [torch.nn.Parameter(torch.ones(4, dtype=torch.float64)), torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))]
    optimizer = own.Lion(params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(NotImplementedError, match=r"params'\]\[1\] is stepped by torch, which refuses"):
        optimizer.step()
    assert torch.equal(params[0].detach(), torch.ones(4, dtype=torch.float64))


def test_gradients_that_torch_cannot_write_to_are_clipped_too():
    params, optimizer = _mixed(max_norm=0.5)
    with torch.inference_mode():
        params[1].grad = torch.ones(4, dtype=torch.float64)
    params[2].grad = torch.ones(1, dtype=torch.float64).expand(4)
    optimizer.step()
    assert torch.equal(params[1].grad, params[2].grad) and params[1].grad[0] < 1
    assert torch.equal(params[1].detach(), params[2].detach())


@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"skip_nonfinite": True}])
def test_a_freed_gradient_in_the_share_of_torch_is_not_read(options):
    """Also where a norm is measured before torch's step is tried."""
    params, optimizer = _mixed(**options)
    params[2].grad.untyped_storage().resize_(0)
    before = [param.detach().clone() for param in params]
    with pytest.raises(spillway.InvalidArgumentError, match=r"^param_groups\[0\]\['params'\]\[2\]: its gradient: its storage is shorter"):
        optimizer.step()
    assert all(map(torch.equal, params, before))


def test_two_gradients_of_one_memory_are_clipped_once_in_the_share_of_torch():
    params, whole = [torch.nn.Parameter(torch.ones(8, dtype=torch.float64)) for _ in range(2)], torch.ones(8, dtype=torch.float64)
    for param in params:
        param.grad = whole.view(8)
    optimizer = own.AdamW(params, max_norm=1.0)
    optimizer.step()
    assert optimizer.grad_norm == 4.0 and torch.allclose(whole, torch.full((8,), 0.25, dtype=torch.float64), rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"master": "f32"}, {"master": "split"}, {"undo": True}])
def test_memory_that_was_freed_is_an_error_that_names_it(options):
    masters = {"split": ["master_low"], "f32": ["master_param"]}.get(options.get("master"), [])
    for what in ("parameter", "gradient", "exp_avg_sq", *masters):
        param = torch.nn.Parameter(torch.ones(50, dtype=torch.bfloat16))
        optimizer = own.AdamW([param], **options)
        param.grad = torch.ones_like(param)
        optimizer.step()
        param.grad = torch.ones_like(param)
        tensor = {"parameter": param, "gradient": param.grad}.get(what)
        tensor = optimizer.state[param][what] if tensor is None else tensor
        tensor.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=r"params'\]\[0\](: its storage is shorter than the tensor|\.grad: is NULL)"):
            optimizer.step()
        if what in ("parameter", *masters):
            with pytest.raises(ValueError, match="storage is shorter"):
                optimizer.master(param)


def test_low_bits_that_are_freed_while_averaged_weights_are_copied_in_are_named_by_the_step():
    param = torch.nn.Parameter(torch.full((50,), 1.0, dtype=torch.bfloat16))
    optimizer = own.AdamW([param], lr=1e-4, master="split")
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.data.mul_(2.0)
    optimizer.state_dict()
    optimizer.state[param]["master_low"].untyped_storage().resize_(0)
    optimizer.state_dict()
    with pytest.raises(ValueError, match=r"params'\]\[0\](: its storage is shorter than the tensor|\.grad: is NULL)"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "cls, options, key",
    [
        (own.AdamW, {}, "exp_avg_sq"),
        (own.Adam, {}, "exp_avg"),
        (own.AdamW, {}, "step"),
        (own.AdamW, {"amsgrad": True}, "max_exp_avg_sq"),
        (own.Adagrad, {}, "sum"),
    ],
)
def test_a_state_that_lacks_a_part_names_its_parameter_in_the_share_of_the_library_and_of_torch(cls, options, key, dtype):
    params = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2)]
    optimizer = cls(params, **options)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    del optimizer.state[params[1]][key]
    before = [param.detach().clone() for param in params]
    with pytest.raises(spillway.InvalidArgumentError, match=rf"^param_groups\[0\]\['params'\]\[1\]: its state lacks '{key}'; load"):
        optimizer.step()
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize("what", ["exp_avg", "exp_avg_sq", "master_param"])
@pytest.mark.parametrize("written", [False, True])
def test_a_state_of_offload_that_was_freed_is_an_error_that_names_it(what, written):
    param = torch.nn.Parameter(torch.ones(50, dtype=torch.bfloat16))
    optimizer = own.offload([param], lr=1e-3)
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
        # The memory of the program's own tensor can be freed.
        optimizer.state[param][what] = optimizer.state[param][what].clone()
    optimizer.state[param][what].untyped_storage().resize_(0)
    if written:
        param.data.mul_(2.0)
    param.grad = torch.ones_like(param)
    before = param.detach().clone()
    with pytest.raises(ValueError, match=rf"the state '{what}' of parameter 0 is no longer"):
        optimizer.step()
    assert torch.equal(param, before)
    optimizer.close()
