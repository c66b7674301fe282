"""Rules of a step: schedules, fp8, what our engine lacks, the batch over ranks and micros."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fourfold.search.rules.case import INTERLEAVED, Rule, RuleCase, Truth, Whole, Words, any_of
from fourfold.search.rules.cuts import tp_divides
from fourfold.spec.words import SCHEDULES


def fp8_sides(c: RuleCase) -> dict[str, Whole]:
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


_NARROW = ("fp8", "fp4")


def unbuilt_choices(c: RuleCase) -> dict[str, Truth]:
    """Choices that the cost model knows and our own engine does not run, by the policy's field.

    A format that was asked for is refused where another one would run (spec/policy.py): gradients
    of zero2 and zero3 are kept in the weights' format, copies are summed in that of gradients.
    """
    policy, dtypes = c.policy, c.dtypes
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
        "overlap_exchange": policy.overlap_exchange & (c.ep * c.etp > 1),
        "overlap_grad_reduce": not policy.overlap_grad_reduce,
        "overlap_param_gather": not policy.overlap_param_gather,
    }


def _unbuilt_words(c: RuleCase) -> Words:
    field = next(field for field, is_unbuilt in unbuilt_choices(c).items() if is_unbuilt)
    rule = "is not supported by the engine yet"
    return f"policy.{field}", getattr(c.policy, field), rule, "use the default"


def _any_size(c: RuleCase, is_broken: Callable[[int], Truth]) -> Truth:
    return any_of([is_broken(size) for size in c.batch_sizes])


def micro_count(c: RuleCase, size: int) -> Whole:
    """Micro batches of the busiest rank at a global batch of `size`."""
    share = -(-size // c.dp)
    return -(-share // c.micro_batch)


def _ragged_rounds(c: RuleCase, size: int) -> Truth:
    """torch's looped schedules: as many rounds as whole passes of the ranks fit, all alike."""
    count = micro_count(c, size)
    rounds = count // c.pp + (count < c.pp)
    return count % rounds != 0


def _bad_size(c: RuleCase, is_bad: Callable[[int], bool]) -> tuple[int, str]:
    """The first batch size that breaks a rule, and what to call it."""
    size = next(size for size in c.batch_sizes if is_bad(size))
    return size, "global_batch" if size == c.batch_sizes[-1] else "ramp stage"


def _reachable(size: int, step: int) -> str:
    below, above = size // step * step, -(-size // step) * step
    return f"use a batch of {f'{below} or ' if below else ''}{above}"


def _needs_interleaving_words(c: RuleCase) -> Words:
    rule = f"is not possible with schedule {SCHEDULES[c.schedule]}, which has one chunk per rank"
    hint = "use schedule = interleaved or zero-bubble"
    return "policy.virtual_stages", c.virtual_stages, rule, hint


def _needs_virtual_stages(c: RuleCase) -> Truth:
    split = c.splits_backward & c.stack.loops_zero_bubble
    return ((c.schedule == INTERLEAVED) | split) & (c.virtual_stages == 1)


def _needs_virtual_stages_words(c: RuleCase) -> Words:
    schedule = SCHEDULES[c.schedule]
    return "policy.schedule", schedule, "needs virtual_stages above 1", "use virtual_stages = 2"


def _needs_pipeline_words(c: RuleCase) -> Words:
    rule = "needs pp above 1"
    if c.virtual_stages > 1:
        return "policy.virtual_stages", c.virtual_stages, rule, "use virtual_stages = 1"
    return "policy.schedule", SCHEDULES[c.schedule], rule, "use schedule = 1f1b"


def _zero_bubble_words(what: str, hint: str) -> Callable[[RuleCase], Words]:
    rule = f"splits the backward pass, which {what} not allow"
    words = ("policy.schedule", "zero-bubble", rule, f"use {hint}, or schedule = interleaved")
    return lambda c: words


def _fp8_sizes(c: RuleCase) -> Truth:
    """Asked only where everything can be cut at all."""
    if c.dtypes.compute != "fp8":
        return False
    odd = any_of([side % c.stack.fp8_multiple != 0 for side in fp8_sides(c).values()])
    return odd & tp_divides(c)


def _fp8_sizes_words(c: RuleCase) -> Words:
    multiple = c.stack.fp8_multiple
    name, side = next((n, side) for n, side in fp8_sides(c).items() if side % multiple)
    rule = f"needs {name} = {side} to be a multiple of {multiple}"
    return "policy.precision", c.policy.precision, rule, "use precision = bf16, or another tp or cp"


