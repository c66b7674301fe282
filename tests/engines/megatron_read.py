"""Runs in the environment of megatron-core: what does it make of exported arguments?

Reads a JSON list of cases ({"args": [...]}) from standard input. Megatron-LM's parser turns names
into fields of TransformerConfig one to one; the few that differ are below. Writes for each case the
layers of every (virtual) stage, parameters of the model its GPTModel builds, tokens a step, and of
experts where they lie, how tokens reach them, and what its router does.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from functools import cache, partial
from typing import Any

warnings.filterwarnings("ignore")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from megatron.core import parallel_state, tensor_parallel, utils  # noqa: E402
from megatron.core.activations import squared_relu  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    destroy_num_microbatches_calculator,
    get_num_microbatches,
    init_num_microbatches_calculator,
)
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.transformer import multi_latent_attention  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.enums import LayerType  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.pipeline_parallel_layer_layout import (  # noqa: E402
    PipelineParallelLayerLayout,
)
from megatron.core.transformer.transformer_block import get_num_layers_to_build  # noqa: E402
from megatron.core.transformer.transformer_config import (  # noqa: E402
    MLATransformerConfig,
    TransformerConfig,
)
from packaging.version import Version  # noqa: E402
from telling import tell  # noqa: E402

# Its kernels need a GPU to install; the configuration only asks for the version, and fp8 with norms
# computed again wants this one.
utils._te_version = Version("2.6.0")
for _kernel in ("permute", "permute_with_probs", "sort_chunks_by_index",
                "sort_chunks_by_index_with_probs", "unpermute"):  # fmt: skip
    setattr(moe_utils, f"fused_{_kernel}", True)

_attention = DotProductAttention.__init__


def _without_channels(self: object, *args: object, k_channels: object = None,
                      v_channels: object = None, **more: object) -> None:  # fmt: skip
    """Attention without TransformerEngine, which has no weights, and no latent heads either."""
    _attention(self, *args, **more)  # pyrefly: ignore


DotProductAttention.__init__ = _without_channels  # pyrefly: ignore
multi_latent_attention.TELinear = type("TELinear", (), {})  # pyrefly: ignore
OTHER_NAMES = {
    "norm_epsilon": "layernorm_epsilon",
    "num_experts": "num_moe_experts",
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
    cls = MLATransformerConfig if "multi_latent_attention" in found else TransformerConfig
    known = {field.name for field in dataclasses.fields(cls)}
    # Where its parser's default is another than the class's.
    fields: dict[str, object] = {"q_lora_rank": None} if cls is MLATransformerConfig else {}
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
    for name in ("recompute_modules", "cuda_graph_scope"):
        if name in found:
            fields[name] = str(found[name]).split()
    if "moe_layer_freq" in found:
        fields["moe_layer_freq"] = pattern(str(found["moe_layer_freq"]))
    if cls is MLATransformerConfig:  # elsewhere a kernel of TransformerEngine has to be there
        fields["apply_rope_fusion"] = "no_rope_fusion" not in found
    for name in ("attention_backend", "transformer_impl", "rotary_base"):
        fields.pop(name, None)
    # Only TransformerEngine has these; TransformerConfig is asked about them apart.
    fields["tp_comm_overlap"] = "tp_comm_overlap" in found
    return cls(**fields)  # pyrefly: ignore


def pattern(text: str) -> list[int]:
    """As its parser reads it: a list of Python in these signs."""
    assert not set(text) - set("[],()+*0123456789"), text
    return eval(text)


@cache
def groups(pp: int) -> None:
    """Process groups of one real rank: get_num_layers_to_build asks only for sizes given below."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0,
                                         world_size=1)  # fmt: skip
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed = lambda *_, **__: None
    torch.cuda.current_device = lambda: torch.device("cpu")  # pyrefly: ignore


@cache
def built(cls: type, shape: tuple[tuple[str, object], ...], freq: tuple[int, ...], vocab: int,
          length: int, kind: str, tied: bool) -> int:  # fmt: skip
    """Parameters of a model with these layers (1: with experts), on the meta device by Megatron's
    own class."""
    groups(1)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
    fields = dict(shape) | {"num_layers": len(freq), "use_cpu_initialization": True}
    fields |= {"moe_layer_freq": list(freq)} if fields["num_moe_experts"] else {}
    config = cls(**fields, apply_rope_fusion=False)
    with torch.device("meta"):
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=False),
            vocab_size=vocab,
            max_sequence_length=length,
            position_embedding_type=kind,
            share_embeddings_and_output_weights=tied,
        )
    return sum(weight.numel() for weight in model.parameters())


