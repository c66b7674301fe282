"""What is wrapped around a layer's forward: recompute, compile, offload. Names of parameters stay,
and FSDP's hooks stay outside."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold.engine import compat
from fourfold.engine.model.decoder import Decoder, Layer
from fourfold.engine.model.experts import MoeMlp
from fourfold.spec.policy import Policy


def apply_recompute(decoder: Decoder, policy: Policy) -> None:
    """`selective` the attention core; else whole layers of this model chunk."""
    if policy.recompute == "selective":
        for layer in decoder.blocks.values():
            _wrap(layer.attention.core)
    for mlp in (layer.mlp for layer in decoder.blocks.values()):
        if isinstance(mlp, MoeMlp) and policy.recompute == "moe":
            _wrap(mlp)
        if isinstance(mlp, MoeMlp) and policy.recompute == "moe-act":
            mlp.experts.activate = _again(mlp.experts.activate)
    for index in policy.recomputed_layers(tuple(decoder.blocks)):
        _wrap(decoder.blocks[index])


def _wrap(module: nn.Module) -> None:
    module.forward = _again(module.forward)


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    def again(*args: Any) -> Any:
        # No dropout anywhere, so no generator state to restore.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)

    return again


def apply_compile(
    decoder: Decoder, *, enabled: bool, backend: str = "inductor", shapes: int = 2
) -> None:
    """Each layer on its own, so that one small graph serves all. Shapes are static: a run has one
    size of micro batch, or two (a ramp-up may have more), and each gets its own fast code."""
    if not enabled:
        return
    compat.allow_graphs(2 * shapes)
    compat.keep_rows_whole()
    compat.recompute_inside_functions()
    fast = functools.partial(torch.compile, backend=backend, fullgraph=True, dynamic=False)
    for layer in decoder.blocks.values():
        if not isinstance(layer.mlp, MoeMlp):
            layer.forward = fast(layer.forward)
            continue
        # Routed experts stay outside: the number of an expert's rows is not static, and routers
        # count tokens while gradients are computed.
        layer.attend = fast(layer.attend)
        if layer.mlp.shared is not None:
            layer.mlp.shared.forward = fast(layer.mlp.shared.forward)


# Below this a transfer costs more than it frees. Real CPU ranks only prove: there everything goes.
_SMALLEST_BYTES = 2**20
# Layers whose copies to the host may be under way while the next one computes.
_LEAVING_LAYERS = 1


class Packed:
    """One tensor on the host, and its copy on the device while it is on its way back. Both device
    tensors belong to the stream that computes, which waits for a copy before it gives up their
    bytes: they are free for the next layer at a known moment. Marking them as used by the side
    stream instead would keep them until the host happens to look, by then a step too late.
    `strided`: compiled code wants even a view of part of a tensor back with its strides."""

    def __init__(self, tensor: Tensor, side: torch.cuda.Stream | None, *, strided: bool) -> None:
        self.side, self.device = side, tensor.device
        self.strides = tensor.stride() if strided else None
        self.back: Tensor | None = None
        self.arrived: torch.cuda.Event | None = None
        self._lent: weakref.ref[Tensor] | None = None
        # Modes are those of a ledger or of fake tensors: neither shall count the host's copy.
        with compat.without_modes():
            if side is None:
                self.host = tensor.detach().clone()
                return
            self.host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.host.copy_(tensor.detach(), non_blocking=True)

    def fetch(self) -> None:
        """Start the way back; twice is once."""
        if self.back is not None:
            return
        strides = self.strides or self.host.stride()
        empty = self.host.new_empty_strided(self.host.shape, strides, device=self.device)
        if self.side is None:
            self.back = empty.copy_(self.host)
            return
        self.back = empty
        self.side.wait_stream(torch.cuda.current_stream())  # whose bytes these were until now
        with torch.cuda.stream(self.side):
            self.back.copy_(self.host, non_blocking=True)
        self.arrived = None

    def take(self) -> Tensor:
        """The tensor on the device, for whoever computes now; the copy here is given up."""
        lent = None if self._lent is None else self._lent()
        if lent is not None:
            return lent
        self.fetch()
        back, self.back = self.back, None
        assert back is not None
        if self.side is not None:
            current = torch.cuda.current_stream()
            if self.arrived is None:
                current.wait_stream(self.side)
            else:
                current.wait_event(self.arrived)
        self._lent = weakref.ref(back)
        return back


class Bag:
    """What one layer kept in one forward pass, and the bag of the layer before it."""

    def __init__(self, offloader: Offloader, before: Bag | None, stay: Iterable[Tensor]) -> None:
        self.offloader, self.before = offloader, before
        self.stay = {compat.storage_key(tensor) for tensor in stay}
        self.packed: list[weakref.ref[Packed]] = []
        self._known: dict[tuple[Any, ...], tuple[weakref.ref[Any], Packed]] = {}
        self._begun = False

    def pack(self, tensor: Tensor) -> Tensor | tuple[Bag, Packed]:
        if self._stays(tensor):
            return tensor
        # Two operators may keep the same tensor. Its storage's address may be used again, so it
        # must still be alive.
        layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        key = (compat.storage_key(tensor), layout, compat.version_of(tensor))
        storage = tensor.untyped_storage()
        known = self._known.get(key)
        if known is not None and known[0]() is storage:
            return self, known[1]
        packed = Packed(tensor, self.offloader.side, strided=self.offloader.strided)
        self.offloader.keep(tensor)
        self._known[key] = weakref.ref(storage), packed
        self.packed.append(weakref.ref(packed))
        return self, packed

    def close(self) -> None:
        """The forward pass is over: nothing more comes, and autograd alone holds what was kept."""
        self._known.clear()

    def _stays(self, tensor: Tensor) -> bool:
        spread = 0 in tensor.stride() and tensor.numel() > 1  # one value seen many times
        # By the storage: a small view (keys of a fused product) keeps all of it.
        size = tensor.untyped_storage().nbytes()
        small = size < self.offloader.smallest_bytes or not tensor.is_floating_point()
        return small or spread or compat.storage_key(tensor) in self.stay

    def begin(self) -> None:
        """The backward pass has reached this layer: it and the one before start their way back."""
        if self._begun:
            return
        self._begun = True
        self.offloader.wait_leaving(0)
        self.fetch()
        if self.before is not None:
            self.before.fetch()
            self.before = None

    def fetch(self) -> None:
        """All that is left of the bag. Who takes one waits for all: one that nobody takes must not
        be given up while it is still being filled."""
        alive = [packed for reference in self.packed if (packed := reference()) is not None]
        self.packed.clear()
        for packed in alive:
            packed.fetch()
        arrived = self.offloader.mark()
        for packed in alive:
            packed.arrived = arrived


def _unpack(saved: Tensor | tuple[Bag, Packed]) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    bag, packed = saved
    bag.begin()
    return packed.take()


class Offloader:
    """Of one chunk: its side stream, the bag filled last, and what is still on its way out. What
    layers keep for the backward pass leaves while the forward pass computes on, and comes back one
    layer ahead. Weights (and views of them), tables and small tensors stay. On CPU both sides are
    the same memory: the copies prove the route, and the ledger does not see the host's."""

    def __init__(self, device_type: str, *, strided: bool = False) -> None:
        cuda, self.strided = device_type == "cuda", strided
        self.side = torch.cuda.Stream() if cuda else None
        real = not cuda and dist.get_backend() != "fake"
        self.smallest_bytes = 1 if real else _SMALLEST_BYTES
        self.last: Bag | None = None
        self._leaving: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()
        self._now: list[Tensor] = []

    def keep(self, tensor: Tensor) -> None:
        """Until its copy is done; a copy on CPU is."""
        if self.side is not None:
            self._now.append(tensor.detach())

    def mark(self) -> torch.cuda.Event | None:
        """The moment at which the side stream has done all that it was given so far."""
        if self.side is None:
            return None
        event = torch.cuda.Event()
        event.record(self.side)
        return event

    def wait_leaving(self, layers: int) -> None:
        """Let go of what left for the host, but for the last `layers` layers."""
        if self._now:
            event = self.mark()
            assert event is not None
            self._leaving.append((event, self._now))
            self._now = []
        while len(self._leaving) > layers:
            event, _ = self._leaving.popleft()
            torch.cuda.current_stream().wait_event(event)

    def wrap(self, layer: Layer, *, first: bool) -> Callable[..., Tensor]:
        forward = layer.forward

        def offloaded(x: Tensor, tables: Any) -> Tensor:
            given = (table for table in tables if table is not None)
            before = None if first else self.last
            self.last = bag = Bag(self, before, (*layer.parameters(), *given))
            with torch.autograd.graph.saved_tensors_hooks(bag.pack, _unpack):
                out = forward(x, tables)
            bag.close()
            self.wait_leaving(_LEAVING_LAYERS)
            return out

        return offloaded


def apply_offload(decoder: Decoder, policy: Policy, device_type: str) -> None:
    if policy.offload == "none":
        return
    offloader = Offloader(device_type, strided=policy.compile)
    for place, layer in enumerate(decoder.blocks.values()):
        layer.forward = offloader.wrap(layer, first=place == 0)
