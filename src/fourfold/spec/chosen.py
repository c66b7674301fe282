"""Which fields of a run does a search choose, and as which whole numbers?

The same names and numbers for the rules of what may run, for the grid of a search and for the cost
model: names as RunSpec's parts have them, words as places in their tuple (spec/words.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fourfold.spec.batch import Batch
from fourfold.spec.layout import SIZES, Layout
from fourfold.spec.policy import Policy
from fourfold.spec.words import CP_KINDS, RECOMPUTE_KINDS, SCHEDULES, SHARDINGS, Schedule

CHOSEN = (*SIZES, "cp_kind", "virtual_stages", "schedule", "zero", "recompute",
          "micro_batch")  # fmt: skip


def chosen(layout: Layout, batch: Batch, policy: Policy) -> dict[str, int]:
    """The fields of CHOSEN as whole numbers; a micro batch of 0 ('auto') is taken as 1."""
    kind = "every" if policy.recompute.startswith("every-") else policy.recompute
    return {name: getattr(layout, name) for name in SIZES} | {
        "cp_kind": CP_KINDS.index(policy.cp_kind),
        "virtual_stages": policy.virtual_stages,
        "schedule": SCHEDULES.index(policy.schedule),
        "zero": policy.zero,
        "recompute": RECOMPUTE_KINDS.index(kind),
        "micro_batch": max(1, batch.micro_batch),
    }


def chosen_layout(points: Mapping[str, Any], i: int) -> Layout:
    """The layout of one of many points."""
    pp, replicate, shard, cp, tp = (int(points[name][i]) for name in SIZES)
    return Layout(pp=pp, replicate=replicate, shard=shard, cp=cp, tp=tp)


def chosen_policy(policy: Policy, points: Mapping[str, Any], i: int) -> Policy:
    """A policy with what one of many points says."""
    kind = RECOMPUTE_KINDS[int(points["recompute"][i])]
    return replace(
        policy,
        sharding=SHARDINGS[int(points["zero"][i])],
        cp_kind=CP_KINDS[int(points["cp_kind"][i])],
        schedule=SCHEDULES[int(points["schedule"][i])],
        virtual_stages=int(points["virtual_stages"][i]),
        recompute=policy.recompute if kind == "every" else kind,
    )


def running_schedule(schedule: Schedule, virtual_stages: int) -> Schedule:
    """The order that really runs: virtual stages loop, zero-bubble with them stays zero-bubble, and
    interleaving without them is 1F1B."""
    if schedule == "zero-bubble":
        return schedule
    if virtual_stages > 1:
        return "interleaved"
    return "1f1b" if schedule == "interleaved" else schedule
