"""Fields that a source leaves open: layout, virtual stages, micro batch and recompute that are not
stated take the fastest values that fit, by the model's physical defaults.

Whoever published a run had tuned it, so that its best is a better guess than 1 or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import product

import numpy as np

from fourfold.cost.columns import Coefficients, Columns, Sequences, columns
from fourfold.cost.fit.coefficients import LEAN, defaults
from fourfold.cost.memory.peak import limit_bytes, memory
from fourfold.cost.step.estimate import estimate
from fourfold.cost.table.cells import Bools, Draft, Floats, blank, each
from fourfold.cost.table.reference import RowTable, note_words
from fourfold.spec.engine import engine_of
from fourfold.spec.layout import AXES
from fourfold.spec.words import SCHEDULES, SHARDINGS

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

    recomputes = each(
        table.column("stack"), lambda name: engine_of(name).habits.recompute == "full"
    )
    said = each(table.column("note"), lambda note: note_words(note).recomputes)
    several = stages > 1
    return {
        "full_ckpt": blank(table, "act_ckpt") & ~np.logical_or(recomputes, said),
        "micro": blank(table, "mbs") & ~several,
        "vpp": blank(table, "vpp") & several,
    }


def open_layouts(table: RowTable) -> Bools:
    """Rows that say nothing of their layout. One stated word is enough: a table of FSDP runs may
    leave out the axes that it does not use."""
    return np.logical_and.reduce([blank(table, column) for column in _LAYOUT])


def fill_layouts(
    draft: Draft, facts: dict[str, Floats], sequences: Sequences, is_open: Bools
) -> None:
    """Puts the fastest layout that fits a typical engine into the facts, with recompute where that
    is open too; the fields within a layout come after it."""
    rows = np.flatnonzero(is_open)
    if not len(rows):
        return
    here = {fact: values[rows] for fact, values in facts.items()}
    free = blank(draft.table, "act_ckpt")[rows]
    trials = []
    for (tp, pp, zero), recompute in product(_TRIED_LAYOUTS, _TRIED["full_ckpt"]):
        dp = np.maximum(1.0, np.floor(here["gpus"] / (tp * pp * here["cp"])))
        axes = {"tp": tp, "pp": pp, "dp": dp, "shard": dp * here["cp"], "zero": zero}
        trials.append(axes | {"full_ckpt": np.where(free, recompute, here["full_ckpt"])})
    cost = partial(_cost, coefficients=defaults(), filled=_WELL_FILLED)
    best = _fastest(here, sequences, trials, _is_layout, cost)
    for name in axes:
        facts[name][rows] = best[name]
    for i in rows:
        axes = " ".join(f"{axis}{facts[axis][i]:.0f}" for axis in AXES)
        taken = f"{axes} {SHARDINGS[int(facts['zero'][i])]}"
        draft.assume([int(i)], [f"layout not stated: {taken}, the fastest that fits"])


def _is_layout(c: Columns) -> Bools:
    """Ranks, heads, layers and sequences divide, and tp stays in a node."""
    whole = (c.tp * c.pp * c.cp * c.dp == c.gpus) & (np.mod(c.batch, c.dp) == 0)
    return whole & (np.mod(c.heads, c.tp) == 0) & (c.pp <= c.layers) & (c.tp <= c.node)


def fill_open(
    draft: Draft, facts: dict[str, Floats], sequences: Sequences, is_open: dict[str, Bools]
) -> None:
    """Puts the best values into `facts`: field by field, the cheapest in memory first."""
    for name, open_here in is_open.items():
        rows = np.flatnonzero(open_here)
        if len(rows):
            here = {fact: values[rows] for fact, values in facts.items()}
            trials = [{name: value} for value in _TRIED[name]]
            # Who recomputes, does so because even a lean engine did not fit; a micro batch leaves
            # room; virtual stages cost little memory, and the run did run.
            lean = defaults() | ({"gathered": LEAN["gathered"]} if name == "micro" else LEAN)
            cost = partial(_cost, coefficients=lean, by_time=name == "vpp")
            facts[name][rows] = best = _fastest(here, sequences, trials, _possible, cost)[name]
            told = rows[(best != _TRIED[name][0]) | (name != "full_ckpt")]
            draft.assume(told, [f"{_WORDS[name]} not stated: the best that fits"])
    looped = facts["vpp"] > 1
    facts["schedule"] = np.where(looped, float(SCHEDULES.index("interleaved")), facts["schedule"])


def _fastest(
    here: Mapping[str, Floats],
    sequences: Sequences,
    trials: Iterable[Mapping[str, Floats | float]],
    is_possible: Callable[[Columns], Bools],
    cost: Callable[[Columns], Floats],
) -> Mapping[str, Floats]:
    """Facts of each row with those of its cheapest trial."""
    best, least = dict(here), np.full(len(here["gpus"]), np.inf)
    for trial in trials:
        c = columns(len(least), sequences, **{**here, **trial})
        spent = np.where(is_possible(c), cost(c), np.inf)
        for name, value in trial.items():
            best[name] = np.where(spent < least, value, best[name])
        least = np.minimum(spent, least)
    return best


def _cost(
    c: Columns, coefficients: Coefficients, *, filled: float = 1.0, by_time: bool = False
) -> Floats:
    """Seconds of what fits; before whatever does not: the leanest of that, or the fastest."""
    room = memory(c, coefficients).worst_bytes / limit_bytes(c, coefficients)
    seconds = estimate(c, defaults()).step_s
    return np.where(room < filled, seconds, 1e12 * (1.0 + (seconds if by_time else room)))


def _possible(c: Columns) -> Bools:
    """Chunks of equal layers (two fewer at the ends count as equal), whole rounds of micro
    batches, and no micro batch larger than its rank's share."""
    chunks = c.pp * c.vpp
    even = (np.mod(c.layers, chunks) == 0) | (np.mod(c.layers + 2.0, chunks) == 0)
    rounds = np.mod(c.micros, c.pp) == 0
    return (c.micro <= c.share) & ((c.vpp == 1) | (even & rounds & (c.pp > 1)))
