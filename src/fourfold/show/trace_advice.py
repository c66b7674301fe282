"""How is a recommendation between kinds of context parallelism shown? A table, then sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.cost.trace.step import Program
from fourfold.show.table import render
from fourfold.show.trace import show_bytes
from fourfold.spec.cluster import Cluster

if TYPE_CHECKING:
    from fourfold.cost.trace.advice import Advice, Choice, Pair


def text(advice: Advice, program: Program, cluster: Cluster, style: str) -> str:
    """The choice, what it rests on, and the lengths at which it would change."""
    heads = ["kind", "ms", "attention ms", "waits ms", "hidden ms", "copies, launches ms", "sent",
             "peak"]  # fmt: skip
    table = render(heads, [_row(choice) for choice in advice.choices], style)
    lines = [
        f"recommendation: {advice.best or 'none'}; {advice.reason}",
        *(f"refused: {c.kind}: {c.refused}" for c in advice.choices if c.refused),
        *(_order(pair, advice) for pair in advice.pairs),
        f"one layer's attention, forward and backward, flash kernels, on {_described(cluster)}; "
        f"{program.sizes['tokens']:,} tokens over {program.ranks:,} ranks, equal work on each",
    ]
    return f"{table}\n\n" + "\n".join(lines)


def _row(choice: Choice) -> list[str]:
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
