"""Proves that the planner counts parameters as transformers does, refuses hostile configurations with an error that names
the fault, and predicts memory and bytes of runs within 10 % of what the runs report."""

import json
import os
import subprocess
import sys

import pytest

import spillway

# Of a tiny model of each family, in fields of its configuration.
TINY = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
GPT2 = {"vocab_size": 131, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 50}
OPT = {
    "vocab_size": 131,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_dim": 100,
    "max_position_embeddings": 40,
}
BLOOM = {"vocab_size": 131, "hidden_size": 64, "n_layer": 3, "n_head": 4}
FALCON = {"vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
CASES = [
    ("llama", TINY),
    ("llama", {**TINY, "num_key_value_heads": 2}),
    ("llama", {**TINY, "tie_word_embeddings": True}),
    ("llama", {**TINY, "attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    ("mistral", {**TINY, "num_key_value_heads": 2}),
    ("mistral", {**TINY, "num_attention_heads": 8, "head_dim": 16}),
    ("mixtral", {**TINY, "num_key_value_heads": 1, "num_local_experts": 5, "num_experts_per_tok": 3}),
    ("mixtral", {**TINY, "num_attention_heads": 8}),
    ("qwen2", {**TINY, "num_key_value_heads": 2}),
    ("qwen2", {**TINY, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("qwen3", {**TINY, "num_key_value_heads": 2}),
    ("qwen3", {**TINY, "num_key_value_heads": 2, "attention_bias": True, "head_dim": 8}),
    ("gemma", {**TINY, "num_key_value_heads": 1}),
    ("gemma", {**TINY, "num_key_value_heads": 1, "tie_word_embeddings": False}),
    ("gemma2", {**TINY, "num_key_value_heads": 2}),
    ("gemma2", {**TINY, "num_key_value_heads": 2, "attention_bias": True}),
    ("gpt2", GPT2),
    ("gpt2", {**GPT2, "n_inner": 100, "tie_word_embeddings": False}),
    ("gpt_neox", TINY),
    ("gpt_neox", {**TINY, "attention_bias": False, "tie_word_embeddings": True}),
    ("opt", OPT),
    ("opt", {**OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    ("opt", {**OPT, "enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("opt", {**OPT, "_remove_final_layer_norm": True}),
    ("bloom", BLOOM),
    ("bloom", {**BLOOM, "tie_word_embeddings": False}),
    ("falcon", FALCON),
    ("falcon", {**FALCON, "bias": True, "multi_query": False, "parallel_attn": False}),
    ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
]
# The shapes of models that are in use, from the defaults of transformers and from published configurations.
LARGE = [
    (
        "llama",
        {
            "num_hidden_layers": 80,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    ("mistral", {}),
    ("mixtral", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("gemma", {}),
    ("gemma2", {}),
    ("gpt2", {}),
    ("gpt_neox", {}),
    ("opt", {}),
    ("bloom", {"hidden_size": 14336, "n_layer": 70, "n_head": 112}),
    (
        "falcon",
        {"hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8, "new_decoder_architecture": True},
    ),
]


def identify(case):
    return case if isinstance(case, str) else "-".join(f"{name}={value}" for name, value in case.items() if TINY.get(name) != value)[:60]


def counted(config):
    """The parameters of the model that transformers builds: all, and those of the experts that a token does not use."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    parameters = dict(model.named_parameters())
    experts = sum(value.numel() for name, value in parameters.items() if ".experts." in name)
    unused = experts * (config.num_local_experts - config.num_experts_per_tok) // config.num_local_experts if experts else 0
    return sum(value.numel() for value in parameters.values()), unused


@pytest.mark.parametrize("family, fields", CASES, ids=identify)
def test_parameters_are_those_of_transformers_where_fields_are_left_out(family, fields):
    transformers = pytest.importorskip("transformers")
    everything, unused = counted(transformers.AutoConfig.for_model(family, **fields))
    model = spillway.plan_model({"model_type": family, **fields})["model"]
    assert (model["parameters"], model["active_parameters"]) == (everything, everything - unused)


@pytest.mark.parametrize("family, fields", LARGE, ids=identify)
def test_parameters_are_those_of_transformers_where_it_writes_the_file(family, fields, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, **fields)
    everything, unused = counted(config)
    config.save_pretrained(tmp_path)
    for model in (tmp_path, tmp_path / "config.json", config):
        found = spillway.plan_model(model)["model"]
        assert (found["parameters"], found["active_parameters"]) == (everything, everything - unused)
        assert (found["layers"], found["hidden"]) == (config.num_hidden_layers, config.hidden_size)


def test_hostile_configurations_are_errors_that_name_the_fault(tmp_path):
    path = tmp_path / "config.json"
    llama = {"model_type": "llama", **TINY}
    for text, words in [
        ("", "is not JSON"),
        ("[" * 1_000_000, "recursion limit"),
        ("[1]", "is not a JSON object"),
        (json.dumps({**llama, "hidden_size": -64}), "hidden_size: is -64"),
        (json.dumps({**llama, "hidden_size": 10**30}), r"hidden_size: is 1e\+30"),
        (json.dumps({**llama, "num_hidden_layers": 2**20, "hidden_size": 2**32}), "the limit is"),
        (json.dumps({"model_type": "llama"}), "lacks num_hidden_layers, hidden_size, vocab_size"),
        (json.dumps({"model_type": "rwkv"}), "lacks parameters, num_hidden_layers, hidden_size, vocab_size"),
        ("\0" * 100, "is not JSON"),
    ]:
        path.write_text(text)
        with pytest.raises(spillway.InvalidArgumentError, match=words) as error:
            spillway.plan_model(path)
        assert len(str(error.value)) < 1000
    with path.open("wb") as file:
        file.truncate(1 << 30)
    os.mkfifo(tmp_path / "fifo")
    for hostile, words in [
        (path, "longer than 1048576 bytes"),
        (tmp_path / "fifo", "not a regular file"),
        ("/dev/zero", "not a regular file"),
        ("no-such-model", "the models of the papers are"),
    ]:
        with pytest.raises(spillway.InvalidArgumentError, match=words):
            spillway.plan_model(hostile)


def test_wrong_arguments_are_refused_by_name():
    for options, words in [
        ({"colour": 1}, "colour is not an option"),
        ({"ranks": 0}, "ranks: is 0"),
        ({"ranks": -1}, "--ranks"),
        ({"sequence": 2**40}, "sequence: is"),
        ({"gpu_memory": "much"}, "gpu-memory"),
        ({"machine": "dgx"}, "gh200"),
        ({"link_gbps": "nan"}, "link to the GPU"),
        ({"link_gbps": 0}, "link to the GPU"),
        ({"paths": ["/no/such/folder"]}, "spillway tune"),
        ({"paths": [".:1:-1:1GB"]}, "path.write"),
        ({"profile": "/no/such/file"}, "no such file"),
        ({"machine": "a\0b"}, "zero byte"),
        ({"adam_report": "/no/such/file"}, "adam-report"),
        ({"strategy": "tier"}, "--svg"),
    ]:
        with pytest.raises(spillway.InvalidArgumentError, match=words):
            spillway.plan_model("dos-7b", **options)
    circular = {}
    circular["self"] = circular
    for wrong in (7, circular, {1: {2}}):
        with pytest.raises(spillway.InvalidArgumentError, match="plan_model|config"):
            spillway.plan_model(wrong)


def test_measurements_of_tune_are_used_and_options_override_them(tmp_path, monkeypatch):
    profile = tmp_path / "profile"
    monkeypatch.setenv("SPILLWAY_PROFILE", str(profile))
    tool = spillway._native.tool_path()
    subprocess.run([tool, "tune", "--dir", tmp_path, "--seconds", "5"], check=True, stdout=subprocess.DEVNULL)
    (entry,) = json.loads(profile.read_text())["filesystems"].values()
    link = {"out_f32": 3e9, "out_native": 6e9, "in_f32": 3e9, "in_native": 5e9, "step_f32": 1e9, "step_native": 1.5e9}
    profile.write_text(json.dumps({**json.loads(profile.read_text()), "links": {"a": link}}))
    found = spillway.plan_model("dos-7b", paths=[tmp_path])
    (path,) = found["machine"]["paths"]
    assert path["read"] == pytest.approx(1e9 * entry["read_gb_per_s"]) and path["write"] == pytest.approx(1e9 * entry["write_gb_per_s"])
    assert (found["machine"]["h2d"], found["machine"]["d2h"], found["machine"]["cpu"]) == (10e9, 12e9, 1.5e9)
    assert found["sources"]["h2d"] == f"profile {profile}"
    found = spillway.plan_model("dos-7b", link_gbps=7, cpu_adam_gbps=56, paths=[f"{tmp_path}:2:1:3GB"])
    assert (found["machine"]["h2d"], found["machine"]["cpu"], found["sources"]["cpu"]) == (7e9, 2e9, "option")
    assert found["machine"]["paths"] == [{"name": str(tmp_path), "read": 2e9, "write": 1e9, "capacity": 3_000_000_000}]
    profile.write_text(json.dumps({"version": 2, "links": {"a": link, "b": link}}))
    with pytest.raises(spillway.InvalidArgumentError, match="profile-link"):
        spillway.plan_model("dos-7b")
    assert spillway.plan_model("dos-7b", profile_link="b")["machine"]["h2d"] == 10e9


# Prints the peak of the process's memory beyond that before `work`, and what `work` returns.
MEASURE = """
import gc, json, pathlib, sys
import numpy, spillway
sizes, folders, limit, split = json.loads(sys.argv[1])
adam = spillway.Adam(lr=1e-3)
adam.step([tuple(numpy.ones(1000, numpy.float32) for _ in range(4))])

def resident(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

def gradient(size):
    return numpy.full(size, 0.01, numpy.float16)

def in_memory():
    states = [[numpy.full(size, 0.5, numpy.float32) for _ in range(3)] for size in sizes]
    grads, copies = [gradient(size) for size in sizes], [numpy.ones(sizes[0], numpy.float16) for _ in range(2)]
    for _ in range(3):
        for at, (state, grad) in enumerate(zip(states, grads)):
            adam.step([(state[0], grad, state[1], state[2], copies[at % 2][:grad.size])])
    return {}

def tiered():
    grads = [gradient(size) for size in sizes]
    weights = [numpy.zeros(size, numpy.uint16) if split else None for size in sizes]
    with spillway.Tier(folders, job="plan") as tier, \\
            spillway.Swap(tier, sizes, host_memory=limit, huge_pages=False, pin_memory=False, split_master=split) as swap:
        swap.fill([(None, None, None)] * len(sizes))
        rows = list(zip(grads, weights))
        for _ in range(2):
            swap.step(adam, rows, uint16_dtype="bf16")
        before, steps = tier.paths(), 4
        for _ in range(steps):
            swap.step(adam, rows, uint16_dtype="bf16")
        after = tier.paths()
        return {"read": sum(b.read_bytes - a.read_bytes for a, b in zip(before, after)) / steps,
                "written": sum(b.written_bytes - a.written_bytes for a, b in zip(before, after)) / steps,
                "blocks": [path.blocks for path in after], "budget": swap.budget.host_bytes, "cached": swap.budget.cached,
                "stored": swap.budget.state_bytes, "files": sum(path.file_bytes for path in after)}

gc.collect()
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
found = tiered() if folders else in_memory()
print(json.dumps({"peak": resident("VmHWM") - before, **found}))
"""
SIZES = [(4, 512), (8, 640), (12, 768)]


def planned(layers, hidden, tmp_path, **options):
    config = {
        "model_type": "llama",
        "vocab_size": 4000,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "intermediate_size": 3 * hidden,
    }
    paths = [f"{tmp_path / name}:2:1:1TB" for name in ("a", "b")]
    return spillway.plan_model(config, paths=paths, sub_group_size=1 << 20, **options)


def measured(child_environment, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(arguments)], env=child_environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def subgroups(found):
    size, shard = found["run"]["subgroup"], found["shard_parameters"]
    return [size] * (shard // size) + [shard % size] * (shard % size > 0)


def outcome(found, name):
    return next(strategy for strategy in found["strategies"] if strategy["strategy"] == name)


def test_residents_have_the_gpu_memory_that_is_left_and_their_effect_is_beside_the_plan_without_them():
    model = {"parameters": 10**9, "num_hidden_layers": 10, "hidden_size": 1024, "vocab_size": 1000}
    options = {"machine": "dos-h100", "ranks": 1, "sub_group_size": 10**8}
    found = spillway.plan_model(model, gpu_memory=12 * 10**9, **options)
    kept, without = outcome(found, "interleave-residents"), outcome(found, "interleave")
    residents = kept["residents"]
    assert 0 < residents["subgroups"] < found["subgroups"] == 10 and residents["parameters"] == residents["subgroups"] * 10**8
    assert residents["bytes"] == 12 * residents["parameters"] <= kept["gpu"]["states"]
    assert kept["fits"] and kept["gpu_bytes"] <= 0.9 * 12 * 10**9
    assert kept["seconds"]["step"] < without["seconds"]["step"] and kept["host_bytes"] <= without["host_bytes"]
    nothing = {"subgroups": 0, "parameters": 0, "bytes": 0}
    assert all(one["residents"] == nothing for one in found["strategies"] if one is not kept)
    tight = spillway.plan_model(model, gpu_memory=4 * 10**9, **options)
    assert "interleave-residents" not in [one["strategy"] for one in tight["strategies"]]
    more = spillway.plan_model(model, gpu_memory=12 * 10**9, accumulation=2, **options)
    assert "interleave-residents" not in [one["strategy"] for one in more["strategies"]]


@pytest.mark.parametrize("layers, hidden", SIZES)
def test_memory_of_a_run_in_memory_is_as_planned(layers, hidden, tmp_path, child_environment):
    found = planned(layers, hidden, tmp_path)
    sizes = subgroups(found)
    plan = outcome(found, "host")["host"]
    # The plan's staging buffers are a bucket each; the run's are a subgroup each.
    expected = plan["states"] + plan["gradients"] + 2 * 2 * sizes[0]
    seen = measured(child_environment, sizes, [], 0, False)["peak"]
    assert seen == pytest.approx(expected, rel=0.1), (seen, expected)


@pytest.mark.sampled(cases=4)
@pytest.mark.parametrize("strategy, memory", [("tier", "1GB"), ("tier-cache", None), ("tier-split-master", None)])
@pytest.mark.parametrize("layers, hidden", SIZES)
def test_memory_and_bytes_of_a_tiered_run_are_as_planned(layers, hidden, strategy, memory, tmp_path, child_environment):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    # Room for the gradients, the working buffers and some subgroups.
    count = len(subgroups(planned(layers, hidden, tmp_path)))
    memory = memory or ((2 * count + 14 * 5 + 12 * count // 3) << 20)
    found = planned(layers, hidden, tmp_path, host_memory=memory)
    plan = outcome(found, strategy)
    assert plan["fits"]
    seen = measured(
        child_environment,
        subgroups(found),
        [str(tmp_path / name) for name in ("a", "b")],
        plan["host"]["states"],
        strategy == "tier-split-master",
    )
    assert seen["cached"] == plan["cached_subgroups"] and (strategy == "tier") == (seen["cached"] == 0)
    # Without a split master the run writes no 16-bit weights, for which the plan has staging buffers.
    staging = 0 if strategy == "tier-split-master" else plan["host"]["weights"]
    close = {
        "budget": plan["host"]["states"],
        "peak": plan["host_bytes"] - staging,
        "stored": sum(path["bytes"] for path in plan["paths"]),
        "read": plan["traffic"]["path_read"],
        "written": plan["traffic"]["path_written"],
    }
    for name, expected in close.items():
        assert seen[name] == pytest.approx(expected, rel=0.1), (name, seen, plan)


@pytest.mark.parametrize("commits", [True, False])
def test_the_space_of_a_path_is_as_planned(commits, tmp_path):
    numpy = pytest.importorskip("numpy")
    count, size = 16, 1 << 18
    description = {"parameters": count * size, "num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 64}
    found = spillway.plan_model(description, paths=[f"{tmp_path}:1:1:1GB"], sub_group_size=size, commits=commits)
    (plan,) = outcome(found, "tier")["paths"]
    adam, rows = spillway.Adam(), [(numpy.ones(size, numpy.float16), None)] * count
    with spillway.Tier([tmp_path], job="space") as tier, spillway.Swap(tier, [size] * count, huge_pages=False, pin_memory=False) as swap:
        swap.fill([(None, None, None)] * count)
        for number in range(1, 5):
            swap.step(adam, rows)
            if commits:
                swap.commit(number)
        (seen,) = tier.paths()
    # Less where fewer writes are in flight at once than the buffers allow.
    assert 0.8 * plan["space_bytes"] <= seen.file_bytes <= 1.1 * plan["space_bytes"]
