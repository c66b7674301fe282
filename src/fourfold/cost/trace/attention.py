"""Steps of attention when the sequence is divided over all ranks: Ulysses, all-gather, ring."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from fourfold.cost.trace.steps import (
    Ask,
    AxisGroups,
    Kind,
    Program,
    Send,
    Step,
    Tensor,
    check_heads,
    check_ulysses,
    divided,
    kv_copies,
)

GROUP = "sequence"
_N = "tokens/ranks"
_WHOLE_KV = ("tokens", "kv_heads", "head_size")
_RING_KV = ("2", _N, "kv_heads", "head_size")
_PRODUCT = ("2*tokens*tokens*hidden/ranks",)
_NAIVE = (
    "naive attention: the N x N scores are kept; forward only, batch 1, full square (no causal "
    "mask), no softmax"
)
_FLASH = (
    "flash attention: scores never reach memory; forward only, batch 1; a causal mask leaves half "
    "the square, and every rank the same share of it (tokens dealt out from both ends)"
)


def ulysses(ask: Ask) -> Program:
    """An all-to-all trades tokens for heads, and another back (Jacobs et al., arXiv 2309.14509)."""
    check_heads(ask)
    check_ulysses(ask.heads, ask.ranks)
    divided("tokens", ask.tokens, ask.ranks, "every rank holds the same share")
    copies = kv_copies(ask.heads, ask.kv_heads, ask.ranks)
    sent = ("ranks", _N, "heads/ranks", "head_size")
    steps = (
        *_start(),
        *_tokens_to_heads("kv_heads/ranks" if copies == 1 else "kv_heads*kv_copies/ranks"),
        *_attend(ask, heads="heads/ranks", queries="tokens", suffix="_heads"),
        Step(
            "group by token",
            "out = reorder(out): tokens of one rank side by side",
            (Tensor("out", sent, "copied" if ask.attention == "naive" else "view"),),
        ),
        Step(
            "heads to tokens",
            "out_tokens = all_to_all(out)",
            (Tensor("out_tokens", sent, "received"),),
            sends=(Send("all-to-all", GROUP, sent),),
        ),
        _join("out_tokens"),
        _output("out_tokens"),
    )
    kv_heads = ask.kv_heads * copies // ask.ranks
    program = _program(ask, "ulysses", steps, ask.heads // ask.ranks, kv_heads)
    if copies == 1:
        return program
    note = f"kv_copies: KV heads do not deal out to the ranks, each is sent {copies} times"
    sizes = program.sizes | {"kv_copies": copies}
    return replace(program, sizes=sizes, notes=(*program.notes, note))


def _tokens_to_heads(kv: str) -> tuple[Step, Step]:
    """`kv`: KV heads of a rank."""
    named = {"q": "heads/ranks", "k": kv, "v": kv}
    sent = {name: ("ranks", _N, heads, "head_size") for name, heads in named.items()}
    group = Step(
        "group by owner",
        "q_heads = reorder(q), same for k and v: heads of one rank side by side",
        tuple(Tensor(f"{name}_heads", dims, "copied") for name, dims in sent.items()),
    )
    trade = Step(
        "tokens to heads",
        "q_heads = all_to_all(q_heads), same for k and v",
        tuple(
            Tensor(f"{name}_heads", ("tokens", heads, "head_size"), "received")
            for name, heads in named.items()
        ),
        sends=tuple(Send("all-to-all", GROUP, dims) for dims in sent.values()),
    )
    return group, trade


def allgather(ask: Ask) -> Program:
    """Every rank gathers all keys and values for its own queries (Llama 3, arXiv 2407.21783)."""
    _check_sequence(ask, "allgather")
    gather = Step(
        "gather keys, values",
        "k_all = all_gather(k), v_all = all_gather(v)",
        (Tensor("k_all", _WHOLE_KV, "received"), Tensor("v_all", _WHOLE_KV, "received")),
        sends=(Send("all-gather", GROUP, _WHOLE_KV),) * 2,
    )
    if ask.attention == "naive":
        attend = _attend(ask, heads="heads", queries=_N, suffix="_all")
    else:
        attend = _spans(ask)
    steps = (*_start(), gather, *attend, _join("out"), _output("out"))
    return _program(ask, "allgather", steps, ask.heads, ask.kv_heads)


def _spans(ask: Ask) -> tuple[Step, ...]:
    """Each half of the queries against all keys before it, and causally against its own.

    Half i of 2 x ranks sees i chunks of keys whole and half of its own: over both halves that is
    the same on every rank.
    """
    halves = _block(ask, f"{_N}/2")
    return (
        Step(
            "put in order",
            "k_all, v_all = tokens in the order of the sequence",
            (Tensor("k_all", _WHOLE_KV, "copied"), Tensor("v_all", _WHOLE_KV, "copied")),
        ),
        Step("start sums", "out_fp32 = 0, lse = -inf", _sums(ask)),
        Step(
            "attend",
            "out_fp32, lse += attention(half of q, keys before it and its own), both halves",
            halves,
            flops=_PRODUCT,
            frees=tuple(tensor.name for tensor in halves),
        ),
        _cast(ask),
    )


def ring(ask: Ask) -> Program:
    """The next block of keys and values arrives while this one is attended to; what the blocks give
    is joined in fp32 (Liu et al., arXiv 2310.01889). Tokens are dealt out from both ends, so that
    under a causal mask every round computes half of its block on every rank."""
    _check_sequence(ask, "ring")
    pack = Step(
        "pack",
        "kv = [k, v]: one message a round; out_fp32 = 0",
        (Tensor("kv", _RING_KV, "copied"), *_sums(ask)),
    )
    steps = (*_start(), pack, *_rounds(ask), _cast(ask), _join("out"), _output("out"))
    return _program(ask, "ring", steps, ask.heads, ask.kv_heads)


def _rounds(ask: Ask) -> list[Step]:
    """Every round, equal neighbours folded into one step that is done several times."""
    folded: list[Step] = []
    first = 1
    for step, run in groupby(_round(ask, number) for number in range(ask.ranks)):
        times = len(list(run))
        name = f"round {first}" if times == 1 else f"rounds {first}-{first + times - 1}"
        folded.append(replace(step, name=name, times=times))
        first += times
    return folded


def _round(ask: Ask, number: int) -> Step:
    """Keys at hand come from `number` ranks back. From a lower rank only their early half lies
    before ours; from a higher one only our late half lies after theirs."""
    last = number == ask.ranks - 1
    naive = ask.attention == "naive"
    late = not naive and number > ask.rank
    seen = "q, kv" if naive or not number else "late half of q, kv" if late else "q, early kv"
    blocks = _block(ask, f"{_N}/2" if late else _N)
    scores = (Tensor("scores", ("heads", _N, _N)),) if naive else ()
    received = () if last else (Tensor("kv_next", _RING_KV, "received"),)
    # Full square: 4 tokens tokens hidden / ranks^2 a round; the causal mask leaves half of it.
    share = 4 if naive else 2
    what = "scores x kv[v], scores = q x kv[k]^T" if naive else f"attention({seen})"
    return Step(
        "round",
        f"out_fp32 += {what}" + ("" if last else "; meanwhile kv_next arrives"),
        (*received, *scores, *blocks),
        flops=(f"{share}*tokens*tokens*hidden/ranks/ranks",),
        sends=() if last else (Send("send", GROUP, _RING_KV),),
        frees=tuple(tensor.name for tensor in (*scores, *blocks)),
        moves=() if last else (("kv_next", "kv"),),
    )


def _sums(ask: Ask) -> tuple[Tensor, ...]:
    """Running result of attention in blocks."""
    out = Tensor("out_fp32", ("heads", _N, "head_size"), dtype=ask.wide)
    row = Tensor("lse", ("heads", _N), dtype=ask.wide)
    return (out, row) if ask.attention == "flash" else (out,)


def _block(ask: Ask, queries: str) -> tuple[Tensor, ...]:
    """One block's result; with a softmax also its row sums and its share of the sum, widened."""
    out = Tensor("block", ("heads", queries, "head_size"))
    if ask.attention == "naive":
        return (out,)
    row = Tensor("block_lse", ("heads", queries), dtype=ask.wide)
    return out, row, Tensor("block_fp32", out.dims, dtype=ask.wide)


