"""How is a trace shown? Blocks of text for people, one row per tensor in CSV, everything in JSON.

GB = 1e9 and MB = 1e6 bytes, TFLOP = 1e12, as in the traces people print by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fourfold.cost.trace.steps import WORKSPACE_BYTES, Group, Program, spans
from fourfold.cost.trace.symbols import bracketed
from fourfold.cost.trace.walk import StepRow, TensorRow
from fourfold.show.table import render
from fourfold.spec.cluster import Cluster

if TYPE_CHECKING:
    from fourfold.cost.trace.advice import Advice, Choice, Pair

_MAX_GROUPS = 4
CSV_HEADINGS = (
    "step", "name", "formula", "times", "tensor", "symbolic", "shape", "dtype", "how", "elements",
    "bytes", "flops_rank", "flops_all", "comm_bytes", "links", "live_bytes", "step_peak_bytes",
    "peak_bytes",
)  # fmt: skip


def plain(program: Program, rows: Sequence[StepRow], cluster: Cluster) -> dict[str, Any]:
    """The trace as data, in base units."""
    return {
        "kind": program.kind,
        "ranks": program.ranks,
        "rank": program.rank,
        "dtype": program.dtype,
        "sizes": program.sizes,
        "per_rank": program.per_rank,
        "cluster": cluster.name,
        "groups": [_group(group, cluster) for group in program.groups],
        "workspace_bytes": WORKSPACE_BYTES,
        "notes": list(program.notes),
        "peak_bytes": rows[-1].peak_bytes,
        "steps": [_step(row) for row in rows],
    }


def _group(group: Group, cluster: Cluster) -> dict[str, Any]:
    return {
        "name": group.name,
        "size": group.size,
        "count": len(group.members),
        "link": cluster.level(group.span).name,
        "members": [list(ranks) for ranks in group.members],
    }


def _step(row: StepRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "formula": row.formula,
        "times": row.times,
        "tensors": [_tensor(tensor) for tensor in row.tensors],
        "flops_rank": row.flops_rank,
        "flops_all": row.flops_all,
        "comm_bytes": row.comm_bytes,
        "comm": [
            {"op": m.op, "group": m.group, "bytes": m.bytes, "by_link_bytes": m.by_level}
            for m in row.messages
        ],
        "live_bytes": row.live_bytes,
        "step_peak_bytes": row.step_peak_bytes,
        "peak_bytes": row.peak_bytes,
    }


def _tensor(tensor: TensorRow) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "symbolic": tensor.symbolic,
        "shape": list(tensor.shape),
        "elements": tensor.elements,
        "bytes": tensor.bytes,
        "dtype": tensor.dtype,
        "how": tensor.how,
    }


def tensor_rows(rows: Sequence[StepRow]) -> list[dict[str, str]]:
    """One row per tensor; a step's own numbers stand on its first row only, so columns add up."""
    lines: list[Sequence[str]] = []
    for number, row in enumerate(rows, 1):
        head = [str(number), row.name, row.formula, str(row.times)]
        own = [str(value) for value in (row.flops_rank, row.flops_all, row.comm_bytes)]
        own += [links(row), str(row.live_bytes), str(row.step_peak_bytes), str(row.peak_bytes)]
        cells = [
            [t.name, t.symbolic, bracketed(t.shape), t.dtype, t.how, str(t.elements), str(t.bytes)]
            for t in row.tensors
        ] or [[""] * 7]
        for index, cell in enumerate(cells):
            lines.append([*head, *cell, *(own if index == 0 else [""] * len(own))])
    return [dict(zip(CSV_HEADINGS, line, strict=True)) for line in lines]


def text(program: Program, rows: Sequence[StepRow], cluster: Cluster, style: str) -> str:
    """Header, a block per step, a table of all steps."""
    parts = [header(program, cluster)]
    if style == "text":
        width = max(len(_named(tensor)) for row in rows for tensor in row.tensors)
        blocks = (_block(number, row, width) for number, row in enumerate(rows, 1))
        parts.append("\n".join(blocks))
    else:
        parts.append(render(*_tensor_table(rows), style))
    parts.append(render(*_step_table(rows), style))
    return "\n\n".join(parts)


def header(program: Program, cluster: Cluster) -> str:
    sizes = ", ".join(f"{name} {value:,}" for name, value in program.sizes.items())
    share = ", ".join(f"{value:,} {name}" for name, value in program.per_rank.items())
    lines = [
        f"trace {program.kind}: {program.ranks:,} ranks, {program.dtype}; {sizes}",
        f"a rank has {share}; rank {program.rank} is shown",
    ]
    for group in program.groups:
        if group.size > 1:
            link = cluster.level(group.span).name
            lines.append(f"group {group.name}: {group.size:,} ranks over {link}: {_members(group)}")
    lines += [f"note: {note}" for note in program.notes]
    lines.append(f"note: workspace of {show_bytes(WORKSPACE_BYTES)} held from the first product on")
    if program.kind != "layer":  # what autograd holds has no such rule
        lines[-1] += "; a tensor is held as long as its name"
    return "\n".join(lines)


