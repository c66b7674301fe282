"""What there is to choose from: every layout of the ranks with every policy worth trying, as
columns of whole numbers, walked layouts first; and how many of the whole grid each rule refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.search.legal import REASONS, RULES, case_of
from fourfold.search.query import PlanQuery
from fourfold.search.rules.case import RuleCase, divisors
from fourfold.search.table import Ints, PointTable, repeats
from fourfold.spec.layout import EXPERT_AXES, MODEL_AXES, SIZES, Layout
from fourfold.spec.run import running_schedule
from fourfold.spec.words import (
    CP_KINDS,
    MOE_RECOMPUTE,
    RECOMPUTE,
    RECOMPUTE_KINDS,
    SCHEDULES,
    SHARDINGS,
)

# Sequences in a micro batch: fine where a step matters, coarse above.
MICRO_BATCHES = (
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    10,
    12,
    14,
    16,
    20,
    24,
    28,
    32,
    40,
    48,
    56,
    64,
    80,
    96,
    112,
    128,
)
# Tokens of a sequence that context parallelism leaves a rank, unless asked for: places of experts
# multiply what there is to try.
LEAST_PART = 512
WIDE_EXPERT = 4096  # below, slices of an expert leave products of no size
# Rules that read the micro batch, and the one that reads recompute; layouts settle all others.
_MICRO_RULES = {"micro-divides", "fill", "whole-rounds"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """`refused` counts points of the whole grid by the first broken rule in the order of
    REASONS."""

    table: PointTable
    legal: int
    looked_at: int
    refused: dict[str, int]
    values: dict[str, tuple[int | str, ...]]  # per axis, what was tried


def candidates(query: PlanQuery) -> Candidates:
    """The whole grid of a question: legal points, and what was refused."""
    case = case_of(query.model, Layout(shard=query.gpus), query.batch, query.policy, query.target)
    grid = _grid(query)
    micros, kinds = _micro_batches(query), _recompute_kinds(query)
    layout_rules = set(REASONS) - _MICRO_RULES - {"recompute"}
    reason = _first_reason(case.with_columns(grid), layout_rules)
    weight = _tried(query, grid["replicate"] * grid["shard"], micros).sum(axis=1) * len(kinds)
    counts = np.bincount(reason + 1, weights=weight, minlength=len(REASONS) + 1)[1:]
    legal = reason < 0
    layouts = {name: column[legal] for name, column in grid.items()}
    legal_micros, micro_counts = _legal_micros(query, case, layouts, micros)
    refused = dict(
        zip(REASONS, (counts + micro_counts * len(kinds)).astype(int).tolist(), strict=True)
    )
    values = _values(grid, micros, kinds)
    kind_ok = _first_reason(case.with_columns({"pp": kinds, "recompute": kinds}), {"recompute"}) < 0
    refused["recompute"] += int(legal_micros.sum()) * int((~kind_ok).sum())
    kinds = kinds[kind_ok]
    ways = {"micro_batch": np.repeat(micros, len(kinds)), "recompute": np.tile(kinds, len(micros))}
    table = PointTable(
        query=query, rows=layouts, ways=ways, legal=np.repeat(legal_micros, len(kinds), axis=1)
    )
    return Candidates(
        table=table.only(np.flatnonzero(table.legal.any(axis=1))),
        legal=int(table.legal.sum()),
        looked_at=int(weight.sum()),
        refused={name: count for name, count in refused.items() if count},
        values=values,
    )


def _first_reason(case: RuleCase, asked: set[str]) -> Ints:
    """Place in RULES of the first broken one of those asked, -1 where all hold."""
    count = len(case.pp)
    reason = np.full(count, -1, dtype=np.int64)
    for place, rule in enumerate(RULES):
        if rule.reason in asked:
            hit = np.broadcast_to(np.asarray(rule.broken(case), dtype=bool), count)
            reason[hit & (reason < 0)] = place
    return reason


def _tried(query: PlanQuery, dp: Ints, micros: Ints) -> NDArray[np.bool_]:
    """[layouts, micros]: a micro batch above a rank's share would run as the share itself, the same
    point again."""
    sizes, back = np.unique(dp, return_inverse=True)
    share = -(-query.batch.global_batch // sizes)
    tried = (micros[None, :] <= share[:, None]) | (micros[None, :] == micros.min())
    return tried[back.reshape(-1)]


def _legal_micros(
    query: PlanQuery, case: RuleCase, layouts: dict[str, Ints], micros: Ints
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """([layouts, micros] legal ones, how many each rule refuses); asked once per dp, pp and
    schedule."""
    fields = ("replicate", "shard", "pp", "schedule")
    dp = layouts["replicate"] * layouts["shard"]
    key = (dp * 4096 + layouts["pp"]) * len(SCHEDULES) + layouts["schedule"]
    _, first, back, times = np.unique(
        key, return_index=True, return_inverse=True, return_counts=True
    )
    rows = {name: np.repeat(layouts[name][first], len(micros)) for name in fields}
    rows["micro_batch"] = np.tile(micros, len(first))
    reason = _first_reason(case.with_columns(rows), _MICRO_RULES).reshape(-1, len(micros))
    tried = _tried(query, dp[first], micros)
    weight = np.where(tried, times[:, None], 0)
    counts = np.bincount(
        reason.reshape(-1) + 1, weights=weight.reshape(-1), minlength=len(REASONS) + 1
    )[1:].astype(np.float64)
    return (tried & (reason < 0))[back.reshape(-1)], counts


def _grid(query: PlanQuery) -> dict[str, Ints]:
    """Layouts x places of experts x kinds of context parallelism x virtual stages x sharding."""
    kinds = np.array(_decided(query, "cp_kind", range(3), CP_KINDS.index))
    zeros = np.array(_decided(query, "sharding", range(4), SHARDINGS.index))
    sizes = np.array(_layouts(query), dtype=np.int64).reshape(-1, 5)
    sizes = _with_experts(query, sizes)
    row, place = repeats(np.where(sizes[:, 3] > 1, len(kinds), 1))
    sizes, kind = sizes[row], kinds[place]
    stages = divisors(query.gpus)
    virtual = [_virtual_stages(query, pp) for pp in stages]
    counts = np.array([len(one) for one in virtual])
    at = np.searchsorted(stages, sizes[:, 0])
    row, place = repeats(counts[at])
    looped = np.concatenate(virtual)[(np.cumsum(counts) - counts)[at][row] + place]
    table = np.column_stack([sizes[row], kind[row], looped])
    names = (*SIZES, *EXPERT_AXES, "cp_kind", "virtual_stages")
    grid = {name: np.repeat(table[:, i], len(zeros)) for i, name in enumerate(names)}
    grid["zero"] = np.tile(zeros, len(table))
    # ZeRO has nothing to divide over one rank, and zero0 divides nothing: one point, not four.
    alone = (grid["shard"] * grid["cp"] == 1) & (grid["zero"] != zeros[0])
    useful = ~alone & ((grid["zero"] > 0) | (grid["replicate"] == 1))
    grid = {name: column[useful] for name, column in grid.items()}
    asked = query.policy.schedule
    looped, plain = running_schedule(asked, 2), running_schedule(asked, 1)
    codes = [SCHEDULES.index(name) for name in (looped, plain, "1f1b")]
    in_pipe = np.where(grid["virtual_stages"] > 1, codes[0], codes[1])
    return grid | {"schedule": np.where(grid["pp"] > 1, in_pipe, codes[2])}


def _with_experts(query: PlanQuery, sizes: Ints) -> Ints:
    """Each layout with every number of ranks that experts can be divided over; wide experts also in
    slices, as many as tensor parallelism has, unless asked for."""
    shape = query.model
    asked_ep, asked_etp = query.fixed.get("ep"), query.fixed.get("etp")
    if shape.moe is None:
        both = [asked_ep or 1, asked_etp or 1]
        return np.column_stack([sizes, np.tile(np.array([both], np.int64), (len(sizes), 1))])
    parts = []
    for ep in [asked_ep] if isinstance(asked_ep, int) else divisors(shape.experts):
        slices_tried = (1, 0) if shape.moe.ffn >= WIDE_EXPERT else (1,)
        for etp in [asked_etp] if isinstance(asked_etp, int) else slices_tried:
            slices = np.where(etp > 0, etp, sizes[:, 4])
            ranks = sizes[:, 2] * sizes[:, 3] * sizes[:, 4]
            some = (ranks % (ep * slices) == 0) | (asked_ep is not None)
            some &= (etp != 0) | (slices > 1)
            both = np.column_stack([np.full(len(sizes), ep), slices])
            parts.append(np.column_stack([sizes, both])[some])
    return np.concatenate(parts)


def _decided(
    query: PlanQuery, field: str, choices: range, code: Callable[[str], int]
) -> tuple[int, ...]:
    """The user's choice, or all of them."""
    return (code(str(query.fixed[field])),) if field in query.fixed else tuple(choices)


