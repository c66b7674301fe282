"""What is wrapped around a layer's forward: recompute and compile. Only `forward` changes: names of
parameters stay, and FSDP's hooks stay outside.

Recompute forgets activations in the forward pass and computes them again in the backward pass:
`full` every layer, `every-N` each N-th by global index, `selective` the attention core. Compile
takes each layer on its own, so that one small graph serves all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fourfold.engine.compat import allow_graphs
from fourfold.engine.model.decoder import Decoder


def apply_recompute(decoder: Decoder, kind: str) -> None:
    if kind == "none":
        return
    for index, layer in decoder.blocks.items():
        if kind == "selective":
            _wrap(layer.attention.core)
        elif kind == "full" or index % int(kind.removeprefix("every-")) == 0:
            _wrap(layer)


def _wrap(module: nn.Module) -> None:
    """Only `forward` changes: names of parameters stay, and FSDP's hooks stay outside."""
    module.forward = _checkpointed(module.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def again(*args: Any) -> Any:
        # No dropout anywhere, so no generator state to restore.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)

    return again


def apply_compile(
    decoder: Decoder, *, enabled: bool, backend: str = "inductor", shapes: int = 2
) -> None:
    """Only `forward` is compiled: FSDP's hooks and parameter names stay outside.

    Shapes are static: a run has one size of micro batch, or two (a ramp-up may have more), and each
    of the `shapes` gets its own fast code; torch gives up at its limit, which is made to fit.
    """
    if not enabled:
        return
    allow_graphs(2 * shapes)
    for layer in decoder.blocks.values():
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True, dynamic=False)
