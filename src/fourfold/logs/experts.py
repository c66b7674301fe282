"""Experts of a run as Megatron prints them, and models that are known by their config or name, in
columns of the reference schema."""

from __future__ import annotations

import re

from fourfold.errors import UserError
from fourfold.logs.nested import Flat, is_none, pattern, whole, yes
from fourfold.logs.words import columns
from fourfold.spec import ModelShape, texts
from fourfold.spec.hf.shapes import shape_from_config

_WORDS = re.compile(r"[a-z][a-z_]+")
_SCOPES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")


def expert_count(args: Flat) -> int:
    return whole(args.get("num_experts")) or whole(args.get("num_moe_experts")) or 0


def megatron_experts(args: Flat) -> Flat:
    """{} of a dense model; 'unmodelled' where the layers with experts follow no rule of ours."""
    count, is_latent = expert_count(args), yes(args.get("multi_latent_attention"))
    if count < 2:
        return {"unmodelled": "latent attention"} if is_latent else {}
    known = latent_facts(args) if is_latent else {}
    facts = columns("megatron-experts", args) | {"experts": str(count)} | known
    return facts | _placed(args) | {
        "dispatcher": _dispatcher(args),
        "a2a_overlap": str(int(yes(args.get("overlap_moe_expert_parallel_comm")))),
        "routing": _routing(args),
        "recompute_modules": recomputed(args),
        "family": _family(args),
    }  # fmt: skip


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


def _placed(args: Flat) -> Flat:
    """A number, every so many; or a list with 1 for each layer with experts."""
    said = args.get("moe_layer_freq", "1")
    if (every := whole(said)) is not None:
        return {"moe_every": str(every)} if every > 1 else {}
    return placed(pattern(said))


def placed(kinds: list[int]) -> Flat:
    dense = kinds.index(1) if 1 in kinds else len(kinds)
    if all(kinds[dense:]):
        return {"dense_layers": str(dense)} if dense else {}
    every = len(kinds) // max(1, sum(kinds))
    if kinds == [int((at + 1) % every == 0) for at in range(len(kinds))]:
        return {"moe_every": str(every)}
    return {"unmodelled": f"experts in {sum(kinds)} of {len(kinds)} layers"}


def _dispatcher(args: Flat) -> str:
    kind = args.get("moe_token_dispatcher_type", "")
    if kind == "flex":
        backend = args.get("moe_flex_dispatcher_backend")
        return "deepep" if backend is None or is_none(backend) else backend
    return "alltoall" if kind == "alltoall_seq" else kind


def _routing(args: Flat) -> str:
    if yes(args.get("moe_router_force_load_balancing")):
        return "forced"
    return "natural" if is_none(args.get("moe_expert_capacity_factor")) else "drop"


def recomputed(args: Flat) -> str:
    """Modules of selective recompute; '' where none are named."""
    said = args.get("recompute_modules")
    if args.get("recompute_granularity") != "selective" or is_none(said):
        return ""
    return " ".join(_WORDS.findall(said or ""))


def graphs(args: Flat) -> str:
    """What of a step is captured as CUDA graphs; '' where it does not say."""
    kind, scope = args.get("cuda_graph_impl", ""), args.get("cuda_graph_scope", "")
    if is_none(kind):
        return "none" if kind.lower() == "none" else ""
    return "full_iteration" if "full_iteration" in scope else f"{kind} {_scopes(scope)}".strip()


def _scopes(text: str) -> str:
    """Of '[<CudaGraphScope.attn: 2>, ...]', or of words."""
    return " ".join(name for name in _SCOPES if re.search(rf"\b{name}\b", text))


def _family(args: Flat) -> str:
    if yes(args.get("multi_latent_attention")):
        return "deepseek"
    return "qwen-moe" if yes(args.get("qk_layernorm")) else "mixtral"


def model_columns(shape: ModelShape) -> Flat:
    """Of a model that is known by name."""
    moe, latent = shape.moe, shape.latent
    sizes: dict[str, object] = {
        "family": shape.family, "n_layers": shape.layers, "d_model": shape.hidden,
        "n_heads": shape.heads, "n_kv_heads": shape.kv_heads, "head_dim": shape.head_size,
        "d_ff": shape.ffn, "vocab": shape.vocab,
    }  # fmt: skip
    if moe:
        sizes |= {
            "experts": shape.experts, "experts_per_token": shape.top_k, "expert_ffn": moe.ffn,
            "shared_ffn": moe.shared_ffn, "dense_layers": moe.dense_first, "moe_every": moe.every,
        }  # fmt: skip
    if latent:
        sizes |= {
            "attn_kind": "mla", "kv_lora_rank": latent.kv_rank, "q_lora_rank": latent.q_rank,
            "qk_rope_dim": latent.rope, "v_head_dim": latent.v,
        }  # fmt: skip
    known = {name: str(value) for name, value in sizes.items() if value}
    return known | {"tied": str(int(shape.tied))}
