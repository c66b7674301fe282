"""What must hold for a layout to run? Each rule once, as arithmetic on whole numbers.

A rule returns whether it is broken, and works on plain numbers and on NumPy columns alike: so rules
join comparisons by & and | (never `and`, `or`, `not`), each in parentheses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from fourfold.cost.count.stages import end_layers
from fourfold.search.stacks import Stack
from fourfold.spec.device import PEAK_NAMES, Device
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy
from fourfold.spec.runnable import not_run
from fourfold.spec.words import CP_KINDS, RECOMPUTE_KINDS, SCHEDULES

Reason = Literal[
    "world", "family", "precision", "device-precision", "axis", "cp-kind", "schedule",
    "recompute", "sharding", "zero-pipeline", "hybrid", "positions", "heads", "kv-heads", "ffn",
    "ulysses-heads", "seq-cp", "seq-tp", "async-tp", "stages", "virtual-stages",
    "stage-layers", "tied-stages", "plain-dp",
    "needs-interleaving", "needs-virtual-stages", "needs-pipeline", "compiled-zero-bubble",
    "fp8-sizes", "fp8-zero-bubble", "unbuilt",
    "dp-batch", "equal-shares", "micro-divides", "fill", "whole-rounds",
]  # fmt: skip
REASONS: tuple[Reason, ...] = get_args(Reason)
ULYSSES = CP_KINDS.index("ulysses")
INTERLEAVED, ZERO_BUBBLE = SCHEDULES.index("interleaved"), SCHEDULES.index("zero-bubble")

# A whole number, or a NumPy column of them.
Whole = Any
Truth = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run as the rules see it: numbers only; choices are indices into the stacks' tuples."""

    model: ModelShape
    stack: Stack
    gpus: int | None
    device: Device | None
    policy: Policy
    pp: Whole
    replicate: Whole
    shard: Whole
    cp: Whole
    tp: Whole
    seq_len: Whole
    micro_batch: Whole
    batch_sizes: tuple[int, ...]  # every size of a ramp-up, the last is the full one
    zero: Whole
    cp_kind: Whole
    schedule: Whole
    virtual_stages: Whole
    recompute: Whole
    sequence_parallel: Whole
    runs: bool = True  # False: only planned, so what our engine lacks is no obstacle
    dp: Whole = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dp", self.replicate * self.shard)

    def with_columns(self, columns: Mapping[str, Any]) -> Case:
        """The same question about many runs: fields by name as columns."""
        return replace(self, **columns)


def broken_rules(case: Case) -> dict[Reason, Truth]:
    """For every rule whether it is broken, as one bool or as a column (may be a plain bool)."""
    return {reason: is_broken(case) for reason, is_broken in RULES.items()}


def _outside(index: Whole, names: tuple[str, ...], allowed: tuple[str, ...]) -> Truth:
    """Whether the choice at `index` of `names` is not among the allowed ones."""
    refused: Truth = False
    for place, name in enumerate(names):
        if name not in allowed:
            refused = refused | (index == place)
    return refused


def _zero_outside(zero: Whole, allowed: tuple[int, ...]) -> Truth:
    refused: Truth = False
    for stage in range(4):
        if stage not in allowed:
            refused = refused | (zero == stage)
    return refused


def _world(c: Case) -> Truth:
    return c.gpus is not None and c.pp * c.dp * c.cp * c.tp != c.gpus


def _family(c: Case) -> Truth:
    own = c.runs and c.stack.name == "fourfold"
    return c.model.family not in c.stack.families or (own and bool(not_run(c.model, c.seq_len)))


def _precision(c: Case) -> Truth:
    return c.policy.precision not in c.stack.precisions


def _device_precision(c: Case) -> Truth:
    """Formats of 8 and 4 bits need matrix units; wider ones run everywhere, if slowly."""
    unit = c.policy.dtypes.compute
    if c.device is None or unit not in ("fp8", "fp4"):
        return False
    assert unit in PEAK_NAMES
    return getattr(c.device.peak_flops_per_s, unit) is None


