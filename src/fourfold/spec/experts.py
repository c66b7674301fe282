"""Experts and latent attention: what a layer has in place of one MLP, or of plain heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fourfold.spec import check

# What a router makes of its logits. sqrtsoftplus: the root of log(1 + e^x).
Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]
# Over the tokens of a batch, or of each sequence apart.
Balance = Literal["none", "batch", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """A router sends each token to `top_k` of `experts` (fields of the shape), MLPs of width `ffn`;
    shared experts, `shared_ffn` wide in all, see every token, through a gate or not.

    The first `dense_first` layers have one MLP instead, and of the others all but each `every`-th.
    A score is `normalised` over the chosen and multiplied by `scale`. `groups` of experts: only the
    best `group_top_k` are chosen from, by their best score or the sum of the best two.
    `choice_bias`: added to scores for the choice alone, moved by `bias_rate` a step towards experts
    with too few tokens. `balance` adds balance_weight x experts x sum(share of tokens x mean score)
    to the loss, shares being those of the sequence, or of the batch before: so no layout, micro
    batch or schedule changes it. `z_weight` times the mean square of the logits' logsumexp too.
    `capacity`: an expert takes at most so many times its even share of a sequence, and drops the
    tokens after that; 0: none are dropped.
    """

    ffn: int
    shared_ffn: int = 0
    shared_gate: bool = False
    dense_first: int = 0
    every: int = 1
    score: Score = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    group_top_k: int = 1
    group_score: Literal["best", "best-two"] = "best"
    choice_bias: bool = False
    bias_rate: float = 1e-3
    router_bias: bool = False
    expert_bias: bool = False
    balance: Balance = "batch"
    balance_weight: float = 1e-3
    z_weight: float = 0.0
    capacity: float = 0.0

    def __post_init__(self) -> None:
        check.whole(1, 2**32, ffn=self.ffn)
        check.whole(0, 2**32, shared_ffn=self.shared_ffn)
        check.whole(0, 100_000, dense_first=self.dense_first)
        check.whole(1, 100_000, every=self.every, groups=self.groups, group_top_k=self.group_top_k)
        check.positive(scale=self.scale)
        weights = ("bias_rate", "balance_weight", "z_weight", "capacity")
        for name in weights:
            value = getattr(self, name)
            check.that(0 <= value < 1e6, name, value, "must be from 0 to a million")
        gated = not self.shared_gate or self.shared_ffn > 0
        check.that(gated, "shared_gate", self.shared_gate, "needs shared_ffn")
        few = self.group_top_k <= self.groups
        check.that(few, "group_top_k", self.group_top_k, f"must be at most groups={self.groups}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Latent attention (MLA): keys and values of all heads come from `kv_rank` numbers a token,
    queries from `q_rank` (0: from the hidden state itself). A head's queries and keys are `nope`
    channels without positions and `rope` with them, the latter of keys shared by all heads."""

    kv_rank: int
    nope: int
    rope: int
    v: int
    q_rank: int = 0

    def __post_init__(self) -> None:
        check.whole(1, 2**20, kv_rank=self.kv_rank, nope=self.nope, rope=self.rope, v=self.v)
        check.whole(0, 2**20, q_rank=self.q_rank)
        check.that(self.rope % 2 == 0, "rope", self.rope, "must be even")
