"""What spillway.torch.offload refuses, before anything is stepped or loaded."""

import copy
import functools
import gc
import math
import os
import pathlib
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from offload_runs import Later, backward, offload, trained, values
from torch.testing._internal.distributed.fake_pg import FakeStore

import spillway
import spillway.torch
from spillway import _arguments
from spillway.torch._copies import HostLink
from spillway.torch._offload import bucket as bucket_module
from spillway.torch._offload import slot as slot_module


def test_nothing_is_stepped_if_a_gradient_has_nan():
    model = torch.nn.Linear(8, 8)
    optimizer = offload(model, lr=1e-2, max_norm=1.0)
    for _ in range(2):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()], copy.deepcopy(optimizer.state_dict()["state"])
    (model(torch.randn(2, 8)).sum() * math.nan).backward()
    with pytest.raises(spillway.InvalidArgumentError, match="parameter 0 has Inf or NaN; nothing was stepped"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before[0]))
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[key][name], before[1][key][name]) for key in after for name in after[key])


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"kind": torch.optim.SGD}, spillway.UnsupportedError, "kind is"),
        ({"max_norm": -1.0}, spillway.InvalidArgumentError, "max_norm is -1.0"),
        ({"max_norm": 0}, spillway.InvalidArgumentError, "max_norm is 0"),
        ({"process_group": 3}, spillway.InvalidArgumentError, "process_group is 3"),
        ({"max_norm": True}, spillway.InvalidArgumentError, "max_norm is True"),
        ({"max_norm": "1"}, spillway.InvalidArgumentError, "max_norm is '1'"),
        ({"skip_nonfinite": "x"}, spillway.InvalidArgumentError, "skip_nonfinite is 'x'"),
        ({"bucket_bytes": 0}, spillway.InvalidArgumentError, "bucket_bytes is 0"),
        ({"tail": -1}, spillway.InvalidArgumentError, "tail is -1; pass a number of buckets"),
        ({"tail": True}, spillway.InvalidArgumentError, "tail is True"),
        ({"verdict": "backward"}, spillway.InvalidArgumentError, "verdict is 'backward'; pass 'step' or 'forward'"),
        ({"verdict": "forward", "model": 3}, spillway.InvalidArgumentError, "model is 3; pass model="),
        ({"amsgrad": True}, spillway.UnsupportedError, "amsgrad is not served"),
        ({"betas": (2.0, 0.9)}, ValueError, "beta"),
        ({"undo": True}, TypeError, "undo"),
        ({"max_grad_norm": 1.0}, TypeError, "max_grad_norm.*did you mean 'max_norm'"),
        ({"moment_type": "int8"}, TypeError, "moment_type.*did you mean 'moment_dtype'"),
    ],
)
def test_arguments_that_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        offload(torch.nn.Linear(2, 2), **options)


def test_an_optimizer_is_no_model():
    with pytest.raises(spillway.InvalidArgumentError, match=r"pass the model or its parameters, and the class: offload\(model, SGD"):
        offload(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0))


@pytest.mark.parametrize("step", [math.nan, -1.0, 2.5, "3"])
def test_a_step_count_that_is_none_is_not_loaded(step):
    params = [torch.nn.Parameter(torch.ones(5))]
    optimizer = offload(params)
    backward(params)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = step
    with pytest.raises(spillway.InvalidArgumentError, match="whole number from 0 on; nothing was loaded"):
        optimizer.load_state_dict(saved)
    assert float(optimizer.state[params[0]]["step"]) == 1


def test_parameters_that_are_refused():
    for param in (torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.complex64)):
        with pytest.raises(spillway.UnsupportedError, match="float32, bfloat16 and float16"):
            offload([torch.nn.Parameter(param)])
    with pytest.raises(spillway.UnsupportedError, match="after model.to_empty"):
        offload(torch.nn.Linear(2, 2, device="meta"))
    table = torch.nn.Embedding(4, 4, sparse=True)
    optimizer = offload(table)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(spillway.InvalidArgumentError, match="sparse"):
        optimizer.step()
    assert not optimizer.state_dict()["state"]


