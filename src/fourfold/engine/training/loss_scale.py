"""fp16 has small gradients only if the loss is made large: by how much, and when was it too much?

The loss is multiplied by a scale and gradients are divided by it again, together with clipping. A
gradient that is not finite leaves weights and moments alone and halves the scale; 2,000 good steps
double it (Micikevicius et al. 2018). All ranks see the same norm, so all decide the same, and
nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerSettings:
    """Powers of two, so that scaling rounds nothing. Below `smallest` the scale has collapsed:
    gradients overflow that nobody made larger."""

    initial: float = 2.0**16
    interval: int = 2000
    smallest: float = 1.0
    largest: float = 2.0**32


class LossScaler:
    """`scale` and `good` (steps since it last changed) are tensors on the device."""

    def __init__(self, settings: ScalerSettings, device: torch.device) -> None:
        self.settings = settings
        self.scale = torch.tensor(settings.initial, dtype=torch.float32, device=device)
        self.good = torch.zeros((), dtype=torch.int64, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.scale

    def unscaled(self, value: Tensor) -> Tensor:
        return value / self.scale

    def overflow(self, norm: Tensor) -> Tensor:
        """1 where the global norm says that some gradient is not finite, else 0."""
        return (~torch.isfinite(norm)).to(torch.float32)

    def update(self, overflow: Tensor) -> None:
        """After a step: halve, double, or keep the scale."""
        bad = overflow > 0
        good = torch.where(bad, 0, self.good + 1)
        grown = good >= self.settings.interval
        scale = torch.where(grown, self.scale * 2, self.scale).clamp(max=self.settings.largest)
        self.scale.copy_(torch.where(bad, self.scale / 2, scale))
        self.good.copy_(torch.where(grown, 0, good))

    def collapsed(self) -> bool:
        """Waits for the device."""
        return float(self.scale) < self.settings.smallest

    def scalars(self) -> dict[str, float]:
        """What a checkpoint must hold; waits for the device."""
        return {"loss_scale": float(self.scale), "loss_scale_good_steps": float(self.good)}

    def restore(self, scalars: dict[str, float]) -> None:
        """Take what `scalars` gave; a checkpoint of another precision has none: start anew."""
        self.scale.fill_(scalars.get("loss_scale", self.settings.initial))
        self.good.fill_(int(scalars.get("loss_scale_good_steps", 0)))
