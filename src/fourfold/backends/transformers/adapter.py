"""transformers: its Llama and Qwen3-MoE with its own tensor and expert parallel plans, trained by
its Trainer. Weights come as a checkpoint of element numbers, so its loader does the sharding."""

from __future__ import annotations

import inspect
import os
import tempfile
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.conformance.cell import Cell
from fourfold.conformance.ranks.adapter import Adapter, Look
from fourfold.conformance.ranks.reference import BETAS, CLIP, DECAY, EPS, LR, STEPS, batch, local

os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched
NAMES = {
    "model.embed_tokens.weight": "embed",
    "model.norm.weight": "norm",
    "lm_head.weight": "head",
    "input_layernorm.weight": "norm1",
    "post_attention_layernorm.weight": "norm2",
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o",
    "self_attn.q_norm.weight": "qnorm",
    "self_attn.k_norm.weight": "knorm",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
    "mlp.gate.weight": "router",
    "mlp.experts.down_proj": "edown",
}


def tensor_ranks_on_cpu() -> None:
    """accelerate takes tensor ranks of several devices only; CPU processes are none to it."""
    from accelerate.parallelism_config import ParallelismConfig

    ParallelismConfig._validate_accelerator = lambda self, accelerator: None


class TokenRows(torch.utils.data.Dataset):
    """Every row of three steps. Its model predicts the next token: targets stand one place later,
    after a token more, whose own prediction does not count."""

    def __init__(self, adapter: Adapter) -> None:
        t, self.rows = adapter.tiny, []
        for step in range(STEPS):
            x, y, m = batch(t, step, adapter.case.seed)
            y = torch.where(m > 0, y, torch.full_like(y, -100))
            for tokens, targets in zip(x, y, strict=True):
                ids = torch.cat([tokens, tokens[:1]])
                labels = torch.cat([torch.tensor([-100]), targets])
                self.rows.append({"input_ids": ids, "labels": labels})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


class Transformers(Adapter):
    modules = (
        "transformers.models.llama.modeling_llama",
        "transformers.trainer",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "accelerate",
    )

    @staticmethod
    def legal(cell: Cell) -> str:
        if max(cell.pp, cell.cp) > 1 or cell.etp:
            return "pp, cp and etp are not asked for here"
        if cell.ep > 1 and cell.tp != cell.ep:
            return "its expert ranks are its tensor ranks: write tpN epN"
        if cell.tp > 1 and cell.dp > 1:
            return "replicas of tensor ranks are not asked for here"
        if cell.tp > 1 and cell.has("experts") and cell.ep == 1:
            return "experts are cut by tp through ep"
        other = sorted(cell.options - {"accumulate", "uneven", "tied", "experts", "recompute"})
        return f"{other[0]} is not asked for here" if other else ""

    @staticmethod
    def shape(cell: Cell) -> dict:
        return {"qk_norm": True, "eps": 1e-6} if cell.has("experts") else {}

    @staticmethod
    def decays(name: str) -> bool:
        return "norm" not in name

    def _numbers(self, name: str) -> Tensor:
        full = self.elements.start
        if not name.startswith("model.layers."):
            return full[NAMES[name]]
        _, _, layer, rest = name.split(".", 3)
        if rest == "mlp.experts.gate_up_proj":
            return torch.cat([full[f"{layer}.egate"], full[f"{layer}.eup"]], 1)
        return full[f"{layer}.{NAMES[rest]}"]

    def _model(self) -> Any:
        import transformers

        t = self.tiny
        kw: dict = {
            "vocab_size": t.vocab,
            "hidden_size": t.hidden,
            "intermediate_size": t.ffn,
            "num_hidden_layers": t.layers,
            "num_attention_heads": t.heads,
            "rms_norm_eps": t.eps,
            "num_key_value_heads": t.kv_heads,
            "head_dim": t.head_dim,
            "rope_theta": t.theta,
            "tie_word_embeddings": t.tied,
            "max_position_embeddings": 2 * t.seq,
            "attn_implementation": "eager",
            "use_cache": False,
            "torch_dtype": "float32",
        }
        if not t.experts:
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**kw))
        kw |= {
            "num_experts": t.experts,
            "num_experts_per_tok": t.top_k,
            "norm_topk_prob": False,
            "moe_intermediate_size": t.ffn,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.0,
        }
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**kw))

    def _sharded(self, model: Any) -> Any:
        """Saved and read again by its own loader, which cuts weights as it reads them."""
        from transformers.distributed import DistributedConfig

        folders: list = [tempfile.mkdtemp() if self.case.rank == 0 else None]
        dist.broadcast_object_list(folders)
        if self.case.rank == 0:
            model.save_pretrained(folders[0])
        dist.barrier()
        asked: dict = {"tp_size": self.cell.tp, "tp_plan": "auto"}
        config: dict = {"enable_expert_parallel": self.cell.ep > 1}
        if "tp_size" in inspect.signature(DistributedConfig).parameters:
            config, asked = config | asked, {}
        asked["distributed_config"] = DistributedConfig(**config)
        kind = type(model)
        found = kind.from_pretrained(
            folders[0], attn_implementation="eager", dtype=torch.float32, **asked
        )
        found.config.use_cache = False
        return found

    def build(self) -> None:
        from accelerate.parallelism_config import ParallelismConfig
        from transformers import Trainer, TrainingArguments

        model = self._model()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(self._numbers(name).to(p))
        if self.cell.tp > 1:
            model = self._sharded(model)
        self.take(model.parameters())
        if self.case.device.type == "cpu":
            tensor_ranks_on_cpu()
        tensor_ranks = ParallelismConfig(tp_size=self.cell.tp) if self.cell.tp > 1 else None
        arguments = TrainingArguments(
            output_dir=tempfile.gettempdir(),
            use_cpu=self.case.device.type == "cpu",
            max_steps=STEPS,
            per_device_train_batch_size=self.case.micro_rows,
            gradient_accumulation_steps=self.case.micros,
            learning_rate=LR,
            weight_decay=DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_epsilon=EPS,
            max_grad_norm=CLIP,
            lr_scheduler_type="constant",
            optim="adamw_torch",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
            gradient_checkpointing=self.cell.has("recompute"),
            logging_strategy="no",
            parallelism_config=tensor_ranks,
        )
        rows = TokenRows(self)
        self.trainer = cast("Any", Trainer(model=model, args=arguments, train_dataset=rows))
        in_order = torch.utils.data.SequentialSampler(rows)
        self.trainer._get_train_sampler = lambda *a: in_order

    def train(self, look: Look) -> tuple[list[float], list[float]]:
        """Its whole loop, watched where it computes a loss and where it clips."""
        parts: list[float] = []
        norms: list[float] = []
        compute = self.trainer.training_step
        at, name = self.trainer, "_clip_grad_norm"  # of older ones accelerate's
        if not hasattr(at, name):
            at, name = self.trainer.accelerator, "clip_grad_norm_"
        clip = getattr(at, name)

        def training_step(*a: Any, **k: Any) -> Tensor:
            loss = compute(*a, **k)
            parts.append(float(local(loss)))
            return loss

        def clip_grad_norm_(*a: Any, **k: Any) -> Tensor:
            if not norms:
                look()
            norm = clip(*a, **k)
            norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            return norm

        self.trainer.training_step = training_step
        setattr(at, name, clip_grad_norm_)
        self.trainer.train()
        n, ranks = self.case.micros, self.cell.world
        means = [
            self.sum_over_ranks(sum(parts[at : at + n])) / ranks for at in range(0, len(parts), n)
        ]
        return means, norms


ENGINE = Transformers
