"""Are fewer GPUs faster? A number of hosts with an awkward factor may lose to a smaller one."""

from __future__ import annotations

from dataclasses import replace

from fourfold.events import Event
from fourfold.search.query import PlanQuery
from fourfold.search.ranking import Ranking, rank_layouts

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
            query.on_event(Event(f"{gpus} GPUs ({place + 1} of {len(counts)})", "progress"))
        found = rank_layouts(replace(query, gpus=gpus), least=least)
        if len(found):
            tried[gpus] = float(found.step_s[0])
        if best is None or (len(found) and (not len(best) or found.step_s[0] < best.step_s[0])):
            best = found
    assert best is not None, "there is at least one number of GPUs"
    return best, tried
