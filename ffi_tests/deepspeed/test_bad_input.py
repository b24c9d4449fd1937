"""Proves that bad input to the op modules raises a typed error that names the argument and the reason, and that
nothing is written. For the same input, DeepSpeed's own ops crash, read past the end or silently train nothing."""

import itertools

import pytest
import torch

import spillway

_ids = itertools.count(3_000_000)
_HYPER = {"cpu_adam": (1e-3, 0.9, 0.999, 1e-8, 0.0, True), "cpu_adagrad": (1e-2, 1e-8, 0.0), "cpu_lion": (1e-4, 0.9, 0.99, 0.0)}
_CREATE = {
    "cpu_adam": (1e-3, 0.9, 0.999, 1e-8, 0.0, True, False),
    "cpu_adagrad": (1e-2, 1e-8, 0.0, False),
    "cpu_lion": (1e-4, 0.9, 0.99, 0.0, False),
}
_NAMES = {
    "cpu_adam": ("params", "grads", "exp_avg", "exp_avg_sq"),
    "cpu_adagrad": ("params", "grads", "exp_avg_sq"),
    "cpu_lion": ("params", "grads", "exp_avg"),
}

WRONG = {
    "float64": (lambda t: t.double(), "has dtype float64"),
    "int": (lambda t: t.int(), "has dtype int32"),
    "strided": (lambda t: torch.ones(64)[::2], "not contiguous"),
    "transposed": (lambda t: torch.ones(4, 8).t(), "not contiguous"),
    "other device": (lambda t: t.to("meta"), "on device meta"),
    "sparse": (lambda t: t.to_sparse(), "sparse"),
    "list": (lambda t: t.tolist(), "is a list"),
    "none": (lambda t: None, "NoneType"),
}
WRONG_LENGTH = {
    "short": (lambda t: t[:31].clone(), "(31,)"),
    "long": (lambda t: torch.ones(33), "(33,)"),
    "empty": (lambda t: torch.ones(0), "(0,)"),
}


class Op:
    """One op with one live id."""

    def __init__(self, module, name):
        self.name, self.short, self.id = name, name.removeprefix("cpu_"), next(_ids)
        self._module = module
        self.create()

    def create(self):
        return getattr(self._module, f"create_{self.short}")(self.id, *_CREATE[self.name])

    def destroy(self):
        return getattr(self._module, f"destroy_{self.short}")(self.id)

    def update(self, tensors, step=1, optimizer_id=None):
        optimizer_id = self.id if optimizer_id is None else optimizer_id
        return getattr(self._module, f"{self.short}_update")(optimizer_id, step, *_HYPER[self.name], *tensors)

    def tensors(self, n=32):
        return [torch.full((n,), 0.5) for _ in _NAMES[self.name]]

    def refuses(self, kind, reason, tensors, **call):
        before = [snapshot(t) for t in tensors]
        with pytest.raises(kind) as caught:
            self.update(tensors, **call)
        assert reason in str(caught.value)
        assert isinstance(caught.value, spillway.SpillwayError) and caught.value.status == kind.status
        assert [snapshot(t) for t in tensors] == before
        return str(caught.value)


def snapshot(tensor):
    if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.device.type == "cpu":
        return bytes(tensor.contiguous().view(torch.uint8).numpy())
    return None


@pytest.fixture(params=list(_NAMES))
def op(request, served):
    made = Op(served(request.param), request.param)
    yield made
    made.destroy()


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_tensor_in_any_place(op, case):
    spoil, reason = WRONG[case]
    for place, name in enumerate(_NAMES[op.name]):
        tensors = op.tensors()
        tensors[place] = spoil(tensors[place])
        assert op.refuses(spillway.InvalidArgumentError, reason, tensors).startswith(name)


@pytest.mark.parametrize("case", WRONG_LENGTH)
def test_a_wrong_length_in_any_place_but_the_first(op, case):
    spoil, reason = WRONG_LENGTH[case]
    for place, name in list(enumerate(_NAMES[op.name]))[1:]:
        tensors = op.tensors()
        tensors[place] = spoil(tensors[place])
        assert op.refuses(spillway.InvalidArgumentError, reason, tensors).startswith(name)


