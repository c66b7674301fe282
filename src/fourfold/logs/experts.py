"""Experts of a run, as its engine prints them, in columns of the reference schema; and the model of
a torchtitan run. Up to 0.2 its sizes are printed; 0.3 prints its name and number of
parameters, and the sizes of every layer only with the whole configuration (`debug.print_config`).
"""

from __future__ import annotations

import re
from functools import cache

from fourfold.cost.count.params import model_params
from fourfold.logs.nested import Flat, is_none, number, whole, yes
from fourfold.spec import ModelShape, catalog

_WORDS = re.compile(r"[a-z][a-z_]+")
_SCOPES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
_BACKENDS = {"standard": "alltoall"}
# torchtitan 0.3 prints a dispatcher's settings without its name: what only that one has.
_TOLD_BY = {"non_blocking_capacity_factor": "hybridep", "cudagraphable": "deepep"}
_TITAN_KEYS = ("qk_nope_head_dim", "qk_rope_head_dim")


def megatron_experts(args: Flat) -> Flat:
    """{} of a dense model; 'unmodelled' where the layers with experts follow no rule of ours."""
    count = whole(args.get("num_experts")) or whole(args.get("num_moe_experts")) or 0
    is_latent = yes(args.get("multi_latent_attention"))
    if count < 2:
        return {"unmodelled": "latent attention"} if is_latent else {}
    known = _latent(args, "qk_head_dim", "qk_pos_emb_head_dim") if is_latent else {}
    given = {
        "experts": str(count),
        "experts_per_token": args.get("moe_router_topk"),
        "expert_ffn": _first(args, "moe_ffn_hidden_size", "ffn_hidden_size"),
        "shared_ffn": args.get("moe_shared_expert_intermediate_size"),
        "mtp_layers": args.get("mtp_num_layers"),
        "ep": _first(args, "expert_model_parallel_size", "moe_expert_parallel_size"),
        # Unsaid, experts are cut as other layers are.
        "etp": _first(args, "expert_tensor_parallel_size", "tensor_model_parallel_size"),
        "capacity_factor": args.get("moe_expert_capacity_factor"),
        "head_dim": known.get("head_dim") or args.get("kv_channels"),
    }
    facts = known | {name: value or "" for name, value in given.items() if not is_none(value)}
    return facts | _placed(args) | {
        "dispatcher": _dispatcher(args),
        "a2a_overlap": str(int(yes(args.get("overlap_moe_expert_parallel_comm")))),
        "routing": _routing(args),
        "recompute_modules": _modules(args),
        "cuda_graph": _graphs(args),
        "family": _family(args),
    }  # fmt: skip


def _first(args: Flat, *names: str) -> str | None:
    return next((args[name] for name in names if not is_none(args.get(name))), None)


def _latent(args: Flat, nope_name: str, rope_name: str) -> Flat:
    """Latent attention; engines differ in what they call the two parts of a key."""
    nope, rope = whole(args.get(nope_name)), whole(args.get(rope_name))
    return {
        "attn_kind": "mla",
        "q_lora_rank": str(whole(args.get("q_lora_rank")) or ""),
        "kv_lora_rank": args.get("kv_lora_rank", ""),
        "qk_rope_dim": str(rope or ""),
        "v_head_dim": args.get("v_head_dim", ""),
        "head_dim": str(nope + rope) if nope and rope else "",
    }


def _placed(args: Flat) -> Flat:
    """A number, every so many; or a list with 1 for each layer with experts."""
    said = args.get("moe_layer_freq", "1")
    if (every := whole(said)) is not None:
        return {"moe_every": str(every)} if every > 1 else {}
    kinds = [int(sign) for sign in re.findall(r"[01]", said)]
    return placed(kinds)


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
        return _first(args, "moe_flex_dispatcher_backend") or "deepep"
    return "alltoall" if kind == "alltoall_seq" else kind


def _routing(args: Flat) -> str:
    if yes(args.get("moe_router_force_load_balancing")):
        return "forced"
    return "natural" if is_none(args.get("moe_expert_capacity_factor")) else "drop"