@pytest.mark.parametrize("weights", ["resident", "flow"])
@pytest.mark.parametrize("verdict", ["step", "forward"])
def test_parameters_that_require_no_gradient_may_have_any_dtype_and_place(weights, verdict):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    dtypes = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.complex64, torch.float64, torch.int64)
    for number, dtype in enumerate(dtypes):
        model[number % 2].register_parameter(f"frozen{number}", torch.nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False))
    model[0].empty = torch.nn.Parameter(torch.empty(3, device="meta"), requires_grad=False)
    model[1].packed = Packed(torch.ones(3, dtype=torch.uint8))
    flowing = {} if weights == "resident" else {"weights": weights, "device": "cpu"}
    optimizer = offload(model, lr=0.1, max_norm=1.0, verdict=verdict, **flowing)
    before = values(model[number].weight for number in range(2))
    for _ in range(2):
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.settle()
    assert not any(map(torch.equal, before, (model[0].weight, model[1].weight)))
    assert type(model[1].packed) is Packed and model[0].empty.is_meta
    optimizer.load_state_dict(optimizer.state_dict())
    model[0].frozen4.requires_grad_(True)
    with pytest.raises(spillway.UnsupportedError, match="float64"):
        optimizer.step()


class Packed(torch.nn.Parameter):
    """Stands in for the parameters of libraries that quantise: of a class of their own, and frozen."""

    def __new__(cls, data):
        return torch.Tensor._make_subclass(cls, data, False)


def test_weights_that_flow_find_frozen_ones_of_other_classes_on_the_device():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3))
    model[0].packed = Packed(torch.ones(3, dtype=torch.uint8))
    with pytest.raises(spillway.InvalidArgumentError, match="0.packed is a Packed.*it is frozen: move it to meta before"):
        spillway.torch.Flow(model, "meta")


def test_weights_that_flow_have_no_averages_of_distributed_data_parallel():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.nn.Sequential(torch.nn.Linear(4, 4)))
    flow, x = spillway.torch.Flow(model, "cpu"), torch.ones(2, 4)
    try:
        wrapper = torch.nn.parallel.DistributedDataParallel(model)
        with pytest.raises(spillway.UnsupportedError, match="DistributedDataParallel averages no gradients of weights that flow"):
            wrapper(x)
        with torch.no_grad():
            assert torch.equal(wrapper(x), model(x))
        with wrapper.no_sync():
            wrapper(x).sum().backward()
    finally:
        flow.remove()
        torch.distributed.destroy_process_group()


def test_a_model_without_layers_names_the_cure():
    with pytest.raises(spillway.InvalidArgumentError, match=r"spillway.torch.Flow\(model, device, units=\[...\]\).*without weights="):
        offload(torch.nn.Linear(3, 3), weights="flow", device="cpu")


