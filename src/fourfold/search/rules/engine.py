"""Rules of what an engine and a machine offer: axes, formats, kinds and amounts of sharding.

Rules of models with experts: where experts lie, and how tokens get to them.
"""

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
    divisors,
    few,
    outside,
)
from fourfold.spec.catalog import generation_of
from fourfold.spec.layout import EXPERT_AXES, MODEL_AXES
from fourfold.spec.supported import not_run
from fourfold.spec.words import (
    CP_KINDS,
    MOE_RECOMPUTE,
    NUMBERED_RECOMPUTE,
    RECOMPUTE_KINDS,
    SCHEDULES,
)

_MOE_KINDS = tuple(RECOMPUTE_KINDS.index(kind) for kind in MOE_RECOMPUTE)


def _expert_ranks(c: RuleCase) -> Truth:
    return (c.shard * c.cp * c.tp) % (c.ep * c.etp) != 0


def _expert_ranks_words(c: RuleCase) -> Words:
    ranks = c.shard * c.cp * c.tp
    if c.etp > 1:
        rule = f"x etp={c.etp} = {c.ep * c.etp} must divide dp x cp x tp of a stage = {ranks}"
    else:
        rule = f"must divide dp x cp x tp = {ranks}, the ranks of a stage"
    rule += " and of one replica" if c.replicate > 1 else ""
    legal = [size for size in divisors(ranks) if ranks % (size * c.etp) == 0] or [1]
    return "layout.ep", c.ep, rule, f"use ep {few(legal, c.ep)}"


def _experts_words(c: RuleCase) -> Words:
    experts = c.model.experts
    rule = f"must divide experts={experts}"
    return "layout.ep", c.ep, rule, f"use ep {few(divisors(experts), c.ep)}"


def _expert_width_words(c: RuleCase) -> Words:
    assert c.model.moe is not None
    ffn = c.model.moe.ffn
    hint = f"use etp {few(divisors(ffn), c.etp)}"
    return "layout.etp", c.etp, f"must divide moe.ffn={ffn}, an expert's width", hint


def _expert_dense(c: RuleCase) -> Truth:
    if c.model.moe is not None:
        return False
    kinds = (c.recompute == _MOE_KINDS[0]) | (c.recompute == _MOE_KINDS[1])
    return (c.ep > 1) | (c.etp > 1) | kinds


def _expert_dense_words(c: RuleCase) -> Words:
    rule = f"needs experts, which {c.model.name} does not have"
    if c.ep * c.etp == 1:
        return "policy.recompute", RECOMPUTE_KINDS[c.recompute], rule, "use full or selective"
    axis = "ep" if c.ep > 1 else "etp"
    return f"layout.{axis}", getattr(c, axis), rule, f"use {axis} = 1, or a model with experts"


def _moe_tp(c: RuleCase) -> Truth:
    """Every rank of a stage must see tokens of its own."""
    return (c.model.moe is not None) & (c.tp > 1) & (c.sequence_parallel == 0)


def _moe_tp_words(c: RuleCase) -> Words:
    rule = "must be true with experts and tensor parallelism: every rank routes its own tokens"
    return "policy.sequence_parallel", False, rule, "use sequence_parallel = true, or tp = 1"


def _shared_width(c: RuleCase) -> Truth:
    moe = c.model.moe
    return False if moe is None else moe.shared_ffn % c.tp != 0


def _shared_width_words(c: RuleCase) -> Words:
    assert c.model.moe is not None
    wide = c.model.moe.shared_ffn
    rule = f"must divide moe.shared_ffn={wide}"
    return "layout.tp", c.tp, rule, f"use tp {few(divisors(wide), c.tp)}"


def _expert_tp(c: RuleCase) -> Truth:
    if c.model.moe is None or not c.stack.experts_follow_tp:
        return False
    return c.etp != 1 + (c.tp - 1) * (c.ep == 1)


def _expert_tp_words(c: RuleCase) -> Words:
    cut = "experts are cut over tp where ep is 1, and whole where it is more"
    whole = f"ep above 1 with etp = 1, or etp = {c.tp}"
    return "layout.etp", c.etp, f"is not possible with {c.stack.name}: {cut}", f"use {whole}"


