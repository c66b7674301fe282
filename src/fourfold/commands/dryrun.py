"""What would any rank of any world hold, compute and send? The engine itself, without hardware.

One process pretends to be the rank: every operator and collective of a step happens on tensors that
have shapes but no memory. With --stages one rank of every pipeline stage, else rank 0 or --rank.
Steps of more than 2 pp micro batches are counted at pp + 2 and 2 pp, and continued as a straight
line.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from fourfold import files
from fourfold.commands import flags
from fourfold.commands.progress import end_line, progress_lines
from fourfold.errors import UserError
from fourfold.launch.devices import core_count
from fourfold.launch.local import JobError, must_be_ok, run_job
from fourfold.launch.scratch import scratch
from fourfold.result.dryrun import RankCount
from fourfold.result.job import answer_file
from fourfold.result.overheads import RESERVED_RATIO, unseen_parts
from fourfold.search.legal import Target, why_not
from fourfold.show.table import json_text, render
from fourfold.spec import codec
from fourfold.spec.job import Job, Limits
from fourfold.spec.layout import AXES
from fourfold.spec.run import RunSpec
from fourfold.units import show_bytes, show_count

EXAMPLES = """\
examples:
  fourfold dryrun --model llama-3.1-8b --gpus 64 --tp 8 --pp 2 --seq-len 8192 --global-batch 64
  fourfold dryrun --model gpt-181b --tp 8 --pp 12 --dp 4 --micro-batch 2 --global-batch 2048 \\
      --seq-len 2048 --recompute full --sharding zero1 --precision fp16 --stages
"""
_LIMITS = Limits(start_s=1800.0, step_s=1800.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="R", help="which rank (default 0)")
    which.add_argument("--stages", action="store_true", help="one rank of every pipeline stage")
    flags.add_run(parser)
    flags.add_format(parser)


def run(args: argparse.Namespace) -> int:
    spec = flags.run_spec(args)
    ranks = _ranks(args, spec)
    refusals = why_not(spec.model, spec.layout, spec.batch, spec.policy, Target(gpus=spec.gpus))
    for refusal in refusals:
        raise UserError(refusal.rule, field=refusal.field, value=refusal.value, hint=refusal.hint)
    try:
        counts = count(spec, ranks)
    except JobError as error:
        print(f"dryrun: {error}", file=sys.stderr)
        return 1
    if args.format == "json":
        print(json_text(answer(spec, counts)))
    else:
        print(_text(spec, counts, args.format))
    return 0


def _ranks(args: argparse.Namespace, spec: RunSpec) -> list[int]:
    if args.stages:
        return [stage * spec.layout.stride("pp") for stage in range(spec.layout.pp)]
    rank = args.rank or 0
    if not 0 <= rank < spec.gpus:
        raise UserError(
            f"the world has {spec.gpus} ranks", field="rank", value=rank, hint="--rank 0"
        )
    return [rank]


def count(spec: RunSpec, ranks: list[int]) -> list[RankCount]:
    """Counts of these ranks, in their order; cores share the work."""
    job = Job(
        job="dryrun",
        # Variables of the ranks change no count.
        specs=(replace(spec, device="cpu", policy=replace(spec.policy, env=())),),
        ranks=min(len(ranks), core_count()),
        options=(("ranks", ",".join(map(str, ranks))),),
        limits=_LIMITS,
    )
    with scratch() as folder:
        report = run_job(job, folder, progress=progress_lines())
        end_line()
        must_be_ok(report)
        texts = (files.read_text(answer_file(folder, 0, rank)) for rank in ranks)
        return [codec.from_json(RankCount, text) for text in texts]


def answer(spec: RunSpec, counts: list[RankCount]) -> dict[str, Any]:
    worst = max(counts, key=lambda count: count.peak_bytes)
    unseen = unseen_parts(spec)
    return {
        "model": spec.model.name,
        "layout": str(spec.layout),
        "gpus": spec.gpus,
        "stages": [codec.encode(count) for count in counts],
        "worst_stage": worst.stage,
        "unseen": [codec.encode(part) for part in unseen],
        "unseen_bytes": sum(part.bytes for part in unseen),
        "peak_with_unseen_bytes": worst.peak_bytes + sum(part.bytes for part in unseen),
        "extrapolation": _extrapolation(counts),
    }


def _extrapolation(counts: list[RankCount]) -> str:
    one = counts[0]
    if not one.counted_at:
        return ""
    few, more = one.counted_at
    return (
        f"counted at {few} and {more} micro batches, continued as a straight line "
        f"to the {one.micro_batches} of the step"
    )


def _text(spec: RunSpec, counts: list[RankCount], style: str) -> str:
    axes = [axis for axis in AXES if spec.layout.size(axis) > 1]
    rows = [
        [
            str(one.stage),
            str(one.rank),
            show_count(one.params),
            show_bytes(one.state_bytes),
            show_bytes(one.activation_bytes),
            show_bytes(one.peak_bytes),
            one.peak_phase,
            show_count(one.flops),
            *(show_bytes(_moved(one, axis)) for axis in axes),
        ]
        for one in counts
    ]
    headings = ["stage", "rank", "params", "state", "activations", "peak", "at", "FLOPs", *axes]
    table = render(headings, rows, style)
    return table if style == "csv" else f"{table}\n\n{_conditions(spec, counts)}"


def _moved(count: RankCount, axis: str) -> int:
    return sum(traffic.bytes for traffic in count.comm if traffic.axis == axis)


def _conditions(spec: RunSpec, counts: list[RankCount]) -> str:
    worst = max(counts, key=lambda count: count.peak_bytes)
    unseen = unseen_parts(spec)
    total = worst.peak_bytes + sum(part.bytes for part in unseen)
    lines = [
        f"{spec.model.name} on {spec.gpus} ranks, {spec.layout}; per rank and step; "
        f"{', '.join(AXES)}: payload of its collectives",
        f"fullest: stage {worst.stage}, rank {worst.rank}, in {worst.peak_phase}; its largest:",
    ]
    lines += [
        f"  {show_bytes(large.bytes):>10}  {large.kind}, {large.shape} {large.dtype}, "
        f"{large.op} in {large.phase}"
        for large in worst.largest[:3]
    ]
    lines.append(f"on a GPU about {total / 1e9:.1f} GB; a dry run cannot see:")
    lines += [f"  {show_bytes(part.bytes):>10}  {part.name} ({part.source})" for part in unseen]
    low, high = RESERVED_RATIO
    lines.append(
        f"torch's allocator may reserve {low:g} to {high:g} times the peak (measured on an H200) "
        "and gives it back when short"
    )
    if _extrapolation(counts):
        lines.append(_extrapolation(counts))
    return "\n".join(lines)
