"""Let this device stand in for one rank of a large world: `bench --as-rank R --world W`.

Real kernels, collectives that only fill their buffers: true peak and compute of that rank's stage,
against its kernels alone and against the planner. Traffic and bubble are then the only modelled
parts. The answer goes to stdout and, with --out, into a file; it is no run of its layout, so the
run store, reports and fits never see it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.commands import flags, progress
from fourfold.commands.fast import with_fast_defaults
from fourfold.commands.stage_planner import Planner
from fourfold.cost.floor import least_bytes, parts
from fourfold.errors import UserError
from fourfold.launch.devices import gpu_count
from fourfold.launch.local import run_job
from fourfold.launch.scratch import scratch
from fourfold.result.job import JobReport, answer_file
from fourfold.result.one_rank import OneRankResult
from fourfold.result.report import RunReport
from fourfold.search.legal import require_legal
from fourfold.show import floor
from fourfold.show.floor import must_be_picture
from fourfold.show.table import json_text, render
from fourfold.spec import codec
from fourfold.spec.job import Job, Limits
from fourfold.spec.run import RunSpec

_WARMUP, _STEPS = 2, 3
# Against the floor: enough for a GPU to be as hot as in a long run.
_FLOOR_WARMUP, _FLOOR_STEPS, _HOT_S, _HOT_CPU_S = 8, 10, 6.0, 1.0
_SHARDINGS = ("zero0", "zero1", "zero2", "zero3")
_LIMITS = Limits(start_s=1800.0, step_s=900.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("one rank of a large world, on this device")
    group.add_argument(
        "--as-rank", metavar="R", help="a rank, or first, last, worst (the fullest stage's)"
    )
    group.add_argument("--world", type=int, metavar="W", help="ranks in all, like --gpus")
    group.add_argument(
        "--layout",
        action="append",
        default=[],
        metavar="TEXT",
        help="'pp4 dp16 tp8', then zero0-3 or FIELD=VALUE words; again for another row",
    )
    group.add_argument(
        "--micro-batches", type=int, metavar="N", help="really run (default: enough; 0: all)"
    )
    group.add_argument("--details", action="store_true", help="parts, kernels, traffic of each")
    group.add_argument("--out", metavar="FILE.json", help="keep the whole answer there")
    group.add_argument(
        "--against", choices=("floor",), help="one GPU: where a step loses what could be avoided"
    )
    group.add_argument("--picture", metavar="FILE.png", help="with --against: two bars by part")


def is_asked(args: argparse.Namespace) -> bool:
    if args.picture:
        if not args.against:
            raise UserError("belongs to --against", field="--picture", hint="add --against floor")
        must_be_picture(args.picture)
    if args.against and args.as_rank is None:
        args.as_rank, args.world = "0", args.world or 1
    if args.as_rank is None:
        for flag in ("world", "layout", "micro_batches", "out"):
            if getattr(args, flag):
                raise UserError(
                    "belongs to --as-rank",
                    field=f"--{flag.replace('_', '-')}",
                    hint="add --as-rank 0, or give the layout by --gpus, --pp, --dp, --cp, --tp",
                )
    return args.as_rank is not None


@dataclass(frozen=True, slots=True)
class Row:
    """One layout: what was asked, what came back (`found` None: `report` says why), the planner."""

    spec: RunSpec
    rank: int
    report: RunReport
    found: OneRankResult | None
    planner: Planner


def run(args: argparse.Namespace) -> int:
    specs = [_spec(args, text) for text in args.layout or [""]]
    planners = [Planner(args, spec) for spec in specs]
    ranks = [_rank(args, planner) for planner in planners]
    for spec in specs:
        require_legal(spec)
    options = [("ranks", ",".join(map(str, ranks)))]
    if args.micro_batches is not None:
        if args.micro_batches < 0:
            raise UserError("must be 0 or more", field="micro-batches", value=args.micro_batches)
        options.append(("micro_batches", ",".join([str(args.micro_batches)] * len(specs))))
    if args.against:
        least = [" ".join(map(str, least_bytes(planner.columns))) for planner in planners]
        options.append(("least", ",".join(least)))
        options.append(("hot_s", f"{_HOT_S if gpu_count() else _HOT_CPU_S:g}"))
    job = Job(job="one-rank", specs=tuple(specs), options=tuple(options), limits=_LIMITS)
    with scratch() as folder:
        show, permit = progress.progress_lines(), flags.permit(args)
        report = run_job(job, folder, progress=show, permit=permit)
        found = [_answer(folder, report, task) for task in range(len(specs))]
    progress.end_line()
    runs = [_of_rank(one, rank) for one, rank in zip(report.runs, ranks, strict=True)]
    rows = [Row(*one) for one in zip(specs, ranks, runs, found, planners, strict=True)]
    if args.out:
        files.write_text(Path(args.out), json_text(_plain(rows)) + "\n")
    if args.picture:
        named = [(_name(row.spec), parts(row.found)) for row in rows if row.found]
        files.write_bytes(args.picture, floor.picture(named, args.picture), field="picture")
    if args.format == "json":
        print(json_text(_plain(rows)))
    else:
        _print(rows, args)
    return 0 if all(row.found is not None for row in rows) else 1


def _of_rank(report: RunReport, rank: int) -> RunReport:
    """The only process calls itself 0; who it stood for is who failed."""
    if report.failure is None or report.failure.rank < 0:
        return report
    return replace(report, failure=replace(report.failure, rank=rank))


def _answer(folder: Path, report: JobReport, task: int) -> OneRankResult | None:
    if report.runs[task].outcome != "ok":
        return None
    return codec.from_json(OneRankResult, files.read_text(answer_file(folder, task)))


def _spec(args: argparse.Namespace, text: str) -> RunSpec:
    """The run of the flags under the layout text, which may add a sharding and any fields."""
    table = flags.run_table(args)
    axes = []
    for word in text.split():
        if word in _SHARDINGS:
            flags.put(table, "policy.sharding", word)
        elif "=" in word:
            path, _, value = word.partition("=")
            flags.put(table, path, flags.toml_value(value))
        else:
            axes.append(word)
    if axes:
        table["layout"] = " ".join(axes)
    if args.world is not None:
        table["gpus"] = args.world
    if "model" not in table:
        raise UserError("is missing", field="model", hint="add --model NAME ('fourfold models')")
    spec = with_fast_defaults(codec.load(RunSpec, table), table, ranks=1)
    if spec.batch.micro_batch == 0:
        raise UserError(
            "'auto' needs the real ranks", field="micro_batch", hint="give --micro-batch N"
        )
    usual = (_FLOOR_STEPS, _FLOOR_WARMUP) if args.against else (_STEPS, _WARMUP)
    steps = args.steps if args.steps is not None else table.get("steps", usual[0])
    warmup = args.warmup if args.warmup is not None else table.get("warmup", usual[1])
    return replace(spec, steps=steps, warmup=max(2, warmup))


def _rank(args: argparse.Namespace, planner: Planner) -> int:
    spec, wanted = planner.spec, args.as_rank
    stride = spec.layout.stride("pp")
    if wanted == "worst":
        return planner.fullest_stage() * stride
    if wanted in ("first", "last"):
        return 0 if wanted == "first" else (spec.layout.pp - 1) * stride
    if not wanted.isdecimal() or int(wanted) >= spec.gpus:
        raise UserError(
            f"must be a rank of {spec.layout}, 0 to {spec.gpus - 1}, or first, last or worst",
            field="as-rank",
            value=wanted,
            hint=f"--as-rank {spec.gpus - 1} is the last",
        )
    return int(wanted)


def _plain(rows: list[Row]) -> dict[str, Any]:
    """Base units, one entry per layout."""
    return {"kind": "stand-in", "ranks": [_plain_row(row) for row in rows]}


def _plain_row(row: Row) -> dict[str, Any]:
    from fourfold.show import one_rank as shown

    step, low, high = row.planner.step_s()
    plain: dict[str, Any] = {
        "model": row.spec.model.name,
        "layout": str(row.spec.layout),
        "world": row.spec.gpus,
        "rank": row.rank,
        "place": row.spec.layout.coordinates(row.rank),
        "spec": codec.encode(row.spec, sparse=True),
        "outcome": row.report.outcome,
        "planner_basis": row.planner.basis,
        "planner_step_s": step,
        "planner_step_s_low": low,
        "planner_step_s_high": high,
    }
    if row.found is None:
        failure = row.report.failure
        plain["failure"] = codec.encode(failure) if failure is not None else None
        if row.report.outcome == "oom":
            plain["post_mortem"] = row.planner.post_mortem(row.report)
        return plain
    said, whole = row.planner.predicted(row.found), row.planner.joined(row.found)
    plain |= {"measured": codec.encode(row.found)} | shown.plain(row.found, said, whole)
    if row.found.floor is not None:
        plain["floor"] = floor.plain(parts(row.found), _tokens(row))
    return plain


def _tokens(row: Row) -> float:
    """Of a step, for each GPU."""
    return row.spec.batch.tokens / row.spec.gpus


def _print(rows: list[Row], args: argparse.Namespace) -> None:
    from fourfold.show import one_rank as shown

    style, spec = args.format, rows[0].spec
    if style != "csv":
        print(
            f"{spec.model.name}, {spec.gpus} ranks, global batch {spec.batch.global_batch} x "
            f"{spec.batch.seq_len} tokens; one rank on this device, its peers only filled in\n"
        )
    if args.against:
        _print_floors(rows, style)
        return
    cells = []
    for row in rows:
        name = _name(row.spec)
        if row.found is None:
            cells.append([name, str(row.rank), row.report.outcome, *["-"] * 11])
            continue
        said, whole = row.planner.predicted(row.found), row.planner.joined(row.found)
        cells.append(shown.row(row.found, said, whole, row.planner.step_s()[0], name))
    print(render(shown.HEADINGS, cells, style))
    if style == "csv":
        return
    for line in shown.notes(rows[0].planner.basis, [row.found for row in rows if row.found]):
        print(line if line else "")
    for row in rows:
        _print_one(row, style, details=args.details or len(rows) == 1)


def _print_floors(rows: list[Row], style: str) -> None:
    for row in rows:
        if row.found is None:
            _print_one(row, style, details=False)
            continue
        if style != "csv":
            print(f"{_name(row.spec)}, {row.found.device}, torch {row.found.torch}")
        print(floor.text(parts(row.found), _tokens(row), style))


def _name(spec: RunSpec) -> str:
    words = [str(spec.layout), spec.policy.sharding, f"mbs{spec.batch.micro_batch}"]
    policy = spec.policy
    if spec.layout.cp > 1:
        words.append(policy.cp_kind)
    if spec.layout.pp > 1 and policy.schedule != "1f1b":
        words.append(policy.schedule)
    if policy.virtual_stages > 1:
        words.append(f"v{policy.virtual_stages}")
    if policy.recompute != "none":
        words.append(f"recompute {policy.recompute}")
    return " ".join([*words, *(["compiled"] if spec.policy.compile else [])])


def _print_one(row: Row, style: str, *, details: bool) -> None:
    from fourfold.show import one_rank as shown
    from fourfold.show import oom as post_mortem

    if row.found is None:
        said = row.report.failure
        words = said.message.splitlines()[0] if said and said.message else "nobody could tell why"
        print(f"\n{_name(row.spec)}: {row.report.outcome}: {words}")
        if row.report.outcome == "oom":
            print(post_mortem.text(row.planner.post_mortem(row.report), style), end="")
        return
    if details:
        whole = row.planner.joined(row.found)
        print(shown.details(row.found, whole, row.planner.step_s(), _name(row.spec), style))
