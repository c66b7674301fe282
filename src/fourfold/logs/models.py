"""Models that are known by their config or name, and parts that engines print alike, in columns of
the reference schema."""

from __future__ import annotations

from fourfold.errors import UserError
from fourfold.logs.nested import Flat, whole
from fourfold.logs.words import columns
from fourfold.spec import ModelShape, texts
from fourfold.spec.hf.shapes import shape_from_config


def config_columns(text: str) -> Flat:
    """Of a model's config.json behind its class, on ranks that hold all experts; 'unmodelled' where
    it cannot be read exactly, or asks for windows, which the schema has no column for."""
    try:
        shape = shape_from_config(texts.parse_json(text[text.find("{") :]))
    except UserError as error:
        return {"unmodelled": f"a model whose {error}"}
    facts = model_columns(shape)
    if shape.window:
        facts["unmodelled"] = f"windows of {shape.window} tokens"
    return facts | ({"ep": "1", "etp": "1", "routing": "natural"} if shape.experts else {})


def latent_facts(args: Flat) -> Flat:
    """Latent attention; engines differ in what they call the two parts of a key."""
    facts = columns("latent", args)
    nope, rope = whole(facts.pop("_nope", "")), whole(facts.get("qk_rope_dim"))
    return facts | ({"head_dim": str(nope + rope)} if nope and rope else {})


def placed(kinds: list[int]) -> Flat:
    dense = kinds.index(1) if 1 in kinds else len(kinds)
    if all(kinds[dense:]):
        return {"dense_layers": str(dense)} if dense else {}
    every = len(kinds) // max(1, sum(kinds))
    if kinds == [int((at + 1) % every == 0) for at in range(len(kinds))]:
        return {"moe_every": str(every)}
    return {"unmodelled": f"experts in {sum(kinds)} of {len(kinds)} layers"}


def model_columns(shape: ModelShape) -> Flat:
    """Of a model that is known by name."""
    moe, latent = shape.moe, shape.latent
    sizes: dict[str, object] = {
        "family": shape.family,
        "n_layers": shape.layers,
        "d_model": shape.hidden,
        "n_heads": shape.heads,
        "n_kv_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "d_ff": shape.ffn,
        "vocab": shape.vocab,
    }
    if moe:
        sizes |= {
            "experts": shape.experts,
            "experts_per_token": shape.top_k,
            "expert_ffn": moe.ffn,
            "shared_ffn": moe.shared_ffn,
            "dense_layers": moe.dense_first,
            "moe_every": moe.every,
        }
    if latent:
        sizes |= {
            "attn_kind": "mla",
            "kv_lora_rank": latent.kv_rank,
            "q_lora_rank": latent.q_rank,
            "qk_rope_dim": latent.rope,
            "v_head_dim": latent.v,
        }
    known = {name: str(value) for name, value in sizes.items() if value}
    return known | {"tied": str(int(shape.tied))}
