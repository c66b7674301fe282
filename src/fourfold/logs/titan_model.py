"""The model of a torchtitan run. Up to 0.2 its sizes are printed; 0.3 prints its name and number of
parameters, and the sizes of every layer only with the whole configuration (`debug.print_config`).
"""

from __future__ import annotations

import re
from functools import cache

from fourfold.cost.count.params import model_params
from fourfold.logs.experts import titan_experts, titan_layers
from fourfold.logs.nested import Flat, number, whole, yes
from fourfold.spec import catalog
from fourfold.spec.model import ModelShape

# 'model_spec.model.layers.31.attention.n_heads'
_LAYER = re.compile(r"model_spec\.model\.layers\.([0-9]{1,6})\.(\S+)")
_ANY_LENGTH = 8192  # positions of these models have no weights


def printed_sizes(flat: Flat) -> Flat:
    """Of what 0.2 prints behind 'Building NAME FLAVOR with'."""
    hidden, heads = whole(flat.get("dim")), flat.get("n_heads", "")
    ffn = whole(flat.get("hidden_dim"))
    if ffn is None and hidden and "multiple_of" in flat:
        wide = int(2 * 4 * hidden / 3)
        wide = int((number(flat.get("ffn_dim_multiplier")) or 1.0) * wide)
        step = max(1, whole(flat.get("multiple_of")) or 1)
        ffn = step * -(-wide // step)
    given = {
        "n_layers": flat.get("n_layers"),
        "d_model": flat.get("dim"),
        "n_heads": heads,
        "n_kv_heads": flat["n_kv_heads"] if whole(flat.get("n_kv_heads")) else heads,
        "d_ff": str(ffn or ""),
        "vocab": flat.get("vocab_size"),
        "_max_len": flat.get("max_seq_len"),
    }
    known = {name: str(whole(value) or "") for name, value in given.items()}
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
    fields = {name: set(values.values()) for name, values in layers.items()}
    heads = fields.get("attention.n_heads", {""})
    groups = {value for value in fields.get("attention.n_kv_heads", set()) if whole(value)}
    given = {
        "n_heads": heads,
        "n_kv_heads": groups or heads,
        "d_ff": fields.get("feed_forward.w1.out_features", {""}),
    }
    known = {name: next(iter(values)) for name, values in given.items() if len(values) == 1}
    known |= {
        "n_layers": str(len(numbers)),
        "d_model": flat.get("model_spec.model.dim", ""),
        "vocab": flat.get("model_spec.model.vocab_size", ""),
        "tied": str(int(yes(flat.get("model_spec.model.enable_weight_tying")))),
        "family": "llama",
    }
    if routed := titan_layers(layers, len(numbers)):
        known |= {"d_ff": routed["expert_ffn"]} if "d_ff" not in known else {}
        return known | routed
    if any(len(values) > 1 for values in given.values()):
        known["unmodelled"] = "layers of several sizes"
    return known


def sizes_by_count(model: str, parameters: str) -> Flat:
    """Of the catalogue's model with exactly so many parameters, where the log says 'llama3-8b' and
    the number, and nothing else; {} where there is none, or models of several sizes."""
    if not model.startswith(("llama", "qwen")):
        return {}
    count = whole(parameters)
    found = {_sizes(shape) for shape in _shapes() if model_params(shape, _ANY_LENGTH) == count}
    return dict(found.pop()) if len(found) == 1 else {}


@cache
def _shapes() -> list[ModelShape]:
    return [catalog.model(name) for name in catalog.model_names()]


def _sizes(shape: ModelShape) -> tuple[tuple[str, str], ...]:
    sizes = {
        "n_layers": shape.layers, "d_model": shape.hidden, "n_heads": shape.heads,
        "n_kv_heads": shape.kv_heads, "d_ff": shape.ffn, "vocab": shape.vocab,
        "tied": int(shape.tied),
    }  # fmt: skip
    known = {name: str(value) for name, value in sizes.items()}
    return tuple((known | {"family": shape.family}).items())
