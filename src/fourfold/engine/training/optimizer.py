"""The optimizers: AdamW on this rank's shards (Loshchilov and Hutter 2019), as plain local tensors;
Muon's matrices have a room of their own (muon.py), and AdamW the rest.

Fused where torch has it; in one pass over memory (clipping, update and copy together) where steps
are compiled or moments are in another format than weights; else by torch's plain loop. Matrices
decay, vectors (norms, biases) do not. Another optimizer is a name in `spec.policy`, an entry of
KINDS here, and what its update costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.engine import compat
from fourfold.engine.compat import local
from fourfold.engine.training.muon import MOMENT, MuonMatrices
from fourfold.spec.train import TrainSettings

Groups = list[dict[str, Any]]
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """`max_norm` clips by the global norm of the gradient; None leaves gradients as they are."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float | None = 1.0

    @classmethod
    def of(cls, train: TrainSettings) -> OptimizerSettings:
        return cls(
            lr=train.lr,
            betas=(train.beta1, train.beta2),
            eps=train.eps,
            weight_decay=train.weight_decay,
            max_norm=train.max_norm or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """`dtype` of the moments; `copies`, by leaf, are kept equal to it in their own format."""

    dtype: torch.dtype
    compiled: bool = False
    copies: Mapping[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Kind:
    """One choice of `policy.optimizer`. `state`: names of the tensors it keeps for each weight;
    `reference`: torch's own, which updates are compared with and timed against. Of Muon both are
    those of weights that are no matrices of layers."""

    state: tuple[str, ...]
    make: Callable[[Groups, OptimizerSettings, How], torch.optim.Optimizer]
    reference: Callable[..., torch.optim.Optimizer]


def _adamw(
    groups: Groups, settings: OptimizerSettings, how: How, *, fused: bool
) -> torch.optim.Optimizer:
    leaves = [leaf for group in groups for leaf in group["params"]]
    options: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    if any(leaf.dtype != how.dtype for leaf in leaves) or (fused and how.compiled and leaves):
        return OnePassAdamW(groups, how, **options)
    if fused:
        return _FusedAdamW(groups, fused=True, **options)
    return torch.optim.AdamW(groups, fused=False, foreach=False, **options)


def _torch_adamw(
    groups: Groups, settings: OptimizerSettings, **options: Any
) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, **options
    )


KINDS: dict[str, Kind] = {
    "adamw": Kind(MOMENTS, partial(_adamw, fused=True), _torch_adamw),
    "adamw-plain": Kind(MOMENTS, partial(_adamw, fused=False), _torch_adamw),
    "muon": Kind(MOMENTS, partial(_adamw, fused=True), _torch_adamw),
}

# Makes Muon's part of an optimizer from the local shards by parameter, the settings and formats.
MakeMuon = Callable[[Mapping[nn.Parameter, Tensor], OptimizerSettings, How], MuonMatrices]


def param_groups(tensors: list[Tensor], settings: OptimizerSettings) -> Groups:
    matrices = [t for t in tensors if t.ndim > 1]
    vectors = [t for t in tensors if t.ndim <= 1]
    decays = ((matrices, settings.weight_decay), (vectors, 0.0))
    return [{"params": params, "weight_decay": decay} for params, decay in decays if params]


class Optimizer:
    """`leaves` alias the local shards of `params`; empty shards have nothing to update. `copies`,
    by parameter, are kept equal to it in their own format. `make_muon`: the matrices that Muon
    updates; the inner optimizer has the rest, if there is any."""

    def __init__(
        self,
        params: list[nn.Parameter],
        settings: OptimizerSettings,
        *,
        kind: str,
        dtype: torch.dtype,
        compiled: bool = False,
        copies: Mapping[nn.Parameter, Tensor] | None = None,
        make_muon: MakeMuon | None = None,
    ) -> None:
        self.params = [p for p in params if local(p).numel()]
        self.leaves = [local(p.detach()).requires_grad_() for p in self.params]
        for leaf in self.leaves:
            leaf.grad_dtype = None  # gradients come in formats of their own
        self._leaf_of = dict(zip(self.params, self.leaves, strict=True))
        self.copies = {self._leaf_of[p]: c for p, c in (copies or {}).items() if p in self._leaf_of}
        how = How(dtype=dtype, compiled=compiled, copies=self.copies)
        self.kind = KINDS[kind]
        self.muon = make_muon(self._leaf_of, settings, how) if make_muon else None
        of_muon = set() if self.muon is None else set(self.muon.leaves.values())
        rest = [leaf for leaf in self.leaves if leaf not in of_muon]
        groups = param_groups(rest, settings)
        self.inner = self.kind.make(groups, settings, how) if groups or not of_muon else None
        self.rest = rest
        self.rest_copies = {leaf: self.copies[leaf] for leaf in rest if leaf in self.copies}

    def set_lr(self, lr: float) -> None:
        for group in self.inner.param_groups if self.inner else ():
            group["lr"] = lr
        if self.muon is not None:
            self.muon.lr = lr

    def states(self) -> Iterator[dict[str, Any]]:
        """Yield what is kept of each weight between updates."""
        if self.inner is not None:
            yield from self.inner.state.values()
        if self.muon is not None:
            yield from self.muon.state.values()

    def _state(self, leaf: Tensor) -> dict[str, Any]:
        if self.muon is not None and leaf in self.muon.state:
            return self.muon.state[leaf]
        return {} if self.inner is None else self.inner.state.get(leaf, {})

    def moments(self, param: nn.Parameter) -> dict[str, Tensor]:
        """The moments of a parameter's local shard by name; none before the first update, nor of
        what is not learned by gradients (a router's state)."""
        leaf = self._leaf_of.get(param)
        state = {} if leaf is None else self._state(leaf)
        return {name: state[name] for name in (*self.kind.state, MOMENT) if name in state}

    @property
    def updates(self) -> int:
        """Updates so far, the same for all weights; waits for the device."""
        states = [self._state(leaf) for leaf in self.leaves]
        counts = {int(state["step"]) if state else 0 for state in states}
        assert len(counts) <= 1, f"weights were updated different numbers of times: {counts}"
        return counts.pop() if counts else 0

    def restore(self, updates: int) -> None:
        """As after so many updates, with moments of 0 for the caller to fill."""
        if self.muon is not None:
            self.muon.restore(updates)
        if self.inner is None:
            return
        self.inner.state.clear()
        if isinstance(self.inner, OnePassAdamW):
            self.inner.count.fill_(updates)
            for leaf in self.rest if updates else ():
                self.inner.begin(leaf)
            return
        for leaf in self.rest if updates else ():
            # torch's fused kernels count on the device, its plain loop on the host.
            where = leaf.device if self.inner.defaults.get("fused") else torch.device("cpu")
            state = self.inner.state[leaf]
            state["step"] = torch.tensor(float(updates), dtype=torch.float32, device=where)
            for name in self.kind.state:
                state[name] = torch.zeros_like(leaf, requires_grad=False)

    def step(self, overflow: Tensor | None = None, factor: Tensor | None = None) -> None:
        """Update by gradients times `factor`, then forget them. Where `overflow` is 1 nothing is
        updated: fused kernels read that on the device, a plain loop waits for it here."""
        as_is = set() if self.muon is None else set(self.muon.leaves.values())
        if isinstance(self.inner, OnePassAdamW):
            as_is = set(self.leaves)
        for param, leaf in zip(self.params, self.leaves, strict=True):
            if param.grad is not None:
                grad = local(param.grad)
                leaf.grad = grad if leaf in as_is else grad.to(leaf.dtype)
                param.grad = None
        self._update(overflow, factor)
        if self.muon is not None:
            self.muon.step(overflow, factor)
        for leaf in self.leaves:
            leaf.grad = None

    def _update(self, overflow: Tensor | None, factor: Tensor | None) -> None:
        if self.inner is None:
            return
        if isinstance(self.inner, OnePassAdamW):
            self.inner.factor, self.inner.overflow = factor, overflow
            self.inner.step()
            return
        grads = [leaf.grad for leaf in self.rest if leaf.grad is not None]
        if factor is not None and grads:
            compat.foreach_mul_(grads, factor.to(grads[0].dtype))
        if isinstance(self.inner, _FusedAdamW):
            self.inner.found_inf = overflow
            self.inner.step()
        elif overflow is None or not bool(overflow):
            self.inner.step()
        if self.rest_copies:
            with torch.no_grad():
                compat.foreach_copy_(list(self.rest_copies.values()), list(self.rest_copies))


class _FusedAdamW(torch.optim.AdamW):
    """torch's; its kernels look for this tensor and leave everything alone where it is 1."""

    found_inf: Tensor | None = None


class OnePassAdamW(torch.optim.Optimizer):
    """`factor` multiplies all gradients; where `overflow` is 1 nothing changes. `copies`, by leaf,
    become the leaf's new values in their own format. All leaves share one count of steps."""

    factor: Tensor | None = None
    overflow: Tensor | None = None

    def __init__(
        self, groups: Groups, how: How, *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.dtype, self.copies = how.dtype, how.copies
        leaves = [leaf for group in self.param_groups for leaf in group["params"]]
        wide = torch.promote_types(leaves[0].dtype, how.dtype)
        self.wide = torch.promote_types(wide, torch.float32)
        self.count = torch.zeros((), dtype=torch.float64, device=leaves[0].device)
        self._update: Callable[..., None] = _compiled_for(leaves) if how.compiled else _update

    def begin(self, leaf: Tensor) -> None:
        """State before the first update; the count is everybody's."""
        state = self.state[leaf]
        state["step"] = self.count
        for moment in MOMENTS:
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
    """One graph per size."""
    compat.allow_graphs(4 * len({leaf.numel() for leaf in leaves}))
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
