"""Megatron-LM's flags of experts, latent attention and layers that predict further tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from fourfold.search.export.setup import Flags, Setup, no_setting
from fourfold.spec.experts import Latent, Moe
from fourfold.spec.layers import FeedForward, Mixer
from fourfold.spec.model import ModelShape

_FLEX: Flags = {"--moe-token-dispatcher-type": "flex"}
_DISPATCHERS: dict[str, Flags] = {
    "alltoall": {"--moe-token-dispatcher-type": "alltoall"},
    "allgather": {"--moe-token-dispatcher-type": "allgather"},
    "deepep": _FLEX | {"--moe-flex-dispatcher-backend": "deepep"},
    "hybridep": _FLEX | {"--moe-flex-dispatcher-backend": "hybridep"},
}
_BALANCE = {"none": "none", "batch": "global_aux_loss", "sequence": "seq_aux_loss"}
# A group is scored by the sum of so many of its experts.
_GROUP_SCORES = {"best": 1, "best-two": 2}
_GRAPHS: Flags = {
    "--cuda-graph-impl": "transformer_engine",
    "--cuda-graph-modules": "attn moe_router moe_preprocess",
    "--te-rng-tracker": None,
}
# Buffers of a fixed size, as the recipes of whole-step graphs have them (Megatron-Bridge 0.6.2).
_ROOM = 1.5
_FIXED_ROWS: Flags = {
    "--moe-expert-rank-capacity-factor": _ROOM,
    "--moe-paged-stash": None,
    "--moe-paged-stash-buffer-size-factor-cuda": 1.2,
    "--moe-paged-stash-buffer-size-factor-cpu": 1.0,
    "--moe-pad-experts-for-cuda-graph-inference": None,
    "--use-transformer-engine-op-fuser": None,
    "--moe-mlp-glu-interleave-size": 32,
}
# Recompute whose parts lie around those graphs.
_AROUND_GRAPHS = ("full", "block", "moe")


def has_all_biases(model: ModelShape) -> bool:
    """Return whether router, experts and attention all have them, and there is no other linear."""
    moe = model.moe
    if moe is None or moe.shared_ffn or model.count_layers("dense"):
        return False
    return moe.router_bias and moe.expert_bias and model.biased("qkv") and model.biased("out")


def check_experts(model: ModelShape, moe: Moe) -> None:
    for name, has in (("router_bias", moe.router_bias), ("expert_bias", moe.expert_bias)):
        if has and not has_all_biases(model):
            rule = "false, or biases of router, experts and attention alike"
            raise no_setting("megatron", f"model.moe.{name}", has, rule)
    if moe.score == "sqrtsoftplus":
        raise no_setting("megatron", "model.moe.score", moe.score, "softmax or sigmoid")
    # Its softmax is over all experts or over the chosen; its sigmoids are normalised over several.
    fixed = {"softmax": (False,) if model.top_k == 1 else (), "sigmoid": (model.top_k > 1,)}
    if fixed[moe.score] and moe.normalised not in fixed[moe.score]:
        hint = f"{str(not moe.normalised).lower()} for {moe.score} and top_k {model.top_k}"
        raise no_setting("megatron", "model.moe.normalised", moe.normalised, hint)
    if moe.choice_bias and moe.score != "sigmoid":
        raise no_setting("megatron", "model.moe.choice_bias", True, "score = sigmoid")
    scored = model.top_k // moe.group_top_k
    if moe.groups > 1 and _GROUP_SCORES[moe.group_score] != scored:
        hint = f"the {scored} best of a group: it takes top_k / group_top_k of them"
        raise no_setting("megatron", "model.moe.group_score", moe.group_score, hint)


def expert_flags(setup: Setup, moe: Moe) -> Flags:
    model, layout = setup.model, setup.layout
    flags: Flags = {
        "--num-experts": model.experts,
        "--moe-ffn-hidden-size": moe.ffn,
        "--expert-model-parallel-size": layout.ep,
        "--expert-tensor-parallel-size": layout.etp,  # unsaid, it is that of dense layers
        "--moe-grouped-gemm": None,
        "--moe-permute-fusion": None,
        **_DISPATCHERS[setup.dispatcher if setup.dispatcher != "local" else "alltoall"],
        **_router(model, moe),
    }
    if moe.dense_first or moe.every > 1:
        flags["--moe-layer-freq"] = layer_pattern(model, "experts")
    if moe.shared_ffn:
        flags["--moe-shared-expert-intermediate-size"] = moe.shared_ffn
    if moe.shared_gate:
        flags["--moe-shared-expert-gate"] = None
    if moe.capacity:
        flags["--moe-expert-capacity-factor"] = moe.capacity
        flags["--moe-token-drop-policy"] = "position"
    if setup.policy.routing == "forced":
        flags["--moe-router-force-load-balancing"] = None
    if setup.policy.overlap_exchange:
        flags |= _overlap(setup)
    if setup.policy.cuda_graph:
        return flags | _FIXED_ROWS
    return flags | (_GRAPHS if _graphed(setup) else {})


def _router(model: ModelShape, moe: Moe) -> Flags:
    flags: Flags = {
        "--moe-router-topk": model.top_k,
        "--moe-router-dtype": "fp32",
        "--moe-router-score-function": moe.score,
        "--moe-router-load-balancing-type": _BALANCE[moe.balance],
        "--moe-aux-loss-coeff": moe.balance_weight if moe.balance != "none" else 0.0,
    }
    if moe.score == "softmax" and not moe.normalised:
        flags["--moe-router-pre-softmax"] = None
    if moe.scale != 1.0:
        flags["--moe-router-topk-scaling-factor"] = moe.scale
    if moe.groups > 1:
        flags |= {
            "--moe-router-num-groups": moe.groups,
            "--moe-router-group-topk": moe.group_top_k,
        }
    if moe.choice_bias:
        flags |= {
            "--moe-router-enable-expert-bias": None,
            "--moe-router-bias-update-rate": moe.bias_rate,
        }
    return flags | ({"--moe-z-loss-coeff": moe.z_weight} if moe.z_weight else {})


def layer_pattern(model: ModelShape, part: Mixer | FeedForward) -> str:
    """([0]*3+[1]*58): 1 for a layer with this part. Runs of layers, each as one term."""
    has_part = groupby(int(part in kind) for kind in model.layer_kinds())
    terms = [(has, sum(1 for _ in layers)) for has, layers in has_part]
    period = terms[:2]
    if len(terms) > 2 and terms == period * (len(terms) // 2):
        return f"({_sum(period)})*{len(terms) // 2}"
    return f"({_sum(terms)})"


def _sum(terms: list[tuple[int, int]]) -> str:
    return "+".join(f"[{kind}]*{count}" for kind, count in terms)


def _overlap(setup: Setup) -> Flags:
    """Return the flag of an exchange that runs under shared experts, or under another micro-batch's
    layers; search/rules says what each needs."""
    if setup.policy.overlap_kind == "shared-expert":
        return {"--moe-shared-expert-overlap": None}
    return {"--overlap-moe-expert-parallel-comm": None}


def _graphed(setup: Setup) -> bool:
    capacity = setup.model.moe.capacity if setup.model.moe else 0.0
    fits = not capacity and setup.policy.recompute_kind not in _AROUND_GRAPHS
    return setup.defaults.graphs_experts and fits


def latent_flags(latent: Latent) -> Flags:
    ranks: Flags = {"--q-lora-rank": latent.q_rank} if latent.q_rank else {}
    return {
        "--multi-latent-attention": None,
        **ranks,
        "--kv-lora-rank": latent.kv_rank,
        "--qk-head-dim": latent.nope,
        "--qk-pos-emb-head-dim": latent.rope,
        "--v-head-dim": latent.v,
        "--qk-layernorm": None,  # of the two compressed vectors
    }


def about_experts(setup: Setup, moe: Moe) -> Iterator[str]:
    if moe.balance == "batch":
        yield "the balancing loss counts tokens of the global batch so far (global_aux_loss)"
    if moe.capacity:
        yield "its capacity is counted over the tokens of a rank's micro batch, not of a sequence"
    if setup.policy.cuda_graph:
        yield (
            f"ranks have room for {_ROOM:g} times their mean of tokens; a step that needs more runs"
            " again without its graph"
        )
    elif setup.defaults.graphs_experts and not _graphed(setup):
        yield "router and attention run without the CUDA graphs that the seconds assume"
