"""trace: what every step of a parallel layer computes, sends and holds on one rank; computed, or
run beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fourfold.cost.trace.advice import KindAdvice, advise
from fourfold.cost.trace.layer import layer_program, layer_rows, layer_spec, payload_bytes
from fourfold.cost.trace.steps import (
    CP_KINDS,
    WORKSPACE_BYTES,
    Ask,
    AxisGroups,
    Program,
    generic_cluster,
)
from fourfold.cost.trace.walk import PROGRAMS, StepRow, walk
from fourfold.errors import UserError
from fourfold.events import OnEvent, ignore, progress
from fourfold.launch.local import count_layer, local_device, run_layer, run_list
from fourfold.result.trace import StepMeasure, TraceMeasure
from fourfold.search.legal import require_legal
from fourfold.spec import Cluster, Layout, ModelShape, Policy, RunSpec, catalog, check, codec
from fourfold.units import counted
from fourfold.verbs import Answer
from fourfold.verbs.run_requests import TraceRequest


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """One step, or one half of a layer: what was computed and what was measured."""

    name: str
    flops_rank: int
    live_bytes: int
    peak_bytes: int
    measured: StepMeasure

    @property
    def peak_off_pct(self) -> float:
        return 100.0 * (self.peak_bytes / self.measured.peak_bytes - 1.0)

    def plain(self) -> dict[str, Any]:
        return codec.encode(self.measured) | {
            "computed_flops": self.flops_rank,
            "computed_live_bytes": self.live_bytes,
            "computed_peak_bytes": self.peak_bytes,
            "peak_off_pct": self.peak_off_pct,
        }


@dataclass(frozen=True, slots=True)
class Traced(Answer):
    """`measured`: of a run; `advice`: which kind of context parallelism to take."""

    program: Program
    cluster: Cluster
    steps: Sequence[StepRow]
    measured: TraceMeasure | None = None
    advice: KindAdvice | None = None

    @property
    def pairs(self) -> list[ComparedStep]:
        """The measured steps; a layer is measured in two halves."""
        steps, measured = self.steps, self.measured.steps if self.measured else ()
        if self.program.kind == "layer":
            first_back = next(i for i, row in enumerate(steps) if row.name == "gradient")
            parts = [("forward", steps[:first_back]), ("backward", steps[first_back:])]
        else:
            parts = [(row.name, (row,)) for row in steps]
        return [
            ComparedStep(
                name,
                sum(row.flops_rank for row in rows),
                rows[-1].live_bytes,
                max(row.step_peak_bytes for row in rows),
                step,
            )
            for (name, rows), step in zip(parts, measured, strict=True)
        ]

    def plain(self) -> dict[str, Any]:
        program = self.program
        names = ("kind", "ranks", "rank", "dtype", "sizes", "per_rank")
        plain: dict[str, Any] = {name: getattr(program, name) for name in names} | {
            "cluster": self.cluster.name,
            "groups": [self._group(group) for group in program.groups],
            "workspace_bytes": WORKSPACE_BYTES,
            "notes": list(program.notes),
            "peak_bytes": self.steps[-1].peak_bytes,
            "steps": [_step(row) for row in self.steps],
        }
        if self.measured is not None:
            steps = [pair.plain() for pair in self.pairs]
            plain["measured"] = codec.encode(self.measured) | {"steps": steps}
        elif self.advice is not None:
            plain["recommendation"] = codec.encode(self.advice)
        return plain

    def _group(self, group: AxisGroups) -> dict[str, Any]:
        link = self.cluster.level(group.span).name
        head = {"name": group.name, "size": group.size, "count": len(group.members), "link": link}
        return head | {"members": codec.encode(group.members)}

    def rows(self) -> list[dict[str, Any]]:
        """One per tensor; a step's own numbers stand on its first row only, so columns add up."""
        lines = []
        for number, row in enumerate(self.steps, 1):
            plain = _step(row)
            tensors, messages = plain.pop("tensors"), plain.pop("comm")
            links = "; ".join(f"{k} {v}" for m in messages for k, v in m["by_link_bytes"].items())
            own = {name: plain[name] for name in _OWN} | {"links": links}
            head = {"step": number} | {name: plain[name] for name in ("name", "formula", "times")}
            for index, tensor in enumerate(tensors or [{}]):
                cells = {("tensor" if name == "name" else name): v for name, v in tensor.items()}
                lines.append(head | cells | (own if index == 0 else {}))
        return lines


# Numbers of a step, which its tensors share.
_OWN = ("flops_rank", "flops_all", "comm_bytes", "live_bytes", "step_peak_bytes", "peak_bytes")


