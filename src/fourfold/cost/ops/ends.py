"""Operations of the ends of a model (engine/model/decoder.py), between stages, and once a step."""

from __future__ import annotations

from functools import partial

import numpy as np

from fourfold.cost.columns import BY_COST, OPTIMIZERS, Columns, Floats
from fourfold.cost.kinds import WeightKind
from fourfold.cost.ops.blocks import linear, norm
from fourfold.cost.ops.op import NONE, Op, Sizes

# Of a logit: 30 for its row's maximum and sum, 58 for its gradient (parallel/lean_loss.py).
_EAGER_LEAN_BYTES = 88.0


def embedding(c: Columns, micro: Floats) -> list[Op]:
    """Rows read and written, and added to backwards; summed over tp, as gradients of the head."""
    each = micro * c.seq / c.cp * c.hidden * c.act_bytes
    rows = partial(Op, name="embedding", kind="copy")
    summed = partial(Op, name="embedding, sum", kind="collective", axis="tp", bytes=each)
    return [
        rows(bytes=2.0 * each),
        rows(phase="weights", bytes=4.0 * each),
        summed(),
        summed(phase="inputs"),
    ]


def head(c: Columns, micro: Floats) -> list[Op]:
    """The last norm; logits and loss, always in 16 bits. In chunks logits are computed twice, but
    by the lean loss. They are read for their sums, and read and written as their own gradient.
    Layers that predict further tokens have logits of their own."""
    s, wide = Sizes(c, micro), np.ceil(c.vocab / c.tp) * (1.0 + c.mtp)
    twice = np.where((c.loss_chunks > 1) & (c.lean_loss < 1), 1.0, 0.0)
    exact = np.where(c.our_kernels + c.lean_loss > 0, 1.0, 0.0)
    counted = np.where(c.our_kernels > 0, 3.0 * c.act_bytes, _EAGER_LEAN_BYTES)
    moved = s.tokens * wide * np.where(exact > 0, counted, 9.6)
    return [
        *norm(c, s, "final_norm"),
        *linear(c, s, "head", wide, c.hidden, twice, narrow=False),
        Op(name="loss", kind="elementwise", phase="inputs", bytes=moved, counted=exact),
    ]


def handover(c: Columns, micro: Floats) -> list[Op]:
    """Of a micro batch to the next stage, and of its gradient back, for each virtual stage. Without
    sequence parallelism Megatron's and DeepSpeed's tensor ranks send a part of the outputs each and
    gather it on arrival; gradients, and torch's outputs, go whole from every rank."""
    whole = micro * c.seq / c.cp * c.hidden * c.act_bytes
    times = np.where(c.pp > 1, c.vpp, 0.0)
    parts = np.where(c.fsdp2 > 0, c.split, c.tp)
    gathers = np.where((c.fsdp2 < 1) & (c.sp < 1), times, 0.0)
    send = partial(Op, name="stage, send", kind="send", axis="pp", times=times)
    return [
        send(bytes=whole / parts),
        Op(name="stage, gather", kind="collective", axis="tp", bytes=whole, halves=gathers),
        send(phase="inputs", bytes=whole / c.split),
    ]


def reduction(c: Columns, params: Floats, kind: WeightKind) -> tuple[Op, Op]:
    """Below ZeRO-3: gradients summed over all ranks that see other tokens, or scattered; weights
    that ZeRO-1 divides gathered. Once a step; ZeRO-2 holds parts of gradients alone and so scatters
    those of every micro batch, but in torch's pipelines, which wait for the last one."""
    size, shards = kind.copies(c), kind.shards(c)
    is_whole = (c.zero < 1) | (shards < size)  # every rank needs the whole sum: an all-reduce
    # Runs without such weights send nothing, whatever other runs have.
    reduced = np.where((size > 1) & (c.zero < 3) & (params > 0), 1.0, 0.0)
    gathered = reduced * np.where((c.zero >= 1) & (shards > 1), 1.0, 0.0)
    each = (c.zero == 2) & ((c.pp == 1) | (c.balanced == BY_COST))
    once = partial(Op, kind="collective", axis=f"dp{kind.name}")
    return (
        once(
            name=f"gradients{kind.name}, reduce",
            phase="weights",
            bytes=params * c.grad_bytes,
            halves=np.where(is_whole, 2.0, 1.0),
            times=reduced * np.where(each, np.maximum(1.0, c.micros), 1.0),
        ),
        once(
            name=f"weights{kind.name}, gather",
            phase="update",
            bytes=params * c.act_bytes,
            times=gathered,
        ),
    )


def update(c: Columns, params: Floats, kind: WeightKind, ends: Floats = NONE) -> list[Op]:
    """Of weights, `ends` of them of embedding and head. Counted: weights and moments are read and
    written, gradients read for their norm and for the update, the copies that layers compute with
    written. Muon's passes (`iterations` has its products) are those of plain calls."""
    sums = np.where(c.is_alone & (c.micros < 2), c.act_bytes, c.acc_bytes)
    copies = np.where(c.is_alone & (c.param_bytes != c.act_bytes), c.act_bytes, 0.0)
    each = 2.0 * (c.param_bytes + c.moment_bytes) + 2.0 * sums + copies
    shards = np.where(c.zero >= 1, kind.shards(c), 1.0)
    mine = params / shards
    moved = np.where(c.our_kernels > 0, each, c.update_traffic) * mine
    if np.any(c.muon_steps > 0):
        fused = each + 2.0 * c.end_moment_bytes
        of_end = np.where(c.our_kernels > 0, fused, OPTIMIZERS["adamw"][1])
        both = (c.update_traffic * (params - ends) + of_end * ends) / shards
        moved = np.where(c.muon_steps > 0, both, moved)
    return [Op(name=f"optimizer{kind.name}", kind="copy", phase="update", bytes=moved, m=mine)]
