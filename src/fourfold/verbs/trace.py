"""trace: what every step of a parallel layer computes, sends and holds on one rank; computed, or
run beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fourfold.cost.trace.advice import KindAdvice, advise
from fourfold.cost.trace.divided import PROGRAMS
from fourfold.cost.trace.layer import layer_program, layer_spec, layer_steps, payload_bytes
from fourfold.cost.trace.steps import (
    CP_KINDS,
    WORKSPACE_BYTES,
    Ask,
    AxisGroups,
    Program,
    generic_cluster,
)
from fourfold.cost.trace.walk import StepRow, step_rows, walk
from fourfold.errors import UserError
from fourfold.events import OnEvent, ignore, progress
from fourfold.launch.local import answers
from fourfold.launch.permit import gpu_count
from fourfold.result.job import Job, Limits
from fourfold.result.trace import LayerTrace, StepMeasure, TraceMeasure
from fourfold.search.legal import require_legal
from fourfold.spec import Cluster, Layout, ModelShape, Policy, RunSpec, catalog, check, codec
from fourfold.units import counted
from fourfold.verbs import Answer
from fourfold.verbs.run_requests import TraceRequest

_LIMITS = Limits(start_s=300.0, step_s=300.0)
# One process per rank: more than this starves any host of memory and cores.
MAX_LOCAL_RANKS = 32


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
    tensors = [
        {name: codec.encode(getattr(tensor, name)) for name in _TENSOR} for tensor in row.tensors
    ]
    return codec.encode(row) | {"tensors": tensors, "comm_bytes": row.comm_bytes}


_TENSOR = ("name", "symbolic", "shape", "elements", "bytes", "dtype", "how")


def trace(request: TraceRequest, *, on_event: OnEvent = ignore) -> Traced:
    return (_layer if request.kind == "layer" else _list)(request, on_event)


def _list(request: TraceRequest, on_event: OnEvent) -> Traced:
    device, ask = _device(request), _ask(request)
    program = PROGRAMS[request.kind](ask)
    cluster = _cluster(request.cluster, program.ranks)
    asked = {"ask": codec.to_json(ask), "kind": request.kind}
    measured = run_steps(program.ranks, device, on_event, **asked) if device else None
    steps = step_rows(program, walk(program), cluster, workspace_bytes=_workspace(measured))
    # Which kind to take: only where there is a sequence group to divide over.
    open_kind = not device and request.kind in CP_KINDS and ask.ranks > 1
    advice = advise(ask, cluster) if open_kind else None
    return Traced(program, cluster, steps, measured, advice)


def _layer(request: TraceRequest, on_event: OnEvent) -> Traced:
    """A layer of a model, counted by a dry run of one rank."""
    device, spec = _device(request), _layer_spec(request)
    require_legal(spec)
    cluster = _cluster(request.cluster, spec.gpus)
    counts = count_layer(spec, request.rank, on_event)
    program = layer_program(spec, request.rank, counts[0])
    measured = run_layer(spec, payload_bytes(counts[0]), device, on_event) if device else None
    counted_steps = layer_steps(program, spec, counts)
    steps = step_rows(program, counted_steps, cluster, workspace_bytes=_workspace(measured))
    return Traced(program, cluster, steps, measured)


def _workspace(measured: TraceMeasure | None) -> int:
    """Of the matrix library, in what is computed beside what was measured."""
    return 0 if measured is not None and measured.peaks_from == "ledger" else WORKSPACE_BYTES


def _device(request: TraceRequest) -> str:
    """What steps run on here, one process per rank: GPUs where there are enough; '': none run."""
    if not request.run_steps:
        return ""
    ranks = _layout(request).world
    rule = f"is too many to run: this host starts one process per rank, at most {MAX_LOCAL_RANKS}"
    hint = "omit --run to compute any number of ranks"
    check.that(ranks <= MAX_LOCAL_RANKS, "ranks", ranks, rule, hint)
    gpus = gpu_count() if request.device != "cpu" else 0
    rule, enough = f"needs as many GPUs, but this host has {gpus}", gpus >= ranks
    check.that(request.device != "cuda" or enough, "ranks", ranks, rule, "use --device cpu")
    check.that(not request.rank, "rank", request.rank, "must be 0 with --run")
    return "cuda" if enough else "cpu"


def count_layer(
    spec: RunSpec, rank: int, on_event: OnEvent = ignore
) -> tuple[LayerTrace, LayerTrace]:
    """A rank's layer as it is, and with other sizes; tensors have shapes but no memory."""
    options = (("count", str(rank)),)
    job = Job(job="trace", specs=(spec,), ranks=1, options=options, limits=_LIMITS)
    trace, stretched = answers(job, LayerTrace, (0, 1), progress(on_event))
    return trace, stretched


def run_layer(
    spec: RunSpec, payload_bytes: tuple[int, int], device: str, on_event: OnEvent = ignore
) -> TraceMeasure:
    """Forward and backward by all ranks on this host; what they send is checked."""
    asked = {"kind": "layer", "payload_bytes": ",".join(map(str, payload_bytes))}
    return run_steps(spec.gpus, device, on_event, (spec,), **asked)


def run_steps(
    ranks: int, device: str, on_event: OnEvent, specs: tuple[RunSpec, ...] = (), **asked: str
) -> TraceMeasure:
    """By all ranks on this host: a list, or a layer of the spec."""
    options = tuple(sorted({"device": device, **asked}.items()))
    job = Job(job="trace", specs=specs, ranks=ranks, options=options, limits=_LIMITS)
    return answers(job, TraceMeasure, (None,), progress(on_event))[0]


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
    no_mlp = model is not None and request.ffn is None and not model.count_layers("dense")
    if needed[1] == "ffn" and no_mlp:
        hint = "use kind layer, or pass --ffn, such as the width of an expert"
        raise UserError(
            "has experts in every layer, and no MLP of all tokens",
            field="model",
            value=request.model,
            hint=hint,
        )
    sizes = _given_sizes(request, model, needed)
    return Ask(
        tokens=request.tokens,
        layout=_layout(request),
        rank=request.rank,
        dtype=request.dtype,
        attention=request.attention,
        gated=model is not None and model.gated,
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
    cluster, hint = catalog.cluster(name, ranks), "use fewer ranks, or a larger cluster"
    rule = f"is too small for {counted(ranks, 'rank')}"
    check.that(ranks <= cluster.gpus, "cluster", f"{name} of {cluster.gpus}", rule, hint)
    return cluster
