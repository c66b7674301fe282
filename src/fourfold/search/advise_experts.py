"""Experts that suit a GPU: how many, how wide, how many for a token, and the rows that each gets of
a micro batch. Judged by what a rank computes between receiving tokens and sending them on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fourfold.cost.columns import Floats
from fourfold.cost.ops.experts import experts
from fourfold.cost.ops.op import Sizes
from fourfold.cost.step.rates import rates_of
from fourfold.search.advise import Kernels, LayerShape, SizeAdvice, judged, near

# A grouped product works through an expert's columns in tiles of so many, and reads rows of whole
# 16 bytes (torch._grouped_mm refuses others).
TILE, WHOLE_ROWS = 128.0, 8
MICRO_BATCHES = (1, 2, 4, 8, 16)
ANOTHER_MODEL = "as many weights and as much work, but another model: rates say nothing of its loss"


def rows_of(shape: LayerShape) -> float:
    """Rows of an expert, if all get as many."""
    return shape.micro_batch * shape.seq_len / shape.tp * shape.ep * shape.top_k / shape.experts


def expert_rates(shapes: Sequence[LayerShape], kernels: Kernels) -> Floats:
    """FLOP/s of one rank in experts, router and sorting, both ways."""
    c = kernels.columns(shapes)
    rates, seconds = rates_of(c, kernels.coefficients), np.zeros(len(shapes))
    for op in experts(c, Sizes(c, c.micro)):
        if op.kind == "grouped product":
            seconds = seconds + rates.seconds(op._replace(n=np.ceil(op.n / TILE) * TILE))
        elif op.kind != "collective":
            seconds = seconds + rates.seconds(op)
    useful = (2.0 + c.gated) * c.hidden * c.expert_ffn * c.top_k
    return 6.0 * c.tokens / c.split * useful / seconds


def expert_advice(shape: LayerShape, kernels: Kernels) -> dict[str, SizeAdvice]:
    """By size; each keeps what the others make of a token and of the model's weights."""
    return {
        "experts": _finer(shape, kernels),
        "expert_ffn": _wider(shape, kernels),
        "micro_batch": _more_rows(shape, kernels),
    }


def _with_rows(advice: SizeAdvice, shapes: Sequence[LayerShape]) -> SizeAdvice:
    """Return the advice with the tokens per expert of each value."""
    tried = zip(advice.table, shapes, strict=True)
    rows = (replace(row, rows=round(rows_of(shape))) for row, shape in tried)
    return replace(advice, table=tuple(rows))


def _finer(shape: LayerShape, kernels: Kernels) -> SizeAdvice:
    """As many weights and as much work in fewer, wider experts, or in more, narrower ones."""
    found = {shape.experts: shape}
    for times in (2, 4):
        finer = (shape.experts * times, shape.expert_ffn // times, shape.top_k * times)
        coarser = (shape.experts // times, shape.expert_ffn * times, shape.top_k // times)
        for count, ffn, top_k in (finer, coarser):
            if ffn * count == shape.expert_ffn * shape.experts and top_k * shape.experts == (
                shape.top_k * count
            ):
                found[count] = replace(shape, experts=count, expert_ffn=ffn, top_k=top_k)
    shapes = [found[count] for count in sorted(found)]
    rates = expert_rates(shapes, kernels)
    notes = [ANOTHER_MODEL]
    if shape.experts % shape.ep:
        notes.append(f"experts {shape.experts} are not divisible by ep {shape.ep}")
    advice = judged(shape.experts, sorted(found), rates, notes)
    tried = (
        replace(row, expert_ffn=other.expert_ffn, top_k=other.top_k)
        for row, other in zip(advice.table, shapes, strict=True)
    )
    return _with_rows(replace(advice, table=tuple(tried)), shapes)


def _wider(shape: LayerShape, kernels: Kernels) -> SizeAdvice:
    widths = near(shape.expert_ffn, 64)
    shapes = [replace(shape, expert_ffn=width) for width in widths]
    notes, ragged = [], shape.expert_ffn % int(TILE)
    if shape.expert_ffn % WHOLE_ROWS:
        notes.append(f"grouped products need a multiple of {WHOLE_ROWS}, rows of whole 16 bytes")
    elif ragged:
        notes.append(f"{ragged} columns of the last tile of {TILE:.0f} are used")
    advice = judged(shape.expert_ffn, widths, expert_rates(shapes, kernels), notes)
    return _with_rows(advice, shapes)


def _more_rows(shape: LayerShape, kernels: Kernels) -> SizeAdvice:
    sizes = sorted({*MICRO_BATCHES, shape.micro_batch})
    shapes = [replace(shape, micro_batch=size) for size in sizes]
    notes = [f"{rows_of(shape):,.0f} tokens per expert at ep {shape.ep}"]
    advice = judged(shape.micro_batch, sizes, expert_rates(shapes, kernels), notes)
    return _with_rows(advice, shapes)
