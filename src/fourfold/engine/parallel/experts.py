"""Expert parallelism: tokens travel to the ranks that hold their experts, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fourfold.cost.count.params import chunk
from fourfold.engine.model.decoder import Decoder
from fourfold.engine.model.experts import (
    Dispatch,
    Experts,
    Join,
    MoeMlp,
    Reorder,
    Spread,
    copied_to_host,
    dispatch_local,
    on_host,
    sizes,
)
from fourfold.engine.model.router import Router, counted
from fourfold.engine.model.rows import order_rows, regroup_rows
from fourfold.engine.parallel.context import positions_of
from fourfold.engine.parallel.expert_groups import ExpertGroups, expert_groups
from fourfold.engine.parallel.groups import (
    Group,
    TwoWay,
    World,
    all_gather,
    all_reduce,
    gathered,
    scattered,
)
from fourfold.spec.run import RunSpec


def apply_experts(decoder: Decoder, spec: RunSpec, world: World) -> None:
    """Keep this rank's experts, say how tokens reach the others, and what a router cannot know of
    the rest of its sequences."""
    model, layout = spec.model, spec.layout
    if model.moe is None:
        return
    groups = expert_groups(world)
    _, ep, etp = groups.place
    first, last = chunk(model.experts, layout.ep, ep)
    left, right = chunk(model.moe.ffn, layout.etp, etp)
    for module in decoder.modules():
        if isinstance(module, MoeMlp):
            module.experts.cut(range(first, last), right - left)
            module.dispatch = dispatcher_of(spec, groups)
        if isinstance(module, Router):
            _place(module, spec, groups, world)


def _place(router: Router, spec: RunSpec, groups: ExpertGroups, world: World) -> None:
    router.sequence_parts = groups.sequence.size
    if groups.sequence.size > 1:
        router.sum_over_sequence = lambda counts: all_reduce(counts, groups.sequence)
        places = [places_of(spec, rank) for rank in groups.sequence.ranks]
        in_order = torch.cat(places).argsort()
        router.own_places = places[groups.sequence.rank]
        router.whole_sequence = lambda x: all_gather(x, groups.sequence, 1)[:, in_order]
    if spec.policy.routing == "forced":
        # Ranks begin at different experts: else all would send to the same ones first.
        router.forced_from = world.rank * spec.model.experts // max(1, groups.stage.size)


def places_of(spec: RunSpec, rank: int) -> Tensor:
    """Where a rank's tokens lie in their sequences."""
    layout, place = spec.layout, spec.layout.coordinates(rank)
    kind, seq_len = spec.policy.cp_kind, spec.batch.seq_len
    whole = positions_of(kind, seq_len, layout.cp, place["cp"], torch.device("cpu"))
    return whole.tensor_split(layout.tp)[place["tp"]]


def dispatcher_of(spec: RunSpec, groups: ExpertGroups) -> Dispatch:
    if groups.dispatch.size == 1:
        return dispatch_local
    if spec.policy.dispatcher == "allgather":
        return AllGatherDispatch(groups.dispatch, spec.model.experts, spec.layout.etp)
    return AllToAllDispatch(groups.dispatch, spec.model.experts, spec.layout.etp)


def exchange(x: Tensor, group: Group, sent: list[int], received: list[int]) -> Tensor:
    """All-to-all of rows: `sent[r]` go to rank r. By torch's plain call, which takes half as much
    of the host's time as a functional one."""
    got = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(got, x.contiguous(), received, sent, group=group.handle)
    return got