def test_dtypes_that_do_not_go_together(op):
    half_state = op.tensors()
    half_state[2:] = [t.half() for t in half_state[2:]]
    op.refuses(spillway.UnsupportedError, "state f16", half_state)
    float_grad = op.tensors()
    float_grad[0] = float_grad[0].bfloat16()
    op.refuses(spillway.UnsupportedError, "param bf16", float_grad)


def test_moments_of_two_dtypes(served):
    adam = Op(served("cpu_adam"), "cpu_adam")
    tensors = [t.half() for t in adam.tensors()]
    tensors[3] = tensors[3].float()
    adam.refuses(spillway.InvalidArgumentError, "exp_avg_sq has another dtype", tensors)


def test_a_16_bit_gradient_of_a_float32_parameter_is_read_as_what_it_is(served):
    """DeepSpeed reads the memory as float32, past its end."""
    adam = Op(served("cpu_adam"), "cpu_adam")
    mixed, plain = adam.tensors(1000), adam.tensors(1000)
    mixed[1] = mixed[1].bfloat16()
    adam.update(mixed)
    adam.update(plain)
    assert torch.equal(mixed[0], plain[0])


def test_overlapping_tensors(op):
    tensors = op.tensors()
    tensors[2] = tensors[0]
    op.refuses(spillway.InvalidArgumentError, "overlap", tensors)


def test_an_unknown_id_is_an_error_and_no_crash(op):
    op.refuses(spillway.UnknownIdError, "does not exist", op.tensors(), optimizer_id=-12345)


def test_a_destroyed_id_is_unknown_until_it_is_created_again(op):
    assert op.destroy() == 0
    op.refuses(spillway.UnknownIdError, str(op.id), op.tensors())
    assert op.destroy() == 0
    assert op.create() == 0 and op.update(op.tensors()) == 0


@pytest.mark.parametrize(
    "step, reason", [(0, "step"), (-1, "step is -1"), (1 << 64, "step is"), (1.5, "step is 1.5"), (None, "step is None")]
)
def test_a_wrong_step(op, step, reason):
    op.refuses(spillway.InvalidArgumentError, reason, op.tensors(), step=step)


@pytest.mark.parametrize("wrong", [1 << 31, -(1 << 31) - 1, "0", 0.5])
def test_a_wrong_id(op, wrong):
    op.refuses(spillway.InvalidArgumentError, "optimizer_id", op.tensors(), optimizer_id=wrong)


def test_a_wrong_hyper_parameter_is_named(served):
    with pytest.raises(spillway.InvalidArgumentError, match="betta1 is 'x'"):
        served("cpu_adam").create_adam(1, 1e-3, "x", 0.999, 1e-8, 0.0, True, False)


def test_numbers_may_be_whatever_converts(served):
    """DeepSpeed's binding accepts any object with __index__ and __float__; Spillway's binding does too."""
    adam = Op(served("cpu_adam"), "cpu_adam")
    ours, plain = adam.tensors(), adam.tensors()
    served("cpu_adam").adam_update(adam.id, torch.tensor(1), torch.tensor(1e-3), 0.9, torch.tensor(0.999), 0, 0, 1, *ours)
    served("cpu_adam").adam_update(adam.id, 1, float(torch.tensor(1e-3)), 0.9, float(torch.tensor(0.999)), 0.0, 0.0, True, *plain)
    assert all(torch.equal(one, other) for one, other in zip(ours, plain))
    assert not torch.equal(ours[0], adam.tensors()[0]), "the step changes the parameters"


def test_arguments_have_no_names_and_no_defaults_as_in_deepspeed(served):
    with pytest.raises(TypeError):
        served("cpu_adam").create_adam(1)
    with pytest.raises(TypeError):
        served("cpu_adam").destroy_adam(optimizer_id=1)


def test_empty_tensors_are_a_step_of_nothing(op):
    assert op.update(op.tensors(0)) == 0


def test_every_function_of_the_compiled_module_is_there_and_those_not_served_name_themselves(served, compiled):
    for name in _NAMES:
        ours, theirs = served(name), compiled(name)
        missing = {function for function in dir(theirs) if not function.startswith("_")} - set(dir(ours))
        assert not missing
    for name, function in (("cpu_adam", "adam_update_copy"), ("cpu_lion", "lion_update_copy"), ("cpu_adagrad", "adagrad_update_copy")):
        with pytest.raises(spillway.UnsupportedError, match=f"{name} has no {function}: "):
            getattr(served(name), function)(0, 1)
