"""What every step of a parallel layer does on one rank, as blocks and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import fourfold
from fourfold import files, options
from fourfold.commands import command
from fourfold.cost.trace.steps import WORKSPACE_BYTES, AxisGroups, Program, spans
from fourfold.cost.trace.symbols import bracketed
from fourfold.cost.trace.walk import StepRow
from fourfold.events import OnEvent
from fourfold.output import Output
from fourfold.show.pictures import trace_picture
from fourfold.spec.cluster import Cluster
from fourfold.text_table import Grid, Part, table
from fourfold.units import counted
from fourfold.verbs.run_requests import TraceRequest

if TYPE_CHECKING:
    from fourfold.cost.trace.advice import Crossover, KindAdvice, KindTimes
    from fourfold.flag import Arguments
    from fourfold.result.trace import TensorCount, TraceMeasure
    from fourfold.verbs.trace import ComparedStep, Traced


_TRACE = """\
examples:
  fourfold trace ulysses --tokens 60000 --hidden 16384 --heads 128 --tp 8 --dp 2 --attention naive
  fourfold trace ring --model llama-3.1-8b --tokens 131072 --cp 16 --cluster nvidia-h100
  fourfold trace layer --model llama-3.1-70b --tokens 32768 --tp 8 --cp 2 --dp 4 --sharding zero3
  fourfold trace ring --tokens 512 --hidden 256 --heads 8 --cp 4 --dtype fp32 --run
  fourfold trace mlp2d --tokens 60000 --hidden 16384 --ffn 53248 --layers 126 --tp 8 --dp 2
