"""The ranks of a stage once more, as experts divide them: who holds other experts or other slices
of the same (`dispatch`), who holds the same (`copies`, of one replica; `all_copies`, of all)."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from fourfold.engine.parallel.groups import Group, World, make_group


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroups:
    """`sequence`: ranks that hold parts of the same sequences; `stage`: all that hold these layers.
    `place` is (edp, ep, etp)."""

    place: tuple[int, int, int]
    dispatch: Group
    copies: Group
    all_copies: Group
    sequence: Group
    stage: Group


_made: weakref.WeakKeyDictionary[World, ExpertGroups] = weakref.WeakKeyDictionary()


def expert_groups(world: World) -> ExpertGroups:
    """Made at the first call, which all ranks make together; only models with experts need them."""
    if world not in _made:
        _made[world] = _create(world)
    return _made[world]


def _create(world: World) -> ExpertGroups:
    layout, rank = world.layout, world.rank
    place = layout.expert_place(rank)

    def group(name: str, stays: tuple[str, ...]) -> Group:
        """Ranks that agree with this one in the named facts."""
        facts = _facts(world, rank)
        members = [
            other
            for other in range(layout.world)
            if all(_facts(world, other)[fact] == facts[fact] for fact in stays)
        ]
        return make_group(name, torch.tensor(members), world.this_rank.handle)

    return ExpertGroups(
        place=place,
        dispatch=group("ep", ("pp", "replica", "edp")),
        copies=group("edp", ("pp", "replica", "ep", "etp")),
        all_copies=group("all_edp", ("pp", "ep", "etp")),
        sequence=group("sequence", ("pp", "dp")),
        stage=group("stage", ("pp",)),
    )


def _facts(world: World, rank: int) -> dict[str, int]:
    layout = world.layout
    edp, ep, etp = layout.expert_place(rank)
    place = layout.coordinates(rank)
    return {**place, "replica": place["dp"] // layout.shard, "edp": edp, "ep": ep, "etp": etp}
