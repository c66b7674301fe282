"""Runs in the environment of megatron-core: what does it make of exported arguments?

Reads a JSON list of cases ({"args": [...]}) from standard input. Megatron-LM's parser turns names
into fields of TransformerConfig one to one; the few that differ are below. Writes for each case the
layers of every (virtual) stage, parameters of the model its GPTModel builds, and tokens a step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import warnings
from functools import cache

warnings.filterwarnings("ignore")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from megatron.core import parallel_state, tensor_parallel, utils  # noqa: E402
from megatron.core.activations import squared_relu  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    destroy_num_microbatches_calculator,
    get_num_microbatches,
    init_num_microbatches_calculator,
)
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.transformer.transformer_block import get_num_layers_to_build  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from packaging.version import Version  # noqa: E402

# Its kernels need a GPU to install; the configuration only asks for the version, and fp8 with norms
# computed again wants this one.
utils._te_version = Version("2.6.0")

OTHER_NAMES = {
    "norm_epsilon": "layernorm_epsilon",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "fp8_format": "fp8",
    "fp4_format": "fp4",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
}


def parsed(args: list[str]) -> dict[str, object]:
    """Names and values; a switch is True."""
    found: dict[str, object] = {}
    name = ""
    for word in args:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            found[name] = True
        elif found[name] is True:
            found[name] = word
        else:
            found[name] = f"{found[name]} {word}"
    return found


def number(text: object) -> object:
    try:
        return int(str(text))
    except ValueError:
        try:
            return float(str(text))
        except ValueError:
            return text


def transformer_config(found: dict[str, object]) -> TransformerConfig:
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    fields: dict[str, object] = {}
    for name, value in found.items():
        field = OTHER_NAMES.get(name, name)
        if field in known:
            fields[field] = value if value is True else number(value)
    dtype = torch.bfloat16 if "bf16" in found else torch.float16 if "fp16" in found else torch.float
    fields |= {"params_dtype": dtype, "pipeline_dtype": dtype, "use_cpu_initialization": True}
    fields["add_bias_linear"] = "disable_bias_linear" not in found
    fields["bias_activation_fusion"] = "no_bias_gelu_fusion" not in found
    if "swiglu" in found:
        fields |= {"gated_linear_unit": True, "activation_func": F.silu}
    elif "squared_relu" in found:
        fields |= {"activation_func": squared_relu, "bias_activation_fusion": False}
    if "recompute_modules" in found:
        fields["recompute_modules"] = str(found["recompute_modules"]).split()
    for name in ("attention_backend", "transformer_impl", "rotary_base"):
        fields.pop(name, None)
    # Only TransformerEngine has these; TransformerConfig is asked about them apart.
    fields["tp_comm_overlap"] = "tp_comm_overlap" in found
    return TransformerConfig(**fields)  # pyrefly: ignore


@cache
def groups(pp: int) -> None:
    """Process groups of one real rank: get_num_layers_to_build asks only for sizes given below."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0,
                                         world_size=1)  # fmt: skip
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed = lambda *_, **__: None


@cache
def parameters(shape: tuple[tuple[str, object], ...], vocab: int, length: int, kind: str,
               tied: bool) -> int:  # fmt: skip
    """Of the whole model, built on the meta device by Megatron's own class."""
    groups(1)
    config = TransformerConfig(**dict(shape), use_cpu_initialization=True)  # pyrefly: ignore
    rms = config.normalization == "RMSNorm"
    spec = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    assert rms == (config.normalization == "RMSNorm")
    with torch.device("meta"):
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=vocab,
            max_sequence_length=length,
            position_embedding_type=kind,
            share_embeddings_and_output_weights=tied,
        )
    return sum(weight.numel() for weight in model.parameters())


SHAPE = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels",
    "num_query_groups", "normalization", "layernorm_epsilon", "gated_linear_unit",
    "activation_func", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "bias_activation_fusion",
)  # fmt: skip


def stages(config: TransformerConfig) -> list[int]:
    """Layers of every stage in the order of the model, by Megatron's own function."""
    pp, virtual = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    return [
        get_num_layers_to_build(config, vp_stage=place if virtual else None, pp_rank=rank)
        for place in range(virtual or 1)
        for rank in range(pp)
    ]


def data_parallel(found: dict[str, object]) -> DistributedDataParallelConfig:
    """Its own checks of sharding, overlap and gradient formats."""
    known = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    fields = {name: number(value) if value is not True else True for name, value in found.items()
              if name in known}  # fmt: skip
    fields["grad_reduce_in_fp32"] = "grad_reduce_in_bf16" not in found
    return DistributedDataParallelConfig(**fields)  # pyrefly: ignore


def answer(case: dict) -> dict[str, object]:
    found = parsed(case["args"])
    config = transformer_config(found)
    ddp = data_parallel(found)
    OptimizerConfig(
        optimizer="adam",
        lr=1e-4,
        bf16="bf16" in found,
        fp16="fp16" in found,
        use_distributed_optimizer="use_distributed_optimizer" in found,
    )
    dp = case["world"] // (
        config.tensor_model_parallel_size
        * config.pipeline_model_parallel_size
        * config.context_parallel_size
    )
    ramp = str(found["rampup_batch_size"]).split() if "rampup_batch_size" in found else None
    size, micro = int(str(found["global_batch_size"])), int(str(found["micro_batch_size"]))
    destroy_num_microbatches_calculator()
    init_num_microbatches_calculator(0, ramp, size, micro, dp)
    micros = get_num_microbatches() if ramp is None else size // (dp * micro)
    shape = tuple((name, getattr(config, name)) for name in SHAPE)
    return {
        "layers": stages(config),
        "params": parameters(
            shape,
            int(str(found["padded_vocab_size"])),
            int(str(found["max_position_embeddings"])),
            str(found["position_embedding_type"]),
            "untie_embeddings_and_output_weights" not in found,
        ),
        "tokens": micros * micro * dp * int(str(found["seq_length"])),
        "fp32_gradients": ddp.grad_reduce_in_fp32,
        "overlap_tp": config.tp_comm_overlap,
    }


def main() -> None:
    answers = []
    for case in json.load(sys.stdin):
        try:
            answers.append(answer(case))
        except Exception as error:
            answers.append({"error": f"{type(error).__name__}: {error}"})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
