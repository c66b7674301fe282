"""Process groups of a world, each made once."""

from __future__ import annotations

import weakref

import torch.distributed as dist

_made: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]
] = weakref.WeakKeyDictionary()


def handle_of(axis: str, members: tuple[int, ...], cut: tuple[int, ...]) -> dist.ProcessGroup:
    """One for all layouts that follow each other in a world: threads of gloo's groups wake up a
    hundred times a second, used or not. `cut` is this rank's part of a division of all ranks into
    equal ones: such a part tells the others, so all ranks find theirs or none does. (torch names a
    group by how many its process has; ranks that had made fewer would wait for ever.)"""
    assert dist.group.WORLD is not None
    made = _made.setdefault(dist.group.WORLD, {})
    if (axis, cut) not in made:
        # The description tells who watches that stages send and receive: no equal counts there.
        handle = dist.new_group(list(members), use_local_synchronization=True, group_desc=axis)
        assert isinstance(handle, dist.ProcessGroup)
        made[axis, cut] = handle
    return made[axis, cut]


def cpu_group() -> dist.ProcessGroup:
    """All ranks, over gloo whatever the training uses; waiting on it uses neither GPU nor core.
    Collective."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group
