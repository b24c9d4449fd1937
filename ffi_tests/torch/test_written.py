"""What a program writes to parameters, gradients and states ends as with torch's own class: each way of writing, in each home of weights
and states, at each moment. `python ffi_tests/torch/written.py FIRST COUNT` runs random programs of such writes."""

import copy
import random

import pytest
import random_programs
import sampled
import torch
import written
from torch.nn.utils import parametrizations
from written import GRADIENT, HELD, HOMES, MOMENTS, PARAMETER, STATE, Refused, run

import spillway._written
from spillway import torch as own
from spillway._device_sums import device_sums

SHAPES = [(7, 5), (64,), (110, 110), (3,)]
NAMES = ("layers.0.first", "stays.first")
#: Homes in which the next forward completes a step.
LATER = [name for name, home in HOMES.items() if home.later]


def cell(home, moment, what, way, values=("negated", "reversed"), **given):
    number = MOMENTS.index(moment)
    events = [(what, way, name, value) for name, value in zip(NAMES, values)]
    run(home, SHAPES, {(min(number, 1), moment): events}, steps=3, seed=number, **given)


@pytest.mark.sampled(cases=100)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("home", HOMES)
def test_parameters_that_the_program_writes_end_as_with_torchs_class(home, moment):
    for way in PARAMETER:
        cell(home, moment, "parameter", way)


@pytest.mark.parametrize("home", HOMES)
def test_gradients_that_the_program_writes_end_as_with_torchs_class(home):
    for way in GRADIENT:
        cell(home, "between backward and step", "gradient", way)


@pytest.mark.sampled(cases=47)
@pytest.mark.parametrize("moment", ["between steps", "between backward and step", "between forwards"])
@pytest.mark.parametrize("home", [name for name, home in HOMES.items() if home.states])
def test_states_that_the_program_writes_end_as_with_torchs_class(home, moment):
    for way in STATE:
        cell(home, moment, "state", way)


@pytest.mark.sampled(cases=65)
@pytest.mark.parametrize("way", PARAMETER)
@pytest.mark.parametrize("home", LATER)
def test_a_write_through_the_module_before_the_forward_that_completes_a_step_ends_as_with_torchs_class(home, way):
    for values in (("negated", "reversed"), ("constant", "constant")):
        cell(home, "between step and forward", "parameter", way, values, manner="module")


@pytest.mark.parametrize("way", HELD)
@pytest.mark.parametrize("home", LATER)
def test_a_write_through_a_held_tensor_before_the_forward_that_completes_a_step_is_an_error_of_that_forward(home, way):
    with pytest.raises(Refused, match=written.WRITTEN):
        cell(home, "between step and forward", "parameter", way, manner="held")


@pytest.mark.parametrize("home", [name for name, home in HOMES.items() if home.dtype is torch.float32])
def test_functional_calls_and_parametrizations_see_what_the_program_writes(home):
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(parametrizations.weight_norm(torch.nn.Linear(12, 12)) for _ in range(3))
    control = torch.nn.Sequential(*layers, torch.nn.Linear(12, 4))
    model, x = copy.deepcopy(control), torch.randn(5, 12)
    expected = torch.optim.AdamW(control.parameters(), **written.OPTIONS)
    with HOMES[home].place():
        optimizer = HOMES[home].make(model)
        for step in range(4):
            losses = []
            for one, steps in ((control, expected), (model, optimizer)):
                value = torch.full((12, 12), 0.5 + step)
                if step == 1:
                    one[1].weight = value
                if step == 2:
                    getattr(steps, "settle", lambda: None)()
                    one[2].parametrizations.weight.original0.data.mul_(0.5)
                with torch.no_grad():
                    called = torch.func.functional_call(one, {"3.bias": torch.full((4,), 3.0)}, x)
                losses.append((one(x).square().mean(), called))
                losses[-1][0].backward()
                steps.step()
                for param in one.parameters():
                    param.grad = None
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
        getattr(optimizer, "settle", lambda: None)()
        for one, other in zip(control.parameters(), model.parameters()):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
        if hasattr(optimizer, "close"):
            optimizer.close()