def _layouts(query: PlanQuery) -> list[tuple[int, int, int, int, int]]:
    """Every (pp, replicate, shard, cp, tp) whose product is the number of ranks."""
    layouts = []
    for tp in _sizes(query, "tp", query.gpus):
        for cp in _sizes(query, "cp", query.gpus // tp):
            for pp in _sizes(query, "pp", query.gpus // tp // cp):
                dp = query.gpus // tp // cp // pp
                if query.fixed.get("dp", dp) != dp:
                    continue
                layouts += [
                    (pp, replicate, dp // replicate, cp, tp)
                    for replicate in _copies(query, dp)
                    if dp % replicate == 0
                ]
    return layouts


def _copies(query: PlanQuery, dp: int) -> list[int]:
    """Copies of the sharded state: as asked, 'several' for HSDP, else every number that divides."""
    asked = query.fixed.get("replicate")
    if isinstance(asked, int):
        return [asked]
    some = divisors(dp)[:-1] or [1]
    return some[1:] if asked == "several" else some


def _sizes(query: PlanQuery, axis: str, ranks: int) -> list[int]:
    asked = query.fixed.get(axis)
    if asked is None:
        few = axis == "cp" and query.model.moe is not None
        most = query.batch.seq_len // LEAST_PART if few else ranks
        return [size for size in divisors(ranks) if size <= max(1, most)]
    return [asked] if isinstance(asked, int) and ranks % asked == 0 else []


def _virtual_stages(query: PlanQuery, pp: int) -> list[int]:
    """1, and every count that makes the chunks smaller: others only add hand-overs."""
    asked = query.fixed.get("virtual_stages")
    if isinstance(asked, int):
        return [asked]
    most = query.model.layers // pp
    if pp == 1 or most < 2 or query.fixed.get("schedule") in ("1f1b", "gpipe"):
        return [1]
    chunks = {virtual: -(-query.model.layers // (pp * virtual)) for virtual in range(1, most + 1)}
    smallest = {size: virtual for virtual, size in sorted(chunks.items(), reverse=True)}
    counts = sorted({1, *smallest.values()})
    return counts[1:] if query.fixed.get("schedule") == "interleaved" else counts


def _micro_batches(query: PlanQuery) -> Ints:
    asked = query.fixed.get("micro_batch")
    return np.array([asked] if isinstance(asked, int) and asked else MICRO_BATCHES, dtype=np.int64)


def _recompute_kinds(query: PlanQuery) -> Ints:
    asked = str(query.fixed["recompute"]) if "recompute" in query.fixed else None
    if asked is None:
        known = RECOMPUTE if query.model.moe is None else (*RECOMPUTE, *MOE_RECOMPUTE)
        names = tuple(kind for kind in known if kind in query.target.rules.recompute)
    else:
        names = (asked if asked in RECOMPUTE_KINDS else asked.partition("-")[0],)
    return np.array([RECOMPUTE_KINDS.index(name) for name in names], dtype=np.int64)


def _values(grid: dict[str, Ints], micros: Ints, kinds: Ints) -> dict[str, tuple[int | str, ...]]:
    """What was tried on each axis, for the report."""
    dp = grid["replicate"] * grid["shard"]
    routed = {axis: grid[axis] for axis in EXPERT_AXES if grid[axis].max(initial=1) > 1}
    axes = {
        **{axis: grid[axis] for axis in MODEL_AXES},
        **routed,
        "dp": dp,
        "dp copies": grid["replicate"],
        "virtual stages": grid["virtual_stages"],
        "micro batch": micros,
    }
    values: dict[str, tuple[int | str, ...]] = {
        name: tuple(_different(column)) for name, column in axes.items()
    }
    values["cp kind"] = tuple(CP_KINDS[i] for i in _different(grid["cp_kind"]))
    values["sharding"] = tuple(SHARDINGS[i] for i in _different(grid["zero"]))
    values["recompute"] = tuple(RECOMPUTE_KINDS[i] for i in kinds)
    return values


def _different(column: Ints) -> list[int]:
    """Sorted; by counting, since a million entries have few values and none is large."""
    return np.flatnonzero(np.bincount(column)).tolist()
