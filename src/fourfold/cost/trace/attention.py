"""Steps of attention when the sequence is divided over all ranks: Ulysses, all-gather, ring."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Literal

from fourfold.cost.trace.operations import (
    AttentionCore,
    Operation,
    TensorInput,
    TensorOutput,
    add_to,
    communication,
    copy,
    gemm,
    given,
    parts,
    scores_gemm,
    start_sums,
)
from fourfold.cost.trace.steps import (
    Ask,
    AxisGroups,
    Kind,
    Program,
    Step,
    check_heads,
    check_ulysses,
    divided,
    kv_copies,
    step,
)

_N = "tokens/ranks"
_QUERIES = (_N, "heads", "head_size")
_KEYS = (_N, "kv_heads", "head_size")
_ALL_KEYS = ("tokens", "kv_heads", "head_size")
_PAIR = ("2", *_KEYS)
_ROWS = ("heads", _N)  # a number for every head and query
_OUT = (*_ROWS, "head_size")
_JOINED = (_N, "hidden")
_NAIVE = (
    "naive attention: the N x N scores are kept; forward only, batch 1, full square (no causal "
    "mask), no softmax"
)
_FLASH = (
    "flash attention: scores never reach memory; forward only, batch 1; a causal mask leaves half "
    "the square, and every rank the same share of it (tokens dealt out from both ends)"
)
_START = (
    step(
        "hold",
        given("input", *_JOINED),
        given("Q", "hidden", "hidden"),
        given("K", "hidden", "kv_heads*head_size"),
        given("V", "hidden", "kv_heads*head_size"),
        given("O", "hidden", "hidden"),
        note="input: tokens of this rank; Q, K, V, O: whole on every rank",
    ),
    step(
        "project",
        gemm("q", _QUERIES, "input", "Q"),
        gemm("k", _KEYS, "input", "K"),
        gemm("v", _KEYS, "input", "V"),
    ),
)
_CAST = step("cast", copy("cast", "out", _OUT, "out_fp32"), frees=("out_fp32",))


# Running result of attention in blocks, and its row sums.
_START_SUMS = start_sums(TensorOutput("out_fp32", _OUT), TensorOutput("lse", _ROWS))


def _end(name: str) -> tuple[Step, Step]:
    joined = copy("by_head", name, _JOINED, name)
    return (
        step("join heads", joined, note="heads of one token side by side"),
        step("output", gemm("output", _JOINED, name, "O")),
    )


def ulysses(ask: Ask) -> Program:
    """An all-to-all trades tokens for heads, and another back (Jacobs et al., arXiv 2309.14509)."""
    check_heads(ask)
    check_ulysses(ask.heads, ask.ranks)
    divided("tokens", ask.tokens, ask.ranks, "every rank holds the same share")
    copies = kv_copies(ask.heads, ask.kv_heads, ask.ranks)
    kv = "kv_heads/ranks" if copies == 1 else "kv_heads*kv_copies/ranks"
    heads = {"q": "heads/ranks", "k": kv, "v": kv}
    owned = {x: ("ranks", _N, mine, "head_size") for x, mine in heads.items()}
    whole = {x: ("tokens", mine, "head_size") for x, mine in heads.items()}
    by_owner = (copy("by_owner", f"{x}_heads", owned[x], x) for x in heads)
    exchanged = (communication("all-to-all", f"{x}_heads", whole[x], f"{x}_heads") for x in heads)
    # The kernel's result is token-major already, a product's is not.
    grouped = (
        parts("out", owned["q"], "out")
        if ask.attention == "flash"
        else copy("by_token", "out", owned["q"], "out")
    )
    steps = (
        *_START,
        step("group by owner", *by_owner, note="heads of one rank side by side"),
        step("tokens to heads", *exchanged),
        *_attend(ask, "_heads", heads="heads/ranks", queries="tokens"),
        step("group by token", grouped, note="tokens of one rank side by side"),
        step("heads to tokens", communication("all-to-all", "out_tokens", owned["q"], "out")),
        *_end("out_tokens"),
    )
    kv_heads = ask.kv_heads * copies // ask.ranks
    program = _attention(ask, "ulysses", steps, ask.heads // ask.ranks, kv_heads)
    if copies == 1:
        return program
    note = f"kv_copies: KV heads do not deal out to the ranks, each is sent {copies} times"
    sizes = program.sizes | {"kv_copies": copies}
    return replace(program, sizes=sizes, notes=(*program.notes, note))


def _attend(ask: Ask, suffix: str, *, heads: str, queries: str) -> tuple[Step, ...]:
    """Queries of this rank against all keys."""
    q = f"q{suffix}" if queries == "tokens" else "q"
    if ask.attention == "flash":
        outputs = (
            TensorOutput("out", (queries, heads, "head_size")),
            TensorOutput("lse", (heads, queries)),
        )
        inputs = TensorInput(q), TensorInput(f"k{suffix}"), TensorInput(f"v{suffix}")
        return (step("attend", AttentionCore(outputs, inputs), note="lse: its row sums"),)
    scores, out = (heads, queries, "tokens"), (heads, queries, "head_size")
    return (
        step("scores", scores_gemm(scores, q, f"k{suffix}")),
        step("mix", gemm("out", out, "scores", f"v{suffix}")),
    )


def allgather(ask: Ask) -> Program:
    """Every rank gathers all keys and values for its own queries (Llama 3, arXiv 2407.21783).
    Each half of the queries looks at all keys before it, and causally at its own: half i of
    2 x ranks at i chunks whole and half of its own, over both halves the same on every rank."""
    _check_sequence(ask, "allgather")
    gather = step(
        "gather keys, values",
        communication("all-gather", "k_all", _ALL_KEYS, "k"),
        communication("all-gather", "v_all", _ALL_KEYS, "v"),
    )
    attend = _attend(ask, "_all", heads="heads", queries=_N)
    if ask.attention == "flash":
        ordered = (copy("in_order", f"{x}_all", _ALL_KEYS, f"{x}_all") for x in "kv")
        halves = _block(
            "attention_of_halves",
            f"{_N}/2",
            TensorInput("q"),
            TensorInput("k_all"),
            TensorInput("v_all"),
        )
        note = "each half of q, keys before it and its own; added to out_fp32, lse"
        attend = (
            step("put in order", *ordered, note="tokens in the order of the sequence"),
            step("start sums", _START_SUMS),
            step("attend", halves, note=note, frees=_names(halves)),
            _CAST,
        )
    steps = (*_START, gather, *attend, *_end("out"))
    return _attention(ask, "allgather", steps, ask.heads, ask.kv_heads)


def ring(ask: Ask) -> Program:
    """The next block of keys and values arrives while this one is attended to; what the blocks give
    is joined in fp32 (Liu et al., arXiv 2310.01889). Tokens are dealt out from both ends, so that
    under a causal mask every round computes half of its block on every rank."""
    _check_sequence(ask, "ring")
    sums = _START_SUMS if ask.attention == "flash" else start_sums(TensorOutput("out_fp32", _OUT))
    pack = step("pack", copy("stack", "kv", _PAIR, "k", "v"), sums, note="kv: one message a round")
    steps = (*_START, pack, *_rounds(ask), _CAST, *_end("out"))
    return _attention(ask, "ring", steps, ask.heads, ask.kv_heads)


def _rounds(ask: Ask) -> list[Step]:
    """Every round, equal neighbours folded into one step that is done several times."""
    folded: list[Step] = []
    first = 1
    for one, run in groupby(_round(ask, number) for number in range(ask.ranks)):
        times = len(list(run))
        name = f"round {first}" if times == 1 else f"rounds {first}-{first + times - 1}"
        folded.append(replace(one, name=name, times=times))
        first += times
    return folded


def _round(ask: Ask, number: int) -> Step:
    """Keys at hand come from `number` ranks back. From a lower rank only their early half lies
    before ours; from a higher one only our late half lies after theirs."""
    last = number == ask.ranks - 1
    sent = () if last else (communication("send", "kv_next", _PAIR, "kv"),)
    if ask.attention == "naive":
        computed = (
            scores_gemm((*_ROWS, _N), "q", TensorInput("kv", 0)),
            gemm("block", _OUT, "scores", TensorInput("kv", 1)),
            add_to("out_fp32", "block"),
        )
        note = ""
    else:
        late = number > ask.rank
        queries = TensorInput("q", half="late" if late else "")
        keys = TensorInput("kv", half="early" if number and not late else "")
        computed = (_block("attention_of_block", f"{_N}/2" if late else _N, queries, keys),)
        note = "added to out_fp32, lse"
    moves = () if last else (("kv_next", "kv"),)
    return Step("round", (*sent, *computed), note, _names(*computed), moves)


def _block(
    function: Literal["attention_of_halves", "attention_of_block"],
    queries: str,
    *inputs: TensorInput,
) -> AttentionCore:
    """Return one block's result, its row sums and its share of the sum in fp32."""
    dims = ("heads", queries, "head_size")
    outputs = (
        TensorOutput("block", dims),
        TensorOutput("block_lse", dims[:2]),
        TensorOutput("block_fp32", dims),
    )
    return AttentionCore(outputs, inputs, function=function)


