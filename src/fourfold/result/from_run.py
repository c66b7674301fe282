"""The record of a stored run: the one mapping of its fields to what lists, tables and pages say."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from fourfold.escape import flattened
from fourfold.result.record import KINDS, RUN_FIELDS, Record, json_of, model_of
from fourfold.result.report import Failure, Prediction, RankMemory, RunReport
from fourfold.result.timing import timing
from fourfold.spec import Policy, RunSpec, check, codec
from fourfold.spec.layout import AXES, EXPERT_AXES

# 'fourfold.engine.process.health.MemoryLimitError: ...' says no more than its last word.
_MODULE = re.compile(r"^(\w+\.)+(?=\w+: )")
# Counted from 0; runs that end earlier give their last loss.
LOSS_STEP = 4
# Divided by, or counted with.
_FROM_ONE = {
    "gpus",
    "nodes",
    *AXES,
    *EXPERT_AXES,
    "replicate",
    "layers",
    "hidden",
    "heads",
    "seq_len",
    "global_batch",
    "virtual_stages",
}
_SIGNED = {"loss", "peak_rank"}
_NUMBERS = [n for n in RUN_FIELDS if KINDS[n].startswith(("int", "float")) and n not in _SIGNED]
# Fields of a run in which repeats of one configuration may differ, and those told one by one; the
# rest with its defaults.
_OF_A_REPEAT = {
    "device",
    "steps",
    "warmup",
    "settle",
    "seed",
    "start_limit_s",
    "step_limit_s",
    "refused",
}
_TOLD = {"model", "gpus", "layout", "batch", "policy", "note", "tag"}
_REST = {one.name: one.default for one in fields(RunSpec) if one.name not in _TOLD | _OF_A_REPEAT}
# Fields of a policy that a record has too; its `loss` is the measured one.
_SHOWN = {one.name: one.name for one in fields(Policy) if one.name in KINDS and one.name != "loss"}
_SHOWN |= {"compile": "compiled"}


def record_of(report: RunReport, run_id: str = "") -> Record:
    """`run_id`: where it is known; working it out takes as long as all else."""
    spec, environment = report.spec, dict(report.environment)
    model, layout, policy = spec.model, spec.layout, spec.policy
    known: dict[str, Any] = {
        "run_id": run_id or spec.run_id,
        "repeat": report.repeat,
        **{name: environment.get(name, "") for name in ("device", "torch", "host")},
        "stack": environment.get("engine", ""),  # '': ours
        "outcome": report.outcome,
        "model": model.name,
        "model_json": json_of(model),
        **{name: getattr(model, name) for name in ("layers", "hidden", "heads")},
        "experts": model.experts or None,
        "gpus": spec.gpus,
        "nodes": max(1, len({rank.host for rank in report.ranks})),
        **{name: getattr(layout, name) for name in (*AXES, *EXPERT_AXES, "replicate")},
        "order": " ".join(layout.order),
        **{name: getattr(spec.batch, name) for name in ("seq_len", "micro_batch", "global_batch")},
        **{shown: getattr(policy, name) for name, shown in _SHOWN.items()},
        "precision": policy.precision_name,
        "env": tuple(sorted(policy.env)),
        "settings": _settings(spec),
        **{name: getattr(spec, name) for name in ("tag", "note")},
        **{name: getattr(report, name) for name in ("started_at", "start_s")},
        "retries": sum(rank.retries for rank in report.memory),
        "failure": _failure(report.failure) if report.failure else "",
    }
    return checked(
        Record(**known, **_speed(report), **_fullest(report.memory), **_said(report.predicted))
    )


def checked(record: Record) -> Record:
    """The record, whose numbers are what its readers divide by and draw."""
    for name in _NUMBERS:
        value: Any = getattr(record, name)
        if value is None:
            good = name not in _FROM_ONE and name != "micro_batch"
        else:
            good = (name in _FROM_ONE) <= value <= 1e300
        check.that(good, name, value, "is not what a stored run has there")
    good = sorted(record.order.split()) == sorted(AXES)
    check.that(good, "order", record.order, "is no order of the axes")
    return record


def named_apart(records: Sequence[Record]) -> list[Record]:
    """Models that share a name and differ say in what, as presets with other sizes do:
    'mine layers=4'."""
    texts: dict[str, set[str]] = defaultdict(set)
    for record in records:
        texts[record.model].add(record.model_json)
    words: dict[str, str] = {}
    for group in texts.values():
        flat = {text: flattened(codec.encode(model_of(text), sparse=True)) for text in group}
        names = dict.fromkeys(name for one in flat.values() for name in one)
        differ = [n for n in names if len({str(one.get(n)) for one in flat.values()}) > 1]
        for text, one in flat.items():
            words[text] = "".join(f" {n}={_text(one[n])}" for n in differ if n in one)
    return [replace(r, model=r.model + words[r.model_json]) for r in records]


def _settings(spec: RunSpec) -> str:
    """Whatever is not as usual and no field of a record says: a field that a run or its policy gets
    later is told apart by itself."""
    plain = codec.encode(spec.policy, sparse=True)
    policy = {name: plain[name] for name in sorted(plain.keys() - _SHOWN.keys())}
    if spec.policy.precision_name != spec.policy.precision:
        del policy["compute_dtype"]  # the name says it
    rest = {
        name: getattr(spec, name) for name, usual in _REST.items() if getattr(spec, name) != usual
    }
    words = flattened(policy | codec.encode(rest, sparse=True))
    return " ".join(f"{name}={_text(value)}" for name, value in words.items())


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _speed(report: RunReport) -> dict[str, Any]:
    timed = timing([step.seconds for step in report.steps if not step.warmup])
    losses = [(i, step.loss) for i, step in enumerate(report.steps) if step.loss is not None]
    # The same step in every run, whatever their number of steps: weights and data are then alike.
    known: dict[str, Any] = {}
    if losses:
        at, loss = next((pair for pair in losses if pair[0] >= LOSS_STEP), losses[-1])
        known = {"loss_step": at, "loss": loss}
    if timed is not None:
        known["samples"] = timed.samples
    if timed is not None and report.outcome == "ok":
        known |= {"step_s": timed.step_s, "low_s": timed.low_s, "high_s": timed.high_s}
        tokens, gpus = report.spec.batch.tokens, report.spec.gpus
        known["tokens_s_gpu"] = tokens / timed.step_s / gpus if timed.step_s else None
    return known


def _fullest(memory: Sequence[RankMemory]) -> dict[str, Any]:
    one = max(memory, key=lambda rank: rank.peak_bytes, default=None)
    if one is None or one.peak_bytes <= 0:
        return {}
    return {"peak_bytes": one.peak_bytes, "peak_rank": one.rank, "peak_stage": one.stage}


def _said(prediction: Prediction | None) -> dict[str, Any]:
    if prediction is None:
        return {}
    return {
        "predicted_s": prediction.step_s,
        "predicted_low_s": prediction.step_s_low,
        "predicted_high_s": prediction.step_s_high,
        "predicted_bytes": prediction.peak_bytes,
        "predicted_limit_bytes": prediction.limit_bytes or None,
        "predicted_by": prediction.basis,
    }


def _failure(failure: Failure) -> str:
    first = _MODULE.sub("", failure.said)[:160]
    where = f"rank {failure.rank}" if failure.rank >= 0 else ""
    return ", ".join(part for part in (where, failure.phase, first) if part)
