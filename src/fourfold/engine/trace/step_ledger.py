"""A ledger that lists steps. Inside a step, messages, matrix products and attention kernels (the
rounds of a ring) are steps of their own."""

from __future__ import annotations

from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fourfold.engine import compat
from fourfold.engine.compat import DTYPES
from fourfold.engine.observe.ledger import Ledger
from fourfold.engine.observe.operators import OPS, is_attention, is_collective
from fourfold.result.trace import How, MessageCount, MessageOp, StepCount, TensorCount

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_COPIES = (
    "_to_copy",
    "cat",
    "chunk_cat",
    "clone",
    "repeat",
    "repeat_interleave",
    "stack",
    "index_select",
    "split_with_sizes_copy",
)
_MADE = ("empty", "empty_like")  # what a kernel, or a message, writes into
HOLD, WEIGHTS, WEIGHTS_AGAIN = "hold", "weights", "weights again"
# FSDP's own operators: what they belong to, whichever module is at work.
_FSDP_STEPS = {"all_gather_copy_in": WEIGHTS_AGAIN, "chunk_cat": f"{WEIGHTS}, back"}
_BLOCK = ", block"
_BLOCKS, _D_BLOCKS = ("block", "lse"), ("d_q_block", "d_k_block", "d_v_block")


class StepLedger(Ledger):
    """`axes`: group name -> what the steps call it; messages within other groups go nowhere."""

    def __init__(self, axes: dict[str, str]) -> None:
        super().__init__(axes)
        # Of autograd's graph, and held only until it goes back.
        self.nodes: set[Any] = set()
        self.steps: list[StepCount] = []
        self._written: dict[int, TensorCount] = {}
        self._step = StepCount(HOLD)
        self.mark("0")

    # Steps.

    @property
    def step(self) -> str:
        """What is at work; blocks of attention are one thing."""
        return self._step.name.removesuffix(_BLOCK)

    def begin_step(self, name: str) -> None:
        """What follows belongs to `name`; steps in which nothing happened are not listed."""
        step = self._step
        if step.tensors or step.flops or step.messages:
            step.live_bytes, step.peak_bytes = self.live_bytes, self.phase_bytes[self.phase]
            ops = " and ".join(dict.fromkeys(message.op for message in step.messages))
            if ops and not step.flops:
                step.name += f", {ops}"
            self.steps.append(step)
        self._step = StepCount(name)
        self.mark(str(len(self.steps)))
        self.phase_bytes[self.phase] = self.live_bytes

    def enter_step(self, name: str) -> None:
        """Begin `name` unless it is at work."""
        if self.step != name:
            self.begin_step(name)

    def _split(self, func: Any, short: str) -> None:
        """Begin another step where this operator does something else than the present one."""
        fsdp_step = _FSDP_STEPS.get(short) if func.namespace == "fsdp" else None
        if fsdp_step and self.step != WEIGHTS:
            self.enter_step(fsdp_step)
        kind, step = _kind(func, short), self._step
        if kind == "attention":
            if step.tensors or step.kind:
                self.begin_step(f"{self.step}{_BLOCK}")
        elif kind and step.kind not in ("", kind, "attention"):
            self.begin_step(step.name)
        self._step.kind = self._step.kind or kind

    def _operator(self, name: str) -> None:
        if name not in self._step.operators:
            self._step.operators += (name,)

    # Names.

    def name(self, tensor: Tensor, name: str) -> None:
        """Call a tensor so from now on, and its gradient `d_name`; a view of another is listed."""
        local = compat.local(tensor)
        written = self._find(local)
        if written is not None and written.bytes > local.numel() * local.element_size():
            self._list(local, name, "view").named = True
        elif written is not None and not written.named:
            written.name, written.named, written.shape = name, True, tuple(local.shape)
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: self.name(grad, f"d_{name}"))

    def _list(self, tensor: Tensor, name: str, how: How) -> TensorCount:
        dtype = _NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        size = tensor.numel() * tensor.element_size()
        written = TensorCount(name, tuple(tensor.shape), dtype, how, size)
        if tensor.numel() > 1:
            self._step.tensors += (written,)
        return written

    def _find(self, tensor: Tensor) -> TensorCount | None:
        return self._written.get(compat.storage_key(tensor))

    # What the ledger sees.

    def see(self, tensor: Tensor, op: str = "given") -> None:
        known = len(self._allocations)
        super().see(tensor, op)
        if len(self._allocations) > known:
            short = op.partition("::")[2]
            how = "copied" if short in _COPIES else "received" if short in OPS else "new"
            name = "result" if short in _MADE else short.strip("_")
            self._written[compat.storage_key(tensor)] = self._list(tensor, name, how)

    def _forget(self, key: int) -> None:
        super()._forget(key)
        self._written.pop(key, None)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        super()._resized(storage)
        written = self._written.get(compat.storage_key(storage))
        if written is not None and storage.nbytes():
            self._step.tensors += (written,)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return super().__torch_dispatch__(func, types, args, kwargs)
        short = compat.op_name(func).partition("::")[2]
        if not self._paused:
            self._split(func, short)
        flops, traffic, listed = self.flops, self.traffic.copy(), len(self._step.tensors)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is NotImplemented or self._paused:
            return out
        step = self._step
        step.flops += self.flops - flops
        for (axis, op), size in (self.traffic - traffic).items():
            if axis in self.axes.values():
                step.messages += (_message(axis, op, size, args),)
                self._operator(f"{step.messages[-1].op} over {axis}")
        if is_attention(func):
            self._attended(func, args, kwargs, out, self.flops - flops)
        elif func.namespace == "c10d":
            self._filled(args[0], "received")
        elif func.namespace == "fsdp":
            self._filled((args, kwargs), "copied")
        elif short not in (*OPS, *_MADE) and (len(step.tensors) > listed or short.endswith("_")):
            self._operator(short.strip("_"))
        return out

    def _filled(self, arguments: Any, how: How) -> None:
        """What operators of FSDP and c10d write into was made empty before."""
        for leaf in compat.tree_leaves(arguments):
            written = self._find(leaf) if isinstance(leaf, Tensor) else None
            if written is not None and written.how != "received" and not written.named:
                written.how = how
                written.name = written.name.replace("result", "buffer")

    def _attended(self, func: Any, args: Any, kwargs: Any, out: Any, flops: int) -> None:
        """A causal kernel computes half of the square. Its backward on a GPU holds, inside, the
        gradient of queries in fp32 and those of keys and values for every query head."""
        names = compat.op_arguments(func)
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("is_causal") or given.get("attn_mask") is not None:
            self._step.masked_flops += flops // 2
            self._step.flops -= flops // 2
        back = compat.op_name(func).endswith("_backward")
        self._operator("attention backward" if back else "attention")
        for tensor, name in zip(out, _D_BLOCKS if back else _BLOCKS, strict=False):
            if isinstance(tensor, Tensor) and (written := self._find(tensor)) is not None:
                written.name = name
        if back:
            self._inside(given["query"], given["key"])

    def _inside(self, query: Tensor, key: Tensor) -> None:
        wide = torch.promote_types(query.dtype, torch.float32)
        shapes = [("d_q_fp32", tuple(query.shape), wide)]
        if query.shape[1] != key.shape[1]:
            spread = (2, key.shape[0], query.shape[1], *key.shape[2:])
            shapes.append(("d_kv_spread", spread, key.dtype))
        top = self.live_bytes
        for name, shape, dtype in shapes:
            size = prod(shape) * dtype.itemsize
            self._step.tensors += (TensorCount(name, shape, _NAMES[dtype], "new", size),)
            top += size
        self.phase_bytes[self.phase] = max(self.phase_bytes[self.phase], top)


def _kind(func: Any, short: str) -> str:
    if is_attention(func):
        return "attention"
    if is_collective(func) and short in OPS:
        return "message"
    return "product" if compat.op_packet(func) in flop_registry else ""


def _message(axis: str, op: str, size: int, args: tuple[Any, ...]) -> MessageCount:
    """An exchange whose rows all go to one rank is a message to it: the hop of a ring."""
    splits = next((each for each in args if isinstance(each, list)), [])  # plain or functional
    if op == "all-to-all" and sum(rows > 0 for rows in splits) == 1:
        op = "send"
    return MessageCount(cast(MessageOp, op), axis, size)