@pytest.mark.parametrize(
    "option, value, words",
    [
        ("lr", None, r"param_groups\[1\]: lr is not a number: .*nothing was stepped"),
        ("lr", "x", r"param_groups\[1\]: lr is not a number: "),
        ("lr", -1.0, r"param_groups\[1\], option lr"),
        ("betas", (0.9, 2.0), r"param_groups\[1\], option beta"),
        ("eps", math.nan, r"param_groups\[1\], option eps"),
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_an_option_that_is_none_is_an_error_of_step_that_names_the_group(option, value, words, later, monkeypatch):
    if later:
        link = Later()
        monkeypatch.setattr("spillway.torch._offload.slot.link_to", lambda param: link)
    params = [torch.nn.Parameter(torch.ones(5)) for _ in range(2)]
    optimizer = offload([{"params": [param]} for param in params], lr=0.1, bucket_bytes=1)
    backward(params)
    optimizer.step()
    optimizer.zero_grad()
    before, kept = values(params), optimizer.param_groups[1][option]
    optimizer.param_groups[1][option] = value
    backward(params)
    with pytest.raises(spillway.InvalidArgumentError, match=words):
        optimizer.step()
    assert all(map(torch.equal, params, before))
    optimizer.param_groups[1][option] = kept
    optimizer.step()
    assert [int(optimizer.state[param]["step"]) for param in params] == [2, 2]


def test_an_error_in_the_thread_of_the_copies_is_one_of_step(monkeypatch):
    """The last parameter is copied by a thread, and backward waits for that thread where the next one needs no copy."""
    link = Later()
    monkeypatch.setattr(slot_module, "link_to", lambda param: link if param.numel() == 5 else HostLink())
    params, optimizer = trained(3, 4, 5, bucket_bytes=1)
    before = values(params)
    with pytest.MonkeyPatch.context() as patch:
        # An error that arises in the package: no function of this file calls it.
        patch.setattr(bucket_module.Bucket, "_rows", property(lambda bucket: functools.partial(_arguments.real, "bucket")))
        backward(params)
        with pytest.raises(spillway.InvalidArgumentError, match="bucket is"):
            optimizer.step()
    assert all(map(torch.equal, params, before))
    optimizer.step()
    assert int(optimizer.state[params[0]]["step"]) == 3


def test_no_copy_of_an_optimizer_is_made():
    optimizer = offload(torch.nn.Linear(2, 2))
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="state_dict"):
            make(optimizer)


@pytest.mark.parametrize(
    "name, value", [("step", 3), ("exp_avg", torch.zeros(2)), ("exp_avg_sq", None), ("exp_avg", torch.zeros(3).double())]
)
def test_a_state_that_does_not_fit_steps_nothing(name, value):
    params, optimizer = trained(3, 4)
    own, optimizer.state[params[0]][name] = optimizer.state[params[0]][name], value
    before = values(params)
    backward(params)
    with pytest.raises(spillway.InvalidArgumentError, match=f"the state '{name}' of parameter 0 is no longer"):
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(params, before))
    optimizer.state[params[0]][name] = own
    optimizer.step()
    assert [int(optimizer.state[param]["step"]) for param in params] == [3, 3]


@pytest.mark.parametrize(
    "damage, error",
    [
        (lambda given: given["param_groups"][0].update(amsgrad=True), spillway.UnsupportedError),
        (lambda given: given["param_groups"][0].pop("betas"), spillway.InvalidArgumentError),
        (lambda given: given["state"][1].update(exp_avg=torch.zeros(1)), spillway.InvalidArgumentError),
        (lambda given: given["state"][1].pop("exp_avg_sq"), spillway.InvalidArgumentError),
        (lambda given: given["state"][1].update(step="x"), spillway.InvalidArgumentError),
        (lambda given: given["state"][1].update(exp_avg=None), spillway.InvalidArgumentError),
    ],
)
def test_a_dict_that_does_not_fit_loads_nothing(damage, error):
    params, optimizer = trained(3, 4)
    before = optimizer.state_dict()
    given = copy.deepcopy(before)
    given["state"][0]["exp_avg"] += 1
    damage(given)
    with pytest.raises(error):
        optimizer.load_state_dict(given)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(after["state"][key][name], before["state"][key][name]) for key in (0, 1) for name in before["state"][key])


def test_a_write_to_a_moment_that_is_stepped_is_an_error():
    params, optimizer = trained(3)
    held = optimizer.state[params[0]]["exp_avg"]
    backward(params)
    held.mul_(2)
    with pytest.raises(spillway.InvalidArgumentError, match="moments of parameter 0 were written between backward and step"):
        optimizer.step()


def test_an_option_out_of_range_does_not_end_backward():
    params, optimizer = trained(3, 4)
    optimizer.param_groups[0]["lr"] = -1.0
    before = values(params)
    backward(params)
    assert all(param.grad is not None for param in params)
    with pytest.raises(spillway.InvalidArgumentError, match="lr"):
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(params, before))
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(spillway.UnsupportedError, match="amsgrad"):
        optimizer.step()


def test_a_forked_child_is_told_whose_object_it_has():
    params = [torch.nn.Parameter(torch.ones(5))]
    optimizer = offload(params)
    backward(params)
    optimizer.step()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            optimizer.step()
        except spillway.UnsupportedError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as told:
        assert "this optimizer of offload() was opened by process" in told.read()
    os.waitpid(child, 0)
    optimizer.step()


