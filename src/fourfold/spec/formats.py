"""Which number formats does our engine use where, given a policy and a layout?

A policy names five. Two of them are not free everywhere: with zero2 and zero3 only a shard of the
gradient is kept, in the weights' format, and copies (zero0, or `dp2x4`) are summed in the format
gradients add up in. A report must say what ran.
"""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy
from fourfold.spec.words import AROUND, Dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """`products`: matrix products of layers; `activations`: everything else that computes.

    `reduce`: gradients on their way between ranks that saw other tokens; None: there are none.
    `copies`: the same between copies of a shard, where there are copies and shards.
    """

    weights: Dtype
    products: Dtype
    activations: Dtype
    grads: Dtype
    reduce: Dtype | None
    copies: Dtype | None
    moments: Dtype


def running(policy: Policy, layout: Layout) -> Formats:
    dtypes = policy.dtypes
    alone = layout.dp * layout.cp == 1
    shards = layout.shard * layout.cp if policy.zero else 1
    copies = layout.dp * layout.cp // shards
    reduce: Dtype | None = dtypes.reduce if shards > 1 else dtypes.grad
    return Formats(
        weights=dtypes.param,
        products=dtypes.compute,
        activations=AROUND.get(dtypes.compute, dtypes.compute),
        grads=dtypes.param if policy.zero >= 2 else dtypes.grad,
        reduce=None if alone else reduce,
        copies=dtypes.grad if copies > 1 and shards > 1 else None,
        moments=dtypes.optimizer,
    )
