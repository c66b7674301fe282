"""Attention over a sequence that is divided over ranks, forward: every copy, message and kernel of
a rank, with the tensors it writes, as people write it by hand.

`exchanged` says what travels: a step's price is a sum over it (cost/ops/layer.py). A trace prints
the operations (cost/trace), and its run performs them (engine/trace/steps.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Literal

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.ops.op import Dim, Op, Part, Sizes, Tensor
from fourfold.spec.words import CpKind

_message = partial(Op, kind="collective", axis="cp")
_all_to_all = partial(_message, function="all-to-all")
_copy = partial(Op, kind="copy")
_ONE: Dim = 1.0


def exchanged(c: Columns, s: Sizes, kind: CpKind) -> tuple[Tensor, ...]:
    """Return what a rank has received when its attention is over; of a ring, of each hop. Ulysses
    sends a KV head to several ranks where there are too few."""
    heads, kv_heads = c.heads / c.tp, c.kv_heads / c.tp
    if kind == "ring":
        return (Tensor("kv_next", (2, s.tokens, kv_heads, c.head_size)),)
    every = s.tokens * c.cp
    if kind == "allgather":
        return tuple(Tensor(f"{x}_all", (every, kv_heads, c.head_size)) for x in "kv")
    dealt = kv_heads * c.kv_copies / c.cp
    return (
        Tensor("q_heads", (every, heads / c.cp, c.head_size)),
        Tensor("k_heads", (every, dealt, c.head_size)),
        Tensor("v_heads", (every, dealt, c.head_size)),
        Tensor("out_tokens", (c.cp, s.tokens, heads / c.cp, c.head_size)),
    )


def exchanged_bytes(c: Columns, s: Sizes, kind: CpKind) -> Floats:
    """Return the whole buffers of those messages; of a ring, of the keys that go round it."""
    rounds = c.cp if kind == "ring" else 1.0
    return c.act_bytes * rounds * sum(prod(tensor.dims) for tensor in exchanged(c, s, kind))


def ulysses(c: Columns, s: Sizes, *, is_flash: bool, rank: int = 0) -> Iterator[Op]:
    """An all-to-all trades tokens for heads, and another back (Jacobs et al., arXiv 2309.14509)."""
    *there, back = exchanged(c, s, "ulysses")
    for tensor in there:
        _, heads, size = tensor.dims
        owned = Tensor(tensor.name, (c.cp, s.tokens, heads, size))
        name = tensor.name.removesuffix("_heads")
        yield _copy("group by owner", function="by_owner", writes=(owned,), reads=(name,))
    for tensor in there:
        yield _all_to_all("tokens to heads", writes=(tensor,), reads=(tensor.name,))
    queries, heads, size = there[0].dims
    inputs = tuple(tensor.name for tensor in there)
    yield from _attend(c, queries, heads, inputs, is_flash=is_flash)
    grouped = Tensor("out", back.dims)
    if is_flash:  # the kernel's result is token-major already, a product's is not
        yield Op("group by token", "view", function="parts", writes=(grouped,), reads=("out",))
    else:
        yield _copy("group by token", function="by_token", writes=(grouped,), reads=("out",))
    yield _all_to_all("heads to tokens", writes=(back,), reads=("out",))
    yield _joined(c, s, back.name)


def _attend(
    c: Columns, queries: Dim, heads: Dim, inputs: tuple[str, ...], *, is_flash: bool
) -> Iterator[Op]:
    """Queries of this rank against all keys of the sequence."""
    size, keys, (q, k, v) = c.head_size, c.seq, inputs
    if is_flash:
        outputs = (Tensor("out", (queries, heads, size)), Tensor("lse", (heads, queries), True))
        yield _core("attend", queries * heads * size, keys, outputs, inputs)
        return
    scores = Tensor("scores", (heads, queries, keys))
    yield _by_head("scores", scores, size, q, Part(k, transposed=True))
    yield _by_head("mix", Tensor("out", (heads, queries, size)), keys, "scores", v)


def _core(
    name: str,
    queries: Dim,
    keys: Dim,
    outputs: tuple[Tensor, ...],
    inputs: tuple[str | Part, ...],
    function: str = "attention",
) -> Op:
    """Return causal attention in one kernel."""
    work = partial(Op, name, "attention", m=_ONE, n=queries, k=keys)
    return work(function=function, writes=outputs, reads=inputs)


def _by_head(name: str, output: Tensor, inner: Dim, left: str, right: str | Part) -> Op:
    """Return a product for every head."""
    groups, m, n = output.dims
    work = partial(Op, name, "grouped product", groups=groups, m=m, n=n, k=inner)
    return work(writes=(output,), reads=(left, right))


def allgather(c: Columns, s: Sizes, *, is_flash: bool, rank: int = 0) -> Iterator[Op]:
    """Every rank gathers all keys and values for its own queries (Llama 3, arXiv 2407.21783).
    Each half of the queries looks at all keys before it, and causally at its own: half i of
    2 x ranks at i chunks whole and half of its own, over both halves the same on every rank."""
    keys, heads, names = exchanged(c, s, "allgather"), c.heads / c.tp, ("q", "k_all", "v_all")
    gather = partial(_message, "gather keys, values", function="all-gather")
    for tensor, source in zip(keys, "kv", strict=True):
        yield gather(writes=(tensor,), reads=(source,))
    if not is_flash:
        yield from _attend(c, s.tokens, heads, names, is_flash=False)
    else:
        for tensor in keys:
            order = {"writes": (tensor,), "reads": (tensor.name,)}
            yield _copy("put in order", function="in_order", **order)
        yield _start_sums(c, s, "start sums", is_flash=True)
        yield _block(c, s, "attend", "halves", s.tokens / 2, names, c.seq)
        yield _cast(c, s)
    yield _joined(c, s, "out")


def ring(c: Columns, s: Sizes, *, is_flash: bool, rank: int = 0) -> Iterator[Op]:
    """The next block of keys and values arrives while this one is attended to; what the blocks give
    is joined in fp32 (Liu et al., arXiv 2310.01889). Tokens are dealt out from both ends, so that
    under a causal mask every round computes half of its block on every rank."""
    (keys,) = exchanged(c, s, "ring")
    stacked = Tensor("kv", keys.dims)
    yield _copy("pack", function="stack", writes=(stacked,), reads=("k", "v"))
    yield _start_sums(c, s, "pack", is_flash=is_flash)
    rounds = int(c.cp)
    for number in range(rounds):
        name = f"round {number + 1}"
        if number < rounds - 1:
            yield Op(name, "send", function="send", axis="cp", writes=(keys,), reads=("kv",))
        yield from _round(c, s, name, number, rank) if is_flash else _plain_round(c, s, name)
    yield _cast(c, s)
    yield _joined(c, s, "out")


def _round(c: Columns, s: Sizes, name: str, number: int, rank: int) -> Iterator[Op]:
    """Keys at hand come from `number` ranks back. From a lower rank only their early half lies
    before ours; from a higher one only our late half lies after theirs."""
    late = number > rank
    inputs = (
        Part("q", half="late") if late else "q",
        Part("kv", half="early") if number and not late else "kv",
    )
    yield _block(c, s, name, "block", s.tokens / 2 if late else s.tokens, inputs, s.tokens)


def _plain_round(c: Columns, s: Sizes, name: str) -> Iterator[Op]:
    heads = c.heads / c.tp
    scores = Tensor("scores", (heads, s.tokens, s.tokens), brief=True)
    block = Tensor("block", (heads, s.tokens, c.head_size), brief=True)
    yield _by_head(name, scores, c.head_size, "q", Part("kv", 0, transposed=True))
    yield _by_head(name, block, s.tokens, "scores", Part("kv", 1))
    yield Op(name, "elementwise", function="+=", reads=("out_fp32", "block"))


def _block(
    c: Columns,
    s: Sizes,
    name: str,
    what: Literal["halves", "block"],
    queries: Dim,
    inputs: tuple[str | Part, ...],
    keys: Dim,
) -> Op:
    """Return attention of all queries to these keys, half of them masked or left out: its result,
    its row sums and its share of the sum in fp32."""
    heads = c.heads / c.tp
    dims = (heads, queries, c.head_size)
    outputs = (
        Tensor("block", dims, brief=True),
        Tensor("block_lse", dims[:2], wide=True, brief=True),
        Tensor("block_fp32", dims, wide=True, brief=True),
    )
    every = s.tokens * heads * c.head_size
    return _core(name, every, keys, outputs, inputs, f"attention_of_{what}")


def _result(c: Columns, s: Sizes, name: str, *, wide: bool) -> Tensor:
    return Tensor(name, (c.heads / c.tp, s.tokens, c.head_size), wide)


def _start_sums(c: Columns, s: Sizes, name: str, *, is_flash: bool) -> Op:
    """Return zeros to which blocks are added; with sums of rows, where those join the blocks."""
    sums = _result(c, s, "out_fp32", wide=True)
    rows = (Tensor("lse", sums.dims[:2], wide=True),) if is_flash else ()
    function = "start_sums" if is_flash else "zeros"
    return Op(name, "elementwise", function=function, writes=(sums, *rows), reads=("q",))


def _cast(c: Columns, s: Sizes) -> Op:
    out = _result(c, s, "out", wide=False)
    return _copy("cast", function="cast", writes=(out,), reads=("out_fp32",))


def _joined(c: Columns, s: Sizes, name: str) -> Op:
    joined = Tensor(name, (s.tokens, c.heads / c.tp * c.head_size))
    return _copy("join heads", function="by_head", writes=(joined,), reads=(name,))


DIVIDED: dict[CpKind, Callable[..., Iterator[Op]]] = {
    "ulysses": ulysses,
    "allgather": allgather,
    "ring": ring,
}