def _dispatcher(c: RuleCase) -> Truth:
    spread = c.ep * c.etp > 1
    alone = c.policy.dispatcher == "local"
    waits = c.policy.cuda_graph & c.stack.is_ours
    return (spread & (alone | waits)) | ((c.ep > 0) & _lacks_dispatcher(c))


def _lacks_dispatcher(c: RuleCase) -> bool:
    return c.policy.dispatcher not in ("auto", *c.stack.dispatchers)


def _dispatcher_words(c: RuleCase) -> Words:
    if _lacks_dispatcher(c):
        return choice(c, "policy.dispatcher", c.policy.dispatcher, ("auto", *c.stack.dispatchers))
    if c.policy.cuda_graph and c.stack.is_ours:
        rule = "needs a step without host waits, but tokens are exchanged by counts (ep x etp > 1)"
        return "policy.cuda_graph", True, rule, "use cuda_graph = false, or ep = 1"
    rule = f"keeps tokens on their rank, but ep={c.ep} x etp={c.etp} spreads experts"
    return "policy.dispatcher", "local", rule, "use dispatcher = alltoall or allgather"


EXPERT_RULES = (
    Rule("expert-dense", _expert_dense, _expert_dense_words),
    Rule(
        "experts",
        lambda c: (c.model.moe is not None) & (max(1, c.model.experts) % c.ep != 0),
        _experts_words,
    ),
    Rule("expert-ranks", _expert_ranks, _expert_ranks_words),
    Rule(
        "expert-width",
        lambda c: False if c.model.moe is None else c.model.moe.ffn % c.etp != 0,
        _expert_width_words,
    ),
    Rule("expert-tp", _expert_tp, _expert_tp_words),
    Rule("shared-width", _shared_width, _shared_width_words),
    Rule("moe-tp", _moe_tp, _moe_tp_words),
    Rule("dispatcher", _dispatcher, _dispatcher_words),
)


def _world_words(c: RuleCase) -> Words:
    product = c.pp * c.dp * c.cp * c.tp
    rule = f"is not pp {c.pp} x dp {c.dp} x cp {c.cp} x tp {c.tp} = {product}"
    inner = c.pp * c.cp * c.tp
    fits = c.gpus is not None and c.gpus % inner == 0
    hint = f"use dp = {c.gpus // inner}" if fits and c.gpus else f"use {product} GPUs"
    return "gpus", c.gpus, rule, hint


def _family(c: RuleCase) -> Truth:
    own = c.runs and c.stack.name == "fourfold"
    return c.model.family not in c.stack.families or (own and bool(not_run(c.model, c.seq_len)))


def _family_words(c: RuleCase) -> Words:
    lacking = not_run(c.model, c.seq_len) if c.stack.name == "fourfold" else ()
    if lacking:
        rule = f"needs {', '.join(lacking)}, which the engine does not support"
        only_long = not not_run(c.model, min(c.seq_len, c.model.window or c.seq_len))
        shorter = f"use a seq_len of at most {c.model.window}; " if only_long else ""
        return "model", c.model.name, rule, f"{shorter}plan, flops and models accept it"
    return choice(c, "model.family", c.model.family, c.stack.families)


def _device_precision(c: RuleCase) -> Truth:
    """Formats of 8 and 4 bits need matrix units; wider ones run everywhere, if slowly."""
    unit = c.policy.dtypes.compute
    if c.device is None or unit not in ("fp8", "fp4"):
        return False
    return getattr(c.device.peak_flops_per_s, unit) is None


def _device_precision_words(c: RuleCase) -> Words:
    assert c.device is not None
    rule = f"needs matrix units that {c.device.id} does not have"
    return "policy.precision", c.policy.precision, rule, "use precision = bf16"


def _scalings(c: RuleCase) -> tuple[str, ...]:
    """Of products in fp8: those of the engine that the GPU's matrix units have."""
    made = "b" if c.device is None else generation_of(c.device)
    return tuple(kind for kind in c.stack.scalings if KINDS[kind].only in ("", made))


