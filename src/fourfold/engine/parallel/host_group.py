"""Process groups of a world, each made once; and one for ranks that share a GPU, which NCCL
refuses: messages go through host memory. (gloo has no sends of GPU tensors, and its collectives
crashed in layouts with several groups.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.engine import compat

_made: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]
] = weakref.WeakKeyDictionary()


def handle_of(axis: str, members: tuple[int, ...], cut: tuple[int, ...]) -> dist.ProcessGroup:
    """One for all layouts that follow each other in a world: threads of gloo's groups wake up a
    hundred times a second, used or not. `cut` is this rank's part of a division of all ranks into
    equal ones: such a part tells the others, so all ranks find theirs or none does. (torch names a
    group by how many its process has; ranks that had made fewer would wait for ever.)"""
    assert dist.group.WORLD is not None
    made = _made.setdefault(dist.group.WORLD, {})
    if (axis, cut) not in made:
        # The description tells who watches that stages send and receive: no equal counts there.
        handle = dist.new_group(list(members), use_local_synchronization=True, group_desc=axis)
        assert isinstance(handle, dist.ProcessGroup)
        made[axis, cut] = handle
    return made[axis, cut]


def cpu_group() -> dist.ProcessGroup:
    """All ranks, over gloo whatever the training uses; waiting on it uses neither GPU nor core.
    Collective."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


BACKEND = "host"


def use() -> str:
    """The backend's name, known to torch from now on."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, HostProcessGroup, devices=["cpu", "cuda"])
    return BACKEND


class _Message(dist.Work):
    """A message on its way between host memories, whose copy here it keeps until then; who waits
    for a received one has it copied to its `target`."""

    def __init__(self, work: dist.Work, host: Tensor, target: Tensor | None = None) -> None:
        super().__init__()
        self._work, self._host, self._target = work, host, target

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait()
        if self._target is not None:
            _put(self._target, self._host)
        return True


class OwnProcessGroup(dist.ProcessGroup):
    """What torch asks of a group that is written in Python, beside its collectives."""

    def __init__(self, rank: int, size: int, backend: str) -> None:
        super().__init__(rank, size)  # type: ignore[args]  (torch's stub knows another one)
        self._place, self._ranks, self._backend = rank, size, backend

    def size(self) -> int:
        return self._ranks

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return compat.group_names()[self]

    @property
    def pg_name(self) -> str:
        return self.group_name

    def getBackendName(self) -> str:  # noqa: N802  (torch calls it so)
        return self._backend

    # torch hands everything over by position: tensors first, then options. One tensor is a list of
    # one, and torch 2.13 calls some of them by new names.

    def _allgather_base(self, *args: Any, **_: Any) -> Any:
        return self.allgather_into_tensor_coalesced([args[0]], [args[1]])

    def _reduce_scatter_base(self, *args: Any, **_: Any) -> Any:
        return self.reduce_scatter_tensor_coalesced([args[0]], [args[1]], *args[2:])

    def all_gather_single_coalesced(self, *args: Any, **_: Any) -> Any:
        return self.allgather_into_tensor_coalesced(*args)

    def reduce_scatter_single_coalesced(self, *args: Any, **_: Any) -> Any:
        return self.reduce_scatter_tensor_coalesced(*args)

    def all_to_all_single(self, *args: Any, **_: Any) -> Any:
        return self.alltoall_base(*args)

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base


class HostProcessGroup(OwnProcessGroup):
    """Collectives are over when they return; sends and receives when they are waited for."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size, BACKEND)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def _in_place(self, call: Callable[..., Any], tensors: Sequence[Tensor], *rest: Any) -> Any:
        for tensor in tensors:
            host = _host(tensor)
            call([host], *rest).wait()
            _put(tensor, host)
        return _done()

    def allreduce(self, *args: Any, **_: Any) -> Any:
        return self._in_place(self._gloo.allreduce, *args)

    def allreduce_coalesced(self, *args: Any, **_: Any) -> Any:
        return self._in_place(self._gloo.allreduce, args[0], _summing(args[1]))

    def broadcast(self, *args: Any, **_: Any) -> Any:
        return self._in_place(self._gloo.broadcast, *args)

    def reduce(self, *args: Any, **_: Any) -> Any:
        return self._in_place(self._gloo.reduce, *args)

    def barrier(self, *args: Any, **_: Any) -> Any:
        self._gloo.barrier().wait()
        return _done()

    def send(self, *args: Any, **_: Any) -> Any:
        host = _host(args[0][0])
        return _Message(self._gloo.send([host], *args[1:]), host)

    def recv(self, *args: Any, **_: Any) -> Any:
        target = args[0][0]
        host = torch.empty_like(target, device="cpu")
        return _Message(self._gloo.recv([host], *args[1:]), host, target)

    def allgather(self, *args: Any, **_: Any) -> Any:
        """Lists of parts, one list for each input."""
        for parts, own in zip(args[0], args[1], strict=True):
            for part, host in zip(parts, self._gathered(own), strict=True):
                _put(part, host)
        return _done()

    def _gathered(self, own: Tensor) -> list[Tensor]:
        host = _host(own)
        parts = [torch.empty_like(host) for _ in range(self._ranks)]
        self._gloo.allgather([parts], [host]).wait()
        return parts

    def gather(self, *args: Any, **_: Any) -> Any:
        hosts = [[torch.empty_like(part, device="cpu") for part in parts] for parts in args[0]]
        self._gloo.gather(hosts, [_host(own) for own in args[1]], *args[2:]).wait()
        for parts, arrived in zip(args[0], hosts, strict=True):
            for part, host in zip(parts, arrived, strict=True):
                _put(part, host)
        return _done()

    def allgather_into_tensor_coalesced(self, *args: Any, **_: Any) -> Any:
        for whole, own in zip(args[0], args[1], strict=True):
            _put(whole.view(-1), torch.cat([part.view(-1) for part in self._gathered(own)]))
        return _done()

    def reduce_scatter_tensor_coalesced(self, *args: Any, **_: Any) -> Any:
        """All of it is summed, and this rank's part kept."""
        for part, whole in zip(args[0], args[1], strict=True):
            host = _host(whole).clone()
            self._gloo.allreduce([host], _summing(args[2])).wait()
            _put(part.view(-1), host.view(self._ranks, -1)[self._place])
        return _done()

    def alltoall_base(self, *args: Any, **_: Any) -> Any:
        got, own, *splits = args[:4]
        host = torch.empty_like(got, device="cpu")
        self._gloo.alltoall_base(host, _host(own), *splits).wait()
        _put(got, host)
        return _done()


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


@torch.no_grad()
def _put(target: Tensor, host: Tensor) -> None:
    if target.data_ptr() != host.data_ptr():
        target.detach().copy_(host)


def _summing(options: Any) -> dist.AllreduceOptions:
    """The same reduction as an all-reduce's."""
    same = dist.AllreduceOptions()
    same.reduceOp = options.reduceOp
    return same


def _done() -> Any:
    return compat.finished_work()
