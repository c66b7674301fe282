"""Rules of what an engine and a machine offer: axes, formats, kinds and amounts of sharding."""

from __future__ import annotations

from fourfold.cost.scaling import KINDS
from fourfold.search.rules.case import (
    Rule,
    RuleCase,
    Truth,
    Whole,
    Words,
    any_of,
    choice,
    outside,
)
from fourfold.spec.layout import EXPERT_AXES, MODEL_AXES
from fourfold.spec.supported import not_run
from fourfold.spec.words import (
    CP_KINDS,
    NUMBERED_RECOMPUTE,
    RECOMPUTE_KINDS,
    SCHEDULES,
)


def _world_words(c: RuleCase) -> Words:
    product = c.pp * c.dp * c.cp * c.tp
    rule = f"is not pp {c.pp} x dp {c.dp} x cp {c.cp} x tp {c.tp} = {product}"
    inner = c.pp * c.cp * c.tp
    fits = c.gpus is not None and c.gpus % inner == 0
    hint = f"use dp = {c.gpus // inner}" if fits and c.gpus else f"use {product} GPUs"
    return "gpus", c.gpus, rule, hint


def _family(c: RuleCase) -> Truth:
    own = c.runs and c.stack.is_ours
    return c.model.family not in c.stack.families or (own and bool(not_run(c.model, c.seq_len)))


def _family_words(c: RuleCase) -> Words:
    lacking = not_run(c.model, c.seq_len) if c.stack.is_ours else ()
    if lacking:
        rule = f"needs {', '.join(lacking)}, which the engine does not support"
        only_long = not not_run(c.model, min(c.seq_len, c.model.window or c.seq_len))
        shorter = f"use a seq_len of at most {c.model.window}; " if only_long else ""
        return "model", c.model.name, rule, f"{shorter}plan, flops and models accept it"
    return choice(c, "model.family", c.model.family, c.stack.families)


def _device_precision(c: RuleCase) -> Truth:
    """Formats of 8 and 4 bits need tensor cores; wider ones run everywhere, if slowly."""
    unit = c.dtypes.compute
    if c.device is None or unit not in ("fp8", "fp4"):
        return False
    return getattr(c.device.peak_flops_per_s, unit) is None


def _device_precision_words(c: RuleCase) -> Words:
    assert c.device is not None
    rule = f"needs {c.dtypes.compute.upper()} tensor cores: {c.device.id} has none"
    return "policy.precision", c.policy.precision, rule, "use precision = bf16"


def _device_scales(c: RuleCase, kind: str) -> bool:
    """Return whether the GPU's tensor cores take such scales; a GPU that is not named does."""
    needs = KINDS[kind].needs
    return not needs or c.device is None or getattr(c.device.peak_flops_per_s, needs) is not None


def _scalings(c: RuleCase) -> tuple[str, ...]:
    """Return the scalings of the engine that the GPU has, for products in fp8; else auto alone."""
    if c.dtypes.compute != "fp8":
        return ("auto",)
    return ("auto", *(kind for kind in c.stack.scalings if _device_scales(c, kind)))


def _scaling_words(c: RuleCase) -> Words:
    kind, compute = c.policy.scaling, c.dtypes.compute
    if compute != "fp8":
        rule = f"has no effect on products in {compute}"
        return "policy.scaling", kind, rule, "use auto, or precision = fp8"
    if kind in c.stack.scalings and c.device is not None:
        rule = f"needs tensor cores with {kind} scales: {c.device.id} has none"
        return "policy.scaling", kind, rule, f"use {', '.join(_scalings(c))}"
    return choice(c, "policy.scaling", kind, _scalings(c))


def _lacking(c: RuleCase) -> dict[str, Whole]:
    """Ranks of the axes that the engine does not have."""
    axes = (*MODEL_AXES, *EXPERT_AXES)
    return {axis: getattr(c, axis) for axis in axes if axis not in c.stack.axes}


def _axis(c: RuleCase) -> Truth:
    missing = any_of([size > 1 for size in _lacking(c).values()])
    return missing | ((c.pp > 1) & (c.model.family in c.stack.whole_families))


def _axis_words(c: RuleCase) -> Words:
    for axis, size in _lacking(c).items():
        if size > 1:
            rule = f"is not supported by {c.stack.name}"
            return f"layout.{axis}", size, rule, f"use {axis} = 1"
    rule = f"is not supported by {c.stack.name} for {c.model.family} models"
    return "layout.pp", c.pp, rule, "use pp = 1"


