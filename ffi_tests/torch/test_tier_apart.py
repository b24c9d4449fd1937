"""States on a tier of parameters that are not in host memory: gradients leave and weights return by copies that end later than they are
started. The stand-in for a device is host memory that the library is not shown."""

import pytest
import torch
from offload_runs import Later, same, training
from test_interrupted import interrupted_at
from test_tier_overlap import Counted, backward, net, options, run, tiered, values

import spillway
from spillway import torch as own
from spillway.torch import _copies


class Copies(Later):
    """Notes the copies, and the memory for them."""

    def __init__(self):
        super().__init__()
        self.log, self.memories = [], []

    def memory(self, shape, dtype):
        made = super().memory(shape, dtype)
        self.memories.append(made.nbytes)
        return made

    def out(self, host, tensor):
        self.log.append(("out", tensor.nbytes))
        super().out(host, tensor)

    def back(self, tensor, host):
        self.log.append(("back", host.nbytes))
        super().back(tensor, host)

    def bytes(self, way):
        return sum(size for kind, size in self.log if kind == way)


@pytest.fixture
def link(monkeypatch):
    made = Copies()
    monkeypatch.setattr(_copies, "link_to", lambda param: made)
    return made


@pytest.mark.sampled(cases=8)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_random_trainings_have_the_bits_of_parameters_in_host_memory(seed, overlap, monkeypatch):
    waits = training(seed, tiered(seed))
    made = Copies()
    monkeypatch.setattr(_copies, "link_to", lambda param: made)
    same(training(seed, tiered(seed, overlap=overlap)), waits)
    assert made.bytes("out") > 0 < made.bytes("back")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_moves_each_gradient_out_and_each_weight_in_once(link, dtype, overlap):
    assert run(6, dtype, tier=options(), overlap=overlap, max_norm=1.0) == run(6, dtype, master="f32", max_norm=1.0)
    whole = sum(param.nbytes for param in net(dtype).parameters())
    assert link.bytes("out") == link.bytes("back") == 6 * whole
    # Their memory is made once.
    assert sum(link.memories) == 2 * whole


@pytest.mark.parametrize("overlap", [True, False])
def test_parameters_and_gradients_of_any_strides_move_as_often(link, overlap):
    grads = []

    def turned(step, optimizer, model):
        grads.append([param.grad.clone() for param in model.parameters()])
        for number, layer in enumerate(model[::2]):
            if step == number:
                layer.weight.data = layer.weight.data.t().contiguous().t()
            if step == 3:
                layer.weight.grad = layer.weight.grad.t().contiguous().t()

    values, _ = run(5, tier=options(), overlap=overlap, each=turned)
    moved, whole = link.bytes("out"), sum(param.nbytes for param in net().parameters())
    # In four steps something changes after backward; gradients are then copied again.
    assert link.bytes("back") == 5 * whole and 5 * whole <= moved <= 9 * whole

    def with_these_gradients(step, optimizer, model):
        # torch's products of matrices have other bits for other strides on some processors.
        for param, grad in zip(model.parameters(), grads[step]):
            param.grad.copy_(grad)

    assert values == run(5, master="f32", each=with_these_gradients)[0]


def test_subgroups_start_during_backward_and_weights_return_as_they_are_published(link, monkeypatch):
    counted = Counted(monkeypatch)
    log, update = [], spillway.swap.SwapUpdate
    submit, finish, give = update.submit_table, update.finish, _copies.Weights.give
    monkeypatch.setattr(update, "submit_table", lambda *given: (log.append(given[1]), submit(*given))[1])
    monkeypatch.setattr(update, "finish", lambda *given: (log.append("finish"), finish(*given))[1])
    monkeypatch.setattr(_copies.Weights, "give", lambda this, number: (log.append(("give", number)), give(this, number))[1])
    run(4, tier=options(), overlap=True)
    assert log[0] == 4 and counted.during == [5] * 4
    for step in range(4):
        *moved, end = log[11 * step : 11 * step + 11]
        assert end == "finish" and sorted(moved[:5]) == [0, 1, 2, 3, 4]
        assert sorted(moved[5:]) == [("give", number) for number in range(5)]


def test_edited_gradients_are_copied_again_to_other_memory(link):
    def each(step, optimizer, model):
        if step in (1, 4):
            next(iter(model.parameters())).grad.mul_(0.5)
        if step == 2:
            # Changes no version.
            next(iter(model.parameters())).grad.data.mul_(0.5)

    assert run(6, tier=options(), overlap=True, each=each) == run(6, master="f32", each=each)


