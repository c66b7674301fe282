"""The reference's decoder as a torch module, for engines that wrap a model of the user's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fourfold.conformance.ranks.reference import Elements, Tiny, attend, rms_norm, route


class Block(nn.Module):
    def __init__(self, t: Tiny, names: list[str], elements: Elements, layer: int) -> None:
        super().__init__()
        self.t = t
        for name in names:
            numbers = elements.start[f"{layer}.{name}"]
            self.register_parameter(name, nn.Parameter(numbers.float()))

    def forward(self, h: Tensor) -> Tensor:
        w: dict[str, Tensor] = dict(self.named_parameters())
        t = self.t
        h = h + attend(rms_norm(h, w["norm1"], t.eps), w, "", t)
        a = rms_norm(h, w["norm2"], t.eps)
        if t.experts:
            return h + route(a.flatten(0, 1), w, "", t, []).view_as(h)
        inner = torch.nn.functional.silu(a @ w["gate"].T) * (a @ w["up"].T)
        return h + inner @ w["down"].T


class Plain(nn.Module):
    """Weights start as the numbers of their elements; `forward` is the sum of the losses."""

    def __init__(self, t: Tiny, elements: Elements) -> None:
        super().__init__()
        self.t = t
        names = [name[2:] for name in elements.start if name.startswith("0.")]
        self.embed = nn.Parameter(elements.start["embed"].float())
        self.blocks = nn.ModuleList(Block(t, names, elements, i) for i in range(t.layers))
        self.norm = nn.Parameter(elements.start["norm"].float())
        if not t.tied:
            self.head = nn.Parameter(elements.start["head"].float())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed[x]
        for block in self.blocks:
            h = block(h)
        logits = rms_norm(h, self.norm, self.t.eps) @ (self.embed if self.t.tied else self.head).T
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum"
        )
