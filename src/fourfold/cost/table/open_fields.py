"""Fields that a source leaves open: virtual stages, micro batch and recompute that are not stated
take the fastest values that fit, by the model's physical defaults.

Whoever published a run had tuned it, so that its best is a better guess than 1 or none.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats, columns
from fourfold.cost.fit.coefficients import LEAN, defaults
from fourfold.cost.memory.peak import limit_bytes, memory
from fourfold.cost.stacks import stack_defaults
from fourfold.cost.step.estimate import estimate
from fourfold.cost.table.reference import Distinct, RowTable
from fourfold.spec.words import SCHEDULES

Bools = NDArray[np.bool_]
_TRIED: dict[str, tuple[float, ...]] = {
    "full_ckpt": (0.0, 1.0),
    "micro": (1.0, 2.0, 4.0, 8.0),
    "vpp": tuple(float(v) for v in range(1, 13)),
}
_WORDS = {"full_ckpt": "recompute", "micro": "micro batch", "vpp": "virtual stages"}


def open_fields(table: RowTable) -> dict[str, Bools]:
    """Rows that leave each field open. Between pipeline stages single sequences are handed over
    where nobody says more; a stack that usually recomputes everything does."""

    def blank(column: str) -> Bools:
        return np.array([cell == "" for cell in table.column(column)], dtype=bool)

    keeps = Distinct(table.column("stack"), stack_defaults).mask(lambda s: s.recompute != "full")
    several = np.array([cell not in ("", "1") for cell in table.column("pp")], dtype=bool)
    return {
        "full_ckpt": blank("act_ckpt") & keeps,
        "micro": blank("mbs") & ~several,
        "vpp": blank("vpp") & several,
    }


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