@pytest.mark.parametrize("overlap", [True, False])
def test_states_are_those_before_the_step_and_a_refused_step_can_be_repeated(link, overlap, tmp_path):
    def each(step, optimizer, model):
        if step == 1:
            optimizer.commit()
        if step == 2:
            optimizer.state_dict()
        if step == 3:
            param = optimizer.param_groups[0]["params"][0]
            before = param.grad[0, 0].item()
            param.grad[0, 0] = float("nan")
            with pytest.raises(spillway.InvalidArgumentError, match="Inf or NaN"):
                optimizer.step()
            param.grad[0, 0] = before
        if step == 4:
            optimizer.load_state_dict(optimizer.state_dict())

    one = run(6, torch.bfloat16, tier=options(tmp_path), overlap=overlap, max_norm=1.0, each=each)
    assert one == run(6, torch.bfloat16, tier=options(), max_norm=1.0)


def test_a_rollback_and_a_resume(link, tmp_path):
    def train(optimizer, model, steps):
        for step in steps:
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()

    model = net(torch.bfloat16)
    optimizer = own.AdamW(model.parameters(), lr=1e-2, tier=options(tmp_path), overlap=True)
    train(optimizer, model, range(2))
    optimizer.commit()
    train(optimizer, model, range(2, 4))
    backward(model, 4)
    optimizer.rollback()
    optimizer.zero_grad()
    train(optimizer, model, range(2, 5))
    optimizer.commit()
    expected = values(optimizer, list(model.parameters()))
    assert expected == run(5, torch.bfloat16, master="f32")[0]
    optimizer.close()
    other = net(torch.bfloat16)
    again = own.AdamW(other.parameters(), lr=1e-2, tier=options(tmp_path), overlap=True)
    assert again.resumed_step == 5 and values(again, list(other.parameters())) == expected
    again.close()


def test_a_copy_that_fails_is_an_error_of_step_and_changes_nothing(link, monkeypatch):
    class Broken:
        def synchronize(self):
            raise RuntimeError("the device is lost")

        def query(self):
            return True

    model = net()
    params = list(model.parameters())
    optimizer = own.AdamW(params, lr=1e-2, tier=options(), overlap=True)
    for step in range(2):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    with monkeypatch.context() as patch:
        patch.setattr(link, "fence", Broken)
        backward(model, 2)
        with pytest.raises(RuntimeError, match="the device is lost"):
            optimizer.step()
    assert values(optimizer, params) == run(2, master="f32")[0]
    optimizer.step()
    assert values(optimizer, params) == run(3, master="f32")[0]
    optimizer.close()


def test_a_signal_at_any_line_leaves_a_whole_step_or_none(link):
    line, counts, undisturbed = 0, set(), {}
    for steps in (1, 2, 3):
        undisturbed[steps] = run(steps, tier=options(), max_norm=0.1)[0]
    while True:
        model = net()
        params = list(model.parameters())
        optimizer = own.AdamW(params, lr=1e-2, max_norm=0.1, tier=options(part_elements=300), overlap=True)
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()

        def whole(model=model, optimizer=optimizer):
            backward(model, 1)
            optimizer.step()

        hit = interrupted_at(line, whole)
        steps = {int(of["step"]) for of in optimizer.state_dict()["state"].values()}
        assert len(steps) == 1, "some parameters were stepped"
        now = steps.pop()
        counts.add(now)
        assert values(optimizer, params) == undisturbed[now], line
        for step in range(now, 3):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        assert values(optimizer, params) == undisturbed[3], line
        optimizer.close()
        if not hit:
            break
        line += 1 + line // 20
    assert counts == {1, 2} and line > 300


def test_weights_that_flow_have_their_states_on_a_tier():
    def train(flows, **given):
        model = net()
        flow = own.Flow(model, "cpu", units=[model[0], model[2]]) if flows else None
        optimizer = own.AdamW(model.parameters(), lr=1e-2, max_norm=1.0, **given)
        for step in range(4):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        if flow is not None:
            flow.remove()
        found = values(optimizer, list(model.parameters()))
        optimizer.close()
        return found

    assert train(True, tier=options(), overlap=True) == train(False, master="f32")


def test_memory_of_the_optimizer_is_in_host_memory_whatever_the_default_device():
    with torch.device("meta"):
        optimizer = own.AdamW([torch.nn.Parameter(torch.zeros(5000, device="cpu"))], lr=0.1, tier=options(), overlap=True)
        param = optimizer.param_groups[0]["params"][0]
        for _ in range(2):
            param.grad = torch.ones(5000, device="cpu")
            optimizer.step()
    assert param.is_cpu and float(param.detach()[0]) < 0
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.close()


def test_a_parameter_without_memory_is_refused():
    with pytest.raises(spillway.UnsupportedError, match="parameters of 16 or 32 bits"):
        own.AdamW([torch.nn.Parameter(torch.zeros(5, device="meta"))], tier=options())


def test_the_link_of_a_device_copies_in_page_locked_memory():
    assert _copies.DeviceLink.is_apart and _copies.DeviceLink.pinned
    assert not _copies.link_to(torch.zeros(1)).is_apart
