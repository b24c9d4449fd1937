"""Step counts of states: in shared memory, of other shapes and dtypes, pickled alone."""

import copy
import pickle

import pytest
import torch
import torch.multiprocessing

from spillway import torch as own


def one_step(param, optimizer):
    param.grad = torch.ones(1)
    optimizer.step()


@pytest.mark.parametrize("cls", [torch.optim.Adam, own.Adam])
def test_processes_that_share_states_count_together(cls):
    """Hogwild: each process steps shared parameters and states, and its steps count on in the others."""
    param = torch.nn.Parameter(torch.ones(1))
    param.share_memory_()
    optimizer, step = cls([param], lr=0.1), torch.zeros(()).share_memory_()
    optimizer.state[param].update(step=step, exp_avg=torch.zeros(1).share_memory_(), exp_avg_sq=torch.zeros(1).share_memory_())
    for _ in range(2):
        worker = torch.multiprocessing.get_context("fork").Process(target=one_step, args=(param, optimizer))
        worker.start()
        worker.join()
    one_step(param, optimizer)
    assert float(step) == 3 and optimizer.state[param]["step"] is step
    assert param.item() == pytest.approx(0.7, abs=1e-5)


def test_a_count_that_another_process_has_changed_is_taken_over():
    param = torch.nn.Parameter(torch.ones(1))
    optimizer, step = own.Adam([param], lr=0.1), torch.zeros(()).share_memory_()
    optimizer.state[param].update(step=step, exp_avg=torch.zeros(1), exp_avg_sq=torch.zeros(1))
    one_step(param, optimizer)
    step += 5
    one_step(param, optimizer)
    assert float(step) == 7


def test_states_that_are_moved_to_shared_memory_count_there():
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = own.Adam(params)
    for _ in range(3):
        for param in params:
            param.grad = torch.ones(1)
        optimizer.step()
        optimizer.state[params[1]]["step"].share_memory_()
    assert [float(optimizer.state[param]["step"]) for param in params] == [3, 3, 3]
    assert optimizer.state[params[1]]["step"].is_shared()


@pytest.mark.parametrize(
    "step",
    [
        torch.tensor([4.0]),
        torch.tensor([[4.0]]),
        torch.tensor(4),
        torch.tensor([4]),
        torch.tensor(4.0, dtype=torch.float64),
        torch.tensor(4, dtype=torch.int32),
        torch.tensor(4.0, dtype=torch.float16),
    ],
    ids=str,
)
def test_counts_of_other_shapes_and_dtypes_are_stepped_as_torch_does(step):
    results = []
    for cls in (torch.optim.AdamW, own.AdamW):
        params = [torch.nn.Parameter(torch.linspace(-1, 1, 5)) for _ in range(2)]
        optimizer = cls(params)
        for param in params:
            param.grad = torch.ones(5)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][1]["step"] = step.clone()
        optimizer.load_state_dict(saved)
        optimizer.step()
        results.append((params, [float(optimizer.state[param]["step"]) for param in params]))
    assert results[0][1] == results[1][1] == [2, 5]
    for one, other in zip(results[0][0], results[1][0]):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def test_a_pickled_count_takes_no_other_count_along():
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(1000)]
    optimizer = own.AdamW(params)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones(1)
        optimizer.step()
    state = optimizer.state[params[7]]
    sizes = {key: len(pickle.dumps(value)) for key, value in state.items()}
    assert sizes["step"] <= sizes["exp_avg"] and state["step"].untyped_storage().nbytes() == 4
    assert float(pickle.loads(pickle.dumps(state["step"]))) == float(copy.deepcopy(state["step"])) == 2


def test_a_count_that_the_program_sets_is_the_next_steps():
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = own.AdamW([param])
    one_step(param, optimizer)
    optimizer.state[param]["step"].fill_(41)
    one_step(param, optimizer)
    assert float(optimizer.state[param]["step"]) == 42