def _members(group: Group) -> str:
    shown = "; ".join(spans(ranks) for ranks in group.members[:_MAX_GROUPS])
    more = len(group.members) - _MAX_GROUPS
    return f"{shown}; and {more:,} more" if more > 0 else shown


def _named(tensor: TensorRow) -> str:
    return f"{tensor.name} {tensor.symbolic} = {bracketed(tensor.shape)}"


def _block(number: int, row: StepRow, width: int) -> str:
    again = f" (x{row.times:,})" if row.times > 1 else ""
    lines = [f"{number:>2}  {row.name}{again}: {row.formula}"]
    for tensor in row.tensors:
        lines.append(
            f"    {_named(tensor):<{width}}  {tensor.elements:>16,}  "
            f"{show_bytes(tensor.bytes):>9}  {tensor.dtype}  {tensor.how}"
        )
    return "\n".join(lines)


def _tensor_table(rows: Sequence[StepRow]) -> tuple[list[str], list[list[str]]]:
    cells = [
        [str(number), row.name, t.name, t.symbolic, bracketed(t.shape), f"{t.elements:,}",
         show_bytes(t.bytes), t.dtype, t.how]
        for number, row in enumerate(rows, 1)
        for t in row.tensors
    ]  # fmt: skip
    heads = ["step", "name", "tensor", "symbolic", "shape", "elements", "size", "dtype", "how"]
    return heads, cells


def _step_table(rows: Sequence[StepRow]) -> tuple[list[str], list[list[str]]]:
    cells = [
        [
            str(number),
            row.name,
            show_flops(row.flops_rank),
            show_flops(row.flops_all),
            show_bytes(row.comm_bytes) if row.comm_bytes else "-",
            links(row) or "-",
            f"{row.live_bytes / 1e9:.3f}",
            f"{row.peak_bytes / 1e9:.3f}",
        ]
        for number, row in enumerate(rows, 1)
    ]
    heads = ["step", "name", "TFLOP rank", "TFLOP all", "sent", "over", "live GB", "peak GB"]
    return heads, cells


def links(row: StepRow) -> str:
    """'nvlink 161.28 MB + network 184.32 MB'; one level needs no number."""
    totals: dict[str, int] = {}
    for message in row.messages:
        for name, count in message.by_level.items():
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


# Which kind of context parallelism to take: a table, then sentences.


def advice_text(advice: Advice, program: Program, cluster: Cluster, style: str) -> str:
    """The choice, what it rests on, and the lengths at which it would change."""
    heads = ["kind", "ms", "attention ms", "waits ms", "hidden ms", "copies, launches ms", "sent",
             "peak"]  # fmt: skip
    table = render(heads, [_choice_row(choice) for choice in advice.choices], style)
    lines = [
        f"recommendation: {advice.best or 'none'}; {advice.reason}",
        *(f"refused: {c.kind}: {c.refused}" for c in advice.choices if c.refused),
        *(_order(pair, advice) for pair in advice.pairs),
        f"one layer's attention, forward and backward, flash kernels, on {_described(cluster)}; "
        f"{program.sizes['tokens']:,} tokens over {program.ranks:,} ranks, equal work on each",
    ]
    return f"{table}\n\n" + "\n".join(lines)


def _choice_row(choice: Choice) -> list[str]:
    if choice.refused:
        return [choice.kind, *["-"] * 7]
    seconds = (
        choice.total_s, choice.attention_s, choice.exposed_s, choice.hidden_s, choice.around_s
    )  # fmt: skip
    return [
        choice.kind,
        *(f"{1e3 * value:.3f}" for value in seconds),
        show_bytes(choice.sent_bytes),
        show_bytes(choice.peak_bytes),
    ]


def _order(pair: Pair, advice: Advice) -> str:
    between = f"from {advice.from_tokens:,} to {advice.to_tokens:,} tokens"
    if not pair.crossover_tokens:
        return f"crossover: none, {pair.first} is ahead of {pair.second} {between}"
    names = (pair.second, pair.first)
    changes = ", ".join(
        f"{names[i % 2]} from {tokens:,}" for i, tokens in enumerate(pair.crossover_tokens)
    )
    return f"crossover: {pair.first} is ahead of {pair.second} when short, {changes} tokens"


def _described(cluster: Cluster) -> str:
    links = ", ".join(
        f"{link.name} {link.bytes_per_s / 1e9:g} GB/s a rank within {link.ranks:,}"
        for link in cluster.links
    )
    return f"{cluster.name} ({cluster.device.id}; {links})"
