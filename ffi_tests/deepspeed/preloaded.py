"""Steps DeepSpeed's own compiled optimizers, and prints hashes of all bits as JSON. test_preload.py runs this script with
and without the preload library.

    preloaded.py CASE

The variable SPILLWAY_TEST_PROCESSOR is what DeepSpeed would ask of the processor for each optimizer, which takes a second."""

import ctypes
import hashlib
import json
import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import cpuinfo
import torch
import torch.multiprocessing

if "SPILLWAY_TEST_PROCESSOR" in os.environ:
    cpuinfo.get_cpu_info = lambda: json.loads(os.environ["SPILLWAY_TEST_PROCESSOR"])

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def digest(tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def optimizers():
    """Several DeepSpeedCPUAdam at once: all pairs of dtypes, AdamW and L2, and one that is created anew."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.manual_seed(0)
    made = []
    for dtype, wide in ((F32, True), (BF16, True), (F16, True), (BF16, False), (F16, False)):
        for adamw in (True, False):
            parameters = [torch.nn.Parameter(torch.randn(n).to(dtype)) for n in (16, 4096, 160_000)]
            made.append((parameters, DeepSpeedCPUAdam(parameters, lr=1e-2, weight_decay=0.1, adamw_mode=adamw, fp32_optimizer_states=wide)))
    for _ in range(5):
        for parameters, optimizer in made:
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
            optimizer.step()
    states = [
        tensor
        for parameters, optimizer in made
        for parameter in parameters
        for tensor in (parameter.data, optimizer.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg_sq"])
    ]
    return {"sha256": digest(states), "calls": 5 * 3 * len(made), "elements": 5 * len(made) * 164_112}


def worker(queue):
    queue.put((optimizers(), counts()))


def spawned():
    """The same in a spawned process."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=worker, args=(queue,))
    process.start()
    result, counted = queue.get(timeout=300)
    process.join()
    return {**result, "worker": counted}


def forked():
    """A step before a fork, and the same step in parent and child after it. DeepSpeed's own threads would not exist in
    the child, so the run has one OpenMP thread."""
    op, arrays = adam(), tensors(160_000)
    step(op, 1, arrays)
    read, write = os.pipe()
    if os.fork() == 0:
        step(op, 2, arrays)
        os.write(write, digest(arrays).encode())
        os._exit(0)
    step(op, 2, arrays)
    child = os.read(read, 64).decode()
    assert os.wait()[1] == 0
    return {"sha256": digest(arrays), "child": child, "calls": 2, "elements": 320_000}


def other():
    """What does not fit Spillway: float64, a tensor that is not contiguous, a state of another size, a wrong beta."""
    op, results = adam(), {}
    double = [tensor.double() for tensor in tensors(64)]
    try:
        step(op, 1, double)
    except RuntimeError as error:
        results["float64"] = str(error)
    spread = tensors(64)
    spread[0] = torch.ones(64, 2)[:, 0]
    step(op, 1, spread)
    results["spread"] = spread[0].tolist() == [1.0] * 64
    arrays = tensors(64)
    op.adam_update(3, 1, 1e-3, 1.5, 0.999, 1e-8, 0.0, False, *arrays)
    results["beta"] = digest(arrays)
    step(op, 1, arrays)
    return {**results, "sha256": digest(arrays), "calls": 1, "elements": 64, "left": 3}


def rollback():
    """Exact for the second step, because the first rollback makes Spillway record. `restored` says whether every bit
    of the state before is back."""
    op, arrays = adam(), tensors(4096)
    unknown = op.adam_rollback(77, *call(1)[1:], *arrays)
    step(op, 1, arrays)
    before = [tensor.clone() for tensor in arrays]
    step(op, 2, arrays)
    op.adam_rollback(*call(2), *arrays)
    close = all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(arrays, before))
    for a, b in zip(arrays, before):
        a.copy_(b)
    step(op, 2, arrays)
    op.adam_rollback(*call(2), *arrays)
    restored = all(torch.equal(a, b) for a, b in zip(arrays, before))
    arrays[1][5] = float("inf")
    step(op, 2, arrays)
    infinite = [tensor.clone() for tensor in arrays]
    exact = op.adam_rollback(*call(2), *arrays)
    repaired = all(torch.equal(a, b) for a, b in zip((arrays[0], *arrays[2:]), (before[0], *before[2:])))
    for a, b in zip(arrays, infinite):
        a.copy_(b)
    again = op.adam_rollback(*call(2), *arrays)
    untouched = all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(arrays, infinite))
    return {
        "close": close,
        "restored": restored,
        "repaired": repaired,
        "exact": exact,
        "again": again,
        "untouched": untouched,
        "unknown": unknown,
    }