def _cast(ask: Ask) -> Step:
    out = Tensor("out", ("heads", _N, "head_size"), "copied")
    return Step("cast", f"out = {ask.dtype}(out_fp32)", (out,), frees=("out_fp32",))


def _join(name: str) -> Step:
    formula = f"{name} = reorder({name}): heads of one token side by side"
    return Step("join heads", formula, (Tensor(name, (_N, "hidden"), "copied"),))


def _check_sequence(ask: Ask, kind: str) -> None:
    """A causal mask needs two chunks a rank, an early one and a late one, for equal work."""
    check_heads(ask)
    chunks = ask.ranks if ask.attention == "naive" else 2 * ask.ranks
    divided("tokens", ask.tokens, chunks, f"{kind} cuts the sequence into equal chunks")


def _program(ask: Ask, kind: Kind, steps: tuple[Step, ...], heads: int, kv_heads: int) -> Program:
    """The sequence group is the whole world, whatever axes it is made of."""
    sizes = {name: getattr(ask, name) for name in ("tokens", "hidden", "heads", "kv_heads")}
    return Program(
        kind=kind,
        ranks=ask.ranks,
        sizes=sizes | {"head_size": ask.hidden // ask.heads, "ranks": ask.ranks},
        dtype=ask.dtype,
        groups=(AxisGroups(GROUP, (tuple(range(ask.ranks)),)),),
        steps=steps,
        per_rank={"heads": heads, "kv_heads": kv_heads, "tokens": ask.tokens // ask.ranks},
        rank=ask.rank,
        notes=(_NAIVE if ask.attention == "naive" else _FLASH,),
    )


def _start() -> tuple[Step, Step]:
    square, narrow = ("hidden", "hidden"), ("hidden", "kv_heads*head_size")
    weights = (("Q", square), ("K", narrow), ("V", narrow), ("O", square))
    hold = Step(
        "hold",
        "input: tokens of this rank; Q, K, V, O: whole on every rank",
        (Tensor("input", (_N, "hidden")), *(Tensor(*weight) for weight in weights)),
    )
    kv_flops = "2*tokens*hidden*kv_heads*head_size/ranks"
    kv = (_N, "kv_heads", "head_size")
    project = Step(
        "project",
        "q = input x Q, k = input x K, v = input x V",
        (Tensor("q", (_N, "heads", "head_size")), Tensor("k", kv), Tensor("v", kv)),
        flops=("2*tokens*hidden*hidden/ranks", kv_flops, kv_flops),
    )
    return hold, project


def _output(source: str) -> Step:
    output = Tensor("output", (_N, "hidden"))
    return Step("output", f"output = {source} x O", (output,), ("2*tokens*hidden*hidden/ranks",))


def _attend(ask: Ask, *, heads: str, queries: str, suffix: str) -> tuple[Step, ...]:
    """Queries of this rank against all keys: tokens*tokens*hidden/ranks multiply-adds a product."""
    queried = f"q{suffix}" if queries == "tokens" else "q"
    if ask.attention == "flash":
        out = Tensor("out", (queries, heads, "head_size"))
        row = Tensor("lse", (heads, queries), dtype=ask.wide)
        formula = f"out = attention({queried}, k{suffix}, v{suffix}), lse = its row sums"
        return (Step("attend", formula, (out, row), _PRODUCT),)
    scores = Tensor("scores", (heads, queries, "tokens"))
    out = Tensor("out", (heads, queries, "head_size"))
    return (
        Step("scores", f"scores = {queried} x k{suffix}^T", (scores,), _PRODUCT),
        Step("mix", f"out = scores x v{suffix}", (out,), _PRODUCT),
    )
