"""Split masters on a tier: the bits of split masters in memory, through steps, writes of the program, commits, rollbacks and resumes."""

import copy
import random

import pytest
import torch
from offload_runs import Later, dtype_of, training
from offload_runs import same as equal
from sampled import SEED, few
from test_tier_overlap import Counted, tiered
from tier_runs import same, same_states, tier, train, values
from tier_worker import BF16_MOMENTS, CODED_MOMENTS, parameters, random_grads, wide_parameters

import spillway
from spillway import torch as own
from spillway.errors import InvalidArgumentError, UnsupportedError
from spillway.torch import _copies, dcp

assert tier
#: Keywords by the kind of moments.
KINDS = {"f32": {}, "bf16": BF16_MOMENTS, "bf16 to the nearest": {"moment_dtype": "bf16"}, "int8": CODED_MOMENTS}
#: The parameter of wide_parameters() with a split master, in five subgroups of `options`.
SPLIT = 2


def made(keywords, **further):
    """Parameters and their optimizer, with states in memory unless `further` says otherwise."""
    params = wide_parameters()
    return params, own.AdamW(params, lr=1e-2, weight_decay=0.1, master="split", **keywords, **further)


def assert_same(memory, stored):
    """Equal parameters, masters and states. In memory, a parameter has states from its first step on."""
    (params, one), (others, other) = memory, stored
    assert same(params, others)
    expected, found = values(one), values(other)
    same_states({number: found[number] for number in expected}, expected)
    assert same([one.master(param) for param in params], [other.master(param) for param in others])


@pytest.mark.parametrize("kind", KINDS)
def test_steps_have_the_bits_of_states_in_memory(kind, tier):
    """Each step, with parameters that have no gradient in some of them; the last one is clipped."""
    both = made(KINDS[kind]), made(KINDS[kind], tier=tier)
    for step in range(6):
        for params, optimizer in both:
            random_grads(params, step)
            params[step % 3].grad = None
            optimizer.max_norm = 1.0 if step == 5 else None
            optimizer.step()
        assert_same(*both)
    both[1][1].close()


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_has_parameters_and_masters_of_the_commit(kind, wait, tier):
    """Steps after the commit are lost, and the resumed run continues as if they had not been."""
    memory = made(KINDS[kind])
    params, optimizer = made(KINDS[kind], tier=tier)
    train(optimizer, params, range(3))
    commit = optimizer.commit(payload=b"three", wait=wait)
    train(optimizer, params, range(3, 5))
    if not wait:
        commit.wait()
    optimizer.close()
    train(memory[1], memory[0], range(3))
    resumed = made(KINDS[kind], tier=tier)
    assert (resumed[1].resumed_step, resumed[1].payload) == (3, b"three")
    assert_same(memory, resumed)
    for params, optimizer in (memory, resumed):
        train(optimizer, params, range(3, 6))
    assert_same(memory, resumed)
    resumed[1].close()


def test_a_rollback_and_a_restore_return_parameters_and_masters(tier, tmp_path):
    memory, stored = made({}), made({}, tier=tier)
    for params, optimizer in (memory, stored):
        train(optimizer, params, range(2))
    stored[1].commit()
    stored[1].snapshot(tmp_path / "snapshot").wait()
    train(stored[1], stored[0], range(2, 4))
    stored[0][SPLIT].data.fill_(7.0)
    stored[1].rollback()
    assert_same(memory, stored)
    train(stored[1], stored[0], range(2, 4))
    stored[1].commit()
    assert stored[1].restore(tmp_path / "snapshot") == 2
    assert_same(memory, stored)
    for params, optimizer in (memory, stored):
        train(optimizer, params, range(2, 4))
    assert_same(memory, stored)
    stored[1].close()


def write_data(param):
    param.data[5000:5003] = 0.25


def write_whole(param):
    with torch.no_grad():
        param.mul_(0.5)


def write_numpy(param):
    param.detach().view(torch.int16).numpy()[-1] ^= 1


