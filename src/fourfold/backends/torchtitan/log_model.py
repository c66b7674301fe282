"""The model of a torchtitan run, in columns of the reference schema. Up to 0.2 its sizes are
printed; 0.3 prints its name and number of parameters, and the sizes of every layer only with the
whole configuration (`debug.print_config`)."""

from __future__ import annotations

import re
from functools import cache

from fourfold.cost.count.params import model_params
from fourfold.logs.models import latent_facts, model_columns, placed
from fourfold.logs.nested import Flat, is_none, number, whole, yes
from fourfold.logs.words import columns
from fourfold.spec import ModelShape, catalog

_BACKENDS = {"standard": "alltoall"}
# 0.3 prints a dispatcher's settings without its name: what only that one has.
_TOLD_BY = {"non_blocking_capacity_factor": "hybridep", "cudagraphable": "deepep"}


def titan_experts(args: Flat) -> Flat:
    """Of the model that torchtitan up to 0.2 prints, whose fields stand under moe_args."""
    moe = {
        name.rpartition("moe_args.")[2]: value
        for name, value in args.items()
        if "moe_args." in name
    }
    count = whole(moe.get("num_experts")) or 0
    has_latent = "kv_lora_rank" in args
    if count < 2 or not (has_latent or yes(args.get("moe_enabled"))):
        return {}
    width = whole(args.get("moe_inter_dim")) or 0
    shared = (whole(moe.get("num_shared_experts")) or 0) * width
    facts = {
        "experts": str(count),
        "experts_per_token": moe.get("top_k", ""),
        "expert_ffn": str(width or ""),
        "shared_ffn": str(shared or ""),
        "dense_layers": str(whole(args.get("n_dense_layers")) or ""),
        "family": "deepseek" if has_latent else "qwen-moe",
    }
    if has_latent:
        facts |= latent_facts(args) | {"d_ff": args.get("inter_dim", "")}
    return facts


def titan_layers(fields: dict[str, dict[int, str]], layers: int) -> Flat:
    """Of 0.3, whose configuration lists every layer: its fields, by layer."""
    routed = fields.get("moe.num_experts", {})
    if not routed:
        return {}

    def said(name: str) -> str:
        values = {value for at, value in fields.get(name, {}).items() if at in routed}
        return values.pop() if len(values) == 1 else ""

    each = {name: said(name) for name in fields}
    latent = {
        name.rpartition(".")[2]: value for name, value in each.items() if name.count(".") == 1
    }
    dispatcher = [
        kind
        for name, kind in _TOLD_BY.items()
        if f"moe.routed_experts.token_dispatcher.{name}" in fields
    ]
    facts = columns("torchtitan-experts", each) | {
        "dispatcher": dispatcher[0] if dispatcher else "alltoall",
        "family": "deepseek" if latent.get("kv_lora_rank") else "qwen-moe",
    }
    if latent.get("kv_lora_rank"):
        facts |= latent_facts(latent)
        facts["n_kv_heads"] = said("attention.n_heads")
    return facts | placed([int(at in routed) for at in range(layers)])


def titan_placed(facts: Flat) -> Flat:
    """Together: with tp and without ep, experts are cut as other layers are."""
    if not facts.get("experts"):
        return {}
    ep = whole(facts.get("_mesh_ep") or facts.get("_ep")) or 1
    etp = whole(facts.get("_mesh_etp") or facts.get("_etp")) or 1
    tp, backend = whole(facts.get("tp")) or 1, facts.get("_dispatcher", "standard")
    return {
        "ep": str(ep),
        "etp": str(tp if ep == 1 else etp),
        "dispatcher": facts.get("dispatcher") or _BACKENDS.get(backend, backend),
        "routing": "forced" if facts.get("_forced") == "1" else "natural",
    }


# 'model_spec.model.layers.31.attention.n_heads'
_LAYER = re.compile(r"model_spec\.model\.layers\.([0-9]{1,6})\.(\S+)")
_SIZED = (
    "attention.n_heads",
    "attention.n_kv_heads",
    "attention.head_dim",
    "feed_forward.w1.out_features",
)
_ANY_LENGTH = 8192  # positions of these models have no weights


def printed_sizes(flat: Flat) -> Flat:
    """Of what 0.2 prints behind 'Building NAME FLAVOR with'."""
    hidden = whole(flat.get("dim"))
    known = columns("torchtitan-model", flat)
    if "d_ff" not in known and hidden and "multiple_of" in flat:
        wide = int(2 * 4 * hidden / 3)
        wide = int((number(flat.get("ffn_dim_multiplier")) or 1.0) * wide)
        step = max(1, whole(flat.get("multiple_of")) or 1)
        known["d_ff"] = str(step * -(-wide // step))
    known |= {"family": "llama", "tied": str(int(yes(flat.get("enable_weight_tying"))))}
    routed = titan_experts(flat)
    experts = [v for k, v in flat.items() if k.endswith("num_experts") and (whole(v) or 0) > 1]
    if experts and not routed and "llama3" not in flat.get("name", ""):
        known["unmodelled"] = f"{experts[0]} experts"
    return known | routed


def configured_sizes(flat: Flat) -> Flat:
    """Of the model in 0.3's configuration, where every layer is listed; {} where there is none.
    Layers that differ are not what the schema can say."""
    layers: dict[str, dict[int, str]] = {}
    numbers = set()
    for path, value in flat.items():
        if found := _LAYER.fullmatch(path):
            numbers.add(int(found[1]))
            layers.setdefault(found[2], {})[int(found[1])] = value
    if not numbers:
        return {}
    fields = {
        name: {value for value in values.values() if not is_none(value)}
        for name, values in layers.items()
    }
    alike = {name: next(iter(values)) for name, values in fields.items() if len(values) == 1}
    known = columns("torchtitan-config", flat) | columns("torchtitan-layers", alike)
    known |= {
        "n_layers": str(len(numbers)),
        "tied": str(int(yes(flat.get("model_spec.model.enable_weight_tying")))),
        "family": "llama",
    }
    if routed := titan_layers(layers, len(numbers)):
        known |= {"d_ff": routed["expert_ffn"]} if "d_ff" not in known else {}
        return known | routed
    if any(len(fields.get(name, ())) > 1 for name in _SIZED):
        known["unmodelled"] = "layers of several sizes"
    return known


def sizes_by_count(model: str, parameters: str) -> Flat:
    """Of the catalogue's model with exactly so many parameters, where the log says 'llama3-8b' and
    the number, and nothing else; {} where there is none, or models of several sizes."""
    if not model.startswith(("llama", "qwen", "deepseek")):
        return {}
    count = whole(parameters)
    found = [model_columns(one) for one in _shapes() if model_params(one, _ANY_LENGTH) == count]
    return found[0] if found and all(one == found[0] for one in found) else {}


@cache
def _shapes() -> list[ModelShape]:
    return [catalog.model(name) for name in catalog.model_names()]
