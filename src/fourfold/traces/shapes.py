"""What operators' shapes say of a model: widths, heads, vocabulary, experts, tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from fourfold.traces.events import PRODUCT_OPS
from fourfold.traces.linked import Dims, Linked
from fourfold.traces.parts import ATTENDS, GROUPED, is_helper

# A vocabulary is wider by more than this factor, which an MLP may have, than what is before its
# product.
_LEAST_VOCAB = 4


class Multiplied(NamedTuple):
    """A kernel that multiplies [m, k] by [k, n]; `groups` of them with m or k divided (experts).
    `transposed`: which operand lies the other way round in memory."""

    kernel: int
    m: int
    n: int
    k: int
    groups: int = 1
    transposed: tuple[bool, bool] = (False, False)

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k


@dataclass(slots=True)
class Shapes:
    """0: not seen. `sequences` and `length` of a micro batch on this rank."""

    tokens: int = 0
    sequences: int = 0
    length: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    hidden: int = 0
    vocab: int = 0
    experts: int = 0
    expert_ffn: int = 0
    expert_rows: int = 0
    attention_op: str = ""
    attention_shapes: int = 0  # how many different ones
    products: list[Multiplied] = field(default_factory=list)


@cache
def _attends(op: str) -> bool:
    return bool(ATTENDS.search(op)) and "backward" not in op.lower()


def shapes_of(linked: Linked, inside: list[int]) -> Shapes:
    """From the kernels `inside` the steps."""
    found = Shapes()
    attention: Counter[tuple[str, Dims]] = Counter()
    for at in inside:
        op = linked.op_name(at)
        if op in PRODUCT_OPS:
            if is_helper(linked.kernel_name(at)):
                continue
            product = _product(op, at, linked)
            if product is not None:
                found.products.append(product)
        elif _attends(op):
            attention[op, linked.dims(at)] += 1
    _read_attention(found, attention)
    _read_embedding(found, linked)
    _read_widths(found)
    return found


def _product(op: str, at: int, linked: Linked) -> Multiplied | None:
    first = PRODUCT_OPS[op]
    dims, strides = linked.dims(at), linked.strides(at)
    if len(dims) < first + 2:
        return None
    a, b = dims[first], dims[first + 1]
    ways = tuple(_is_transposed(strides, first + i) for i in (0, 1))
    if op in GROUPED:
        return _grouped(at, a, b, dims)
    if len(a) == len(b) == 2:
        return Multiplied(at, a[0], b[1], a[1], 1, ways)  # type: ignore[arg-type]
    if len(a) == len(b) == 3:
        return Multiplied(at, a[1], b[2], a[2], a[0], ways)  # type: ignore[arg-type]
    return None


def _is_transposed(strides: Dims, at: int) -> bool:
    one = strides[at] if at < len(strides) else ()
    return len(one) >= 2 and one[-2] == 1 and one[-1] > 1


def _grouped(at: int, a: tuple[int, ...], b: tuple[int, ...], dims: Dims) -> Multiplied | None:
    if len(a) == 2 and len(b) == 3:
        return Multiplied(at, a[0], b[2], a[1], b[0])
    if len(a) == len(b) == 2:
        groups = next((one[0] for one in dims[2:] if len(one) == 1), 1)
        return Multiplied(at, a[0], b[1], a[1], groups)
    if len(a) == len(b) == 3:
        return Multiplied(at, a[0] * a[1], b[2], a[2], a[0])
    return None


def _read_attention(found: Shapes, seen: Counter[tuple[str, Dims]]) -> None:
    """[sequences, heads, length, head]; packages of their own have length before heads."""
    found.attention_shapes = len({dims[:2] for _, dims in seen})
    for (op, dims), _ in seen.most_common():
        if len(dims) >= 2 and len(dims[0]) == len(dims[1]) == 4:
            q, k = dims[0], dims[1]
            if not op.startswith("aten::"):
                q, k = (q[0], q[2], q[1], q[3]), (k[0], k[2], k[1], k[3])
            found.sequences, found.heads, found.length, found.head_dim = q
            found.kv_heads, found.attention_op = k[1], op
            found.tokens = found.sequences * found.length
            return
        found.attention_op = found.attention_op or op


def _read_embedding(found: Shapes, linked: Linked) -> None:
    trace = linked.trace
    names = {at: text for at, text in enumerate(trace.texts) if "embedding" in text.lower()}
    for at in range(len(trace.ops)) if names else ():
        if int(trace.ops.name[at]) not in names or "backward" in names[int(trace.ops.name[at])]:
            continue
        dims = linked.parsed(int(trace.ops.shape[at]))
        if len(dims) >= 2 and len(dims[0]) == 2 and dims[1] and dims[0][0] > dims[0][1]:
            found.vocab, found.hidden = dims[0]
            if len(dims[1]) == 2 and not found.sequences:
                found.sequences, found.length = dims[1]
                found.tokens = found.sequences * found.length
            return


def _read_widths(found: Shapes) -> None:
    grouped = [one for one in found.products if one.groups > 1 and one.n > 1 and one.k > 1]
    dense = [one for one in found.products if one.groups == 1]
    if not found.tokens and dense:
        found.tokens = Counter(max(one.m, one.k) for one in dense).most_common(1)[0][0]
    if not found.hidden:
        sizes = Counter(s for one in dense if one.m == found.tokens for s in {one.n, one.k})
        found.hidden = sizes.most_common(1)[0][0] if sizes else 0
    if not found.vocab and dense:
        sizes = {size for one in dense for size in (one.m, one.n, one.k)} - {found.tokens}
        widest = max(sizes, default=0)
        found.vocab = widest if widest > _LEAST_VOCAB * found.hidden else 0
    _read_experts(found, grouped)


def _read_experts(found: Shapes, grouped: list[Multiplied]) -> None:
    """Rows of all experts: tokens times the experts each one chose, perhaps padded."""
    real = [one for one in grouped if one.groups < found.tokens and max(one.m, one.k) > one.groups]
    real = [one for one in real if found.hidden in (one.m, one.n, one.k)]
    if not real:
        return
    rows = Counter(one.m for one in real if found.hidden in (one.n, one.k))
    if not rows:
        return
    found.expert_rows = rows.most_common(1)[0][0]
    found.experts = Counter(one.groups for one in real).most_common(1)[0][0]
    widths = Counter(
        size
        for one in real
        if one.m == found.expert_rows
        for size in (one.n, one.k)
        if size != found.hidden
    )
    found.expert_ffn = widths.most_common(1)[0][0] if widths else 0
