"""Which of the engines that we write settings for can run a layout."""

from __future__ import annotations

from dataclasses import replace

from fourfold.errors import UserError
from fourfold.search import export as exports
from fourfold.search.export.setup import Setup
from fourfold.search.legal import why_not_spec
from fourfold.spec.run import RunSpec

# What --export calls them, and people; an older release counts where the newer one cannot run it.
_NAMES = {"megatron": "Megatron", "torchtitan": "torchtitan", "nanotron": "nanotron"}
_OLDER = {"torchtitan": ("torchtitan-0.2", "torchtitan 0.2")}


def runs_in(spec: RunSpec, host_gpus: int) -> tuple[str, ...]:
    """Names of engines; what one engine does by habit (compiling, its own sums) asks nothing of
    another."""
    attention = "auto" if spec.policy.attention == "fused-softmax" else spec.policy.attention
    policy = replace(
        spec.policy, compile=False, async_tp=False, grad_dtype=None, reduce_dtype=None,
        attention=attention,
    )  # fmt: skip
    spec = replace(spec, policy=policy)
    found = []
    for engine, name in _NAMES.items():
        tried = ((engine, name), *([_OLDER[engine]] if engine in _OLDER else []))
        found += [words for id_, words in tried if _can_write(id_, spec, host_gpus)][:1]
    return (*found, *(["fourfold"] if not why_not_spec(spec) else []))


def _can_write(engine: str, spec: RunSpec, host_gpus: int) -> bool:
    setup = Setup(
        model=spec.model,
        layout=spec.layout,
        batch=spec.batch,
        policy=spec.policy,
        host_gpus=host_gpus,
        stack=exports.stack_of(engine),
    )
    try:
        exports.write(engine, setup)
    except UserError:
        return False
    return True
