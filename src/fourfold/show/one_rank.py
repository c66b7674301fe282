"""The page of one rank without its peers: a row per layout, where its time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fourfold.result.one_rank import (
    KernelTime,
    OneRankResult,
    gap_pct,
    kernels_micro_s,
    kernels_s,
    micro_s,
)
from fourfold.show.bench import oom_page
from fourfold.spec.run import RunSpec
from fourfold.text_table import Grid, Part, named, or_dash, table
from fourfold.units import counted, show_bytes

if TYPE_CHECKING:
    from fourfold.verbs.one_rank import OneRank

_GAP = ["kernels alone", "engine", "gap", "gap %"]
_STEP_WORDS = {
    "data": "tokens of the step",
    "reduce": "shared gradients and norm",
    "optimizer": "clip and update",
    "once": "first gather, last reduction",
}


def _layouts(ranks: Sequence[OneRank]) -> Grid:
    """Return a row per layout: kernels alone, in the engine, and as the planner predicts them."""

    def predicted_rest(rank: OneRank) -> str:
        parts = dict(rank.step_parts_s or {})
        parts.pop("compute, measured", None)
        return or_dash(sum(parts.values()) if parts else None, ".3f")

    return table(
        ranks,
        ("layout", lambda rank: name_of(rank.spec)),
        *named("rank"),
        ("layers", lambda rank: str(rank.measured.layers if rank.measured else rank.outcome)),
        *named("kernels ms/layer=kernels_layer_s:ms.2f", "engine ms/layer=engine_layer_s:ms.2f"),
        ("gap", lambda rank: or_dash(rank.layer_gap_pct, lambda gap: f"{gap:+.0f}%")),
        *named(
            "planner ms/layer=predicted.layer_s:ms.2f",
            "compute s=measured.compute_s:.3f",
            "planner compute s=predicted.compute_s:.3f",
            "peak=measured.peak_bytes:bytes",
            "planner peak=predicted.peak_bytes:bytes",
        ),
        ("traffic+bubble s", predicted_rest),
        *named("step s=step_s_with_modelled_traffic:.3f", "planner step s=planner_step_s:.3f"),
    )


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
    kernels = kernels_micro_s(found)
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
    products = kernels_micro_s(found) - core
    alone = {"matrix products": products, "attention": core}
    rows, busy = [], 0.0
    for part in found.parts:
        if part.name != "fills":
            rows.append(_gap_row(part.name, alone.get(part.name, 0.0), part.seconds))
            busy += part.seconds
    idle = "idle, waiting for the host" if found.reserved_bytes else "host, dispatch"
    rows.append(_gap_row(idle, 0.0, micro_s(found) - busy))
    return rows


def _comm(found: OneRankResult, exposed_s: Mapping[str, float]) -> Grid:
    """Seconds of an axis stand beside the first of its collectives."""
    first = {one.axis: one for one in reversed(found.comm)}
    return table(
        found.comm,
        *named("axis", "collective=op", "calls per step=calls:,", "payload=bytes:bytes"),
        (
            "exposed s, predicted",
            lambda one: or_dash(exposed_s.get(one.axis), ".3f") if one is first[one.axis] else "",
        ),
    )


def _kernels(found: OneRankResult) -> Grid:
    return table(
        found.kernels,
        ("kernel", lambda one: f"{one.part} {one.name}"),
        *named("in=when", "makes", "m x n x k, or b x h x q x k x d=shape", "calls"),
        *named("ms=seconds:ms.4f"),
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


def page(ranks: Sequence[OneRank], *, details: bool) -> list[Part]:
    """Return the page: a row per layout, then where the time of each goes."""
    spec = ranks[0].spec
    parts: list[Part] = [
        f"{spec.model.name}, {counted(spec.gpus, 'rank')},"
        f" global batch {spec.batch.global_batch} x "
        f"{spec.batch.seq_len} tokens; one rank on this device, without its peers",
        "",
    ]
    parts.append(_layouts(ranks))
    parts += _notes(ranks[0].planner_basis, [rank.measured for rank in ranks if rank.measured])
    for rank in ranks:
        if rank.measured is None:
            parts += _failed(rank)
        elif details or len(ranks) == 1:
            parts += _details(rank, rank.measured)
    return parts


def _failed(rank: OneRank) -> list[Part]:
    failure = rank.failure
    words = failure.said if failure and failure.message else "cause unknown"
    head = f"{name_of(rank.spec)}: {rank.outcome}: {words}"
    return ["", head, *oom_page(rank.post_mortem or {})]


def name_of(spec: RunSpec) -> str:
    policy = spec.policy
    words = [str(spec.layout), policy.sharding, f"mbs{spec.batch.micro_batch}"]
    words += [policy.cp_kind] if spec.layout.cp > 1 else []
    words += [policy.schedule] if spec.layout.pp > 1 and policy.schedule != "1f1b" else []
    words += [f"v{policy.virtual_stages}"] if policy.virtual_stages > 1 else []
    words += [f"recompute {policy.recompute}"] if policy.recompute != "none" else []
    return " ".join([*words, *(["compiled"] if policy.compile else [])])


def _details(rank: OneRank, found: OneRankResult) -> list[Part]:
    head = f"{name_of(rank.spec)}, rank {found.rank}, stage {found.stage}"
    step_parts_s = rank.step_parts_s or {}
    parts: list[Part] = ["", head, "", Grid(["ms", *_GAP], _phase_rows(found))]
    if found.parts and found.watched == (1, 1):
        parts += ["", Grid(["ms of one micro batch", *_GAP], _part_rows(found))]
    elif found.parts_note:
        parts += ["", found.parts_note]
    if found.comm:
        parts += ["", _comm(found, step_parts_s)]
    seconds = {**step_parts_s, "step": sum(step_parts_s.values())}
    step = [[part, f"{s:.3f}"] for part, s in seconds.items()]
    low, high = rank.planner_step_s_low, rank.planner_step_s_high
    step += [["planner's own step", f"{rank.planner_step_s:.3f} ({low:.3f} to {high:.3f})"]]
    parts += ["", Grid(["part of a step", "s"], step), "", _kernels(found)]
    memory = f"peak {show_bytes(found.peak_bytes)} ({found.peaks_from})"
    if found.reserved_bytes:
        memory += f", reserved {show_bytes(found.reserved_bytes)}"
        memory += f", {found.retries} allocation retries" if found.retries else ""
    timed = ", ".join(f"{seconds:.4f}" for seconds in found.step_s)
    return [*parts, "", f"{memory}; timed steps {timed} s"]
