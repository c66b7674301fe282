"""Pipeline parallelism: a rank's list of actions and transfers, run over micro batches that may
differ in size."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.cost.schedule import Action, global_order
from fourfold.engine.compat import activation_dtype
from fourfold.engine.model.decoder import Decoder
from fourfold.engine.parallel.groups import Group, World
from fourfold.spec.run import RunSpec
from fourfold.spec.words import Schedule

_TIME = {"F": 1, "B": 2, "I": 1, "W": 1}


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """Of the activations into `chunk` (kind F), or of the gradient of its output (kind B). `peer`
    is a pipeline rank."""

    is_send: bool
    kind: str
    chunk: int
    micro: int
    peer: int


@dataclass(frozen=True, slots=True)
class Exchange:
    transfers: tuple[Transfer, ...]


Step = Action | Exchange


@dataclass(frozen=True, slots=True)
class _Moment:
    """An action with its time."""

    rank: int
    action: Action
    start: int
    end: int


def plan(
    schedule: Schedule, *, stages: int, virtual_stages: int, micros: int, rank: int
) -> list[Step]:
    """Everything pipeline rank `rank` does in a step, in order. All ranks' lists are played against
    each other in one rough time; a transfer happens when its sender's action ends, and a receive
    that falls into an action is posted before it. Everybody posts in the order of time: what a rank
    waits for is earlier on every other rank too, so no list can deadlock, and between two ranks
    messages come in the same order on both sides."""
    chunks = stages * virtual_stages
    moments = _moments(schedule, stages=stages, virtual_stages=virtual_stages, micros=micros)
    own = [moment for moment in moments if moment.rank == rank]
    starts = [moment.start for moment in own]
    posted: dict[tuple[int, int], list[Transfer]] = {}
    for moment in moments:
        for transfer in _transfers(moment, rank, stages, chunks):
            at = moment.end
            if not transfer.is_send:
                before = own[max(0, bisect_left(starts, at) - 1)]
                at = before.start if before.start < at < before.end else at
            posted.setdefault((at, moment.end), []).append(transfer)
    # At one time exchanges come before the action that starts, in the order of their own time.
    steps: list[tuple[tuple[int, int, int], Step]] = []
    for (at, end), transfers in posted.items():
        steps.append(((at, 0, end), Exchange(tuple(sorted(transfers)))))
    steps += [((moment.start, 1, 0), moment.action) for moment in own]
    return [step for _, step in sorted(steps, key=lambda pair: pair[0])]


def _moments(schedule: Schedule, *, stages: int, virtual_stages: int, micros: int) -> list[_Moment]:
    last = stages * virtual_stages - 1
    order = global_order(schedule, stages=stages, virtual_stages=virtual_stages, micros=micros)
    free = [0] * stages
    ready: dict[tuple[str, int, int], int] = {}
    moments = []
    for rank, action in order:
        kind, target = _target(action)
        needs = 0 if action.kind == "W" else ready.get((kind, action.chunk, action.micro), 0)
        start = max(free[rank], needs)
        end = free[rank] = start + _TIME[action.kind]
        moments.append(_Moment(rank, action, start, end))
        if action.kind != "W" and 0 <= target <= last:
            ready[kind, target, action.micro] = end
    return moments


def _target(action: Action) -> tuple[str, int]:
    """What an action hands on (F activations, B a gradient), and the chunk that takes it."""
    return ("F", action.chunk + 1) if action.kind == "F" else ("B", action.chunk - 1)


def _transfers(moment: _Moment, rank: int, stages: int, chunks: int) -> Iterator[Transfer]:
    """What `rank` sends or receives when this action ends."""
    action = moment.action
    kind, target = _target(action)
    if action.kind == "W" or not 0 <= target < chunks:
        return
    receiver = target % stages
    if moment.rank == rank:
        yield Transfer(True, kind, target, action.micro, receiver)
    elif receiver == rank:
        yield Transfer(False, kind, target, action.micro, moment.rank)


# (chunk, micro batch) by which activations and gradients are found.
Key = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLink:
    """What travels between stages, and to whom: plain local tensors [micro, tokens, hidden], whose
    tokens are cut over tp under sequence parallelism. Both sides know the shapes beforehand."""

    group: Group
    shapes: Sequence[tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device


def stage_link(
    spec: RunSpec, world: World, sizes: Sequence[int], device: torch.device
) -> StageLink:
    """Of micro batches of these sizes."""
    parts = spec.layout.cp * (spec.layout.tp if spec.policy.sequence_parallel else 1)
    shapes = [(size, spec.batch.seq_len // parts, spec.model.hidden) for size in sizes]
    dtype = activation_dtype(spec.policy.dtypes.compute)
    return StageLink(group=world.pp, shapes=shapes, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """What is done with a chunk. `forward` gets None for the input of the first one and gives the
    loss of the last one. `before` is told which part of a backward pass (B, I or W) comes, and
    whether it is the step's last that makes gradients of this chunk. `split` ends an I, `weights`
    is a W: (chunk, micro batch)."""

    forward: Callable[[Decoder, int, Tensor | None], Tensor]
    before: Callable[[Decoder, str, bool], None]
    split: Callable[[Decoder, int], None]
    weights: Callable[[Decoder, int], None]


class Pipeline:
    """One step of one rank. `chunks` by their number among those of all ranks."""

    def __init__(self, chunks: Mapping[int, Decoder], link: StageLink, passes: Passes) -> None:
        self.chunks, self.link, self.passes = chunks, link, passes
        self.executed: list[Action] = []
        self.losses: list[Tensor] = []
        self.inputs: dict[Key, Tensor] = {}
        self.outputs: dict[Key, Tensor] = {}
        self.grads: dict[Key, Tensor] = {}
        self.to_send: dict[Key, Tensor] = {}
        self.receiving: dict[tuple[str, Key], dist.Work] = {}
        self.sending: list[tuple[dist.Work, Tensor]] = []

    def run(self, plan: Sequence[Step]) -> list[Tensor]:
        """Losses of the micro batches, detached; none but on the rank of the last chunk."""
        steps = (step for step in plan if isinstance(step, Action))
        left = Counter(step.chunk for step in steps if step.kind in "BW")
        for step in plan:
            if isinstance(step, Exchange):
                self._exchange(step)
                continue
            if step.kind == "F":
                self._forward(step)
            else:
                left[step.chunk] -= step.kind in "BW"
                self._backward(step, last=left[step.chunk] == 0)
            self.executed.append(step)
        self._finish_sending()
        return self.losses

    def _forward(self, action: Action) -> None:
        chunk, key = self.chunks[action.chunk], (action.chunk, action.micro)
        self._wait("F", key)
        output = self.passes.forward(chunk, action.micro, self.inputs.get(key))
        self.outputs[key] = output
        if chunk.is_last:
            self.losses.append(output.detach())
        else:
            self.to_send[key] = output.detach()

    def _backward(self, action: Action, *, last: bool) -> None:
        chunk, key = self.chunks[action.chunk], (action.chunk, action.micro)
        if action.kind == "W":
            self.passes.before(chunk, "W", last)
            self.passes.weights(chunk, action.micro)
            return
        self._wait("B", key)
        self.passes.before(chunk, action.kind, last)
        output = self.outputs.pop(key)
        torch.autograd.backward(output, None if chunk.is_last else self.grads.pop(key))
        if action.kind == "I":
            self.passes.split(chunk, action.micro)
        if not chunk.is_first:
            grad = self.inputs.pop(key).grad
            assert grad is not None
            self.to_send[key] = grad

    def _wait(self, kind: str, key: Key) -> None:
        work = self.receiving.pop((kind, key), None)
        if work is not None:
            work.wait()

    def _exchange(self, exchange: Exchange) -> None:
        """Post all transfers. What is received is waited for where it is used; what is sent may be
        on its way until this rank sends again."""
        if any(transfer.is_send for transfer in exchange.transfers):
            self._finish_sending()
        posted = [self._post(transfer) for transfer in exchange.transfers]
        works = dist.batch_isend_irecv([op for op, _ in posted])
        if len(works) != len(posted):  # NCCL joins a batch into one piece of work
            works = [works[0]] * len(posted)
        for work, (_, tensor), transfer in zip(works, posted, exchange.transfers, strict=True):
            if transfer.is_send:
                self.sending.append((work, tensor))
            else:
                self.receiving[transfer.kind, (transfer.chunk, transfer.micro)] = work

    def _finish_sending(self) -> None:
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()

    def _post(self, transfer: Transfer) -> tuple[dist.P2POp, Tensor]:
        group, micro = self.link.group, transfer.micro
        key = (transfer.chunk, micro)
        if transfer.is_send:
            # Its own output goes to the next chunk, the gradient of its input to the one before.
            source = transfer.chunk + (-1 if transfer.kind == "F" else 1)
            tensor = self.to_send.pop((source, micro)).contiguous()
        else:
            link = self.link
            tensor = torch.empty(link.shapes[micro], dtype=link.dtype, device=link.device)
            if transfer.kind == "F":
                self.inputs[key] = tensor.requires_grad_()
            else:
                self.grads[key] = tensor
        op = dist.isend if transfer.is_send else dist.irecv
        target = group.ranks[transfer.peer]
        return dist.P2POp(op, tensor.detach(), target, group=group.handle), tensor
