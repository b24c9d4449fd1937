"""States on a tier: what is refused, with which words, and what a refused call leaves."""

import copy
import os

import pytest
import torch
from tier_runs import same_states, tier, train
from tier_worker import options, parameters, random_grads

import spillway
from spillway import torch as own


def test_another_model_is_refused_and_the_tier_keeps_its_commit(tier):
    params = parameters()
    optimizer = own.AdamW(params, lr=1e-2, tier=tier)
    train(optimizer, params, range(2))
    optimizer.commit()
    states = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.close()
    name = r"param_groups\[0\]\['params'\]\[2\] \(third\)"
    names = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh"]

    def changed(number, param):
        made = parameters()
        made[number] = param
        return list(zip(names, made))

    cases = [
        (
            changed(2, torch.nn.Parameter(torch.zeros(30_002, dtype=torch.bfloat16))),
            name + r" is torch.bfloat16 of shape \(30002,\); .*\(30001,\)",
        ),
        (changed(2, torch.nn.Parameter(torch.zeros(30_001))), name + " is torch.float32 of shape .* committed with torch.bfloat16"),
        (
            changed(2, torch.nn.Parameter(torch.zeros(1, 30_001, dtype=torch.bfloat16))),
            name + ".* pass the model of the run that committed",
        ),
        (list(zip(names, parameters()))[:6], "has 6 parameters, and the tier was committed with 7: parameter number 6"),
        ([*zip(names, parameters()), ("eighth", torch.nn.Parameter(torch.zeros(3)))], r"\(eighth\) is the first without a counterpart"),
    ]
    for given, words in cases:
        with pytest.raises(spillway.InvalidArgumentError, match=words):
            own.AdamW(given, lr=1e-2, tier=tier)
    again = own.Adam(parameters(), lr=1e-2, tier=tier)
    assert again.resumed_step == 2
    same_states(again.state_dict()["state"], states)


def test_a_tier_of_another_program_is_refused(tmp_path):
    with spillway.Tier([tmp_path], job="optimizer", durability="process") as tier:
        tier.commit(step=3, payload=b"mine")
    with pytest.raises(
        spillway.InvalidArgumentError, match="no optimizer of spillway.torch has committed; pass other paths or another job"
    ):
        own.AdamW(parameters(), tier=options(tmp_path))
    with spillway.Tier([tmp_path], job="optimizer") as tier:
        assert tier.opened.payload == b"mine"


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda p, tier: own.AdamW(p, tier=tier, undo=True), "AdamW: undo cannot be combined with tier"),
        (lambda p, tier: own.AdamW(p, tier=tier, master="split"), 'float16, and master="split" is for torch.bfloat16'),
        (lambda p, tier: own.AdamW(p, tier=tier, amsgrad=True), "amsgrad cannot be combined with tier"),
        (lambda p, tier: own.Adam([{"params": p, "amsgrad": True}], tier=tier), "amsgrad cannot be combined with tier"),
        (lambda p, tier: own.Adagrad(p, tier=tier), "Adagrad: states on a tier are for Adam and AdamW"),
        (lambda p, tier: own.Lion(p, tier=tier), "Lion: states on a tier are for Adam and AdamW"),
        (lambda p, tier: own.Signum(p, tier=tier), "Signum: states on a tier are for Adam and AdamW"),
        (
            lambda p, tier: own.AdamW(p, host_memory=1 << 30),
            "host_memory is a limit for states on a tier, and of spillway.torch.offload; pass tier",
        ),
        (lambda p, tier: own.AdamW(p, tier=tier._replace(part_elements=0)), "part_elements is 0"),
        (lambda p, tier: own.AdamW(p, tier=tier._replace(resume="yes")), "resume"),
        (lambda p, tier: own.AdamW(p, tier=tier._replace(resume="resume")), "committed|state"),
        (lambda p, tier: own.AdamW(p, tier="/nonexistent/nvme"), "/nonexistent/nvme"),
        (
            lambda p, tier: own.AdamW([*p, torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))], tier=tier),
            r"\['params'\]\[7\] is torch.float64 on cpu .* parameters of 16 or 32 bits",
        ),
        (
            lambda p, tier: own.AdamW([torch.nn.Parameter(torch.zeros(3, device="meta"))], tier=tier),
            r"\['params'\]\[0\] is torch.float32 on meta",
        ),
        (lambda p, tier: own.AdamW([torch.nn.Parameter(torch.zeros(3, 4)[:, :2])], tier=tier), r"\['params'\]\[0\] .* strides \(4, 1\)"),
    ],
    ids=range(15),
)
def test_what_cannot_be_combined_is_refused_at_construction(tier, make, words):
    with pytest.raises((spillway.SpillwayError, ValueError), match=words):
        make(parameters(), tier)
    own.AdamW(parameters(), tier=tier).close()


