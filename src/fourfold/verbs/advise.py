"""advise: which sizes of a model suit a GPU, and what do others lose?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fourfold.errors import UserError
from fourfold.events import OnEvent, ignore
from fourfold.search import advise as sizes
from fourfold.search.advise import LayerShape, auto_heads
from fourfold.search.query import entry_for, usual_cluster
from fourfold.search.shapes import compare, shapes_near
from fourfold.search.stack_names import match_stack
from fourfold.spec import catalog, words
from fourfold.spec.cluster import Device
from fourfold.spec.words import BUNDLES
from fourfold.verbs.machine import known_cluster, read_calibration
from fourfold.verbs.plan import resolved
from fourfold.verbs.requests import PlanRequest
from fourfold.verbs.tool_requests import AdviseRequest

SIZES = ("hidden", "heads", "ffn", "vocab", "micro_batch")


@dataclass(frozen=True, slots=True)
class Advice:
    """Of each size what it loses and the nearest better value; or whole shapes, by days."""

    facts: dict[str, Any]

    @property
    def shapes(self) -> list[dict[str, Any]] | None:
        return self.facts.get("shapes")

    def plain(self) -> dict[str, Any]:
        return self.facts

    def rows(self) -> list[dict[str, Any]]:
        """The shapes; else every value that was tried, with the size it is a value of."""
        if self.shapes is not None:
            return self.shapes
        tried = [(name, self.facts[name]) for name in SIZES if name in self.facts]
        return [
            {"size": name, "asked": advice["asked"], **row}
            for name, advice in tried
            for row in advice["table"]
        ]


def advise(request: AdviseRequest, *, on_event: OnEvent = ignore) -> Advice:
    return Advice(_shapes(request, on_event) if request.params is not None else _sizes(request))


def _device(request: AdviseRequest) -> Device:
    if request.cluster:
        return known_cluster(request.cluster).device
    if request.gpu:
        return catalog.device(request.gpu)
    raise UserError("is required", field="gpu", hint="or pass --cluster NAME")


def _precision(request: AdviseRequest, device: Device) -> str:
    precision = words.policy_word("precision", request.precision)
    if precision not in BUNDLES:
        raise UserError(f"is not one of {', '.join(BUNDLES)}", field="precision", value=precision)
    if precision in ("fp8", "fp4"):
        device.peak(precision)
    return precision


def _knobs(request: AdviseRequest, device: Device) -> tuple[dict[str, float], str]:
    """(coefficients, whose they are)."""
    known = read_calibration(request.calibration)
    cluster = known_cluster(request.cluster) if request.cluster else usual_cluster(device, 8)
    stack = match_stack(request.stack, cluster, known) if request.stack else "fourfold"
    entry, why = entry_for(known, stack, cluster)
    rows = why or f"{entry.rows_time} measured rows"
    return entry.coefficients, f"efficiencies of {stack} on {cluster.name} ({rows})"


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _whole(name: str, value: int) -> int:
    if not 1 <= value <= 2**24:
        raise UserError("must be from 1 to 16777216", field=name, value=value)
    return value


def _sizes(request: AdviseRequest) -> dict[str, Any]:
    """Advice on each size that was given (all of them with --model)."""
    device = _device(request)
    precision = _precision(request, device)
    coef, whose = _knobs(request, device)
    shape = _shape(request)
    kernels = sizes.Kernels(device, precision, coef, request.attention)
    said: dict[str, Any] = {
        "gpu": device.id,
        "tp": shape.tp,
        "seq_len": shape.seq_len,
        "micro_batches": shape.micro_batch,
        "precision": precision,
        "attention": request.attention,
        "calibration": whose,
    }
    every = request.model is not None
    said["hidden"] = sizes.hidden_advice(
        shape, kernels, free_heads=request.heads is None and not every
    )
    said["heads"] = sizes.heads_advice(shape, kernels)
    if every or request.ffn is not None:
        said["ffn"] = sizes.ffn_advice(shape, kernels)
    if every or request.vocab is not None:
        said["vocab"] = sizes.vocab_advice(shape, kernels)
    said["micro_batch"] = sizes.micro_advice(shape, kernels)
    return said


def _shape(request: AdviseRequest) -> LayerShape:
    base = catalog.model(request.model) if request.model else None
    hidden = request.hidden if request.hidden is not None else base.hidden if base else None
    if hidden is None:
        raise UserError("is required", field="hidden", hint="or pass --model NAME")
    tp = _whole("tp", _or(request.tp, 1))
    own = base is not None and hidden == base.hidden
    heads = request.heads if request.heads is not None else base.heads if base and own else None
    heads = auto_heads(_whole("hidden", hidden), tp) if heads is None else _whole("heads", heads)
    kv = base.kv_heads if base and own and request.heads is None else heads
    kv = _or(request.kv_heads, kv)
    ratio = base.ffn / base.hidden if base else 4.0
    ffn = _or(request.ffn, round(ratio * hidden))
    for name, value, whole in (
        ("heads", heads, hidden),
        ("kv-heads", _whole("kv-heads", kv), heads),
    ):
        if whole % value:
            raise UserError(f"must divide {whole}", field=name, value=value)
    return LayerShape(
        hidden=hidden,
        heads=heads,
        kv_heads=kv,
        ffn=_whole("ffn", ffn),
        vocab=_whole(
            "vocab", request.vocab if request.vocab is not None else base.vocab if base else 1
        ),
        gated=base.gated if base else False,
        seq_len=_whole("seq-len", _or(request.seq_len, 2048)),
        micro_batch=_whole(
            "micro-batch", request.micro_batch if request.micro_batch is not None else 1
        ),
        tp=tp,
    )


def _shapes(request: AdviseRequest, on_event: OnEvent) -> dict[str, Any]:
    """Model shapes of a parameter budget, by days."""
    params, tokens, tp = request.params or 0, request.tokens, request.tp or 8
    if not 1e6 <= params <= 1e13:
        raise UserError("must be from 1e6 to 1e13", field="params", value=params)
    if tokens is None:
        raise UserError("is required", field="tokens", hint="params are compared by days")
    if not 0 < tokens < 1e18:
        raise UserError("must be above 0", field="tokens", value=tokens)
    # The model is only the family to vary.
    family = PlanRequest(
        model=request.model or "gpt-3-175b",
        seq_len=request.seq_len or 2048,
        global_batch=request.global_batch or 2048,
        policy={"precision": request.precision},
        cluster=request.cluster,
        gpu=request.gpu,
        stack=request.stack,
        calibration=request.calibration,
        max_nodes=request.max_nodes,
    )
    query, _ = resolved(family, on_event)
    models = shapes_near(query.model, params, query.batch.seq_len, tp)
    if not models:
        raise UserError(
            "is too small for this vocabulary: no shape comes close", field="params", value=params
        )
    return {
        "gpu": query.cluster.device.id,
        "gpus": query.gpus,
        "stack": query.stack,
        "tokens": tokens,
        "tp": tp,
        "seq_len": query.batch.seq_len,
        "micro_batches": "best",
        "precision": query.policy.precision,
        "attention": query.policy.attention,
        "calibration": query.no_rows or f"{query.entry.rows_time} measured rows",
        "shapes": compare(query, models, tokens=tokens),
    }
