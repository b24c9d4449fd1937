"""Proves that `python -m spillway doctor JOB` says what of a job Spillway serves, what it saves, what stands against it and what to add,
within a screen. A script is never run. What cannot be read is one line with cause and cure, and status 2."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from spillway import planner
from spillway._doctor import command, machine, savings, script
from spillway.deepspeed import job

#: Lines of a screen.
SCREEN = 30


@pytest.fixture
def doctor(child_environment, tmp_path):
    """Runs the doctor on a job's file, which it makes."""

    def run(*arguments, name=None, text=None, **extra):
        if name is not None:
            path = tmp_path / name
            path.write_bytes(text if isinstance(text, bytes) else (json.dumps(text) if isinstance(text, (dict, list)) else text).encode())
            arguments = (name, *arguments)
        environment = {key: value for key, value in child_environment.items() if key != "SPILLWAY_DEEPSPEED"}
        done = subprocess.run(
            [sys.executable, "-m", "spillway", "doctor", *arguments],
            cwd=tmp_path,
            env={**environment, **extra},
            capture_output=True,
            text=True,
            errors="surrogateescape",
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


def served(text):
    """The names of the parts that are served, and of those that are not."""
    rows = re.findall(r"^  (yes|no) +(\S+)", text, re.M)
    return [name for said, name in rows if said == "yes"], [name for said, name in rows if said == "no"]


def refusal(done):
    """The single line of an error of usage."""
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.startswith("spillway: doctor: ") and done.stderr.count("\n") == 1 and "; " in done.stderr, done.stderr
    return done.stderr


ZERO3 = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
ADAMW = {"type": "AdamW", "params": {"lr": "auto"}}


def test_a_configuration_with_states_in_host_memory(doctor):
    given = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "optimizer": ADAMW, "train_batch_size": "auto"}
    done = doctor("--parameters", "7B", "--host-memory", "256GB", name="ds.json", text=given)
    assert (done.returncode, done.stderr) == (0, "")
    assert served(done.stdout) == (["cpu_adam"], []) and "SPILLWAY_DEEPSPEED=1 deepspeed" in done.stdout
    assert re.search(r"^  now .* host .* exposed [\d.]+ s a step$", done.stdout, re.M) and " GB of GPU memory" in done.stdout
    assert len(done.stdout.splitlines()) <= SCREEN
    assert "SPILLWAY_DEEPSPEED=1" not in doctor("ds.json", SPILLWAY_DEEPSPEED="1").stdout


@pytest.mark.parametrize(
    "kind, parts",
    [
        ("Adam", (["cpu_adam"], [])),
        ("adagrad", (["cpu_adagrad"], [])),
        ("Lion", (["cpu_lion"], [])),
        ("Lamb", ([], ["optimizer"])),
        (None, (["cpu_adam"], [])),
    ],
)
def test_the_op_follows_from_the_optimizer(kind, parts):
    found = job.findings({"zero_optimization": ZERO3, **({"optimizer": {"type": kind}} if kind else {})}, "0.19.8")
    named = [[part.name.split()[0] for part in found.parts if (part.reason is None) is yes] for yes in (True, False)]
    assert tuple(named) == parts and found.is_served is bool(parts[0])


def test_states_and_parameters_on_disks(doctor, tmp_path):
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    given = {"zero_optimization": {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme}, "optimizer": ADAMW}
    done = doctor("--parameters", "7B", f"--path={tmp_path}:5:4:500GB", name="ds.json", text=given)
    assert done.returncode == 0 and served(done.stdout)[0] == ["cpu_adam", "async_io", "states", "parameters"]
    block = json.loads(re.search(r'"spillway": ({.*})', done.stdout)[1])
    assert block["paths"] == [str(tmp_path)] and block["resume"] is True
    assert re.search(r"^  now +tier .* paths [\d.]+ GB", done.stdout, re.M)
    # The line that it prints is one that the doctor and DeepSpeed's engine accept.
    done = doctor(name="ds.json", text={**given, "spillway": block})
    assert done.returncode == 0 and '"spillway": {' not in done.stdout
    given["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": f"{tmp_path}/missing"}
    assert f"{tmp_path}/missing is no directory" in doctor(name="ds.json", text=given).stdout
    assert not (tmp_path / "missing").exists()