def _supported(c: RuleCase, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of an engine's words that it runs with this model and these scales."""
    return tuple(word for word in words if not _lost(c, word))


def _lost(c: RuleCase, word: str) -> str:
    """Return beside what an engine does not run a word that it has; '' where it does."""
    if c.model.moe and word in c.stack.not_with_experts:
        return "for models with experts"
    is_delayed = c.policy.precision == "fp8" and c.policy.scaling_kind == "delayed"
    return "with delayed scaling" if is_delayed and word in c.stack.not_with_delayed else ""


def _choice(c: RuleCase, field: str, value: str, words: tuple[str, ...]) -> Words:
    """Return what to say of a word that the engine lacks, or lacks beside another."""
    _, _, rule, hint = choice(c, field, value, _supported(c, words))
    beside = _lost(c, value) if value in words else ""
    return field, value, f"{rule} {beside}".rstrip(), hint


def _sharding_words(c: RuleCase) -> Words:
    allowed = tuple(f"zero{stage}" for stage in c.stack.zeros)
    return choice(c, "policy.sharding", f"zero{c.zero}", allowed)


def _recompute_words(c: RuleCase) -> Words:
    """Kinds with a number as they are written."""
    named = {kind: f"{kind}-N" for kind in NUMBERED_RECOMPUTE}
    asked = RECOMPUTE_KINDS[c.recompute]
    allowed = tuple(named.get(kind, kind) for kind in c.stack.recompute)
    return _choice(c, "policy.recompute", named.get(asked, asked), allowed)


def _zero_pipeline(c: RuleCase) -> Truth:
    both = (c.pp > 1) & (c.dp * c.cp > 1)
    refused = outside(c.zero, range(4), c.stack.pipeline_zeros)
    return both & refused & (outside(c.zero, range(4), c.stack.zeros) == 0)


def _zero_pipeline_words(c: RuleCase) -> Words:
    allowed = ", ".join(f"zero{stage}" for stage in c.stack.pipeline_zeros)
    rule = f"is not supported by {c.stack.name} with a pipeline (pp={c.pp})"
    return "policy.sharding", f"zero{c.zero}", rule, f"use {allowed}, or pp = 1"


def _cp_kind(c: RuleCase) -> Truth:
    lacking = outside(c.cp_kind, CP_KINDS, c.stack.cp_kinds)
    if c.model.window is not None:
        unwindowed = outside(c.cp_kind, CP_KINDS, c.stack.window_cp_kinds)
        lacking = lacking | ((c.seq_len > c.model.window) & unwindowed)
    if c.model.sinks:
        lacking = lacking | outside(c.cp_kind, CP_KINDS, c.stack.sink_cp_kinds)
    return (c.cp > 1) & lacking


def _cp_kind_words(c: RuleCase) -> Words:
    asked = CP_KINDS[c.cp_kind]
    field, value, rule, hint = choice(c, "policy.cp_kind", asked, c.stack.cp_kinds)
    if asked not in c.stack.cp_kinds:
        return field, value, rule, hint
    kinds, part = c.stack.window_cp_kinds, f"windows of {c.model.window} tokens"
    if c.model.sinks:
        kinds, part = c.stack.sink_cp_kinds, "attention sinks"
    known = ", ".join(kind for kind in kinds if kind in c.stack.cp_kinds)
    return field, value, f"{rule} with {part}", f"use {known}, or cp = 1"


def _hybrid(c: RuleCase) -> Truth:
    two_ways = (c.replicate > 1) & (c.shard > 1)
    return two_ways & ((c.zero == 0) | (not c.stack.hybrid))


def _hybrid_words(c: RuleCase) -> Words:
    value = f"{c.replicate}x{c.shard}"
    if not c.stack.hybrid:
        rule = f"is hybrid sharding, which {c.stack.name} does not support"
        return "layout.dp", value, rule, f"use dp = {c.dp}"
    rule = "needs sharded state, but zero0 shards nothing"
    return "layout.dp", value, rule, f"use dp = {c.dp}, or sharding = zero1"


RULES = (
    Rule(
        "world", lambda c: c.gpus is not None and c.pp * c.dp * c.cp * c.tp != c.gpus, _world_words
    ),
    Rule("family", _family, _family_words),
    Rule(
        "precision",
        lambda c: c.policy.precision not in _supported(c, c.stack.precisions),
        lambda c: _choice(c, "policy.precision", c.policy.precision, c.stack.precisions),
    ),
    Rule("device-precision", _device_precision, _device_precision_words),
    Rule("scaling", lambda c: c.policy.scaling not in _scalings(c), _scaling_words),
    Rule("axis", _axis, _axis_words),
    Rule("cp-kind", _cp_kind, _cp_kind_words),
    Rule(
        "schedule",
        lambda c: (c.pp > 1) & outside(c.schedule, SCHEDULES, c.stack.schedules),
        lambda c: choice(c, "policy.schedule", SCHEDULES[c.schedule], c.stack.schedules),
    ),
    Rule(
        "recompute",
        lambda c: outside(c.recompute, RECOMPUTE_KINDS, _supported(c, c.stack.recompute)),
        _recompute_words,
    ),
    Rule(
        "sharding", lambda c: (c.dp > 1) & outside(c.zero, range(4), c.stack.zeros), _sharding_words
    ),
    Rule("zero-pipeline", _zero_pipeline, _zero_pipeline_words),
    Rule("hybrid", _hybrid, _hybrid_words),
)
