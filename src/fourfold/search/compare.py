"""Rankings of several queries compared: whether fewer GPUs are faster, and which shape of about the
asked parameter count takes fewest days for the tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from fourfold.cost.count.params import model_params
from fourfold.events import Event
from fourfold.search.advise import auto_heads
from fourfold.search.query import PlanQuery
from fourfold.search.ranking import Ranking, rank_layouts
from fourfold.search.rules.case import divisors
from fourfold.spec import check, codec
from fourfold.spec.model import ModelShape
from fourfold.units import counted

# A smaller machine must be this much better per GPU to win; below, it is not tried.
WORTH_TRYING = 0.8


def best_of(query: PlanQuery, counts: list[int], *, least: int) -> tuple[Ranking, dict[int, float]]:
    """The ranking at the number of GPUs whose best layout is fastest, and the seconds of each.

    Counts come largest first. Those far below one that works are skipped: they would have to be a
    quarter faster per GPU.
    """
    best: Ranking | None = None
    tried: dict[int, float] = {}
    for place, gpus in enumerate(counts):
        if best is not None and len(best) and gpus < WORTH_TRYING * best.query.gpus:
            break
        if len(counts) > 1:
            query.on_event(
                Event(f"{counted(gpus, 'GPU')} ({place + 1} of {len(counts)})", "progress")
            )
        ranking = rank_layouts(replace(query, gpus=gpus), least=least)
        if len(ranking):
            tried[gpus] = float(ranking.step_s[0])
        if best is None or (len(ranking) and (not len(best) or tried[gpus] < best.step_s[0])):
            best = ranking
    assert best is not None, "there is at least one number of GPUs"
    return best, tried


# Depth over width of published decoders (hidden/layers) runs from 60 to 250.
ASPECTS = (64, 96, 128, 160, 200, 240)
TOLERANCE = 0.06


def shapes_near(base: ModelShape, params: float, seq_len: int, tp: int) -> list[ModelShape]:
    """Shapes of the base's family within a few percent of `params`, aligned for tp."""
    rule, hint = "has experts: only dense shapes are made larger and smaller", "name a dense model"
    check.that(base.moe is None, "model", base.name, rule, hint)
    shapes: dict[tuple[int, int], ModelShape] = {}
    step = 128 * max(1, tp // 2)
    for aspect in ASPECTS:
        width = (params * aspect / _per_layer(base)) ** (1.0 / 3.0)
        for hidden in {
            max(step, round(width / step) * step + shift * step) for shift in (-1, 0, 1)
        }:
            model = _shape(base, hidden, params, seq_len, tp)
            if model is not None:
                shapes[model.layers, hidden] = model
    return [shapes[key] for key in sorted(shapes)]


def _per_layer(base: ModelShape) -> float:
    """Parameters of a layer over hidden squared."""
    mlp = (3 if base.gated else 2) * base.ffn / base.hidden
    return 2.0 + 2.0 * base.kv_heads / base.heads + mlp


def _shape(
    base: ModelShape, hidden: int, params: float, seq_len: int, tp: int
) -> ModelShape | None:
    heads = auto_heads(hidden, tp)
    groups = max(1, heads // max(1, base.heads // base.kv_heads))
    kv_heads = max((d for d in divisors(heads) if d <= groups), default=1)
    ffn = round(base.ffn / base.hidden * hidden / (64 * tp)) * 64 * tp
    wide = replace(
        base,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=max(64 * tp, ffn),
        layers=1,
        head_dim=None,
        name="custom",
    )
    each = model_params(replace(wide, layers=2), seq_len) - model_params(wide, seq_len)
    layers = round((params - model_params(wide, seq_len)) / each) + 1
    if not 1 <= layers <= 400:
        return None
    model = replace(wide, layers=layers, name=f"{layers} x {hidden}")
    off = abs(model_params(model, seq_len) / params - 1.0)
    return model if off <= TOLERANCE else None


Figure = Annotated[float | None, codec.NULL]  # None: it does not fit


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeDays:
    """A model's shape at its best layout, and the days of its training; or the `reason` why it has
    none."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    params: int
    days: Figure = None
    gpu_hours: Figure = None
    layout: Annotated[str | None, codec.NULL] = None
    step_s: Figure = None
    reason: str | None = None
    micro_batch: int | None = None
    days_per_1e21_flop: float | None = None


def compare(query: PlanQuery, models: list[ModelShape], *, tokens: float) -> list[ShapeDays]:
    """Return the days of each model for the tokens, fastest first; those that do not fit come
    last."""
    rows = []
    # Copies of shards and virtual stages move all shapes alike: left out to be quick.
    fixed = {"replicate": 1, "virtual_stages": 1} | query.fixed
    query = replace(query, fixed=fixed, tokens=tokens)
    for place, model in enumerate(models):
        query.on_event(Event(f"{model.name} ({place + 1} of {len(models)})", "progress"))
        rows.append(_row(rank_layouts(replace(query, model=model)), tokens))
    return sorted(rows, key=lambda row: (row.days is None, row.days or 0.0))


def _row(ranking: Ranking, tokens: float) -> ShapeDays:
    query = ranking.query
    model = query.model
    row = ShapeDays(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        ffn=model.ffn,
        params=model_params(model, query.batch.seq_len),
    )
    if not len(ranking):
        refused = ranking.grid.refused
        rule = max(refused, key=lambda name: refused[name], default="")
        return replace(row, reason="does not fit" if ranking.grid.legal else f"illegal: {rule}")
    step_s = float(ranking.step_s[0])
    total_s = step_s * tokens / query.batch.tokens
    return replace(
        row,
        days=total_s / 86400.0,
        gpu_hours=total_s * query.gpus / 3600.0,
        layout=str(ranking.layout(0)),
        micro_batch=int(ranking.points["micro_batch"][0]),
        step_s=step_s,
        days_per_1e21_flop=total_s / 86400.0 / (6.0 * row.params * tokens / 1e21),
    )
