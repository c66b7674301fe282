"""TensorBoard and Weights & Biases, fed by rank 0 alone and imported only when asked for."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from fourfold import files
from fourfold.result.files.curve import Point
from fourfold.spec import codec
from fourfold.spec.run import RunSpec
from fourfold.spec.train import TrainSettings

_SHOWN = ("loss", "router_loss", "grad_norm", "lr", "tokens_per_s", "step_s", "mfu_pct")


class Tracker(Protocol):
    def add(self, points: Sequence[Point]) -> None: ...

    def close(self) -> None: ...


def trackers(settings: TrainSettings, spec: RunSpec, out: Path, first: int) -> list[Tracker]:
    """`first`: steps done before; what an earlier, killed run said of later ones is dropped."""
    chosen: list[Tracker] = []
    if settings.tensorboard:
        chosen.append(_TensorBoard(out / "tensorboard", first))
    if settings.wandb:
        chosen.append(_Wandb(settings, spec, out))
    return chosen


def values(point: Point) -> dict[str, float]:
    return {name: value for name in _SHOWN if (value := getattr(point, name)) is not None}


class _TensorBoard:
    def __init__(self, folder: Path, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first + 1 if first else None)

    def add(self, points: Sequence[Point]) -> None:
        for point in points:
            for name, value in values(point).items():
                self._writer.add_scalar(f"train/{name}", value, point.step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """One run of the service per folder; it keeps the first value it was sent for a step."""

    def __init__(self, settings: TrainSettings, spec: RunSpec, out: Path) -> None:
        import wandb

        known = out / "wandb-id"
        if not known.exists():
            files.write_text(known, secrets.token_hex(8) + "\n")
        config: dict[str, Any] = {"run": codec.encode(spec), "train": codec.encode(settings)}
        self._run = wandb.init(
            project=settings.wandb,
            dir=str(out),
            id=files.read_own_text(known).strip(),
            resume="allow",
            config=config,
        )

    def add(self, points: Sequence[Point]) -> None:
        for point in points:
            named = {f"train/{name}": value for name, value in values(point).items()}
            self._run.log(named, step=point.step)

    def close(self) -> None:
        self._run.finish()
