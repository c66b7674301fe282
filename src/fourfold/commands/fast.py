"""What is fast on this machine, where a run does not say? Decided before the run has a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fourfold.launch.devices import gpu_count
from fourfold.spec.run import RunSpec


def with_fast_defaults(spec: RunSpec, table: Mapping[str, Any], *, ranks: int) -> RunSpec:
    """The run, compiled if it computes on GPUs and its table does not say whether to.

    A split backward pass (zero-bubble) can't be compiled. A run on CPU cores is too short for it.
    """
    policy = table.get("policy")
    says = isinstance(policy, Mapping) and "compile" in policy
    if says or spec.device == "cpu" or spec.policy.schedule == "zero-bubble":
        return spec
    # Each rank needs a GPU of its own; with too few of them `auto` computes on cores.
    if gpu_count() < ranks:
        return spec
    return replace(spec, policy=replace(spec.policy, compile=True))
