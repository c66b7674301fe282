"""Recompute: forget activations in the forward pass and compute them again in the backward pass.

`full`: every layer; `every-N`: each N-th layer by global index; `selective`: the attention core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

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
