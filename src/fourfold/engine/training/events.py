"""What a trainer tells those who watch its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from fourfold.engine.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A phase begins: `data` (the step itself), `backward` of one micro batch through `chunk`
    (`kind` B, or I and W of a split one), `reduce`, `optimizer` (`norm` is known, weights have not
    changed; a callback may raise); or the step is at its `end`."""

    phase: Literal["data", "backward", "reduce", "optimizer", "end"]
    chunk: Decoder | None = None
    kind: str = ""
    norm: Tensor | None = None


class StepOutcome(NamedTuple):
    """Tensors: nothing waits for the device until somebody reads them. Equal on all ranks."""

    loss: Tensor
    grad_norm: Tensor
