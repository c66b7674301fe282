"""What a row of a published table says, as a run of ours on a machine; and what it says beyond."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fourfold.cost.dispatch import DISPATCHERS, KINDS
from fourfold.cost.experts import further
from fourfold.cost.run import gradient_bytes, has_newer_flash
from fourfold.cost.table.cells import Cells, number
from fourfold.cost.table.reference import OVERLAP_WORDS
from fourfold.errors import UserError
from fourfold.spec import catalog
from fourfold.spec.cluster import TYPICAL, Cluster, Link
from fourfold.spec.engine import EngineHabits, engine_of
from fourfold.spec.experts import Latent, Moe
from fourfold.spec.model import ModelShape, Positions
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec
from fourfold.spec.words import (
    DTYPES,
    HYBRID,
    PRECISION,
    PRECISIONS,
    PRICED_ATTENTION,
    SHARDING,
    SHARDINGS,
    with_scaling,
)

_USUAL = "taken as the stack's usual"
_UNGATED = ("mpt", "gpt", "falcon", "nemotron")
_BIASED = ("deepseek", "glm", "kimi")  # families whose routers move a bias
_FULL_GRAPH, _SOME_GRAPHS = "full_iteration", "transformer_engine"
# Tokens that every second layer of such models looks back, where a table says no more (GPT-OSS).
_WINDOW = 128
# Tokens above an even share that a capacity drops; rows that drop name none.
_USUAL_CAPACITY = 1.0
_GROUPED_FROM = 512  # ranks, from which a stack shards in its usual groups
_PRECISION = {"": "bf16-mixed"} | {name: name for name in PRECISIONS} | PRECISION
# A hybrid one needs the size of its groups, which a note states.
_SHARDING = {name: name for name in SHARDINGS} | {
    name: kind for name, kind in SHARDING.items() if name not in HYBRID
}
# The published tables say "fused" of Megatron's fused softmax.
_ATTENTION = {
    "": "auto",
    "flash": "auto",
    "flash1": "auto",
    "flash2": "auto",
    "flash3": "cudnn",
    "fused": "fused-softmax",
    "fused-softmax": "fused-softmax",
    "unfused": "unfused",
}
_FLASH = ("", "flash", "flash2", "flash3")
_STATE_DTYPES = {
    "": None,
    "bf16": "bf16",
    "fp16": "fp16",
    "fp32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
}
_ACTIVATIONS = {"moe_act", "act", "swiglu"}
_NORMS = {"layernorm", "rmsnorm", "norm"}


@dataclass(frozen=True, slots=True)
class Described:
    """`spec` is of the run's model and policy; GPUs, layout and batch are those of each row.
    `beyond`: columns of the cost model for what no field of a run says. `shard_group`: ranks of
    such a group, 0 for all; in worlds `grouped_from` so many."""

    spec: RunSpec
    cluster: Cluster
    shard_group: int
    grouped_from: int
    beyond: dict[str, float]


def described(
    cells: Cells, clusters: Mapping[str, Cluster], unsaid: tuple[str, ...] | None
) -> Described:
    """Raises UserError for what is no run. `unsaid`: axes without a cell; None: the row says
    nothing of its layout."""
    usual = engine_of(cells["stack"]).habits
    model = _model(cells, usual)
    cluster = _machine(cells, clusters)
    cells.assumed += [f"{axis} taken as 1" for axis in unsaid or ()]
    policy = _policy(cells, usual, cluster, is_laid_out=unsaid is not None)
    if not cluster.name:
        cells.assumed.append("cluster unknown: usual fabric of this GPU")
    if model.moe and not cells["routing"]:
        cells.assumed.append("routing taken as forced even")
    spec = RunSpec(model=model, gpus=1, policy=policy)
    own = cells.words.shard_group or cluster.host_gpus * cells.words.shards_in_node
    group, least = (own, 0) if own else (usual.shard_group, _GROUPED_FROM)
    # Layers that a source counts were trained, whichever engines are known to do so.
    return Described(spec, cluster, group, least, further(model) | _beyond(cells, cluster))


def _model(cells: Cells, usual: EngineHabits) -> ModelShape:
    words, family = cells.words, cells["family"]
    vocab = cells.count("vocab", usual.tests_vocab, "taken as that of the engine's tests")
    layers, hidden, heads = (cells.count(name) for name in ("n_layers", "d_model", "n_heads"))
    gated = family not in _UNGATED and not words.two_matrices
    usual_ffn = 256 * math.ceil(hidden * 8 / 3 / 256) if gated else 4 * hidden
    slides = "sliding" in cells["attn_kind"]
    return ModelShape(
        family="llama" if gated else "gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=cells.count("n_kv_heads", heads, "taken as n_heads"),
        ffn=cells.count("d_ff", usual_ffn, "taken as the family's usual"),
        vocab=vocab,
        tied=cells.flag("tied", family in ("mpt", "gpt")),
        head_dim=cells.size("head_dim") or words.head_size or None,
        positions=Positions(kind="rope"),
        norm="rmsnorm",
        activation="swiglu" if gated else "gelu",
        bias=False,
        window=_WINDOW if slides else None,
        mixers=("window", "full") if slides else None,
        mtp=cells.size("mtp_layers") or None,
        latent=_latent(cells, heads, hidden),
        **_experts(cells),
    )


def _latent(cells: Cells, heads: int, hidden: int) -> Latent | None:
    rank = cells.size("kv_lora_rank")
    if not rank:
        return None
    values, rope = cells.size("v_head_dim"), cells.size("qk_rope_dim")
    if not values:
        raise UserError("is needed with kv_lora_rank", field="v_head_dim")
    whole = cells.size("head_dim") or cells.words.head_size or hidden // heads
    queries = cells.size("q_lora_rank")
    return Latent(kv_rank=rank, nope=whole - rope, rope=rope, v=values, q_rank=queries)


def _experts(cells: Cells) -> dict[str, Any]:
    experts = cells.size("experts")
    if not experts:
        return {}
    for name in ("experts_per_token", "expert_ffn"):
        if not cells.size(name):
            raise UserError("is needed with experts", field=name)
    every = max(1, cells.size("moe_every"))
    factor = cells.amount("capacity_factor")
    drops = cells["routing"] == "drop" and factor == 0
    moe = Moe(
        ffn=cells.size("expert_ffn"),
        shared_ffn=cells.size("shared_ffn"),
        # Where every second layer has experts, the others are the dense ones.
        dense_first=cells.size("dense_layers") if every == 1 else 0,
        every=every,
        expert_bias=cells["family"] == "gpt-oss",
        choice_bias=cells["family"] in _BIASED,
        capacity=_USUAL_CAPACITY if drops else factor,
    )
    return {"experts": experts, "top_k": cells.size("experts_per_token"), "moe": moe}


def _policy(cells: Cells, usual: EngineHabits, cluster: Cluster, *, is_laid_out: bool) -> Policy:
    words = cells.words
    known: dict[str, Any] = {
        "sharding": cells.one_of("sharding", {**_SHARDING, "": usual.sharding}, SHARDINGS)
    }
    if is_laid_out and not cells["sharding"]:
        cells.assumed.append(f"sharding {_USUAL}")
    known["recompute"] = _recompute(cells, usual)
    known["sequence_parallel"] = cells.flag("sequence_parallel", usual.sequence_parallel, _USUAL)
    known |= _precision(cells)
    if not cells["precision"]:
        cells.assumed.append("precision bf16 assumed")
    known["attention"] = cells.one_of("attention", _ATTENTION, PRICED_ATTENTION)
    known["dispatcher"] = _dispatcher(cells, usual, cluster)
    known |= _dtypes(cells, usual)
    overlap = _overlap(cells)
    policy = Policy(
        **known,
        cp_kind="allgather" if words.gathers_kv else "ring",
        routing="natural" if cells["routing"] in ("natural", "drop") else "forced",
        overlap_exchange=cells.amount("a2a_overlap") > 0,
        compile=usual.compiled if words.compiled is None else words.compiled,
        cuda_graph=words.graphs or cells["cuda_graph"] == _FULL_GRAPH,
        async_tp=words.async_tp is True if overlap is None else "tp" in overlap,
        overlap_grad_reduce=not words.no_overlap if overlap is None else "grad-reduce" in overlap,
        overlap_param_gather=overlap is None or "param-gather" in overlap,
    )
    cells.assumed += _habits(cells, policy, usual)
    return policy


def _precision(cells: Cells) -> dict[str, str]:
    """Precision and scaling; a cell such as 'mxfp8' names both, else the note may."""
    scaled = with_scaling({"precision": cells["precision"]})
    if "scaling" in scaled:
        return scaled
    shown = (*DTYPES, "bf16-pure", "mxfp8", "fp8-blockwise", "fp8-cs", "nvfp4")
    name = cells.one_of("precision", _PRECISION, shown)
    return {"precision": name, "scaling": cells.words.scaling}


def _dtypes(cells: Cells, usual: EngineHabits) -> dict[str, str | None]:
    """Formats of gradients and moments that a row states."""
    words = cells.words
    grad, reduce, moments = (
        cells.one_of(name, _STATE_DTYPES, ("bf16", "fp16", "fp32"))
        for name in ("grad_dtype", "reduce_dtype", "optimizer_dtype")
    )
    if words.pure:
        reduce = reduce or "bf16"
    elif engine_of(cells["stack"]).rules.one_gradient_buffer:
        grad, reduce = grad or reduce, reduce or grad
    if words.one_moment or (not moments and cells["family"] in usual.narrow_moments):
        moments = "bf16"  # two moments of two bytes; one of four takes as many
    return {"grad_dtype": grad, "reduce_dtype": reduce, "optimizer_dtype": moments}


def _overlap(cells: Cells) -> set[str] | None:
    """What a row says is overlapped; None: it does not say."""
    said = set(cells["overlap"].replace(",", " ").split())
    if not said:
        return None
    known = {"none", *OVERLAP_WORDS}
    if said - known or ("none" in said and len(said) > 1):
        raise UserError(f"is not none, or some of {', '.join(OVERLAP_WORDS)}", field="overlap")
    return said - {"none"}


def _habits(cells: Cells, policy: Policy, usual: EngineHabits) -> list[str]:
    """What blank cells of settings were taken as."""
    stack, compute = cells["stack"].strip() or "generic", policy.dtypes.compute
    narrow = "fp16" if compute == "fp16" else "bf16"
    wire, held = (
        f"fp{8 * size:.0f}" if size > 2.0 else narrow
        for size in gradient_bytes(policy, engine_of(stack))
    )
    said = []
    if not (policy.grad_dtype or policy.reduce_dtype):
        said.append(f"gradients {held}" if wire == held else f"gradients {held}, reduced in {wire}")
    if not cells["optimizer_dtype"] and policy.dtypes.optimizer != "fp32":
        said.append(f"moments {policy.dtypes.optimizer}")
    sends = policy.dispatcher in engine_of(stack).rules.dispatchers
    if sends and not cells["dispatcher"] and cells.size("experts"):
        said.append(f"dispatcher {KINDS[policy.dispatcher].title}")
    if not cells["cuda_graph"] and cells["experts"] and not _names_settings(cells):
        said += ["CUDA graphs of attention and router"] if usual.graphs_experts else []
    if not cells["overlap"]:
        pieces = {
            "gradients": usual.overlap_dp and policy.overlap_grad_reduce,
            "tp": policy.async_tp or (usual.overlap_tp and policy.sequence_parallel),
        }
        hidden = " and ".join(name for name, has in pieces.items() if has)
        said += [f"overlap of {hidden}"] if hidden else []
    return [f"{', '.join(said)}: habit{'s' * (len(said) > 1)} of {stack}"] if said else []


def _recompute(cells: Cells, usual: EngineHabits) -> str:
    """Our word for what the engine recomputes under the row's."""
    kind = cells["act_ckpt"]
    if not kind:
        cells.assumed.append(f"act_ckpt {_USUAL}")
        kind = "full" if cells.words.recomputes else usual.recompute
    if kind != "selective":
        return kind
    if usual.whole_layers:
        return f"every-{round(1 / usual.whole_layers)}"
    return "norm+mlp" if usual.selective_mlp else kind


