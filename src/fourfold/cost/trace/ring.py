"""Which steps does ring attention take? Keys and values travel round, one block of them a round.

Liu et al., arXiv 2310.01889; tokens dealt out from both ends (zig-zag), so that under a causal
mask every round computes exactly half of its block on every rank.
"""

from __future__ import annotations

from fourfold.cost.trace.ask import Ask
from fourfold.cost.trace.attention import (
    GROUP,
    check_sequence,
    hold,
    notes_of,
    output,
    program,
    project,
    whole_heads,
)
from fourfold.cost.trace.step import Program, Send, Step, Tensor

_N = "tokens/ranks"
_KV = ("2", _N, "kv_heads", "head_size")


def ring(ask: Ask) -> Program:
    """Receive the next block while attending to this one; merge what the blocks give."""
    check_sequence(ask, "ring")
    middle = ask.ranks - 2
    steps = [
        hold(),
        project(),
        Step(
            name="pack",
            formula="kv = [k, v]: one message a round",
            tensors=(Tensor("kv", _KV, "copied"),),
        ),
        _round(ask, name="round 1", first=True, last=ask.ranks == 1),
    ]
    if middle > 0:
        name = f"rounds 2-{ask.ranks - 1}" if middle > 1 else "round 2"
        steps.append(_round(ask, name=name, times=middle))
    if ask.ranks > 1:
        steps.append(_round(ask, name=f"round {ask.ranks}", last=True))
    steps += [_join(ask), output("out")]
    notes = (*notes_of(ask), "blocks are merged in fp32, then written in the trace's dtype")
    return program(ask, "ring", tuple(steps), whole_heads(ask), notes)


def _round(ask: Ask, *, name: str, first: bool = False, last: bool = False, times: int = 1) -> Step:
    """Block tensors live for one round; the message of the next block travels meanwhile."""
    naive = ask.attention == "naive"
    block = ("heads", _N, "head_size") if naive else (_N, "heads", "head_size")
    tensors: list[Tensor] = [] if last else [Tensor("kv_next", _KV, "received")]
    if naive:
        tensors.append(Tensor("scores", ("heads", _N, _N)))
    results = [Tensor("out", block, dtype="fp32")]
    if not naive:
        results.append(Tensor("lse", ("heads", _N), dtype="fp32"))
    if not first:
        # Beside the running result until merged into it.
        tensors += [Tensor(f"{t.name}_block", t.dims, dtype=t.dtype) for t in results]
    tensors += results
    blocks = tuple(t.name for t in tensors if t.name.endswith("_block") or t.name == "scores")
    # Full square: 4 tokens tokens hidden / ranks^2 a round; the causal mask leaves half of it.
    share = 4 if naive else 2
    attended = "scores = q x kv[k]^T, out = scores x kv[v]" if naive else "out, lse = attend(q, kv)"
    merged = attended if first else f"{attended}, merged into the running out"
    return Step(
        name=name,
        formula=merged if last else f"{merged}; meanwhile kv_next comes from the neighbour",
        tensors=tuple(tensors),
        flops=(f"{share}*tokens*tokens*hidden/ranks/ranks",),
        sends=() if last else (Send("send", GROUP, _KV),),
        frees=blocks,
        moves=() if last else (("kv_next", "kv"),),
        times=times,
    )


def _join(ask: Ask) -> Step:
    order = ": heads of one token side by side" if ask.attention == "naive" else ""
    return Step(
        name="join heads",
        formula=f"out = {ask.dtype}(out){order}",
        tensors=(Tensor("out", (_N, "hidden"), "copied"),),
    )
