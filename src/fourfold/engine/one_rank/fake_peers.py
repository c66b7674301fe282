"""A world of which only one rank exists: collectives answer at once, with values made from its own,
so that kernels meet ordinary numbers (zeros draw less power, NaNs spread)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from fourfold.engine import compat
from fourfold.engine.data.source import Source
from fourfold.engine.model.decoder import IGNORE
from fourfold.engine.parallel.host_group import OwnProcessGroup
from fourfold.engine.parallel.tensor import VocabEmbedding
from fourfold.engine.training.trainer import Trainer

BACKEND = "filling"
FILL = "fake_peers::fill"  # what a profile calls the making of received values
# A received gradient: small, as gradients are, and far from the smallest number of any format.
_GRADIENT_SCALE = 1e-2
# More than activations of a layer: weights that data-parallel ranks gather beside the compute.
_LARGE_BYTES = 100 * 2**20


@dataclass(frozen=True, slots=True)
class Fill:
    """What was written in another rank's place: `parts` copies of `elements`, or noise."""

    kind: str
    elements: int
    parts: int
    dtype: torch.dtype


@dataclass(slots=True)
class TrafficLog:
    """Messages by interval between the beginnings of two phases: payload bytes by (group's name,
    kind), calls under `kind calls`. Fills by phase."""

    intervals: list[tuple[str, Counter[tuple[str, str]]]] = field(
        default_factory=lambda: [("", Counter())]
    )
    fills: Counter[tuple[str, str, Fill]] = field(default_factory=Counter)

    def enter(self, phase: str) -> None:
        self.intervals.append((phase, Counter()))

    def sent(self, group: str, kind: str, size: int) -> None:
        self.intervals[-1][1].update({(group, kind): size, (group, f"{kind} calls"): 1})

    def filled(self, group: str, fill: Fill) -> None:
        self.fills[self.intervals[-1][0], group, fill] += 1

    def take(self) -> TrafficLog:
        """All since it was taken before."""
        taken = TrafficLog(self.intervals, self.fills)
        self.intervals, self.fills = [("", Counter())], Counter()
        return taken

    @property
    def total(self) -> Counter[tuple[str, str]]:
        total = Counter[tuple[str, str]]()
        for _, counts in self.intervals:
            total.update(counts)
        return total

    def of(self, key: tuple[str, str]) -> dict[str, list[float]]:
        """By phase, what each of its intervals moved."""
        moved: dict[str, list[float]] = {}
        for phase, counts in self.intervals:
            moved.setdefault(phase, []).append(float(counts[key]))
        return moved