def _dispatcher(cells: Cells, usual: EngineHabits, cluster: Cluster) -> str:
    in_rack = cluster.links[0].ranks > cluster.host_gpus
    left_open = usual.dispatcher if in_rack else usual.host_dispatcher or usual.dispatcher
    known = {name: name for name in DISPATCHERS}
    return cells.one_of("dispatcher", {**known, "": left_open}, DISPATCHERS)


def _machine(cells: Cells, clusters: Mapping[str, Cluster]) -> Cluster:
    """Hosts of as many GPUs as the row says; a network that its note states, else the cluster's by
    name, else the usual one of the GPU."""
    name = cells["cluster"].strip().lower()
    place = clusters.get(name)
    try:
        device = place.device if place else catalog.device(cells["hardware"].strip().lower())
    except UserError:
        raise UserError("is not a known GPU", field="hardware") from None
    if place is None and name in catalog.cluster_names():
        place = catalog.cluster(name)
    node = number(cells["gpus_per_node"])
    if not node >= 1:
        node = place.host_gpus if place else device.usual_host_gpus
    node, stated_domain = int(node), cells.size("nvlink_domain")
    if 0 < stated_domain < node:
        raise UserError(f"must cover the {node} GPUs of a node", field="nvlink_domain")
    if place is not None and len(place.links) == 1:
        if stated_domain not in (0, place.gpus):
            rule = f"contradicts {place.name}, whose {place.gpus} GPUs are one domain"
            raise UserError(rule, field="nvlink_domain")
        return replace(place, host_gpus=node)
    words = cells.words
    stated = max(words.net_bytes_per_s * node, words.net_bytes_per_s_of_node)
    if place is not None:
        inner, outer = place.links[0], place.links[-1]
        domain = inner.ranks if inner.ranks > place.host_gpus else node
        link, net, source = inner.bytes_per_s, outer.bytes_per_s * place.host_gpus, place.source
    else:
        domain = device.domain if device.domain > 8 else node
        link, net = device.usual_link_bytes_per_s, stated or device.network_bytes_per_s * node
        source = "" if stated else TYPICAL
    domain = stated_domain or domain
    near = Link(name="nvlink", ranks=domain, bytes_per_s=link, latency_s=0.0)
    far = Link(name="network", ranks=2 * domain, bytes_per_s=net / node, latency_s=0.0)
    return Cluster(
        name=place.name if place else "",
        device=device,
        gpus=far.ranks,
        host_gpus=node,
        links=(near, far),
        source=source,
    )


