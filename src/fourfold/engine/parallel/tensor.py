"""Tensor parallelism, Megatron's cuts: every matrix and the vocabulary. Modules are local shards
around a few collectives; DTensor's dispatch costs more than these models compute on CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.cost.count import params
from fourfold.engine.model.decoder import IGNORE, Decoder, Embedding, LearnedPositions
from fourfold.engine.model.layers import Attention, Linear, Norm
from fourfold.engine.parallel.groups import (
    Group,
    all_reduce,
    gathered,
    scattered,
    shared,
    summed,
    summed_and_shared,
)
from fourfold.engine.parallel.shards import Rect, tp_rect
from fourfold.spec.model import ModelShape

_SEQUENCE = 1  # activations are [batch, sequence, hidden]


class InputComm(nn.Module):
    """Before column-cut matrices: gather the sequence, or mark the input as shared. The place for
    async tensor parallelism: nothing would happen here, and the gather would be cut into steps of
    the matrix product that follows."""

    def __init__(self, group: Group, *, sequence: bool) -> None:
        super().__init__()
        self.group, self.sequence = group, sequence

    def forward(self, x: Tensor) -> Tensor:
        if self.sequence:
            return gathered(x, self.group, _SEQUENCE)
        return shared(x, self.group)


class RowParallelLinear(Linear):
    """Partial outputs add up, then the bias is added once. Megatron names a cut by the dimensions
    of the product X W: a row-parallel layer cuts W's rows, which are the inputs, and so the columns
    of torch's weight [outputs, inputs]."""

    def __init__(self, whole: Linear, group: Group, *, sequence: bool) -> None:
        nn.Module.__init__(self)
        self.parts, self.weight, self.bias = whole.parts, whole.weight, whole.bias
        self.group, self.sequence = group, sequence

    def forward(self, x: Tensor) -> Tensor:
        y = _summed(self.product(x, self.weight, None), self.group, sequence=self.sequence)
        return y if self.bias is None else y + self.bias


