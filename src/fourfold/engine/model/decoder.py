"""The model on one device: embedding, layers by global index, final norm, head and loss.

A stage of a pipeline is the same class with fewer layers and absent ends. Parameter names are those
of cost/count/params.py whatever the cut: layers keep their global index, absent parts are None.

One decoder layer: norms around attention, plain or latent, and an MLP or experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold.engine.model.experts import MoeMlp
from fourfold.engine.model.layers import Attention, LatentAttention, Mlp, Norm, Product
from fourfold.engine.model.positions import Tables
from fourfold.engine.model.router import Router
from fourfold.spec.model import ModelShape


class Layer(nn.Module):
    """Residual block with norms before attention and MLP, or after them; `index` is its place in
    the model, which says whether it has experts."""

    attention: Attention | LatentAttention
    mlp: Mlp | MoeMlp

    def __init__(self, shape: ModelShape, index: int, *, fused: bool) -> None:
        super().__init__()
        self.norms_after = shape.norms == "after"
        self.attention_norm = Norm(shape)
        if shape.latent is None:
            self.attention = Attention(shape, fused=fused)
        else:
            self.attention = LatentAttention(shape, shape.latent)
        self.mlp_norm = Norm(shape)
        if shape.moe is not None and shape.layer_kinds()[index].feed_forward == "experts":
            self.mlp = MoeMlp(shape, shape.moe, fused=fused)
        else:
            self.mlp = Mlp(shape, fused=fused)

    @property
    def has_experts(self) -> bool:
        return isinstance(self.mlp, MoeMlp)

    @property
    def dense_mlp(self) -> Mlp | None:
        """The MLP that sees every token: the layer's only one, or that of shared experts."""
        return self.mlp if isinstance(self.mlp, Mlp) else self.mlp.shared

    def forward(self, x_BSD: Tensor, tables: Tables) -> Tensor:
        x_BSD, seen_BSD = self.attend(x_BSD, tables)
        y_BSD = self.mlp(seen_BSD)
        del seen_BSD  # kept where gradients need it, not by its name
        return x_BSD + (self.mlp_norm(y_BSD) if self.norms_after else y_BSD)

    def attend(self, x_BSD: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """What the MLP adds to, and what it sees."""
        if self.norms_after:
            x_BSD = x_BSD + self.attention_norm(self.attention(x_BSD, tables))
            return x_BSD, x_BSD
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), tables)
        return x_BSD, self.mlp_norm(x_BSD)


IGNORE = -100  # torch's mark of a target that does not count


class Embedding(nn.Module):
    """A row of `weight` per token."""

    def __init__(self, rows: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class LearnedPositions(Embedding):
    """A row of `weight` per position, the same for every sequence."""


class Loss(nn.Module):
    """Sum of cross-entropy over the targets that count, in fp32 (fp64 for fp64 logits)."""

    def forward(self, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        wide = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
        return F.cross_entropy(wide, targets_N, ignore_index=IGNORE, reduction="sum")


class Head(nn.Module):
    """Logits and loss. A tied head has no weight of its own and is handed the embedding's. With
    `chunks` above 1 the tokens go through in that many parts and logits are computed again in the
    backward pass, so that only one part's logits exist at a time; or `loss_in_chunks`
    (parallel/lean_loss.py) computes nothing again."""

    product: Product = staticmethod(F.linear)
    loss_in_chunks: Callable[[Tensor, Tensor, Tensor, int], Tensor] | None = None

    def __init__(self, shape: ModelShape, chunks: int) -> None:
        super().__init__()
        self.chunks = chunks
        self.input_comm: nn.Module = nn.Identity()
        tied = shape.tied
        self.weight = None if tied else nn.Parameter(torch.empty(shape.vocab, shape.hidden))
        self.loss: nn.Module = Loss()

    def forward(self, x_BSD: Tensor, tied: Tensor | None, targets_BS: Tensor | None) -> Tensor:
        weight = self.weight if tied is None else tied
        assert weight is not None
        x_BSD = self.input_comm(x_BSD)
        if targets_BS is None:
            return self.product(x_BSD, weight, None)
        x_ND, targets_N = x_BSD.flatten(0, 1), targets_BS.flatten()
        if self.chunks == 1:
            return self._loss(x_ND, weight, targets_N)
        if self.loss_in_chunks is not None and torch.is_grad_enabled():
            return self.loss_in_chunks(x_ND, weight, targets_N, self.chunks)
        total = x_ND.new_zeros((), dtype=torch.promote_types(x_ND.dtype, torch.float32))
        parts = zip(
            x_ND.tensor_split(self.chunks), targets_N.tensor_split(self.chunks), strict=True
        )
        for x, targets in parts:
            total = total + checkpoint(
                self._loss, x, weight, targets, use_reentrant=False, preserve_rng_state=False
            )
        return total

    def _loss(self, x_ND: Tensor, weight: Tensor, targets_N: Tensor) -> Tensor:
        return self.loss(self.product(x_ND, weight, None), targets_N)


class Decoder(nn.Module):
    """All of the model, or the stage that holds `layers` and the ends it is given."""

    def __init__(
        self,
        shape: ModelShape,
        seq_len: int,
        layers: range | None = None,
        *,
        fused: bool = True,
        loss_chunks: int = 1,
    ) -> None:
        super().__init__()
        layers = range(shape.layers) if layers is None else layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == shape.layers
        holds_embedding = self.is_first or (self.is_last and shape.tied)
        self.embedding = Embedding(shape.vocab, shape.hidden) if holds_embedding else None
        learned = self.is_first and shape.positions.kind == "learned"
        rows = shape.positions.length or seq_len
        self.positions = LearnedPositions(rows, shape.hidden) if learned else None
        self.embedding_norm = Norm(shape) if self.is_first and shape.embedding_norm else None
        self.layers = nn.ModuleDict({str(i): Layer(shape, i, fused=fused) for i in layers})
        self.final_norm = Norm(shape) if self.is_last else None
        self.head = Head(shape, loss_chunks) if self.is_last else None

    @property
    def blocks(self) -> dict[int, Layer]:
        """The layers of this stage by global index."""
        return {int(i): layer for i, layer in self.layers.items() if isinstance(layer, Layer)}

    @functools.cached_property
    def routers(self) -> list[Router]:
        return [module for module in self.modules() if isinstance(module, Router)]

    def forward(self, x: Tensor, tables: Tables, targets_BS: Tensor | None = None) -> Tensor:
        """Tokens (first stage) or activations in; activations, logits, or the loss sum out."""
        if self.is_first:
            x = self._embed(x, tables)
        for layer in self.layers.values():
            x = layer(x, tables)
        if self.head is None:
            return x
        assert self.final_norm is not None
        tied = None
        if self.head.weight is None and self.embedding is not None:
            tied = self.embedding.weight
        return self.head(self.final_norm(x), tied, targets_BS)

    def _embed(self, tokens_BS: Tensor, tables: Tables) -> Tensor:
        assert self.embedding is not None
        x_BSD = self.embedding(tokens_BS)
        if self.positions is not None:
            x_BSD = x_BSD + self.positions(tables.positions)
        return x_BSD if self.embedding_norm is None else self.embedding_norm(x_BSD)