def _beyond(cells: Cells, cluster: Cluster) -> dict[str, float]:
    words, kernel = cells.words, cells["attention"]
    facts = {
        "split_inputs": float(words.split_inputs),
        "slow": float(words.slow_network),
        **_modules(set(cells["recompute_modules"].split())),
    }
    if words.plain_norm:
        facts["fused_norm"] = 0.0
    if _names_settings(cells):
        scope = cells["cuda_graph"]
        facts["graphed"] = float(scope.startswith(_SOME_GRAPHS) and "moe_router" in scope)
    if kernel == "flash1" or (words.flash1 and kernel in _FLASH):
        facts["attention"] = PRICED_ATTENTION.index("flash1")
    elif kernel == "flash2" and has_newer_flash(cluster.device):
        facts["attention"] = PRICED_ATTENTION.index("flash2")
    is_off = words.async_tp is False or (words.no_overlap and not words.async_tp)
    overlap = _overlap(cells)
    if is_off if overlap is None else "tp" not in overlap:
        facts["overlap_tp"] = 0.0
    return facts


def _names_settings(cells: Cells) -> bool:
    """Return whether a source names its settings, or ran what its engine's recipes do."""
    return bool(cells["dispatcher"] or cells["cuda_graph"] or cells["act_ckpt"])


def _modules(said: set[str]) -> dict[str, float]:
    """Modules that a backward pass computes again, in Megatron's words; with them "selective" is no
    longer the attention core alone."""
    if not said:
        return {}
    activation = bool(said & _ACTIVATIONS)
    return {
        "attn_ckpt": float("core_attn" in said),
        "moe_ckpt": float("moe" in said),
        "moe_act_ckpt": float(activation),
        "latent_ckpt": float("mla_up_proj" in said),
        "norm_ckpt": float(activation and bool(said & _NORMS)),
        "mlp_ckpt": float("mlp" in said),
    }
