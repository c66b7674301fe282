"""The command line that asks the same again: of a stored run, of a plan."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from fourfold import options
from fourfold.errors import UserError
from fourfold.escape import shell_line
from fourfold.spec import catalog, codec
from fourfold.spec.batch import Ramp
from fourfold.spec.cluster import Cluster
from fourfold.spec.model import ModelShape
from fourfold.spec.run import RunSpec
from fourfold.spec.sweep import leaves
from fourfold.spec.toml import toml_text
from fourfold.verbs.question import named_axes
from fourfold.verbs.requests import PlanRequest, ReportRequest

# Of a cluster that is described, not named.
CLUSTER_FILE = "cluster.toml"
_RUN_FLAGS = ("steps", "warmup", "data", "tag", "note")


def bench_command(spec: RunSpec) -> str:
    """A line for a shell; a model that no preset has needs a file of the run, which is made."""
    plain = codec.encode(spec, sparse=True)
    model, env = plain.pop("model"), plain.get("policy", {}).pop("env", {})
    if spec.settle and "warmup" not in plain:
        plain.pop("settle")
    elif not spec.settle:
        plain["warmup"] = spec.warmup  # which says that it is not to be prolonged
    if not _is_preset(spec.model):
        text = toml_text(
            {"model": model, **plain, "policy": plain.get("policy", {}) | {"env": env}}
        )
        return f"cat > run.toml <<'END'\n{text}END\nfourfold bench --spec run.toml"
    words = ["fourfold", "bench", "--model", spec.model.name, *_flags(plain)]
    words += [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    return shell_line(words)


def _is_preset(model: ModelShape) -> bool:
    try:
        return catalog.model(model.name) == model
    except UserError:
        return False


def _flags(plain: Mapping[str, Any]) -> Iterator[str]:
    """Every field by its own flag, or by --set."""
    flags = {one.dest: one.names[0] for one in options.run_options(*_RUN_FLAGS) if one.dest}
    for path, value in leaves(plain):
        leaf = path.rpartition(".")[2]
        if leaf in flags:
            yield from _words(flags[leaf], str(value))
        else:
            yield from ("--set", f"{path}={json.dumps(value)}")


def plan_command(request: PlanRequest) -> str:
    """A cluster without a name needs a file, which is made."""
    name = request.model if isinstance(request.model, str) else request.model.name
    sizes = ("seq_len", "micro_batch", "global_batch")
    run = {
        "gpus": request.gpus,
        "layout": layout_table(request.layout),
        "batch": {size: getattr(request, size) for size in sizes},
        "policy": dict(request.policy),
    }
    words = ["--model", name, *_flags(dict(_given(run))), *_request_flags(request)]
    file = ""
    if isinstance(request.cluster, Cluster):
        file = f"cat > {CLUSTER_FILE} <<'END'\n{codec.to_toml(request.cluster)}END\n"
    return file + shell_line(["fourfold", "plan", *words])


def report_command(request: ReportRequest) -> str:
    return shell_line(["fourfold", "report", *request.sources, *_request_flags(request)])


def _given(plain: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Without what is None, also in tables below."""
    for name, value in plain.items():
        if isinstance(value, Mapping):
            yield name, dict(_given(value))
        elif value is not None:
            yield name, value


def layout_table(layout: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(layout, Mapping):
        return dict(layout)
    whole, named = named_axes(layout)
    return {axis: size for axis, size in whole.to_plain().items() if axis in named}


def _request_flags(request: Any) -> Iterator[str]:
    """Flags of the fields that differ from their defaults."""
    fields = {field.name: field for field in dataclasses.fields(request)}
    for one in options.of(type(request)):
        value, flag = getattr(request, one.dest), one.names[0]
        if value is None or value == fields[one.dest].default or not flag.startswith("-"):
            continue
        if isinstance(value, tuple):
            yield from (word for item in value for word in _words(flag, str(item)))
        elif value is True:
            yield flag
        else:
            yield from _words(flag, _text(value))


def _words(flag: str, text: str) -> tuple[str, ...]:
    """A text that looks like a flag must not stand alone."""
    return (f"{flag}={text}",) if text.startswith("-") else (flag, text)


def _text(value: Any) -> str:
    if isinstance(value, Ramp):
        return ",".join(map(str, dataclasses.astuple(value)))
    return CLUSTER_FILE if isinstance(value, Cluster) else str(value)
