"""Experts of a run as Megatron prints them, in columns of the reference schema."""

from __future__ import annotations

import re

from fourfold.logs.models import latent_facts, placed
from fourfold.logs.nested import Flat, is_none, pattern, whole, yes
from fourfold.logs.words import columns

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
    return (
        facts
        | _placed(args)
        | {
            "dispatcher": _dispatcher(args),
            "a2a_overlap": str(int(yes(args.get("overlap_moe_expert_parallel_comm")))),
            "routing": _routing(args),
            "recompute_modules": recomputed(args),
            "family": _family(args),
        }
    )


def _placed(args: Flat) -> Flat:
    """A number, every so many; or a list with 1 for each layer with experts."""
    said = args.get("moe_layer_freq", "1")
    if (every := whole(said)) is not None:
        return {"moe_every": str(every)} if every > 1 else {}
    return placed(pattern(said))


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
