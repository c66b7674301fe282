"""Process groups of a trace: which axis of a layout each one is."""

from __future__ import annotations

import re
from typing import Any

from fourfold.traces.events import Trace

# Words in a group's description (torch's meshes, Megatron, DeepSpeed, our engine) -> the axis. The
# first that is found counts: an expert's group may name data or tensor parallelism, too.
_WORDS = (
    ("ep", r"expert_model|\bep\b|mesh_ep|expert_parallel|moe_a2a"),
    ("edp", r"efsdp|expert_data|\bedp\b|dp_shard_mod_ep"),
    ("etp", r"etp|expert_tensor"),
    ("tp", r"tensor_model|\btp\b|mesh_tp|tensor|\bmp\b|model_parallel_group(?!.*data)"),
    ("cp", r"context|\bcp\b(?!.*dp)|mesh_cp|ulysses|sequence_parallel"),
    ("pp", r"pipeline|\bpp\b|mesh_pp|embedding"),
    ("dp", r"data|\bdp|fsdp|shard|replicate|dp_cp|ddp|zero|mesh_batch"),
    ("world", r"default|world|all_ranks|this_rank"),
)  # fmt: skip


def axis_word(description: str) -> str:
    text = description.lower().replace("_pg", "")
    for axis, pattern in _WORDS:
        if re.search(pattern, text.replace("mesh_", "") + " " + text):
            return axis
    return "unknown"


def axis_of(trace: Trace, detail: dict[str, Any]) -> str:
    """Of a collective, by the description of its group in its own words or in the trace's list."""
    told = str(detail.get("Process Group Description", ""))
    if told in ("", "undefined"):
        told = descriptions(trace).get(str(detail.get("Process Group Name", "")), "")
    return axis_word(told) if told else "unknown"


def descriptions(trace: Trace) -> dict[str, str]:
    return {str(one.get("pg_name")): str(one.get("pg_desc", "")) for one in _groups(trace)}


def axis_sizes(trace: Trace) -> dict[str, int]:
    """The largest group of each axis."""
    sizes: dict[str, int] = {}
    for one in _groups(trace):
        axis, size = axis_word(str(one.get("pg_desc", ""))), one.get("pg_size", 1)
        if isinstance(size, int):
            sizes[axis] = max(size, sizes.get(axis, 1))
    return sizes


def world_size(trace: Trace) -> int:
    told = trace.meta.get("distributedInfo")
    size = told.get("world_size") if isinstance(told, dict) else None
    return size if isinstance(size, int) and size > 0 else 1


def _groups(trace: Trace) -> list[dict[str, Any]]:
    told = trace.meta.get("distributedInfo")
    groups = told.get("pg_config") if isinstance(told, dict) else None
    return [one for one in groups if isinstance(one, dict)] if isinstance(groups, list) else []
