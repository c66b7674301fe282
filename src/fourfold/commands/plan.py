"""Which layout of this model on these GPUs is fastest, does it fit, and how sure is that?

Every legal layout is checked for memory and priced; the best are listed by seconds per step, with
an interval, exposed seconds by part, ties, evidence, what would turn the order and which runs would
settle it. Layout and policy flags fix what the search leaves open otherwise.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from fourfold.commands import flags, plan_export
from fourfold.commands.foresight import read_profile
from fourfold.commands.plan_machines import machines, named_axes
from fourfold.errors import UserError
from fourfold.show.table import columns, json_text
from fourfold.spec import catalog, codec, words
from fourfold.spec.batch import Batch, Ramp
from fourfold.spec.cluster import Cluster
from fourfold.spec.layout import MODEL_AXES, Layout
from fourfold.spec.policy import Policy

EXAMPLES = """\
examples:
  fourfold plan --model gpt-3-175b --cluster jean-zay --gpus 384 --seq-len 2048 --global-batch 2048
  fourfold plan --model llama-3.1-8b --gpu h100-80gb --gpus 64 --seq-len 8192 --global-batch 512 \\
      --stack megatron --tokens 1T --price 2.5
  fourfold plan --model bloom-176b --cluster jean-zay --max-nodes 48 --seq-len 2048 \\
      --global-batch 2048 --ramp 192,16,9765625 --where "dp % 4 == 0" --top 5
  fourfold plan ... --explain "pp12 dp4 tp8" --timeline schedule.html
  fourfold plan ... --export megatron --safe --out settings && bash settings/run.sh --mock-data
