"""One rank of a Megatron-LM job, counted on fake tensors: its own parser reads the arguments, its
GPTModel, DistributedDataParallel, schedule and optimizer take two steps. Transformer Engine is not
there: its attention and its norms are stand-ins that keep what its own keep, its products are
Megatron's local ones."""

from __future__ import annotations

import contextlib
import os
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # which it requires of scripts

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.backends.megatron.shims import megatron_seeds, norm_for_sequences
from fourfold.conformance.ranks.shims import Nothing, cuda_means_cpu
from fourfold.engine import compat
from fourfold.engine.one_rank.counted import CountedRank
from fourfold.result.one_rank import RankMemoryCount, RankMemoryRequest

_STEPS = 2  # the optimizer's state exists from the second one on
# What a job needs and an export leaves to the user.
_OWN = ("--train-iters", "10", "--lr", "1e-4", "--mock-data", "--tokenizer-type", "NullTokenizer")
# Kernels of Transformer Engine or apex that a rank would have; their stand-ins are local ones.
_LOCAL = {
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False,
    "bias_swiglu_fusion": True,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "use_cpu_initialization": True,
    "perform_initialization": False,
    "tp_comm_overlap": False,
}
# Arguments that change what a rank holds, with the values that are counted.
_COUNTED = {
    "attention_backend": ("auto", "flash", "fused"),
    "softmax_type": ("vanilla",),
    "window_size": ("None",),
    "mtp_num_layers": ("None",),
    "fp8": ("None",),
    "cuda_graph_impl": ("none",),
    "multi_latent_attention": ("False",),
}


class FusedAttention(nn.Module):
    """Stand-in for TEDotProductAttention: queries, keys, values, output and one number a row are
    kept for the backward pass."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def count_rank(request: RankMemoryRequest, *, is_fake: bool = True) -> RankMemoryCount:
    """`is_fake`: False takes the same steps on real tensors, which must fit into host memory."""
    if not hasattr(typing, "override"):  # Python 3.12's, which it imports
        typing.override = lambda method: method  # pyrefly: ignore
    cuda_means_cpu()
    hopper = SimpleNamespace(major=9, minor=0)  # what it asks of a GPU
    torch.cuda.get_device_properties = lambda *_: hopper  # pyrefly: ignore
    import megatron.core

    arguments = _parsed(request)
    package = Path(megatron.core.__path__[0])
    with CountedRank(request.rank, request.world, package, is_fake=is_fake) as rank:
        for patch in _alone(rank):
            rank.enter_context(patch)
        return _Job(arguments, rank).counted(request.limit_bytes)


def _parsed(request: RankMemoryRequest) -> Any:
    """Return Megatron's namespace of the arguments."""
    from megatron.core import utils
    from megatron.training import arguments
    from packaging.version import Version

    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and hasattr(module, "is_te_min_version"):
            patched: Any = module
            patched.is_te_min_version = lambda *_, **__: True  # it asks before it builds anything
    utils.get_te_version = lambda: Version("99.0")
    sys.argv = ["pretrain_gpt.py", *request.arguments, *_OWN]
    parsed = arguments.parse_args()
    arguments.validate_args(parsed, {"tokenizer_type": "GPT2BPETokenizer"})
    for name, counted in _COUNTED.items():
        value = getattr(parsed, name, None)
        if str(getattr(value, "name", value)) not in counted:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} {value} is not counted yet; use {' or '.join(counted)}")
    for name, value in _LOCAL.items():
        setattr(parsed, name, value)
    return parsed


def _alone(rank: CountedRank) -> list[contextlib.AbstractContextManager[Any]]:
    """What other ranks, another backend or a GPU would answer."""
    from megatron.core import rerun_state_machine
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.tensor_parallel import random

    new_group = dist.new_group

    def same(answers: list[Any], own: Any, group: Any = None) -> None:
        answers[:] = [own] * len(answers)

    def fake_group(*args: Any, **kwargs: Any) -> Any:
        kept = {name: v for name, v in kwargs.items() if name not in ("backend", "pg_options")}
        return new_group(*args, **kept)

    # Kernels of Transformer Engine norm and scale lists of tensors in place; what stands in for
    # them makes temporaries and asks for numbers.
    def norm(*_: Any) -> tuple[Tensor, None]:
        with rank.ledger.paused():
            return torch.ones(1), None

    # Operators that are sent as one have no fake form; one after another they have.
    managers = [
        compat.patched(module, "_coalescing_manager", lambda *_, **__: Nothing())
        for name, module in list(sys.modules.items())
        if name.startswith("megatron.") and hasattr(module, "_coalescing_manager")
    ]
    return [
        compat.patched(dist, "all_gather_object", same),
        compat.patched(dist, "new_group", fake_group),
        compat.patched(clip_grads, "l2_norm_impl", norm),
        compat.patched(clip_grads, "multi_tensor_scale_impl", lambda *_: None),
        compat.patched(optimizer, "multi_tensor_scale_impl", lambda *_: None),
        # Whether a gradient is NaN, nobody knows.
        compat.patched(
            rerun_state_machine.RerunStateMachine, "validate_result", lambda *_, **__: None
        ),
        # Generators of dropout, which is 0.
        compat.patched(random.CudaRNGStatesTracker, "fork", lambda *_, **__: Nothing()),
        *managers,
    ]


