"""AdamW in one pass over memory: clip, moments, weight and the copy that layers compute with.

Compiled, each weight is one kernel that reads and writes every value once. Arithmetic is in fp32 or
wider, whatever formats weights, moments and gradients are in. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class OnePassAdamW(torch.optim.Optimizer):
    """`factor` multiplies all gradients; where `overflow` is 1 nothing changes. `copies`, by leaf,
    become the leaf's new values in their own format. All leaves share one count of steps."""

    factor: Tensor | None = None
    overflow: Tensor | None = None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        dtype: torch.dtype,
        copies: Mapping[Tensor, Tensor],
        compiled: bool,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.dtype, self.copies = dtype, copies
        leaves = [leaf for group in self.param_groups for leaf in group["params"]]
        wide = torch.promote_types(leaves[0].dtype, dtype)
        self.wide = torch.promote_types(wide, torch.float32)
        self.count = torch.zeros((), dtype=torch.float64, device=leaves[0].device)
        self._update: Callable[..., None] = _compiled_for(leaves) if compiled else _update

    def begin(self, leaf: Tensor) -> None:
        """State before the first update; the count is everybody's."""
        state = self.state[leaf]
        state["step"] = self.count
        for moment in ("exp_avg", "exp_avg_sq"):
            state[moment] = torch.zeros_like(leaf, dtype=self.dtype, requires_grad=False)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.count += 1.0 if self.overflow is None else 1.0 - self.overflow
        for group in self.param_groups:
            knobs = self._knobs(group)
            for leaf in group["params"]:
                if leaf.grad is not None:
                    self._change(leaf, group, knobs)

    def _knobs(self, group: dict[str, Any]) -> Tensor:
        """On the device: the factor of gradients, what decay leaves of a weight, the step size, and
        the root of what the second moment lacks in the first steps."""
        # Before the first good update the count is 0, and so would be what is divided by.
        past = self.count.clamp(min=1.0)
        (beta1, beta2), lr = group["betas"], group["lr"]
        unity = torch.ones_like(past)
        knobs = (
            unity if self.factor is None else self.factor.to(past.dtype),
            unity * (1.0 - lr * group["weight_decay"]),
            lr / (1.0 - torch.pow(beta1, past)),
            (1.0 - torch.pow(beta2, past)).sqrt(),
        )
        return torch.stack(knobs).to(self.wide)

    def _change(self, leaf: Tensor, group: dict[str, Any], knobs: Tensor) -> None:
        state = self.state[leaf]
        if not state:
            self.begin(leaf)
        copy = self.copies.get(leaf)
        assert leaf.grad is not None
        self._update(
            leaf.detach().view(-1),
            state["exp_avg"].view(-1),
            state["exp_avg_sq"].view(-1),
            leaf.grad.reshape(-1),
            None if copy is None else copy.view(-1),
            knobs,
            self.overflow,
            *group["betas"],
            group["eps"],
        )


def _compiled_for(leaves: list[Tensor]) -> Callable[..., None]:
    """One graph per size: torch gives up at its limit of graphs, which is made to fit."""
    sizes = {leaf.numel() for leaf in leaves}
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 4 * len(sizes))
    return torch.compile(_update, fullgraph=True, dynamic=False)


def _update(
    weight: Tensor,
    first: Tensor,
    second: Tensor,
    grad: Tensor,
    copy: Tensor | None,
    knobs: Tensor,
    overflow: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    wide = knobs.dtype
    factor, decay, rate, root = knobs.unbind()
    grad = grad.to(wide) * factor
    old, mean, square = weight.to(wide), first.to(wide), second.to(wide)
    new_mean = mean + (grad - mean) * (1.0 - beta1)
    new_square = square * beta2 + grad * grad * (1.0 - beta2)
    new = old * decay - rate * (new_mean / (new_square.sqrt() / root + eps))
    if overflow is not None:
        skip = overflow > 0
        new = torch.where(skip, old, new)
        new_mean = torch.where(skip, mean, new_mean)
        new_square = torch.where(skip, square, new_square)
    weight.copy_(new)
    first.copy_(new_mean)
    second.copy_(new_square)
    if copy is not None:
        copy.copy_(weight)
