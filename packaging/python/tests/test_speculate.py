"""Proves that the Python interface of speculation ends with the bits of stepping after the norm and follows torch's
clip_grad_norm_ and AdamW. It keeps memory alive and raises typed exceptions for misuse."""

import os

import numpy as np
import pytest

import spillway
from spillway import _native_handle

torch = pytest.importorskip("torch")

SIZES = (1000, 70000, 64)


def model(seed):
    source = np.random.default_rng(seed)
    return [
        [
            source.standard_normal(n).astype(np.float32),
            np.zeros(n, np.float32),
            np.zeros(n, np.float32),
            np.zeros(n, np.float32),
            np.zeros(n, np.uint16),
        ]
        for n in SIZES
    ]


def fill(layers, seed, size):
    source = np.random.default_rng(seed)
    for layer in layers:
        layer[1][:] = source.standard_normal(len(layer[1])) * size


def serial(adam, layers, max_norm, scale):
    """The serial rule: wait for the norm, then step."""
    seen = [spillway.grad_stats(layer[1], scale=scale) for layer in layers]
    if any(stats.nonfinite for stats in seen):
        return
    norm = sum(stats.sum_squares for stats in seen) ** 0.5
    adam.step([tuple(layer) for layer in layers], grad_scale=scale * min(1.0, max_norm / (norm + 1e-6)), uint16_dtype="bf16")


@pytest.mark.parametrize("undo", ["delta", "shadow"])
@pytest.mark.parametrize("publish", ["final", "staged", "speculative"])
def test_rounds_end_with_the_bits_of_stepping_after_the_norm(publish, undo):
    mine, twin = model(1), model(1)
    shadows = [[np.full(n, 9, np.float32) for _ in range(3)] if undo == "shadow" else None for n in SIZES]
    ours, theirs = spillway.Adam(lr=1e-2, weight_decay=0.1), spillway.Adam(lr=1e-2, weight_decay=0.1)
    verdicts = []
    with spillway.Speculation(len(SIZES), publish=publish, undo=undo) as speculation:
        for step in range(12):
            for layers in (mine, twin):
                fill(layers, step, (1e-3, 1e-1, np.inf)[step % 3])
            speculation.begin(ours, max_norm=1.0, grad_scale=0.5)
            for bucket in (2, 0, 1):
                shadow = [tuple(shadows[bucket])] if undo == "shadow" else None
                speculation.submit(bucket, [tuple(mine[bucket])], shadow=shadow, uint16_dtype="bf16")
            outcome = speculation.resolve(speculation.local_result())
            verdicts.append(outcome.verdict)
            speculation.wait(1)
            speculation.finish()
            if undo == "shadow" and outcome.verdict != "skip":
                for layer, shadow in zip(mine, shadows):
                    (layer[0], layer[2], layer[3]), shadow[:] = shadow, (layer[0], layer[2], layer[3])
            assert [speculation.bucket_state(bucket) for bucket in range(3)] == ["final"] * 3
            assert len(speculation.rolled_back_buckets()) == outcome.rolled_back
            serial(theirs, twin, 1.0, 0.5)
        stats = speculation.stats()
    assert verdicts == ["commit", "redo", "skip"] * 4
    assert ours.step_count == theirs.step_count == 8
    for a, b in zip(mine, twin):
        for x, y in zip(a[:4], b[:4]):
            assert x.tobytes() == y.tobytes()
        assert a[4].tobytes() == b[4].tobytes()
    assert (stats.commits, stats.redos, stats.skips) == (4, 4, 4)


