"""What others wrote: logs of engines and traces of profilers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import fourfold
from fourfold import options
from fourfold.commands import command
from fourfold.events import OnEvent
from fourfold.logs.nested import number
from fourfold.logs.row import Row, shown_layout
from fourfold.options import option
from fourfold.output import Output
from fourfold.page.diagnose import diagnosis_page
from fourfold.page.document import check_page, write_page
from fourfold.show.diagnose import page
from fourfold.text_table import Grid, Part
from fourfold.units import counted
from fourfold.verbs.collect import Collected, CollectRequest
from fourfold.verbs.requests import DiagnoseRequest

if TYPE_CHECKING:
    from fourfold.flag import Arguments

_COLLECT = """\
examples:
  fourfold collect logs/ --cluster jean-zay
  fourfold collect train.log --set hardware=h100-80gb --stack megatron-lm-mine --out mine.csv
  fourfold collect colleague.csv > columns.toml        (a mapping file to fill in)
  fourfold collect colleague.csv --map columns.toml
"""
_HEADINGS = ["run", "gpus", "layout", "mbs", "gbs", "step_s", "iterations", "mem GiB", "status"]


@command(
    *options.of(CollectRequest),
    *(
        one._replace(help="a field missing from the logs, such as hardware=h100-80gb", rare=False)
        for one in options.run_options()
        if one.names == ("--set",)
    ),
    examples=_COLLECT,
)
def collect(args: Arguments, show: OnEvent) -> Output:
    """Turn logs of other engines into measured rows for fit, score, predict and report.

    Reads logs of Megatron-LM, Megatron-DeepSpeed, NeMo, torchtitan, nanotron, llm-foundry,
    DeepSpeed and the Hugging Face Trainer, exports of W&B and TensorBoard (CSV, JSON lines),
    nccl-tests output, the reference schema, and any CSV with --map. The configuration comes from
    what the engine prints; a run that lacks a field is kept as 'incomplete' and not fitted until
    --set, --fields or --cluster supplies it. Without --map, a CSV that is not understood makes a
    mapping file to fill in.
    """
    fields = {path: text.strip().strip("\"'") for path, text in options.assignments(args)}
    answer = fourfold.collect(options.load(CollectRequest, args, fields=fields), on_event=show)
    if answer.proposals and (args.format or "text") == "text" and not answer.rows_read:
        return Output(raw="\n".join(answer.proposals), status=1)
    return Output.of(answer, lambda: _page(answer), status=0 if answer.ok else 1)


def _page(answer: Collected) -> list[Part]:
    parts: list[Part] = []
    if answer.rows_read:
        parts.append(Grid(_HEADINGS, [_cells(row) for row in answer.rows_read]))
        parts += ["", f"{counted(len(answer.rows_read), 'row')}; {answer.out} has {answer.total}"]
    about: dict[str, list[str]] = {}
    for row in answer.rows_read:
        for text in _remarks(row):
            about.setdefault(text, []).append(row["row_id"])
    parts += [f"{_names(names)}: {text}" for text, names in about.items()]
    for one in answer.files:
        parts += [f"{one.log}: {note}" for note in one.notes]
        if one.book.unread:
            parts.append(f"{one.log}: {counted(one.book.unread, 'line')} could not be read:")
            parts += [f"  {number}: {text}" for number, text in one.book.shown]
        if one.link:
            parts.append(_link(one.log, one.link))
    return parts


def _remarks(row: Row) -> list[str]:
    missing = f"not used by fit, missing {', '.join(row.missing)}"
    rule = f"step_s is the {row['step_rule']}" if row["step_s"] else row["step_rule"]
    return [*([missing] if row.missing else []), *row.notes, *([rule] if rule else [])]


def _names(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} others"


def _cells(row: Row) -> list[str]:
    step_s, memory = number(row["step_s"]), number(row["mem_gb"])
    return [
        row["row_id"],
        row["n_gpus"],
        shown_layout(row),
        row["mbs"],
        row["gbs"],
        f"{step_s:.6g}" if step_s else "-",
        row["steps"],
        f"{memory:.1f}" if memory else "-",
        row["status"] or "-",
    ]


def _link(log: str, link: Mapping[str, Any]) -> str:
    latency = "" if link["latency_s"] is None else f", {1e6 * link['latency_s']:.1f} us"
    return (
        f"{log}: {link['op']} over {counted(link['ranks'], 'rank')}"
        f" of {counted(link['hosts'], 'host')}: "
        f"{link['bytes_per_s'] / 1e9:.1f} GB/s per rank{latency}; 'fourfold clusters new' takes it"
    )


_DIAGNOSE = """\
examples:
  fourfold diagnose trace.json.gz
  fourfold diagnose traces/ --what-if recompute=none --what-if micro_batch=2 --fix all
  fourfold diagnose rank0.json.gz --html diagnosis.html
  fourfold bench ... --trace own.json.gz && fourfold diagnose own.json.gz
"""


@command(
    *options.of(DiagnoseRequest),
    option("--spec", "the run as a TOML file, where it is known", "FILE"),
    option("--settings", "also show every setting with its evidence", switch=True),
    option("--html", "write one page: bars and a timeline of a step", "FILE"),
    options.FORCE,
    examples=_DIAGNOSE,
)
def diagnose(args: Arguments, show: OnEvent) -> Output:
    """Tell why a traced run is slower than it should be: measured and expected seconds by part,
    causes and remedies.

    TRACE is a PyTorch profiler trace (Chrome JSON, plain or gzip), an nsys export (SQLite), or a
    folder of ranks. Settings are read off the trace, each with its evidence; flags overrule them.
    Expected seconds are the planner's for the same run on the same GPU, with an 80% interval.
    """
    table = options.run_table(args) if args.spec else {}
    if args.html:
        check_page(args.html, force=bool(args.force), charts=False)
    request = options.load(DiagnoseRequest, args, spec=table)
    answer = fourfold.diagnose(request, on_event=show)
    if args.html:
        write_page(args.html, diagnosis_page(answer), on_event=show)
    return Output.of(answer, lambda: page(answer, settings=bool(args.settings)))
