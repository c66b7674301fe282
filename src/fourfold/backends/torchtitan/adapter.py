"""What all releases of torchtitan share: the step of its own Trainer, on a Trainer whose parts were
made one by one by the functions that its constructor calls, which also wants a tokenizer, files of
text and a device of CUDA."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch

from fourfold.backends.torchtitan.shims import titan_on_cpu
from fourfold.conformance.cell import SHARDED, Cell
from fourfold.conformance.ranks.adapter import Adapter, Look
from fourfold.conformance.ranks.reference import CLIP, LR
from fourfold.conformance.ranks.shims import Nothing

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # flex attention is compiled while the module loads
if not torch.cuda.is_available():
    titan_on_cpu()
# The parts of a layer, and of the model, as most releases call them.
NAMES = {
    "tok_embeddings.weight": "embed",
    "norm.weight": "norm",
    "output.weight": "head",
    "lm_head.weight": "head",
    "attention_norm.weight": "norm1",
    "ffn_norm.weight": "norm2",
    "wq.weight": "q",
    "wk.weight": "k",
    "wv.weight": "v",
    "wo.weight": "o",
    "q_norm.weight": "qnorm",
    "k_norm.weight": "knorm",
    "feed_forward.w1.weight": "gate",
    "feed_forward.w2.weight": "down",
    "feed_forward.w3.weight": "up",
    "gate.weight": "router",
    "experts.w1": "egate",
    "experts.w2": "edown",
    "experts.w3": "eup",
    "inner_experts.w1_EFD": "egate",
    "inner_experts.w2_EDF": "edown",
    "inner_experts.w3_EFD": "eup",
}


def canonical(name: str) -> str:
    """'0.q' of 'layers.0.attention.qkv_linear.wq.weight'."""
    part = name.replace("_checkpoint_wrapped_module.", "").split(".")
    layer = f"{part[1]}." if part[0] == "layers" else ""
    return layer + next(
        NAMES[tail] for tail in (".".join(part[at:]) for at in range(len(part))) if tail in NAMES
    )


class Log:
    """Takes what a step logs: its loss and norm."""

    ntokens_since_last_log = 0

    def __init__(self) -> None:
        self.seen: tuple[float, float] = (0.0, 0.0)

    def should_log(self, step: int) -> bool:
        return True

    def log(self, step: int, loss: float, most: float, norm: float, **_: Any) -> None:
        self.seen = (float(loss), float(norm))


class Titan(Adapter):
    has_no: tuple[str, ...] = ()  # options of the layout that no model of this release has
    dims: Any
    trainer: Any

    @classmethod
    def legal(cls, cell: Cell) -> str:
        kinds = sorted(cell.options & {*SHARDED} - {"fsdp"})
        other = sorted(cell.options & {*cls.has_no, "sinks", "overlap", "allgather", "per-micro"})
        rules = {
            f"{', '.join(kinds)}: it shards all states, as fsdp": kinds,
            f"{', '.join(other)} is no option of its llama3 and qwen3": other,
            "ep divides shards x cp x tp: write fsdp": cell.shards * cell.cp * cell.tp % cell.ep,
            "shards of dp are fsdp": cell.shards > 1 and not cell.has("fsdp"),
        }
        return next((rule for rule, broken in rules.items() if broken), "")

    def settle(self, config: Any) -> None:
        """What all releases call alike of a run's settings."""
        cell, training, p = self.cell, config.training, config.parallelism
        training.seq_len, training.local_batch_size = self.tiny.seq, self.case.rows
        training.mixed_precision_param = training.mixed_precision_reduce = "float32"
        training.max_norm, config.compile.enable = CLIP, False
        p.data_parallel_shard_degree, p.data_parallel_replicate_degree = cell.shards, cell.replicas
        p.tensor_parallel_degree, p.context_parallel_degree = cell.tp, cell.cp
        p.pipeline_parallel_degree, p.expert_parallel_degree = cell.pp, cell.ep
        p.pipeline_parallel_microbatch_size = self.case.micro_rows
        p.pipeline_parallel_schedule = "Interleaved1F1B" if cell.virtual > 1 else "1F1B"

    def fill(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Numbers as weights, before the engine cuts them."""
        with torch.no_grad():
            for name, p in named:
                p.copy_(self.elements.start[canonical(name)].to(p))

    def sharded(self, parts: list[Any]) -> list[Any]:
        for module in (one for part in parts for one in part.train().modules()):
            if self.case.device.type == "cpu" and hasattr(
                module, "set_force_sum_reduction_for_comms"
            ):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no averaging sum
        self.take(p for part in parts for p in part.parameters())
        return parts

    def make_trainer(self, kind: type, utils: Any, **parts: Any) -> None:
        """The Trainer; `utils` is the module by whose name it clips."""
        rates = SimpleNamespace(get_last_lr=lambda: [LR])
        rate = SimpleNamespace(schedulers=[rates], get_metrics=dict, step=lambda: None)
        self.trainer = object.__new__(kind)
        vars(self.trainer).update(
            device=self.case.device,
            parallel_dims=self.dims,
            metrics_processor=Log(),
            lr_schedulers=rate,
            checkpointer=Nothing(),
            tokenizer=None,
            step=0,
            ntokens_seen=0,
            ft_manager=SimpleNamespace(loss_sync_pg=None),  # replicas that may fail, below 0.2.2
            **parts,
        )
        self.look: Look = lambda: None
        clip: Callable[..., Any] = utils.clip_grad_norm_

        def clip_grad_norm_(*a: Any, **k: Any) -> Any:
            self.look()
            return clip(*a, **k)

        utils.clip_grad_norm_ = clip_grad_norm_

    def own_batches(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        mesh = self.dims.get_optional_mesh("batch")
        return self.case.ignored(step, mesh.get_local_rank() if mesh is not None else 0)

    def batches(self, step: int) -> list[tuple[dict[str, Any], torch.Tensor]]:
        raise NotImplementedError

    def step(self, step: int, look: Look) -> tuple[float, float]:
        self.look, self.trainer.step = look, step
        self.trainer.train_step(iter(self.batches(step)))
        loss, norm = self.trainer.metrics_processor.seen
        knows = self.cell.pp == 1 or self.trainer.pp_has_last_stage
        return self.sum_over_ranks(loss, knows) / self.sum_over_ranks(1.0, knows), norm
