"""Data parallelism: FSDP2 over the ranks that see different tokens (dp x cp).

zero0: every rank holds everything, gradients are all-reduced once a step.
zero1: parameters, gradients and optimizer state are sharded between steps; inside a step weights
       and gradients are whole; gradients are reduced once, with the last micro batch.
zero2: gradients are reduced (and only the shard kept) with every micro batch.
zero3: weights too are whole only around their use; the last layer is kept, its backward comes next.
With one micro batch zero1 and zero2 are the same. Hybrid (copies x shards) reduces over copies too.

Reductions are sums: the loss is already divided by the global number of tokens.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fourfold.engine import compat_fsdp
from fourfold.engine.compat import DTYPES, activation_dtype, kernels, put_parameter, version_of
from fourfold.engine.model.decoder import Decoder
from fourfold.engine.model.experts import MoeMlp
from fourfold.engine.parallel.expert_groups import expert_groups
from fourfold.engine.parallel.groups import World
from fourfold.spec.policy import Dtypes, running
from fourfold.spec.run import RunSpec


def apply_data(decoder: Decoder, spec: RunSpec, world: World) -> None:
    """Shard each layer, then what is left (embedding, final norm, head) as one group."""
    if is_alone(spec):
        return
    policy, mesh = spec.policy, world.mesh(spec.policy.zero, world.fsdp, world.dp_cp)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": _formats(policy.dtypes)}
    # State of routers is whole everywhere, and no gradient's.
    options["ignored_params"] = {p for p in decoder.parameters() if not p.requires_grad}
    layers = list(decoder.blocks.values())
    for layer in layers:
        again = policy.zero == 3 and layer is not layers[-1]
        if isinstance(layer.mlp, MoeMlp):
            groups = expert_groups(world)
            own = options | {"mesh": world.mesh(policy.zero, groups.copies, groups.all_copies)}
            fully_shard(layer.mlp.experts, reshard_after_forward=again, **own)
        fully_shard(layer, reshard_after_forward=again, **options)
    fully_shard(decoder, reshard_after_forward=False, **options)
    dtypes = policy.dtypes
    for module in (module for module in decoder.modules() if isinstance(module, FSDPModule)):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        if dtypes.reduce != dtypes.grad:
            module.set_custom_reduce_scatter(compat_fsdp.cast_reduce_scatter(DTYPES[dtypes.reduce]))
    compat_fsdp.fsdp_add_with([decoder], functools.partial(add_gradient, dtype=DTYPES[dtypes.grad]))
    compat_fsdp.fsdp_gather_in_place()
    compat_fsdp.fsdp_gather_gradients_with(widen)
    _set_prefetch([m for m in layers if isinstance(m, FSDPModule)], policy.prefetch)


def _formats(dtypes: Dtypes) -> MixedPrecisionPolicy:
    """FSDP accumulates unreduced gradients in its reduce dtype, so that is our accumulation dtype.
    Inputs are not cast: positions and rotary tables stay as wide as they are."""
    return MixedPrecisionPolicy(
        param_dtype=activation_dtype(dtypes.compute),
        reduce_dtype=DTYPES[dtypes.grad],
        cast_forward_inputs=False,
    )


def _set_prefetch(layers: list[FSDPModule], depth: int) -> None:
    """While a layer computes, gather the next `depth` in the direction of travel."""
    if depth == 0:
        return
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + depth])
        layer.set_modules_to_backward_prefetch(layers[max(0, i - depth) : i][::-1])


def before_backward(decoder: Decoder, zero: int, *, last: bool, kind: str = "B") -> None:
    """Say what the coming backward does with gradients and weights. `kind`: B a whole one; I only
    to the inputs, whose gradients of weights are not whole yet; W the weights' part. `last`: the
    step's last that makes gradients of weights."""
    assert isinstance(decoder, FSDPModule)
    decoder.set_is_last_backward(last)
    decoder.set_requires_gradient_sync(kind != "I" and (last or zero >= 2))
    decoder.set_reshard_after_backward(last or zero == 3)


def backward_weights(decoder: Decoder, multiply: Callable[[int | None], None]) -> None:
    """A split backward's second part: `multiply` makes gradients of a layer (None: of the head). No
    autograd runs here, so what FSDP does after a backward pass is called by hand, layer by layer,
    as torch's own pipelines do: the next layer is multiplied while this one is reduced."""
    multiply(None)
    for index, layer in reversed(decoder.blocks.items()):
        multiply(index)
        if isinstance(layer.mlp, MoeMlp):
            compat_fsdp.fsdp_after_backward(layer.mlp.experts)
        compat_fsdp.fsdp_after_backward(layer)
    compat_fsdp.fsdp_after_backward(decoder, is_root=True)


def is_alone(spec: RunSpec) -> bool:
    """Under zero3 weights are whole only around their use even then: FSDP casts and frees them."""
    copies = spec.layout.edp if spec.model.moe else 1
    return spec.layout.dp * spec.layout.cp == 1 and copies == 1 and spec.policy.zero < 3


def make_alone(spec: RunSpec, chunks: Sequence[Decoder]) -> dict[Decoder, Alone]:
    """The chunks' whole weights; none where ranks share or reduce them."""
    if not is_alone(spec):
        return {}
    computing = activation_dtype(spec.policy.dtypes.compute)
    adding = DTYPES[running(spec.policy, spec.layout).grads]
    return {chunk: Alone(chunk, computing=computing, adding=adding) for chunk in chunks}


