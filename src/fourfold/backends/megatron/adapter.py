"""megatron-core: its GPTModel, DistributedDataParallel, schedules, gradient end and optimizer."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.backends.megatron.shims import (
    ContextAttention,
    megatron_seeds,
    norm_for_sequences,
)
from fourfold.conformance.cell import Cell
from fourfold.conformance.ranks.adapter import Adapter, Look, known_fields
from fourfold.conformance.ranks.reference import BETAS, CLIP, DECAY, EPS, LR, Part
from fourfold.conformance.ranks.shims import cuda_means_cpu

if not torch.cuda.is_available():
    cuda_means_cpu()


def shard_numbers(engine: Any, model: Any, name: str) -> Tensor:
    """Where Megatron keeps each weight: the numbers of a local parameter's elements."""
    state, full, t = engine.state, engine.elements.start, engine.tiny
    rank, tp = state.get_tensor_model_parallel_rank(), engine.cell.tp
    etp = engine.cell.etp or tp
    asked = getattr(state, "get_expert_tensor_parallel_rank", None)
    expert_rank = asked() if asked else rank % etp

    def rows(x: Tensor) -> Tensor:
        return x.chunk(tp)[rank]

    top = {
        "embedding.word_embeddings.weight": "embed",
        "decoder.final_layernorm.weight": "norm",
    }
    top["output_layer.weight"] = "embed" if t.tied else "head"
    if name in top:
        return full["norm"] if top[name] == "norm" else rows(full[top[name]])
    part = name.split(".")
    layer, rest = model.decoder.layers[int(part[2])].layer_number - 1, ".".join(part[3:])
    w = {key.split(".")[1]: value for key, value in full.items() if key.startswith(f"{layer}.")}
    if rest.endswith("linear_qkv.weight"):
        q, k, v = (w[one].view(t.kv_heads, -1, t.hidden) for one in "qkv")
        return rows(torch.cat([q, k, v], 1)).flatten(0, 1)
    if ".local_experts." in rest:
        expert = state.get_expert_model_parallel_rank() * (t.experts // engine.cell.ep)
        expert += int(part[part.index("local_experts") + 1])
        cuts = [w[one][expert].chunk(etp)[expert_rank] for one in ("egate", "eup")]
        if rest.endswith("linear_fc1.weight"):
            return torch.cat(cuts)
        return w["edown"][expert].chunk(etp, 1)[expert_rank]
    if rest == "mlp.linear_fc1.weight":
        return torch.cat([rows(w["gate"]), rows(w["up"])])
    if rest == "self_attention.core_attention.softmax_offset":
        return rows(w["sink"])
    columns = {"self_attention.linear_proj.weight": "o", "mlp.linear_fc2.weight": "down"}
    if rest in columns:
        return w[columns[rest]].chunk(tp, 1)[rank]
    whole = {"input_layernorm.weight": "norm1", "pre_mlp_layernorm.weight": "norm2"}
    return w[{**whole, "mlp.router.weight": "router"}[rest]]


class MegatronCore(Adapter):
    modules = (
        "megatron.core.distributed",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.models.gpt",
        "megatron.core.optimizer",
        "megatron.core.pipeline_parallel",
    )

    @staticmethod
    def legal(cell: Cell) -> str:
        if cell.shards > 1 and cell.replicas > 1:
            return "HSDP is not asked for here"
        other = sorted(cell.options & {"zero2", "zero3", "fsdp"})
        if other:
            return f"{other[0]}: DistributedDataParallel shards optimizer states only"
        if cell.has("experts") and cell.tp > 1 and not cell.has("sp"):
            return "experts with tp need sequence parallelism"
        if cell.has("sinks") and cell.cp > 1:
            return "learned softmax offsets are not given to the stand-in for attention"
        return ""

    def build(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import gpt_layer_specs
        from megatron.core.transformer import TransformerConfig

        self.state = parallel_state
        cell, t = self.cell, self.tiny
        kw = {
            "tensor_model_parallel_size": cell.tp,
            "pipeline_model_parallel_size": cell.pp,
            "virtual_pipeline_model_parallel_size": 2 if cell.virtual > 1 else None,
            "context_parallel_size": cell.cp,
            "expert_model_parallel_size": cell.ep,
            "expert_tensor_parallel_size": cell.etp or None,
        }
        parallel_state.initialize_model_parallel(**kw)
        megatron_seeds()
        if not cell.etp:
            del kw["expert_tensor_parallel_size"]
        self.config = TransformerConfig(**known_fields(TransformerConfig, kw | self._settings()))
        wanted = {"num_experts": t.experts or None, "moe_grouped_gemm": False}
        wanted |= {"normalization": "RMSNorm", "qk_layernorm": False}
        layers = gpt_layer_specs.get_gpt_layer_local_spec
        spec = layers(**known_fields(layers, wanted))
        self._stand_in(spec)
        chunks = [self._chunk(spec, number) for number in range(cell.virtual)]
        self.chunks = [chunk.to(self.case.device) for chunk in chunks]
        for chunk in self.chunks:
            for name, p in chunk.named_parameters():
                numbers = shard_numbers(self, chunk, name)
                self.elements.fill(p, numbers)
                self.pieces.append((numbers, p))
        self._wrap()

    def _stand_in(self, spec: Any) -> None:
        cell = self.cell
        if cell.has("sp"):
            norm_for_sequences()
            self.standins.add("norm")
        if cell.cp > 1:
            spec.submodules.self_attention.submodules.core_attention = ContextAttention
            self.standins.add("attention")
        if self.tiny.experts:
            import megatron.core.transformer.moe.moe_utils as moe

            # 0.16 asks for the name without Transformer Engine.
            moe.te_general_gemm = getattr(moe, "te_general_gemm", None)

    def _settings(self) -> dict:
        t, cell = self.tiny, self.cell
        kw = {
            "num_layers": t.layers,
            "hidden_size": t.hidden,
            "num_attention_heads": t.heads,
            "num_query_groups": t.kv_heads,
            "kv_channels": t.head_dim,
            "ffn_hidden_size": t.ffn,
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "layernorm_epsilon": t.eps,
            "params_dtype": torch.float32,
            "pipeline_dtype": torch.float32,
            "sequence_parallel": cell.has("sp"),
            "use_cpu_initialization": True,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "gradient_accumulation_fusion": False,
            "persist_layer_norm": False,
            "calculate_per_token_loss": not cell.has("per-micro"),
            "deallocate_pipeline_outputs": True,
            "batch_p2p_comm": False,
        }
        if cell.has("recompute"):
            kw |= {"recompute_granularity": "full", "recompute_method": "uniform"}
            kw["recompute_num_layers"] = 1
        if t.experts:
            kw |= {
                "num_moe_experts": t.experts,
                "moe_router_topk": t.top_k,
                "moe_ffn_hidden_size": t.ffn,
                "moe_aux_loss_coeff": 0.0,
                "moe_router_load_balancing_type": "none",
                "moe_router_pre_softmax": True,
                "moe_token_dispatcher_type": "allgather" if cell.has("allgather") else "alltoall",
            }
        return kw | ({"softmax_type": "learnable"} if t.sinks else {})

    def _chunk(self, spec: Any, number: int) -> nn.Module:
        from megatron.core.models.gpt import GPTModel

        t, state = self.tiny, self.state
        stage, asked = {}, {}
        if self.cell.virtual > 1 and "vp_stage" in inspect.signature(GPTModel).parameters:
            stage, asked = {"vp_stage": number}, {"ignore_virtual": False, "vp_stage": number}
        elif self.cell.virtual > 1:
            state.set_virtual_pipeline_model_parallel_rank(number)
        return GPTModel(
            config=self.config,
            transformer_layer_spec=spec,
            vocab_size=t.vocab,
            max_sequence_length=t.seq,
            position_embedding_type="rope",
            rotary_base=int(t.theta),
            share_embeddings_and_output_weights=t.tied,
            parallel_output=True,
            pre_process=state.is_pipeline_first_stage(**asked),
            post_process=state.is_pipeline_last_stage(**asked),
            **stage,
        )

    def _wrap(self) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        sharded = self.cell.has("zero1")
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=sharded,
            overlap_grad_reduce=self.cell.has("overlap"),
            grad_reduce_in_fp32=False,
            check_for_nan_in_grad=False,
        )
        self.model = [
            DistributedDataParallel(self.config, ddp, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(self.chunks)
        ]
        kw = {
            "optimizer": "adam",
            "lr": LR,
            "min_lr": LR,
            "weight_decay": DECAY,
            "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1],
            "adam_eps": EPS,
            "clip_grad": CLIP,
            "bf16": False,
            "fp16": False,
            "params_dtype": torch.float32,
            "use_distributed_optimizer": sharded,
        }
        self.optimizer = get_megatron_optimizer(OptimizerConfig(**kw), self.model)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.no_sync_func = None

    def gradients(self) -> list[Part]:
        """The distributed optimizer leaves a rank the sum of its shard of every bucket only."""
        shards: dict[Tensor, tuple[Tensor, int, int]] = {}
        for model in self.model if self.cell.has("zero1") else ():
            for buffer in model.buffers + model.expert_parallel_buffers:
                for bucket in buffer.buckets:
                    group = getattr(bucket, "intra_distributed_optimizer_instance_group", None)
                    group = group or buffer.data_parallel_group
                    size = bucket.grad_data.numel() // group.size()
                    low = bucket.grad_data.storage_offset() + group.rank() * size
                    shards |= dict.fromkeys(bucket.params, (bucket.grad_data, low, low + size))
        parts = []
        for numbers, p in self.pieces:
            grad = getattr(p, "main_grad")  # noqa: B009  (Megatron's own name beside .grad)
            if p in shards:
                _, low, high = shards[p]
                at = grad.storage_offset() + torch.arange(p.numel()).view(p.shape)
                numbers = torch.where((at >= low) & (at < high), numbers, -1)
            parts.append((numbers, grad.detach().clone()))
        return parts

    def _forward(self, batches: Any, model: nn.Module) -> tuple[Tensor, Any]:
        t, cell = self.tiny, self.cell
        x, y, counts = next(batches)
        places = torch.arange(t.seq, device=x.device)[None].expand_as(x)
        if cell.cp > 1:
            from megatron.core.utils import get_batch_on_this_cp_rank as cut

            whole = {"x": x, "y": y, "counts": counts, "places": places}
            kept = cut(whole, **known_fields(cut, {"is_hybrid_cp": False}))
            x, y, counts, places = (kept[name] for name in whole)

        def loss(out: Tensor) -> tuple:
            total, n = (out * counts).sum(), counts.sum().int()
            seen = torch.stack([total.detach(), n])
            if cell.has("cp-tokens", "per-micro"):
                torch.distributed.all_reduce(n, group=self.state.get_context_parallel_group())
            if cell.has("per-micro"):  # the schedule takes the mean over micro batches
                part = torch.full_like(seen[1], 1 / cell.cp)
                return total / n, torch.stack([seen[0] / n, part])
            return total, n, seen

        hidden = torch.ones(t.seq, t.seq, device=x.device).triu(1).bool()[None, None]
        return model(x, places, hidden, labels=y), loss

    def step(self, step: int, look: Look) -> tuple[float, float]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        case, t = self.case, self.tiny
        batches = [
            (x, y, m.float()) for x, y, m in case.micro(step, self.state.get_data_parallel_rank())
        ]
        for model in self.model:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        readers = [iter(batches) for _ in self.chunks]
        out = get_forward_backward_func()(
            forward_step_func=self._forward,
            model=self.model,
            num_microbatches=case.micros,
            data_iterator=readers if len(readers) > 1 else readers[0],
            seq_length=t.seq,
            micro_batch_size=case.micro_rows,
            forward_only=False,
        )
        seen = torch.stack(out).sum(0) if out else torch.zeros(2)
        first = self.state.get_tensor_model_parallel_rank() == 0
        total, count = (self.sum_over_ranks(value, first) for value in seen)
        look()
        _, norm, _ = self.optimizer.step()
        return total / count, float(norm)


ENGINE = MegatronCore