def _names(*operations: Operation) -> tuple[str, ...]:
    return tuple(output.name for operation in operations for output in operation.outputs)


def _check_sequence(ask: Ask, kind: str) -> None:
    """A causal mask needs two chunks a rank, an early one and a late one, for equal work."""
    check_heads(ask)
    chunks = ask.ranks if ask.attention == "naive" else 2 * ask.ranks
    divided("tokens", ask.tokens, chunks, f"{kind} cuts the sequence into equal chunks")


def _attention(ask: Ask, kind: Kind, steps: tuple[Step, ...], heads: int, kv_heads: int) -> Program:
    """The sequence group is the whole world, whatever axes it is made of."""
    sizes = {name: getattr(ask, name) for name in ("tokens", "hidden", "heads", "kv_heads")}
    return Program(
        kind=kind,
        ranks=ask.ranks,
        sizes=sizes | {"head_size": ask.hidden // ask.heads, "ranks": ask.ranks},
        dtype=ask.dtype,
        groups=(AxisGroups("sequence", (tuple(range(ask.ranks)),)),),
        steps=steps,
        per_rank={"heads": heads, "kv_heads": kv_heads, "tokens": ask.tokens // ask.ranks},
        rank=ask.rank,
        notes=(_NAIVE if ask.attention == "naive" else _FLASH,),
    )