def _axis(c: Case) -> Truth:
    missing: Truth = False
    for axis, size in (("tp", c.tp), ("cp", c.cp), ("pp", c.pp)):
        if axis not in c.stack.axes:
            missing = missing | (size > 1)
    return missing


def _cp_kind(c: Case) -> Truth:
    return (c.cp > 1) & _outside(c.cp_kind, CP_KINDS, c.stack.cp_kinds)


def _schedule(c: Case) -> Truth:
    return (c.pp > 1) & _outside(c.schedule, SCHEDULES, c.stack.schedules)


def _recompute(c: Case) -> Truth:
    return _outside(c.recompute, RECOMPUTE_KINDS, c.stack.recompute)


def _sharding(c: Case) -> Truth:
    return (c.dp > 1) & _zero_outside(c.zero, c.stack.zeros)


def _zero_pipeline(c: Case) -> Truth:
    both = (c.pp > 1) & (c.dp * c.cp > 1)
    refused = _zero_outside(c.zero, c.stack.pipeline_zeros)
    return both & refused & (_zero_outside(c.zero, c.stack.zeros) == 0)


def _hybrid(c: Case) -> Truth:
    two_ways = (c.replicate > 1) & (c.shard > 1)
    return two_ways & ((c.zero == 0) | (not c.stack.hybrid))


def _positions(c: Case) -> Truth:
    rows = c.model.positions.length if c.model.positions.kind == "learned" else None
    return rows is not None and c.seq_len > rows


def _heads(c: Case) -> Truth:
    return c.model.heads % c.tp != 0


def _kv_heads(c: Case) -> Truth:
    """Asked only where heads pass, so that plain multi-head attention has one reason, not two."""
    odd = (c.model.kv_heads % c.tp != 0) & (c.model.heads % c.tp == 0)
    return odd & (c.tp % c.model.kv_heads != 0) if c.stack.copies_kv_heads else odd


def _ffn(c: Case) -> Truth:
    return c.model.ffn % c.tp != 0


