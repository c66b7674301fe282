"""Each step of a trace's list, done with the engine's exchanges and attention on named tensors.

N tokens of a rank, H heads, K key/value heads, C head size, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fourfold.cost.trace.steps import Ask, Program
from fourfold.cost.trace.symbols import shape
from fourfold.engine.parallel import blocks
from fourfold.engine.parallel.blocks import JoinedBlocks
from fourfold.engine.parallel.context import in_order, span_of, spans_of, start_rotate
from fourfold.engine.parallel.groups import (
    Group,
    all_gather,
    all_reduce,
    reduce_scatter,
    start_exchange,
    wait,
)


@dataclass
class TraceRank:
    """What the steps work on: tensors by name, and the group they talk to."""

    program: Program
    ask: Ask
    group: Group
    device: torch.device
    dtype: torch.dtype
    t: dict[str, Tensor] = field(default_factory=dict)
    joined: JoinedBlocks | None = None
    round: int = 0

    @property
    def ranks(self) -> int:
        return self.group.size

    @property
    def tokens(self) -> int:
        return self.ask.tokens // self.ranks


Action = Callable[[TraceRank], None]


def _writes(name: str, make: Callable[[TraceRank], Tensor]) -> Action:
    """A step that makes one tensor."""

    def action(s: TraceRank) -> None:
        s.t[name] = make(s)

    return action


def hold(s: TraceRank) -> None:
    """Small random values: products of them stay finite in any format."""
    made = torch.Generator(s.device).manual_seed(s.ask.rank)
    for tensor in s.program.steps[0].tensors:
        sizes = shape(tensor.dims, s.program.sizes)
        wide = torch.randn(sizes, generator=made, device=s.device, dtype=s.dtype)
        s.t[tensor.name] = wide.mul_(sizes[-1] ** -0.5)


def project(s: TraceRank) -> None:
    size = s.program.sizes["head_size"]
    for name, weight in (("q", "Q"), ("k", "K"), ("v", "V")):
        s.t[name] = (s.t["input"] @ s.t[weight]).unflatten(1, (-1, size))


def batched(x_NHC: Tensor) -> Tensor:
    """Token-major tensors as attention kernels want them: [1, H, N, C], a view."""
    return x_NHC.transpose(0, 1)[None]


# Naive attention: whole scores, every query head with its group's keys.


def _product(heads_HNC: Tensor, keys_KCM: Tensor) -> Tensor:
    """[H, N, M]; written group by group, so that keys are never repeated in memory."""
    heads, kv = heads_HNC.shape[0], keys_KCM.shape[0]
    if heads == kv:
        return torch.bmm(heads_HNC, keys_KCM)
    out = heads_HNC.new_empty(heads, heads_HNC.shape[1], keys_KCM.shape[2])
    each = heads // kv
    for i in range(heads):
        torch.mm(heads_HNC[i], keys_KCM[i // each], out=out[i])
    return out


def _scores(queries: Tensor, keys: Tensor) -> Tensor:
    return _product(queries.transpose(0, 1), keys.permute(1, 2, 0))


def _naive(queries: str, keys: str, values: str) -> dict[str, Action]:
    """The two steps of naive attention between tensors of these names."""
    return {
        "scores": _writes("scores", lambda s: _scores(s.t[queries], s.t[keys])),
        "mix": _writes("out", lambda s: _product(s.t["scores"], s.t[values].transpose(0, 1))),
    }


# Ulysses.


def group_by_owner(s: TraceRank) -> None:
    for name in ("q", "k", "v"):
        copies = s.program.sizes.get("kv_copies", 1) if name != "q" else 1
        s.t[f"{name}_heads"] = _by_owner(s.t[name], s.ranks, copies)


def _by_owner(x_NHC: Tensor, ranks: int, copies: int) -> Tensor:
    """[P, N, H copies / P, C]; a repeated head is written once per owner, never in between."""
    if copies == 1:
        return torch.stack(x_NHC.chunk(ranks, dim=1))
    tokens, heads, size = x_NHC.shape
    each = heads * copies // ranks
    out = x_NHC.new_empty(ranks, tokens, each, size)
    for owner in range(ranks):
        owned = torch.arange(owner * each, (owner + 1) * each, device=x_NHC.device) // copies
        torch.index_select(x_NHC, 1, owned, out=out[owner])
    return out


def _exchanged(s: TraceRank, name: str) -> Tensor:
    rows = [1] * s.ranks
    return wait(start_exchange(s.t[name], s.group, rows, rows))


def tokens_to_heads(s: TraceRank) -> None:
    for name in ("q_heads", "k_heads", "v_heads"):
        s.t[name] = _exchanged(s, name).flatten(0, 1)


def attend_heads(s: TraceRank) -> None:
    inputs = (batched(s.t[f"{name}_heads"]) for name in "qkv")
    out, lse = blocks.forward(*inputs, causal=True, bias=None)
    s.t["out"], s.t["lse"] = out[0].transpose(0, 1), lse[0]


def group_by_token(s: TraceRank) -> None:
    """From the product's head-major result a copy; the kernel's own is token-major already."""
    out = s.t["out"] if s.ask.attention == "flash" else s.t["out"].transpose(0, 1)
    s.t["out"] = out.unflatten(0, (s.ranks, s.tokens)).contiguous()


# All-gather and ring.


def gather(s: TraceRank) -> None:
    for name in ("k", "v"):
        s.t[f"{name}_all"] = all_gather(s.t[name], s.group, 0)


def put_in_order(s: TraceRank) -> None:
    for name in ("k_all", "v_all"):
        parts = s.t[name].unflatten(0, (s.ranks, -1)).transpose(1, 2)[:, None]
        s.t[name] = in_order(parts, s.tokens // 2)[0].transpose(0, 1)


def start_sums(s: TraceRank) -> None:
    s.joined = JoinedBlocks(batched(s.t["q"]))
    s.t["out_fp32"], s.t["lse"] = s.joined.out[0], s.joined.lse[0]


def attend_spans(s: TraceRank) -> None:
    q, k, v = (batched(s.t[name]) for name in ("q", "k_all", "v_all"))
    for span in spans_of(s.group, s.tokens // 2):
        s.t.pop("block", None)
        s.t.pop("block_lse", None)
        _add_block(s, q, k, v, span)


def _add_block(s: TraceRank, q: Tensor, k: Tensor, v: Tensor, span: blocks.Span) -> None:
    assert s.joined is not None
    out, lse = s.joined.attend(q, k, v, span)
    s.t["block"], s.t["block_lse"] = out[0], lse[0]


def pack(s: TraceRank) -> None:
    s.t["kv"] = torch.stack([s.t["k"], s.t["v"]])
    if s.ask.attention == "flash":
        start_sums(s)
        return
    heads, size = s.ask.heads, s.program.sizes["head_size"]
    wide = torch.promote_types(s.t["q"].dtype, torch.float32)
    s.t["out_fp32"] = s.t["q"].new_zeros(heads, s.tokens, size, dtype=wide)


def attend_round(s: TraceRank) -> None:
    number, kv = s.round, s.t["kv"]
    s.round += 1
    following = start_rotate(kv, s.group) if s.round < s.ranks else None
    if s.ask.attention == "naive":
        s.t["scores"] = _scores(s.t["q"], kv[0])
        s.t["block"] = _product(s.t["scores"], kv[1].transpose(0, 1))
        s.t["out_fp32"].add_(s.t["block"])
    else:
        span = span_of(number, s.group.rank, s.ranks, s.tokens)
        _add_block(s, batched(s.t["q"]), batched(kv[0]), batched(kv[1]), span)
    if following is not None:
        s.t["kv_next"] = wait(following)


def cast(s: TraceRank) -> None:
    s.joined = None
    s.t["out"] = s.t["out_fp32"].to(s.t["q"].dtype, copy=True)


_BOTH: dict[str, Action] = {
    "project": project,
    "output": _writes(
        "output", lambda s: s.t["out_tokens" if "out_tokens" in s.t else "out"] @ s.t["O"]
    ),
    "cast": cast,
    "join heads": _writes("out", lambda s: s.t["out"].transpose(0, 1).flatten(1)),  # [N, H C]
}
_MLP = {
    "up": _writes("intermediate", lambda s: (s.t["input"] @ s.t["W1"][0]).relu_()),
    "down": _writes("partial", lambda s: s.t["intermediate"] @ s.t["W2"][0]),
}
ACTIONS: dict[str, dict[str, Action]] = {
    "ulysses": _BOTH
    | _naive("q_heads", "k_heads", "v_heads")
    | {
        "group by owner": group_by_owner,
        "tokens to heads": tokens_to_heads,
        "attend": attend_heads,
        "group by token": group_by_token,
        "heads to tokens": _writes("out_tokens", lambda s: _exchanged(s, "out")),
        "join heads": _writes("out_tokens", lambda s: s.t["out_tokens"].transpose(0, 1).flatten(1)),
    },
    "allgather": _BOTH
    | _naive("q", "k_all", "v_all")
    | {
        "gather keys, values": gather,
        "put in order": put_in_order,
        "start sums": start_sums,
        "attend": attend_spans,
    },
    "ring": _BOTH | {"pack": pack, "round": attend_round},
    "mlp": _MLP | {"sum": _writes("output", lambda s: all_reduce(s.t["partial"], s.group))},
    "mlp2d": _MLP
    | {
        "gather": _writes("input", lambda s: all_gather(s.t["input_part"], s.group, 0)),
        "sum and cut": _writes("output", lambda s: reduce_scatter(s.t["partial"], s.group, 0)),
    },
}


def action_of(kind: str, step: str) -> Action:
    """'rounds 2-7' and 'round 1' are the same thing done."""
    if step == "hold":
        return hold
    return ACTIONS[kind]["round" if step.startswith("round") else step]
