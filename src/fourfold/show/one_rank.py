"""The page of one rank without its peers: a row per layout, where its time goes, its floor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fourfold.result.one_rank import (
    KernelTime,
    OneRankResult,
    gap_pct,
    kernels_layer_s,
    kernels_s,
    layer_s,
    micro_s,
)
from fourfold.show.bench import oom_page
from fourfold.show.table import Grid, Part, named, or_dash, table
from fourfold.spec.run import RunSpec
from fourfold.units import counted, show_bytes

if TYPE_CHECKING:
    from fourfold.cost.one_rank import JoinedStep, StageCompute
    from fourfold.cost.one_rank import Part as FloorPart
    from fourfold.verbs.one_rank import OneRank

_GAP = ["kernels alone", "engine", "gap", "gap %"]
_STEP_WORDS = {
    "data": "tokens of the step",
    "reduce": "shared gradients and norm",
    "optimizer": "clip and update",
    "once": "first gather, last reduction",
}


def _layouts(ranks: Sequence[OneRank]) -> Grid:
    """A row per layout: kernels alone, in the engine, and as the planner predicts them."""
    columns: dict[str, Callable[[OneRankResult, StageCompute, JoinedStep], str]] = {
        "layers": lambda found, *_: str(found.layers),
        "kernels ms/layer": lambda found, *_: f"{1e3 * kernels_layer_s(found):.2f}",
        "engine ms/layer": lambda found, *_: f"{1e3 * layer_s(found):.2f}",
        "gap": lambda found, *_: f"{gap_pct(layer_s(found), kernels_layer_s(found)):+.0f}%",
        "planner ms/layer": lambda _, planned, __: f"{1e3 * planned.layer_s:.2f}",
        "compute s": lambda found, *_: f"{found.compute_s:.3f}",
        "planner compute s": lambda _, planned, __: f"{planned.compute_s:.3f}",
        "peak": lambda found, *_: show_bytes(found.peak_bytes),
        "planner peak": lambda _, planned, __: show_bytes(planned.peak_bytes),
        "traffic+bubble s": lambda found, _, whole: f"{whole.step_s - found.compute_s:.3f}",
        "step s": lambda _, __, whole: f"{whole.step_s:.3f}",
    }
    rows = []
    for one in ranks:
        name, found, planner = name_of(one.spec), one.found, one.planner
        if found is None:
            rows.append([name, str(one.rank), one.report.outcome, *["-"] * len(columns)])
            continue
        parts = (found, planner.predicted(found), planner.joined(found))
        cells = [cell(*parts) for cell in columns.values()]
        rows.append([name, str(found.rank), *cells, f"{planner.step_s()[0]:.3f}"])
    return Grid(["layout", "rank", *columns, "planner step s"], rows)


def _phase_rows(found: OneRankResult) -> list[list[str]]:
    """What | bare kernels | engine | gap, ms of one micro batch, then of the step."""
    rows = []
    weights = found.phase("weights").seconds
    for words, phase, parts, when in (
        ("embedding, forward", "embed", (), "forward"),
        ("layers, forward", "layers", ("attention", "mlp"), "forward"),
        ("head and loss, forward", "head", ("head",), "forward"),
        ("head and loss, backward", "head back", ("head",), "backward"),
        ("layers, backward", "layers back", ("attention", "mlp"), "backward"),
        ("embedding, backward; hand-over", "embed back", (), "backward"),
    ):
        seconds = found.phase(phase).seconds + (weights if phase == "layers back" else 0.0)
        rows.append(_gap_row(words, kernels_s(found, *parts, when=when), seconds))
    rows.append(_gap_row("between passes", 0.0, found.phase("between").seconds))
    kernels = kernels_s(found, "attention", "mlp", "head")
    rows.append(_gap_row("one micro batch", kernels, micro_s(found)))
    for name, words in _STEP_WORDS.items():
        alone = found.update_s if name == "optimizer" else 0.0
        rows.append(_gap_row(f"step: {words}", alone, found.phase(name).seconds))
    whole = found.micro_batches * kernels + found.update_s
    rows.append(_gap_row(f"step of {found.micro_batches}", whole, found.compute_s))
    return rows


def _gap_row(words: str, alone_s: float, seconds: float) -> list[str]:
    gap = seconds - alone_s
    return [
        words,
        f"{1e3 * alone_s:.3f}" if alone_s else "-",
        f"{1e3 * seconds:.3f}",
        f"{1e3 * gap:.3f}",
        f"{gap_pct(seconds, alone_s):+.0f}%" if alone_s else "-",
    ]


def _part_rows(found: OneRankResult) -> list[list[str]]:
    """What | bare kernels | engine, ms of one micro batch; the rest is idle or the host's."""
    core = sum(k.calls * k.seconds for k in found.kernels if k.name == "core")
    products = kernels_s(found, "attention", "mlp", "head") - core
    alone = {"matrix products": products, "attention": core}
    rows, busy = [], 0.0
    for part in found.parts:
        if part.name != "fills":
            rows.append(_gap_row(part.name, alone.get(part.name, 0.0), part.seconds))
            busy += part.seconds
    idle = "idle, waiting for the host" if found.reserved_bytes else "host, dispatch"
    rows.append(_gap_row(idle, 0.0, micro_s(found) - busy))
    return rows


