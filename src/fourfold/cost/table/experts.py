"""What a row says of experts, of latent attention and of where experts lie; blank in other rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Floats
from fourfold.cost.dispatch import DISPATCHERS
from fourfold.cost.experts import BIASED, usual_spread
from fourfold.cost.stacks import StackDefaults
from fourfold.cost.table.open_fields import blank
from fourfold.cost.table.reference import Distinct, Draft, numbers

_FULL_GRAPH, _SOME_GRAPHS = "full_iteration", "transformer_engine"
# Tokens that every second layer of such models looks back, where a table says no more (GPT-OSS).
_WINDOW = 128.0
# Tokens above an even share that a capacity drops; rows that drop name none.
_USUAL_CAPACITY = 1.0


def shape(draft: Draft) -> None:
    """Experts, heads and latents of the model."""
    facts, layers = draft.facts, draft.facts["layers"]

    def number(column: str) -> Floats:
        return np.nan_to_num(numbers(draft.table.column(column)))

    size = number("head_dim")
    facts["width"] = np.where(size > 0, facts["heads"] * size, facts["width"])
    facts["latent"], facts["q_latent"] = number("kv_lora_rank"), number("q_lora_rank")
    facts["shared_key"] = number("qk_rope_dim")
    is_latent, values = facts["latent"] > 0, number("v_head_dim")
    draft.refuse(is_latent & (values < 1), "v_head_dim is needed with kv_lora_rank")
    facts["values"] = np.where(is_latent, facts["heads"] * values, facts["width"])
    facts["mtp"] = number("mtp_layers")
    facts["layers"] = layers + facts["mtp"]
    experts = facts["experts"] = number("experts")
    some = experts > 0
    facts["top_k"], facts["expert_ffn"] = number("experts_per_token"), number("expert_ffn")
    facts["shared_ffn"] = number("shared_ffn")
    draft.refuse(some & (facts["top_k"] < 1), "experts_per_token is needed with experts")
    draft.refuse(some & (facts["expert_ffn"] < 1), "expert_ffn is needed with experts")
    draft.refuse(some & (facts["top_k"] > experts), "experts_per_token exceeds experts")
    family = Distinct(draft.table.column("family"), str)
    facts["expert_bias"] = family.array(lambda name: name == "gpt-oss")
    slides = Distinct(draft.table.column("attn_kind"), str).array(lambda kind: "sliding" in kind)
    facts["window"], facts["local"] = _WINDOW * slides, slides / 2.0
    every = np.maximum(1.0, number("moe_every"))
    routed = np.floor((layers - number("dense_layers")) / np.where(every > 1, every, 1.0))
    # Where every second layer has experts, the others are the dense ones.
    routed = np.where(every > 1, np.floor(layers / every), routed) + facts["mtp"]
    facts["routed"] = np.where(some, np.clip(routed / facts["layers"], 0.0, 1.0), 0.0)


def layout(draft: Draft, stack: Distinct[StackDefaults]) -> None:
    """Where experts lie, how tokens get there, and how evenly."""
    facts, table = draft.facts, draft.table
    some = facts["experts"] > 0
    for name in ("ep", "etp"):
        draft.fill(name, name, 1.0, "")
        facts[name] = np.where(some, np.maximum(1.0, facts[name]), 1.0)
    ranks = facts["dp"] * facts["cp"] * facts["tp"]
    odd = some & (
        (ranks % (facts["ep"] * facts["etp"]) != 0) | (facts["experts"] % facts["ep"] != 0)
    )
    draft.refuse(odd, "ep x etp does not divide dp x cp x tp, or ep not the experts")
    kinds = Distinct(table.column("dispatcher"), str)
    unsaid = kinds.mask(lambda cell: cell == "")
    usual, apart = (
        stack.array(lambda s, name=name: DISPATCHERS.index(getattr(s, name) or s.dispatcher))
        for name in ("dispatcher", "host_dispatcher")
    )
    usual = np.where(facts["domain"] > facts["node"], usual, apart)
    said = kinds.array(lambda cell: DISPATCHERS.index(cell) if cell in DISPATCHERS else -1.0)
    draft.refuse(~unsaid & (said < 0), f"dispatcher is not one of {', '.join(DISPATCHERS)}")
    facts["dispatcher"] = np.where(
        facts["ep"] * facts["etp"] > 1,
        np.where(unsaid, usual, np.maximum(said, 0.0)),
        DISPATCHERS.index("local"),
    )
    facts["hides_exchange"] = np.nan_to_num(numbers(table.column("a2a_overlap")))
    _routing(draft, some)
    _modules(draft)
    graphs = Distinct(table.column("cuda_graph"), str)
    scoped = graphs.array(lambda cell: cell.startswith(_SOME_GRAPHS) and "moe_router" in cell)
    # A source that names neither dispatcher, graphs nor recompute ran what its engine's recipes do.
    unsaid &= graphs.mask(lambda cell: cell == "") & blank(table, "act_ckpt")
    facts["graphed"] = np.where(unsaid, stack.array(lambda s: s.graphs_experts), scoped)
    full = graphs.mask(lambda cell: cell == _FULL_GRAPH)
    facts["fused_host"] = np.where(full, 2.0, facts["fused_host"])


def _routing(draft: Draft, some: NDArray[np.bool_]) -> None:
    kinds = Distinct(draft.table.column("routing"), str)
    natural = some & kinds.mask(lambda cell: cell in ("natural", "drop"))
    draft.assume(some & kinds.mask(lambda cell: cell == ""), "routing taken as forced even")
    biased = Distinct(draft.table.column("family"), str).mask(lambda name: name in BIASED)
    draft.facts["imbalance"] = np.where(natural, usual_spread(draft.facts["experts"], biased), 0.0)
    factor = np.nan_to_num(numbers(draft.table.column("capacity_factor")))
    drops = kinds.mask(lambda cell: cell == "drop")
    draft.facts["dropped_above"] = np.where(drops & (factor == 0), _USUAL_CAPACITY, factor)


def _modules(draft: Draft) -> None:
    """Modules that a backward pass computes again, in Megatron's words; with them "selective" is no
    longer the attention core alone."""
    facts = draft.facts
    modules = Distinct(draft.table.column("recompute_modules"), lambda cell: set(cell.split()))
    said = modules.mask(bool)

    def has(*names: str) -> Floats:
        return modules.array(lambda one: bool(one & set(names)))

    core = np.maximum(has("core_attn"), np.where(said, 0.0, facts["attn_ckpt"]))
    facts["attn_ckpt"] = core
    facts["moe_ckpt"] = has("moe")
    facts["moe_act_ckpt"] = has("moe_act", "act", "swiglu")
    facts["latent_ckpt"] = has("mla_up_proj")
    norms = has("layernorm", "rmsnorm", "norm") * has("moe_act", "act", "swiglu")
    facts["norm_ckpt"] = np.where(said, norms, facts["norm_ckpt"])
    facts["mlp_ckpt"] = np.where(said, has("mlp"), facts["mlp_ckpt"])
