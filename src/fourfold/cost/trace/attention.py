"""Which steps does attention take when the sequence is divided over all ranks? Ulysses, all-gather.

Ulysses: Jacobs et al., arXiv 2309.14509: an all-to-all trades tokens for heads and back.
All-gather: every rank keeps its queries and gathers all keys and values (Llama 3, 2407.21783).
"""

from __future__ import annotations

from fourfold.cost.trace.ask import Ask, check_heads, check_ulysses, divided, kv_copies
from fourfold.cost.trace.steps import Kind, Program, Send, Step, Tensor, world_group

GROUP = "sequence"
_N = "tokens/ranks"
NAIVE_NOTES = (
    "naive attention: the N x N scores are kept; forward only, batch 1, full square (no causal "
    "mask), no softmax",
)
FLASH_NOTES = (
    "flash attention: scores never reach memory; forward only, batch 1; a causal mask leaves half "
    "the square, and every rank the same share of it (tokens dealt out from both ends)",
)


def ulysses(ask: Ask) -> Program:
    """Tokens to heads, attention over the whole sequence, heads to tokens."""
    check_heads(ask)
    check_ulysses(ask.heads, ask.ranks)
    divided("tokens", ask.tokens, ask.ranks, "every rank holds the same share")
    copies = kv_copies(ask.heads, ask.kv_heads, ask.ranks)
    kv = "kv_heads/ranks" if copies == 1 else "kv_heads*kv_copies/ranks"
    q_sent = ("ranks", _N, "heads/ranks", "head_size")
    kv_sent = ("ranks", _N, kv, "head_size")
    named = (("q", "heads/ranks", q_sent), ("k", kv, kv_sent), ("v", kv, kv_sent))
    steps = (
        hold(),
        project(),
        Step(
            name="group by owner",
            formula="q_heads = reorder(q), same for k and v: heads of one rank side by side",
            tensors=tuple(Tensor(f"{t}_heads", sent, "copied") for t, _, sent in named),
        ),
        Step(
            name="tokens to heads",
            formula="q_heads = all_to_all(q_heads), same for k and v",
            tensors=tuple(
                Tensor(f"{t}_heads", ("tokens", heads, "head_size"), "received")
                for t, heads, _ in named
            ),
            sends=tuple(Send("all-to-all", GROUP, sent) for _, _, sent in named),
        ),
        *_attend(ask, heads="heads/ranks", queries="tokens", suffix="_heads"),
        Step(
            name="group by token",
            formula="out = reorder(out): tokens of one rank side by side",
            tensors=(Tensor("out", q_sent, "copied" if ask.attention == "naive" else "view"),),
        ),
        Step(
            name="heads to tokens",
            formula="out_tokens = all_to_all(out)",
            tensors=(Tensor("out_tokens", q_sent, "received"),),
            sends=(Send("all-to-all", GROUP, q_sent),),
        ),
        Step(
            name="join heads",
            formula="out_tokens = reorder(out_tokens): heads of one token side by side",
            tensors=(Tensor("out_tokens", (_N, "hidden"), "copied"),),
        ),
        output("out_tokens"),
    )
    per_rank = {
        "heads": ask.heads // ask.ranks,
        "kv_heads": ask.kv_heads * copies // ask.ranks,
        "tokens": ask.tokens // ask.ranks,
    }
    notes = NAIVE_NOTES if ask.attention == "naive" else FLASH_NOTES
    if copies > 1:
        notes += (f"kv_copies: KV heads do not deal out to the ranks, each is sent {copies} times",)
    more = {"kv_copies": copies} if copies > 1 else {}
    return program(ask, "ulysses", steps, per_rank, notes, **more)


def allgather(ask: Ask) -> Program:
    """Every rank gathers all keys and values and attends with its own queries."""
    check_sequence(ask, "allgather")
    whole = ("tokens", "kv_heads", "head_size")
    gather = Step(
        name="gather keys, values",
        formula="k_all = all_gather(k), v_all = all_gather(v)",
        tensors=(Tensor("k_all", whole, "received"), Tensor("v_all", whole, "received")),
        sends=(Send("all-gather", GROUP, whole),) * 2,
    )
    if ask.attention == "naive":
        attend = (*_attend(ask, heads="heads", queries=_N, suffix="_all"), join())
    else:
        attend = (_in_order(), *_spans(ask), cast(ask), join())
    steps = (hold(), project(), gather, *attend, output("out"))
    return program(ask, "allgather", steps, whole_heads(ask), notes_of(ask))


def _in_order() -> Step:
    """Tokens were dealt out from both ends; keys are put back into the order of the sequence."""
    whole = ("tokens", "kv_heads", "head_size")
    return Step(
        name="put in order",
        formula="k_all, v_all = tokens in the order of the sequence",
        tensors=(Tensor("k_all", whole, "copied"), Tensor("v_all", whole, "copied")),
    )


def _spans(ask: Ask) -> tuple[Step, ...]:
    """Each half of the queries against all keys before it, and causally against its own.

    Half i of 2 x ranks sees i chunks of keys whole and half of its own: over both halves that is
    the same on every rank.
    """
    halves = tuple(Tensor(t.name, t.dims, dtype=t.dtype) for t in block(ask, f"{_N}/2"))
    start = Step(
        name="start sums",
        formula="out_fp32 = 0, lse = -inf",
        tensors=sums(ask),
    )
    attend = Step(
        name="attend",
        formula="out_fp32, lse += attention(half of q, keys before it and its own), both halves",
        tensors=halves,
        flops=("2*tokens*tokens*hidden/ranks",),
        frees=tuple(tensor.name for tensor in halves),
    )
    return start, attend


