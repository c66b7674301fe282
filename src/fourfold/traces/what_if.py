"""A step with something changed, from its measured parts: only what the change touches moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, prod
from typing import Any

from fourfold.errors import UserError
from fourfold.spec import RunSpec, check, codec, texts
from fourfold.spec.layout import AXES
from fourfold.traces import parts
from fourfold.traces.cause import MEMORY_BOUND, Cause, TraceCase
from fourfold.traces.expect import Interval

# Parts of the planner's step -> the measured ones that move with them.
_GROUPS: dict[str, tuple[str, ...]] = {
    "gemm": tuple(name for name in parts.PRODUCTS if name != parts.HEAD),
    "attention": (parts.ATTENTION,),
    "elementwise": (parts.ELEMENTWISE, parts.COPIES, parts.ROUTING),
    "head": (parts.HEAD, parts.LOSS, parts.EMBEDDING),
    "optimizer": (parts.OPTIMIZER,),
    "host": (parts.LAUNCHES,),
    "tp_comm": (f"{parts.COMMUNICATION}tp",),
    "cp_comm": (f"{parts.COMMUNICATION}cp",),
    "pp_comm": (f"{parts.COMMUNICATION}pp",),
    "fsdp_comm": (f"{parts.COMMUNICATION}dp",),
    "dp_comm": (),
    "bubble": (),
}
# Words that take a loss away, whatever the planner says of it.
_LOSSES = {
    "loader": parts.DATA,
    "sync": parts.SYNC,
    "flush": parts.MEMORY,
    "launches": parts.LAUNCHES,
    "host": parts.OUTSIDE,
}
# Fields of a run by the short names that settings have.
_FIELDS = {
    "micro_batch": "batch.micro_batch",
    "seq_len": "batch.seq_len",
    "global_batch": "batch.global_batch",
    **{axis: f"layout.{axis}" for axis in AXES},
    "recompute": "policy.recompute",
    "precision": "policy.precision",
    "sharding": "policy.sharding",
    "attention": "policy.attention",
    "compute_dtype": "policy.compute_dtype",
}
_COUNTS = ("batch.micro_batch", "batch.global_batch", *(f"layout.{axis}" for axis in AXES))
Price = Callable[[RunSpec], dict[str, float]]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """`tokens`: of a step on each GPU, before and after."""

    words: str
    step: Interval
    before_s: float
    tokens: tuple[float, float]
    changed: dict[str, float]

    @property
    def speedup(self) -> float:
        """Of tokens per second; of steps, where a step's tokens are not known."""
        before, after = self.tokens if all(self.tokens) else (1.0, 1.0)
        return (after / self.step.mid) / (before / self.before_s) if self.step.mid > 0 else 0.0


def what_if(words: str, case: TraceCase, price: Price | None, width: float) -> WhatIf:
    """`words`: FIELD=VALUE, several with commas. `width`: half width (log) of the planner's."""
    changed: dict[str, float] = {}
    spec = case.run.spec
    tokens = _tokens(spec)
    after = tokens
    for word in words.split(","):
        field, equals, text = word.strip().partition("=")
        if not equals or not field:
            raise UserError("must be FIELD=VALUE", field="what-if", value=word, hint=_hint())
        moved, after_word = _one(field, text, case, price)
        after = after_word or after
        for name, seconds in moved.items():
            changed[name] = changed.get(name, 0.0) + seconds
    mid = case.step_s + sum(changed.values())
    spread = sum(abs(s) for s in changed.values()) * (exp(width) - 1.0)
    step = Interval(max(0.0, mid - spread), mid, mid + spread)
    return WhatIf(words, step, case.step_s, (tokens, after), changed)


def fix_all(case: TraceCase, causes: Sequence[Cause]) -> WhatIf:
    """All remedies together. A part is won once, whatever several causes say of it."""
    left = dict(case.measured)
    mid = low = high = 0.0
    for cause in causes:
        room = sum(left.get(name, 0.0) for name in cause.parts)
        share = min(1.0, room / cause.seconds) if cause.seconds else 0.0
        mid, low, high = (
            total + share * one
            for total, one in zip(
                (mid, low, high), (cause.seconds, cause.low, cause.high), strict=True
            )
        )
        for name in cause.parts:
            left[name] = max(0.0, left.get(name, 0.0) - share * cause.seconds)
    tokens = _tokens(case.run.spec)
    step = Interval(case.step_s - high, case.step_s - mid, case.step_s - low)
    return WhatIf("all remedies", step, case.step_s, (tokens, tokens), {"remedies": -mid})


