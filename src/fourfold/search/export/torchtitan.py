"""torchtitan's configuration: of 0.3 a Python function that its --module and --config name; and
what release 0.2 shares, words for axes, schedules and formats."""

from __future__ import annotations

from string import Template
from typing import Any

from fourfold.search.export.setup import LLAMA_SHAPE, MARK, Package, Setup, check_model, no_setting
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy

RELEASE = "torchtitan 0.3.0"
CHOICES = {"policy.reduce_dtype": (None, "fp32"), "policy.attention": ("auto", "flash")}
OWN = "tokenizer (hf_assets_path), data, learning rate and number of steps"
_ENGINE = "torchtitan"
_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
}
# Beside products in fp8 everything else is bf16.
_DTYPES = {"bf16-mixed": "bfloat16", "fp32": "float32", "fp8": "bfloat16"}
# Its Llama 3, and its Qwen 3, which has norms of queries and keys and a head size of its own.
_SHAPES = {**LLAMA_SHAPE, "family": ("llama", "qwen"), "qk_norm": ("none", "head")}
_ABOUT_FP8 = (
    "products in fp8 but for the head's, scaled by rows; weights are gathered in bf16, where the"
    " published runs that seconds and bytes come from gathered them in fp8",
)
# What differs between its two models of this kind.
_LLAMA = {
    "package": "llama3",
    "model": "Llama3Model",
    "block": "Llama3TransformerBlock",
    "parallelize": "parallelize_llama",
    "adapter": "Llama3StateDictAdapter",
    "rope": "ComplexRoPE",
}
_QWEN = {
    "package": "qwen3",
    "model": "Qwen3Model",
    "block": "Qwen3TransformerBlock",
    "parallelize": "parallelize_qwen3",
    "adapter": "Qwen3StateDictAdapter",
    "rope": "CosSinRoPE",
}
_RECOMPUTE = {
    "none": "None",
    "selective": "SelectiveAC.Config()",  # by operators, its default
    "full": "FullAC.Config()",
}
_FP8_IMPORT = "from torchtitan.components.quantization import Float8LinearConverter\n"
_CONFIG = Template("""$mark torchtitan, for $release
from functools import partial

import torch.nn as nn
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
${fp8_import}from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import Embedding, Linear, RMSNorm, ${rope}
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
)
from torchtitan.models.common.param_init import depth_scaled_std, skip_param_init
from torchtitan.models.${package}.model import ${model}, ${block}
from torchtitan.models.${package}.parallelize import ${parallelize}
from torchtitan.models.${package}.state_dict_adapter import ${adapter}
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

HIDDEN, VOCAB, TIED = $hidden, $vocab, $tied


def normal(std):
    return {"weight": partial(nn.init.trunc_normal_, std=std), "bias": nn.init.zeros_}


def norm(width=HIDDEN):
    init = {"weight": nn.init.ones_}
    return RMSNorm.Config(normalized_shape=width, eps=$eps, param_init=init)


def layer(number):
    deep = normal(depth_scaled_std(0.02, number))
    return ${block}.Config(
        attention_norm=norm(),
        ffn_norm=norm(),
        attention=make_gqa_config(
            dim=HIDDEN,
            n_heads=$heads,
            n_kv_heads=$kv_heads,
            head_dim=$head_size,
            fuse_qkv=True,
            wqkv_param_init=normal(0.02),
            wo_param_init=deep,
            inner_attention=get_attention_config("flex"),
            qk_norm=$qk_norm,
            rope=${rope}.Config(
$rope_fields            ),
        ),
        feed_forward=make_ffn_config(
            dim=HIDDEN,
            hidden_dim=$ffn,
            w1_param_init=normal(0.02),
            w2w3_param_init=deep,
        ),
    )


def model():
    first = skip_param_init if TIED else partial(nn.init.normal_, std=1.0)
    return ${model}.Config(
        dim=HIDDEN,
        vocab_size=VOCAB,
        enable_weight_tying=TIED,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCAB, embedding_dim=HIDDEN, param_init={"weight": first}
        ),
        norm=norm(),
        lm_head=Linear.Config(
            in_features=HIDDEN, out_features=VOCAB, param_init=normal(HIDDEN**-0.5)
        ),
        layers=[layer(number) for number in range($layers)],
    )


def pretrain():
    return Trainer.Config(
        model_spec=ModelSpec(
            name="${package}",
            flavor="fourfold",
            model=$converted,
            parallelize_fn=${parallelize},
            pipelining_fn=pipeline_llm,
            post_optimizer_build_fn=None,
            state_dict_adapter=${adapter},
        ),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCAB),
        optimizer=default_adamw(lr=3e-4),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        training=TrainingConfig(
$training        ),
        parallelism=ParallelismConfig(
$parallelism        ),
        activation_checkpoint=$recompute,
        compile=CompileConfig(
$compile        ),
    )
""")


def is_qwen3(model: ModelShape) -> bool:
    return model.qk_norm == "head"


