"""torchtitan 0.3's configuration: a Python function that its --module and --config name."""

from __future__ import annotations

from typing import Any

from fourfold.search.export import titan
from fourfold.search.export.package import MARK, Package
from fourfold.search.export.setup import Setup, check_choice
from fourfold.spec.model import ModelShape

RELEASE = "torchtitan 0.3.0"
_ENGINE = "torchtitan"
_RECOMPUTE = {"none": "None", "full": "FullAC.Config()"}


def check(model: ModelShape) -> None:
    titan.check_llama(_ENGINE, model)


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
    )


def _arguments(fields: dict[str, Any], depth: int) -> str:
    indent = "    " * depth
    return "".join(f"{indent}{name}={value!r},\n" for name, value in fields.items())


def _config(setup: Setup) -> str:
    model, policy = setup.model, setup.policy
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
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
)
from torchtitan.models.common.param_init import depth_scaled_std, skip_param_init
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

HIDDEN, VOCAB, TIED = {model.hidden}, {model.vocab}, {model.tied}


def normal(std):
    return {{"weight": partial(nn.init.trunc_normal_, std=std), "bias": nn.init.zeros_}}


def norm():
    init = {{"weight": nn.init.ones_}}
    return RMSNorm.Config(normalized_shape=HIDDEN, eps={model.norm_eps!r}, param_init=init)


def layer(number):
    deep = normal(depth_scaled_std(0.02, number))
    return Llama3TransformerBlock.Config(
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
            rope=ComplexRoPE.Config(
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
    return Llama3Model.Config(
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
            name="llama3",
            flavor="fourfold",
            model=model(),
            parallelize_fn=parallelize_llama,
            pipelining_fn=pipeline_llm,
            post_optimizer_build_fn=None,
            state_dict_adapter=Llama3StateDictAdapter,
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