def parameters(config: TransformerConfig, vocab: int, length: int, kind: str, tied: bool) -> int:
    """Of the whole model. A layer with experts makes a thousand modules: of each kind one, or two,
    are built, and counted as often as they come."""
    latent = LATENT if isinstance(config, MLATransformerConfig) else ()
    shape = tuple((name, getattr(config, name)) for name in (*SHAPE, *latent))
    common = (vocab, length, kind.replace("yarn", "rope"), tied)  # neither has weights
    routed = len(routed_layers(config))
    kinds = {0: config.num_layers - routed, 1: routed}
    found, used = 0, [kind for kind, count in kinds.items() if count]
    once = {one: built(type(config), shape, (one,), *common) for one in used}
    for one in used:
        layer = built(type(config), shape, (one, one), *common) - once[one]
        found += kinds[one] * layer
    ends = 2 * once[used[0]] - built(type(config), shape, (used[0], used[0]), *common)
    return found + ends


SHAPE = (
    "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels",
    "num_query_groups", "normalization", "layernorm_epsilon", "gated_linear_unit",
    "activation_func", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "bias_activation_fusion",
    "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_gate",
    "moe_shared_expert_intermediate_size", "softmax_type",
)  # fmt: skip
LATENT = (
    "rope_type",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
)


def stages(config: TransformerConfig) -> list[int]:
    """Layers of every stage in the order of the model, those that predict further tokens among
    them, by Megatron's own function."""
    layout = config.pipeline_model_parallel_layout
    if isinstance(layout, PipelineParallelLayerLayout):
        return [
            sum(
                layout.get_num_layers_to_build(kind, vp_stage=place, pp_rank=rank)
                for kind in (LayerType.decoder, LayerType.mtp)
            )
            for place, rank in chunks(config)
        ]
    return [
        get_num_layers_to_build(config, vp_stage=place, pp_rank=rank)
        for place, rank in chunks(config)
    ]


def chunks(config: TransformerConfig) -> list[tuple[int | None, int]]:
    """(virtual stage, rank) of every stage in the order of the model."""
    pp, virtual = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual)
    places = range(virtual) if virtual else (None,)
    return [(place, rank) for place in places for rank in range(pp)]


def routed_layers(config: TransformerConfig) -> list[int]:
    """Places of layers with experts, stage after stage, by Megatron's own function."""
    if config.num_moe_experts is None:
        return []
    kinds: list[bool] = []
    for place, rank in chunks(config):
        stage = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, vp_stage=place, pp_rank=rank
        )
        kinds += [builder(layer.submodules.mlp) is MoELayer for layer in stage.layer_specs]
    return [place for place, is_routed in enumerate(kinds) if is_routed]


def builder(spec: Any) -> object:
    """Return the class that builds a part of a layer: of a ModuleSpec, since 0.19 of a partial."""
    return spec.func if isinstance(spec, partial) else spec.module


def experts(config: TransformerConfig, world: int) -> dict[str, object]:
    """What becomes of the expert fields. Softmax after the choice, and sigmoids of several, are
    normalised (its topk_routing_with_score_function)."""
    if config.num_moe_experts is None:
        return {}
    ep, etp = config.expert_model_parallel_size, config.expert_tensor_parallel_size
    pp = config.pipeline_model_parallel_size
    ranks = parallel_state.RankGenerator(
        tp=etp, ep=ep, dp=world // (etp * ep * pp), pp=pp, cp=1, order="tp-cp-ep-dp-pp"
    )
    kind = config.moe_token_dispatcher_type
    softmax = config.moe_router_score_function == "softmax"
    after = softmax and not config.moe_router_pre_softmax
    return {
        "experts": config.num_moe_experts,
        "top_k": config.moe_router_topk,
        "expert_ffn": config.moe_ffn_hidden_size,
        "shared_ffn": config.moe_shared_expert_intermediate_size or 0,
        "routed": routed_layers(config),
        "ep": ep,
        "etp": etp,
        "group": next(iter(ranks.get_ranks("ep"))),
        "dispatcher": config.moe_flex_dispatcher_backend if kind == "flex" else kind,
        "forced": config.moe_router_force_load_balancing,
        "router": [
            config.moe_router_score_function,
            after or (not softmax and config.moe_router_topk > 1),
            config.moe_router_topk_scaling_factor or 1.0,
            config.moe_router_num_groups or 1,
            config.moe_router_group_topk or 1,
        ],
        "modules": config.recompute_modules if config.recompute_granularity == "selective" else [],
        "mtp": config.mtp_num_layers or 0,
        "capacity": config.moe_expert_capacity_factor or 0.0,
        "hides_exchange": config.overlap_moe_expert_parallel_comm,
    }


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
    return {
        **experts(config, case["world"]),
        "layers": stages(config),
        "params": parameters(
            config,
            int(str(found["padded_vocab_size"])),
            int(str(found["max_position_embeddings"])),
            str(found["position_embedding_type"]),
            "untie_embeddings_and_output_weights" not in found,
        ),
        "tokens": micros * micro * dp * int(str(found["seq_length"])),
        "fp32_gradients": ddp.grad_reduce_in_fp32,
        "overlap_tp": config.tp_comm_overlap,
    }


if __name__ == "__main__":
    tell(answer, ["Transformer Engine"])