class _Job:
    """A model with its optimizer, as `pretrain` would make them of the arguments."""

    def __init__(self, arguments: Any, rank: CountedRank) -> None:
        from megatron.core import num_microbatches_calculator, parallel_state

        self.arguments, self.rank, self.state = arguments, rank, parallel_state
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=arguments.tensor_model_parallel_size,
            pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=arguments.virtual_pipeline_model_parallel_size,
            order="tp-cp-ep-dp-pp",
        )
        num_microbatches_calculator.init_num_microbatches_calculator(
            rank.rank,
            arguments.rampup_batch_size,
            arguments.global_batch_size,
            arguments.micro_batch_size,
            arguments.data_parallel_size,
        )
        megatron_seeds()
        norm_for_sequences()  # in the dtype of other weights, as Transformer Engine's

    def counted(self, limit_bytes: int | None) -> RankMemoryCount:
        rank = self.rank
        rank.begin_storage()
        self._build()
        rank.own_model([chunk.module for chunk in self.model])
        self._own_state()
        params = sum(p.numel() for chunk in self.model for p in chunk.parameters())
        for patch in self._marked():
            rank.enter_context(patch)
        for _ in range(_STEPS):
            rank.ledger.begin()
            self._step()
        rank.ledger.mark("end")
        return rank.ledger.count(
            rank=rank.rank,
            stage=self.state.get_pipeline_model_parallel_rank(),
            params=params,
            limit_bytes=limit_bytes,
        )

    def _build(self) -> None:
        from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
        from megatron.core.models.gpt import gpt_layer_specs
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module
        from megatron.training.arguments import core_transformer_config_from_args
        from megatron.training.training import (
            get_megatron_ddp_config,
            get_megatron_optimizer_config,
        )

        arguments = self.arguments
        self.config = config = core_transformer_config_from_args(arguments)
        for name, value in _LOCAL.items():
            if hasattr(config, name):
                setattr(config, name, value)
        spec = gpt_layer_specs.get_gpt_layer_local_spec(
            normalization=arguments.normalization, qk_layernorm=arguments.qk_layernorm
        )
        spec.submodules.self_attention.submodules.core_attention = FusedAttention
        chunks = [
            self._chunk(spec, number)
            for number in range(arguments.virtual_pipeline_model_parallel_size or 1)
        ]
        if config.bf16:
            # They are in bf16; fake weights cannot be swapped.
            with compat.patched(nn.Module, "bfloat16", lambda module: module):
                chunks = [Float16Module(config, chunk) for chunk in chunks]
        data_parallel = get_megatron_ddp_config(arguments)
        self.model = [
            DistributedDataParallel(config, data_parallel, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]
        settings, overrides = get_megatron_optimizer_config(arguments)
        self.optimizer = get_megatron_optimizer(settings, self.model, config_overrides=overrides)
        config.finalize_model_grads_func = finalize_model_grads
        config.no_sync_func = None

    def _chunk(self, spec: Any, number: int) -> nn.Module:
        from megatron.core.models.gpt import GPTModel

        arguments, state = self.arguments, self.state
        is_virtual = arguments.virtual_pipeline_model_parallel_size is not None
        stage = {"vp_stage": number} if is_virtual else {}
        place = {"ignore_virtual": False, **stage} if is_virtual else {}
        return GPTModel(
            config=self.config,
            transformer_layer_spec=spec,
            vocab_size=arguments.padded_vocab_size,
            max_sequence_length=arguments.max_position_embeddings,
            parallel_output=True,
            fp16_lm_cross_entropy=arguments.fp16_lm_cross_entropy,
            share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
            position_embedding_type=arguments.position_embedding_type,
            rotary_percent=arguments.rotary_percent,
            rotary_base=arguments.rotary_base,
            pre_process=state.is_pipeline_first_stage(**place),
            post_process=state.is_pipeline_last_stage(**place),
            **stage,
        )

    def _own_state(self) -> None:
        ledger = self.rank.ledger
        for chunk in self.model:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                ledger.own("gradients", buffer.grad_data)
                if buffer.param_data is not None:
                    ledger.own("parameters", buffer.param_data)
        chained = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        for inner in (each.optimizer for each in chained):
            for group in inner.param_groups:
                for parameter in group["params"]:
                    ledger.own("optimizer", parameter)  # fp32 copies of a share of the weights
            self.rank.own_optimizer([inner])

    def _marked(self) -> list[contextlib.AbstractContextManager[Any]]:
        """Marks of the passes of each micro batch."""
        from megatron.core.pipeline_parallel import schedules

        def marked(name: str, phase: str) -> contextlib.AbstractContextManager[Any]:
            original = getattr(schedules, name)

            def step(*args: Any, **kwargs: Any) -> Any:
                self.rank.ledger.mark(phase)
                return original(*args, **kwargs)

            return compat.patched(schedules, name, step)

        return [marked("forward_step", "forward"), marked("backward_step", "backward")]

    def _forward(self, _: Any, model: nn.Module) -> tuple[Tensor, Any]:
        arguments = self.arguments
        shape = (arguments.micro_batch_size, arguments.seq_length)
        with self.rank.ledger.paused():
            tokens, labels = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
            places = torch.arange(shape[1])[None].expand(shape)

        def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            total = output.float().sum()
            count = torch.ones((), dtype=torch.int)
            return total, count, {}

        return model(tokens, places, None, labels=labels), loss

    def _step(self) -> None:
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.core.pipeline_parallel import get_forward_backward_func

        arguments = self.arguments
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=self._forward,
            model=self.model,
            num_microbatches=get_num_microbatches(),
            data_iterator=[None] * len(self.model) if len(self.model) > 1 else None,
            seq_length=arguments.seq_length,
            micro_batch_size=arguments.micro_batch_size,
            forward_only=False,
        )
        self.rank.ledger.mark("optimizer")
        self.optimizer.step()
        self._own_state()