def _step(row: StepRow) -> dict[str, Any]:
    plain = codec.encode(row)
    sent = [
        {"op": m.op, "group": m.group, "bytes": m.bytes, "by_link_bytes": m.by_level}
        for m in row.messages
    ]
    del plain["messages"]
    return plain | {"comm_bytes": row.comm_bytes, "comm": sent}


class _Steps(NamedTuple):
    """`rows` takes the bytes of the matrix library's workspace, `measure` a device."""

    program: Program
    cluster: Cluster
    rows: Callable[[int], Sequence[StepRow]]
    measure: Callable[[str], TraceMeasure]
    advice: KindAdvice | None = None


def trace(request: TraceRequest, *, on_event: OnEvent = ignore) -> Traced:
    runs = request.run_steps
    device = local_device(request.device, _layout(request).world) if runs else ""
    check.that(not runs or not request.rank, "rank", request.rank, "must be 0 with --run")
    steps = (_layer if request.kind == "layer" else _list)(request, on_event)
    measured = steps.measure(device) if runs else None
    from_ledger = measured is not None and measured.peaks_from == "ledger"
    rows = steps.rows(0 if from_ledger else WORKSPACE_BYTES)
    return Traced(steps.program, steps.cluster, rows, measured, steps.advice)


def _list(request: TraceRequest, on_event: OnEvent) -> _Steps:
    ask = _ask(request)
    program = PROGRAMS[request.kind](ask)
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


def _advice(ask: Ask, request: TraceRequest, cluster: Cluster) -> KindAdvice | None:
    """Which kind to take; only where there is a sequence group to divide over."""
    if request.kind not in CP_KINDS or ask.ranks == 1:
        return None
    return advise(ask, cluster)


def _layer_spec(request: TraceRequest) -> RunSpec:
    """A middle layer of a preset, one sequence on a rank; sizes given as flags change its shape."""
    model = check.given(request.model, "model", "'fourfold models' lists presets")
    rule = "is not supported for kind layer, which uses flash attention"
    hint = "use it with ulysses, allgather or ring"
    check.that(request.attention == "flash", "attention", request.attention, rule, hint)
    names = ("hidden", "heads", "kv_heads", "ffn")
    given = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
    layout = _layout(request)
    check.whole(0, layout.world - 1, rank=request.rank)
    words = {"sharding": request.sharding or "zero1", "cp_kind": request.cp_kind or "ring"}
    policy = codec.decode(Policy, words, "policy")
    return layer_spec(
        replace(catalog.model(model), **given),
        request.tokens,
        layout,
        dtype=request.dtype,
        cp_kind=policy.cp_kind,
        sharding=policy.sharding,
    )


def _layout(request: TraceRequest) -> Layout:
    sizes = {"tp": request.tp, "cp": request.cp, "ep": request.ep, "etp": request.etp}
    return Layout(shard=request.dp, **sizes)


def _ask(request: TraceRequest) -> Ask:
    """Sizes from flags, else from the model; a size that the kind needs and nobody gave is asked
    for by name."""
    model = catalog.model(request.model) if request.model else None
    needed = ("hidden", "ffn") if request.kind.startswith("mlp") else ("hidden", "heads")
    if model is not None and needed[1] == "heads" and model.attention_width != model.hidden:
        rule = f"has head size {model.head_size}, not hidden / heads"
        hint = "use kind layer, or pass --hidden and --heads"
        raise UserError(rule, field="model", value=request.model, hint=hint)
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
        value = getattr(request, name)
        check.that(value is None, name.replace("_", "-"), value, "is only for kind layer")
    for name in ("hidden", "heads", "kv_heads", "ffn"):
        value = getattr(request, name)
        if value is None and model is not None:
            value = getattr(model, name)
        if name in needed:
            check.given(value is not None, name, "or pass --model NAME ('fourfold models')")
        if value is not None:
            sizes[name] = value
    if request.heads is not None and request.kv_heads is None:
        sizes["kv_heads"] = request.heads
    sizes.setdefault("kv_heads", sizes.get("heads", 1))
    if request.layers is not None:
        sizes["layers"] = request.layers
    return sizes


def _cluster(name: str | None, ranks: int) -> Cluster:
    if name is None:
        return generic_cluster(ranks)
    cluster = catalog.cluster(name, ranks)
    rule, hint = (
        f"is too small for {counted(ranks, 'rank')}",
        "use fewer ranks, or a larger cluster",
    )
    check.that(ranks <= cluster.gpus, "cluster", f"{name} of {cluster.gpus}", rule, hint)
    return cluster
