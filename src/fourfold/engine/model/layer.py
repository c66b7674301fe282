"""One decoder layer: norms around attention, plain or latent, and an MLP or experts."""

from __future__ import annotations

from torch import Tensor, nn

from fourfold.engine.model.experts import MoeMlp
from fourfold.engine.model.latent import LatentAttention
from fourfold.engine.model.layers import Attention, Mlp, Norm
from fourfold.engine.model.positions import Tables
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
        if shape.moe is not None and shape.has_experts(index):
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
