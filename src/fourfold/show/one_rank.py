"""The page of one rank without its peers: a row per layout, where its time goes, its floor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fourfold.result.one_rank import (
    KernelTime,
    OneRankResult,
    bare_layer_s,
    bare_s,
    gap_pct,
    layer_s,
    micro_s,
)
from fourfold.show.bench import oom_page
from fourfold.show.table import Grid, Part
from fourfold.spec.run import RunSpec
from fourfold.units import show_bytes

if TYPE_CHECKING:
    from fourfold.cost.floor import Part as FloorPart
    from fourfold.cost.one_rank import JoinedStep, StageCompute
    from fourfold.verbs.one_rank import OneRank

HEADINGS = [
    "layout", "rank", "layers", "kernels ms/layer", "engine ms/layer", "gap", "planner ms/layer",
    "compute s", "planner compute s", "peak", "planner peak", "traffic+bubble s", "step s",
    "planner step s",
]  # fmt: skip
_FLOOR = ["ms per step", "unavoidable", "engine", "gap", "of the step"]
_STEP_WORDS = {
    "data": "tokens of the step",
    "reduce": "shared gradients and norm",
    "optimizer": "clip and update",
    "once": "first gather, last reduction",
}


def row(
    found: OneRankResult, said: StageCompute, whole: JoinedStep, planner_step_s: float, name: str
) -> list[str]:
    alone, engine = bare_layer_s(found), layer_s(found)
    return [
        name,
        str(found.rank),
        str(found.layers),
        f"{1e3 * alone:.2f}",
        f"{1e3 * engine:.2f}",
        f"{gap_pct(engine, alone):+.0f}%",
        f"{1e3 * said.layer_s:.2f}",
        f"{found.compute_s:.3f}",
        f"{said.compute_s:.3f}",
        show_bytes(found.peak_bytes),
        show_bytes(said.peak_bytes),
        f"{whole.step_s - found.compute_s:.3f}",
        f"{whole.step_s:.3f}",
        f"{planner_step_s:.3f}",
    ]


def phase_rows(found: OneRankResult) -> list[list[str]]:
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
        rows.append(_gap_row(words, bare_s(found, *parts, when=when), seconds))
    rows.append(_gap_row("between passes", 0.0, found.phase("between").seconds))
    kernels = bare_s(found, "attention", "mlp", "head")
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


def part_rows(found: OneRankResult) -> list[list[str]]:
    """What | bare kernels | engine, ms of one micro batch; the rest is idle or the host's."""
    core = sum(k.calls * k.seconds for k in found.kernels if k.name == "core")
    products = bare_s(found, "attention", "mlp", "head") - core
    alone = {"matrix products": products, "attention": core}
    rows, busy = [], 0.0
    for part in found.parts:
        if part.name != "fills":
            rows.append(_gap_row(part.name, alone.get(part.name, 0.0), part.seconds))
            busy += part.seconds
    idle = "idle, waiting for the host" if found.reserved_bytes else "host, dispatch"
    rows.append(_gap_row(idle, 0.0, micro_s(found) - busy))
    return rows


def comm_rows(found: OneRankResult, whole: JoinedStep) -> list[list[str]]:
    """Axis | collective | calls | payload | exposed seconds of the axis."""
    rows, told = [], set()
    for one in found.comm:
        exposed = f"{whole.parts[one.axis]:.3f}" if one.axis in whole.parts else "-"
        rows.append(
            [
                one.axis,
                one.op,
                f"{one.calls:,}",
                show_bytes(one.bytes),
                exposed if one.axis not in told else "",
            ]
        )
        told.add(one.axis)
    return rows


def kernel_rows(found: OneRankResult) -> list[list[str]]:
    return [
        [
            f"{one.part} {one.name}",
            one.when,
            one.makes,
            one.shape,
            str(one.calls),
            f"{1e3 * one.seconds:.4f}",
            f"{_useful_flops(one) / one.seconds / 1e12:.4g}",
        ]
        for one in found.kernels
    ]


def _useful_flops(one: KernelTime) -> float:
    """A causal mask leaves half of the square to do."""
    return one.flops / 2 if one.shape.endswith(" causal") else one.flops


def notes(basis: str, found: Sequence[OneRankResult]) -> list[str]:
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
    for stand_in in found:
        if stand_in.ran < stand_in.micro_batches:
            lines.append(
                f"rank {stand_in.rank}, {stand_in.layers} layers: {stand_in.ran} of "
                f"{stand_in.micro_batches} micro batches run, the rest extrapolated"
            )
    return [*lines, f"{one.device}, torch {one.torch}"]


