"""Which facts hide in the note of a measured row? Only the words the tables' README explains.

Kernel, network state, pure or default reductions, fp8/fp4 recipe, shard group; nothing else in a
note, and no other label, ever reaches a prediction.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_GROUP = re.compile(r"zero[123] over (\d+) ranks|\bfsdp ?(\d+)\b")
_RECIPE = re.compile(r"recipe ([a-z0-9-]+)")


@dataclass(frozen=True, slots=True)
class NoteWords:
    """`shard_group` 0 means not stated; `shards_in_node`: ZeRO within a node, replicas across."""

    flash1: bool
    plain_norm: bool
    slow_network: bool
    pure: bool
    block_scale: bool
    shard_group: int
    shards_in_node: bool


def note_words(note: str) -> NoteWords:
    """The facts of one note."""
    group = _GROUP.search(note)
    recipe = _RECIPE.search(note)
    name = recipe[1] if recipe else ""
    return NoteWords(
        flash1="flash_attentionv1" in note,
        plain_norm="kernel:" in note and "RMS kernel" not in note,
        slow_network=re.search(r"\bnetwork slow\b", note) is not None,
        pure=re.search(r"\bpure\b", note) is not None,
        block_scale=name.startswith(("mxfp", "nvfp")) or name.endswith("-mx"),
        shard_group=int(group[1] or group[2]) if group else 0,
        shards_in_node=re.search(r"\bhsdp\b", note) is not None,
    )
