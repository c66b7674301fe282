"""Context parallelism: each rank holds part of every sequence; only attention looks beyond it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fourfold.engine.compat import activation_dtype
from fourfold.engine.model.decoder import Decoder
from fourfold.engine.model.layers import Core
from fourfold.engine.model.positions import Tables, alibi_bias, make_tables
from fourfold.engine.parallel.blocks import BlockGradients, JoinedBlocks, Span, cut
from fourfold.engine.parallel.groups import Group, TwoWay, World, gathered, start_exchange, wait
from fourfold.spec.model import kv_copies
from fourfold.spec.run import RunSpec


def zigzag(seq_len: int, parts: int, part: int, device: torch.device | str) -> Tensor:
    """Global positions that context rank `part` holds: of 2P chunks the r-th and the r-th last, so
    that every rank has the same work under a causal mask."""
    chunk = seq_len // (2 * parts)
    early = torch.arange(part * chunk, (part + 1) * chunk, device=device)
    late = torch.arange((2 * parts - 1 - part) * chunk, (2 * parts - part) * chunk, device=device)
    return torch.cat([early, late])


def span_of(step: int, rank: int, ranks: int, tokens: int) -> Span:
    """What is computed when the keys at hand come from `step` ranks back."""
    half, source = tokens // 2, (rank - step) % ranks
    if step == 0:
        return Span((0, tokens), (0, tokens), True)
    if source < rank:  # their late chunk lies after all of ours
        return Span((0, tokens), (0, half), False)
    return Span((half, tokens), (0, tokens), False)  # our early chunk lies before all of theirs


def start_rotate(x: Tensor, group: Group) -> Tensor:
    """Send to the next rank, receive from the one before; must be waited for."""
    rows = x.shape[0]
    sent, received = [0] * group.size, [0] * group.size
    sent[(group.rank + 1) % group.size] = rows
    received[(group.rank - 1) % group.size] = rows
    return start_exchange(x, group, sent, received)


class _Bias:
    """ALiBi between this rank's queries and the keys of another rank; None without ALiBi."""

    def __init__(self, slopes: Tensor | None, tokens: int, group: Group) -> None:
        self.slopes, self.seq_len, self.group = slopes, tokens * group.size, group

    def at(self, step: int, span: Span) -> Tensor | None:
        if self.slopes is None:
            return None
        parts, rank = self.group.size, self.group.rank
        queries = zigzag(self.seq_len, parts, rank, self.slopes.device)
        keys = zigzag(self.seq_len, parts, (rank - step) % parts, self.slopes.device)
        return alibi_bias(self.slopes, queries[slice(*span.queries)], keys[slice(*span.keys)])


class _Ring(torch.autograd.Function):
    """Keys and values travel around the ranks while each uses what it has: two buffers, no more."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, group: Group
    ) -> Tensor:
        tokens, kv = q.shape[2], torch.stack([k, v])
        bias, joined = _Bias(slopes, tokens, group), JoinedBlocks(q)
        for step in range(group.size):
            following = start_rotate(kv, group) if step + 1 < group.size else None
            span = span_of(step, group.rank, group.size, tokens)
            joined.attend(q, kv[0], kv[1], span, bias.at(step, span))
            if following is not None:
                kv = wait(following)
        out = joined.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, joined.lse)
        ctx.group, ctx.bias = group, bias
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        group, tokens, kv = ctx.group, q.shape[2], torch.stack([k, v])
        sums = BlockGradients(grads[0], q, out, lse)
        dkv = torch.zeros_like(kv, dtype=sums.dq.dtype)
        arriving: Tensor | None = None
        for step in range(group.size):
            following = start_rotate(kv, group) if step + 1 < group.size else None
            span = span_of(step, group.rank, group.size, tokens)
            dk, dv = sums.add(kv[0], kv[1], span, ctx.bias.at(step, span))
            # The gradient of the keys at hand comes with them, one hop behind the computation.
            if arriving is not None:
                dkv = wait(arriving)
            cut(dkv[0], span.keys).add_(dk)
            cut(dkv[1], span.keys).add_(dv)
            arriving = start_rotate(dkv, group)
            if following is not None:
                kv = wait(following)
        assert arriving is not None
        home = wait(arriving).to(k.dtype)
        return sums.dq.to(q.dtype), home[0], home[1], None, None


class _GroupCore(nn.Module):
    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group


class RingCore(_GroupCore):
    """Attention over a sequence cut zig-zag over `group`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> Tensor:
        return _Ring.apply(q, k, v, tables.slopes, self.group)


def positions_of(kind: str, seq_len: int, size: int, rank: int, device: torch.device) -> Tensor:
    """Global positions of a rank's tokens. Ring and all-gather zig-zag for equal causal work."""
    if size == 1:
        return torch.arange(seq_len, device=device)
    if kind == "ulysses":
        each = seq_len // size
        return torch.arange(rank * each, (rank + 1) * each, device=device)
    return zigzag(seq_len, size, rank, device)


