"""torchtitan below 0.3: its llama3 (dense) and qwen3 (experts), functions that parallelize and make
pipelines, loss, clipping and optimizer container, called as its Trainer calls them."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from torch import Tensor

from fourfold.conformance.cell import Cell
from fourfold.conformance.ranks.adapter import Adapter, Look
from fourfold.conformance.ranks.reference import BETAS, CLIP, DECAY, EPS, LR
from fourfold.conformance.ranks.shims import (
    cpu_histogram,
    cpu_permutation,
    gathered_attention,
    local_attention,
    titan_on_cpu,
)

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # flex attention is compiled while the module loads
if not torch.cuda.is_available():
    titan_on_cpu()
NAMES = {
    "tok_embeddings.weight": "embed", "norm.weight": "norm", "output.weight": "head",
    "attention_norm.weight": "norm1", "ffn_norm.weight": "norm2", "attention.wq.weight": "q",
    "attention.wk.weight": "k", "attention.wv.weight": "v", "attention.wo.weight": "o",
    "attention.q_norm.weight": "qnorm", "attention.k_norm.weight": "knorm",
    "feed_forward.w1.weight": "gate", "feed_forward.w2.weight": "down",
    "feed_forward.w3.weight": "up", "moe.router.gate.weight": "router",
    "moe.experts.w1": "egate", "moe.experts.w2": "edown", "moe.experts.w3": "eup",
}  # fmt: skip


def canonical(name: str) -> str:
    if not name.startswith("layers."):
        return NAMES[name]
    _, layer, rest = name.replace("_checkpoint_wrapped_module.", "").split(".", 2)
    return f"{layer}.{NAMES[rest]}"


class Titan2(Adapter):
    modules = ("torchtitan.config", "torchtitan.distributed", "torchtitan.protocols.train_spec",
               "torchtitan.models.llama3", "torchtitan.models.qwen3")  # fmt: skip

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
            return f"{other[0]} is no option of its llama3 and qwen3"
        if cell.has("sp"):
            return "sequence parallelism is part of its tp"
        if cell.has("experts") and cell.pp > 1:
            return "its qwen3 has no pipeline"
        if cell.etp not in (0, 1, cell.tp):
            return "etp must be 1 or tp"
        if cell.has("accumulate") and cell.pp > 1:
            return "a pipeline has micro batches of its own"
        return ""

    @staticmethod
    def shape(cell: Cell) -> dict:
        if cell.has("experts"):
            return {"qk_norm": True, "eps": 1e-6, "theta": 1e6}
        return {"pairs": True, "ffn": 192}

    def _job(self) -> Any:
        from torchtitan.config import JobConfig

        cell, t, job = self.cell, self.tiny, JobConfig()
        job.training.seq_len, job.training.max_norm = t.seq, CLIP
        job.training.local_batch_size = self.case.rows
        job.training.mixed_precision_param = job.training.mixed_precision_reduce = "float32"
        job.activation_checkpoint.mode = "full" if cell.has("recompute") else "none"
        job.compile.enable = False
        job.optimizer.lr, job.optimizer.eps, job.optimizer.weight_decay = LR, EPS, DECAY
        job.optimizer.beta1, job.optimizer.beta2 = BETAS
        job.optimizer.implementation = "foreach"
        p = job.parallelism
        p.data_parallel_shard_degree, p.data_parallel_replicate_degree = cell.shards, cell.replicas
        p.tensor_parallel_degree, p.context_parallel_degree = cell.tp, cell.cp
        p.pipeline_parallel_degree, p.expert_parallel_degree = cell.pp, cell.ep
        p.expert_tensor_parallel_degree = cell.etp or (cell.tp if cell.ep > 1 else 1)
        p.pipeline_parallel_microbatch_size = self.case.micro_rows
        p.pipeline_parallel_schedule = "Interleaved1F1B" if cell.virtual > 1 else "1F1B"
        if cell.pp > 1:
            p.pipeline_parallel_layers_per_stage = t.layers // (cell.pp * cell.virtual)
            p.pipeline_parallel_first_stage_less_layers = 0
            p.pipeline_parallel_last_stage_less_layers = 0
        return job

    def _arguments(self, spec: Any, job: Any) -> Any:
        """The engine's own debug model, with our sizes."""
        t = self.tiny
        found = dataclasses.replace(
            next(iter(spec.model_args.values())), dim=t.hidden, n_layers=t.layers, n_heads=t.heads,
            n_kv_heads=t.kv_heads, vocab_size=t.vocab, norm_eps=t.eps, rope_theta=t.theta,
            max_seq_len=t.seq,
        )  # fmt: skip
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
                num_experts=t.experts, num_shared_experts=0, top_k=t.top_k, score_func="softmax",
                route_norm=t.renorm, use_grouped_mm=False, score_before_experts=False,
                load_balance_coeff=None,
            )  # fmt: skip
        found.update_from_config(job)
        return found

    def build(self) -> None:
        import torchtitan.distributed.parallel_dims as parallel_dims
        from torchtitan.protocols.train_spec import get_train_spec

        self._shims()
        cell, t, job = self.cell, self.tiny, self._job()
        self.job, self.spec = job, get_train_spec("qwen3" if t.experts else "llama3")
        self.dims = parallel_dims.ParallelDims(
            dp_shard=cell.shards, dp_replicate=cell.replicas, cp=cell.cp, tp=cell.tp, pp=cell.pp,
            ep=cell.ep, etp=job.parallelism.expert_tensor_parallel_degree, world_size=cell.world,
        )  # fmt: skip
        self.dims.build_mesh()
        arguments = self._arguments(self.spec, job)
        with torch.device(self.case.device):
            model = self.spec.model_cls(arguments)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(self.elements.start[canonical(name)].to(p))
        self.loss = self.spec.build_loss_fn(job)
        if cell.pp > 1:
            self.schedule, parts, self.first, self.last = self.spec.pipelining_fn(
                model, self.dims, job, self.case.device, arguments, self.spec.parallelize_fn,
                self.loss,
            )  # fmt: skip
        else:
            parts = [self.spec.parallelize_fn(model, self.dims, job)]
        self.parts = [part.train() for part in parts]
        for module in (m for part in parts for m in part.modules()):
            if hasattr(module, "set_force_sum_reduction_for_comms"):  # gloo has no averaging sum
                module.set_force_sum_reduction_for_comms(True)
        self.take(p for part in self.parts for p in part.parameters())
        self.optimizer = self.spec.build_optimizers_fn(self.parts, job.optimizer, self.dims)

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

    def _mesh(self, name: str) -> Any:
        return self.dims.get_optional_mesh(name)

    def _backward(self, x: Tensor, y: Tensor, total: float) -> Tensor:
        extra: dict = {}
        if self.cell.cp > 1:
            from torchtitan.distributed.context_parallel import prepare_context_parallel_input

            x, y, extra = prepare_context_parallel_input(
                x, y, {}, self.dims.get_mesh("cp"), self.case.device,
                self.job.parallelism.context_parallel_load_balancer,
            )  # fmt: skip
        if self.cell.pp == 1:
            loss = self.loss(self.parts[0](x, **extra), y) / total
            loss.backward()
            return loss
        seen: list[Tensor] | None = [] if self.last else None
        inputs = [x] if self.first else []
        self.schedule.step(
            *inputs, target=y if self.last else None, losses=seen, return_outputs=False, **extra
        )
        return torch.stack(seen).sum() / total if seen else torch.zeros(())  # as its Trainer does

    def step(self, step: int, look: Look) -> tuple[float, float]:
        from torchtitan.distributed import utils

        mesh, cell = self._mesh("batch"), self.cell
        batches = self.case.ignored(step, mesh.get_local_rank() if mesh is not None else 0)
        if cell.pp > 1:
            batches = [(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))]
        parallel_loss = cell.tp > 1 and not self.job.parallelism.disable_loss_parallel
        context = utils.get_train_context(parallel_loss)
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for x, y in batches:
            with context():
                loss = self._backward(x, y, self.case.targets(step))
            loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
            total += loss.detach().double().cpu()
        look()
        norm = utils.clip_grad_norm_(
            [p for part in self.parts for p in part.parameters()], CLIP, foreach=True,
            pp_mesh=self._mesh("pp"), ep_enabled=self.dims.ep_enabled,
        )  # fmt: skip
        self.optimizer.step()
        return self.sum_over_ranks(total) / cell.tp, float(norm)


ENGINE = Titan2
