"""Ring attention: keys and values travel around the context ranks while each uses what it has.

Zig-zag: of 2P equal chunks rank r holds r and 2P-1-r, so every rank has the same work under a
causal mask and a step off the diagonal is exactly half a square. The next keys and values are under
way (on the communicator's own stream) while the present ones are used: two buffers, no more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fourfold.engine.model.positions import Tables, alibi_bias
from fourfold.engine.parallel import blocks
from fourfold.engine.parallel.blocks import JoinedBlocks, Span, cut
from fourfold.engine.parallel.collectives import start_exchange, wait
from fourfold.engine.parallel.groups import Group


def zigzag(seq_len: int, parts: int, part: int, device: torch.device | str) -> Tensor:
    """Global positions that context rank `part` holds."""
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
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, group: Group
    ) -> Tensor:
        tokens, kv = q.shape[2], torch.stack([k, v])
        bias, joined = _Bias(slopes, tokens, group), JoinedBlocks(q)
        for step in range(group.size):
            following = start_rotate(kv, group) if step + 1 < group.size else None
            span = span_of(step, group.rank, group.size, tokens)
            out, lse = blocks.forward(
                cut(q, span.queries),
                cut(kv[0], span.keys),
                cut(kv[1], span.keys),
                causal=span.causal,
                bias=bias.at(step, span),
            )
            joined.add(span.queries, out, lse)
            if following is not None:
                kv = wait(following)
        out = joined.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, joined.lse)
        ctx.group, ctx.bias = group, bias
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (grad,) = grads
        q, k, v, out, lse = ctx.saved_tensors
        group, tokens, kv = ctx.group, q.shape[2], torch.stack([k, v])
        wide = torch.promote_types(q.dtype, torch.float32)
        dq = torch.zeros_like(q, dtype=wide)
        dkv = torch.zeros_like(kv, dtype=wide)
        arriving: Tensor | None = None
        for step in range(group.size):
            following = start_rotate(kv, group) if step + 1 < group.size else None
            span = span_of(step, group.rank, group.size, tokens)
            part = blocks.backward(
                cut(grad, span.queries),
                (cut(q, span.queries), cut(kv[0], span.keys), cut(kv[1], span.keys)),
                cut(out, span.queries),
                cut(lse, span.queries),
                causal=span.causal,
                bias=ctx.bias.at(step, span),
            )
            cut(dq, span.queries).add_(part[0])
            # The gradient of the keys at hand comes with them, one hop behind the computation.
            if arriving is not None:
                dkv = wait(arriving)
            cut(dkv[0], span.keys).add_(part[1])
            cut(dkv[1], span.keys).add_(part[2])
            arriving = start_rotate(dkv, group)
            if following is not None:
                kv = wait(following)
        assert arriving is not None
        home = wait(arriving).to(k.dtype)
        return dq.to(q.dtype), home[0], home[1], None, None


class RingCore(nn.Module):
    """Attention over a sequence cut zig-zag over `group`."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> Tensor:
        return _Ring.apply(q, k, v, tables.slopes, self.group)
