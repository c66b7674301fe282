"""AdamW on this rank's shards (Loshchilov and Hutter 2019), as plain local tensors.

Fused where torch has it, in one pass (one_pass.py) where steps are compiled; else moments in
another format than the weights are updated by a plain loop. Matrices decay, vectors (norms, biases)
do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.engine.parallel.shards import local
from fourfold.engine.training.one_pass import OnePassAdamW

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """`max_norm` clips by the global norm of the gradient; None leaves gradients as they are."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float | None = 1.0


def param_groups(tensors: list[Tensor], settings: AdamSettings) -> list[dict[str, Any]]:
    matrices = [t for t in tensors if t.ndim > 1]
    vectors = [t for t in tensors if t.ndim <= 1]
    decays = ((matrices, settings.weight_decay), (vectors, 0.0))
    return [{"params": params, "weight_decay": decay} for params, decay in decays if params]


class Optimizer:
    """`leaves` alias the local shards of `params`; empty shards have nothing to update.

    `copies`, by parameter, are kept equal to it in their own format.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        settings: AdamSettings,
        *,
        fused: bool,
        dtype: torch.dtype,
        compiled: bool = False,
        copies: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        self.params = [p for p in params if local(p).numel()]
        self.leaves = [local(p.detach()).requires_grad_() for p in self.params]
        for leaf in self.leaves:
            leaf.grad_dtype = None  # gradients come in formats of their own
        self._leaf_of = dict(zip(self.params, self.leaves, strict=True))
        groups = param_groups(self.leaves, settings)
        lr, betas, eps = settings.lr, settings.betas, settings.eps
        self.inner: torch.optim.Optimizer
        same = all(leaf.dtype == dtype for leaf in self.leaves)
        self.copies = {self._leaf_of[p]: c for p, c in (copies or {}).items() if p in self._leaf_of}
        if fused and compiled and self.leaves:
            self.inner = OnePassAdamW(
                groups,
                lr=lr,
                betas=betas,
                eps=eps,
                dtype=dtype,
                copies=self.copies,
                compiled=True,
            )
        elif same and fused:
            self.inner = _FusedAdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
        elif same:
            options = {"fused": False, "foreach": False}
            self.inner = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, **options)
        else:
            self.inner = _MixedAdamW(groups, lr=lr, betas=betas, eps=eps, dtype=dtype)

    def set_lr(self, lr: float) -> None:
        for group in self.inner.param_groups:
            group["lr"] = lr

    def moments(self, param: nn.Parameter) -> dict[str, Tensor]:
        """Both moments of a parameter's local shard by name; none before the first update."""
        state = self.inner.state.get(self._leaf_of[param], {})
        return {name: state[name] for name in MOMENTS if name in state}

    @property
    def updates(self) -> int:
        """Updates so far, the same for all weights; waits for the device."""
        states = [self.inner.state.get(leaf, {}) for leaf in self.leaves]
        counts = {int(state["step"]) if state else 0 for state in states}
        assert len(counts) <= 1, f"weights were updated different numbers of times: {counts}"
        return counts.pop() if counts else 0

    def restore(self, updates: int) -> None:
        """As after so many updates, with moments of 0 for the caller to fill."""
        self.inner.state.clear()
        if isinstance(self.inner, OnePassAdamW):
            self.inner.count.fill_(updates)
            for leaf in self.leaves if updates else ():
                self.inner.begin(leaf)
            return
        for leaf in self.leaves if updates else ():
            state = self.inner.state[leaf]
            if isinstance(self.inner, _MixedAdamW):
                state["step"], dtype = updates, self.inner.dtype
            else:
                # torch's fused kernels count on the device, its plain loop on the host.
                where = leaf.device if self.inner.defaults.get("fused") else torch.device("cpu")
                state["step"] = torch.tensor(float(updates), dtype=torch.float32, device=where)
                dtype = leaf.dtype
            for name in MOMENTS:
                state[name] = torch.zeros_like(leaf, dtype=dtype, requires_grad=False)

    def step(self, overflow: Tensor | None = None, factor: Tensor | None = None) -> None:
        """Update by gradients times `factor`, then forget them. Where `overflow` is 1 nothing is
        updated: fused kernels read that on the device, a plain loop waits for it here."""
        one_pass = isinstance(self.inner, OnePassAdamW)
        for param, leaf in zip(self.params, self.leaves, strict=True):
            if param.grad is not None:
                grad = local(param.grad)
                leaf.grad = grad if one_pass else grad.to(leaf.dtype)
                param.grad = None
        self._update(overflow, factor)
        for leaf in self.leaves:
            leaf.grad = None

    def _update(self, overflow: Tensor | None, factor: Tensor | None) -> None:
        if isinstance(self.inner, OnePassAdamW):
            self.inner.factor, self.inner.overflow = factor, overflow
            self.inner.step()
            return
        grads = [leaf.grad for leaf in self.leaves if leaf.grad is not None]
        if factor is not None and grads:
            torch._foreach_mul_(grads, factor.to(grads[0].dtype))
        if isinstance(self.inner, _FusedAdamW):
            self.inner.found_inf = overflow
            self.inner.step()
        elif overflow is None or not bool(overflow):
            self.inner.step()
        if self.copies:
            with torch.no_grad():
                torch._foreach_copy_(list(self.copies.values()), list(self.copies))


class _FusedAdamW(torch.optim.AdamW):
    """torch's; its kernels look for this tensor and leave everything alone where it is 1."""

    found_inf: Tensor | None = None


class _MixedAdamW(torch.optim.Optimizer):
    """Moments in `dtype`, arithmetic in the wider of the two formats, weights in their own."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        dtype: torch.dtype,
    ) -> None:
        self.dtype = dtype
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = 0
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = torch.zeros_like(weight, dtype=self.dtype)
        state["step"] += 1
        (beta1, beta2), lr, eps = group["betas"], group["lr"], group["eps"]
        wide = torch.promote_types(torch.promote_types(weight.dtype, self.dtype), torch.float32)
        assert weight.grad is not None
        grad = weight.grad.to(wide)
        first = torch.lerp(state["exp_avg"].to(wide), grad, 1 - beta1)
        second = torch.lerp(state["exp_avg_sq"].to(wide), grad * grad, 1 - beta2)
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)
        scale = (second / (1 - beta2 ** state["step"])).sqrt_().add_(eps)
        fresh = weight.to(wide) * (1 - lr * group["weight_decay"])
        weight.copy_(fresh.addcdiv_(first, scale, value=-lr / (1 - beta1 ** state["step"])))