"""


@command(
    *options.of(TraceRequest),
    options.option("--picture", "draw memory over the steps", "FILE.png"),
    examples=_TRACE,
)
def trace(args: Arguments, show: OnEvent) -> Output:
    """Show what every step of a parallel layer does on one rank: computed, or run with --run.

    Prints tensors as `name [symbolic] = [numbers]`, elements and bytes, FLOPs of one rank and of
    all, bytes sent and over which link, copy or view, and live and peak memory after every step.

    ulysses, allgather and ring split the sequence over all ranks (tp x cp x dp); mlp splits over
    tp; in mlp2d a rank has tokens/dp (gathered over tp) and ffn/tp (both with the gate of a gated
    model's MLP); layer is a whole decoder layer
    of a model under tp x cp x dp, forward and backward.
    """
    answer = fourfold.trace(options.load(TraceRequest, args), on_event=show)
    if args.picture:
        drawn = trace_picture(answer.program, answer.steps, args.picture)
        files.write_bytes(args.picture, drawn, field="picture")
    is_wrong = answer.measured is not None and bool(answer.measured.wrong)
    return Output.of(answer, lambda: page(answer, args.format or "text"), status=int(is_wrong))


_MAX_GROUPS = 4


def page(answer: Traced, style: str) -> list[Part]:
    head: list[Part] = [header(answer.program, answer.cluster), ""]
    if answer.measured is not None:
        return [*head, _compared(answer.pairs), "", *_verdict(answer.measured)]
    numbered = list(enumerate(answer.steps, 1))
    if style == "text":
        head += _blocks(numbered, answer.program.dtype)
    else:
        head.append(_tensor_table(numbered))
    parts = [*head, "", _step_table(numbered)]
    if answer.advice is not None:
        parts += ["", *_advice(answer.advice, answer.program, answer.cluster)]
    return parts


def _compared(pairs: Sequence[ComparedStep]) -> Grid:
    return table(
        pairs,
        ("step", lambda one: one.name),
        ("ms", lambda one: f"{1e3 * one.measured.seconds:.3f}"),
        ("TFLOP/s", _teraflops),
        ("live", lambda one: show_bytes(one.live_bytes)),
        ("measured", lambda one: show_bytes(one.measured.live_bytes)),
        ("peak", lambda one: show_bytes(one.peak_bytes)),
        ("measured", lambda one: show_bytes(one.measured.peak_bytes)),
        ("off %", lambda one: f"{one.peak_off_pct:+.2f}"),
    )


def _teraflops(pair: ComparedStep) -> str:
    flops, seconds = pair.flops_rank, pair.measured.seconds
    return f"{flops / seconds / 1e12:.3g}" if flops else "-"


def _verdict(measured: TraceMeasure) -> list[str]:
    where = f"{counted(measured.ranks, 'rank')} on {measured.device}, torch {measured.torch}"
    lines = [*(f"differs: {one}" for one in measured.wrong)]
    state = counted(len(measured.wrong), "difference") if measured.wrong else "all equal"
    what = (
        f"{counted(measured.checked, 'tensor')} checked for shape and bytes, every step for bytes "
        "held and sent"
        if measured.checked
        else "bytes sent forward and backward checked on every rank"
    )
    lines.append(f"{what}: {state}")
    left_out = ", workspace left out" if measured.peaks_from == "ledger" else ""
    lines.append(f"{where}; step peaks of rank 0 from the {measured.peaks_from}{left_out}")
    return lines


def header(program: Program, cluster: Cluster) -> str:
    sizes = ", ".join(f"{name} {value:,}" for name, value in program.sizes.items())
    share = ", ".join(f"{value:,} {name}" for name, value in program.per_rank.items())
    lines = [
        f"trace {program.kind}: {counted(program.ranks, 'rank')}, {program.dtype}; {sizes}",
        f"a rank has {share}; rank {program.rank} is shown",
    ]
    for group in program.groups:
        if group.size > 1:
            link = cluster.level(group.span).name
            lines.append(
                f"group {group.name}: {counted(group.size, 'rank')} over {link}: {_members(group)}"
            )
    lines += [f"note: {note}" for note in program.notes]
    lines.append(f"note: workspace of {show_bytes(WORKSPACE_BYTES)} held from the first product on")
    if program.kind != "layer":  # what autograd holds has no such rule
        lines[-1] += "; a tensor is held as long as its name"
    return "\n".join(lines)


def _members(group: AxisGroups) -> str:
    shown = "; ".join(spans(ranks) for ranks in group.members[:_MAX_GROUPS])
    more = len(group.members) - _MAX_GROUPS
    return f"{shown}; and {more:,} more" if more > 0 else shown


def _named(tensor: TensorCount) -> str:
    return f"{tensor.name} {tensor.symbolic} = {bracketed(tensor.shape)}"


def _blocks(steps: Sequence[tuple[int, StepRow]], dtype: str) -> Iterator[str]:
    """Of a tensor that is new, in the trace's own dtype, neither is said."""
    tensors = [tensor for _, row in steps for tensor in row.tensors]
    width = max(len(_named(tensor)) for tensor in tensors)
    digits = max(len(f"{tensor.elements:,}") for tensor in tensors)
    for number, row in steps:
        again = f" (x{row.times:,})" if row.times > 1 else ""
        yield f"{number:>2}  {row.name}{again}: {row.formula}"
        for one in row.tensors:
            size = f"{one.elements:>{digits},} {show_bytes(one.bytes):>9}"
            about = [word for word in (one.how, one.dtype) if word not in ("new", dtype)]
            yield f"    {_named(one):<{width}} {size} {' '.join(about)}".rstrip()


def _tensor_table(steps: Sequence[tuple[int, StepRow]]) -> Grid:
    return table(
        [(number, row, tensor) for number, row in steps for tensor in row.tensors],
        ("step", lambda one: str(one[0])),
        ("name", lambda one: one[1].name),
        ("tensor", lambda one: one[2].name),
        ("symbolic", lambda one: one[2].symbolic),
        ("shape", lambda one: bracketed(one[2].shape)),
        ("elements", lambda one: f"{one[2].elements:,}"),
        ("size", lambda one: show_bytes(one[2].bytes)),
        ("dtype", lambda one: one[2].dtype),
        ("how", lambda one: one[2].how),
    )


def _step_table(steps: Sequence[tuple[int, StepRow]]) -> Grid:
    return table(
        steps,
        ("step", lambda one: str(one[0])),
        ("name", lambda one: one[1].name),
        ("TFLOP rank", lambda one: show_flops(one[1].flops_rank)),
        ("TFLOP all", lambda one: show_flops(one[1].flops_all)),
        ("sent", lambda one: show_bytes(one[1].comm_bytes) if one[1].comm_bytes else "-"),
        ("over", lambda one: links(one[1]) or "-"),
        ("live GB", lambda one: f"{one[1].live_bytes / 1e9:.3f}"),
        ("peak GB", lambda one: f"{one[1].peak_bytes / 1e9:.3f}"),
    )


def links(row: StepRow) -> str:
    """'nvlink 161.28 MB + network 184.32 MB'; one level needs no number."""
    totals: dict[str, int] = {}
    for message in row.comm:
        for name, count in message.by_link_bytes.items():
            totals[name] = totals.get(name, 0) + count
    if len(totals) == 1:
        return next(iter(totals))
    return " + ".join(f"{name} {show_bytes(count)}" for name, count in totals.items())


def show_bytes(count: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"


def show_flops(count: float) -> str:
    """In TFLOP; small layers keep three digits."""
    if count == 0:
        return "-"
    return f"{count / 1e12:.2f}" if count >= 1e10 else f"{count / 1e12:.3g}"


def _advice(advice: KindAdvice, program: Program, cluster: Cluster) -> list[Part]:
    """The choice, what it rests on, and the lengths at which it would change."""
    heads = ["kind", "ms", "attention ms", "waits ms", "sent", "peak"]
    levels = ", ".join(
        f"{link.name} {link.bytes_per_s / 1e9:g} GB/s a rank within {link.ranks:,}"
        for link in cluster.links
    )
    return [
        Grid(heads, [_choice_row(choice) for choice in advice.choices]),
        "",
        f"recommendation: {advice.best or 'none'}; {advice.reason}",
        *(f"refused: {c.kind}: {c.refused}" for c in advice.choices if c.refused),
        *(_order(pair, advice) for pair in advice.pairs),
        "one layer's attention, forward and backward, flash kernels, on "
        f"{cluster.name} ({cluster.device.id}; {levels}); "
        f"{program.sizes['tokens']:,} tokens over {counted(program.ranks, 'rank')},"
        " equal work on each",
    ]


def _choice_row(choice: KindTimes) -> list[str]:
    if choice.refused:
        return [choice.kind, *["-"] * 5]
    seconds = (choice.total_s, choice.attention_s, choice.exposed_s)
    return [
        choice.kind,
        *(f"{1e3 * value:.3f}" for value in seconds),
        show_bytes(choice.sent_bytes),
        show_bytes(choice.peak_bytes),
    ]


def _order(pair: Crossover, advice: KindAdvice) -> str:
    between = f"from {advice.from_tokens:,} to {advice.to_tokens:,} tokens"
    if not pair.crossover_tokens:
        return f"crossover: none, {pair.first} is ahead of {pair.second} {between}"
    names = (pair.second, pair.first)
    changes = ", ".join(
        f"{names[i % 2]} from {tokens:,}" for i, tokens in enumerate(pair.crossover_tokens)
    )
    return f"crossover: {pair.first} is ahead of {pair.second} when short, {changes} tokens"
