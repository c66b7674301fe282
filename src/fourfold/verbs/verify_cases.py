"""Layouts that `verify` tries: every way to divide N ranks, with every choice that changes
something in it (no schedule without stages, no sharding over one rank)."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, get_args

from fourfold.search.legal import Refusal, Target, why_not
from fourfold.spec import Batch, ModelShape, Policy, RunSpec, check
from fourfold.spec.layout import AXES, EXPERT_AXES, Layout
from fourfold.spec.words import CP_KINDS, SCHEDULES, SHARDINGS, ExpertFault, MuonFault
from fourfold.verbs.run_requests import VerifyRequest

_USUAL, _ROUTED = ("mpt", "gpt", "llama"), ("mixtral", "deepseek")
# Copies of experts, which a fault may count twice, are whole in zero0 alone.
FAULT_NEEDS: dict[str, dict[str, Any]] = {
    "expert-norm-twice": {"sharding": "zero0"},
    # Tensor ranks' blocks have no shards where nothing else cuts them.
    **{
        fault: {"optimizer": "muon", "muon": {"placement": "owner"}}
        for fault in get_args(MuonFault)
    },
}
SEQ_LEN = 32
_GLOBAL_BATCH = 8
# Schedules of a pipeline and their virtual stages.
_SCHEDULES = {name: 2 if name == "interleaved" else 1 for name in SCHEDULES}
# Of a sample: shares of layouts with one, two, and three or more axes above 1.
_SHARES = {1: 0.2, 2: 0.4, 3: 0.4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A request with its names resolved; `fixed`: policy fields that all runs have; `placed`: and
    where Muon's iterations are."""

    request: VerifyRequest
    world: int
    models: tuple[ModelShape, ...]
    layout: Layout | None
    fixed: dict[str, Any]
    placed: bool = False


def families(request: VerifyRequest, layout: Layout | None) -> tuple[str, ...]:
    """Those asked for; of an axis, a layout or a fault of experts the families that have some."""
    routed = request.axis in EXPERT_AXES or request.fault in get_args(ExpertFault)
    divided = layout is not None and layout.ep * layout.etp > 1
    return request.family or (_ROUTED if routed or divided else _USUAL)


def layouts(world: int) -> Iterator[Layout]:
    """Every way to write `world` as pp x replicate x shard x cp x tp."""
    for sizes in _factors(world, 5):
        pp, replicate, shard, cp, tp = sizes
        if replicate > 1 and shard * cp == 1:
            continue  # copies of one shard: that is dp with nothing sharded, zero0
        yield Layout(pp=pp, replicate=replicate, shard=shard, cp=cp, tp=tp)


def expert_layouts(layout: Layout, shape: ModelShape) -> Iterator[Layout]:
    """Every way to divide the ranks of a stage again, for experts."""
    yield layout
    ranks = layout.shard * layout.cp * layout.tp
    for ep, etp in product(range(1, ranks + 1), (1, 2)) if shape.moe else ():
        if ep * etp > 1 and ranks % (ep * etp) == 0 and shape.experts % ep == 0:
            yield replace(layout, ep=ep, etp=etp)


