"""Compile: each layer on its own, so that one small graph serves all layers."""

from __future__ import annotations

import torch

from fourfold.engine.model.decoder import Decoder


def apply_compile(decoder: Decoder, *, enabled: bool, backend: str = "inductor") -> None:
    """Only `forward` is compiled: FSDP's hooks and parameter names stay outside.

    Shapes are static: a run has one size of micro batch, or two, and each gets its own fast code.
    """
    if not enabled:
        return
    for layer in decoder.blocks.values():
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True, dynamic=False)
