"""Other products for linears: with weight gradients that come later, or in fp8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.engine.model.decoder import Decoder, Head
from fourfold.engine.model.layers import Linear, Product
from fourfold.errors import UserError
from fourfold.spec import check


@dataclass(frozen=True, slots=True)
class _Deferred:
    weight: Tensor
    bias: Tensor | None
    x: Tensor
    grad: Tensor

    @torch.no_grad()
    def multiply(self) -> None:
        x, grad = self.x.flatten(0, -2), self.grad.flatten(0, -2)
        _add(self.weight, grad.t() @ x)
        if self.bias is not None:
            _add(self.bias, grad.sum(dim=0))


def _add(parameter: Tensor, grad: Tensor) -> None:
    parameter.grad = grad if parameter.grad is None else parameter.grad + grad


class DeferredWeightGrads:
    """What the weights of one chunk still have to do, by micro batch and layer (None: the head). Of
    every product the backward pass keeps input and output's gradient; dW = dY^T X needs no weights,
    so FSDP may have let go of them. Norms, embeddings and biases added apart are cheap and stay in
    the first part, and so does recompute."""

    def __init__(self) -> None:
        self._this_pass: dict[int | None, list[_Deferred]] = {}
        self._waiting: dict[int, dict[int | None, list[_Deferred]]] = {}

    def product(self, layer: int | None) -> Product:
        """Like F.linear; its backward keeps what the weight's gradient needs."""

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return _DeferredProduct.apply(x, weight, bias, self, layer)

        return product

    def add(self, layer: int | None, deferred: _Deferred) -> None:
        self._this_pass.setdefault(layer, []).append(deferred)

    def keep(self, micro: int) -> None:
        """The backward pass of `micro` to the inputs is over."""
        self._waiting[micro], self._this_pass = self._this_pass, {}

    def multiply(self, micro: int, layer: int | None) -> None:
        """Gradients of one layer's weights, added to what they have; none where a layer multiplied
        nothing (a planted fault skips one)."""
        waiting = self._waiting.get(micro, {})
        for deferred in waiting.pop(layer, ()):
            deferred.multiply()
        if not waiting:
            self._waiting.pop(micro, None)


class _DeferredProduct(torch.autograd.Function):
    """The weight is kept beside autograd: under recompute a saved one would be a nameless copy."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        deferred: DeferredWeightGrads,
        layer: int | None,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.deferred, ctx.layer = weight, bias, deferred, layer
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (grad,) = grads
        (x,) = ctx.saved_tensors
        # Detached: else the graph of this pass stays, and with it the stage's input and gradient.
        ctx.deferred.add(ctx.layer, _Deferred(ctx.weight, ctx.bias, x.detach(), grad))
        d_x = grad @ ctx.weight if ctx.needs_input_grad[0] else None
        return d_x, None, None, None, None


def apply_split(decoder: Decoder) -> DeferredWeightGrads:
    """Let every matrix product of a chunk leave its weights for later."""
    deferred = DeferredWeightGrads()
    for index, layer in decoder.blocks.items():
        for module in layer.modules():
            if isinstance(module, Linear):
                module.product = deferred.product(index)
    for module in decoder.modules():
        if isinstance(module, Head):
            module.product, module.loss_in_chunks = deferred.product(None), None
    return deferred


# Compute capability of the first GPUs with FP8 tensor cores.
_ADA = (8, 9)


def apply_float8(decoder: Decoder, device_type: str) -> None:
    """Replace the products of all linears of layers; embedding, head and norms stay as they are."""
    product = float8_product(emulate=_emulates(device_type))
    for layer in decoder.blocks.values():
        for module in layer.modules():
            if isinstance(module, Linear):
                module.product = product


def _emulates(device_type: str) -> bool:
    if device_type == "cpu":
        # On fake tensors nothing is multiplied: what a GPU would hold is what counts.
        return dist.get_backend() != "fake"
    major, minor = capability = torch.cuda.get_device_capability()
    name = f"{torch.cuda.get_device_name()} (compute capability {major}.{minor})"
    rule = f"needs FP8 tensor cores: {name} has none"
    check.that(capability >= _ADA, "policy.precision", "fp8", rule, "use bf16")
    return False


def float8_product(*, emulate: bool) -> Product:
    """Like F.linear, in fp8 by torchao: inputs, weights and gradients are scaled by their largest
    value (each tensor-parallel rank its own part), e4m3 forwards, e5m2 for gradients. CPUs have no
    units for it: there torchao rounds to fp8 and multiplies in fp32."""
    try:
        from torchao.float8.config import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
    except ImportError as error:
        rule, hint = f"needs torchao, which cannot be imported ({error})", "pip install torchao"
        raise UserError(rule, field="policy.precision", value="fp8", hint=hint) from None
    config = Float8LinearConfig(emulate=emulate)
    # FSDP and tensor parallelism own the weights, so torchao gets no module to keep them in: only
    # what it derives from the recipe is taken.
    model = Float8Linear.from_float(nn.Linear(16, 16, bias=False, device="meta"), config)
    products = model.linear_mm_config

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = matmul_with_hp_or_float8_args.apply(x, weight.t(), products, config)
        return y if bias is None else y + bias

    return product