def _comm(found: OneRankResult, whole: JoinedStep) -> Grid:
    rows, axes = [], set()
    for one in found.comm:
        exposed = or_dash(whole.parts.get(one.axis), ".3f") if one.axis not in axes else ""
        rows.append([one.axis, one.op, f"{one.calls:,}", show_bytes(one.bytes), exposed])
        axes.add(one.axis)
    headings = ["axis", "collective", "calls per step", "payload", "exposed s, predicted"]
    return Grid(headings, rows)


def _kernels(found: OneRankResult) -> Grid:
    return table(
        found.kernels,
        ("kernel", lambda one: f"{one.part} {one.name}"),
        *named("in=when", "makes", "m x n x k, or b x h x q x k x d=shape", "calls"),
        ("ms", lambda one: f"{1e3 * one.seconds:.4f}"),
        ("TFLOP/s", lambda one: f"{_useful_flops(one) / one.seconds / 1e12:.4g}"),
    )


def _useful_flops(one: KernelTime) -> float:
    """A causal mask leaves half of the square to do."""
    return one.flops / 2 if one.shape.endswith(" causal") else one.flops


def _notes(basis: str, found: Sequence[OneRankResult]) -> list[str]:
    """What the table's columns are, what was run and what continued."""
    if not found:
        return []
    one = found[0]
    lines = [
        "",
        "kernels: matrix products and attention of a layer, both ways, timed alone; engine: the "
        "same layer in its step; gap: norms, element-wise work, copies, dispatch and waiting for "
        "the host",
        f"planner: {basis}; its peak excludes context and communicators, as the {one.peaks_from} "
        "does",
        "step = measured compute + predicted traffic and bubble (other stages assumed as slow)",
    ]
    lines += [
        f"rank {rank.rank}, {counted(rank.layers, 'layer')}: {rank.ran} of"
        f" {counted(rank.micro_batches, 'micro batch')} "
        "run, the rest extrapolated"
        for rank in found
        if rank.ran < rank.micro_batches
    ]
    return [*lines, f"{one.device}, torch {one.torch}"]


def page(ranks: Sequence[OneRank], *, details: bool, against: bool) -> list[Part]:
    """One row per layout, then of each, where its time goes; or each against its floor."""
    spec = ranks[0].spec
    parts: list[Part] = [
        f"{spec.model.name}, {counted(spec.gpus, 'rank')},"
        f" global batch {spec.batch.global_batch} x "
        f"{spec.batch.seq_len} tokens; one rank on this device, without its peers",
        "",
    ]
    if against:
        return [*parts, *(part for one in ranks for part in _floor(one))]
    parts.append(_layouts(ranks))
    parts += _notes(ranks[0].planner.basis, [one.found for one in ranks if one.found])
    for one in ranks:
        parts += _one(one, details=details or len(ranks) == 1)
    return parts


