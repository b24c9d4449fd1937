"""Proves that steps, buckets and subgroups have ranges in a trace of torch's profiler, and that nothing is recorded without one."""

import json
import subprocess
import sys

import pytest

from spillway import _timeline

torch = pytest.importorskip("torch")


def names_of(trace, tmp_path):
    """The names of Spillway's ranges in a trace, as it is stored."""
    file = tmp_path / "trace.json"
    trace.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    assert any(event.get("name", "").startswith("aten::") for event in events)
    return [event["name"] for event in events if event.get("ph") == "X" and event["name"].startswith("spillway.")]


def stepped(optimizer, params, tmp_path):
    """The ranges of a step during backward, after two steps without a profiler."""

    def step():
        (sum(param.square().sum() for param in params)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        step()
    return names_of(trace, tmp_path)


def parameters(count=3):
    return [torch.nn.Parameter(torch.randn(1000)) for _ in range(count)]


def test_offload_has_ranges_of_its_step_and_of_each_bucket(tmp_path):
    import spillway.torch

    params = parameters()
    optimizer = spillway.torch.offload(params, torch.optim.AdamW, bucket_bytes=4000, overlap=True)
    names = stepped(optimizer, params, tmp_path)
    assert names.count("spillway.offload.step") == 1 and "spillway.offload.wait" in names
    for bucket in range(3):
        for part in ("take", "submit", "publish"):
            assert names.count(f"spillway.offload.{part} {bucket}") == 1, names
    optimizer.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_tier_has_ranges_of_its_step_and_of_each_subgroup(tmp_path, overlap):
    import spillway.torch

    params = parameters()
    place = spillway.torch.TierOptions(tmp_path, durability="process", part_elements=1000)
    optimizer = spillway.torch.AdamW(params, tier=place, overlap=overlap)
    names = stepped(optimizer, params, tmp_path)
    assert names.count("spillway.tier.step") == 1
    for subgroup in range(3):
        for part in ("submit", "publish"):
            assert names.count(f"spillway.tier.{part} {subgroup}") == overlap, names
    assert names.count("spillway.tier.finish") == overlap
    optimizer.close()


def test_staged_has_ranges_of_its_chunks(tmp_path):
    import spillway.torch

    params = parameters()
    optimizer = spillway.torch.Staged(torch.optim.NAdam, params, chunk_bytes=8000)
    names = stepped(optimizer, params, tmp_path)
    assert [name for name in names if name.startswith("spillway.staged.chunk ")] == [f"spillway.staged.chunk {n}" for n in range(3)]


def test_without_a_profiler_nothing_is_recorded(monkeypatch):
    recorded = []
    monkeypatch.setattr(torch.profiler, "record_function", recorded.append)
    with _timeline.span("x", 1):
        pass
    assert recorded == [] and _timeline.span("x") is _timeline._NOTHING
    with torch.autograd.profiler.profile():
        _timeline.span("x", 1)
    assert recorded == ["spillway.x 1"]


def test_a_range_imports_no_torch(child_environment):
    code = "import sys; from spillway import _timeline\nwith _timeline.span('x'): pass\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=child_environment).returncode == 0