def _modules(args: Flat) -> str:
    if args.get("recompute_granularity") != "selective":
        return ""
    return " ".join(_WORDS.findall(args.get("recompute_modules", "")))


def _graphs(args: Flat) -> str:
    kind, scope = args.get("cuda_graph_impl", "none"), args.get("cuda_graph_scope", "")
    if is_none(kind) or kind == "none":
        return ""
    return "full_iteration" if "full_iteration" in scope else f"{kind} {_scopes(scope)}".strip()


def _scopes(text: str) -> str:
    """Of '[<CudaGraphScope.attn: 2>, ...]', or of words."""
    return " ".join(name for name in _SCOPES if re.search(rf"\b{name}\b", text))


def _family(args: Flat) -> str:
    if yes(args.get("multi_latent_attention")):
        return "deepseek"
    return "qwen-moe" if yes(args.get("qk_layernorm")) else "mixtral"


def titan_experts(args: Flat) -> Flat:
    """Of the model that torchtitan up to 0.2 prints, whose fields stand under moe_args."""
    moe = {name.rpartition("moe_args.")[2]: value for name, value in args.items()
           if "moe_args." in name}  # fmt: skip
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
        "head_dim": args.get("head_dim", ""),
        "family": "deepseek" if has_latent else "qwen-moe",
    }
    if has_latent:
        facts |= _latent(args, *_TITAN_KEYS) | {"d_ff": args.get("inter_dim", "")}
    return facts


def titan_layers(fields: dict[str, dict[int, str]], layers: int) -> Flat:
    """Of 0.3, whose configuration lists every layer: its fields, by layer."""
    routed = fields.get("moe.num_experts", {})
    if not routed:
        return {}

    def said(name: str) -> str:
        values = {value for at, value in fields.get(name, {}).items() if at in routed}
        return values.pop() if len(values) == 1 else ""

    latent = {name.rpartition(".")[2]: said(name) for name in fields if name.count(".") == 1}
    dispatcher = [kind for name, kind in _TOLD_BY.items()
                  if f"moe.routed_experts.token_dispatcher.{name}" in fields]  # fmt: skip
    facts = {
        "experts": said("moe.num_experts"),
        "experts_per_token": said("moe.router.top_k"),
        "expert_ffn": said("moe.routed_experts.inner_experts.hidden_dim"),
        "shared_ffn": said("moe.shared_experts.w1.out_features"),
        "dispatcher": dispatcher[0] if dispatcher else "alltoall",
        "head_dim": said("attention.head_dim"),
        "family": "deepseek" if latent.get("kv_lora_rank") else "qwen-moe",
    }
    if latent.get("kv_lora_rank"):
        facts |= _latent(latent, *_TITAN_KEYS)
        facts["n_kv_heads"] = said("attention.n_heads")
    return facts | placed([int(at in routed) for at in range(layers)])


def titan_layout(flat: Flat) -> Flat:
    """What its configuration says of the exchange; 'forced' only where it is on."""
    backend = flat.get("parallelism.expert_parallel_comm_backend", "")
    forced = flat.get(
        "debug.moe_force_load_balance", flat.get("training.debug_moe_force_load_balance")
    )
    return {
        "_ep": flat.get("parallelism.expert_parallel_degree", ""),
        "_etp": flat.get("parallelism.expert_tensor_parallel_degree", ""),
        "_dispatcher": _BACKENDS.get(backend, backend),
        "_forced": str(int(yes(forced))) if forced is not None else "",
    }


def titan_placed(facts: Flat) -> Flat:
    """Together: with tp and without ep, experts are cut as other layers are."""
    if not facts.get("experts"):
        return {}
    ep = whole(facts.get("_mesh_ep") or facts.get("_ep")) or 1
    etp = whole(facts.get("_mesh_etp") or facts.get("_etp")) or 1
    tp = whole(facts.get("tp")) or 1
    return {
        "ep": str(ep),
        "etp": str(tp if ep == 1 else etp),
        "dispatcher": facts.get("dispatcher") or facts.get("_dispatcher") or "alltoall",
        "routing": "forced" if facts.get("_forced") == "1" else "natural",
    }


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