@pytest.mark.parametrize("write", [write_data, write_whole, write_numpy])
@pytest.mark.parametrize("kind", KINDS)
def test_written_parameters_are_their_own_masters(kind, write, tier):
    """As in memory: low bits of written blocks are zero, in what is read at once and in the next step. A commit keeps that."""
    both = made(KINDS[kind]), made(KINDS[kind], tier=tier)
    for params, optimizer in both:
        train(optimizer, params, range(2))
        write(params[SPLIT])
    assert_same(*both)
    both[1][1].commit()
    both[1][1].close()
    both = both[0], made(KINDS[kind], tier=tier)
    assert_same(*both)
    for params, optimizer in both:
        train(optimizer, params, range(2, 4))
        write(params[SPLIT])
        train(optimizer, params, range(4, 5))
    assert_same(*both)
    both[1][1].close()


def test_restored_parameters_keep_their_masters(tier):
    params, optimizer = made({}, tier=tier)
    train(optimizer, params, range(2))
    before, value = optimizer.master(params[SPLIT]), params[SPLIT].detach().clone()
    params[SPLIT].data.zero_()
    assert not optimizer.master(params[SPLIT]).any() and not optimizer.state_dict()["state"][SPLIT]["master_low"].any()
    params[SPLIT].data.copy_(value)
    assert torch.equal(optimizer.master(params[SPLIT]), before)
    assert not torch.equal(before, value.float())
    optimizer.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saves", ["memory", "tier"])
def test_state_dicts_load_both_ways(kind, saves, tier):
    """With the parameters, in any order. 8-bit moments that were rounded at random may move by one code."""
    source = made(KINDS[kind], **({"tier": tier} if saves == "tier" else {}))
    train(source[1], source[0], range(3))
    saved, weights = copy.deepcopy(source[1].state_dict()), [param.detach().clone() for param in source[0]]
    target = made(KINDS[kind], **({"tier": tier._replace(job="other")} if saves == "memory" else {}))
    train(target[1], target[0], range(20, 21))
    target[1].load_state_dict(saved)
    with torch.no_grad():
        for param, weight in zip(target[0], weights):
            param.copy_(weight)
    assert saved["state"][SPLIT]["master_low"].dtype is torch.int16
    assert same([source[1].master(param) for param in source[0]], [target[1].master(param) for param in target[0]])
    if kind != "int8":
        for params, optimizer in (source, target):
            train(optimizer, params, range(3, 5))
        assert_same(*((source, target) if saves == "memory" else (target, source)))
    source[1].close()
    target[1].close()


def test_f32_masters_load_as_in_memory(tier):
    params = wide_parameters()
    whole = own.AdamW(params, lr=1e-2, master="f32")
    train(whole, params, range(3))
    both = made({}), made({}, tier=tier)
    for others, optimizer in both:
        optimizer.load_state_dict(copy.deepcopy(whole.state_dict()))
        with torch.no_grad():
            for param, other in zip(params, others):
                other.copy_(param)
        train(optimizer, others, range(3, 5))
    assert_same(*both)
    both[1][1].close()


