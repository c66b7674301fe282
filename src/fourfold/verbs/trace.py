"""trace: what every step of a parallel layer computes, sends and holds on one rank; computed, or
run beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fourfold.cost.trace.advice import Advice, advise
from fourfold.cost.trace.ask import Ask
from fourfold.cost.trace.layer import layer_program, layer_rows, layer_spec, payload_bytes
from fourfold.cost.trace.steps import CP_KINDS, WORKSPACE_BYTES, Program, generic_cluster
from fourfold.cost.trace.walk import StepRow, build, walk
from fourfold.errors import UserError
from fourfold.events import OnEvent, ignore, progress
from fourfold.launch.trace import count_layer, local_device, run_layer, run_list
from fourfold.result.trace import TraceMeasure
from fourfold.search.legal import require_legal
from fourfold.spec import catalog, check, codec
from fourfold.spec.cluster import Cluster
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec
from fourfold.verbs.tool_requests import TraceRequest


@dataclass(frozen=True, slots=True)
class Traced:
    """`measured`: of a run; `advice`: which kind of context parallelism to take."""

    program: Program
    cluster: Cluster
    steps: Sequence[StepRow]
    measured: TraceMeasure | None
    advice: Advice | None

    def rows(self) -> list[dict[str, Any]]:
        return [codec.encode(step) for step in self.steps]


class _Steps(NamedTuple):
    """`rows` takes the bytes of the matrix library's workspace, `measure` a device."""

    program: Program
    cluster: Cluster
    rows: Callable[[int], Sequence[StepRow]]
    measure: Callable[[str], TraceMeasure]
    advice: Advice | None = None


def trace(request: TraceRequest, *, on_event: OnEvent = ignore) -> Traced:
    runs = request.run_steps
    device = local_device(request.device, _layout(request).world) if runs else ""
    if runs and request.rank:
        raise UserError("must be 0 with --run", field="rank", value=request.rank)
    steps = (_layer if request.kind == "layer" else _list)(request, on_event)
    measured = steps.measure(device) if runs else None
    from_ledger = measured is not None and measured.peaks_from == "ledger"
    rows = steps.rows(0 if from_ledger else WORKSPACE_BYTES)
    return Traced(steps.program, steps.cluster, rows, measured, steps.advice)


def _list(request: TraceRequest, on_event: OnEvent) -> _Steps:
    """A list of steps, computed here."""
    ask = _ask(request)
    program = build(request.kind, ask)
    cluster = _cluster(request.cluster, program.ranks)
    text = codec.to_json(ask)
    return _Steps(
        program,
        cluster,
        lambda workspace: walk(program, cluster, workspace_bytes=workspace),
        lambda device: run_list(request.kind, text, program.ranks, device, progress(on_event)),
        None if request.run_steps else _advice(ask, request, cluster),
    )


def _layer(request: TraceRequest, on_event: OnEvent) -> _Steps:
    """A layer of a model, counted by a dry run of one rank."""
    spec = _layer_spec(request)
    require_legal(spec)
    cluster = _cluster(request.cluster, spec.gpus)
    counts = count_layer(spec, request.rank, progress(on_event))
    program = layer_program(spec, request.rank, counts[0])
    sent = payload_bytes(counts[0])
    return _Steps(
        program,
        cluster,
        lambda workspace: layer_rows(program, spec, counts, cluster, workspace_bytes=workspace),
        lambda device: run_layer(spec, sent, device, progress(on_event)),
    )


def _advice(ask: Ask, request: TraceRequest, cluster: Cluster) -> Advice | None:
    """Which kind to take; only where there is a sequence group to divide over."""
    if request.kind not in CP_KINDS or ask.ranks == 1:
        return None
    return advise(ask, cluster)


def _layer_spec(request: TraceRequest) -> RunSpec:
    """A middle layer of a preset, one sequence on a rank; sizes given as flags change its shape."""
    if request.model is None:
        raise UserError("is required", field="model", hint="'fourfold models' lists presets")
    if request.attention != "flash":
        raise UserError(
            "is not supported for kind layer, which uses flash attention",
            field="attention",
            value=request.attention,
            hint="use it with ulysses, allgather or ring",
        )
    names = ("hidden", "heads", "kv_heads", "ffn")
    given = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
    layout = _layout(request)
    check.whole(0, layout.world - 1, rank=request.rank)
    words = {"sharding": request.sharding or "zero1", "cp_kind": request.cp_kind or "ring"}
    policy = codec.decode(Policy, words, "policy")
    return layer_spec(
        replace(catalog.model(request.model), **given),
        request.tokens,
        layout,
        dtype=request.dtype,
        cp_kind=policy.cp_kind,
        sharding=policy.sharding,
    )


def _layout(request: TraceRequest) -> Layout:
    return Layout(tp=request.tp, cp=request.cp, shard=request.dp)


def _ask(request: TraceRequest) -> Ask:
    """Sizes from flags, else from the model; a size that the kind needs and nobody gave is asked
    for by name."""
    model = catalog.model(request.model) if request.model else None
    needed = ("hidden", "ffn") if request.kind.startswith("mlp") else ("hidden", "heads")
    if model is not None and needed[1] == "heads" and model.attention_width != model.hidden:
        raise UserError(
            f"has head size {model.head_size}, not hidden / heads",
            field="model",
            value=request.model,
            hint="use kind layer, or pass --hidden and --heads",
        )
    sizes = _given_sizes(request, model, needed)
    return Ask(
        tokens=request.tokens,
        layout=_layout(request),
        rank=request.rank,
        dtype=request.dtype,
        attention=request.attention,
        **sizes,
    )


def _given_sizes(
    request: TraceRequest, model: ModelShape | None, needed: tuple[str, ...]
) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name in ("cp_kind", "sharding"):
        if getattr(request, name) is not None:
            raise UserError(
                "is only for kind layer", field=name.replace("_", "-"), value=getattr(request, name)
            )
    for name in ("hidden", "heads", "kv_heads", "ffn"):
        value = getattr(request, name)
        if value is None and model is not None:
            value = getattr(model, name)
        if value is not None:
            sizes[name] = value
        elif name in needed:
            raise UserError(
                "is required", field=name, hint="or pass --model NAME ('fourfold models')"
            )
    if request.heads is not None and request.kv_heads is None:
        sizes["kv_heads"] = request.heads
    sizes.setdefault("kv_heads", sizes.get("heads", 1))
    if request.layers is not None:
        sizes["layers"] = request.layers
    return sizes


def _cluster(name: str | None, ranks: int) -> Cluster:
    if name is None:
        return generic_cluster(ranks)
    cluster = catalog.cluster(name)
    if ranks > cluster.gpus:
        raise UserError(
            f"is too small for {ranks} ranks", field="cluster", value=f"{name} of {cluster.gpus}",
            hint="use fewer ranks, or a larger cluster",
        )  # fmt: skip
    return cluster
