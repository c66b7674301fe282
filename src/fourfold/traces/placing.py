"""Every kernel of the steps to its part: products by the weight they multiply, the rest by names
and shapes.

Process groups of a trace: which axis of a layout each one is.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from fourfold.traces import parts
from fourfold.traces.events import PRODUCT_OPS, NamedRange, Trace
from fourfold.traces.linked import Linked, TracedStep, TracedSteps
from fourfold.traces.shapes import Multiplied, Shapes

# Megatron's groups over several axes, whose sizes are of none.
_SEVERAL = re.compile(r"_and_|tensor_model_pipeline|^model_parallel_group", re.I)


UNKNOWN = "unknown"


def collective_of(kernel: str, detail: dict[str, Any]) -> str:
    """Return which collective a kernel runs, of a group that the trace does not name."""
    text = f"{detail.get('Collective name', '')} {kernel}"
    kinds = parts.NAMES["collectives"].items()
    return next((kind for kind, pattern in kinds if re.search(pattern, text, re.I)), UNKNOWN)


def axis_word(description: str) -> str:
    text = description.lower().replace("_pg", "")
    for axis, pattern in parts.NAMES["axes"].items():
        if re.search(pattern, text.replace("mesh_", "") + " " + text):
            return axis
    return UNKNOWN


def axis_of(trace: Trace, detail: dict[str, Any]) -> str:
    """Of a collective, by the description of its group in its own words or in the trace's list."""
    told = str(detail.get("Process Group Description", ""))
    if told in ("", "undefined"):
        told = descriptions(trace).get(str(detail.get("Process Group Name", "")), "")
    return axis_word(told) if told else UNKNOWN


def descriptions(trace: Trace) -> dict[str, str]:
    return {str(one.get("pg_name")): str(one.get("pg_desc", "")) for one in _groups(trace)}


def axis_sizes(trace: Trace) -> dict[str, int]:
    """The largest group of each axis."""
    sizes: dict[str, int] = {}
    for one in _groups(trace):
        words, size = str(one.get("pg_desc", "")), one.get("pg_size", 1)
        axis = axis_word(words)
        if isinstance(size, int) and not _SEVERAL.search(words):
            sizes[axis] = max(size, sizes.get(axis, 1))
    return sizes


def world_size(trace: Trace) -> int:
    told = trace.meta.get("distributedInfo")
    size = told.get("world_size") if isinstance(told, dict) else None
    return size if isinstance(size, int) and size > 0 else 1


def _groups(trace: Trace) -> list[dict[str, Any]]:
    told = trace.meta.get("distributedInfo")
    groups = told.get("pg_config") if isinstance(told, dict) else None
    return [one for one in groups if isinstance(one, dict)] if isinstance(groups, list) else []


Pass = Literal["forward", "inputs", "weights", ""]
# The making of values that peers would have sent, in traces of our own engine alone on a device.
FILL = "fake_peers::fill"
_STEP_MARK = re.compile(r"Optimizer\.step#|## optimizer")


class Weighed(NamedTuple):
    """A product, which pass it is of, and the weight it multiplies: `ins` to `outs` values."""

    product: Multiplied
    of: Pass
    ins: int
    outs: int


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """`part` by kernel (of those in steps)."""

    part: dict[int, str]
    weighed: dict[int, Weighed]


def place(linked: Linked, shapes: Shapes, steps: TracedSteps) -> Placed:
    weighed = {one.kernel: _weighed(one, shapes) for one in shapes.products}
    fills = [mark for mark in linked.trace.marks if mark.name == FILL]
    known: dict[tuple[int, int, int], str] = {}
    part: dict[int, str] = {}
    rows, helpers = _RowNames(shapes, weighed.values()), []
    for at in sorted(steps.kernels, key=lambda place: linked.kernels.start[place]):
        kernel, op = linked.kernel_name(at), linked.op_name(at)
        if parts.is_nccl(kernel):
            detail = linked.detail(at)
            axis = axis_of(linked.trace, detail)
            axis = collective_of(kernel, detail) if axis == UNKNOWN else axis
            part[at] = parts.COMMUNICATION + axis
        elif at in weighed:
            part[at] = rows.of(weighed[at])
        elif op in PRODUCT_OPS and linked.op[at] >= 0:
            helpers.append(at)
        else:
            key = (int(linked.kernels.name[at]), *_op_key(linked, int(linked.op[at])))
            if key not in known:
                known[key] = _by_names(linked, at, kernel, op, shapes)
            part[at] = known[key]
    of_op = {int(linked.op[at]): part[at] for at in weighed if at in part}
    part |= {at: of_op.get(int(linked.op[at]), parts.OTHER) for at in helpers}
    updates = [mark for mark in linked.trace.marks if _STEP_MARK.match(mark.name)]
    within(linked, part, updates, parts.OPTIMIZER)
    within(linked, part, fills, parts.STAND_IN)
    for step in steps.steps:
        _end_of_step(linked, part, step)
    return Placed(part, weighed)


def _op_key(linked: Linked, op: int) -> tuple[int, int]:
    ops = linked.trace.ops
    return (int(ops.name[op]), int(ops.shape[op])) if op >= 0 else (-1, -1)


