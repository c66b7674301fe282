"""Rules of models with experts: where experts lie, and how tokens get to them."""

from __future__ import annotations

from collections.abc import Iterator

from fourfold.search.rules.case import (
    Rule,
    RuleCase,
    Truth,
    Words,
    any_of,
    choice,
    divides,
    divisors,
    few,
)
from fourfold.spec.words import MOE_RECOMPUTE, RECOMPUTE_KINDS

# Recompute that runs an exchange again, between layers of which another one is hidden.
_RECOMPUTES_EXCHANGE = tuple(map(RECOMPUTE_KINDS.index, ("full", "every", "block", "moe")))

_OF_EXPERTS = {
    "dispatcher": "auto",
    "routing": "natural",
    "imbalance": None,
    "overlap_exchange": False,
}
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


def _idle_choices(c: RuleCase) -> dict[str, object]:
    """Choices of a policy that change nothing in a dense model."""
    asked = {name: getattr(c.policy, name) for name in _OF_EXPERTS}
    return {name: value for name, value in asked.items() if value != _OF_EXPERTS[name]}


def _expert_dense(c: RuleCase) -> Truth:
    if c.model.moe is not None:
        return False
    kinds = (c.recompute == _MOE_KINDS[0]) | (c.recompute == _MOE_KINDS[1])
    return (c.ep > 1) | (c.etp > 1) | kinds | bool(_idle_choices(c))


def _expert_dense_words(c: RuleCase) -> Words:
    rule = f"needs experts, which {c.model.name} does not have"
    for name, value in _idle_choices(c).items():
        return f"policy.{name}", value, rule, "omit it, or use a model with experts"
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


def _expert_tp(c: RuleCase) -> Truth:
    if _has_whole_biases(c):
        return c.etp > 1
    if c.model.moe is None or not c.stack.experts_follow_tp:
        return False
    return c.etp != 1 + (c.tp - 1) * (c.ep == 1)


def _has_whole_biases(c: RuleCase) -> bool:
    """Return whether experts have biases that the engine does not cut."""
    return c.model.moe is not None and c.model.moe.expert_bias and c.stack.whole_biased_experts


def _expert_tp_words(c: RuleCase) -> Words:
    if _has_whole_biases(c):
        rule = f"cuts experts with biases, which {c.stack.name} does not"
        return "layout.etp", c.etp, rule, "use etp = 1, with more ep"
    cut = "experts are cut over tp where ep is 1, and whole where it is more"
    whole = f"ep above 1 with etp = 1, or etp = {c.tp}"
    return "layout.etp", c.etp, f"is not possible with {c.stack.name}: {cut}", f"use {whole}"


def _dispatcher(c: RuleCase) -> Truth:
    spread = c.ep * c.etp > 1
    alone = c.policy.dispatcher == "local"
    waits = c.policy.cuda_graph & c.stack.is_ours
    return _lacks_dispatcher(c) or spread & (alone | waits)


def _dispatchers(c: RuleCase) -> tuple[str, ...]:
    """Return the dispatchers that the engine has for this model."""
    lost = () if c.model.latent else c.stack.latent_dispatchers
    return ("auto", *(kind for kind in c.stack.dispatchers if kind not in lost))


def _lacks_dispatcher(c: RuleCase) -> bool:
    return c.policy.dispatcher not in _dispatchers(c)


def _dispatcher_words(c: RuleCase) -> Words:
    if _lacks_dispatcher(c):
        return choice(c, "policy.dispatcher", c.policy.dispatcher, _dispatchers(c))
    if c.policy.cuda_graph and c.stack.is_ours:
        rule = "needs a step without host waits, but tokens are exchanged by counts (ep x etp > 1)"
        return "policy.cuda_graph", True, rule, "use cuda_graph = false, or ep = 1"
    rule = f"keeps tokens on their rank, but ep={c.ep} x etp={c.etp} spreads experts"
    return "policy.dispatcher", "local", rule, "use dispatcher = alltoall or allgather"