def refused(optimizer, params, error, words):
    before = [param.detach().clone() for param in params]
    with pytest.raises(error, match=words):
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(params, before, strict=True))


def test_bad_input_names_the_parameter_and_steps_nothing(tier):
    names = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh"]
    params = parameters()
    optimizer = own.AdamW(list(zip(names, params)), lr=1e-2, tier=tier)
    train(optimizer, params, range(2))
    states = copy.deepcopy(optimizer.state_dict()["state"])
    invalid, unsupported, name = spillway.InvalidArgumentError, spillway.UnsupportedError, r"param_groups\[0\]\['params'\]\[6\] \(seventh\)"
    old = params[6].data
    params[6].grad = None
    params[6].data = old[:10].clone()
    params[6].grad = torch.zeros(10)
    refused(optimizer, params, invalid, name + r" has shape \(10,\), and its states on the tier have \(9000,\); construct")
    params[6].grad, params[6].data = None, old
    params[6].grad = torch.zeros(9000).to_sparse()
    refused(optimizer, params, unsupported, name + ": states on a tier need dense tensors")
    params[6].grad = torch.zeros(9000)
    optimizer.param_groups[0]["amsgrad"] = True
    refused(optimizer, params, unsupported, "without amsgrad")
    optimizer.param_groups[0]["amsgrad"] = False
    optimizer.param_groups[0]["params"][6] = torch.nn.Parameter(torch.zeros(9000))
    optimizer.param_groups[0]["params"][6].grad = torch.zeros(9000)
    refused(optimizer, params, invalid, name + " is not one of the parameters that the optimizer was constructed with")
    optimizer.param_groups[0]["params"][6] = params[6]
    params[0].grad = params[6].data[:320].view(40, 8)
    refused(optimizer, params, invalid, r"overlaps|first")
    with pytest.raises(unsupported, match="add_param_group: the layout of states on a tier is fixed"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    saved = copy.deepcopy(optimizer.state_dict())
    same_states(saved["state"], states)
    saved["state"][6]["exp_avg"] = torch.zeros(8999)
    with pytest.raises(invalid, match=name + r" has shape \(9000,\), its saved state 'exp_avg' \(8999,\); .* nothing was loaded"):
        optimizer.load_state_dict(saved)
    del saved["state"][6]["exp_avg"]
    with pytest.raises(invalid, match=name + ": its saved state lacks 'exp_avg'"):
        optimizer.load_state_dict(saved)
    same_states(optimizer.state_dict()["state"], states)
    train(optimizer, params, [2])


CLEARED = {
    "all": lambda state, param: state.clear(),
    "one": lambda state, param: state.pop(param),
    "its dict": lambda state, param: state[param].clear(),
    "another dict": lambda state, param: state.update({param: {}}),
    "no dict": lambda state, param: state.update({param: 3}),
}


@pytest.mark.parametrize("how", CLEARED)
def test_a_state_that_the_program_removed_is_named_and_a_rollback_restores_it(tier, how):
    params = parameters()
    optimizer = own.AdamW(params, lr=1e-2, tier=tier)
    train(optimizer, params, [0])
    optimizer.commit()
    committed, saved = [param.clone() for param in params], optimizer.state_dict()
    for restore in (optimizer.rollback, lambda: optimizer.load_state_dict(saved)):
        CLEARED[how](optimizer.state, params[0])
        random_grads(params, 1)
        words = r"param_groups\[0\]\['params'\]\[0\].*: optimizer.state has no step count for it.*; call rollback\(\) to return"
        refused(optimizer, params, spillway.InvalidArgumentError, words)
        for call in (optimizer.commit, optimizer.state_dict):
            with pytest.raises(spillway.InvalidArgumentError, match=words):
                call()
        restore()
        assert all(map(torch.equal, params, committed)) and all(float(optimizer.state[param]["step"]) == 1 for param in params)
    train(optimizer, params, [1])


@pytest.mark.parametrize("tiered", [False, True])
def test_a_group_without_an_option_is_named_with_it(tier, tiered):
    params = parameters()
    optimizer = own.AdamW(params, lr=1e-2, **({"tier": tier} if tiered else {}))
    random_grads(params, 0)
    for option in ("lr", "betas", "eps"):
        value = optimizer.param_groups[0].pop(option)
        refused(
            optimizer, params, spillway.InvalidArgumentError, rf"param_groups\[0\] has no option '{option}'; set it; nothing was stepped"
        )
        optimizer.param_groups[0][option] = value
    optimizer.param_groups[0]["lr"] = None
    refused(
        optimizer, params, spillway.InvalidArgumentError, r"param_groups\[0\]: lr is not a number: .*; set a number; nothing was stepped"
    )


def test_locks_copies_and_closed_optimizers(tier):
    params = parameters()
    optimizer = own.AdamW(params, lr=1e-2, tier=tier)
    with pytest.raises(spillway.errors.TierLockedError):
        own.AdamW(parameters(), tier=tier)
    for way in (copy.deepcopy, copy.copy):
        with pytest.raises(TypeError, match="with states on a tier cannot be copied or pickled"):
            way(optimizer)
    train(optimizer, params, [0])
    with pytest.raises(spillway.InvalidArgumentError, match="payload is of type str; pass bytes"):
        optimizer.commit(payload="text")
    optimizer.commit()
    optimizer.close()
    random_grads(params, 1)
    refused(optimizer, params, spillway.InvalidArgumentError, "this AdamW is closed; open a new one")
    for call in (optimizer.commit, optimizer.rollback, optimizer.state_dict, lambda: optimizer.master(params[0])):
        with pytest.raises(spillway.InvalidArgumentError, match="this AdamW is closed; open a new one"):
            call()
    plain = own.AdamW(params)
    plain.close()
    with pytest.raises(
        spillway.InvalidArgumentError, match="AdamW.commit: the states are in host memory; construct the optimizer with tier"
    ):
        plain.commit()


def test_a_step_whose_states_cannot_be_read_names_the_file(tmp_path):
    params = [torch.nn.Parameter(torch.randn(60_000)) for _ in range(4)]
    optimizer = own.AdamW(params, lr=1e-2, tier=own.TierOptions(tmp_path, part_elements=20_000, pin_memory=False))
    assert optimizer._home.tiered.swap.budget.cached < 12
    train(optimizer, params, range(2))
    optimizer.commit()
    data = next(path for path in tmp_path.rglob("data") if path.is_file())
    os.truncate(data, 4096)
    random_grads(params, 2)
    with pytest.raises(spillway.IoError, match=str(data)):
        optimizer.step()
    with pytest.raises(spillway.BusyError, match="the last step failed; roll back first"):
        optimizer.step()
    with pytest.raises(spillway.IoError, match=str(data)):
        optimizer.rollback()
    optimizer.close()


def test_several_processes_need_torch_distributed(tmp_path):
    with pytest.raises(spillway.InvalidArgumentError, match="world is 2, and torch.distributed is not initialized; call"):
        own.AdamW(parameters(), tier=own.TierOptions([tmp_path], world=2))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("kind", ["resume", "begin_from"])
@pytest.mark.parametrize("wrapped", ["", "_orig_mod.", "module."])
def test_parameters_of_one_shape_in_another_order_are_refused_by_their_names(tmp_path, kind, wrapped):
    """Without names nothing tells them apart. A wrapper changes the names, and not the order."""

    def made(names, path, prefix="", **options):
        params = {name: torch.nn.Parameter(torch.full((5,), float(number))) for number, name in enumerate(names)}
        named = [(prefix + name, param) for name, param in params.items()]
        tier = own.TierOptions([path], job="order", pin_memory=False, **options)
        return params, own.AdamW(named, lr=1e-2, tier=tier)

    def options():
        return {"begin_from": tmp_path / "one" / "order"} if kind == "begin_from" else {}

    path = tmp_path / ("one" if kind == "resume" else "two")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    params, optimizer = made(["first", "second"], tmp_path / "one")
    if "param_names" not in optimizer.param_groups[0]:
        pytest.skip("this version of torch keeps no names of parameters")
    for param in params.values():
        param.grad = torch.ones(5)
    optimizer.step()
    optimizer.commit()
    optimizer.close()
    with pytest.raises(spillway.InvalidArgumentError, match=r"second\) stands where .* has 'first'; pass the parameters in the order"):
        made(["second", "first"], path, wrapped, **options())
    again, resumed = made(["first", "second"], path, wrapped, **options())
    assert all(torch.equal(again[name], params[name]) for name in params)
    resumed.close()
