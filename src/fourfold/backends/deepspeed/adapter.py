"""DeepSpeed: ZeRO 0 to 3 of its engine around the reference's decoder; it has no own model."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from fourfold.backends.deepspeed.shims import nothing_compiled
from fourfold.conformance.cell import Cell
from fourfold.conformance.ranks.adapter import Adapter, Look, Plain
from fourfold.conformance.ranks.reference import ADAMW, CLIP, Part

if not torch.cuda.is_available():
    os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["TORCHDYNAMO_DISABLE"] = "1"


class DeepSpeedZero(Adapter):
    modules = (
        "deepspeed",
        "deepspeed.comm.torch",
        "deepspeed.runtime.engine",
        "deepspeed.runtime.zero.stage3",
        "torch._functorch.aot_autograd",
    )

    @staticmethod
    def legal(cell: Cell) -> str:
        if max(cell.pp, cell.cp, cell.tp, cell.ep) > 1 or cell.etp:
            return "it divides data here: pp, cp, tp and ep are its other engines"
        allowed = {"zero1", "zero2", "zero3", "accumulate", "uneven", "tied", "experts", "sinks"}
        other = sorted(cell.options - allowed - {"overlap"})
        return f"{other[0]} is no option of its ZeRO" if other else ""

    def build(self) -> None:
        import deepspeed

        nothing_compiled()
        self._watch_clipping()
        self.stage = next((n for n in (1, 2, 3) if self.cell.has(f"zero{n}")), 0)
        model = Plain(self.tiny, self.elements)
        params = list(model.parameters())
        self.numbers = [self.elements.numbers(p) for p in params]
        for p, numbers in zip(params, self.numbers, strict=True):
            self.elements.fill(p.data, numbers)
        optimizer = torch.optim.AdamW(params, **ADAMW)
        zero = {"stage": self.stage, "overlap_comm": self.cell.has("overlap")}
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": self.case.micro_rows,
                "gradient_accumulation_steps": self.case.micros,
                "gradient_clipping": CLIP,
                "zero_optimization": zero,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
        )
        self.params = list(self.engine.module.parameters())

    def owned(self) -> list[Part]:
        """Every rank's copy; of ZeRO 3 whole weights, put together by DeepSpeed's code."""
        from deepspeed.utils import safe_get_full_fp32_param

        full = [safe_get_full_fp32_param(p) if self.stage == 3 else p for p in self.params]
        return list(zip(self.numbers, full, strict=True))

    def gradients(self) -> list[Part]:
        from deepspeed.utils import safe_get_full_grad

        full: list[Tensor] = [safe_get_full_grad(p).detach().clone() for p in self.params]
        return list(zip(self.numbers, full, strict=True))

    def step(self, step: int, look: Look) -> tuple[float, float]:
        case, seen = self.case, torch.zeros((), dtype=torch.float64)
        batches = case.ignored(step, case.rank)
        for number, (x, y) in enumerate(batches):
            part = self.engine(x, y) / case.targets(step)
            seen += part.detach().double().cpu()
            self.engine.backward(part * case.cell.dp * case.micros)  # it takes the mean of both
            if number == len(batches) - 1:
                look()
            self.engine.step()
        norm = self.engine.get_global_grad_norm() if self.stage else self.clipped[-1]
        return self.sum_over_ranks(seen), float(norm)

    def _watch_clipping(self) -> None:
        """Without ZeRO it clips and tells nobody."""
        import deepspeed.runtime.engine as module

        self.clipped: list[Any] = []
        clip = module.clip_grad_norm_

        def clip_grad_norm_(*a: Any, **k: Any) -> Any:
            self.clipped.append(clip(*a, **k))
            return self.clipped[-1]

        module.clip_grad_norm_ = clip_grad_norm_


ENGINE = DeepSpeedZero