def test_random_programs_of_writes_end_as_with_torchs_class():
    failures = random_programs.failures(written.failure, random.SystemRandom().randrange(1 << 40), 100_000, seconds=sampled.few(10, 60))
    assert not failures, "\n\n".join(failures)


# Sums.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.complex64])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (7, 5), (300,), (100, 333), (4, 3, 8, 8)])
def test_a_sum_changes_with_each_byte_of_a_tensor_and_with_nothing_else(shape, dtype):
    for layout in ("plain", "offset", "last"):
        memory = torch.randint(1, 100, shape).to(dtype)
        if layout == "offset":
            memory = torch.cat([memory.new_ones(1), memory.flatten()])[1:].view(shape)
        if layout == "last" and len(shape) == 4:
            memory = memory.contiguous(memory_format=torch.channels_last)
        (before,) = spillway._written.sums([memory])
        # Taken with others, the sum is the same.
        assert spillway._written.sums([torch.ones(3), memory, torch.ones(5)])[1] == before
        at = tuple(random.randrange(size) for size in shape)
        kept = memory[at].clone()
        memory[at] += 1
        assert spillway._written.sums([memory]) != [before]
        memory[at] = kept
        assert spillway._written.sums([memory]) == [before]


@pytest.mark.parametrize("count", [32, 64, 192, 20_000])
def test_negated_and_reversed_tensors_have_other_sums(count):
    for _ in range(50):
        tensor = torch.randn(count)
        before = spillway._written.sums([tensor])
        assert spillway._written.sums([-tensor]) != before != spillway._written.sums([tensor.flip(0)])


def test_an_exchange_of_neighbours_in_host_memory_is_seen():
    for count in (4, 100_000):
        tensor = torch.arange(count, dtype=torch.int64)
        (before,) = spillway._written.sums([tensor])
        tensor[[1, 2]] = tensor[[2, 1]]
        assert spillway._written.sums([tensor]) != [before]


def test_tensors_whose_memory_is_not_their_values_have_the_sums_of_their_values():
    plain = torch.randn(6, 4)
    some = [plain[::2], plain.t()[1:], torch._neg_view(plain), torch._efficientzerotensor(2, 3), torch.ones(3).expand(4, 3), plain[:0]]
    for tensor in some:
        values = torch.empty(tensor.shape).copy_(tensor)
        assert spillway._written.sums([tensor]) == spillway._written.sums([values])


CHANGES = {
    "negated": lambda tensor: tensor.neg_(),
    "reversed": lambda tensor: tensor.copy_(tensor.flip(0)),
    "moved by one": lambda tensor: tensor.copy_(tensor.roll(1)),
    "halves exchanged": lambda tensor: tensor.copy_(tensor.roll(tensor.numel() // 2)),
    "one word more, the next one less": lambda tensor: tensor[:4].view(torch.int16)[:2].add_(torch.tensor([1, -1], dtype=torch.int16)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_of_a_device_sees_changes_that_keep_the_plain_sum(dtype, change):
    """Sums on a device, taken of tensors in host memory. They do not depend on the tensors beside."""

    def of(*tensors):
        return [int(found) for found in device_sums([tensor.view(-1).view(torch.uint8) for tensor in tensors])]

    source = torch.Generator().manual_seed(3)
    for size in [4, 8, 64, 1000, 10_000, 70_001, 140_000] * 5:
        tensor, beside = torch.randn(size, generator=source).to(dtype), torch.randn(77, generator=source)
        (before,) = of(tensor)
        assert of(beside, tensor, beside[:5].clone())[1] == before
        changed = tensor.clone()
        CHANGES[change](changed)
        assert of(changed) != [before], size


def test_training_with_weights_that_flow_takes_no_sums(monkeypatch):
    torch.manual_seed(0)
    model = written.Model(SHAPES)
    flow = own.Flow(model, "cpu", keep_bytes=None)
    optimizer, taken = torch.optim.AdamW(model.parameters()), []
    monkeypatch.setattr("spillway.torch._offload.flow.sums", lambda tensors: [taken.append(tensor) for tensor in tensors])
    for _ in range(3):
        model([torch.ones(shape) for shape in SHAPES]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not taken
    flow.remove()
