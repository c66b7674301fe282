"""Process groups of a world, each made once."""

from __future__ import annotations

import weakref

import torch.distributed as dist

_made: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]
] = weakref.WeakKeyDictionary()


def handle_of(axis: str, members: tuple[int, ...]) -> dist.ProcessGroup:
    """One for all layouts that follow each other in a world: threads of gloo's groups wake up a
    hundred times a second, used or not. An axis cuts all ranks alike, so all of them find theirs or
    none does. The description tells who watches that stages send and receive: no equal counts."""
    assert dist.group.WORLD is not None
    made = _made.setdefault(dist.group.WORLD, {})
    if (axis, members) not in made:
        handle = dist.new_group(list(members), use_local_synchronization=True, group_desc=axis)
        assert isinstance(handle, dist.ProcessGroup)
        made[axis, members] = handle
    return made[axis, members]
