"""Experts of a run as the cost model's columns: shape, place, and how tokens get there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fourfold.cost.dispatch import DISPATCHERS, dispatcher_of
from fourfold.spec.cluster import Cluster
from fourfold.spec.engine import Engine
from fourfold.spec.layers import LayerRun
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec
from fourfold.spec.words import RECOMPUTE_KINDS

# Of tokens per expert under a learned router: standard deviation over mean. Runs of Qwen3-235B with
# even and with natural routing (Megatron-MoE-ModelZoo) say about 1 of 128 experts with a balancing
# loss; fewer and larger experts differ less. A bias that is moved after every step keeps them
# nearly even. What nobody measured lies within a factor of e^0.5 two times in three.
NATURAL, OF_EXPERTS, BALANCED, SPREAD = 1.0, 128.0, 0.3, 0.5


def model_facts(model: ModelShape) -> dict[str, float]:
    facts: dict[str, float] = {}
    if model.latent is not None:
        facts |= {
            "latent": model.latent.kv_rank,
            "q_latent": model.latent.q_rank,
            "shared_key": model.latent.rope,
        }
    if model.moe is not None:
        facts |= {
            "experts": model.experts,
            "top_k": model.top_k,
            "expert_ffn": model.moe.ffn,
            "shared_ffn": model.moe.shared_ffn,
            "routed": model.count_layers("experts") / model.layers,
            "expert_bias": float(model.moe.expert_bias),
            "dropped_above": model.moe.capacity,
        }
    return facts


def imbalance(model: ModelShape, policy: Policy) -> float:
    if policy.imbalance is not None:
        return policy.imbalance
    if policy.routing == "forced" or model.moe is None:
        return 0.0
    by_loss = NATURAL * math.sqrt(min(1.0, model.experts / OF_EXPERTS))
    return min(by_loss, BALANCED) if model.moe.choice_bias else by_loss


def further(model: ModelShape) -> dict[str, Any]:
    """Layers that predict further tokens, where an engine trains them: each as one more, with
    experts, on the last stage's side, and logits of its own."""
    if not model.mtp:
        return {}
    layers = model.layers + model.mtp
    routed = (model.count_layers("experts") + model.mtp) / layers if model.moe else 0.0
    more = LayerRun(model.layer_runs[-1].kind, model.mtp)
    runs = (*model.layer_runs, more)
    return {"mtp": model.mtp, "layers": layers, "routed": routed, "layer_runs": runs}


def run_facts(
    spec: RunSpec, cluster: Cluster, engine: Engine, run: Mapping[str, Any]
) -> dict[str, Any]:
    """Of one run, or of many that differ in the columns of `run`."""
    if spec.model.moe is None:
        return {}
    policy, usual = spec.policy, engine.habits
    has = engine.rules.dispatchers
    asked = dispatcher_of(policy.dispatcher, usual.dispatcher, has, cluster.dispatchers)
    spread = np.multiply(run["ep"], run["etp"]) > 1
    kind = run["recompute"]
    return {
        **(further(spec.model) if engine.rules.predicts_further else {}),
        "dispatcher": np.where(spread, DISPATCHERS.index(asked), DISPATCHERS.index("local")),
        "hides_exchange": float(policy.overlap_exchange),
        "imbalance": imbalance(spec.model, policy),
        "graphed": float(usual.graphs_experts),
        "moe_ckpt": np.equal(kind, RECOMPUTE_KINDS.index("moe")),
        "moe_act_ckpt": np.equal(kind, RECOMPUTE_KINDS.index("moe-act")),
    }