def sums(ask: Ask) -> tuple[Tensor, ...]:
    """Running result of attention in blocks."""
    out = Tensor("out_fp32", ("heads", _N, "head_size"), dtype=ask.wide)
    row = Tensor("lse", ("heads", _N), dtype=ask.wide)
    return (out, row) if ask.attention == "flash" else (out,)


def block(ask: Ask, queries: str) -> tuple[Tensor, ...]:
    """One block's result; with a softmax also its row sums and its share of the sum, widened."""
    out = Tensor("block", ("heads", queries, "head_size"))
    if ask.attention == "naive":
        return (out,)
    return (
        out,
        Tensor("block_lse", ("heads", queries), dtype=ask.wide),
        Tensor("block_fp32", ("heads", queries, "head_size"), dtype=ask.wide),
    )


def cast(ask: Ask) -> Step:
    return Step(
        name="cast",
        formula=f"out = {ask.dtype}(out_fp32)",
        tensors=(Tensor("out", ("heads", _N, "head_size"), "copied"),),
        frees=("out_fp32",),
    )


def join() -> Step:
    return Step(
        name="join heads",
        formula="out = reorder(out): heads of one token side by side",
        tensors=(Tensor("out", (_N, "hidden"), "copied"),),
    )


def check_sequence(ask: Ask, kind: str) -> None:
    """A causal mask needs two chunks a rank, an early one and a late one, for equal work."""
    check_heads(ask)
    chunks = ask.ranks if ask.attention == "naive" else 2 * ask.ranks
    divided("tokens", ask.tokens, chunks, f"{kind} cuts the sequence into equal chunks")


def notes_of(ask: Ask) -> tuple[str, ...]:
    return NAIVE_NOTES if ask.attention == "naive" else FLASH_NOTES


def whole_heads(ask: Ask) -> dict[str, int]:
    tokens = ask.tokens // ask.ranks
    return {"heads": ask.heads, "kv_heads": ask.kv_heads, "tokens": tokens}


def program(
    ask: Ask,
    kind: Kind,
    steps: tuple[Step, ...],
    per_rank: dict[str, int],
    notes: tuple[str, ...],
    **more: int,
) -> Program:
    """The sequence group is the whole world, whatever axes it is made of."""
    sizes = {
        "tokens": ask.tokens,
        "hidden": ask.hidden,
        "heads": ask.heads,
        "kv_heads": ask.kv_heads,
        "head_size": ask.hidden // ask.heads,
        "ranks": ask.ranks,
        **more,
    }
    return Program(
        kind=kind,
        ranks=ask.ranks,
        sizes=sizes,
        dtype=ask.dtype,
        groups=(world_group(GROUP, ask.ranks),),
        steps=steps,
        per_rank=per_rank,
        rank=ask.rank,
        notes=notes,
    )


def hold() -> Step:
    square, narrow = ("hidden", "hidden"), ("hidden", "kv_heads*head_size")
    weights = (("Q", square), ("K", narrow), ("V", narrow), ("O", square))
    return Step(
        name="hold",
        formula="input: tokens of this rank; Q, K, V, O: whole on every rank",
        tensors=(Tensor("input", (_N, "hidden")), *(Tensor(*weight) for weight in weights)),
    )


def project() -> Step:
    kv_flops = "2*tokens*hidden*kv_heads*head_size/ranks"
    kv = (_N, "kv_heads", "head_size")
    return Step(
        name="project",
        formula="q = input x Q, k = input x K, v = input x V",
        tensors=(Tensor("q", (_N, "heads", "head_size")), Tensor("k", kv), Tensor("v", kv)),
        flops=("2*tokens*hidden*hidden/ranks", kv_flops, kv_flops),
    )


def output(source: str) -> Step:
    return Step(
        name="output",
        formula=f"output = {source} x O",
        tensors=(Tensor("output", (_N, "hidden")),),
        flops=("2*tokens*hidden*hidden/ranks",),
    )


def _attend(ask: Ask, *, heads: str, queries: str, suffix: str) -> tuple[Step, ...]:
    """Queries of this rank against all keys: tokens*tokens*hidden/ranks multiply-adds a product."""
    queried = f"q{suffix}" if queries == "tokens" else "q"
    if ask.attention == "flash":
        out = Tensor("out", (queries, heads, "head_size"))
        row = Tensor("lse", (heads, queries), dtype=ask.wide)
        attend = Step(
            name="attend",
            formula=f"out = attention({queried}, k{suffix}, v{suffix}), lse = its row sums",
            tensors=(out, row),
            flops=("2*tokens*tokens*hidden/ranks",),
        )
        return (attend,)
    product = ("2*tokens*tokens*hidden/ranks",)
    scores = Step(
        name="scores",
        formula=f"scores = {queried} x k{suffix}^T",
        tensors=(Tensor("scores", (heads, queries, "tokens")),),
        flops=product,
    )
    mix = Step(
        name="mix",
        formula=f"out = scores x v{suffix}",
        tensors=(Tensor("out", (heads, queries, "head_size")),),
        flops=product,
    )
    return scores, mix