def _factors(number: int, slots: int) -> Iterator[tuple[int, ...]]:
    if slots == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factors(number // first, slots - 1):
                yield (first, *rest)


def policies(layout: Layout, base: Policy, *, has_experts: bool = False) -> Iterator[Policy]:
    """Every choice that a layout has: sharding, kind of context parallelism, schedule, sequence."""
    zeros = SHARDINGS if layout.dp * layout.cp > 1 else ("zero1",)
    if layout.replicate > 1:
        zeros = zeros[1:]
    kinds = CP_KINDS if layout.cp > 1 else ("ring",)
    schedules = _SCHEDULES if layout.pp > 1 else {"1f1b": 1}
    sequence = (True, False) if layout.tp > 1 else (False,)
    if has_experts and layout.tp > 1:
        sequence = (True,)
    for zero, kind, schedule, cut in product(zeros, kinds, schedules, sequence):
        chosen: dict[str, Any] = {"sharding": zero, "cp_kind": kind, "schedule": schedule}
        chosen["virtual_stages"] = schedules[schedule]
        yield replace(base, **chosen, sequence_parallel=cut)


def cases(wish: Wish) -> tuple[list[RunSpec], list[Refusal]]:
    """(runs to make, why each other was refused)."""
    base = replace(Policy(precision="fp32"), **wish.fixed)
    runs: list[RunSpec] = []
    refused: list[Refusal] = []
    for shape in wish.models:
        for layout in _layouts(shape, wish):
            if wish.request.axis and getattr(layout, wish.request.axis) == 1:
                continue
            ways = policies(layout, base, has_experts=shape.moe is not None)
            for policy in _wished(ways, wish):
                policy = _varied(policy, layout, shape, wish)
                batch = _batch(layout, wish)
                target = Target(gpus=wish.world)
                model = _capped(shape, layout, policy, wish)
                refusals = why_not(model, layout, batch, policy, target)
                if refusals:
                    refused.append(refusals[0])
                    continue
                run = RunSpec(
                    model=model,
                    gpus=wish.world,
                    layout=layout,
                    batch=batch,
                    policy=policy,
                    device=wish.request.device,
                    seed=wish.request.seed,
                    steps=3,
                    warmup=0,
                )
                runs.append(run)
    return runs, refused


def _layouts(shape: ModelShape, wish: Wish) -> Iterator[Layout]:
    if wish.layout is not None:
        yield wish.layout
        return
    for layout in layouts(wish.world):
        yield from expert_layouts(layout, shape)


def _wished(found: Iterator[Policy], wish: Wish) -> Iterator[Policy]:
    """Those that agree with what the user fixed; a choice the layout lacks stays as fixed."""
    fixed = wish.fixed
    seen = set()
    for policy in found:
        chosen = replace(policy, **fixed)
        virtual = fixed.get("virtual_stages", _SCHEDULES[chosen.schedule])
        chosen = replace(chosen, virtual_stages=virtual)
        if chosen not in seen:
            seen.add(chosen)
            yield chosen


def _varied(policy: Policy, layout: Layout, shape: ModelShape, wish: Wish) -> Policy:
    """Choices that compose with all axes alike vary from layout to layout: a product with them
    would only be longer."""
    fixed = wish.fixed
    number = zlib.crc32(f"{layout} {policy}".encode())
    choices: dict[str, Any] = {
        "recompute": ("none", "full", "every-2", "selective")[number % 4],
        "fused_projections": number // 4 % 3 != 0,
        "loss_chunks": 1 + number // 12 % 2,
        "offload": "none" if number // 48 % 3 else "activations",
        "loss": "lean" if number // 144 % 2 else "torch",
    }
    if shape.moe is not None:
        kinds = ("none", "full", "every-2", "selective", "moe", "moe-act")
        choices["recompute"] = kinds[number % 6]
    if layout.ep * layout.etp > 1:
        choices["dispatcher"] = ("alltoall", "allgather")[number // 7 % 2]
    if policy.schedule == "zero-bubble" and 2 * layout.pp <= shape.layers:
        choices["virtual_stages"] = 1 + number // 24 % 2
    if policy.optimizer == "muon" and not wish.placed:
        placement = ("owner", "blocks")[number // 9 % 2]
        policy = replace(policy, muon=replace(policy.muon, placement=placement))
    return replace(policy, **{k: v for k, v in choices.items() if k not in fixed})


def _capped(shape: ModelShape, layout: Layout, policy: Policy, wish: Wish) -> ModelShape:
    """Of our own models with experts every third drops tokens."""
    number = zlib.crc32(f"{layout} {policy}".encode())
    if shape.moe is None or wish.request.models or number // 288 % 3:
        return shape
    return replace(shape, moe=replace(shape.moe, capacity=1.0))


def _batch(layout: Layout, wish: Wish) -> Batch:
    """At least two micro batches where the share of a rank allows; four for a pipeline."""
    global_batch = wish.request.global_batch or max(_GLOBAL_BATCH, layout.dp)
    share = -(-global_batch // layout.dp)
    micro = wish.request.micro_batch or max(1, share // (4 if layout.pp > 1 else 2))
    return Batch(seq_len=SEQ_LEN, micro_batch=micro, global_batch=global_batch)


def sample(found: Sequence[RunSpec], count: int, seed: int) -> list[RunSpec]:
    """`count` runs, stratified: by number of axes above 1, then evenly by axes and family."""
    check.that(count >= 1, "sample", count, "must be at least 1")
    strata: dict[int, list[RunSpec]] = {1: [], 2: [], 3: []}
    for run in found:
        above_one = sum(run.layout.size(axis) > 1 for axis in AXES)
        strata[min(3, max(1, above_one))].append(run)
    # The rarest first, so that what it cannot fill goes to the others.
    picked: list[RunSpec] = []
    left = min(count, len(found))
    weight = {level: _SHARES[level] for level in strata if strata[level]}
    for level in sorted(weight, key=lambda level: len(strata[level])):
        share = weight[level] / sum(w for other, w in weight.items() if other >= 0)
        take = min(len(strata[level]), max(1, round(left * share)), left)
        picked += _spread(strata[level], take, random.Random(f"{seed} {level}"))
        left -= take
        weight = {other: w for other, w in weight.items() if other != level}
    return picked


def _spread(runs: Sequence[RunSpec], count: int, chance: random.Random) -> list[RunSpec]:
    """Round robin over (axes above 1, family), each in random order."""
    groups: dict[tuple[object, ...], list[RunSpec]] = {}
    for run in runs:
        axes = tuple(axis for axis in AXES if run.layout.size(axis) > 1)
        groups.setdefault((axes, run.model.family), []).append(run)
    order = list(groups.values())
    chance.shuffle(order)
    for group in order:
        chance.shuffle(group)
    picked: list[RunSpec] = []
    while len(picked) < count:
        for group in order:
            if group and len(picked) < count:
                picked.append(group.pop())
    return picked


def describe(run: RunSpec) -> str:
    layout, policy = run.layout, run.policy
    words = [policy.sharding] if layout.dp * layout.cp > 1 else []
    words += [policy.cp_kind] if layout.cp > 1 else []
    words += [policy.schedule] if layout.pp > 1 else []
    words += [f"virtual-{policy.virtual_stages}"] if policy.virtual_stages > 1 else []
    words += ["sp" if policy.sequence_parallel else "no-sp"] if layout.tp > 1 else []
    words += [f"recompute-{policy.recompute}"] if policy.recompute != "none" else []
    words += ["offload"] if policy.offload != "none" else []
    words += [] if policy.fused_projections else ["unfused"]
    words += [f"chunks-{policy.loss_chunks}"] if policy.loss_chunks > 1 else []
    words += [policy.dispatcher] if layout.ep * layout.etp > 1 else []
    words += [f"muon-{policy.muon.placement}"] if policy.optimizer == "muon" else []
    words += ["drops"] if run.model.moe and run.model.moe.capacity else []
    return " ".join(words)