class _Spans(torch.autograd.Function):
    """Attention of local queries to gathered keys, block by block."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spans: tuple[Span, ...],
        biases: tuple[Tensor | None, ...],
    ) -> Tensor:
        joined = JoinedBlocks(q)
        for span, bias in zip(spans, biases, strict=True):
            joined.attend(q, k, v, span, bias)
        out = joined.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, joined.lse)
        ctx.spans, ctx.biases = spans, biases
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        sums = BlockGradients(grads[0], q, out, lse)
        dk, dv = (torch.zeros_like(x, dtype=sums.dq.dtype) for x in (k, v))
        for span, bias in zip(ctx.spans, ctx.biases, strict=True):
            block_dk, block_dv = sums.add(k, v, span, bias)
            cut(dk, span.keys).add_(block_dk)
            cut(dv, span.keys).add_(block_dv)
        return sums.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


class AllGatherCore(_GroupCore):
    """Keys and values of the whole sequence on every rank, queries zig-zag."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> Tensor:
        parts, chunk = self.group.size, q.shape[2] // 2
        whole = gathered(torch.stack([k, v]), self.group, 0).unflatten(0, (parts, 2))
        k, v = (in_order(whole[:, i], chunk) for i in range(2))
        spans = spans_of(self.group, chunk)
        biases = tuple(self._bias(span, tables, k.shape[2]) for span in spans)
        return _Spans.apply(q, k, v, spans, biases)

    def _bias(self, span: Span, tables: Tables, seq_len: int) -> Tensor | None:
        if tables.slopes is None:
            return None
        keys = torch.arange(seq_len, device=tables.slopes.device)
        positions = zigzag(seq_len, self.group.size, self.group.rank, keys.device)
        return alibi_bias(tables.slopes, positions[slice(*span.queries)], keys[slice(*span.keys)])


def in_order(parts_PBKSC: Tensor, chunk: int) -> Tensor:
    """Zig-zag parts of all ranks -> the sequence: early chunks, then late ones backwards."""
    early, late = parts_PBKSC.split(chunk, dim=3)
    return torch.cat([*early.unbind(0), *reversed(late.unbind(0))], dim=2)


def spans_of(group: Group, chunk: int) -> tuple[Span, ...]:
    """Each of the rank's two chunks looks at all keys before it, and causally at its own."""
    spans = []
    for half, place in enumerate((group.rank, 2 * group.size - 1 - group.rank)):
        queries = (half * chunk, (half + 1) * chunk)
        if place:
            spans.append(Span(queries, (0, place * chunk), False))
        spans.append(Span(queries, (place * chunk, (place + 1) * chunk), True))
    return tuple(spans)


def split_and_join(x: Tensor, group: Group, split: int, join: int) -> Tensor:
    """All-to-all that splits dimension `split` over ranks and joins dimension `join` (Ulysses)."""
    there = lambda x: _all_to_all(x, group, split, join)  # noqa: E731
    return TwoWay.apply(x, there, lambda grad: _all_to_all(grad, group, join, split))


def _all_to_all(x: Tensor, group: Group, split: int, join: int) -> Tensor:
    stacked = torch.stack(x.chunk(group.size, dim=split))
    rows = [1] * group.size
    received = wait(start_exchange(stacked, group, rows, rows))
    return torch.cat(received.unbind(0), dim=join)


class UlyssesCore(_GroupCore):
    """Whole sequences, part of the heads. Fewer KV heads than ranks are repeated just enough."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.inner = Core()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> Tensor:
        ranks, heads, kv_heads = self.group.size, q.shape[1], k.shape[1]
        kv = torch.stack([k, v])
        copies = kv_copies(heads, kv_heads, ranks)
        if copies > 1:
            kv = kv.repeat_interleave(copies, dim=2)
        q = split_and_join(q, self.group, 1, 2)
        kv = split_and_join(kv, self.group, 2, 3)
        tables = self._whole(tables, q.shape[2], heads // ranks)
        mixed = self.inner(q, kv[0], kv[1], tables)
        return split_and_join(mixed, self.group, 2, 1)

    def _whole(self, tables: Tables, seq_len: int, heads: int) -> Tables:
        if tables.slopes is None:
            return tables
        positions = torch.arange(seq_len, device=tables.slopes.device)
        first = self.group.rank * heads
        return Tables(positions, slopes=tables.slopes[first : first + heads])


CORES = {"ring": RingCore, "allgather": AllGatherCore, "ulysses": UlyssesCore}


def rank_tables(spec: RunSpec, world: World, positions: Tensor) -> Tables:
    """Places of this rank's tokens, slopes of its heads."""
    each = spec.model.heads // world.tp.size
    heads = range(world.tp.rank * each, (world.tp.rank + 1) * each)
    return make_tables(spec.model, positions, heads, activation_dtype(spec.policy.dtypes.compute))


def apply_context(decoder: Decoder, spec: RunSpec, world: World) -> None:
    """Put the kind's attention core into every layer."""
    for layer in decoder.blocks.values() if world.cp.size > 1 else ():
        layer.attention.core = CORES[spec.policy.cp_kind](world.cp)