def test_clipping_follows_torch():
    params = [torch.nn.Parameter(torch.randn(500, generator=torch.Generator().manual_seed(i))) for i in range(3)]
    mine = [(p.detach().clone(), torch.zeros(500), torch.zeros(500), torch.zeros(500)) for p in params]
    adamw, adam = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1), spillway.Adam(lr=1e-2, weight_decay=0.1)
    source = torch.Generator().manual_seed(9)
    with spillway.Speculation(3) as speculation:
        for step in range(30):
            for param, tensors in zip(params, mine):
                param.grad = torch.randn(500, generator=source) * (0.1 if step % 2 else 0.001)
                tensors[1].copy_(param.grad)
            norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
            adamw.step()
            speculation.begin(adam, max_norm=1.0)
            for bucket in range(3):
                speculation.submit(bucket, [mine[bucket]])
            outcome = speculation.resolve(speculation.local_result())
            speculation.finish()
            assert outcome.verdict == ("redo" if norm > 1.0 else "commit")
            assert outcome.norm == pytest.approx(norm.item(), rel=1e-6)
    for param, tensors in zip(params, mine):
        torch.testing.assert_close(tensors[0], param.detach(), rtol=1e-5, atol=1e-6)


def test_an_abort_after_a_failed_bucket_is_no_error_and_frees_the_memory(monkeypatch):
    tensors = tuple(np.ones((4, 8), np.float32))
    speculation = spillway.Speculation(1)
    speculation.begin(spillway.Adam())
    speculation.submit(0, [tensors])
    record = _native_handle.record

    def failed(outcome, function, *arguments):
        record(outcome, function, *arguments)
        if function == "spw_spec_finish":
            outcome[:] = [spillway.InvalidArgumentError.status]

    with monkeypatch.context() as patch:
        patch.setattr(_native_handle, "record", failed)
        speculation.abort()
    assert not speculation._held.begun()
    speculation.begin(spillway.Adam())
    speculation.submit(0, [tensors])
    speculation.resolve(speculation.local_result())
    speculation.finish()
    speculation.close()
    assert not np.array_equal(tensors[0], np.ones(8, np.float32))


def test_what_has_no_verdict_is_taken_back_and_memory_lives_until_then():
    layers, before = model(3), model(3)
    fill(layers, 1, 0.1), fill(before, 1, 0.1)
    reader, writer = os.pipe()
    speculation = spillway.Speculation(3)
    speculation.begin(spillway.Adam())
    speculation.submit(1, [tuple(layers[1])], uint16_dtype="bf16")
    speculation.submit(0, [(np.ones(8, np.float32), *np.zeros((3, 8), np.float32))], event_fd=reader)
    with pytest.raises(spillway.OutOfOrderError, match="bucket 2 was not submitted"):
        speculation.local_result()
    speculation.submit(2, [tuple(layers[2])], uint16_dtype="bf16")
    with pytest.raises(spillway.TimedOutError, match="still pending: .*0"):
        speculation.local_result(timeout=0.01)
    speculation.abort()
    assert speculation.stats().aborts == 1
    speculation.begin(spillway.Adam())
    speculation.submit(1, [tuple(layers[1])], uint16_dtype="bf16")
    speculation.close()
    speculation.close()
    os.close(reader), os.close(writer)
    for mine, other in zip(layers, before):
        assert all(x.tobytes() == y.tobytes() for x, y in zip(mine, other))


def test_misuse_is_typed():
    with pytest.raises(spillway.InvalidArgumentError, match="publish"):
        spillway.Speculation(1, publish="never")
    with pytest.raises(spillway.InvalidArgumentError, match="buckets"):
        spillway.Speculation(0)
    with spillway.Speculation(1) as speculation:
        with pytest.raises(spillway.InvalidArgumentError, match="submitted before a round"):
            speculation.submit(0, [])
        with pytest.raises(spillway.InvalidArgumentError, match="optimizer"):
            speculation.begin(torch.optim.SGD([torch.zeros(1)], lr=1.0))
        with pytest.raises(spillway.OutOfOrderError) as caught:
            speculation.local_result()
        assert caught.value.status == 40
        speculation.begin(spillway.Lion())
        with pytest.raises(spillway.OutOfOrderError, match="open already"):
            speculation.begin(spillway.Lion())
        speculation.submit(0, [])
        with pytest.raises(spillway.InvalidArgumentError, match="verdict"):
            speculation.resolve_as("perhaps")
        speculation.local_result()
        assert speculation.resolve_as("skip").verdict == "skip"
    with pytest.raises(spillway.InvalidArgumentError, match="closed"):
        speculation.finish()