def test_checkpoints_move_value_by_value(tier, tmp_path):
    """By spillway.torch.dcp, between optimizers on tiers."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict, set_optimizer_state_dict

    def new(job):
        torch.manual_seed(0)
        model = torch.nn.Linear(300, 50).bfloat16()
        return model, own.AdamW(model.parameters(), lr=1e-2, master="split", tier=tier._replace(job=job))

    def state_of(model, optimizer):
        return {"model": get_model_state_dict(model), "optim": dcp.states(model, optimizer)}

    model, optimizer = new("one")
    train(optimizer, [*model.parameters()], range(3))
    dcp.save(state_of(model, optimizer), tmp_path / "saved")
    other, its_optimizer = new("two")
    state = state_of(other, its_optimizer)
    dcp.load(state, tmp_path / "saved")
    set_model_state_dict(other, state["model"])
    set_optimizer_state_dict(other, its_optimizer, state["optim"])
    for one, its in ((model, optimizer), (other, its_optimizer)):
        train(its, [*one.parameters()], range(3, 5))
    assert same([*model.parameters()], [*other.parameters()])
    same_states(values(optimizer), values(its_optimizer))
    assert values(optimizer)[0]["master_low"].any()
    optimizer.close()
    its_optimizer.close()


def test_other_strides_are_served(tier):
    """A channels_last parameter has the bits of a contiguous one."""
    trained = []
    for number, format in enumerate((torch.contiguous_format, torch.channels_last)):
        param = torch.nn.Parameter(torch.linspace(-1, 1, 12_000).reshape(10, 12, 10, 10).bfloat16().contiguous(memory_format=format))
        optimizer = own.AdamW([param], lr=1e-2, master="split", tier=tier._replace(job=f"job-{number}"))
        for step in range(4):
            param.grad = torch.sin(step + torch.arange(12_000.0)).reshape(param.shape).bfloat16().contiguous(memory_format=format)
            optimizer.step()
            if step == 1:
                optimizer.commit()
                param.data.zero_()
                optimizer.rollback()
        trained.append((param.detach().contiguous(), optimizer.master(param)))
        optimizer.close()
    assert same(*trained)


def test_two_bytes_fewer_are_stored(tier):
    """Of the states; a commit has the parameters beside them."""
    sizes = {}
    for master in ("f32", "split"):
        param = torch.nn.Parameter(torch.ones(1 << 20, dtype=torch.bfloat16))
        optimizer = own.AdamW([param], lr=1e-2, master=master, tier=tier._replace(job=master, part_elements=1 << 18))
        train(optimizer, [param], range(1))
        optimizer.commit()
        extents = optimizer._home.tiered.tier.extents()
        for kind in ("subgroup", "parameters"):
            sizes[master, kind] = sum(extent.bytes for extent in extents if extent.name.startswith(kind)) / (1 << 20)
        optimizer.close()
    assert sizes == {("f32", "subgroup"): 12, ("split", "subgroup"): 10, ("f32", "parameters"): 0, ("split", "parameters"): 2}


def test_what_is_not_supported_is_refused_and_changes_nothing(tier):
    def opened(params, **keywords):
        return own.AdamW(params, lr=1e-2, **{"tier": tier, "master": "split", **keywords})

    with pytest.raises(UnsupportedError, match='float16, and master="split" is for torch.bfloat16'):
        opened(parameters())
    with pytest.raises(UnsupportedError, match="undo cannot be combined with tier"):
        opened(wide_parameters(), undo=True)
    params = wide_parameters()
    optimizer = opened(params)
    train(optimizer, params, range(2))
    optimizer.commit()
    optimizer.close()
    master = params[SPLIT].detach().clone()
    for keywords in ({"master": None}, {"master": "f32"}):
        with pytest.raises(InvalidArgumentError, match="holds 'split' masters, and this optimizer has 'f32'; pass master='split'"):
            opened(wide_parameters(), **keywords)
    job = f"{tier.paths[0]}/{tier.job}"
    for keywords in ({}, {"master": None}):
        with pytest.raises(UnsupportedError, match="begin_from takes over 'f32' masters only"):
            opened(wide_parameters(), **keywords, tier=tier._replace(job="begun", begin_from=[job, job.replace("one", "two")]))
    whole = opened(wide_parameters(), master=None, tier=tier._replace(job="whole"))
    with pytest.raises(InvalidArgumentError, match="load it with master='split'"):
        whole.load_state_dict(made({})[1].state_dict() | {"state": {0: {"step": 1.0, "master_low": torch.zeros(40, 8)}}})
    whole.commit()
    whole.close()
    with pytest.raises(InvalidArgumentError, match="holds 'f32' masters, and this optimizer has 'split'"):
        opened(wide_parameters(), tier=tier._replace(job="whole"))
    params = wide_parameters()
    optimizer = opened(params)
    assert optimizer.resumed_step == 2 and torch.equal(params[SPLIT], master)
    optimizer.close()


def test_a_process_that_only_reads_the_tier_sees_low_bits(tier):
    """The states are those of spillway.Swap with low_bits, as numbers."""
    params, optimizer = made({}, tier=tier)
    train(optimizer, params, range(2))
    swap = optimizer._home.tiered.swap
    assert isinstance(swap, spillway.Swap) and swap.low_bits
    low = torch.empty(swap.elements[2])
    swap.read(2, low)
    assert ((low >= 0) & (low < 1 << 16) & (low % 1 == 0)).all() and low.any()
    optimizer.close()


def program(generator):
    """A random training: calls, each with what it needs."""
    calls, clean = [], True
    for step in range(12):
        if clean and generator.random() < 0.3:
            calls.append((generator.choice(["write", "write and restore"]), generator.randrange(30_001), generator.choice([1, 3, 9000])))
        if generator.random() < 0.3:
            calls.append(("read",))
        without = generator.choice([None, None, 0, SPLIT])
        calls.append(("step", step, without))
        clean = clean or without != SPLIT
        for kind, often in (("commit", 0.3), ("commit beside", 0.15), ("rollback", 0.15), ("resume", 0.15), ("load", 0.15)):
            if generator.random() < often:
                calls.append((kind,))
                # In memory, what is written after a load keeps its low bits until a step of the parameter.
                clean = clean and kind.startswith("commit")
    return calls


def run(calls, keywords, where):
    """Does the calls with states in memory and on a tier; a commit in memory is a copy."""
    memory, stored = made(keywords), made(keywords, tier=where)
    kept = None
    for call, *arguments in calls:
        if call == "step":
            for params, optimizer in (memory, stored):
                random_grads(params, arguments[0])
                if arguments[1] is not None:
                    params[arguments[1]].grad = None
                optimizer.step()
        elif call.startswith("write"):
            for params, optimizer in (memory, stored):
                value = params[SPLIT].detach().clone()
                params[SPLIT].data[arguments[0] : arguments[0] + arguments[1]] = 0.75
                if call != "write":
                    optimizer.master(params[SPLIT])
                    params[SPLIT].data.copy_(value)
        elif call == "load":
            # Codes would be rounded again.
            if not keywords.get("moment_dtype") == "int8":
                for _, optimizer in (memory, stored):
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif call.startswith("commit"):
            stored[1].commit(wait=call == "commit")
            kept = copy.deepcopy((memory[1].state_dict(), [param.detach() for param in memory[0]]))
        elif kept is not None and call in ("rollback", "resume"):
            if call == "rollback":
                stored[1].rollback()
            else:
                stored[1]._home.tiered.finish()
                stored[1].close()
                stored = made(keywords, tier=where)
            memory[1].load_state_dict(copy.deepcopy(kept[0]))
            for param, weight in zip(memory[0], kept[1]):
                param.data.copy_(weight)
        if call != "write":
            assert_same(memory, stored)
    stored[1].close()


@pytest.mark.parametrize("case", range(few(8, 80)))
def test_random_trainings_have_the_bits_of_states_in_memory(case, tier):
    generator = random.Random(SEED + case)
    calls, kind = program(generator), generator.choice([*KINDS])
    try:
        run(calls, KINDS[kind], tier._replace(part_elements=generator.choice([5000, 20_000, 100_000])))
    except BaseException:
        print(kind, calls)
        raise


def test_steps_beside_backward_see_writes_that_are_taken_back(tier, monkeypatch):
    """A parameter that is written before backward, and restored before the step, in memory that torch does not watch. Other steps begin
    during backward."""
    counted = Counted(monkeypatch)
    both = made({}), made({}, tier=tier, overlap=True)
    for step in range(8):
        for params, optimizer in both:
            before = params[SPLIT].detach().clone()
            if step == 4:
                params[SPLIT].data.mul_(2)
            optimizer.zero_grad()
            wanted = [torch.sin(step + torch.arange(float(param.numel()))).reshape(param.shape).to(param.dtype) for param in params]
            sum((param * grad).sum().float() for param, grad in zip(params, wanted)).backward()
            if step == 4:
                params[SPLIT].data.copy_(before)
            optimizer.step()
        assert_same(*both)
    assert counted.during[4] > 0
    both[1][1].close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("case", range(few(6, 60)))
def test_random_models_have_the_bits_of_states_in_memory(case, apart, overlap, monkeypatch):
    """With writes, loads, clipping and skipped steps; also with parameters in the place of a device, whose copies end late."""
    seed = next(seed for seed in range(SEED + 7 * case, SEED + 7 * case + 100) if dtype_of(seed) is torch.bfloat16)
    waits = training(seed, lambda params, model, **given: own.AdamW(params, master="split", **given))
    link = Later()
    if apart:
        monkeypatch.setattr(_copies, "link_to", lambda param: link)
    equal(training(seed, tiered(seed, master="split", overlap=overlap)), waits)
    link.end()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_parameter_without_elements_is_stepped_beside_others(overlap, tmp_path):
    params = [torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for size in (5, 0, 3)]
    optimizer = own.AdamW(params, lr=0.1, master="split", tier=tmp_path, overlap=overlap)
    for _ in range(3):
        optimizer.zero_grad()
        sum(param.sum().float() for param in params).backward()
        optimizer.step()
    optimizer.commit()
    assert float(optimizer.master(params[0])[0]) < 0.8 and optimizer.master(params[1]).numel() == 0
    optimizer.close()