def page(ranks: Sequence[OneRank], *, details: bool, against: bool) -> list[Part]:
    """One row per layout, then of each, where its time goes; or each against its floor."""
    spec = ranks[0].spec
    parts: list[Part] = [
        f"{spec.model.name}, {spec.gpus} ranks, global batch {spec.batch.global_batch} x "
        f"{spec.batch.seq_len} tokens; one rank on this device, without its peers",
        "",
    ]
    if against:
        return [*parts, *(part for one in ranks for part in _floor(one))]
    cells = []
    for one in ranks:
        if one.found is None:
            cells.append([name_of(one.spec), str(one.rank), one.report.outcome, *["-"] * 11])
            continue
        said, whole = one.planner.predicted(one.found), one.planner.joined(one.found)
        cells.append(row(one.found, said, whole, one.planner.step_s()[0], name_of(one.spec)))
    parts.append(Grid(HEADINGS, cells))
    parts += notes(ranks[0].planner.basis, [one.found for one in ranks if one.found])
    for one in ranks:
        parts += _one(one, details=details or len(ranks) == 1)
    return parts


def floor_page(rows: Sequence[FloorPart], tokens: float) -> list[Part]:
    from fourfold.cost.floor import total

    whole = total(list(rows))
    cells = [_floor_cells(row, whole.engine_s) for row in (*rows, whole)]
    speeds = (
        f"{tokens / whole.engine_s:,.0f} of at most {tokens / whole.limit_s:,.0f} tokens/s per GPU"
    )
    share = f"{100 * whole.limit_s / whole.engine_s:.1f}% of the limit"
    return [Grid(_FLOOR, cells), "", f"{speeds}: {share}"]


def _floor_cells(row: FloorPart, step_s: float) -> list[str]:
    return [
        row.name,
        f"{1e3 * row.limit_s:.3f}" if row.limit_s else "-",
        f"{1e3 * row.engine_s:.3f}",
        f"{1e3 * row.gap_s:+.3f}",
        f"{100 * row.gap_s / step_s:+.1f}%",
    ]


def _floor(one: OneRank) -> list[Part]:
    if one.found is None:
        return _one(one, details=False)
    head = f"{name_of(one.spec)}, {one.found.device}, torch {one.found.torch}"
    return [head, *floor_page(one.floor, one.tokens)]


def _one(one: OneRank, *, details: bool) -> list[Part]:
    if one.found is None:
        said = one.report.failure
        words = said.message.splitlines()[0] if said and said.message else "cause unknown"
        parts: list[Part] = ["", f"{name_of(one.spec)}: {one.report.outcome}: {words}"]
        is_oom = one.report.outcome == "oom"
        return [*parts, *(oom_page(one.planner.post_mortem(one.report)) if is_oom else ())]
    if not details:
        return []
    whole = one.planner.joined(one.found)
    return _details(one.found, whole, one.planner.step_s(), name_of(one.spec))


def name_of(spec: RunSpec) -> str:
    policy = spec.policy
    words = [str(spec.layout), policy.sharding, f"mbs{spec.batch.micro_batch}"]
    words += [policy.cp_kind] if spec.layout.cp > 1 else []
    words += [policy.schedule] if spec.layout.pp > 1 and policy.schedule != "1f1b" else []
    words += [f"v{policy.virtual_stages}"] if policy.virtual_stages > 1 else []
    words += [f"recompute {policy.recompute}"] if policy.recompute != "none" else []
    return " ".join([*words, *(["compiled"] if policy.compile else [])])


def _details(
    found: OneRankResult, whole: JoinedStep, planner: tuple[float, float, float], name: str
) -> list[Part]:
    """Tables of one stand-in, in the order of a reader's questions."""
    kernels = Grid(
        ["kernel", "in", "makes", "m x n x k, or b x h x q x k x d", "calls", "ms", "TFLOP/s"],
        kernel_rows(found),
    )
    phases = Grid(["ms", "kernels alone", "engine", "gap", "gap %"], phase_rows(found))
    parts: list[Part] = ["", f"{name}, rank {found.rank}, stage {found.stage}", "", phases]
    if found.parts and found.watched == (1, 1):
        heads = ["ms of one micro batch", "kernels alone", "engine", "gap", "gap %"]
        parts += ["", Grid(heads, part_rows(found))]
    elif found.parts_note:
        parts += ["", found.parts_note]
    if found.comm:
        heads = ["axis", "collective", "calls per step", "payload", "exposed s, predicted"]
        parts += ["", Grid(heads, comm_rows(found, whole))]
    step = [[part, f"{seconds:.3f}"] for part, seconds in whole.parts.items()]
    step += [["step", f"{whole.step_s:.3f}"]]
    step += [["planner's own step", f"{planner[0]:.3f} ({planner[1]:.3f} to {planner[2]:.3f})"]]
    parts += ["", Grid(["part of a step", "s"], step), "", kernels]
    memory = f"peak {show_bytes(found.peak_bytes)} ({found.peaks_from})"
    if found.reserved_bytes:
        memory += f", reserved {show_bytes(found.reserved_bytes)}"
        memory += f", {found.retries} allocation retries" if found.retries else ""
    timed = ", ".join(f"{seconds:.4f}" for seconds in found.step_s)
    return [*parts, "", f"{memory}; timed steps {timed} s"]
