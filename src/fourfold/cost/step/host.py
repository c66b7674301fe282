"""How fast can the host launch a layer? Seconds per layer and micro batch: a floor, not a sum.

A GPU never starves while its queue is full; it starves when the host needs longer to launch a
layer than the GPU to run it. Collectives cost the host more per extra rank, most so when the
fabric is in its slow state (nanotron table). Broadcasts.
"""

from __future__ import annotations

import numpy as np

from fourfold.cost.columns import Columns
from fourfold.cost.step.gemm import Coefficients, Floats
from fourfold.cost.step.traffic import crosses


def host_layer_s(c: Columns, coef: Coefficients) -> Floats:
    """Launch time of one layer, forward and backward."""
    slow = c.slow > 0
    launch = coef["host_s"] * np.where(slow, coef["slow_host"], 1.0)
    launch = launch * np.where(c.fused_host > 0, 0.5, 1.0)
    launch = launch * (1.0 + c.full_ckpt / 3.0) * (1.0 + 0.15 * (c.cp - 1.0))
    far = np.where(crosses(c, c.tp, np.ones_like(c.tp)), coef["slow_far"], 1.0)
    return launch + np.where(slow, (c.tp - 1.0) * coef["slow_tp_s"] * far, 0.0)


def floor(busy: Floats, launch: Floats) -> Floats:
    """Smooth maximum of GPU time and host time (12-norm)."""
    top = np.maximum(busy, launch)
    return top * ((busy / top) ** 12 + (launch / top) ** 12) ** (1.0 / 12.0)
