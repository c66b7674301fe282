"""What one rank gets on a CPU while all ranks of a group do the same: a product, a copy, a layer of
our engine both ways, and one that is all overhead."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from fourfold.engine.microbench.device import copying, product
from fourfold.engine.microbench.rounds import Work, in_rounds
from fourfold.engine.model.decoder import Layer
from fourfold.engine.model.positions import make_tables
from fourfold.engine.parallel.groups import Group
from fourfold.engine.process.task import CPU
from fourfold.result import profile
from fourfold.spec.model import ModelShape

_SIDE, _COPIED = 512, 2**26


def cpu_rates(group: Group, seconds: float, cores: int) -> profile.SharedPoint:
    usual = profile.measured_layer()
    tiny = replace(usual.model, hidden=16, ffn=32, heads=2, kv_heads=1)
    works = [
        product("fp32", (_SIDE, _SIDE, _SIDE), CPU),
        copying(_COPIED, CPU),
        _passes(usual.model, usual.batch.seq_len),
        _passes(tiny, 4),
    ]
    rounds = in_rounds(works, group, seconds, cores)
    multiplied_s, copied_s, layer_s, start_s = rounds.seconds
    return profile.SharedPoint(
        ranks=group.size,
        dtype="fp32",
        flops_per_s=2.0 * _SIDE**3 / multiplied_s,
        bytes_per_s=2.0 * _COPIED / copied_s,
        layer_s=layer_s,
        start_s=start_s,
        unsteady=rounds.unsteady,
    )


def _passes(model: ModelShape, tokens: int) -> Work:
    """Forward and backward through one layer."""
    layer = Layer(model, 0, fused=True)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    tables = make_tables(model, torch.arange(tokens), range(model.heads))
    x = torch.randn(1, tokens, model.hidden, requires_grad=True)
    grad = torch.randn(1, tokens, model.hidden)

    def work() -> None:
        for parameter in layer.parameters():
            parameter.grad = None
        layer(x, tables).backward(grad)

    return work
