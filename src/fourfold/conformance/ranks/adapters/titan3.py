"""torchtitan from 0.3: its qwen3, dense or with experts, sharding configurations, loss, clipping
and optimizer container."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.conformance.cell import Cell
from fourfold.conformance.ranks.adapter import Adapter, Look
from fourfold.conformance.ranks.elements import local
from fourfold.conformance.ranks.reference import BETAS, CLIP, DECAY, EPS, LR
from fourfold.conformance.ranks.shims import cpu_histogram, expert_products, titan_on_cpu

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # flex attention is compiled while the module loads
if not torch.cuda.is_available():
    titan_on_cpu()
INNER = "moe.routed_experts.inner_experts."
NAMES = {
    "tok_embeddings.weight": "embed", "norm.weight": "norm", "lm_head.weight": "head",
    "attention_norm.weight": "norm1", "ffn_norm.weight": "norm2",
    "attention.qkv_linear.wq.weight": "q", "attention.qkv_linear.wk.weight": "k",
    "attention.qkv_linear.wv.weight": "v", "attention.wo.weight": "o",
    "attention.q_norm.weight": "qnorm", "attention.k_norm.weight": "knorm",
    "feed_forward.w1.weight": "gate", "feed_forward.w2.weight": "down",
    "feed_forward.w3.weight": "up", "moe.router.gate.weight": "router",
    f"{INNER}w1_EFD": "egate", f"{INNER}w2_EDF": "edown", f"{INNER}w3_EFD": "eup",
}  # fmt: skip


def canonical(name: str) -> str:
    name = name.replace("_checkpoint_wrapped_module.", "")
    if not name.startswith("layers."):
        return NAMES[name]
    _, layer, rest = name.split(".", 2)
    return f"{layer}.{NAMES[rest]}"


class Titan3(Adapter):
    modules = ("torchtitan.components.loss", "torchtitan.distributed",
               "torchtitan.models.qwen3.config_registry")  # fmt: skip

    @staticmethod
    def legal(cell: Cell) -> str:
        kinds = sorted(cell.options & {"zero1", "zero2", "zero3"})
        if kinds:
            return f"{kinds[0]}: it shards all states, as fsdp"
        if cell.shards * cell.cp * cell.tp % cell.ep:
            return "ep divides shards x cp x tp: write fsdp"
        if cell.shards > 1 and not cell.has("fsdp"):
            return "shards of dp are fsdp"
        other = sorted(cell.options & {"tied", "sinks", "overlap", "allgather", "per-micro"})
        if other:
            return f"{other[0]} is no option of its qwen3"
        if cell.etp not in (0, 1):
            return "it has no etp"
        if cell.has("experts") and cell.tp > 1 and not cell.has("sp") and cell.ep > 1:
            return "ep with tp needs sequence parallelism"
        if cell.has("recompute"):
            return "its activation checkpointing is a compiler pass"
        return ""

    @staticmethod
    def blocked(cell: Cell) -> str:
        if cell.cp > 1:
            return "cp needs flex attention, which has no backward on CPU"
        return ""

    @staticmethod
    def shape(cell: Cell) -> dict:
        return {"qk_norm": True, "eps": 1e-6, "theta": 1e6, "renorm": True}

    def _settings(self) -> Any:
        from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

        cell, config = self.cell, qwen3_moe_debug()
        config.training.seq_len = self.tiny.seq
        config.training.local_batch_size = self.case.rows
        config.training.mixed_precision_param = "float32"
        config.training.mixed_precision_reduce = "float32"
        config.compile.enable, config.activation_checkpoint = False, None
        p = config.parallelism
        p.tensor_parallel_degree, p.context_parallel_degree = cell.tp, cell.cp
        p.pipeline_parallel_degree, p.expert_parallel_degree = cell.pp, cell.ep
        p.data_parallel_shard_degree, p.data_parallel_replicate_degree = cell.shards, cell.replicas
        p.enable_sequence_parallel, p.spmd_backend = cell.has("sp"), "partial_dtensor"
        return config

    def _model(self) -> Any:
        from torchtitan.models import qwen3

        t = self.tiny
        kw = {
            "n_layers": t.layers, "dim": t.hidden, "n_heads": t.heads, "n_kv_heads": t.kv_heads,
            "head_dim": t.head_dim, "fuse_qkv": False, "attn_backend": "flex",
            "rope": qwen3.CosSinRoPE.Config(dim=t.head_dim, max_seq_len=t.seq, theta=t.theta),
        }  # fmt: skip
        if t.experts:
            layers = qwen3._build_qwen3_moe_layers(
                moe_hidden_dim=t.ffn, num_experts=t.experts, top_k=t.top_k,
                moe_comm_backend="standard", **kw,
            )  # fmt: skip
        else:
            layers = qwen3._build_qwen3_layers(hidden_dim=t.ffn, **kw)
        embedding = qwen3.Embedding.Config(
            num_embeddings=t.vocab, embedding_dim=t.hidden, param_init=qwen3._EMBEDDING_INIT
        )
        head = qwen3.Linear.Config(
            in_features=t.hidden, out_features=t.vocab, param_init=qwen3._LINEAR_INIT
        )
        return qwen3.Qwen3Model.Config(
            vocab_size=t.vocab, dim=t.hidden, norm=qwen3._qwen3_norm(t.hidden), layers=layers,
            tok_embeddings=embedding, lm_head=head,
        )  # fmt: skip

    def build(self) -> None:
        from torchtitan.components.loss import CrossEntropyLoss
        from torchtitan.distributed import ParallelDims, utils

        self._shims()
        self.config, self.utils = self._settings(), utils
        p = self.config.parallelism
        self.dims = ParallelDims.from_config(p, self.cell.world)
        self.dims.build_mesh()
        utils.set_spmd_backend(p.spmd_backend)
        described = self._model()
        self.config.model_spec.model = described
        described.update_from_config(config=self.config)
        model = described.build()
        if hasattr(model, "init_states"):
            model.init_states()
        with torch.no_grad():
            for name, one in model.named_parameters():
                one.copy_(self.elements.start[canonical(name)].to(one))
        self.loss = CrossEntropyLoss.Config(global_vocab_size=self.tiny.vocab).build(
            compile_config=self.config.compile
        )
        self._parallelize(model)
        self.take(one for part in self.parts for one in part.parameters())
        self.optimizer = self._optimizer()

    def _parallelize(self, model: Any) -> None:
        spec, config = self.config.model_spec, self.config
        kw = {
            "parallel_dims": self.dims, "training": config.training,
            "parallelism": config.parallelism, "compile_config": config.compile,
            "ac_config": None, "dump_folder": "",
        }  # fmt: skip
        if self.cell.pp > 1:
            config.parallelism.pipeline_parallel_microbatch_size = self.case.micro_rows
            config.parallelism.pipeline_parallel_schedule = (
                "Interleaved1F1B" if self.cell.virtual > 1 else "1F1B"
            )
            self.schedule, self.parts, self.first, self.last = spec.pipelining_fn(
                model, device=self.case.device, model_config=spec.model,
                parallelize_fn=spec.parallelize_fn, loss_fn=self.loss, **kw,
            )  # fmt: skip
        else:
            self.parts = [spec.parallelize_fn(model, **kw)]
        for module in (m for part in self.parts for m in part.modules()):
            if hasattr(module, "set_force_sum_reduction_for_comms"):  # gloo has no averaging sum
                module.set_force_sum_reduction_for_comms(True)

    def _optimizer(self) -> Any:
        from torchtitan.components.optimizer.optimizer import OptimizersContainer, ParamGroupConfig

        kw = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
        group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=kw)
        config = OptimizersContainer.Config(param_groups=[group], implementation="foreach")
        return config.build(model_parts=self.parts)

    def _shims(self) -> None:
        import torchtitan.models.common.attention as attention
        import torchtitan.models.common.moe as moe

        if self.case.device.type != "cpu":
            return

        def heads(self: Any, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, **_: Any) -> Tensor:
            q, k, v = (z.transpose(1, 2) for z in (q_BLNH, k_BLNH, v_BLNH))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2)

        attention.FlexAttention.forward = heads
        self.standins.add("flex")
        if not self.tiny.experts:
            return

        def products(self: Any, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
            counts = torch.diff(offs, prepend=offs.new_zeros(1)).tolist()
            return expert_products(A, B_t, counts)

        tensor: Any = torch.Tensor
        tensor.bfloat16 = lambda self: self  # experts cast to bf16 for the grouped kernel
        moe.GroupedExperts._grouped_mm = products
        self.standins.add("experts")
        cpu_histogram()

    def _backward(self, batches: list[tuple[Tensor, Tensor]], total: Tensor) -> Tensor:
        places = [{"positions": torch.arange(x.shape[1]).to(x).expand_as(x)} for x, _ in batches]
        if self.cell.pp == 1:
            losses = []
            for (x, y), kw in zip(batches, places, strict=True):
                loss, *_ = self.loss(self.parts[0](x, **kw), y, total)
                loss.backward()
                losses.append(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)
            return torch.stack(losses).sum()
        seen: list[Tensor] | None = [] if self.last else None
        self.schedule.step(
            arg_mbs=[(x,) for x, _ in batches] if self.first else None, kwarg_mbs=places,
            target_mbs=[y for _, y in batches] if self.last else None, losses=seen,
            loss_kwargs={"global_valid_tokens": total}, return_outputs=False,
        )  # fmt: skip
        return torch.stack(seen).sum() if seen else torch.zeros(())

    def step(self, step: int, look: Look) -> tuple[float, float]:
        mesh, cell = self.dims.get_optional_mesh("batch"), self.cell
        batches = self.case.ignored(step, mesh.get_local_rank() if mesh is not None else 0)
        context = self.utils.get_spmd_context(parallel_dims=self.dims, spmd_typechecking=False)
        self.optimizer.zero_grad()
        total = torch.tensor(self.case.targets(step), device=self.case.device)
        with context():
            loss = self._backward(batches, total)
        look()
        norm = self.utils.clip_grad_norm_(
            [one for part in self.parts for one in part.parameters()], CLIP, foreach=True,
            pp_mesh=self.dims.get_optional_mesh("pp"), ep_enabled=self.dims.ep_enabled,
        )  # fmt: skip
        self.optimizer.step()
        return self.sum_over_ranks(loss) / cell.tp, float(local(norm))


ENGINE = Titan3