def test_the_class_has_torchaos_name_too():
    params = [torch.nn.Parameter(torch.zeros(3))]
    one, other = spillway.torch.offload(params, torch.optim.Adam), spillway.torch.offload(params, optimizer_class=torch.optim.Adam)
    assert one.defaults == other.defaults != spillway.torch.offload(params).defaults
    with pytest.raises(spillway.InvalidArgumentError, match="optimizer_class are the same argument"):
        spillway.torch.offload(params, torch.optim.Adam, optimizer_class=torch.optim.Adam)


def test_a_pending_verdict_is_that_of_the_options_at_step():
    """What the program sets after step() is for the next one."""
    for name, value in (("skip_nonfinite", True), ("max_norm", None)):
        ends = []
        for verdict in ("step", "forward"):
            torch.manual_seed(0)
            model = torch.nn.Linear(3, 3)
            optimizer = offload(model, lr=0.1, verdict=verdict, model=model, **({"max_norm": 0.1} if name == "max_norm" else {}))
            model(torch.ones(2, 3)).sum().backward()
            if name == "skip_nonfinite":
                model.weight.grad[0, 0] = torch.nan
            optimizer.step()
            setattr(optimizer, name, value)
            optimizer.settle()
            ends.append((model.weight.detach().clone(), optimizer.skipped, optimizer.grad_norm))
        assert torch.equal(ends[0][0].nan_to_num(7.0), ends[1][0].nan_to_num(7.0)) and ends[0][1:] == ends[1][1:]


def test_a_closed_optimizer_has_given_its_memory_back_and_says_so():
    params, optimizer = trained(1000, 2000)
    memory = weakref.ref(next(iter(optimizer.state.values()))["exp_avg"])
    optimizer.close()
    gc.collect()
    assert memory() is None and not any(optimizer.memory().host.values())
    for use in (optimizer.step, optimizer.state_dict, lambda: optimizer.state, lambda: optimizer.load_state_dict({})):
        with pytest.raises(spillway.InvalidArgumentError, match="closed"):
            use()
    optimizer.close()


@pytest.mark.parametrize(
    "name, value", [("max_norm", "x"), ("max_norm", 0), ("skip_nonfinite", "no"), ("overlap", "x"), ("process_group", 3), ("flow", 3)]
)
def test_an_attribute_that_has_no_meaning_is_refused(name, value):
    optimizer = offload(torch.nn.Linear(2, 2))
    before = getattr(optimizer, name)
    with pytest.raises((spillway.InvalidArgumentError, AttributeError)):
        setattr(optimizer, name, value)
    assert getattr(optimizer, name) is before


FORKED = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch, spillway, offload_runs
from offload_runs import Later, offload
from spillway.torch._offload import slot

link = Later()
slot.link_to = lambda param: link
model = torch.nn.Linear(4, 4)
optimizer = offload(model, lr=0.1, max_norm=1.0, verdict="forward", model=model)
for moment in ("after backward", "after step"):
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.settle()
    model(torch.ones(1, 4)).sum().backward()
    if moment == "after step":
        optimizer.step()
    if os.fork() == 0:
        try:
            optimizer.step() if moment == "after backward" else optimizer.settle()
        except spillway.SpillwayError:
            optimizer.close()
            os._exit(7)
        os._exit(1)
    print(moment, os.waitstatus_to_exitcode(os.wait()[1]))
    if moment == "after backward":
        optimizer.step()
link.end()
os._exit(0)
"""


def test_a_forked_child_does_not_wait_for_a_thread_of_the_parent(tmp_path):
    """Its step is an error, and its close() does nothing."""
    (tmp_path / "run.py").write_text(FORKED)
    command = [sys.executable, tmp_path / "run.py", pathlib.Path(__file__).parent]
    path = str(pathlib.Path(spillway.__file__).parents[1])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert done.stdout == "after backward 7\nafter step 7\n", done.stderr
