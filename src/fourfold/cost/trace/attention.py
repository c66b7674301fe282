"""Steps of attention when the sequence is divided over all ranks: Ulysses, all-gather, ring."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from fourfold.cost.trace.steps import (
    Ask,
    AxisGroups,
    Call,
    Kind,
    Program,
    Step,
    call,
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
        call("input", _JOINED),
        call("Q", ("hidden", "hidden")),
        call("K", ("hidden", "kv_heads*head_size")),
        call("V", ("hidden", "kv_heads*head_size")),
        call("O", ("hidden", "hidden")),
        note="input: tokens of this rank; Q, K, V, O: whole on every rank",
    ),
    step(
        "project",
        call("q = input x Q", _QUERIES),
        call("k = input x K", _KEYS),
        call("v = input x V", _KEYS),
    ),
)
_CAST = step("cast", call("out = cast(out_fp32)", _OUT), frees=("out_fp32",))


def _end(name: str) -> tuple[Step, Step]:
    joined = call(f"{name} = by_head({name})", _JOINED)
    return (
        step("join heads", joined, note="heads of one token side by side"),
        step("output", call(f"output = {name} x O", _JOINED)),
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
    by_owner = (call(f"{x}_heads = by_owner({x})", owned[x]) for x in heads)
    exchanged = (call(f"{x}_heads = all_to_all({x}_heads)", whole[x]) for x in heads)
    # The kernel's result is token-major already, a product's is not.
    by_token = "parts" if ask.attention == "flash" else "by_token"
    grouped = call(f"out = {by_token}(out)", owned["q"])
    steps = (
        *_START,
        step("group by owner", *by_owner, note="heads of one rank side by side"),
        step("tokens to heads", *exchanged),
        *_attend(ask, "_heads", heads="heads/ranks", queries="tokens"),
        step("group by token", grouped, note="tokens of one rank side by side"),
        step("heads to tokens", call("out_tokens = all_to_all(out)", owned["q"])),
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
        text = f"out, lse = attention({q}, k{suffix}, v{suffix})"
        made = call(text, (queries, heads, "head_size"), (heads, queries))
        return (step("attend", made, note="lse: its row sums"),)
    scores, out = (heads, queries, "tokens"), (heads, queries, "head_size")
    return (
        step("scores", call(f"scores = {q} x k{suffix}^T", scores)),
        step("mix", call(f"out = scores x v{suffix}", out)),
    )


def allgather(ask: Ask) -> Program:
    """Every rank gathers all keys and values for its own queries (Llama 3, arXiv 2407.21783).
    Each half of the queries looks at all keys before it, and causally at its own: half i of
    2 x ranks at i chunks whole and half of its own, over both halves the same on every rank."""
    _check_sequence(ask, "allgather")
    gather = step(
        "gather keys, values",
        call("k_all = all_gather(k)", _ALL_KEYS),
        call("v_all = all_gather(v)", _ALL_KEYS),
    )
    attend = _attend(ask, "_all", heads="heads", queries=_N)
    if ask.attention == "flash":
        ordered = (call(f"{x}_all = in_order({x}_all)", _ALL_KEYS) for x in "kv")
        halves = _block("attention_of_halves(q, k_all, v_all)", f"{_N}/2")
        note = "each half of q, keys before it and its own; added to out_fp32, lse"
        attend = (
            step("put in order", *ordered, note="tokens in the order of the sequence"),
            step("start sums", _start_sums()),
            step("attend", halves, note=note, frees=halves.names),
            _CAST,
        )
    steps = (*_START, gather, *attend, *_end("out"))
    return _attention(ask, "allgather", steps, ask.heads, ask.kv_heads)


def ring(ask: Ask) -> Program:
    """The next block of keys and values arrives while this one is attended to; what the blocks give
    is joined in fp32 (Liu et al., arXiv 2310.01889). Tokens are dealt out from both ends, so that
    under a causal mask every round computes half of its block on every rank."""
    _check_sequence(ask, "ring")
    sums = _start_sums() if ask.attention == "flash" else call("out_fp32 = zeros(q)", _OUT)
    pack = step("pack", call("kv = stack(k, v)", _PAIR), sums, note="kv: one message a round")
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
    sent = () if last else (call("kv_next = send(kv)", _PAIR),)
    if ask.attention == "naive":
        computed = (
            call("scores = q x kv[0]^T", (*_ROWS, _N)),
            call("block = scores x kv[1]", _OUT),
            call("out_fp32 += block"),
        )
        note = ""
    else:
        late = number > ask.rank
        seen = "q, kv" if not number else "late q, kv" if late else "q, early kv"
        computed = (_block(f"attention_of_block({seen})", f"{_N}/2" if late else _N),)
        note = "added to out_fp32, lse"
    return step(
        "round",
        *sent,
        *computed,
        note=note,
        frees=tuple(name for made in computed for name in made.names),
        moves=() if last else (("kv_next", "kv"),),
    )


def _start_sums() -> Call:
    """Running result of attention in blocks, and its row sums."""
    return call("out_fp32, lse = start_sums(q)", _OUT, _ROWS)


def _block(text: str, queries: str) -> Call:
    """One block's result, its row sums and its share of the sum, widened."""
    out = ("heads", queries, "head_size")
    return call(f"block, block_lse, block_fp32 = {text}", out, out[:2], out)


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
