"""torchtitan 0.3's configuration: a Python function that its --module and --config name."""

from __future__ import annotations

from typing import Any

from fourfold.search.export import titan
from fourfold.search.export.package import MARK, Package
from fourfold.search.export.setup import Setup, check_choice
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy

RELEASE = "torchtitan 0.3.0"
_ENGINE = "torchtitan"
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
_RECOMPUTE = {"none": "None", "full": "FullAC.Config()"}


def check(model: ModelShape) -> None:
    titan.check_shape(_ENGINE, model)


def package(setup: Setup) -> Package:
    check(setup.model)
    titan.check_titan(_ENGINE, setup)
    check_choice(_ENGINE, "policy.recompute", setup.policy.recompute, tuple(_RECOMPUTE))
    return Package(
        engine=_ENGINE,
        release=RELEASE,
        entry="-m torchtitan.train",
        env=titan.environment(setup),
        engine_args=("--module", "fourfold_config", "--config", "pretrain"),
        files={"fourfold_config.py": _config(setup)},
        python_path=True,
        own=f"{titan.OWN} (in fourfold_config.py, or as arguments of run.sh)",
        about=_ABOUT_FP8 if setup.policy.precision == "fp8" else (),
    )


def _arguments(fields: dict[str, Any], depth: int) -> str:
    indent = "    " * depth
    return "".join(f"{indent}{name}={value!r},\n" for name, value in fields.items())


def _config(setup: Setup) -> str:
    model, policy = setup.model, setup.policy
    names = _QWEN if titan.is_qwen3(model) else _LLAMA
    fp8_import = _FP8_IMPORT if policy.precision == "fp8" else ""
    qk_norm = f"norm({model.head_size})" if titan.is_qwen3(model) else "None"
    parallel = titan.parallelism(_ENGINE, setup)
    parallel["enable_sequence_parallel"] = policy.sequence_parallel
    # Captured graphs know no pipeline, and are not what was priced.
    training = titan.training(setup) | {"disable_cuda_graphs": True}
    compiled = {"enable": policy.compile, "enable_async_tensor_parallel": policy.async_tp}
    return f"""{MARK} torchtitan, for {RELEASE}
from functools import partial

import torch.nn as nn
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
{fp8_import}from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import Embedding, Linear, RMSNorm, {names["rope"]}
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
)
from torchtitan.models.common.param_init import depth_scaled_std, skip_param_init
from torchtitan.models.{names["package"]}.model import {names["model"]}, {names["block"]}
from torchtitan.models.{names["package"]}.parallelize import {names["parallelize"]}
from torchtitan.models.{names["package"]}.state_dict_adapter import {names["adapter"]}
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

HIDDEN, VOCAB, TIED = {model.hidden}, {model.vocab}, {model.tied}


def normal(std):
    return {{"weight": partial(nn.init.trunc_normal_, std=std), "bias": nn.init.zeros_}}


def norm(width=HIDDEN):
    init = {{"weight": nn.init.ones_}}
    return RMSNorm.Config(normalized_shape=width, eps={model.norm_eps!r}, param_init=init)


def layer(number):
    deep = normal(depth_scaled_std(0.02, number))
    return {names["block"]}.Config(
        attention_norm=norm(),
        ffn_norm=norm(),
        attention=make_gqa_config(
            dim=HIDDEN,
            n_heads={model.heads},
            n_kv_heads={model.kv_heads},
            head_dim={model.head_size},
            fuse_qkv=True,
            wqkv_param_init=normal(0.02),
            wo_param_init=deep,
            inner_attention=get_attention_config("flex"),
            qk_norm={qk_norm},
            rope={names["rope"]}.Config(
{_arguments(_rope(setup), 4)}            ),
        ),
        feed_forward=make_ffn_config(
            dim=HIDDEN,
            hidden_dim={model.ffn},
            w1_param_init=normal(0.02),
            w2w3_param_init=deep,
        ),
    )


def model():
    first = skip_param_init if TIED else partial(nn.init.normal_, std=1.0)
    return {names["model"]}.Config(
        dim=HIDDEN,
        vocab_size=VOCAB,
        enable_weight_tying=TIED,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCAB, embedding_dim=HIDDEN, param_init={{"weight": first}}
        ),
        norm=norm(),
        lm_head=Linear.Config(
            in_features=HIDDEN, out_features=VOCAB, param_init=normal(HIDDEN**-0.5)
        ),
        layers=[layer(number) for number in range({model.layers})],
    )


def pretrain():
    return Trainer.Config(
        model_spec=ModelSpec(
            name="{names["package"]}",
            flavor="fourfold",
            model={_converted(policy)},
            parallelize_fn={names["parallelize"]},
            pipelining_fn=pipeline_llm,
            post_optimizer_build_fn=None,
            state_dict_adapter={names["adapter"]},
        ),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCAB),
        optimizer=default_adamw(lr=3e-4),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        training=TrainingConfig(
{_arguments(training, 3)}        ),
        parallelism=ParallelismConfig(
{_arguments(parallel, 3)}        ),
        activation_checkpoint={_RECOMPUTE[policy.recompute]},
        compile=CompileConfig(
{_arguments(compiled, 3)}        ),
    )
"""


_FP8_IMPORT = "from torchtitan.components.quantization import Float8LinearConverter\n"


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