def test_without_a_profile_paths_are_not_planned(doctor, tmp_path):
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    profile = {"SPILLWAY_PROFILE": str(tmp_path / "none")}
    done = doctor("--parameters", "7B", name="ds.json", text={"zero_optimization": zero}, **profile)
    assert done.returncode == 0 and "not planned: " in done.stdout and "spillway tune" in done.stdout
    assert "--gpu-memory" in refusal(doctor("ds.json", "--parameters", "7B", "--gpu-memory", "much", **profile))


@pytest.mark.parametrize(
    "zero, block, said",
    [
        (ZERO3, {"host_memor": 1}, "did you mean host_memory"),
        (ZERO3, {"resume": True}, "spillway.resume is for optimizer states on a tier"),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {"interleave": {}}, "needs zero_optimization with stage 3"),
        (ZERO3, 7, "not an object"),
        (ZERO3, {"enabled": "yes"}, "true or false is needed"),
    ],
)
def test_a_block_that_spillway_refuses_is_refused(zero, block, said):
    found = job.findings({"zero_optimization": zero, "optimizer": ADAMW, "spillway": block}, "0.19.8")
    refused = [f"{one.text}; {one.cure}" for one in found.obstacles if one.refuses]
    assert len(refused) == 1 and said in refused[0] and not found.is_served


def test_a_part_that_a_version_lacks_is_refused_if_the_block_asks_for_it():
    given = {"zero_optimization": ZERO3, "optimizer": ADAMW, "spillway": {"interleave": {}}}
    assert job.findings(given, "0.19.8").is_served and not job.findings(given, "0.18.9").is_served
    lacking = job.findings({"zero_optimization": ZERO3, "optimizer": ADAMW}, "0.13.1")
    assert [part.reason for part in lacking.parts] == [
        "the ops are tested from DeepSpeed 0.14.0, and this is 0.13.1"
    ] and not lacking.is_served


