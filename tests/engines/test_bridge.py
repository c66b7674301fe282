"""Megatron-Bridge takes what is exported for it: its own recipe functions and every check of its
container are asked, in an environment of its release (scripts/engines).

What can't be installed there is stood in for (bridge_read.py names it). A check that asks such a
stand-in says nothing: which do is listed here, and the options they guard are not shown to start.
"""

from __future__ import annotations

import json
import os
import re
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from fourfold.backends.megatron import export as megatron
from fourfold.search import export
from fourfold.search.export.setup import Setup
from fourfold.spec import catalog, codec
from fourfold.spec.batch import Batch
from fourfold.spec.engine import EXPORTS, FOLDER, engine_of
from fourfold.spec.hf.written import config_of
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy
from tests.engines.sampled import asked, sampled, verdict

SAMPLES = Path(__file__).parent.parent / "samples" / "configs"
TABLES = catalog.data(os.path.join(FOLDER, "megatron_bridge", "recipes.toml"))
RECIPES, FIELDS = TABLES["recipes"], TABLES["fields"]
# The published file of a model of the same kind, where ours can't be written from sizes.
LIKE = {"glm-4.5": "glm-4.5-air", "gpt-oss-120b": "gpt-oss-20b"}
# Fields of its model that a recipe takes from a config.json, by Megatron's flags of the same run.
SIZES = {
    "--num-layers": "num_layers",
    "--hidden-size": "hidden_size",
    "--ffn-hidden-size": "ffn_hidden_size",
    "--num-attention-heads": "num_attention_heads",
    "--norm-epsilon": "layernorm_epsilon",
    "--vocab-size": "vocab_size",
    "--rotary-base": "rotary_base",
    "--num-experts": "num_moe_experts",
    "--moe-ffn-hidden-size": "moe_ffn_hidden_size",
    "--moe-router-topk": "moe_router_topk",
    "--moe-router-score-function": "moe_router_score_function",
    "--moe-shared-expert-intermediate-size": "moe_shared_expert_intermediate_size",
    "--kv-lora-rank": "kv_lora_rank",
    "--q-lora-rank": "q_lora_rank",
    "--qk-head-dim": "qk_head_dim",
    "--v-head-dim": "v_head_dim",
}
# What Transformer Engine itself would be asked: by which check, for which release, and for what.
LEFT_TO_TE = {
    "mixed_precision.finalize 2.7.0.dev0": "products in 4 bits",
    "transformer_config.__post_init__ 1.7.0.dev0": "experts in 8 bits",
    "transformer_config.__post_init__ 1.11.0": "experts in 8 bits, grouped",
    "transformer_config.__post_init__ 2.6.0.dev0": "norms and activations computed again in 8 bits",
}
# Of a final configuration, what need not be Megatron-LM's of the same plan, by the reason.
FREE = {
    name: reason
    for reason, names in {
        "of the training, the recipe's": (
            "optimizer.lr", "optimizer.min_lr", "optimizer.weight_decay", "optimizer.adam_beta2",
            "model.init_method_std", "model.embedding_init_method_std",
            "model.mtp_loss_scaling_factor", "model.calculate_per_token_loss",
            "ddp.average_in_collective", "ddp.check_for_nan_in_grad",
        ),
        "how it sends and sorts, as in the recipes behind the seconds": (
            "model.moe_router_fusion", "model.batch_p2p_comm",
            "model.high_priority_a2a_comm_stream",
            "model.moe_flex_dispatcher_num_sms", "model.moe_hybridep_num_sms",
            "ddp.align_param_gather", "ddp.bucket_size",
        ),
        "of its mixture in 8 bits, of the same width": (
            "model.fp8_amax_compute_algo", "model.fp8_amax_history_len",
        ),
        "unset, which is Megatron-LM's default": (
            "model.attention_backend", "ddp.delay_wgrad_compute", "model.wgrad_deferral_limit",
            "model.tensor_parallel_num_weight_shards",
            "model.expert_tensor_parallel_num_weight_shards",
        ),
        "not of a step": (
            "model.inference_sampling_seed", "model.use_cpu_initialization",
            "optimizer.barrier_with_L1_time", "model.use_te_rng_tracker",
        ),
        "an older name": ("ddp.use_custom_fsdp",),
    }.items()
    for name in names
}  # fmt: skip
# Not read where another field has one of these values.
IDLE: dict[str, tuple[str, tuple[Any, ...]]] = {
    "model.fp8": ("model.fp8_recipe", ("mxfp8",)),  # e4m3 both ways
    "model.fp8_recipe": ("model.fp8", (None,)),
    "optimizer.fp8_recipe": ("model.fp8", (None,)),
    "model.num_layers_at_start_in_bf16": ("model.first_last_layers_bf16", (False,)),
    "model.num_layers_at_end_in_bf16": ("model.first_last_layers_bf16", (False,)),
    "model.cp_comm_type": ("model.context_parallel_size", (1,)),
    "model.moe_flex_dispatcher_backend": ("model.moe_token_dispatcher_type",
                                          ("alltoall", "allgather")),
    "model.moe_router_pre_softmax": ("model.moe_router_score_function", ("sigmoid",)),
    "model.kv_channels": ("model.multi_latent_attention", (True,)),
    "model.add_qkv_bias": ("model.add_bias_linear", (True,)),
    "ddp.data_parallel_sharding_strategy": ("ddp.use_megatron_fsdp", (False,)),
    "optimizer.optimizer_offload_fraction": ("optimizer.optimizer_cpu_offload", (False,)),
    "optimizer.muon_momentum": ("optimizer.optimizer", ("adam",)),
    "optimizer.muon_nesterov": ("optimizer.optimizer", ("adam",)),
}  # fmt: skip
# Values that say the same.
SAME: dict[str, tuple[Any, ...]] = {
    "model.moe_router_num_groups": (None, 1),
    "model.moe_router_group_topk": (None, 1),
    "model.moe_router_topk_scaling_factor": (None, 1.0),
}