def _lacking(c: RuleCase) -> dict[str, Whole]:
    """Ranks of the axes that the engine does not have."""
    axes = (*MODEL_AXES, *EXPERT_AXES)
    return {axis: getattr(c, axis) for axis in axes if axis not in c.stack.axes}


def _axis(c: RuleCase) -> Truth:
    missing = any_of(size > 1 for size in _lacking(c).values())
    return missing | ((c.pp > 1) & (c.model.family in c.stack.whole_families))


def _axis_words(c: RuleCase) -> Words:
    for axis, size in _lacking(c).items():
        if size > 1:
            rule = f"is not supported by {c.stack.name}"
            return f"layout.{axis}", size, rule, f"use {axis} = 1"
    rule = f"is not supported by {c.stack.name} for {c.model.family} models"
    return "layout.pp", c.pp, rule, "use pp = 1"


def _kept(c: RuleCase, words: tuple[str, ...]) -> tuple[str, ...]:
    """Those that the engine runs with this model."""
    lost = c.stack.not_with_experts if c.model.moe else ()
    return tuple(word for word in words if word not in lost)


def _sharding_words(c: RuleCase) -> Words:
    allowed = tuple(f"zero{stage}" for stage in c.stack.zeros)
    return choice(c, "policy.sharding", f"zero{c.zero}", allowed)


def _recompute_words(c: RuleCase) -> Words:
    """Kinds with a number as they are written."""
    named = {kind: f"{kind}-N" for kind in NUMBERED_RECOMPUTE}
    asked = RECOMPUTE_KINDS[c.recompute]
    allowed = tuple(named.get(kind, kind) for kind in _kept(c, c.stack.recompute))
    return choice(c, "policy.recompute", named.get(asked, asked), allowed)


def _zero_pipeline(c: RuleCase) -> Truth:
    both = (c.pp > 1) & (c.dp * c.cp > 1)
    refused = outside(c.zero, range(4), c.stack.pipeline_zeros)
    return both & refused & (outside(c.zero, range(4), c.stack.zeros) == 0)


def _zero_pipeline_words(c: RuleCase) -> Words:
    allowed = ", ".join(f"zero{stage}" for stage in c.stack.pipeline_zeros)
    rule = f"is not supported by {c.stack.name} with a pipeline (pp={c.pp})"
    return "policy.sharding", f"zero{c.zero}", rule, f"use {allowed}, or pp = 1"


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
        lambda c: c.policy.precision not in _kept(c, c.stack.precisions),
        lambda c: choice(c, "policy.precision", c.policy.precision, _kept(c, c.stack.precisions)),
    ),
    Rule("device-precision", _device_precision, _device_precision_words),
    Rule(
        "scaling",
        lambda c: c.policy.scaling not in ("auto", *_scalings(c)),
        lambda c: choice(c, "policy.scaling", c.policy.scaling, ("auto", *_scalings(c))),
    ),
    Rule("axis", _axis, _axis_words),
    Rule(
        "cp-kind",
        lambda c: (c.cp > 1) & outside(c.cp_kind, CP_KINDS, c.stack.cp_kinds),
        lambda c: choice(c, "policy.cp_kind", CP_KINDS[c.cp_kind], c.stack.cp_kinds),
    ),
    Rule(
        "schedule",
        lambda c: (c.pp > 1) & outside(c.schedule, SCHEDULES, c.stack.schedules),
        lambda c: choice(c, "policy.schedule", SCHEDULES[c.schedule], c.stack.schedules),
    ),
    Rule(
        "recompute",
        lambda c: outside(c.recompute, RECOMPUTE_KINDS, _kept(c, c.stack.recompute)),
        _recompute_words,
    ),
    Rule(
        "sharding", lambda c: (c.dp > 1) & outside(c.zero, range(4), c.stack.zeros), _sharding_words
    ),
    Rule("zero-pipeline", _zero_pipeline, _zero_pipeline_words),
    Rule("hybrid", _hybrid, _hybrid_words),
)