@pytest.mark.parametrize(
    "given, said",
    [
        ({"zero_optimization": {"stage": "auto"}}, "stage is 'auto'"),
        ({"zero_optimization": {"stage": True}}, "stage is True"),
        ({"zero_optimization": 3}, "zero_optimization is 3, not an object"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": ["cpu"]}}}, "device is ['cpu']"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}, "offload_optimizer is 'cpu', not an object"),
        ({"zero_optimization": ZERO3, "optimizer": {"params": {}}}, "optimizer.type is None"),
        ({"zero_optimization": ZERO3, "optimizer": {"type": 3}}, "optimizer.type is 3"),
        ({"zero_optimization": ZERO3, "optimizer": "AdamW"}, "optimizer is 'AdamW', not an object"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "neither nvme_path nor spillway.paths"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": 3}}}, "nvme_path is 3"),
    ],
)
def test_odd_values_are_refused_with_their_names(given, said):
    found = job.findings(given, "0.19.8")
    (refused,) = [one for one in found.obstacles if one.refuses]
    assert said in f"{refused.text}; {refused.cure}" and refused.cure and not found.is_served


def test_a_configuration_without_offload_has_nothing_to_serve(doctor):
    for given in ({}, {"optimizer": ADAMW}, {"zero_optimization": {"stage": 1}, "optimizer": ADAMW}):
        done = doctor(name="ds.json", text=given)
        assert done.returncode == 1 and served(done.stdout)[0] == [] and '"offload_optimizer": {"device": "cpu"}' in done.stdout


def test_odd_numbers_of_a_job_are_not_planned(doctor):
    for name, value in (("train_micro_batch_size_per_gpu", 10**30), ("gradient_accumulation_steps", -1), ("train_batch_size", "auto")):
        given = {"zero_optimization": {**ZERO3, "sub_group_size": True}, "optimizer": ADAMW, name: value}
        done = doctor("--parameters", "7B", name="ds.json", text=given)
        assert done.returncode == 0 and "not planned: " in done.stdout, (name, done)


def test_comments_are_read_as_deepspeed_reads_them(doctor):
    pytest.importorskip("hjson")
    text = '{ // where\n # what\n "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}} /* and */ }'
    assert served(doctor(name="ds.json", text=text).stdout) == (["cpu_adam"], [])


BAD = {
    "empty": b"",
    "list": b"[1, 2]",
    "number": b"7",
    "cut": b'{"zero_optimization": {"stage": 2',
    "binary": bytes(range(256)) * 9,
    "deep": b"[" * 100_000,
    "deep-object": b'{"a":' * 50_000,
    "twice": b'{"optimizer": {}, "optimizer": {}}',
    "twice-with-comments": b'{"optimizer": {}, # and\n "optimizer": {}}',
    "broken": b'{"optimizer": [}',
    "large": b"{" + b" " * (1 << 20) + b"}",
}


@pytest.mark.parametrize("bad", BAD)
def test_what_is_no_configuration_is_one_line(doctor, bad):
    assert "ds.json" in (told := refusal(doctor(name="ds.json", text=BAD[bad]))) or "not an object" in told


def test_a_file_that_cannot_be_read_is_one_line(doctor, tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "loop.json").symlink_to("loop.json")
    (tmp_path / "gone.py").symlink_to("nowhere.py")
    for name in ("folder", "pipe.json", "loop.json", "gone.py", "missing.json", "/dev/zero", "a\nb.json", os.fsdecode(b"\xff.json")):
        refusal(doctor(name))
    (tmp_path / "real.json").write_text('{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}')
    (tmp_path / "link.json").symlink_to("real.json")
    assert doctor("link.json").returncode == 0


def test_usage_is_one_line(doctor):
    for arguments in (
        ["--torch", "x.py"],
        ["a.py", "b.py"],
        ["--torch", "--frobnicate"],
        ["--torch", "--parameters"],
        ["--torch", "--ranks", "x"],
    ):
        assert "--help" in refusal(doctor(*arguments))
    for number in ("", "7 billions", "-7B", "0", "1e9B", "nan", "9" * 400, "7BB"):
        assert "such as 7B" in refusal(doctor("--torch", f"--parameters={number}"))
    # Also without a number of parameters, when nothing is planned.
    assert "--host-memory" in refusal(doctor("--torch", "--host-memory", "5QB"))


def test_a_terminal_gets_no_commands_from_a_configuration(doctor):
    given = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere/\x1b[2Jx\ny"}}}
    done = doctor(name="ds.json", text={**given, "optimizer": {"type": "\x1b[31m"}})
    assert done.stdout and "\x1b" not in done.stdout + done.stderr


SCRIPT = """
import torch, deepspeed
from torch import optim as o
from torch.optim import *
import torch.optim as again
raise SystemExit("it ran")
first = o.AdamW(params)
second = again.NAdam
third = torch.optim.LBFGS(params)
fourth = Adagrad(params)
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam as Fused
fifth, sixth = DeepSpeedCPUAdam(params), Fused(params)
scheduler = torch.optim.lr_scheduler.LambdaLR(first)
"""


def test_a_script_is_read_and_not_run(doctor):
    done = doctor(name="train.py", text=SCRIPT)
    assert done.returncode == 0 and "it ran" not in done.stdout + done.stderr
    yes, no = served(done.stdout)
    assert yes == ["torch.optim.AdamW", "torch.optim.NAdam", "torch.optim.Adagrad", "cpu_adam"]
    assert no == ["torch.optim.LBFGS", "deepspeed"]
    assert "line 7" in done.stdout and "from spillway.torch import AdamW" in done.stdout
    assert "spillway.torch.Staged(torch.optim.NAdam" in done.stdout and "spillway.deepspeed.install()" in done.stdout
    assert len(done.stdout.splitlines()) <= SCREEN


IN_USE = {
    "the module": "import torch, spillway.torch\noptimizer = spillway.torch.offload(model, torch.optim.AdamW, lr=1e-3)",
    "another name": "import spillway.torch as st\noptimizer = st.offload(model, lr=1e-3)",
    "the package": "from spillway import torch as other\noptimizer = other.offload(model, lr=1e-3)",
    "a name": "from spillway.torch import offload\noffload(model, lr=1e-3)",
    "all names": "from spillway.torch import *\noffload(model, lr=1e-3)",
    "in a function": "def make(model):\n    from spillway.torch import offload as o\n    return o(model, lr=1e-3)",
    "a variable": "import torch\nfrom spillway.torch import offload\nkind = torch.optim.AdamW\noffload(model, kind)",
}


@pytest.mark.parametrize("imported", IN_USE)
def test_spillway_in_a_script_is_found_however_it_is_imported(doctor, imported):
    done = doctor("--parameters", "7B", "--host-memory", "256GB", name="train.py", text=IN_USE[imported])
    assert done.returncode == 0 and served(done.stdout) == (["spillway.torch.offload"], []), done.stdout
    assert "in use already" in done.stdout and "\nadd\n" not in done.stdout
    assert re.search(r"^  now +host ", done.stdout, re.M), done.stdout


@pytest.mark.parametrize(
    "call, strategy, directories",
    [
        ("offload(model)", "host", []),
        ("offload(model, moment_dtype='int8', master='split')", "host-int8-moments", []),
        ("offload(model, moment_dtype=torch.bfloat16, master='split')", "host-split-master", []),
        ("AdamW(params, moment_dtype=torch.bfloat16)", "host-bf16-moments", []),
        ("offload(model, tail='auto')", "speculation", []),
        ("AdamW(params, tier=None)", "host", []),
        ("AdamW(params, tier='/mnt/a')", "tier", ["/mnt/a"]),
        ("AdamW(params, tier=['/mnt/a', 's3://bucket/b'], host_memory='auto')", "tier-cache", ["/mnt/a"]),
        ("AdamW(params, tier=TierOptions(places, job='run'))", "tier", ["/mnt/b"]),
        ("AdamW(params, tier=arguments.tier)", "tier", []),
    ],
)
def test_the_strategy_of_a_script_is_that_of_its_call(tmp_path, call, strategy, directories):
    path = tmp_path / "train.py"
    path.write_text(f"import torch\nfrom spillway.torch import *\nfrom spillway.torch import TierOptions\nplaces = ['/mnt/b']\n{call}")
    found = script.findings(str(path), None)
    assert (found.strategy, found.directories, found.is_served) == (strategy, directories, True)


def test_a_tier_in_use_is_compared_with_what_fits(doctor, tmp_path):
    text = f"from spillway.torch import AdamW\nAdamW(model.parameters(), tier={str(tmp_path)!r}, overlap=True)"
    machine = ("--parameters", "7B", "--gpu-memory", "24GB", "--host-memory", "64GB")
    done = doctor(*machine, f"--path={tmp_path}:3:2:500GB", name="train.py", text=text)
    assert done.returncode == 0 and re.search(r"^  now +tier .* paths [\d.]+ GB", done.stdout, re.M) and "the fastest" in done.stdout
    unknown = doctor(*machine, name="other.py", text=text.replace(repr(str(tmp_path)), "arguments.tier"))
    assert unknown.returncode == 0 and "now: states on a tier" in unknown.stdout and "does not fit" not in unknown.stdout


def test_deepspeeds_ops_in_use_need_no_further_line(doctor):
    text = (
        "import spillway.deepspeed\nfrom deepspeed.ops.adam import DeepSpeedCPUAdam\nspillway.deepspeed.install()\nDeepSpeedCPUAdam(params)"
    )
    done = doctor(name="train.py", text=text)
    assert done.returncode == 0 and served(done.stdout)[0] == ["spillway.deepspeed.install", "cpu_adam"]
    assert "SPILLWAY_DEEPSPEED=1 deepspeed" not in done.stdout


def test_a_script_names_its_configuration(doctor, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": ZERO3, "optimizer": ADAMW}))
    for text in (
        'import deepspeed\ndeepspeed.initialize(model=model, config="ds.json")',
        "from deepspeed import initialize as begin\nchosen = {'zero_optimization': {'stage': 2, 'offload_optimizer': {'device': 'cpu'}}}\n"
        "begin(model=model, config=chosen)",
        'from transformers import TrainingArguments\nTrainingArguments(deepspeed="ds.json")',
    ):
        assert "cpu_adam" in served(doctor(name="train.py", text=text).stdout)[0], text
    done = doctor(name="train.py", text="import deepspeed\ndeepspeed.initialize(model=model, config=arguments.config)")
    assert done.returncode == 1 and "the configuration is known only when it runs" in done.stdout
    done = doctor(name="train.py", text='import deepspeed\ndeepspeed.initialize(model=model, config="gone.json")')
    assert "'gone.json' does not exist here" in done.stdout


def test_a_script_without_an_optimizer_has_nothing_to_serve(doctor):
    for text in ("print(1)", "", "class AdamW: pass\nAdamW()", "import optim\noptim.AdamW()"):
        done = doctor(name="train.py", text=text)
        assert done.returncode == 1 and "nothing that Spillway replaces was found" in done.stdout


@pytest.mark.parametrize(
    "text, said",
    [
        ("def f(:", "line 1"),
        ("x = 1\n  y = 2", "line 2"),
        (b"\xff\xfe\x00", "train.py"),
        (b"x = '\x00'", "train.py"),
        ("x = " + "(" * 5000 + ")" * 5000, "train.py"),
        ("x = " + "-" * 200_000 + "1", "train.py"),
    ],
)
def test_a_script_that_is_none_is_one_line(doctor, text, said):
    assert said in refusal(doctor(name="train.py", text=text))


def test_a_job_of_torch(doctor):
    done = doctor("--torch", "--parameters", "7B", "--host-memory", "256GB", "--gpu-memory", "80GB")
    assert done.returncode == 0 and "torch.optim.AdamW" in served(done.stdout)[0] and len(done.stdout.splitlines()) <= SCREEN
    # The lines are those of the planner.
    plan = planner.plan_model(parameters="7B", host_memory="256GB", gpu_memory="80GB")
    assert plan["calls"]["speculation"] in done.stdout and re.search(r"^  now .* gpu .* does not fit$", done.stdout, re.M)
    assert "nothing fits this machine" in doctor("--torch", "--parameters", "7B", "--host-memory", "1GB", "--gpu-memory", "1GB").stdout


def test_a_models_configuration_is_a_job_of_torch(doctor):
    model = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "vocab_size": 1000, "intermediate_size": 1024}
    done = doctor(name="config.json", text={**model, "num_attention_heads": 8})
    assert done.returncode == 0 and re.search(r"^  now .* gpu ", done.stdout, re.M)


@pytest.mark.parametrize(
    "text, number", [("7B", 7 * 10**9), ("350m", 350 * 10**6), ("1.5B", 1_500_000_000), ("2000000", 2 * 10**6), ("1T", 10**12)]
)
def test_numbers_of_parameters(text, number):
    _, plan = savings.planned(script.of_torch(), {"parameters": text})
    assert plan["model"]["parameters"] == number


def test_without_a_job_it_is_the_tools_doctor(doctor):
    done = doctor("--json", "--dir", ".")
    assert done.returncode == 0 and {"check", "verdict", "found"} <= json.loads(done.stdout)["findings"][0].keys()
    assert "--machine-only" in doctor("--help").stdout
    assert command.concerns_a_job(["--dir", "x", "job.py"]) and not command.concerns_a_job(["--dir", "x", "--json"])


def test_what_the_tools_doctor_finds_stands_against_the_job(doctor):
    done = doctor("--torch", SPILLWAY_KERNEL="scalar")
    assert (
        done.returncode == 0
        and "kernel: scalar, forced by SPILLWAY_KERNEL" in done.stdout
        and "to do: unset SPILLWAY_KERNEL" in done.stdout
    )
    missing = doctor("--torch", SPILLWAY_LIBRARY="/nowhere/libspillway.so")
    assert (missing.returncode, missing.stdout, missing.stderr.count("\n")) == (1, "", 1) and "make lib" in missing.stderr


def test_versions_that_were_not_run_and_limits_stand_against_a_job(monkeypatch):
    versions = {"torch": "2.14.1+cpu", "deepspeed": "0.19.8"}
    monkeypatch.setattr(machine, "version", versions.get)
    monkeypatch.setattr(machine, "_is_exempt", lambda: False)
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    told = [one.text for one in machine.obstacles((), ("torch", "deepspeed", "megatron-core"), 112 * 10**9)]
    assert "torch 2.14.1+cpu was not run; 2.11, 2.13, 2.15 were" in told and "megatron-core is not installed in this Python" in told
    assert any(one.startswith("memlock: 0.01 GiB may be locked, and the states need 104 GiB") for one in told)
    assert not any(one.startswith("deepspeed") for one in told)
    versions["torch"] = "2.13.0+cpu"
    assert not any(one.startswith("torch") for one in [one.text for one in machine.obstacles((), ("torch",), 0)])


def test_the_versions_are_those_of_the_page(repository):
    text = (repository / "docs" / "compatibility.md").read_text()
    assert all(version in text for versions in machine.RUN.values() for version in versions)


def test_the_doctor_imports_no_framework(child_environment, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    code = (
        "import sys; from spillway._doctor import command; command.run(['train.py']); "
        "sys.exit(sum(name in sys.modules for name in ('torch', 'deepspeed', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=child_environment, capture_output=True).returncode == 0


def test_scripts_of_every_kind_are_read():
    for path in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        script.findings(str(path), "0.19.8")
