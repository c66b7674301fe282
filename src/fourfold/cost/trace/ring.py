"""Which steps does ring attention take? Keys and values travel round, one block of them a round.

Liu et al., arXiv 2310.01889; tokens dealt out from both ends (zig-zag), so that under a causal
mask every round computes exactly half of its block on every rank.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from fourfold.cost.trace.ask import Ask
from fourfold.cost.trace.attention import (
    GROUP,
    block,
    cast,
    check_sequence,
    hold,
    join,
    notes_of,
    output,
    program,
    project,
    sums,
    whole_heads,
)
from fourfold.cost.trace.steps import Program, Send, Step, Tensor

_N = "tokens/ranks"
_KV = ("2", _N, "kv_heads", "head_size")


def ring(ask: Ask) -> Program:
    """Receive the next block while attending to this one; join what the blocks give in fp32."""
    check_sequence(ask, "ring")
    pack = Step(
        name="pack",
        formula="kv = [k, v]: one message a round; out_fp32 = 0",
        tensors=(Tensor("kv", _KV, "copied"), *sums(ask)),
    )
    steps = (hold(), project(), pack, *_rounds(ask), cast(ask), join(), output("out"))
    return program(ask, "ring", steps, whole_heads(ask), notes_of(ask))


def _rounds(ask: Ask) -> list[Step]:
    """Every round, equal neighbours folded into one step that is done several times."""
    rounds = [_round(ask, number) for number in range(ask.ranks)]
    folded: list[Step] = []
    first = 1
    for step, run in groupby(rounds):
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
    blocks = block(ask, f"{_N}/2" if late else _N)
    scores = (Tensor("scores", ("heads", _N, _N)),) if naive else ()
    received = () if last else (Tensor("kv_next", _KV, "received"),)
    # Full square: 4 tokens tokens hidden / ranks^2 a round; the causal mask leaves half of it.
    share = 4 if naive else 2
    what = "scores x kv[v], scores = q x kv[k]^T" if naive else f"attention({seen})"
    return Step(
        name="round",
        formula=f"out_fp32 += {what}" + ("" if last else "; meanwhile kv_next arrives"),
        tensors=(*received, *scores, *blocks),
        flops=(f"{share}*tokens*tokens*hidden/ranks/ranks",),
        sends=() if last else (Send("send", GROUP, _KV),),
        frees=tuple(tensor.name for tensor in (*scores, *blocks)),
        moves=() if last else (("kv_next", "kv"),),
    )