# Beside what is drawn: model, layout, policy.
STATED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("qwen3-30b-a3b", "dp16 ep8", {
        "precision": "fp8", "scaling": "mx", "dispatcher": "hybridep", "cuda_graph": True}),
    ("llama-3.1-8b", "dp8 tp2", {"cuda_graph": True}),
    ("llama-3.1-8b", "dp8 tp2", {"precision": "fp8", "scaling": "delayed"}),
    ("llama-3.1-8b", "dp8 tp2", {"precision": "fp8", "scaling": "block", "recompute": "norm+mlp"}),
    ("qwen3-8b", "pp2 dp8", {"grad_dtype": "fp32", "overlap_grad_reduce": False}),
    ("gpt-oss-120b", "pp4 dp8 cp2 ep8", {"cp_kind": "ulysses", "dispatcher": "alltoall"}),
    ("gpt-oss-20b", "pp2 dp8 tp2 ep4", {"precision": "fp8", "recompute": "moe-act"}),
)  # fmt: skip


def stated() -> list[Setup]:
    return [
        Setup(
            model=catalog.model(model),
            layout=Layout.parse(layout),
            batch=Batch(seq_len=4096, micro_batch=1, global_batch=64),
            policy=Policy(**policy),
            host_gpus=8,
            engine=engine_of("megatron"),
            device="h100-80gb",
        )
        for model, layout, policy in STATED
    ]


def hub_config(model: ModelShape) -> dict[str, Any]:
    """What its recipe finds on the Hub: the published file, or one with the preset's sizes."""
    published = SAMPLES / f"{LIKE.get(model.name, model.name)}.json"
    if not published.exists():
        return config_of(model, seq_len=4096, dtype="bfloat16")
    config = json.loads(published.read_text())
    if model.name in LIKE:
        sizes = {
            "num_hidden_layers": model.layers,
            "hidden_size": model.hidden,
            "intermediate_size": model.ffn,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "num_local_experts": model.experts,
            "n_routed_experts": model.experts,
        }
        config |= {name: size for name, size in sizes.items() if name in config}
        if model.moe and "n_routed_experts" in config:
            config |= {
                "moe_intermediate_size": model.moe.ffn,
                "first_k_dense_replace": model.moe.dense_first,
                "routed_scaling_factor": model.moe.scale,
                "use_qk_norm": model.qk_norm == "head",
            }
        if "layer_types" in config:
            config["layer_types"] = [*islice(cycle(config["layer_types"][:2]), model.layers)]
    return config


def case(one: Setup, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    files = export.write_folder("megatron-bridge", one)
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "config.json").write_text(json.dumps(hub_config(one.model)))
    words = files["engine.args"].split("\n")[:-1]
    env = re.findall(r"^export (\w+)=(.*)$", files["env.sh"], re.MULTILINE)
    is_late = one.policy.precision == "fp4" or one.policy.scaling == "mx"
    return {
        "args": words, "folder": str(folder), "world": one.layout.world, "env": dict(env),
        "names": [*wanted(one, words)],
        "gpu": (10, "NVIDIA B200") if is_late else (9, "NVIDIA H100"),
    }  # fmt: skip