class RowExchange(nn.Module):
    """Rows to other ranks of a group; gradients take the same way back."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def forward(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        group = self.group
        there = lambda rows: exchange(rows, group, sent, received)  # noqa: E731
        return TwoWay.apply(rows, there, lambda grad: exchange(grad, group, received, sent))


Splits = Callable[[], list[list[int]]]


def chunked(values: list[int], size: int) -> list[list[int]]:
    return [values[i : i + size] for i in range(0, len(values), size)]


class AllToAllDispatch(nn.Module):
    """Each row goes to the rank that holds its expert; to all of them that share it (etp), whose
    partial outputs add up. One host wait: torch wants the numbers of rows as Python's."""

    def __init__(self, group: Group, experts: int, etp: int) -> None:
        super().__init__()
        self.group, self.experts, self.etp = group, experts, etp
        self.away, self.home = RowExchange(group), RowExchange(group)

    def forward(
        self, x_TD: Tensor, chosen_TK: Tensor, scores_TK: Tensor, experts: Experts
    ) -> Tensor:
        top_k, choices = chosen_TK.shape[1], chosen_TK.numel()
        source, places, ends = order_rows(chosen_TK.to(torch.int32), self.experts + 1)
        splits, arriving = self._splits(sizes(ends)[: self.experts], choices)
        rows = Spread.apply(x_TD, places, top_k)
        scores = Reorder.apply(scores_TK.flatten(), source, places)
        sent, received = splits()
        total = sum(sent) // self.etp
        dropped = choices - total  # choices of nobody, which come last
        if dropped:
            rows, scores = rows[:total], scores[:total]
        away = (self._copied(each, sent) for each in (rows, scores))
        rows, scores = (self.away(each, sent, received) for each in away)
        y = self._compute(rows, scores, arriving, experts)
        y = self._summed(self.home(y, received, sent), sent)
        if dropped:
            y = nn.functional.pad(y, (0, 0, 0, dropped))
        return Join.apply(y, places, top_k)

    def _splits(self, counts_E: Tensor, rows: int) -> tuple[Splits, Tensor]:
        """Rows sent to and received from each rank (a call that waits for the device), and received
        by rank and local expert."""
        size = self.group.size
        mine = counts_E.view(-1, 1, self.experts * self.etp // size)
        mine = mine.expand(-1, self.etp, -1).flatten(0, 1)
        one = [1] * size
        theirs = exchange(mine, self.group, one, one)
        tables = [copied_to_host(each.flatten(), rows * self.etp) for each in (mine, theirs)]

        def splits() -> list[list[int]]:
            return [[sum(part) for part in chunked(table(), mine.shape[1])] for table in tables]

        return splits, theirs

    def _copied(self, rows: Tensor, sent: list[int]) -> Tensor:
        """Rows of a destination once for each rank that shares its experts."""
        if self.etp == 1:
            return rows
        blocks = rows.split(sent[:: self.etp])
        return torch.cat([block for block in blocks for _ in range(self.etp)])

    def _summed(self, rows: Tensor, sent: list[int]) -> Tensor:
        if self.etp == 1:
            return rows
        blocks = rows.split(sent)
        heads = range(0, len(blocks), self.etp)
        return torch.cat([torch.stack(blocks[i : i + self.etp]).sum(0) for i in heads])

    def _compute(self, rows: Tensor, scores: Tensor, arriving: Tensor, experts: Experts) -> Tensor:
        """Rows come rank by rank, in each expert by expert; products want them expert by expert."""
        order, back, ends = regroup_rows(arriving, rows.shape[0])
        y = experts(Reorder.apply(rows, order, back), scores, order, ends)
        return Reorder.apply(y, back, order)


class AllGatherDispatch(nn.Module):
    """Every rank sees all tokens, computes those of its experts, and the results add up. Micro
    batches may differ in size: shorter ones are filled up."""

    def __init__(self, group: Group, experts: int, etp: int) -> None:
        super().__init__()
        self.group, self.etp = group, etp
        self.each = experts * etp // group.size

    def forward(
        self, x_TD: Tensor, chosen_TK: Tensor, scores_TK: Tensor, experts: Experts
    ) -> Tensor:
        tokens, top_k = chosen_TK.shape
        own = torch.tensor([tokens], device=x_TD.device)
        (most,) = on_host(all_reduce(own, self.group, "max"), tokens)
        fill = (0, 0, 0, most - tokens)
        x = gathered(nn.functional.pad(x_TD, fill), self.group, 0)
        scores = gathered(nn.functional.pad(scores_TK, fill), self.group, 0).flatten()
        nobody = nn.functional.pad(chosen_TK, fill, value=-1)
        local = gathered(nobody, self.group, 0).flatten()
        local = local - self.group.rank // self.etp * self.each
        local = torch.where((local < 0) | (local >= self.each), self.each, local)
        counts = counted(local, self.each + 1)[: self.each]
        share = local.shape[0] * self.etp // self.group.size
        order = local.argsort(stable=True)[: sum(on_host(counts, share))]
        each = torch.arange(order.shape[0], device=order.device)
        y = experts(x[order // top_k], scores[order], each, counts.cumsum(0).to(torch.int32))
        out = torch.zeros_like(x).index_add(0, order // top_k, y)
        return scattered(out, self.group, 0)[:tokens]
