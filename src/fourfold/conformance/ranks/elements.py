"""Every weight of the reference is an element with a number. A shard says which numbers it holds,
so that values of any rank, however cut, go back to their place, and copies can be compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fourfold.conformance.ranks.reference import Tiny, weights

# (numbers, values), both of any shape with as many elements.
Part = tuple[Tensor, Tensor]


class Elements:
    """`start[name]`: the numbers of a weight, in its shape. As fp32 weights they pass through an
    engine's own sharding, which then tells where each element went: exact below 2 ** 24."""

    def __init__(self, t: Tiny, seed: int) -> None:
        self.weights = weights(t, seed)
        self.flat = torch.cat([value.flatten() for value in self.weights.values()])
        assert self.flat.numel() < 2**24
        self.start: dict[str, Tensor] = {}
        at = 0
        for name, value in self.weights.items():
            self.start[name] = torch.arange(at, at + value.numel()).view(value.shape)
            at += value.numel()

    def numbers(self, tensor: Tensor) -> Tensor:
        """Read back from a weight that holds numbers."""
        return tensor.detach().double().round().long().clone()

    @torch.no_grad()
    def fill(self, tensor: Tensor, numbers: Tensor) -> None:
        """Give elements their values."""
        values = self.flat[numbers.cpu().clamp(min=0)].view(tensor.shape)
        tensor.copy_(values.to(device=tensor.device, dtype=tensor.dtype))

    def assemble(self, ranks: Iterable[list[Part]]) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Whole weights, and by how much copies of each differ, relative to its largest value; a
        weight of which an element is nowhere is left out."""
        size = self.flat.numel()
        low, high, first = (torch.full((size,), v).double() for v in (torch.inf, -torch.inf, 0.0))
        seen = torch.zeros(size, dtype=torch.bool)
        for parts in ranks:
            for numbers, values in parts:
                at, value = numbers.flatten(), values.double().flatten()
                at, value = at[at >= 0], value[at >= 0]
                first[at] = torch.where(seen[at], first[at], value)
                low[at], high[at] = torch.minimum(low[at], value), torch.maximum(high[at], value)
                seen[at] = True
        whole, spread = {}, {}
        floor = 1e-3 * float(first.abs().max())
        for name, numbers in self.start.items():
            at = numbers.flatten()
            if bool(seen[at].all()):
                whole[name] = first[at].view(numbers.shape)
                most = max(float(whole[name].abs().max()), floor, 1e-30)
                spread[name] = float((high[at] - low[at]).max()) / most
        return whole, spread

    def sums(self, ranks: Iterable[list[Part]]) -> dict[str, tuple[Tensor, int]]:
        """What all copies of a weight add up to, and how many there are."""
        total = torch.zeros(self.flat.numel(), dtype=torch.float64)
        copies = torch.zeros(self.flat.numel(), dtype=torch.long)
        for numbers, values in (part for parts in ranks for part in parts):
            held = numbers.flatten() >= 0
            at = numbers.flatten()[held]
            total.index_add_(0, at, values.double().flatten()[held])
            copies.index_add_(0, at, torch.ones_like(at))
        return {name: (total[at], int(copies[at].max())) for name, at in self.start.items()}


def held_norm(parts: list[Part]) -> float:
    """Of the elements that one rank holds, each once."""
    at = torch.cat([numbers.flatten() for numbers, _ in parts])
    held = torch.zeros(int(at.max()) + 2, dtype=torch.float64)
    held[at] = torch.cat([value.double().flatten() for _, value in parts])
    return float(held[:-1].norm())  # a part that is another rank's has the number -1


def local(x: Tensor) -> Tensor:
    """The part of a (possibly sharded) tensor on this rank."""
    return x.to_local() if hasattr(x, "to_local") else x


def gradient(p: Tensor) -> Tensor:
    """This rank's part of a gradient, placed as its parameter is."""
    g: Any = p.grad
    if g is None:
        return torch.zeros_like(local(p.detach()))
    placed = getattr(p, "placements", None)
    if placed is not None and g.placements != placed:
        g = g.redistribute(placements=placed)
    return local(g).detach().clone()
