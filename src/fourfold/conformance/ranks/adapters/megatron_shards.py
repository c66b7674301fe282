"""Where Megatron keeps each weight: the numbers of a local parameter's elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def shard_numbers(engine: Any, model: Any, name: str) -> Tensor:
    """The numbers of a local parameter's elements."""
    state, full, t = engine.state, engine.elements.start, engine.tiny
    rank, tp = state.get_tensor_model_parallel_rank(), engine.cell.tp
    etp = engine.cell.etp or tp
    asked = getattr(state, "get_expert_tensor_parallel_rank", None)
    expert_rank = asked() if asked else rank % etp

    def rows(x: Tensor) -> Tensor:
        return x.chunk(tp)[rank]

    top = {
        "embedding.word_embeddings.weight": "embed",
        "decoder.final_layernorm.weight": "norm",
    }
    top["output_layer.weight"] = "embed" if t.tied else "head"
    if name in top:
        return full["norm"] if top[name] == "norm" else rows(full[top[name]])
    part = name.split(".")
    layer, rest = model.decoder.layers[int(part[2])].layer_number - 1, ".".join(part[3:])
    w = {key.split(".")[1]: value for key, value in full.items() if key.startswith(f"{layer}.")}
    if rest.endswith("linear_qkv.weight"):
        q, k, v = (w[one].view(t.kv_heads, -1, t.hidden) for one in "qkv")
        return rows(torch.cat([q, k, v], 1)).flatten(0, 1)
    if ".local_experts." in rest:
        expert = state.get_expert_model_parallel_rank() * (t.experts // engine.cell.ep)
        expert += int(part[part.index("local_experts") + 1])
        cuts = [w[one][expert].chunk(etp)[expert_rank] for one in ("egate", "eup")]
        if rest.endswith("linear_fc1.weight"):
            return torch.cat(cuts)
        return w["edown"][expert].chunk(etp, 1)[expert_rank]
    if rest == "mlp.linear_fc1.weight":
        return torch.cat([rows(w["gate"]), rows(w["up"])])
    if rest == "self_attention.core_attention.softmax_offset":
        return rows(w["sink"])
    columns = {"self_attention.linear_proj.weight": "o", "mlp.linear_fc2.weight": "down"}
    if rest in columns:
        return w[columns[rest]].chunk(tp, 1)[rank]
    whole = {"input_layernorm.weight": "norm1", "pre_mlp_layernorm.weight": "norm2"}
    return w[{**whole, "mlp.router.weight": "router"}[rest]]