def check_shape(engine: str, model: ModelShape) -> None:
    check_model(engine, model, _SHAPES)
    place = model.positions
    if place.kind != "rope":
        raise no_setting(engine, "model.positions.kind", place.kind, "rope")
    if place.scaling and (place.scaling.kind != "llama3" or is_qwen3(model)):
        hint = "none" if is_qwen3(model) else "llama3, or none"
        raise no_setting(engine, "model.positions.scaling", place.scaling.kind, hint)


def check(model: ModelShape) -> None:
    check_shape(_ENGINE, model)


def check_async_tp(engine: str, policy: Policy) -> None:
    if policy.async_tp and not policy.compile:
        raise no_setting(engine, "policy.async_tp", True, "compile = true, which it needs")


def package(setup: Setup) -> Package:
    check_async_tp(_ENGINE, setup.policy)
    return Package(
        engine=_ENGINE,
        release=RELEASE,
        entry="-m torchtitan.train",
        env=setup.env,
        engine_args=("--module", "fourfold_config", "--config", "pretrain"),
        files={"fourfold_config.py": _config(setup)},
        python_path=True,
        own=f"{OWN} (in fourfold_config.py, or as arguments of run.sh)",
        about=_ABOUT_FP8 if setup.policy.precision == "fp8" else (),
    )


def parallelism(setup: Setup) -> dict[str, Any]:
    """Fields of its parallelism section; both releases have them."""
    layout, policy = setup.layout, setup.policy
    plain = policy.zero == 0
    fields: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.dp if plain else layout.replicate,
        "data_parallel_shard_degree": 1 if plain else layout.shard,
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
    }
    if not plain:
        fields["fsdp_reshard_after_forward"] = "always" if policy.zero == 3 else "never"
    if layout.pp == 1:
        return fields
    chunks = layout.pp * policy.virtual_stages
    return fields | {
        "pipeline_parallel_schedule": _SCHEDULES[policy.schedule],
        "pipeline_parallel_layers_per_stage": -(-setup.model.layers // chunks),
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
        "pipeline_parallel_microbatch_size": setup.batch.micro_batch,
    }


def training(setup: Setup) -> dict[str, Any]:
    """A pipeline takes a rank's whole share and cuts it; else micro batches are accumulated."""
    batch = setup.batch
    share = batch.global_batch // setup.layout.dp
    return {
        "seq_len": batch.seq_len,
        "local_batch_size": batch.micro_batch if setup.layout.pp == 1 else share,
        "global_batch_size": batch.global_batch,
        "dtype": "float32",
        "mixed_precision_param": _DTYPES[setup.policy.precision],
        "mixed_precision_reduce": "float32",
    }


def _config(setup: Setup) -> str:
    model, policy = setup.model, setup.policy
    # Captured graphs know no pipeline, and are not what was priced.
    trained = training(setup) | {"disable_cuda_graphs": True}
    parallel = parallelism(setup) | {"enable_sequence_parallel": policy.sequence_parallel}
    compiled = {"enable": policy.compile, "enable_async_tensor_parallel": policy.async_tp}
    sizes = ("hidden", "vocab", "tied", "heads", "kv_heads", "head_size", "ffn", "layers")
    return _CONFIG.substitute(
        _QWEN if is_qwen3(model) else _LLAMA,
        **{name: getattr(model, name) for name in sizes},
        mark=MARK,
        release=RELEASE,
        eps=repr(model.norm_eps),
        fp8_import=_FP8_IMPORT if policy.precision == "fp8" else "",
        qk_norm=f"norm({model.head_size})" if is_qwen3(model) else "None",
        converted=_converted(policy),
        recompute=_RECOMPUTE[policy.recompute],
        rope_fields=_arguments(_rope(setup), 4),
        training=_arguments(trained, 3),
        parallelism=_arguments(parallel, 3),
        compile=_arguments(compiled, 3),
    )


def _arguments(fields: dict[str, Any], depth: int) -> str:
    indent = "    " * depth
    return "".join(f"{indent}{name}={value!r},\n" for name, value in fields.items())


def _converted(policy: Policy) -> str:
    """The model, its products in fp8 where the policy says so; its own 405B leaves the head out."""
    if policy.precision != "fp8":
        return "model()"
    settings = f"filter_fqns=['lm_head'], model_compile_enabled={policy.compile}"
    return f"Float8LinearConverter.Config({settings}).build().convert(model())"


def _rope(setup: Setup) -> dict[str, Any]:
    model, place = setup.model, setup.model.positions
    fields: dict[str, Any] = {
        "dim": model.head_size,
        "max_seq_len": max(setup.batch.seq_len, place.length or 0),
        "theta": place.theta,
    }
    if place.scaling is None:
        return fields
    return fields | {
        "scaling": "llama",
        "scaling_factor": place.scaling.factor,
        "low_freq_factor": place.scaling.low_freq_factor,
        "high_freq_factor": place.scaling.high_freq_factor,
        "original_max_position_embeddings": place.scaling.original_length,
    }
