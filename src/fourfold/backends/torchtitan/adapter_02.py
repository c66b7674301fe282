"""torchtitan below 0.3: its llama3 (dense) and qwen3 (experts), functions that parallelize and make
pipelines, loss, clipping and optimizer container, and its Trainer's step."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from fourfold.backends.torchtitan.adapter import Titan
from fourfold.backends.torchtitan.shims import cpu_permutation
from fourfold.conformance.cell import Cell
from fourfold.conformance.ranks.reference import BETAS, DECAY, EPS, LR
from fourfold.conformance.ranks.shims import (
    cpu_histogram,
    gathered_attention,
    local_attention,
)


class Titan2(Titan):
    has_no = ("tied", "sp")
    modules = (
        "torchtitan.distributed",
        "torchtitan.protocols.train_spec",
        "torchtitan.train",
        "torchtitan.models.llama3",
        "torchtitan.models.qwen3",
    )

    @classmethod
    def legal(cls, cell: Cell) -> str:
        if cell.has("experts") and cell.pp > 1:
            return "its qwen3 has no pipeline"
        if cell.etp not in (0, 1, cell.tp):
            return "etp must be 1 or tp"
        if cell.has("accumulate") and cell.pp > 1:
            return "a pipeline has micro batches of its own"
        return super().legal(cell)

    @staticmethod
    def shape(cell: Cell) -> dict:
        if cell.has("experts"):
            return {"qk_norm": True, "eps": 1e-6, "theta": 1e6}
        return {"pairs": True, "ffn": 192}

    def _job(self) -> Any:
        from torchtitan.config import JobConfig

        cell, t, job = self.cell, self.tiny, JobConfig()
        self.settle(job)
        job.activation_checkpoint.mode = "full" if cell.has("recompute") else "none"
        job.optimizer.lr, job.optimizer.eps, job.optimizer.weight_decay = LR, EPS, DECAY
        job.optimizer.beta1, job.optimizer.beta2 = BETAS
        job.optimizer.implementation = "foreach"
        p = job.parallelism
        p.expert_tensor_parallel_degree = cell.etp or (cell.tp if cell.ep > 1 else 1)
        if cell.pp > 1:
            p.pipeline_parallel_layers_per_stage = t.layers // (cell.pp * cell.virtual)
            p.pipeline_parallel_first_stage_less_layers = 0
            p.pipeline_parallel_last_stage_less_layers = 0
        return job

    def _arguments(self, spec: Any, job: Any) -> Any:
        """The engine's own debug model, with our sizes."""
        t = self.tiny
        found = dataclasses.replace(
            next(iter(spec.model_args.values())),
            dim=t.hidden,
            n_layers=t.layers,
            n_heads=t.heads,
            n_kv_heads=t.kv_heads,
            vocab_size=t.vocab,
            norm_eps=t.eps,
            rope_theta=t.theta,
            max_seq_len=t.seq,
        )
        if not t.experts:  # its width is 8/3 of hidden, up to a multiple
            found.multiple_of, found.ffn_dim_multiplier = t.ffn, None
            scaling = getattr(found, "rope_scaling_args", None)
            if scaling is not None:
                scaling.scaling_factor = 1.0
        else:
            from torchtitan.models.moe import MoEArgs

            found.head_dim, found.hidden_dim, found.qk_norm = t.head_dim, t.ffn, True
            found.enable_weight_tying, found.moe_enabled, found.moe_inter_dim = False, True, t.ffn
            found.moe_args = MoEArgs(
                num_experts=t.experts,
                num_shared_experts=0,
                top_k=t.top_k,
                score_func="softmax",
                route_norm=t.renorm,
                use_grouped_mm=False,
                score_before_experts=False,
                load_balance_coeff=None,
            )
        found.update_from_config(job)
        return found

    def build(self) -> None:
        import torchtitan.distributed.parallel_dims as parallel_dims
        from torchtitan.distributed import utils
        from torchtitan.protocols.train_spec import get_train_spec
        from torchtitan.train import Trainer

        self._shims()
        cell, t, job = self.cell, self.tiny, self._job()
        spec = get_train_spec("qwen3" if t.experts else "llama3")
        self.dims = parallel_dims.ParallelDims(
            dp_shard=cell.shards,
            dp_replicate=cell.replicas,
            cp=cell.cp,
            tp=cell.tp,
            pp=cell.pp,
            ep=cell.ep,
            etp=job.parallelism.expert_tensor_parallel_degree,
            world_size=cell.world,
        )
        self.dims.build_mesh()
        arguments = self._arguments(spec, job)
        with torch.device(self.case.device):
            model = spec.model_cls(arguments)
        self.fill(model.named_parameters())
        pipeline, loss = {}, spec.build_loss_fn(job)
        if cell.pp > 1:
            schedule, parts, first, last = spec.pipelining_fn(
                model, self.dims, job, self.case.device, arguments, spec.parallelize_fn, loss
            )
            pipeline = {"pp_schedule": schedule, "pp_has_first_stage": first}
            pipeline["pp_has_last_stage"] = last
        else:
            parts = [spec.parallelize_fn(model, self.dims, job)]
        self.sharded(parts)
        kind, asked = self.case.device.type, job.training.mixed_precision_param
        parallel_loss = cell.tp > 1 and not job.parallelism.disable_loss_parallel
        self.make_trainer(
            Trainer,
            utils,
            job_config=job,
            model_args=arguments,
            model_parts=parts,
            loss_fn=loss,
            optimizers=spec.build_optimizers_fn(parts, job.optimizer, self.dims),
            gradient_accumulation_steps=1 if cell.pp > 1 else self.case.micros,
            train_context=utils.get_train_context(parallel_loss),
            maybe_enable_amp=utils.maybe_enable_amp(self.dims, asked, kind),
            **pipeline,
        )

    def _shims(self) -> None:
        if self.case.device.type != "cpu":
            return

        def ring(q: Tensor, k: Tensor, v: Tensor, mesh: Any) -> Tensor:
            self.standins.add("attention")
            return gathered_attention(q, k, v, mesh.get_group())

        local_attention(ring)
        if self.tiny.experts:
            cpu_permutation()
            cpu_histogram()

    def batches(self, step: int) -> list[tuple[dict[str, Any], Tensor]]:
        """A pipeline takes all of them at once and cuts them itself."""
        found = self.own_batches(step)
        if self.cell.pp > 1:
            found = [(torch.cat([x for x, _ in found]), torch.cat([y for _, y in found]))]
        return [({"input": x}, y) for x, y in found]


ENGINE = Titan2
