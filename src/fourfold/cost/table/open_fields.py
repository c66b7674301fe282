"""Fields that a source leaves open: layout, virtual stages, micro batch and recompute that are not
stated take the fastest values that fit, by the model's physical defaults.

Whoever published a run had tuned it, so that its best is a better guess than 1 or none.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats, columns
from fourfold.cost.fit.coefficients import LEAN, defaults
from fourfold.cost.memory.peak import limit_bytes, memory
from fourfold.cost.stacks import stack_defaults
from fourfold.cost.step.estimate import estimate
from fourfold.cost.table.reference import Distinct, Draft, NoteWords, RowTable
from fourfold.spec.layout import AXES
from fourfold.spec.words import SCHEDULES, SHARDINGS

Bools = NDArray[np.bool_]
_TRIED: dict[str, tuple[float, ...]] = {
    # Megatron's "block" recomputes as many layers as it takes.
    "full_ckpt": (0.0, 0.25, 0.5, 0.75, 1.0),
    "micro": (1.0, 2.0, 4.0, 8.0),
    "vpp": tuple(float(v) for v in range(1, 13)),
}
# A run that states none of these states no layout; many tables have no column for cp.
_LAYOUT = (*(axis for axis in AXES if axis != "cp"), "sharding")
_TRIED_LAYOUTS = tuple(
    product(
        (1.0, 2.0, 4.0, 8.0),
        (1.0, 2.0, 4.0, 8.0, 16.0, 32.0),
        (float(SHARDINGS.index("zero1")), float(SHARDINGS.index("zero3"))),
    )
)
_WELL_FILLED = 0.9  # of the device: nobody trains for weeks on the last tenth
_WORDS = {"full_ckpt": "recompute", "micro": "micro batch", "vpp": "virtual stages"}


def open_fields(table: RowTable, stages: Floats) -> dict[str, Bools]:
    """Rows that leave each field within their layout open. Between pipeline stages single sequences
    are handed over where nobody says more; a stack that usually recomputes everything does."""

    keeps = Distinct(table.column("stack"), stack_defaults).mask(lambda s: s.recompute != "full")
    said = Distinct(table.column("note"), NoteWords).mask(lambda words: words.recomputes)
    several = stages > 1
    return {
        "full_ckpt": blank(table, "act_ckpt") & keeps & ~said,
        "micro": blank(table, "mbs") & ~several,
        "vpp": blank(table, "vpp") & several,
    }


def blank(table: RowTable, column: str) -> Bools:
    return np.array([cell == "" for cell in table.column(column)], dtype=bool)


def open_layouts(table: RowTable) -> Bools:
    """Rows that say nothing of their layout. One stated word is enough: a table of FSDP runs may
    leave out the axes that it does not use."""
    return np.logical_and.reduce([blank(table, column) for column in _LAYOUT])


def fill_layouts(draft: Draft, is_open: Bools) -> None:
    """Puts the fastest layout that fits a typical engine into the facts, with recompute where that
    is open too; the fields within a layout come after it."""
    facts = draft.facts
    rows = np.flatnonzero(is_open)
    if not len(rows):
        return
    here = {fact: values[rows] for fact, values in facts.items()}
    free = blank(draft.table, "act_ckpt")[rows]
    usual = defaults()
    best: dict[str, Floats] = {}
    least = np.full(len(rows), np.inf)
    for (tp, pp, zero), recompute in product(_TRIED_LAYOUTS, _TRIED["full_ckpt"]):
        dp = np.maximum(1.0, np.floor(here["gpus"] / (tp * pp * here["cp"])))
        trial: dict[str, Floats | float] = {
            "tp": tp,
            "pp": pp,
            "dp": dp,
            "shard": dp * here["cp"],
            "zero": zero,
        }
        full = np.where(free, recompute, here["full_ckpt"])
        c = columns(len(rows), **{**here, **trial, "full_ckpt": full})
        room = memory(c, usual).worst_bytes / limit_bytes(c, usual)
        seconds = estimate(c, usual).step_s
        cost = np.where(room < _WELL_FILLED, seconds, 1e12 * (1.0 + room))
        cost = np.where(_is_layout(c), cost, np.inf)
        better = cost < least
        best = {name: np.where(better, value, best.get(name, 1.0)) for name, value in trial.items()}
        least = np.minimum(cost, least)
    for name, values in best.items():
        facts[name][rows] = np.where(np.isfinite(least), values, facts[name][rows])
    for i in rows:
        axes = " ".join(f"{axis}{facts[axis][i]:.0f}" for axis in AXES)
        taken = f"{axes} {SHARDINGS[int(facts['zero'][i])]}"
        draft.assumed.setdefault(int(i), []).append(
            f"layout not stated: {taken}, the fastest that fits"
        )


def _is_layout(c: Columns) -> Bools:
    """Ranks, heads, layers and sequences divide, and tp stays in a node."""
    whole = (c.tp * c.pp * c.cp * c.dp == c.gpus) & (np.mod(c.batch, c.dp) == 0)
    return whole & (np.mod(c.heads, c.tp) == 0) & (c.pp <= c.layers) & (c.tp <= c.node)


def fill_open(
    facts: dict[str, Floats], assume: Callable[[Bools, str], None], is_open: dict[str, Bools]
) -> None:
    """Puts the best values into `facts`: field by field, the cheapest in memory first."""
    for name, open_here in is_open.items():
        rows = np.flatnonzero(open_here)
        if len(rows):
            facts[name][rows] = best = _best(facts, name, rows)
            told = open_here.copy()
            told[rows] = (best != _TRIED[name][0]) | (name != "full_ckpt")
            assume(told, f"{_WORDS[name]} not stated: the best that fits")
    looped = facts["vpp"] > 1
    facts["schedule"] = np.where(looped, float(SCHEDULES.index("interleaved")), facts["schedule"])


def _best(facts: dict[str, Floats], name: str, rows: NDArray[np.intp]) -> Floats:
    """Of each row the fastest value among those that fit a lean engine. Where none does, the
    leanest; of virtual stages, which cost little memory, the fastest: the run did run."""
    here = {fact: values[rows] for fact, values in facts.items()}
    usual = defaults()
    # Who recomputes, does so because even a lean engine did not fit; a micro batch leaves room.
    lean = usual | ({"gathered": LEAN["gathered"]} if name == "micro" else LEAN)
    best, least = np.full(len(rows), _TRIED[name][0]), np.full(len(rows), np.inf)
    for value in _TRIED[name]:
        c = columns(len(rows), **{**here, name: value})
        room = memory(c, lean).worst_bytes / limit_bytes(c, lean)
        seconds = estimate(c, defaults()).step_s
        # Everything that fits comes before everything that does not.
        over = seconds if name == "vpp" else room
        cost = np.where(room < 1.0, seconds, 1e12 + over)
        cost = np.where(_possible(c), cost, np.inf)
        best = np.where(cost < least, value, best)
        least = np.minimum(cost, least)
    return best


def _possible(c: Columns) -> Bools:
    """Chunks of equal layers (two fewer at the ends count as equal), whole rounds of micro
    batches, and no micro batch larger than its rank's share."""
    chunks = c.pp * c.vpp
    even = (np.mod(c.layers, chunks) == 0) | (np.mod(c.layers + 2.0, chunks) == 0)
    rounds = np.mod(c.micros, c.pp) == 0
    return (c.micro <= c.share) & ((c.vpp == 1) | (even & rounds & (c.pp > 1)))