"""
# Policy fields the search varies unless a flag, --set or --spec decides them.
SEARCHED = ("sharding", "cp_kind", "schedule", "virtual_stages", "recompute")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_run(parser)
    add = parser.add_argument
    add("--cluster", metavar="NAME", help="'fourfold clusters' lists them; or a TOML file")
    add("--gpu", metavar="ID", help="instead of a cluster: GPUs of this kind on usual hosts")
    add("--profile", metavar="FILE", help="instead of both: this machine, from 'calibrate --out'")
    add("--max-nodes", type=int, metavar="N", help="at most N hosts; fewer are tried too")
    add("--stack", metavar="NAME", help="whose engine the numbers are for; 'list' prints all "
        "(default: the one measured on the cluster, else any; 'fourfold' is our own)")  # fmt: skip
    add("--ramp", metavar="START,INCREMENT,SAMPLES", help="batch ramp-up, in sequences")
    add("--tokens", type=flags.count, metavar="T", help="of a training, such as 1.5T or 20e9: adds "
        "days, GPU-hours and cost")  # fmt: skip
    add("--price", type=float, metavar="X", help="of one GPU-hour, for the cost of --tokens "
        "(default: the cluster file's)")  # fmt: skip
    add(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="keep only layouts for which it holds, such as 'dp %% 4 == 0 and mem_gib < 70'",
    )
    add("--explore", action="store_true", help="also rank what no measured row backs")
    add("--explain", metavar="LAYOUT", help="all about one layout, or why it is illegal")
    add("--timeline", metavar="FILE", help="with --explain: picture of the pipeline, .html or .png")
    add("--export", metavar="ENGINE", help="settings for megatron, torchtitan, torchtitan-0.2, "
        "nanotron or torchrun (our own engine); implies that --stack")  # fmt: skip
    add("--out", metavar="FOLDER", help="where --export writes env.sh, torchrun.args, engine.args "
        "and run.sh; a file for torchrun (default: one script on standard output)")  # fmt: skip
    add("--safe", action="store_true", help="rank what surely fits, where anything does")
    add("--pick", type=int, default=1, metavar="N", help="which of the ranking --export writes")
    add("--top", type=int, default=10, metavar="N", help="how many to list (default 10)")
    add("--details", action="store_true", help="also the seconds of each part, as columns")
    add("--calibration", metavar="FILE", help="made by 'fourfold fit' (default: the shipped one)")
    flags.add_convention(parser)
    flags.add_force(parser)
    flags.add_format(parser)


def run(args: argparse.Namespace) -> int:
    from fourfold.search.answer import answer
    from fourfold.search.gpu_counts import best_of
    from fourfold.search.ramp import training
    from fourfold.show.plan import plan_text

    if args.top < 1 or args.pick < 1:
        raise UserError("must be 1 or more", field="--top, --pick", value=min(args.top, args.pick))
    if args.stack == "list":
        return _list_stacks(args)
    ask, counts = question(args)
    if args.explain:
        return _explain(args, ask)
    if args.timeline:
        raise UserError("draws one layout", field="timeline", hint="add --explain 'pp4 dp2'")
    ranking, tried = best_of(ask, counts, least=max(args.top, args.pick))
    train = training(ranking, tokens=args.tokens, top=max(args.top, args.pick))
    if args.export:
        return plan_export.write(args, ranking)
    said = answer(ranking, train, top=args.top)
    said["tried_gpus"] = [{"gpus": gpus, "step_s": step_s} for gpus, step_s in tried.items()]
    if args.format == "json":
        print(json_text(said))
    else:
        print(plan_text(said, args.format, details=args.details, columns=columns()))
    return 0 if said["ranked"] else 1


def question(args: argparse.Namespace) -> tuple[Any, list[int]]:
    """(the question at the largest number of GPUs, all numbers of GPUs to try)."""
    from fourfold.cost.count import flops as conventions
    from fourfold.search import question as questions
    from fourfold.spec.expression import parse

    table = flags.run_table(args)
    fixed = plan_export.keep_to_limits(args, _fixed(table))
    cluster, counts = machines(args, table)
    known = _known(args, cluster)
    stack = _stack(args, cluster, known)
    plain = table.get("policy", {})
    policy = codec.decode(Policy, plain, "policy")
    entry, why = questions.entry_for(known, stack, cluster)
    if not isinstance(table.get("model"), str):
        raise UserError("is missing", field="model", hint="add --model NAME ('fourfold models')")
    model = catalog.model(table["model"])
    plan_export.require_expressible(args, model)
    ask = questions.Question(
        model=model,
        cluster=cluster,
        gpus=counts[0],
        batch=_batch(args, table),
        policy=questions.usual_policy(stack, policy, set(plain)),
        stack=stack,
        entry=entry,
        calibration=known.name,
        no_rows=why,
        evidence=questions.evidence_for(known, entry),
        fixed=fixed,
        where=tuple(parse(text) for text in args.where),
        explore=args.explore,
        safe=args.safe,
        convention=conventions.convention(args.convention).id,
    )
    return ask, counts


def _stack(args: argparse.Namespace, cluster: Cluster, known: Any) -> str:
    """Whose engine; what a short name stands for is said."""
    from fourfold.search.question import default_stack
    from fourfold.search.stack_names import match_stack

    asked = plan_export.implied_stack(args)
    if not asked:
        return default_stack(cluster, known)
    stack = match_stack(asked, cluster, known)
    if stack != asked.strip().lower():
        rows = {e.cluster: e.rows_time for e in known.entries if e.stack == stack}
        where = ", ".join(f"{name} ({count} rows)" for name, count in rows.items())
        print(f"read as: stack {asked} = {stack}, measured on {where}", file=sys.stderr)
    return stack


def _list_stacks(args: argparse.Namespace) -> int:
    from fourfold.search.stack_names import listed
    from fourfold.show.plan import stacks_text

    cluster = None
    if args.cluster or args.gpu or args.profile:
        cluster, _ = machines(argparse.Namespace(**{**vars(args), "gpus": None}), {"gpus": 1})
    rows = listed(_known(args, cluster), cluster)
    print(json_text(rows) if args.format == "json" else stacks_text(rows, args.format))
    return 0


def _known(args: argparse.Namespace, cluster: Cluster | None) -> Any:
    """The calibration: a file, what a profile of this machine says, or the shipped one."""
    from fourfold.cost.fit import calibration as calibrations
    from fourfold.cost.fit.measured import calibration_of

    if args.calibration:
        return calibrations.load(args.calibration)
    if args.profile and cluster is not None:
        return calibration_of(read_profile(args.profile), cluster)
    return calibrations.shipped()


def _fixed(table: dict[str, Any]) -> dict[str, Any]:
    """What the user decided: axes, micro batch and searched policy fields."""
    layout = table.get("layout", {})
    whole, named = Layout.from_plain(layout, "layout"), named_axes(layout)
    fixed: dict[str, Any] = {axis: whole.size(axis) for axis in MODEL_AXES if axis in named}
    if {"dp", "shard", "replicate"} & named:
        fixed |= {"dp": whole.dp, "replicate": whole.replicate}
    if table.get("batch", {}).get("micro_batch"):
        fixed["micro_batch"] = table["batch"]["micro_batch"]
    plain = table.get("policy", {})
    policy = codec.decode(Policy, plain, "policy")
    if words.is_hybrid(plain.get("sharding")) and whole.replicate == 1:
        fixed["replicate"] = "several"
    return fixed | {name: getattr(policy, name) for name in SEARCHED if name in plain}


def _batch(args: argparse.Namespace, table: dict[str, Any]) -> Batch:
    plain = dict(table.get("batch", {}))
    for name, flag in (("seq_len", "--seq-len"), ("global_batch", "--global-batch")):
        if name not in plain:
            raise UserError("is missing", field=name, hint=f"add {flag} N")
    plain.pop("micro_batch", None)
    batch = codec.decode(Batch, plain, "batch")
    if args.tokens is not None and not 0 < args.tokens < 1e18:
        raise UserError("must be above 0", field="tokens", value=args.tokens)
    return batch if args.ramp is None else replace(batch, ramp=Ramp.parse(args.ramp))


def _explain(args: argparse.Namespace, ask: Any) -> int:
    from fourfold.search.explain import explain_ranking, ways_to_run
    from fourfold.show.plan import explain_text
    from fourfold.show.schedule_picture import checked_suffix

    layout = Layout.parse(args.explain)
    if args.timeline:
        checked_suffix(args.timeline)
    if args.gpus is None and args.max_nodes is None and layout.world <= ask.cluster.gpus:
        ask = replace(ask, gpus=layout.world)
    ranking = ways_to_run(ask, layout)
    said = explain_ranking(ask, layout, ranking, tokens=args.tokens)
    if args.timeline and said["fits"]:
        _draw(args.timeline, ranking)
    print(json_text(said) if args.format == "json" else explain_text(said, args.format))
    return 0 if said["legal"] and said["fits"] else 1


def _draw(path: str, ranking: Any) -> None:
    """Of the first of the ways to run the layout."""
    from fourfold import files
    from fourfold.search.timeline import timeline
    from fourfold.show.schedule_picture import picture

    files.write_bytes(path, picture(timeline(ranking), path), field="timeline")
    print(f"timeline: {path}", file=sys.stderr)
