"""What a training adds to a run: steps, learning rate, AdamW, checkpoints and logs."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass
from typing import Annotated, Literal

from fourfold.flag import flag
from fourfold.spec import check
from fourfold.units import count_from

Count = Annotated[int, count_from]
LrSchedule = Literal["cosine", "linear", "constant", "wsd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """`max_norm` 0: gradients are not clipped. `save_every` 0: only at the end. `keep` 0: all.

    `decay_steps` belongs to `wsd` (warm-up, stable, decay); 0 means a tenth of the steps.
    `weights` is a Hugging Face folder to begin from; a resume has its own.
    """

    steps: Count = flag(
        "total number of steps, including those before a resume", "N", default=MISSING
    )
    lr: float = flag("peak learning rate (default 3e-4)", "N", default=3e-4)
    min_lr: float = flag(
        "learning rate at the end of the decay (default 0)", "N", rare=True, default=0.0
    )
    warmup_steps: Count = flag("warm-up steps (default 0)", "N", default=0)
    lr_schedule: LrSchedule = flag(
        "cosine (default), linear, constant or wsd", "X", rare=True, default="cosine"
    )
    decay_steps: Count = 0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0
    save_every: Count = flag(
        "steps between checkpoints (default 100); 0: only at the end", "N", default=100
    )
    keep: int = flag("checkpoints to keep (default 2); 0: all", "N", rare=True, default=2)
    async_save: bool = flag(
        "write checkpoints in the background (default)",
        names=("--async",),
        pair=True,
        rare=True,
        default=True,
    )
    log_every: Count = flag(
        "steps between reads of the loss (default 10)", "N", rare=True, default=10
    )
    tensorboard: bool = flag("also write TensorBoard events", pair=True, rare=True, default=False)
    wandb: str = flag("also log to this Weights & Biases project", "X", rare=True, default="")
    weights: str = flag("start from a Hugging Face folder, with its model", "X", default="")

    def __post_init__(self) -> None:
        check.whole(1, 10**9, steps=self.steps, log_every=self.log_every)
        check.whole(0, 10**9, save_every=self.save_every, keep=self.keep)
        check.whole(0, 10**9, warmup_steps=self.warmup_steps, decay_steps=self.decay_steps)
        check.positive(lr=self.lr, eps=self.eps)
        for name in ("min_lr", "weight_decay", "max_norm"):
            value = getattr(self, name)
            check.that(value >= 0, name, value, "must be 0 or more")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            check.that(0 <= value < 1, name, value, "must be from 0 to below 1")
        rule = f"must not exceed lr={self.lr:g}"
        check.that(self.min_lr <= self.lr, "min_lr", self.min_lr, rule)
        rule, given = f"has no part in lr_schedule={self.lr_schedule}", self.decay_steps
        hint, is_used = "use 0, or lr_schedule = wsd", self.lr_schedule == "wsd"
        check.that(is_used or not given, "decay_steps", given, rule, hint)
        hint, is_used = "use 0, or another lr_schedule", self.lr_schedule != "constant"
        check.that(is_used or not self.min_lr, "min_lr", self.min_lr, rule, hint)
        name = "decay_steps" if self.decay_steps else "warmup_steps"
        fits = self.warmup_steps + self.decay_steps <= self.steps
        rule = f"is too long: warm-up and decay together exceed steps={self.steps}"
        check.that(fits, name, getattr(self, name), rule, "use fewer warm-up steps, or more steps")


def lr_at(settings: TrainSettings, step: int) -> float:
    """The learning rate of update `step`, from 0: warm-up reaches `lr` with its last step, a decay
    reaches `min_lr` with the last step of all."""
    lr, low = settings.lr, settings.min_lr
    if step < settings.warmup_steps:
        return lr * (step + 1) / settings.warmup_steps
    if settings.lr_schedule == "constant":
        return lr
    first = settings.warmup_steps
    if settings.lr_schedule == "wsd":
        decay = settings.decay_steps or max(1, settings.steps // 10)
        first = max(first, settings.steps - decay)
        if step < first:
            return lr
        # The first step of the decay is already below the plateau.
        gone = min(1.0, (step - first + 1) / (settings.steps - first))
        return lr + (low - lr) * gone
    gone = min(1.0, (step - first) / max(1, settings.steps - 1 - first))
    if settings.lr_schedule == "linear":
        return lr + (low - lr) * gone
    return low + (lr - low) * 0.5 * (1.0 + math.cos(math.pi * gone))
