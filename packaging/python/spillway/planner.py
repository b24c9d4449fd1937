"""Plans the training of a model on a machine: memory, traffic and seconds of each strategy, and the best strategy.

    found = spillway.plan_model("config.json", machine="gh200", micro_batch=4)
    found["best"], found["model"]["parameters"]

The plan is that of the command line tool `spillway plan MODEL --json`, as the planner's page in the documentation
describes it. It needs no GPU and allocates none of the memory that it plans."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from . import _native
from .errors import InvalidArgumentError, LibraryNotFoundError

__all__ = ["plan_model"]

_OPTIONS = (
    "machine",
    "ranks",
    "zero_stage",
    "micro_batch",
    "sequence",
    "accumulation",
    "sub_group_size",
    "gpu_memory",
    "host_memory",
    "gpu_reserve",
    "link_gbps",
    "cpu_adam_gbps",
    "gpu_adam_gbps",
    "gpu_tflops",
    "profile",
    "profile_link",
    "adam_report",
    "svg",
    "strategy",
)


def plan_model(
    model: str | os.PathLike[str] | Mapping[str, Any] | Any = None,
    *,
    parameters: int | str | None = None,
    paths: Sequence[str | os.PathLike[str]] = (),
    recompute: bool = True,
    commits: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Returns the plan of a model's training on a machine.

    Args:
        model: A config.json, a folder with one, the name of a paper's model, a dictionary with the fields of a
            config.json, or a configuration of transformers.
        parameters: In place of a model: a decoder with this number of parameters, such as "7B", of an assumed shape.
        paths: Paths of the tier, each as "DIR" or "DIR:READ:WRITE:CAPACITY", with speeds in GB/s.
        recompute: Activations are recomputed from one checkpoint per layer.
        commits: Steps are committed, so that the paths keep the last committed state beside the new one.
        options: Further options of the tool: machine, ranks, zero_stage, micro_batch, sequence, accumulation,
            sub_group_size, gpu_memory, host_memory, gpu_reserve, link_gbps, cpu_adam_gbps, gpu_adam_gbps, gpu_tflops,
            profile, profile_link, adam_report, svg and strategy. Memory is in bytes, or a text such as "80GB".

    Raises:
        InvalidArgumentError: The tool refused the model or an option.
        LibraryNotFoundError: The tool is missing.

    Example:
        spillway.plan_model("mlp-offload-40b", machine="mlp-offload-1")["best"]"""
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise InvalidArgumentError(f"plan_model: {unknown[0]} is not an option; pass one of {', '.join(_OPTIONS)}")
    if isinstance(paths, (str, bytes, os.PathLike)):
        raise InvalidArgumentError(f"plan_model: paths is {paths!r}; pass a list of paths")
    given = ["--" + name.replace("_", "-") + "=" + _text(name, value) for name, value in options.items() if value is not None]
    given += ["--path=" + os.fspath(path) for path in paths] + ["--no-recompute"] * (not recompute) + ["--no-commits"] * (not commits)
    if (model is None) is (parameters is None):
        raise InvalidArgumentError("plan_model: pass either a model or its number of parameters")
    if parameters is not None:
        return _run([f"--parameters={_text('parameters', parameters)}", *given])
    if isinstance(model, (str, os.PathLike)):
        return _run([*given, "--", _text("model", model)])
    fields = model if isinstance(model, Mapping) else getattr(model, "to_dict", lambda: None)()
    if not isinstance(fields, Mapping):
        raise InvalidArgumentError(
            f"plan_model: model is a {type(model).__name__}; pass a path, a name, a dictionary or a configuration of transformers"
        )
    # Here and in _run: `import spillway` must be fast.
    import json
    import tempfile

    with tempfile.TemporaryDirectory(prefix="spillway-plan-") as folder:
        path = os.path.join(folder, "config.json")
        try:
            text = json.dumps(dict(fields), default=str)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"plan_model: the configuration cannot be written as JSON: {error}") from error
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return _run([*given, "--", path])


def _text(name: str, value: Any) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    if "\0" in text:
        raise InvalidArgumentError(f"plan_model: {name} contains a zero byte")
    return f"{text}B" if name.endswith(("_memory", "_reserve")) and isinstance(value, int) else text


def _run(given: list[str]) -> dict[str, Any]:
    import subprocess

    from . import _files

    tool = _native.tool_path()
    try:
        made = subprocess.run([tool, "plan", "--json", *given], capture_output=True, text=True, check=False)
    except ValueError as error:
        raise InvalidArgumentError(f"plan_model: {error}") from error
    except OSError as error:
        raise LibraryNotFoundError(
            f"plan_model: cannot run {tool}: {error.strerror}; reinstall the spillway wheel, or build the tool: make lib"
        ) from error
    if made.returncode:
        raise InvalidArgumentError("plan_model: " + made.stderr.strip().removeprefix("spillway: "))
    found: dict[str, Any] = _files.parse_json(made.stdout.encode())
    return found