def floor_page(rows: Sequence[FloorPart], tokens: float) -> list[Part]:
    from fourfold.cost.one_rank import total

    whole = total(list(rows))
    parts = table(
        [*rows, whole],
        *named("ms per step=name"),
        ("unavoidable", lambda row: or_dash(1e3 * row.limit_s or None, ".3f")),
        ("engine", lambda row: f"{1e3 * row.engine_s:.3f}"),
        ("gap", lambda row: f"{1e3 * row.gap_s:+.3f}"),
        ("of the step", lambda row: f"{100 * row.gap_s / whole.engine_s:+.1f}%"),
    )
    most, share = tokens / whole.limit_s, 100 * whole.limit_s / whole.engine_s
    speed = f"{tokens / whole.engine_s:,.0f} of at most {most:,.0f} tokens/s per GPU"
    return [parts, "", f"{speed}: {share:.1f}% of the limit"]


def _floor(one: OneRank) -> list[Part]:
    if one.found is None:
        return _one(one, details=False)
    head = f"{name_of(one.spec)}, {one.found.device}, torch {one.found.torch}"
    return [head, *floor_page(one.floor, one.tokens)]


def _one(one: OneRank, *, details: bool) -> list[Part]:
    if one.found is None:
        failure = one.report.failure
        words = failure.message.splitlines()[0] if failure and failure.message else "cause unknown"
        parts: list[Part] = ["", f"{name_of(one.spec)}: {one.report.outcome}: {words}"]
        is_oom = one.report.outcome == "oom"
        return [*parts, *(oom_page(one.planner.post_mortem(one.report)) if is_oom else ())]
    return _details(one, one.found) if details else []


def name_of(spec: RunSpec) -> str:
    policy = spec.policy
    words = [str(spec.layout), policy.sharding, f"mbs{spec.batch.micro_batch}"]
    words += [policy.cp_kind] if spec.layout.cp > 1 else []
    words += [policy.schedule] if spec.layout.pp > 1 and policy.schedule != "1f1b" else []
    words += [f"v{policy.virtual_stages}"] if policy.virtual_stages > 1 else []
    words += [f"recompute {policy.recompute}"] if policy.recompute != "none" else []
    return " ".join([*words, *(["compiled"] if policy.compile else [])])


def _details(one: OneRank, found: OneRankResult) -> list[Part]:
    whole, (step_s, low_s, high_s) = one.planner.joined(found), one.planner.step_s()
    head = f"{name_of(one.spec)}, rank {found.rank}, stage {found.stage}"
    parts: list[Part] = ["", head, "", Grid(["ms", *_GAP], _phase_rows(found))]
    if found.parts and found.watched == (1, 1):
        parts += ["", Grid(["ms of one micro batch", *_GAP], _part_rows(found))]
    elif found.parts_note:
        parts += ["", found.parts_note]
    if found.comm:
        parts += ["", _comm(found, whole)]
    step = [[part, f"{seconds:.3f}"] for part, seconds in whole.parts.items()]
    step += [["step", f"{whole.step_s:.3f}"]]
    step += [["planner's own step", f"{step_s:.3f} ({low_s:.3f} to {high_s:.3f})"]]
    parts += ["", Grid(["part of a step", "s"], step), "", _kernels(found)]
    memory = f"peak {show_bytes(found.peak_bytes)} ({found.peaks_from})"
    if found.reserved_bytes:
        memory += f", reserved {show_bytes(found.reserved_bytes)}"
        memory += f", {found.retries} allocation retries" if found.retries else ""
    timed = ", ".join(f"{seconds:.4f}" for seconds in found.step_s)
    return [*parts, "", f"{memory}; timed steps {timed} s"]
