"""torchtitan from 0.3: its qwen3, dense or with experts, sharding configurations, loss, clipping
and optimizer container, and its Trainer's step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fourfold.backends.torchtitan.adapter import Titan
from fourfold.backends.torchtitan.shims import (
    dense_flex_attention,
    micro_batch_lists,
    ungrouped_experts,
)
from fourfold.conformance.cell import Cell
from fourfold.conformance.ranks.reference import ADAMW
from fourfold.conformance.ranks.shims import cpu_histogram


class Titan3(Titan):
    has_no = ("tied",)
    modules = (
        "torchtitan.components.loss",
        "torchtitan.distributed",
        "torchtitan.models.qwen3.config_registry",
        "torchtitan.trainer",
    )

    @classmethod
    def legal(cls, cell: Cell) -> str:
        if cell.etp not in (0, 1):
            return "it has no etp"
        if cell.has("experts") and cell.tp > 1 and not cell.has("sp") and cell.ep > 1:
            return "ep with tp needs sequence parallelism"
        return super().legal(cell)

    @staticmethod
    def shape(cell: Cell) -> dict:
        fixed = {"qk_norm": True, "eps": 1e-6, "theta": 1e6, "renorm": True}
        blocks = {"seq": 256 * cell.cp} if cell.cp > 1 else {}  # masks are cut by blocks of 128
        return fixed | blocks

    def _settings(self) -> Any:
        from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

        cell, config = self.cell, qwen3_moe_debug()
        self.settle(config)
        config.training.disable_cuda_graphs, config.activation_checkpoint = True, None
        if cell.has("recompute"):
            from torchtitan.distributed.activation_checkpoint import FullAC

            config.activation_checkpoint = FullAC.Config()
        p = config.parallelism
        p.enable_sequence_parallel, p.spmd_backend = cell.has("sp"), "partial_dtensor"
        return config

    def _model(self) -> Any:
        from torchtitan.models import qwen3

        t = self.tiny
        kw = {
            "n_layers": t.layers,
            "dim": t.hidden,
            "n_heads": t.heads,
            "n_kv_heads": t.kv_heads,
            "head_dim": t.head_dim,
            "fuse_qkv": False,
            "attn_backend": "flex",
            "rope": qwen3.CosSinRoPE.Config(dim=t.head_dim, max_seq_len=t.seq, theta=t.theta),
        }
        if t.experts:
            layers = qwen3._build_qwen3_moe_layers(
                moe_hidden_dim=t.ffn,
                num_experts=t.experts,
                top_k=t.top_k,
                moe_comm_backend="standard",
                **kw,
            )
        else:
            layers = qwen3._build_qwen3_layers(hidden_dim=t.ffn, **kw)
        if not self._flex():
            from torchtitan.models.common.attention import ScaledDotProductAttention

            for layer in layers:
                layer.attention.inner_attention = ScaledDotProductAttention.Config()
        embedding = qwen3.Embedding.Config(
            num_embeddings=t.vocab, embedding_dim=t.hidden, param_init=qwen3._EMBEDDING_INIT
        )
        head = qwen3.Linear.Config(
            in_features=t.hidden, out_features=t.vocab, param_init=qwen3._LINEAR_INIT
        )
        return qwen3.Qwen3Model.Config(
            vocab_size=t.vocab,
            dim=t.hidden,
            norm=qwen3._qwen3_norm(t.hidden),
            layers=layers,
            tok_embeddings=embedding,
            lm_head=head,
        )

    def build(self) -> None:
        from torchtitan.components.loss import CrossEntropyLoss
        from torchtitan.distributed import ParallelDims, utils
        from torchtitan.trainer import Trainer

        self._shims()
        self.config, cell = self._settings(), self.cell
        self.dims = ParallelDims.from_config(self.config.parallelism, cell.world)
        self.dims.build_mesh()
        utils.set_spmd_backend(self.config.parallelism.spmd_backend)
        described = self._model()
        self.config.model_spec.model = described
        described.update_from_config(config=self.config)
        with torch.device(self.case.device):
            model = described.build()
            model.init_states()
        self.fill(model.named_parameters())
        loss = CrossEntropyLoss.Config(global_vocab_size=self.tiny.vocab)
        loss_fn = loss.build(compile_config=self.config.compile)
        pipeline = self._parallelize(model, loss_fn)
        self.make_trainer(
            Trainer,
            utils,
            config=self.config,
            model_config=described,
            loss_fn=loss_fn,
            optimizers=self._optimizer(),
            gradient_accumulation_steps=1 if cell.pp > 1 else self.case.micros,
            num_pipeline_parallel_microbatches=self.case.micros if cell.pp > 1 else 1,
            train_context=utils.get_spmd_context(parallel_dims=self.dims, spmd_typechecking=False),
            **pipeline,
        )
        self.trainer.fwd_bwd_fn = self.trainer._forward_backward_body

    def _parallelize(self, model: Any, loss_fn: Any) -> dict[str, Any]:
        spec, config = self.config.model_spec, self.config
        kw = {
            "parallel_dims": self.dims,
            "training": config.training,
            "parallelism": config.parallelism,
            "compile_config": config.compile,
            "ac_config": config.activation_checkpoint,
            "dump_folder": "",
        }
        if self.cell.pp == 1:
            self.parts = self.sharded([spec.parallelize_fn(model, **kw)])
            return {"model_parts": self.parts}
        micro_batch_lists()
        schedule, parts, first, last = spec.pipelining_fn(
            model,
            device=self.case.device,
            model_config=spec.model,
            parallelize_fn=spec.parallelize_fn,
            loss_fn=loss_fn,
            **kw,
        )
        self.parts = self.sharded(parts)
        return {
            "model_parts": parts,
            "pp_schedule": schedule,
            "pp_has_first_stage": first,
            "pp_has_last_stage": last,
        }

    def _optimizer(self) -> Any:
        from torchtitan.components.optimizer.optimizer import OptimizersContainer, ParamGroupConfig

        group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=ADAMW)
        config = OptimizersContainer.Config(param_groups=[group], implementation="foreach")
        return config.build(model_parts=self.parts)

    def _flex(self) -> bool:
        """Its registry's attention, which has no backward on CPU. There its other one serves, as in
        its own tests of decoders: causal, without masks of documents. It has no cp on CPU."""
        return self.case.device.type != "cpu" or self.cell.cp > 1

    def _shims(self) -> None:
        if self.case.device.type != "cpu":
            return
        if self._flex():
            dense_flex_attention()
            self.standins.add("flex")
        if self.tiny.experts:
            ungrouped_experts()
            cpu_histogram()
            self.standins.add("experts")

    def batches(self, step: int) -> list[tuple[dict[str, Any], Tensor]]:
        places = torch.arange(self.tiny.seq, device=self.case.device)
        own = self.own_batches(step)
        return [({"input": x, "positions": places.expand_as(x)}, y) for x, y in own]


ENGINE = Titan3
