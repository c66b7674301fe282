"""Muon's recipe: which matrices it updates, how it makes their updates orthogonal, and how large
these are (Jordan et al. 2024; for large runs Liu et al. 2025, arXiv 2502.16982).

A matrix's momentum goes through a few steps of a polynomial in it, which move all of its singular
values near 1. Everything that is no matrix of a layer (embeddings, head, norms, biases) is AdamW's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fourfold.spec import check

MatrixChoice = Literal["layers", "no-router"]
CoefficientSet = Literal["simple", "quintic"]
IterationDtype = Literal["bf16", "fp32", "fp64"]
Scale = Literal["match-rms", "original"]
Placement = Literal["owner", "blocks"]
Polynomial = tuple[float, float, float]

# (a, b, c) of a X + b (X X^T) X + c (X X^T)^2 X, step by step; they begin again after the last.
COEFFICIENTS: dict[CoefficientSet, tuple[Polynomial, ...]] = {
    # K. Jordan, kellerjordan.github.io/posts/muon; torch.optim.Muon, Moonlight and Kimi K2
    "simple": ((3.4445, -4.7750, 2.0315),),
    # F. Cesista et al., leloykun.github.io/ponder/muon-opt-coeffs; Megatron's usual ones
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
MATCHED_RMS = 0.2  # of AdamW's updates (arXiv 2502.16982, section 2.2)
SMALLEST_NORM = 1e-7
_ROUTERS = ("mlp.router.weight", "mlp.shared_gate.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon:
    """`matrices`: layers (every matrix of the layers, as published) or no-router (routers and gates
    of shared experts are AdamW's).

    `dtype` of the iteration; the momentum has that of moments, `optimizer_dtype`.

    `scale`: match-rms, 0.2 sqrt(max(outs, ins)), which lets AdamW's learning rate be (Moonlight,
    Kimi K2); original, sqrt(max(1, outs / ins)). An update is `factor` times as large again.

    `placement`: owner (one rank gathers a whole matrix) or blocks (tensor ranks keep theirs and add
    up products, where they cut a matrix along its longer side; else as owner).
    """

    matrices: MatrixChoice = "layers"
    steps: int = 5
    coefficients: CoefficientSet = "simple"
    dtype: IterationDtype = "bf16"
    momentum: float = 0.95
    nesterov: bool = True
    scale: Scale = "match-rms"
    factor: float = 1.0
    placement: Placement = "owner"

    def __post_init__(self) -> None:
        check.whole(1, 100, steps=self.steps)
        check.positive(factor=self.factor)
        fair = 0 <= self.momentum < 1
        check.that(fair, "momentum", self.momentum, "must be from 0 to below 1")
        length = len(COEFFICIENTS[self.coefficients])
        rule = f"is not a multiple of the {length} steps of coefficients {self.coefficients}"
        check.that(self.steps % length == 0, "steps", self.steps, rule)

    @property
    def polynomials(self) -> tuple[Polynomial, ...]:
        """The coefficients of each step."""
        rounds = COEFFICIENTS[self.coefficients]
        return rounds * (self.steps // len(rounds))

    def updates(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of this published name and shape is Muon's."""
        is_matrix = name.startswith("layers.") and len(shape) == 2
        return is_matrix and not (self.matrices == "no-router" and name.endswith(_ROUTERS))

    def scale_of(self, outs: int, ins: int) -> float:
        """Return what an orthogonal update of a whole matrix is multiplied by."""
        usual = MATCHED_RMS * math.sqrt(max(outs, ins))
        return self.factor * (usual if self.scale == "match-rms" else math.sqrt(max(1, outs / ins)))


def iteration_flops(outs: int, ins: int) -> float:
    """Return the FLOPs of one step for one matrix: the product with its transpose along the longer
    side, that one's square, and the product of both with the matrix."""
    short, long = sorted((outs, ins))
    return 4.0 * short**2 * long + 2.0 * short**3
