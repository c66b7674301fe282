"""Compile: each layer on its own, so that one small graph serves all layers."""

from __future__ import annotations

import torch

from fourfold.engine.compat import allow_graphs
from fourfold.engine.model.decoder import Decoder


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