def _overlap_needs(c: RuleCase) -> Iterator[tuple[Truth, str]]:
    """Yield what hiding the exchange in the requested way needs: (whether it is missing, words)."""
    if c.overlap == "shared-expert":
        yield c.ep * c.etp == 1, "experts on other ranks (ep x etp above 1)"
        yield not (c.model.moe and c.model.moe.shared_ffn), "shared experts"
        yield c.dispatcher != "alltoall", "dispatcher = alltoall"
    elif c.overlap == "combined-1f1b" and c.stack.overlap_in_1f1b:
        yield c.ep == 1, "ep above 1"
        yield (c.pp > 1) & (c.virtual_stages == 1), "virtual stages in a pipeline"
        recomputes = any_of([c.recompute == kind for kind in _RECOMPUTES_EXCHANGE])
        yield recomputes, "recompute of none, selective or moe-act"
        yield c.dispatcher in ("local", "allgather"), "a dispatcher other than allgather"
        yield c.dtypes.compute == "fp32", "products in 16 bits or fewer"
        if further := c.model.mtp or 0:
            yield further > 1, "one layer of multi-token prediction at most"
            yield c.pp == 1, "a pipeline for its layer of multi-token prediction"


def _overlap(c: RuleCase) -> Truth:
    if c.model.moe is None or not c.policy.overlap_exchange or c.stack.is_ours:
        return False
    if c.overlap not in c.stack.overlaps:
        return True
    return any_of([is_missing for is_missing, _ in _overlap_needs(c)])


def _overlap_words(c: RuleCase) -> Words:
    field, no_overlap = "policy.overlap_exchange", "use overlap_exchange = false"
    if not c.stack.overlaps:
        return field, True, f"is not supported by {c.stack.name}", no_overlap
    if c.overlap not in c.stack.overlaps:
        return choice(c, "policy.overlap_kind", c.overlap, c.stack.overlaps)
    needs = " and ".join(words for is_missing, words in _overlap_needs(c) if is_missing)
    rule = f"hides an exchange by {c.overlap}, which needs {needs}"
    return field, True, rule, f"{no_overlap}, or change that"


def _graph_needs(c: RuleCase) -> Iterator[tuple[bool, str]]:
    """Yield what a step as one CUDA graph needs in every layout: (whether it is missing, words)."""
    yield len(c.batch_sizes) > 1, "one global batch size"
    if c.model.moe is not None:
        compute = c.dtypes.compute
        is_narrow = compute == "fp4" or (compute == "fp8" and c.policy.scaling_kind == "mx")
        yield not is_narrow, "precision = mxfp8 or fp4"
        yield c.dispatcher != "hybridep", "dispatcher = hybridep"
        yield c.model.moe.capacity > 0, "experts that drop no tokens"


def _graph(c: RuleCase) -> Truth:
    if not c.policy.cuda_graph:
        return False
    if not c.stack.whole_graphs:
        return True
    if not c.stack.static_graphs:
        return False
    if any(is_missing for is_missing, _ in _graph_needs(c)):
        return True
    return (c.model.moe is not None) & ((c.ep == 1) | (c.etp > 1))


def _graph_words(c: RuleCase) -> Words:
    field, no_graph = "policy.cuda_graph", "use cuda_graph = false"
    if not c.stack.whole_graphs:
        return field, True, f"is not supported by {c.stack.name}", no_graph
    needs = [words for is_missing, words in _graph_needs(c) if is_missing]
    needs = needs or ["ep above 1 with etp = 1"]
    rule = f"records a step as one CUDA graph, which needs {' and '.join(needs)}"
    return field, True, rule, f"{no_graph}, or change that"


RULES = (
    Rule("expert-dense", _expert_dense, _expert_dense_words),
    divides("experts", "ep", "experts"),
    Rule("expert-ranks", _expert_ranks, _expert_ranks_words),
    divides("expert-width", "etp", "moe.ffn", ", an expert's width"),
    Rule("expert-tp", _expert_tp, _expert_tp_words),
    divides("shared-width", "tp", "moe.shared_ffn"),
    Rule("moe-tp", _moe_tp, _moe_tp_words),
    Rule("dispatcher", _dispatcher, _dispatcher_words),
    Rule("overlap", _overlap, _overlap_words),
    Rule("graph", _graph, _graph_words),
)
