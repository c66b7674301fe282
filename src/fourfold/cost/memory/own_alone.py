"""What does a rank of our own engine hold where nobody else sees other tokens (dp x cp = 1)?

Whole weights stay, in the format they compute in beside the one they are updated in, and nothing is
sent. Gradients of the first micro batch stay as the backward pass made them; the second makes them
as wide as sums are; the update wants them as wide as the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats


@dataclass(frozen=True, slots=True)
class Params:
    """Weights of a stage: all, of its ends, of its head; of all layers but the lowest."""

    all: Floats
    root: Floats
    head: Floats
    through: Floats


@dataclass(frozen=True, slots=True)
class Moments:
    """Activations at hand in the loss, when the head's gradient comes, in the top and the lowest
    layer, after the last one, and in a split backward pass (0: it is not split)."""

    loss: Floats
    head: Floats
    top: Floats
    lowest: Floats
    end: Floats
    split: Floats


def is_alone(c: Columns) -> NDArray[np.bool_]:
    """Under zero3 FSDP frees weights between uses even then (engine/parallel/order.py)."""
    return (c.dp * c.cp == 1) & (c.zero < 3)


def alone(
    c: Columns,
    w: Params,
    micros: Floats,
    places: Moments,
    others: tuple[Floats, Floats, Floats],
    *,
    later: bool,
) -> tuple[Floats, ...]:
    """(weights as they compute, gradients so far, the fullest moment) of such ranks, and as in
    `others` of all others. `later`: gradients of an earlier micro batch are there."""
    a, g, p = c.act_bytes, c.acc_bytes, c.param_bytes
    copies = np.where(p != a, w.all * a, 0.0)
    second = later & (micros < 3)
    before = np.where(second, a, g) if later else np.zeros_like(a)
    # What a gradient adds when it comes, and what of it stays.
    coming = np.where(second & (a != g), a + g, a)
    stays = np.where(second, g - a, 0.0) if later else a
    # Compiled, the update reads gradients of a single micro batch as they are.
    single = np.where(c.own_kernels > 0, a, p)
    update = np.where(micros < 2, single, p if later else before + stays) - before
    moments = (
        places.loss,
        places.split,
        places.head + w.head * coming,
        places.top + w.head * stays,
        places.lowest + (w.head + w.through) * stays,
        places.end + w.root * coming + (w.all - w.root) * stays,
        w.all * update,
    )
    own = (copies, w.all * before, np.maximum.reduce(np.broadcast_arrays(*moments)))
    use = is_alone(c)
    return tuple(np.where(use, here, there) for here, there in zip(own, others, strict=True))
