"""Megatron's arguments, and NeMo's fields of the same names, as columns of the reference schema."""

from __future__ import annotations

import re

from fourfold.backends.megatron.log_experts import (
    expert_count,
    graphs,
    megatron_experts,
    recomputed,
)
from fourfold.cost.scaling import CALLED
from fourfold.logs.nested import OFFLOADED, Flat, bracketed, is_none, whole, yes
from fourfold.logs.words import WORDS, columns, renamed, words_of
from fourfold.spec.words import RECOMPUTE

# The last one: Megatron-DeepSpeed's.
_OFFLOADS = (
    "optimizer_cpu_offload",
    "cpu_offloading",
    "fine_grained_activation_offloading",
    "cpu_optimizer",
)
_MOMENTS = {"float32": "fp32", "fp32": "fp32", "bfloat16": "bf16", "bf16": "bf16"}
_OVERLAPS = {
    "overlap_grad_reduce": "grad-reduce",
    "overlap_param_gather": "param-gather",
    "tp_comm_overlap": "tp",
}
# Of a layer without experts, what selective recompute repeats; attention's core where nothing says.
_MODULES = {"": "selective", "core_attn": "selective", "layernorm mlp": "norm+mlp"}


def _renamed(args: Flat) -> Flat:
    """Under today's names, with what old releases could not do otherwise."""
    if args.get("attention_head_type") == "multiquery":
        args = args | {"num_query_groups": "1"}
    args = renamed("megatron", args)
    if "group_query_attention" in args and not yes(args["group_query_attention"]):
        args["num_query_groups"] = ""
    if "model_parallel_size" in args:
        if args.get("pipeline_model_parallel_size", "0") == "0":  # NeoX: no pipeline
            args["pipeline_model_parallel_size"] = "1"
        sizes = [whole(args.get(n)) for n in ("world_size", "model_parallel_size", "batch_size")]
        if "global_batch_size" not in args and all(sizes):
            world, tp, each = (size or 1 for size in sizes)
            args["global_batch_size"] = str(each * (world // tp))
        hidden = whole(args.get("hidden_size"))
        is_plain = args.get("mlp_type", "regular") == "regular"
        if hidden and "ffn_hidden_size" not in args and is_plain:
            args["ffn_hidden_size"] = str(4 * hidden)
    return args


def facts_of(args: Flat) -> Flat:
    """Columns of the reference schema that the arguments decide; '' where they are silent."""
    if is_none(args.get("hidden_size")) and is_none(args.get("world_size")):
        return {}
    args = _renamed(args)
    counts = columns("megatron", args) | _unmodelled(args)
    split = yes(args.get("sequence_parallel")) and counts.get("tp", "1") != "1"
    return counts | {
        "tied": str(int(not yes(args.get("untie_embeddings_and_output_weights")))),
        "family": _family(args),
        "sharding": _sharding(args),
        "sequence_parallel": str(int(split)),
        "precision": _precision(args),
        "note": _scaling(args),
        "act_ckpt": _recompute(args),
        "attention": _attention(args),
        "steps_of": words_of(args),
        "grad_dtype": _grad_dtype(args),
        "optimizer_dtype": _moments(args),
        "overlap": _overlap(args),
        "cuda_graph": graphs(args),
        **megatron_experts(args),
    }


def _unmodelled(args: Flat) -> Flat:
    if any(yes(args.get(name)) for name in _OFFLOADS):
        return {"unmodelled": OFFLOADED}
    for name, words in WORDS["other_layers"].items():
        if args.get(name, "").lower() not in ("", "none", "null", "false", "0", "0.0"):
            return {"unmodelled": words}
    window = re.search(r"-?[0-9]{1,9}", args.get("window_size", ""))
    before = int(window[0]) if window else -1  # '(127, 0)': before and after; -1: all
    return {} if before < 0 else {"unmodelled": f"windows of {before + 1} tokens"}


def _family(args: Flat) -> str:
    kind = args.get("activation") or args.get("glu_activation")
    gated = kind in ("swiglu", "fast-swiglu") or args.get("mlp_type") == "llama"
    if yes(args.get("swiglu")) or gated:
        return "llama"
    return "nemotron" if yes(args.get("squared_relu")) else "gpt"


def _sharding(args: Flat) -> str:
    strategy = args.get("data_parallel_sharding_strategy", "")
    is_fsdp = yes(args.get("use_megatron_fsdp")) or yes(args.get("use_custom_fsdp"))
    if yes(args.get("use_torch_fsdp2")):
        return "zero3"
    if is_fsdp and strategy in ("optim", "optim_grads", "optim_grads_params"):
        return f"zero{1 + strategy.count('_')}"
    inner = bracketed(args.get("zero_optimization", ""))  # GPT-NeoX: as DeepSpeed takes it
    stage = whole(args.get("zero_stage") or inner.get("stage"))
    is_deepspeed = any(n in args for n in ("deepspeed", "deepspeed_config", "zero_optimization"))
    if is_deepspeed and stage is not None:
        return f"zero{stage}" if yes(args.get("deepspeed", "true")) else "zero0"
    return "zero1" if yes(args.get("use_distributed_optimizer")) else "zero0"


def _precision(args: Flat) -> str:
    if yes(args.get("fp8_e4m3")) or yes(args.get("fp8_hybrid")):  # of 2022 and 2023
        return "fp8"
    for name in ("fp4", "fp8"):
        if not is_none(args.get(name)) and args[name].lower() != "false":
            return name
    if yes(args.get("bf16")) or args.get("precision", "").startswith(("bf16", "bfloat16")):
        return "bf16"
    if args.get("precision") in ("16", "16-mixed", "fp16"):
        return "fp16"
    return "fp16" if yes(args.get("fp16")) else "fp32"


def _scaling(args: Flat) -> str:
    """Of products in fp8, as notes of the reference schema say it."""
    recipe = args.get("fp8_recipe", "")
    return f"recipe {recipe}" if _precision(args) == "fp8" and recipe in CALLED else ""


def _grad_dtype(args: Flat) -> str:
    """The buffer that gradients accumulate in and are reduced from; '' in fp16, which is reduced
    as it is."""
    names = ("accumulate_allreduce_grads_in_fp32", "grad_reduce_in_fp32")
    said = next((args[name] for name in names if not is_none(args.get(name))), "")
    if yes(said):
        return "fp32"
    return "bf16" if said and _precision(args) in ("bf16", "fp8", "fp4") else ""


def _moments(args: Flat) -> str:
    """'' where the two differ, or are narrower than the schema has a word for."""
    dtypes = {
        args.get(name, "").rpartition(".")[2] for name in ("exp_avg_dtype", "exp_avg_sq_dtype")
    }
    if not yes(args.get("use_precision_aware_optimizer")):
        return "fp32" if dtypes != {""} else ""
    return _MOMENTS.get(dtypes.pop(), "") if len(dtypes) == 1 else ""


def _overlap(args: Flat) -> str:
    """What runs under compute, by the schema's words; '' where it does not say."""
    if is_none(args.get("overlap_grad_reduce")):
        return ""
    return " ".join(word for name, word in _OVERLAPS.items() if yes(args.get(name))) or "none"


def _recompute(args: Flat) -> str:
    """'' where parts of a layer are recomputed that the schema has no word for."""
    kind = args.get("recompute_granularity", args.get("activations_checkpoint_granularity"))
    old = yes(args.get("checkpoint_activations")) or yes(
        args.get("deepspeed_activation_checkpointing")
    )
    method = args.get("recompute_method", args.get("activations_checkpoint_method", ""))
    layers = whole(args.get("recompute_num_layers", args.get("activations_checkpoint_num_layers")))
    if is_none(kind) and not is_none(method):
        kind = "full"
    if is_none(kind):
        return "full" if old else "none"
    if kind == "full" and method == "block":
        total, stages = (
            whole(args.get("num_layers")),
            whole(args.get("pipeline_model_parallel_size")),
        )
        # Of each model chunk; without virtual stages a chunk is a stage.
        loops = whole(args.get("virtual_pipeline_model_parallel_size")) or 1
        is_all = layers and total and stages and layers * stages * loops >= total
        return "full" if is_all else f"block-{layers}" if layers else ""
    if kind == "selective" and expert_count(args) < 2:  # whose modules have a column of their own
        return _MODULES.get(" ".join(sorted(recomputed(args).split())), "")
    return kind if kind in RECOMPUTE else ""


def _attention(args: Flat) -> str:
    backend = args.get("attention_backend", "").rpartition(".")[2].lower()
    if (
        yes(args.get("use_flash_attn"))
        or "flash" in args.get("attention_config", "")
        or backend in ("flash", "fused")
        or yes(args.get("use_flash_attn_v2"))
    ):
        return "flash"
    if args.get("transformer_impl") == "transformer_engine" and backend != "unfused":
        return "flash"
    return "fused" if yes(args.get("masked_softmax_fusion")) else "unfused"