def adagrad_and_lion():
    """DeepSpeed's Lion does not train on AVX, and its Adagrad omits weight decay: the results are those of torch and of
    Lion's paper."""
    import compiled_ops

    adagrad, lion = (compiled_ops.oldest(name, os.environ["SPILLWAY_OLD_DEEPSPEED"]) for name in ("cpu_adagrad", "cpu_lion"))
    p, g, v, _ = tensors(4096)
    mine = torch.nn.Parameter(p.clone())
    torch_adagrad = torch.optim.Adagrad([mine], lr=1e-2, eps=1e-8, weight_decay=0.1)
    adagrad.create_adagrad(0, 1e-2, 1e-8, 0.1, False)
    for number in (1, 2, 3):
        adagrad.adagrad_update(0, number, 1e-2, 1e-8, 0.1, p, g, v)
        mine.grad = g.clone()
        torch_adagrad.step()
    adagrad.destroy_adagrad(0)
    q, g, m, _ = tensors(4096)
    expected = q - 1e-2 * torch.sign(m * 0.9 + g * (1 - 0.9))
    lion.create_lion(0, 1e-2, 0.9, 0.99, 0.0, False)
    lion.lion_update(0, 1, 1e-2, 0.9, 0.99, 0.0, q, g, m)
    lion.destroy_lion(0)
    return {"adagrad": torch.allclose(p, mine.data, atol=1e-5), "lion": torch.allclose(q, expected, atol=1e-6)}


def fused():
    """DeepSpeed's CPU FusedAdam is a second library with the same functions and the same optimizer id 0."""
    from deepspeed.ops.op_builder import FusedAdamBuilder

    cpu, second = adam(0), FusedAdamBuilder().load(verbose=False)
    one, two = tensors(4096), tensors(4096)
    for number in (1, 2, 3):
        cpu.adam_update(0, number, 1e-3, 0.9, 0.999, 1e-8, 0.1, True, *one)
        p, g, m, v = two
        second.multi_tensor_adam(2048, torch.zeros(1, dtype=torch.int), [[g], [p], [m], [v]], 1e-3, 0.8, 0.99, 1e-8, number + 4, 1, 1, 0.1)
    return {"sha256": digest(one + two), "calls": 6, "elements": 6 * 4096}


def strangers():
    """Calls from a library that is no op, as the first and beside an op; an empty tensor; many optimizers."""
    preload, no_tensor = ctypes.CDLL(None), [ctypes.c_void_p(0)] * 4
    step_of = preload["_Z12ds_adam_stepimfffffbRN2at6TensorES1_S1_S1_"]
    numbers = [ctypes.c_size_t(1), *[ctypes.c_float(0.5)] * 5, ctypes.c_bool(True)]
    foreign = [preload["_Z22destroy_adam_optimizeri"](3), step_of(3, *numbers, *no_tensor)]
    op = adam()
    step(op, 1, [torch.zeros(0) for _ in range(4)])
    for number in range(2000):
        op.create_adam(number % 500, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
        op.destroy_adam(number % 500)
    foreign.append(step_of(3, *numbers, *no_tensor))
    op.create_adam(1 << 20, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
    arrays = tensors(64)
    op.adam_update(1 << 20, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, *arrays)
    return {"foreign": foreign, "stepped": not torch.equal(arrays[0], tensors(64)[0])}


def adam(number=3):
    from deepspeed.ops.op_builder import CPUAdamBuilder

    op = CPUAdamBuilder().load(verbose=False)
    op.create_adam(number, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
    return op


def call(step_number):
    return 3, step_number, 1e-3, 0.9, 0.999, 1e-8, 0.0, True


def step(op, number, arrays):
    op.adam_update(*call(number), *arrays)


def tensors(n):
    source = torch.Generator().manual_seed(n)
    return [torch.randn(n, generator=source), torch.randn(n, generator=source), torch.zeros(n), torch.zeros(n)]


def counts():
    """The counters, as any program can read them; None without the preload library."""
    try:
        counts_of = ctypes.CDLL(None).spillway_preload_counts
    except AttributeError:
        return None
    found = (ctypes.c_uint64 * 3)()
    assert counts_of(b"no such op", found) == counts_of(None, found) == counts_of(b"cpu_adam", None) == 0
    assert counts_of(b"cpu_adam", found) == 1
    return list(found)


def main():
    result = globals()[sys.argv[1]]()
    import spillway.deepspeed

    print(json.dumps({**result, "counts": counts(), "active": spillway.deepspeed.active()}))


if __name__ == "__main__":
    main()