def _hint() -> str:
    return f"one of {', '.join((*_LOSSES, 'compile', *_FIELDS))}"


def _tokens(spec: RunSpec | None) -> float:
    return spec.batch.tokens / spec.gpus if spec is not None else 0.0


def _one(
    field: str, text: str, case: TraceCase, price: Price | None
) -> tuple[dict[str, float], float | None]:
    """Seconds that parts win or lose, and the tokens of the changed step."""
    measured = case.measured
    if field in _LOSSES:
        return {
            _LOSSES[field]: -measured.get(_LOSSES[field], 0.0) * (1.0 - _number(field, text))
        }, None
    if field == "compile" and text.lower() == "true":
        names = [name for name in MEMORY_BOUND if case.over(name) > 0]
        moved = {name: -case.over(name) for name in names}
        return moved | {parts.LAUNCHES: -0.5 * measured.get(parts.LAUNCHES, 0.0)}, None
    if field == "recompute" and text == "none":
        return {name: -s for name, s in case.run.counts.again.seconds.items()}, None
    path = _FIELDS.get(field, field if "." in field else "")
    if not path:
        raise UserError("is not a field of a run", field="what-if", value=field, hint=_hint())
    if case.run.lacks:
        rule = f"needs a step of training; the trace has no {' and no '.join(case.run.lacks)}"
        raise UserError(rule, field="what-if", value=field, hint=f"use {', '.join(_LOSSES)}")
    if price is None or case.run.spec is None:
        rule = "needs the run: the trace says too little of it"
        raise UserError(rule, field="what-if", value=field, hint="give --model or --spec")
    new = _changed(case.run.spec, path, text)
    return _priced(case, price(case.run.spec), price(new)), _tokens(new)


def _number(field: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    rule = "must be the share that is left, from 0 (none) to 1"
    check.that(0.0 <= value <= 1.0, "what-if", f"{field}={text}", rule)
    return value


def _changed(spec: RunSpec, path: str, text: str) -> RunSpec:
    table: dict[str, Any] = codec.encode(spec)
    value, said = texts.toml_value(text), f"{path.rpartition('.')[2]}={text}"
    if path in _COUNTS:
        is_count = isinstance(value, int) and value >= 1
        check.that(is_count, "what-if", said, "must be a whole number of 1 or more")
    codec.put(table, path, value)
    layout = table.get("layout")
    if path.startswith("layout.") and isinstance(layout, dict):
        used = prod(int(layout.get(axis, 1)) for axis in AXES if axis != "dp")
        if path != "layout.dp":  # the same GPUs, divided in another way
            layout["dp"] = max(1, spec.gpus // used)
        layout.pop("shard", None)
        layout.pop("replicate", None)
        table["gpus"] = used * int(layout["dp"])
    batch = table["batch"]
    each = int(batch["micro_batch"]) * int(layout["dp"] if isinstance(layout, dict) else 1)
    if int(batch["global_batch"]) % each:
        rule = f"must be a multiple of micro batch x dp = {each}"
        check.that(path != "batch.global_batch", "what-if", said, rule)
        batch["global_batch"] = each
    return codec.load(RunSpec, table)


def _priced(case: TraceCase, old: dict[str, float], new: dict[str, float]) -> dict[str, float]:
    """A measured part moves by the ratio of the planner's; one that was not there comes whole."""
    again, moved = case.run.counts.again.seconds, {}
    for group, names in _GROUPS.items():
        before, after = old.get(group, 0.0), new.get(group, 0.0)
        spent = sum(case.measured.get(name, 0.0) - again.get(name, 0.0) for name in names)
        if before > 0.0 and spent > 0.0:
            moved[group] = spent * (after / before - 1.0)
        else:
            moved[group] = after - before
    before, after = old.get("recompute", 0.0), new.get("recompute", 0.0)
    spent = sum(again.values())
    moved["recompute"] = spent * (after / before - 1.0) if before and spent else after - before
    return {name: seconds for name, seconds in moved.items() if abs(seconds) > 1e-9}
