"""What a rank of 256 holds of a large model with experts: counted by the engine, and by hand."""

from __future__ import annotations

import pytest

from fourfold.cost.count.params import stage_layers
from fourfold.spec import catalog
from fourfold.spec.model import ModelShape

TOKENS, STAGES, GPUS = 4096, 4, 256


def state_bytes(params: int, routed: int, copies: int) -> float:
    """Weights to compute with, and gradients in fp32, whole; weights in fp32 and two moments over
    the ranks that hold the same."""
    ranks = GPUS // STAGES
    return 6 * params + 12 * (params - routed) / ranks + 12 * routed / copies


def kept_bytes(model: ModelShape, layer: int) -> float:
    """Of a token in a layer: what the backward pass needs, in 16 bits but for what routers keep."""
    h, latent, moe = model.hidden, model.latent, model.moe
    if latent is not None:
        narrow = 2 * latent.q_rank + latent.kv_rank + latent.rope + latent.kv_rank
        heads = 2 * (latent.nope + latent.rope) + (latent.nope + latent.v) + latent.v
        attention = 2 * (2 * h + narrow + model.heads * heads) + 4 * model.heads
    else:
        q, kv = model.attention_width, model.kv_width
        attention = 2 * (2 * h + (q + 2 * kv) + (q + kv) + q) + 4 * model.heads
    if moe is None or model.layer_kinds()[layer].feed_forward == "dense":
        return attention + 2 * (2 * h + 4 * model.ffn)
    routed = model.top_k * 2 * (h + 3 * moe.ffn)
    return attention + 2 * (2 * h + 4 * moe.shared_ffn) + 8 * model.experts + routed


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("name", "ep"), [("deepseek-v3", 64), ("qwen3-235b-a22b", 8)])
def test_a_rank_of_256_holds_what_a_sum_by_hand_says(name: str, ep: int, cli) -> None:
    """The first stage holds as many micro batches as there are stages, beside all gradients."""
    words = (
        f"dryrun --model {name} --gpus {GPUS} --pp {STAGES} --ep {ep} --seq-len {TOKENS} "
        "--micro-batch 1 --global-batch 384 --precision bf16-mixed"
    )
    (stage,) = cli.json(*words.split())["stages"]
    model = catalog.model(name)
    layers = stage_layers(model, STAGES, TOKENS)[0]
    kinds = model.layer_kinds()
    routed_layers = sum(kinds[layer].feed_forward == "experts" for layer in layers)
    experts = routed_layers * model.experts // ep
    routed = experts * 3 * model.hidden * model.moe.ffn
    state = state_bytes(stage["params"], routed, GPUS // STAGES // ep)
    assert stage["state_bytes"] == pytest.approx(state, rel=1e-3)
    kept = STAGES * TOKENS * sum(kept_bytes(model, layer) for layer in layers)
    print(f"{name}: {stage['peak_bytes'] / 1e9:.1f} GB, by hand {(state + kept) / 1e9:.1f} GB")
    assert stage["peak_bytes"] == pytest.approx(state + kept, rel=0.03)