class FillingProcessGroup(OwnProcessGroup):
    """A group of a world whose other ranks do not exist: gathered parts are copies of the rank's
    own, a reduced shard is its own part, a received activation is normal noise."""

    def __init__(self, rank: int, size: int, traffic_log: TrafficLog) -> None:
        super().__init__(rank, size, BACKEND)
        self._log = traffic_log

    def _done(self, op: str, payload: Sequence[Tensor] = ()) -> Any:
        if payload and self._ranks > 1:
            self._log.sent(self.group_name, op, sum(tensor.nbytes for tensor in payload))
        return compat.finished_work()

    def _fill(self, kind: str, target: Tensor, parts: int = 1) -> None:
        """Note a fill; groups of one rank only hand their own values back."""
        if self._ranks > 1:
            made = Fill(kind, target.numel() // parts, parts, target.dtype)
            self._log.filled(self.group_name, made)

    # In place, nothing arrives.

    def allreduce(self, *args: Any, **_: Any) -> Any:
        return self._done("all-reduce", args[0])

    def allreduce_coalesced(self, *args: Any, **_: Any) -> Any:
        return self._done("all-reduce", args[0])

    def broadcast(self, *args: Any, **_: Any) -> Any:
        return self._done("broadcast", args[0])

    def barrier(self, *args: Any, **_: Any) -> Any:
        return self._done("barrier")

    def send(self, *args: Any, **_: Any) -> Any:
        return self._done("send", args[0])

    # Something arrives.

    def recv(self, *args: Any, **_: Any) -> Any:
        """From the rank before come activations, from the one after their gradients."""
        tensors, source = args[0], args[1]
        for tensor in tensors:
            self._fill("noise", tensor)
            receive(tensor, 1.0 if source < self._place else _GRADIENT_SCALE)
        return self._done("recv", tensors)

    def allgather(self, *args: Any, **_: Any) -> Any:
        """Lists of parts, one list for each input."""
        for parts, own in zip(args[0], args[1], strict=True):
            for part in parts:
                self._fill("copies", part)
                copy(part, own)
        return self._done("all-gather", [part for parts in args[0] for part in parts])

    def allgather_into_tensor_coalesced(self, *args: Any, **_: Any) -> Any:
        for whole, own in zip(args[0], args[1], strict=True):
            self._fill("copies", whole, self._ranks)
            gather(whole, own, self._ranks)
        return self._done("all-gather", args[0])

    def reduce_scatter_tensor_coalesced(self, *args: Any, **_: Any) -> Any:
        for part, whole in zip(args[0], args[1], strict=True):
            self._fill("copies", part)
            copy(part, whole.view(self._ranks, -1)[self._place])
        return self._done("reduce-scatter", args[1])

    def alltoall_base(self, *args: Any, **_: Any) -> Any:
        """As much as this rank sends arrives, but where the parts are uneven."""
        got, own = args[0], args[1]
        self._fill("copies" if got.numel() == own.numel() else "noise", got)
        if got.numel() == own.numel():
            copy(got, own)
        else:
            receive(got, 1.0)
        return self._done("all-to-all", [max(got, own, key=Tensor.numel)])


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """Tokens `first` to `last` only, of which this rank has the embeddings: those of the others,
    which peers would have sent, would be zeros, and gradients through the norm of zeros grow by
    orders of magnitude with every layer."""

    source: Source
    first: int
    last: int

    @property
    def waited_s(self) -> float:
        return self.source.waited_s

    def batch(self, first: int, sequences: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        tokens, targets = self.source.batch(first, sequences, positions)
        rows = self.last - self.first
        own = torch.where(targets == IGNORE, targets, self.first + targets % rows)
        return self.first + tokens % rows, own

    def ahead(self, first: int, sequences: Sequence[Tensor], positions: Tensor) -> None:
        self.source.ahead(first, sequences, positions)


def restrict_to_vocab_shard(trainer: Trainer) -> None:
    for chunk in trainer.chunks:
        if isinstance(chunk.embedding, VocabEmbedding):
            rows = chunk.embedding.first, chunk.embedding.last
            trainer.source = OwnTokens(trainer.source, *rows)


def _named() -> AbstractContextManager[object]:
    """A mark for a profile; without one it would only cost the host time."""
    return record_function(FILL) if compat.is_profiled() else nullcontext()


@torch.no_grad()
def gather(output: Tensor, part: Tensor, parts: int) -> None:
    """Every part of `output` becomes a copy of this rank's, which may itself lie inside it.

    Large ones by copies of plain memory, twice as long each time: those need no multiprocessors,
    as what arrives over a link needs few.
    """
    rows, own = output.detach().view(parts, -1), part.detach().reshape(-1)
    at, each = own.data_ptr() - rows.data_ptr(), own.numel() * own.element_size()
    inside = 0 <= at < parts * each
    with _named():
        if parts * each > _LARGE_BYTES:
            if at != 0:
                rows[0].copy_(own)
            for done in (1 << i for i in range((parts - 1).bit_length())):
                rows[done : 2 * done].copy_(rows[: min(done, parts - done)])
        elif not inside:
            rows.copy_(own)
        else:
            place = at // each
            rows[:place].copy_(own)
            rows[place + 1 :].copy_(own)


@torch.no_grad()
def copy(output: Tensor, own: Tensor) -> None:
    with _named():
        if output.data_ptr() != own.data_ptr():
            output.detach().view(-1).copy_(own.detach().reshape(-1))


@torch.no_grad()
def receive(tensor: Tensor, scale: float) -> None:
    values = tensor.detach()
    with _named():
        if values.is_floating_point():
            values.normal_(0.0, scale)
        else:
            values.zero_()  # a place in a table: 0 is in every range


def join(rank: int, world: int, traffic_log: TrafficLog) -> None:
    """Make the default process group, as `rank` of `world`; messages are counted in the log."""

    def make(store: Any, place: int, size: int, timeout: Any) -> FillingProcessGroup:
        return FillingProcessGroup(place, size, traffic_log)

    # A name can be given once in a process; each world has its own book, so its own name.
    taken = dist.Backend.backend_list
    name = next(name for i in range(len(taken) + 1) if (name := f"{BACKEND}{i}") not in taken)
    dist.Backend.register_backend(name, make, devices=["cpu", "cuda"])
    dist.init_process_group(name, rank=rank, world_size=world, store=compat.fake_store())
