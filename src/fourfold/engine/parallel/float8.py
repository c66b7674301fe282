"""fp8: matrix products of layers in 8 bits, by torchao; everything around them in bf16.

Inputs, weights and gradients are scaled by their largest value at the moment of use (one scale a
tensor): e4m3 forwards, e5m2 for gradients, all three products of a linear. Weights are gathered in
bf16. Each tensor-parallel rank scales its own part, which only makes scales finer. CPUs have no
units for it: there torchao rounds to fp8 and multiplies in fp32, to show what training does.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fourfold.engine.model.decoder import Decoder
from fourfold.engine.model.layers import Linear, Product
from fourfold.errors import UserError

# Compute capability of the first GPUs with fp8 matrix units.
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
    capability = torch.cuda.get_device_capability()
    if capability < _ADA:
        raise UserError(
            f"needs fp8 matrix units, which {torch.cuda.get_device_name()} (compute capability "
            f"{capability[0]}.{capability[1]}) does not have",
            field="policy.precision",
            value="fp8",
            hint="use bf16",
        )
    return False


def float8_product(*, emulate: bool) -> Product:
    """Like F.linear, in fp8."""
    try:
        from torchao.float8.config import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
    except ImportError as error:
        raise UserError(
            f"needs torchao, which cannot be imported ({error})",
            field="policy.precision",
            value="fp8",
            hint="pip install torchao",
        ) from None
    config = Float8LinearConfig(emulate=emulate)
    # FSDP and tensor parallelism own the weights, so torchao gets no module to keep them in: only
    # what it derives from the recipe is taken.
    model = Float8Linear.from_float(nn.Linear(16, 16, bias=False, device="meta"), config)
    products = model.linear_mm_config

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = matmul_with_hp_or_float8_args.apply(x, weight.t(), products, config)
        return y if bias is None else y + bias

    return product
