"""A sweep of what the planner would choose: its best K layouts of a question, as runs.

The question is asked in the words of 'plan'. What was predicted is kept with each run, so that
'report' can tell how good the planner was.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from fourfold.commands import flags
from fourfold.commands.foresight import Foresight
from fourfold.errors import UserError
from fourfold.spec import AXES, codec
from fourfold.spec.cluster import Cluster
from fourfold.spec.run import RunSpec
from fourfold.spec.sweep import Combination, Expansion
from fourfold.verbs.plan import resolved
from fourfold.verbs.requests import PlanRequest, decided

# Both kinds of sweep have these, with lists in the habit of the MPT scripts.
_OWN_WAY = ("--gpus", "--micro-batch")
# Fields of a run that the plan decides, or that are read from flags of their own.
_PLANNED = ("model", "gpus", "layout", "batch", "policy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the planner's choices (flags as in 'plan'; runs at once)")
    group.add_argument("--from-plan", type=int, metavar="K", help="measure the planner's top K")
    group.add_argument("--model", metavar="NAME", help="a preset, or the path of a config.json")
    group.add_argument("--spec", metavar="FILE.toml", help="a whole run; flags override its fields")
    group.add_argument("--gpu", metavar="ID", help="plan for GPUs of this kind on usual hosts")
    group.add_argument("--max-nodes", type=int, metavar="N", help="at most N hosts")
    group.add_argument("--explore", action="store_true", help="also what no measured row backs")
    group.add_argument("--calibration", metavar="FILE", help="made by 'fit' or 'calibrate'")
    flags.add_layout(parser, without=_OWN_WAY)


def given(args: argparse.Namespace) -> bool:
    return args.from_plan is not None


def refuse_flags(args: argparse.Namespace) -> None:
    """Flags that would silently do nothing in the other kinds of sweep."""
    mine = (
        "model", "spec", "gpu", "max_nodes", *AXES, "global_batch", "seq_len",
        "sharding", "recompute", "cp_kind", "schedule", "virtual_stages", "precision",
    )  # fmt: skip
    used = [name for name in mine if getattr(args, name) is not None]
    used += ["explore"] if args.explore else []
    if used:
        raise UserError(
            "goes with --from-plan", field=f"--{used[0].replace('_', '-')}",
            hint=f"here: a FILE's axis, or --set ({used[0]} as an axis of [sweep])",
        )  # fmt: skip


def chosen(args: argparse.Namespace, foresight: Foresight) -> Expansion:
    """The planner's best, best first; their predictions are told to `foresight`."""
    from fourfold.search.gpu_counts import best_of

    if args.from_plan < 1:
        raise UserError("must be 1 or more", field="--from-plan", value=args.from_plan)
    asked = _as_plan(args)
    table = flags.run_table(asked)
    given = decided(table) | {"ramp": None}
    asked = _somewhere(asked, table, foresight)
    request = PlanRequest(
        **given,
        cluster=asked.cluster,
        gpu=asked.gpu,
        profile=asked.profile,
        calibration=asked.calibration,
        max_nodes=asked.max_nodes,
        stack="fourfold",
        where=tuple(asked.where),
        explore=asked.explore,
    )
    ask, counts = resolved(request)
    ask = dataclasses.replace(ask, cluster=_limited(ask.cluster, table))
    ranking, _ = best_of(ask, counts, least=args.from_plan)
    if not len(ranking):
        raise UserError(
            "finds no layout that is legal and fits", field="--from-plan", value=args.from_plan,
            hint="'fourfold plan' with the same flags says why",
        )  # fmt: skip
    found = []
    for i in range(min(args.from_plan, len(ranking))):
        spec = _spec(table, ranking, i)
        found.append(Combination(_told(i, spec), spec))
        foresight.told[spec.run_id] = dataclasses.replace(
            ranking.predicted.one(i),
            limit_bytes=foresight.limit_bytes(spec),
            basis=f"plan on {ask.cluster.name}, calibration {ask.calibration}",
        )
    return Expansion(tuple(found), 0, 0)


def _told(i: int, spec: RunSpec) -> tuple[tuple[str, Any], ...]:
    """What sets one choice of the planner apart from the others."""
    policy, layout = spec.policy, spec.layout
    said: dict[str, Any] = {"plan": i + 1, "layout": str(layout)}
    said |= {"micro_batch": spec.batch.micro_batch, "sharding": policy.sharding}
    said |= {"cp_kind": policy.cp_kind} if layout.cp > 1 else {}
    said |= {"schedule": policy.schedule} if layout.pp > 1 else {}
    said |= {"recompute": policy.recompute} if policy.recompute != "none" else {}
    return tuple(said.items())


def _as_plan(args: argparse.Namespace) -> argparse.Namespace:
    """The sweep's flags as 'plan' has them: one number of ranks, one micro batch or none."""
    words: dict[str, Any] = dict(vars(args))
    for name in ("gpus", "micro_batch"):
        values = words[name] or []
        if len(values) > 1:
            raise UserError(
                "takes one value with --from-plan", field=f"--{name.replace('_', '-')}",
                value=" ".join(map(str, values)),
            )  # fmt: skip
        words[name] = _whole(name, values[0]) if values and values[0] != "auto" else None
    # Runs are our own engine's, so the plan is too.
    fixed = {"stack": "fourfold", "ramp": None, "tokens": None, "convention": args.convention}
    return argparse.Namespace(**words | fixed | {"export": None, "safe": False})


def _whole(name: str, value: Any) -> int:
    if isinstance(value, str) and not value.isdecimal():
        raise UserError("must be a whole number", field=name, value=value)
    return int(value)


def _somewhere(
    asked: argparse.Namespace, table: dict[str, Any], foresight: Foresight
) -> argparse.Namespace:
    """Without a cluster, a GPU or a profile: the GPUs of this host, where the catalogue knows."""
    if asked.cluster or asked.gpu or asked.profile:
        return asked
    probe = codec.load(RunSpec, {**table, "layout": {}})
    here = foresight.cluster(probe)
    if here is None:
        raise UserError(
            "nothing says what this machine can do", field="--from-plan", value=asked.from_plan,
            hint="'fourfold calibrate --quick --out profile.json', then --profile profile.json",
        )  # fmt: skip
    return argparse.Namespace(**vars(asked) | {"gpu": here.device.id})


def _limited(cluster: Cluster, table: dict[str, Any]) -> Cluster:
    """A run's own memory_limit binds the plan too."""
    from fourfold.cost.memory.peak import USABLE

    if table.get("memory_limit") is None:
        return cluster
    limit = codec.load(RunSpec, {**table, "layout": {}, "gpus": 1}).memory_limit or 0
    size = min(cluster.device.memory_bytes, round(limit / USABLE))
    return dataclasses.replace(
        cluster, device=dataclasses.replace(cluster.device, memory_bytes=size)
    )


def _spec(table: dict[str, Any], ranking: Any, i: int) -> RunSpec:
    ask = ranking.query
    plain = {name: value for name, value in table.items() if name not in _PLANNED}
    return codec.load(
        RunSpec,
        {
            **plain,
            "model": codec.encode(ask.model),
            "gpus": ask.gpus,
            "layout": ranking.layout(i).to_plain(),
            "batch": {
                "seq_len": ask.batch.seq_len,
                "micro_batch": int(ranking.points["micro_batch"][i]),
                "global_batch": ask.batch.global_batch,
            },
            "policy": codec.encode(ranking.policy(i)),
        },
    )