def _by_names(linked: Linked, at: int, kernel: str, op: str, shapes: Shapes) -> str:
    simple = parts.simple_part(kernel, op)
    dims = [one for one in linked.dims(at) if one]
    if simple in (parts.EMBEDDING, parts.ATTENTION, parts.OPTIMIZER):
        return simple
    if _is_logits(dims, shapes) and simple != parts.OTHER:
        return parts.LOSS
    if simple is not None:
        return simple
    of_weight = bool(dims) and len(dims[0]) == 2 and shapes.tokens not in dims[0]
    if of_weight and shapes.vocab in dims[0] and op in ("aten::gather", "aten::index"):
        return parts.EMBEDDING
    rows = shapes.expert_rows
    many = rows > 0 and any(max(one[0], math.prod(one[:-1])) >= 0.9 * rows for one in dims)
    return parts.memory_part(kernel, op, of_weight=of_weight, expert_rows=many)


def _is_logits(dims: list[tuple[int, ...]], shapes: Shapes) -> bool:
    return bool(shapes.vocab) and any(
        one[-1] == shapes.vocab and len(one) >= 2 and one[-2] != shapes.hidden for one in dims
    )


def _weighed(product: Multiplied, shapes: Shapes) -> Weighed:
    """Forward and input gradients have the tokens as rows, weight gradients sum over them. Where a
    width equals the tokens, how operands lie in memory says which it is: a weight's gradient has
    its first operand transposed, a forward product its second."""
    m, n, k = product.m, product.n, product.k
    rows = {shapes.tokens, shapes.expert_rows} - {0}
    by_rows, by_sum = m in rows, k in rows
    if by_rows and by_sum:
        by_sum = product.transposed[0]
    if by_sum and product.groups > 1 and m in rows:
        by_sum = False
    if by_sum:
        return Weighed(product, "weights", ins=n, outs=m)
    if not by_rows:
        return Weighed(product, "", ins=k, outs=n)
    if product.groups == 1 and not product.transposed[1] and _has_ways(shapes):
        return Weighed(product, "inputs", ins=n, outs=k)
    return Weighed(product, "forward", ins=k, outs=n)


def _has_ways(shapes: Shapes) -> bool:
    return any(True in one.transposed for one in shapes.products)


def _is_fused(weighed: Iterable[Weighed], hidden: int, heads: int, kv: int) -> bool:
    """Whether queries, keys and values are one product. An MLP may be as wide as all three."""
    outs = Counter(one.outs for one in weighed if one.of == "forward" and one.ins == hidden)
    separate = 2 * outs[heads + 2 * kv] < outs[heads] if kv == heads else outs[kv] > 0
    return outs[heads + 2 * kv] > 0 and not separate


class _RowNames:
    """Products by weight. Where several weights of attention have one shape, their order in a layer
    tells them apart: queries, keys, values, output, and backwards from there."""

    def __init__(self, shapes: Shapes, weighed: Iterable[Weighed]) -> None:
        self.shapes = shapes
        heads, kv = shapes.heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim
        self.wide, self.seen = heads, Counter[Pass]()
        self.qkv_outs = {heads, kv, heads + 2 * kv, 2 * kv} - {0}
        self.alike = 1 if _is_fused(weighed, shapes.hidden, heads, kv) else 4 if kv == heads else 2

    def of(self, one: Weighed) -> str:
        shapes, ins, outs = self.shapes, one.ins, one.outs
        if one.product.groups > 1:
            is_expert = one.product.groups == shapes.experts
            return parts.EXPERTS if is_expert else self._batched(one)
        if shapes.vocab and shapes.vocab in (ins, outs):
            return parts.HEAD
        if shapes.experts and shapes.experts in (ins, outs):
            return parts.ROUTER
        if ins == shapes.hidden and outs == self.wide and ins == outs:
            return self._square(one)
        if ins == shapes.hidden and outs in self.qkv_outs:
            return parts.QKV
        if outs == shapes.hidden and ins == self.wide:
            return parts.OUT
        if one.of and ins == shapes.hidden:
            return parts.UP
        if one.of and outs == shapes.hidden:
            return parts.DOWN
        return parts.OTHER

    def _batched(self, one: Weighed) -> str:
        """Weights of chosen experts, summed per token; else scores of plain attention."""
        of_tokens = one.product.groups == self.shapes.tokens
        return parts.ROUTING if of_tokens else parts.ATTENTION

    def _square(self, one: Weighed) -> str:
        place = self.seen[one.of] % self.alike
        self.seen[one.of] += 1
        last = self.alike - 1 if one.of == "forward" else 0
        return parts.OUT if place == last else parts.QKV


def _end_of_step(linked: Linked, part: dict[int, str], step: TracedStep) -> None:
    """After the last product, what follows the optimizer's first kernel is its own: casts of new
    weights, gradients set to zero."""
    starts = linked.kernels.start
    last = max(
        (float(starts[at]) for at in step.kernels if part[at] in parts.PRODUCTS), default=0.0
    )
    after = [at for at in step.kernels if starts[at] > last]
    first = min((starts[at] for at in after if part[at] == parts.OPTIMIZER), default=None)
    for at in after if first is not None else ():
        if starts[at] >= first and part[at] in (parts.ELEMENTWISE, parts.COPIES, parts.UNPLACED):
            part[at] = parts.OPTIMIZER


def within(linked: Linked, part: dict[int, str], marks: list[NamedRange], name: str) -> None:
    """Kernels that the host launched inside of marks are of this part, but for communication."""
    if not marks:
        return
    starts = np.array([mark.start for mark in marks])
    ends = np.maximum.accumulate(np.array([mark.end for mark in marks]))
    places = np.array(list(part))
    launched = linked.launch_s[places]
    near = np.searchsorted(starts, launched, side="right") - 1
    inside = (near >= 0) & (launched <= ends[np.maximum(near, 0)]) & (linked.call[places] >= 0)
    for at in places[inside].tolist():
        if not part[at].startswith(parts.COMMUNICATION):
            part[at] = name