def _ulysses_heads(c: Case) -> Truth:
    """Query heads of a tensor-parallel rank are dealt to the context ranks.

    KV heads that do not come out even are repeated until they do: heads/tp is a multiple of both.
    """
    dealt = (c.model.heads // c.tp) % c.cp != 0
    kv = (c.model.kv_heads // c.tp) % c.cp != 0
    odd = dealt if c.stack.copies_kv_heads and c.stack.ulysses_copies_kv else dealt | kv
    return (c.cp > 1) & (c.cp_kind == ULYSSES) & odd


def sequence_pieces(c: Case) -> Whole:
    """Pieces that a sequence is cut into by context parallelism."""
    return c.cp * (1 + ((c.cp_kind != ULYSSES) | c.stack.even_pieces))


def _seq_cp(c: Case) -> Truth:
    """Ring and all-gather give each rank an early and a late piece (zig-zag), Ulysses one piece."""
    return (c.cp > 1) & (c.seq_len % sequence_pieces(c) != 0)


def _seq_tp(c: Case) -> Truth:
    return (c.sequence_parallel == 1) & (c.tp > 1) & (c.seq_len // c.cp % c.tp != 0)


def _async_tp(c: Case) -> Truth:
    return c.policy.async_tp & (c.tp > 1) & (c.sequence_parallel == 0)


def _stages(c: Case) -> Truth:
    return c.pp > c.model.layers


def _virtual_stages(c: Case) -> Truth:
    return (c.pp <= c.model.layers) & (c.pp * c.virtual_stages > c.model.layers)


def _stage_layers(c: Case) -> Truth:
    """Whether the engine has no way to cut the layers into these stages (and virtual ones)."""
    layers, chunks = c.model.layers, c.pp * c.virtual_stages
    if c.stack.stage_rule == "filled":
        each = -(-layers // chunks)
        odd = -(-layers // each) != chunks
    elif c.stack.stage_rule == "even":
        # Embedding and loss may count as a layer each; without virtual stages ends may be short.
        counted = sum(((layers + more) % chunks == 0) * 1 for more in range(3))
        _, last = end_layers(layers, c.pp)
        odd = (counted == 0) & ((c.virtual_stages > 1) | (last < 1))
    else:
        return False
    return (c.pp > 1) & (chunks <= layers) & odd


def _tied_stages(c: Case) -> Truth:
    return (c.pp > 1) & (c.model.tied and not c.stack.ties_stages)


def _plain_dp(c: Case) -> Truth:
    others = (c.pp > 1) | (c.cp > 1) | (c.tp > 1)
    return c.stack.plain_dp_alone & (c.zero == 0) & ((c.dp > 1) & others | (c.cp > 1))


def _needs_interleaving(c: Case) -> Truth:
    looped = (c.schedule == INTERLEAVED) | (c.schedule == ZERO_BUBBLE)
    return (c.virtual_stages > 1) & (looped == 0)


def _needs_virtual_stages(c: Case) -> Truth:
    split = (c.schedule == ZERO_BUBBLE) & (c.pp > 1) & c.stack.loops_zero_bubble
    return ((c.schedule == INTERLEAVED) | split) & (c.virtual_stages == 1)


def _needs_pipeline(c: Case) -> Truth:
    looped = (c.schedule == INTERLEAVED) | (c.schedule == ZERO_BUBBLE) | (c.virtual_stages > 1)
    return looped & (c.pp == 1)


def _compiled_zero_bubble(c: Case) -> Truth:
    split = (c.schedule == ZERO_BUBBLE) & (c.pp > 1)
    return split & (c.policy.compile and not c.stack.compiles_zero_bubble)


def fp8_sides(c: Case) -> dict[str, Whole]:
    """Sides of the matrices that a rank multiplies, and the tokens between them, by name. A KV head
    that ranks share is not cut further."""
    model, kv_heads = c.model, c.model.kv_heads // c.tp + (c.model.kv_heads < c.tp)
    heads = model.attention_width // c.tp
    fused = c.policy.fused_projections  # queries, keys and values are one matrix
    keys = heads * fused + kv_heads * model.head_size * (1 + fused)
    return {
        "hidden": model.hidden,
        "heads / tp x head size": heads,
        f"{'(heads + 2 kv heads)' if fused else 'kv heads'} / tp x head size": keys,
        "ffn / tp": model.ffn // c.tp,
        "seq_len / cp": c.seq_len // c.cp,
    }


def _fp8_sizes(c: Case) -> Truth:
    """Asked only where everything can be cut at all."""
    odd: Truth = False
    if c.policy.dtypes.compute != "fp8":
        return odd
    for side in fp8_sides(c).values():
        odd = odd | (side % c.stack.fp8_multiple != 0)
    return odd & (_heads(c) == 0) & (_kv_heads(c) == 0) & (_ffn(c) == 0)


def _fp8_zero_bubble(c: Case) -> Truth:
    in_fp8 = c.policy.dtypes.compute == "fp8" and not c.stack.splits_fp8
    return (c.schedule == ZERO_BUBBLE) & (c.pp > 1) & in_fp8


_NARROW = ("fp8", "fp4")


def unbuilt_choices(c: Case) -> dict[str, Truth]:
    """Choices that the cost model knows and our own engine does not run, by the policy's field.

    A format that was asked for is refused where another one would run (spec/formats.py): gradients
    of zero2 and zero3 are kept in the weights' format, copies are summed in that of gradients.
    """
    policy, dtypes = c.policy, c.policy.dtypes
    shards = 1 + (c.shard * c.cp - 1) * (c.zero > 0)
    other_grad = policy.grad_dtype not in (None, dtypes.param)
    other_sum = policy.reduce_dtype not in (None, dtypes.grad)
    return {
        "compute_dtype": policy.compute_dtype == "fp4",
        "param_dtype": policy.param_dtype in _NARROW,
        "optimizer_dtype": policy.optimizer_dtype in _NARROW,
        "grad_dtype": (policy.grad_dtype in _NARROW) | (other_grad & (c.zero >= 2)),
        "reduce_dtype": (policy.reduce_dtype in _NARROW) | (other_sum & (c.dp * c.cp > shards)),
        "async_tp": policy.async_tp & (c.tp > 1),
        "attention": policy.attention == "fused-softmax",
        "overlap_grad_reduce": not policy.overlap_grad_reduce,
        "overlap_param_gather": not policy.overlap_param_gather,
    }


def _unbuilt(c: Case) -> Truth:
    found: Truth = False
    if c.stack.is_ours:
        for is_unbuilt in unbuilt_choices(c).values():
            found = found | is_unbuilt
    return found


def _any_size(c: Case, is_broken: Callable[[int], Truth]) -> Truth:
    found: Truth = False
    for size in c.batch_sizes:
        found = found | is_broken(size)
    return found


def _dp_batch(c: Case) -> Truth:
    return _any_size(c, lambda size: c.dp > size)


def _equal_shares(c: Case) -> Truth:
    return (c.stack.batch_rule == "shares") & _any_size(c, lambda size: size % c.dp != 0)


def _micro_divides(c: Case) -> Truth:
    whole = c.dp * c.micro_batch
    return (c.stack.batch_rule == "whole") & _any_size(c, lambda size: size % whole != 0)


def micro_count(c: Case, size: int) -> Whole:
    """Micro batches of the busiest rank at a global batch of `size`."""
    share = -(-size // c.dp)
    return -(-share // c.micro_batch)


def _fill(c: Case) -> Truth:
    short = _any_size(c, lambda size: micro_count(c, size) < c.pp)
    return c.stack.fills_pipeline & (c.pp > 1) & short


def _whole_rounds(c: Case) -> Truth:
    if c.stack.equal_rounds:
        looped = (c.schedule == INTERLEAVED) | (c.schedule == ZERO_BUBBLE)
        return looped & _any_size(c, lambda size: _ragged_rounds(c, size))
    odd = _any_size(c, lambda size: micro_count(c, size) % c.pp != 0)
    return c.stack.whole_rounds & (c.schedule == INTERLEAVED) & odd


def _ragged_rounds(c: Case, size: int) -> Truth:
    """torch's looped schedules: as many rounds as whole passes of the ranks fit, all alike."""
    count = micro_count(c, size)
    rounds = count // c.pp + (count < c.pp)
    return count % rounds != 0


RULES: dict[Reason, Callable[[Case], Truth]] = {
    "world": _world,
    "family": _family,
    "precision": _precision,
    "device-precision": _device_precision,
    "axis": _axis,
    "cp-kind": _cp_kind,
    "schedule": _schedule,
    "recompute": _recompute,
    "sharding": _sharding,
    "zero-pipeline": _zero_pipeline,
    "hybrid": _hybrid,
    "positions": _positions,
    "heads": _heads,
    "kv-heads": _kv_heads,
    "ffn": _ffn,
    "ulysses-heads": _ulysses_heads,
    "seq-cp": _seq_cp,
    "seq-tp": _seq_tp,
    "async-tp": _async_tp,
    "stages": _stages,
    "virtual-stages": _virtual_stages,
    "stage-layers": _stage_layers,
    "tied-stages": _tied_stages,
    "plain-dp": _plain_dp,
    "needs-interleaving": _needs_interleaving,
    "needs-virtual-stages": _needs_virtual_stages,
    "needs-pipeline": _needs_pipeline,
    "compiled-zero-bubble": _compiled_zero_bubble,
    "fp8-sizes": _fp8_sizes,
    "fp8-zero-bubble": _fp8_zero_bubble,
    "unbuilt": _unbuilt,
    "dp-batch": _dp_batch,
    "equal-shares": _equal_shares,
    "micro-divides": _micro_divides,
    "fill": _fill,
    "whole-rounds": _whole_rounds,
}