@dataclass(slots=True, eq=False)
class _Weight:
    """`used` is what layers compute with: `master` itself, or its copy as of `version`."""

    owner: nn.Module
    name: str
    master: nn.Parameter
    used: nn.Parameter
    version: int = -1
    added: Tensor | None = None

    @property
    def is_copied(self) -> bool:
        return self.used is not self.master


class Alone:
    """The weights of one chunk where nobody else sees other tokens: nothing is gathered or reduced.
    Layers compute with a copy of each weight in their own format, made anew only when the weight
    has changed. Gradients of one micro batch stay as the backward pass made them; more of them add
    up in the format `adding`."""

    def __init__(self, chunk: Decoder, *, computing: torch.dtype, adding: torch.dtype) -> None:
        self.adding = adding
        self.weights: list[_Weight] = []
        for owner in chunk.modules():
            for name, master in owner.named_parameters(recurse=False):
                if not master.requires_grad:
                    continue
                used = master
                if master.dtype != computing:
                    used = nn.Parameter(torch.empty_like(master, dtype=computing))
                    # Gradients keep the format they come in; torch would insist on the weight's.
                    master.grad_dtype = None
                self.weights.append(_Weight(owner, name, master, used))
        # A hook that holds the weight it hangs on would keep both for ever.
        alone: weakref.ref[Alone] = weakref.ref(self)
        for i, weight in enumerate(self.weights):
            weight.used.register_post_accumulate_grad_hook(_collector(alone, i))

    @property
    def copies(self) -> dict[nn.Parameter, Tensor]:
        """By weight, what whoever changes the weight may change with it (then: `mark_equal`)."""
        return {w.master: w.used.detach() for w in self.weights if w.is_copied}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What exists besides weights and their gradients, by kind."""
        for weight in self.weights:
            if weight.is_copied:
                yield "parameters", weight.used.detach()
                if weight.used.grad is not None:
                    yield "gradients", weight.used.grad
            if weight.added is not None:
                yield "gradients", weight.added

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the copies of weights that have changed anew."""
        for weight in self.weights:
            if weight.is_copied and weight.version != version_of(weight.master):
                weight.used.copy_(weight.master)
        self.mark_equal()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, layers find the copies in place of their weights."""
        self.refresh()
        copied = [weight for weight in self.weights if weight.is_copied]
        try:
            for weight in copied:
                put_parameter(weight.owner, weight.name, weight.used)
            yield
        finally:
            for weight in copied:
                put_parameter(weight.owner, weight.name, weight.master)

    def mark_equal(self) -> None:
        """Copies are those of the weights as they are now."""
        for weight in self.weights:
            weight.version = version_of(weight.master)

    def collect(self) -> None:
        """Take gradients that no backward pass of autograd put there (a split one's weights)."""
        for weight in self.weights:
            if weight.used.grad is not None:
                self.collect_one(weight)

    @torch.no_grad()
    def collect_one(self, weight: _Weight) -> None:
        """Take the gradient of one more micro batch away from autograd."""
        fresh = weight.used.grad
        if fresh is None or (fresh.dtype == self.adding and not weight.is_copied):
            return  # torch adds it up where it is
        weight.used.grad = None
        if weight.added is None:
            weight.added = fresh
        else:
            weight.added = add_gradient(weight.added, fresh, self.adding)

    def hand_over(self, wide: Iterable[nn.Parameter] = ()) -> None:
        """After the last micro batch: weights get their gradients. Those of `wide` go through more
        sums and must be as wide as the weight."""
        must = set(wide)
        for weight in self.weights:
            grad, weight.added = weight.added, None
            if grad is not None:
                as_weight = not weight.is_copied or weight.master in must
                weight.master.grad = grad.to(weight.master.dtype) if as_weight else grad


def _collector(alone: weakref.ref[Alone], index: int) -> Callable[[Tensor], None]:
    def collect(_: Tensor) -> None:
        owner = alone()
        if owner is not None:
            owner.collect_one(owner.weights[index])

    return collect


_BLOCK, _WARPS = 4096, 8


@torch.no_grad()
def add_gradient(total: Tensor, fresh: Tensor, dtype: torch.dtype) -> Tensor:
    """`total + fresh` in `dtype`; `total` itself where it has that format already."""
    on_gpu = total.device.type == "cuda" and dtype == torch.float32 != fresh.dtype
    if not (on_gpu and total.is_contiguous() and fresh.is_contiguous()):
        return total.to(dtype).add_(fresh)
    out = total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
    grid = (-(-total.numel() // _BLOCK),)
    kernels().add[grid](total, fresh, out, total.numel(), BLOCK=_BLOCK, num_warps=_WARPS)
    return out


@torch.no_grad()
def widen(narrow: Tensor, wide: Tensor) -> None:
    """Copy [rows, values] on a GPU; rows of `narrow` lie side by side, those of `wide` may not."""
    rows, width = narrow.shape
    grid = (rows, -(-width // _BLOCK))
    kernels().widen[grid](narrow, wide, width, wide.stride(0), BLOCK=_BLOCK, num_warps=_WARPS)