def wanted(one: Setup, words: list[str]) -> dict[str, str]:
    """Values of the final configuration as text: overrides, and sizes by Megatron's own flags."""
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        found[name] = value.strip("'")
    # What follows from others where it is left open.
    if found["model.recompute_granularity"] != "selective":
        del found["model.recompute_modules"]
    flags = megatron.package(one, EXPORTS["megatron"]).engine_args
    for name, value in pairwise(flags):
        if name in SIZES:
            found[f"model.{SIZES[name]}"] = value
        elif value.isdecimal():
            found |= dict.fromkeys(FIELDS.get(name, "").split(), value)
    if one.policy.virtual_stages > 1:
        found["model.virtual_pipeline_model_parallel_size"] = str(one.policy.virtual_stages)
    return found


def text_of(value: Any) -> str:
    """As an override is written."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{','.join(map(text_of, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def differing(want: dict[str, str], said: dict[str, Any]) -> dict[str, tuple[str, str]]:
    found = {}
    for name, value in want.items():
        is_same = value == text_of(said[name])
        if not is_same:
            try:
                is_same = float(value) == float(said[name])
            except (TypeError, ValueError):
                is_same = False
        if not is_same:
            found[name] = (value, text_of(said[name]))
    return found


def unlike(flags: dict[str, Any], recipe: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields of its final configuration that are not Megatron-LM's of the same plan."""
    found = {}
    for name in flags.keys() & recipe.keys():
        other, values = IDLE.get(name, ("", ()))
        is_idle = bool(other) and flags[other] in values and recipe[other] in values
        same = SAME.get(name, ())
        is_same = flags[name] == recipe[name] or (flags[name] in same and recipe[name] in same)
        if name not in FREE and not is_idle and not is_same:
            found[name] = (flags[name], recipe[name])
    return found


def of_megatron(setups: list[Setup], folder: Path) -> list[dict[str, Any]]:
    """What Megatron-LM of the same core makes of its own flags of each."""
    folder.mkdir()
    cases = []
    for one in setups:
        made = megatron.package(one, EXPORTS["megatron"])
        cases.append({"args": [*made.engine_args], "env": made.env, "world": one.layout.world,
                      "device": one.device})  # fmt: skip
    return asked("megatron", cases, folder, "--whole")


def words_of(one: Setup) -> str:
    policy = codec.encode(one.policy, sparse=True)
    return f"{one.model.name} {one.layout} mbs {one.batch.micro_batch} {policy}"


def compare(setups: list[Setup], folder: Path) -> tuple[set[str], str]:
    """Require that each is accepted and ends as it was exported; return what was asked of
    Transformer Engine, and the verdict."""
    cases = [case(one, folder / str(place)) for place, one in enumerate(setups)]
    wrong, left = [], set()
    plain = of_megatron(setups, folder / "flags")
    answers = asked("megatron-bridge", cases, folder)
    for one, made, answer, flags in zip(setups, cases, answers, plain, strict=True):
        if "error" in answer:
            wrong.append((words_of(one), answer["error"]))
            continue
        left |= set(answer["asked"])
        odd = differing(wanted(one, made["args"]), answer["said"])
        odd |= unlike(flags["whole"], answer["whole"])
        if odd or answer["dp"] != one.layout.dp:
            wrong.append((words_of(one), odd))
    assert not wrong, f"{len(wrong)} of {len(setups)}: " + "\n".join(map(str, wrong))
    by = "its recipes and container, as Megatron-LM's configuration of the same plan"
    unproved = sorted({LEFT_TO_TE.get(one, one) for one in left})
    return left, verdict("megatron-bridge", len(setups), by, answers, unproved)


@pytest.mark.timeout(3000)  # to import its recipes is a minute's work, of a busy machine ten
@pytest.mark.parametrize("count", [28, pytest.param(200, marks=pytest.mark.slow)])
def test_recipes_with_overrides_pass_its_own_checks(count: int, tmp_path: Path, capsys) -> None:
    models = tuple(catalog.model(name) for name in RECIPES)
    left, said = compare(sampled("megatron-bridge", count, models) + stated(), tmp_path)
    assert left <= {*LEFT_TO_TE}
    with capsys.disabled():
        print(said)