def _dp_batch_words(c: RuleCase) -> Words:
    size, what = _bad_size(c, lambda size: c.dp > size)
    rule = f"exceeds {what} {size}: some ranks would have no sequence"
    return "layout.dp", c.dp, rule, f"use dp = {size} at most"


def _equal_shares_words(c: RuleCase) -> Words:
    size, what = _bad_size(c, lambda size: size % c.dp != 0)
    rule = f"must divide {what} {size} for {c.stack.name}"
    return "layout.dp", c.dp, rule, _reachable(size, c.dp)


def _micro_divides(c: RuleCase) -> Truth:
    whole = c.dp * c.micro_batch
    return (c.stack.batch_rule == "whole") & _any_size(c, lambda size: size % whole != 0)


def _micro_divides_words(c: RuleCase) -> Words:
    whole = c.dp * c.micro_batch
    size, what = _bad_size(c, lambda size: size % whole != 0)
    rule = f"times dp = {whole} must divide {what} {size} for {c.stack.name}"
    return "batch.micro_batch", c.micro_batch, rule, _reachable(size, whole)


def _fill(c: RuleCase) -> Truth:
    short = _any_size(c, lambda size: micro_count(c, size) < c.pp)
    return c.stack.fills_pipeline & (c.pp > 1) & short


def _fill_words(c: RuleCase) -> Words:
    size, what = _bad_size(c, lambda size: micro_count(c, size) < c.pp)
    count = micro_count(c, size)
    hint = f"{c.stack.name} needs one per stage: use pp = {count} at most"
    return "layout.pp", c.pp, f"exceeds the {count} micro batches of {what} {size}", hint


def _whole_rounds(c: RuleCase) -> Truth:
    if c.stack.equal_rounds:
        return c.is_looped & _any_size(c, lambda size: _ragged_rounds(c, size))
    odd = _any_size(c, lambda size: micro_count(c, size) % c.pp != 0)
    return c.stack.whole_rounds & (c.schedule == INTERLEAVED) & odd


def _whole_rounds_words(c: RuleCase) -> Words:
    def is_bad(size: int) -> bool:
        return bool(_whole_rounds(replace(c, batch_sizes=(size,))))

    size, what = _bad_size(c, is_bad)
    wanted = "equal rounds" if c.stack.equal_rounds else f"a multiple of pp={c.pp}"
    rule = f"needs {wanted} of micro batches, but {what} {size} gives {micro_count(c, size)}"
    schedule = SCHEDULES[c.schedule]
    return "policy.schedule", schedule, rule, "use another micro_batch or pp"


RULES = (
    Rule(
        "needs-interleaving",
        lambda c: (c.virtual_stages > 1) & (c.is_looped == 0),
        _needs_interleaving_words,
    ),
    Rule("needs-virtual-stages", _needs_virtual_stages, _needs_virtual_stages_words),
    Rule(
        "needs-pipeline",
        lambda c: (c.is_looped | (c.virtual_stages > 1)) & (c.pp == 1),
        _needs_pipeline_words,
    ),
    Rule(
        "compiled-zero-bubble",
        lambda c: c.splits_backward & (c.policy.compile and not c.stack.compiles_zero_bubble),
        _zero_bubble_words("compiled blocks do", "compile = false"),
    ),
    Rule("fp8-sizes", _fp8_sizes, _fp8_sizes_words),
    Rule(
        "fp8-zero-bubble",
        lambda c: c.splits_backward & (c.dtypes.compute == "fp8" and not c.stack.splits_fp8),
        _zero_bubble_words("fp8 does", "precision = bf16"),
    ),
    Rule(
        "unbuilt", lambda c: c.stack.is_ours & any_of(unbuilt_choices(c).values()), _unbuilt_words
    ),
    Rule("dp-batch", lambda c: _any_size(c, lambda size: c.dp > size), _dp_batch_words),
    Rule(
        "equal-shares",
        lambda c: (c.stack.batch_rule == "shares") & _any_size(c, lambda size: size % c.dp != 0),
        _equal_shares_words,
    ),
    Rule("micro-divides", _micro_divides, _micro_divides_words),
    Rule("fill", _fill, _fill_words),
    Rule("whole-rounds", _whole_rounds, _whole_rounds_words),
)