class SplitNorms:
    """RMSNorms over whole projections of which each rank has some heads: one sum of squares over
    ranks for queries and keys together. A key head that several ranks hold counts once."""

    def __init__(self, model: ModelShape, group: Group) -> None:
        self.group = group
        self.widths = (model.attention_width, model.kv_width)
        self.copies = (1, max(1, group.size // model.kv_heads))

    def __call__(self, q_norm: Norm, k_norm: Norm, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        wide = [x if x.dtype == torch.float64 else x.float() for x in (q, k)]
        own = [
            x.square().sum(dim=-1, keepdim=True) / (copies * width)
            for x, copies, width in zip(wide, self.copies, self.widths, strict=True)
        ]
        mean_q, mean_k = summed_and_shared(torch.cat(own, dim=-1), self.group).split(1, dim=-1)
        scaled_q = wide[0] * (mean_q + q_norm.eps).rsqrt() * q_norm.weight
        scaled_k = wide[1] * (mean_k + k_norm.eps).rsqrt() * k_norm.weight
        return scaled_q.to(q.dtype), scaled_k.to(k.dtype)


def _summed(y: Tensor, group: Group, *, sequence: bool) -> Tensor:
    return scattered(y, group, _SEQUENCE) if sequence else summed(y, group)


class VocabEmbedding(Embedding):
    """Rows `first`..`last` of the table; other ranks add the rest."""

    def __init__(self, weight: nn.Parameter, rect: Rect, group: Group, *, sequence: bool) -> None:
        nn.Module.__init__(self)
        self.weight, self.group, self.sequence = weight, group, sequence
        self.first, self.last = rect.rows

    def forward(self, tokens: Tensor) -> Tensor:
        is_local = (tokens >= self.first) & (tokens < self.last)
        rows = F.embedding(torch.where(is_local, tokens - self.first, 0), self.weight)
        return _summed(rows * is_local[..., None], self.group, sequence=self.sequence)


class SlicedPositions(LearnedPositions):
    """Under sequence parallelism a rank adds the positions of its part of the sequence."""

    def __init__(self, weight: nn.Parameter, group: Group) -> None:
        nn.Module.__init__(self)
        self.weight, self.group = weight, group

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens.chunk(self.group.size)[self.group.rank]
        return F.embedding(own, self.weight)


class VocabLoss(nn.Module):
    """Cross-entropy of logits cut by vocabulary."""

    def __init__(self, rect: Rect, group: Group) -> None:
        super().__init__()
        self.first, self.last, self.group = *rect.rows, group

    def forward(self, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        return _VocabCrossEntropy.apply(logits_NV, targets_N, (self.first, self.last), self.group)


class _VocabCrossEntropy(torch.autograd.Function):
    """Sum over counting targets of logsumexp - target's logit; saves logits and logsumexp."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, rows: tuple[int, int], group: Group
    ) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        top = all_reduce(wide.amax(dim=-1), group, "max")
        counts = targets != IGNORE
        is_local = counts & (targets >= rows[0]) & (targets < rows[1])
        column = torch.where(is_local, targets - rows[0], 0)
        total = (wide - top[:, None]).exp().sum(dim=-1)
        chosen = wide.gather(1, column[:, None])[:, 0] - top
        both = all_reduce(torch.stack([total, chosen.masked_fill(~is_local, 0.0)]), group)
        logsum, chosen = both[0].log(), both[1]
        ctx.save_for_backward(logits, top + logsum, column, is_local, counts)
        return (logsum - chosen).masked_fill(~counts, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grads
        logits, logsum, column, is_local, counts = ctx.saved_tensors
        share = (logits.to(logsum.dtype) - logsum[:, None]).exp()
        share.scatter_add_(1, column[:, None], -is_local[:, None].to(share.dtype))
        share *= (grad * counts)[:, None]
        return share.to(logits.dtype), None, None, None


def apply_tensor(
    decoder: Decoder, model: ModelShape, group: Group, *, seq_len: int, sequence: bool
) -> None:
    """Cut every matrix of a stage to this rank's part and put the collectives around."""
    if group.size == 1:
        return
    rects_by_name = {
        tensor.name: tp_rect(model, tensor, group.size, group.rank)[0]
        for tensor in params.tensors(model, seq_len)
    }
    for path, module in list(decoder.named_modules()):
        if isinstance(module, Linear):
            _cut_linear(path, module, rects_by_name)
    for layer in decoder.blocks.values():
        attention = layer.attention
        attention.heads = model.heads // group.size
        attention.kv_heads = max(1, model.kv_heads // group.size)
        if isinstance(attention, Attention) and model.qk_norm == "width":
            _cut_norms(attention, rects_by_name, model, group)
        attention.out = RowParallelLinear(attention.out, group, sequence=sequence)
        attention.input_comm = InputComm(group, sequence=sequence)
        mlp = layer.dense_mlp
        if mlp is not None:
            mlp.down = RowParallelLinear(mlp.down, group, sequence=sequence)
            mlp.input_comm = attention.input_comm
    _cut_ends(decoder, rects_by_name, group, sequence=sequence)


def _cut_norms(
    attention: Attention, rects_by_name: dict[str, Rect], model: ModelShape, group: Group
) -> None:
    """Weights beside the heads that this rank has; every layer is cut alike."""
    for norm, name in ((attention.q_norm, "q_norm"), (attention.k_norm, "k_norm")):
        top, bottom = rects_by_name[f"layers.0.attention.{name}.weight"].rows
        norm.weight = nn.Parameter(norm.weight.new_empty(bottom - top))
    attention.norm_widths = SplitNorms(model, group)


def _cut_linear(path: str, linear: Linear, rects_by_name: dict[str, Rect]) -> None:
    """Keep this rank's rows and columns; still without values, so only sizes change."""
    parent = path.rpartition(".")[0]
    rects = [(part, rects_by_name[f"{parent}.{part}.weight"]) for part, _ in linear.parts]
    linear.parts = tuple((part, rect.rows[1] - rect.rows[0]) for part, rect in rects)
    outs = sum(rows for _, rows in linear.parts)
    left, right = rects[0][1].columns
    linear.weight = nn.Parameter(linear.weight.new_empty(outs, right - left))
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.new_empty(outs))


def _cut_ends(
    decoder: Decoder, rects_by_name: dict[str, Rect], group: Group, *, sequence: bool
) -> None:
    rect = rects_by_name["embedding.weight"]
    rows = rect.rows[1] - rect.rows[0]
    if decoder.embedding is not None:
        weight = decoder.embedding.weight
        cut = nn.Parameter(weight.new_empty(rows, weight.shape[1]))
        decoder.embedding = VocabEmbedding(cut, rect, group, sequence=sequence)
    if decoder.positions is not None and sequence:
        decoder.positions = SlicedPositions(decoder.positions.weight, group)
    if decoder.head is not None:
        if decoder.head.weight is not None:
            weight = decoder.head.weight
            decoder.head.weight = nn.Parameter(weight.new_empty(rows, weight.shape[1]))
        decoder.head.input_comm = InputComm(group, sequence=sequence)
        decoder.head.loss = VocabLoss(rect, group)
