"""The record of a stored run, read from its plain data without building every type: ten thousand
runs are listed in seconds.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from fourfold.errors import UserError
from fourfold.result.record import KINDS, RUN_FIELDS, Record
from fourfold.result.report import OUTCOMES, RunReport
from fourfold.result.timing import timing
from fourfold.spec import Policy, check, codec
from fourfold.spec.layout import AXES, EXPERT_AXES
from fourfold.spec.words import BUNDLES, precision_name

# 'fourfold.engine.process.health.MemoryLimitError: ...' says no more than its last word.
_MODULE = re.compile(r"^(\w+\.)+(?=\w+: )")
# Counted from 0; runs that end earlier give their last loss.
LOSS_STEP = 4
# Divided by, or counted with.
_FROM_ONE = {"gpus", "nodes", *AXES, *EXPERT_AXES, "replicate", "layers", "hidden", "heads",
             "seq_len", "global_batch", "virtual_stages"}  # fmt: skip
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,), "bool": (bool,), "int": (int,), "float": (int, float),
}  # fmt: skip
_SIGNED = {"loss", "peak_rank"}


def record_of(report: RunReport) -> Record:
    return record_from(codec.dump(report), report.spec.run_id)


def record_from(plain: Any, run_id: str) -> Record:
    """From the plain data of a stored RunReport."""
    try:
        fields: dict[str, Any] = {"run_id": run_id, **_spec(plain["spec"]), **_measured(plain)}
        return checked(Record(**fields))
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"is not a stored run ({type(error).__name__}: {error})") from None


def checked(record: Record) -> Record:
    """The record, whose every value is of the kind that its readers count on."""
    for name in RUN_FIELDS:
        value, kind = getattr(record, name), KINDS[name]
        if name == "outcome":
            good = value in OUTCOMES
        elif name in _FROM_ONE or name == "micro_batch":
            good = value is not None and _is(kind, value) and value >= (name in _FROM_ONE)
        else:
            number = isinstance(value, int | float) and name not in _SIGNED
            good = _is(kind, value) and not (number and value < 0)
        check.that(good, name, value, "is not what a stored run has there")
    if sorted(record.order.split()) != sorted(AXES):
        raise UserError("is no order of the axes", field="order", value=record.order)
    return record


def _is(kind: str, value: Any) -> bool:
    if value is None:
        return kind.endswith(" | None")
    types = _TYPES.get(kind.removesuffix(" | None"))
    if types is None:  # env: pairs of texts
        pairs = value if isinstance(value, tuple) else (value,)
        return all(isinstance(p, tuple) and [type(text) for text in p] == [str] * 2 for p in pairs)
    limit = codec.MAX_INT if types == (int,) else 1e300
    return type(value) in types and (isinstance(value, str) or abs(value) <= limit)


def _spec(spec: dict[str, Any]) -> dict[str, Any]:
    model, layout, batch, policy = spec["model"], spec["layout"], spec["batch"], spec["policy"]
    replicate, shard = _dp(layout["dp"])
    return {
        "model": model.get("name", "custom"),
        "model_json": json.dumps(model, sort_keys=True),
        **{name: model[name] for name in ("layers", "hidden", "heads")},
        "gpus": spec["gpus"],
        **{axis: layout[axis] for axis in AXES},
        **{axis: layout.get(axis, 1) for axis in EXPERT_AXES},
        "experts": model.get("experts") or None,
        "dp": replicate * shard,
        "replicate": replicate,
        "order": layout.get("order", " ".join(AXES)),
        **{name: batch[name] for name in ("seq_len", "micro_batch", "global_batch")},
        **_policy(policy, spec.get("data", "")),
        "tag": spec.get("tag", ""),
        "note": spec.get("note", ""),
    }


# Fields of a policy and what they are unless said: a field added later is told apart by itself.
_USUAL: dict[str, Any] = {each.name: each.default for each in dataclasses.fields(Policy)}
# A record's `loss` is the measured one.
_SHOWN = {name: name for name in _USUAL if name in KINDS and name != "loss"}
_SHOWN |= {"compile": "compiled"}


def _policy(policy: dict[str, Any], data: str) -> dict[str, Any]:
    """Every field of a policy: as a field of its own, or among the settings."""
    told = _USUAL | policy
    compute = told["compute_dtype"] or BUNDLES[told["precision"]][1]
    precision = precision_name(told["precision"], compute)
    rest = {name: told[name] for name in sorted(_USUAL.keys() - _SHOWN.keys())} | {"data": data}
    if precision != told["precision"]:
        del rest["compute_dtype"]  # the name says it
    usual = _USUAL | {"data": ""}
    return {
        **{shown: told[name] for name, shown in _SHOWN.items()},
        "precision": precision,
        "env": tuple(sorted(dict(told["env"]).items())),
        "settings": " ".join(f"{n}={_text(v)}" for n, v in rest.items() if v != usual[n]),
    }


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _measured(plain: dict[str, Any]) -> dict[str, Any]:
    environment = plain.get("environment", {})
    hosts = {rank.get("host", "") for rank in plain.get("ranks", [])}
    failure = plain.get("failure")
    return {
        "repeat": plain.get("repeat", 0),
        **{name: environment.get(name, "") for name in ("device", "torch", "host")},
        "stack": environment.get("engine", ""),  # '': ours
        "outcome": plain["outcome"],
        "nodes": max(1, len(hosts)),
        "started_at": plain.get("started_at", ""),
        "start_s": plain.get("start_s", 0.0),
        "retries": sum(rank.get("retries", 0) for rank in plain.get("memory", [])),
        "failure": _failure(failure) if failure else "",
        **_steps(plain),
        **_fullest(plain.get("memory", [])),
        **_predicted(plain.get("predicted")),
    }


def _steps(plain: dict[str, Any]) -> dict[str, Any]:
    steps, spec = plain.get("steps", []), plain["spec"]
    timed = timing([step["seconds"] for step in steps if not step.get("warmup", False)])
    losses = [(i, step["loss"]) for i, step in enumerate(steps) if step.get("loss") is not None]
    # The same step in every run, whatever their number of steps: weights and data are then alike.
    loss_step, loss = next((pair for pair in losses if pair[0] >= LOSS_STEP), (None, None))
    if losses and loss_step is None:
        loss_step, loss = losses[-1]
    known: dict[str, Any] = {"loss": loss, "loss_step": loss_step}
    if timed is not None:
        known["samples"] = timed.samples
    if timed is not None and plain["outcome"] == "ok":
        known |= {"step_s": timed.step_s, "low_s": timed.low_s, "high_s": timed.high_s}
        tokens = spec["batch"]["seq_len"] * spec["batch"]["global_batch"]
        known["tokens_s_gpu"] = tokens / timed.step_s / spec["gpus"] if timed.step_s else None
    return known


def _fullest(memory: list[dict[str, Any]]) -> dict[str, Any]:
    fullest = max(memory, key=lambda rank: rank["peak_bytes"], default=None)
    if fullest is None or fullest["peak_bytes"] <= 0:
        return {}
    names = {"peak_bytes": "peak_bytes", "peak_rank": "rank", "peak_stage": "stage"}
    return {name: fullest[key] for name, key in names.items()}


def _predicted(prediction: dict[str, Any] | None) -> dict[str, Any]:
    if prediction is None:
        return {}
    return {
        "predicted_s": prediction["step_s"],
        "predicted_low_s": prediction["step_s_low"],
        "predicted_high_s": prediction["step_s_high"],
        "predicted_bytes": prediction["peak_bytes"],
        "predicted_limit_bytes": prediction.get("limit_bytes") or None,
        "predicted_by": prediction.get("basis", ""),
    }


def _dp(value: int | str) -> tuple[int, int]:
    if isinstance(value, int):
        return 1, value
    replicate, _, shard = value.partition("x")
    return int(replicate), int(shard)


def _failure(failure: dict[str, Any]) -> str:
    lines = str(failure.get("message", "")).strip().split("\n")
    # Of a traceback the last line says what happened; of words the first one does.
    is_trace = any(line.lstrip().startswith(("Traceback", "File ")) for line in lines)
    first = _MODULE.sub("", (lines[-1] if is_trace else lines[0]).strip())[:160]
    where = f"rank {failure['rank']}" if failure.get("rank", -1) >= 0 else ""
    parts = [part for part in (where, failure.get("phase", ""), first) if part]
    return ", ".join(parts)
