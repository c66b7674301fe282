"""Rules of cutting a model: heads, sequences and layers over tensor, context and pipeline ranks."""

from __future__ import annotations

from dataclasses import replace

from fourfold.cost.count.params import end_layers
from fourfold.search.rules.case import (
    ULYSSES,
    Rule,
    RuleCase,
    Truth,
    Whole,
    Words,
    divides,
    divisors,
    few,
)
from fourfold.units import counted


def sequence_pieces(c: RuleCase) -> Whole:
    """Pieces that a sequence is cut into by context parallelism."""
    return c.cp * (1 + ((c.cp_kind != ULYSSES) | c.stack.even_pieces))


def _positions(c: RuleCase) -> Truth:
    rows = c.model.positions.length if c.model.positions.kind == "learned" else None
    return rows is not None and c.seq_len > rows


def _positions_words(c: RuleCase) -> Words:
    rows = c.model.positions.length
    rule = f"exceeds the model's {rows} learned positions"
    return "batch.seq_len", c.seq_len, rule, f"use at most {rows}, or a model with rope or alibi"


def _kv_heads(c: RuleCase) -> Truth:
    """Asked only where heads pass, so that plain multi-head attention has one reason, not two."""
    odd = (c.model.kv_heads % c.tp != 0) & (c.model.heads % c.tp == 0)
    return odd & (c.tp % c.model.kv_heads != 0) if c.stack.copies_kv_heads else odd


def tp_divides(c: RuleCase) -> Truth:
    """Whether heads, key heads and MLP can be cut over tensor ranks at all."""
    return (c.model.heads % c.tp == 0) & (_kv_heads(c) == 0) & (c.model.ffn % c.tp == 0)


def _kv_heads_words(c: RuleCase) -> Words:
    kv, heads = c.model.kv_heads, c.model.heads
    legal = [d for d in divisors(heads) if kv % d == 0 or (c.stack.copies_kv_heads and d % kv == 0)]
    rule = f"must divide kv_heads={kv}"
    rule += " or be a multiple of it" if c.stack.copies_kv_heads else f" for {c.stack.name}"
    return "layout.tp", c.tp, rule, f"use tp {few(legal, c.tp)}"


def _ffn_words(c: RuleCase) -> Words:
    both = [d for d in divisors(c.model.heads) if c.model.ffn % d == 0]
    return "layout.tp", c.tp, f"must divide ffn={c.model.ffn}", f"use tp {few(both, c.tp)}"


def _ulysses_heads(c: RuleCase) -> Truth:
    """Query heads of a tensor-parallel rank are dealt to the context ranks.

    KV heads that do not come out even are repeated until they do: heads/tp is a multiple of both.
    """
    dealt = (c.model.heads // c.tp) % c.cp != 0
    kv = (c.model.kv_heads // c.tp) % c.cp != 0
    odd = dealt if c.stack.copies_kv_heads and c.stack.ulysses_copies_kv else dealt | kv
    return (c.cp > 1) & (c.cp_kind == ULYSSES) & odd


def _ulysses_heads_words(c: RuleCase) -> Words:
    each = c.model.heads // c.tp
    rule = f"must divide heads/tp = {each}"
    if not c.stack.copies_kv_heads:
        each = max(1, c.model.kv_heads // c.tp)
        rule += f" and kv_heads/tp = {each}"
    hint = f"use cp {few(divisors(each), c.cp)}, or cp_kind = ring"
    return "layout.cp", c.cp, f"{rule} for ulysses", hint


def _seq_cp(c: RuleCase) -> Truth:
    """Ring and all-gather give each rank an early and a late piece (zig-zag), Ulysses one piece."""
    return (c.cp > 1) & (c.seq_len % sequence_pieces(c) != 0)


def _seq_cp_words(c: RuleCase) -> Words:
    pieces = sequence_pieces(c)
    each = "one chunk" if pieces == c.cp else "two chunks (zig-zag)"
    rule = f"must be a multiple of {pieces}: each of cp={c.cp} ranks takes {each}"
    return "batch.seq_len", c.seq_len, rule, f"use seq_len = {-(-c.seq_len // pieces) * pieces}"


def _seq_tp(c: RuleCase) -> Truth:
    odd = c.seq_len // c.cp % c.tp != 0
    undivided = (c.sequence_parallel == 0) & (not c.stack.gathers_tp)
    return (c.tp > 1) & (((c.sequence_parallel == 1) & odd) | undivided)


def _seq_tp_words(c: RuleCase) -> Words:
    if not c.sequence_parallel:
        rule = f"is not supported by {c.stack.name} with tensor parallelism"
        return "policy.sequence_parallel", False, rule, "use sequence_parallel = true, or tp = 1"
    rule = f"needs seq_len / cp = {c.seq_len // c.cp} to be a multiple of tp={c.tp}"
    hint = "use sequence_parallel = false, or another tp"
    return "policy.sequence_parallel", True, rule, hint


def _stages_words(c: RuleCase) -> Words:
    layers = c.model.layers
    return "layout.pp", c.pp, f"exceeds layers={layers}", f"use pp = {layers} at most"


def _virtual_stages_words(c: RuleCase) -> Words:
    most = max(1, c.model.layers // c.pp)
    stages = counted(c.pp * c.virtual_stages, "stage")
    rule = f"times pp gives {stages} for {counted(c.model.layers, 'layer')}"
    return "policy.virtual_stages", c.virtual_stages, rule, f"use at most {most}"


def _stage_layers(c: RuleCase) -> Truth:
    """Whether the engine has no way to cut the layers into these stages (and virtual ones)."""
    layers, chunks = c.model.layers, c.pp * c.virtual_stages
    if c.stack.stage_rule == "filled":
        each = -(-layers // chunks)
        odd = -(-layers // each) != chunks
    elif c.stack.stage_rule == "even":
        # The ends may be short, down to the embedding or the head alone.
        further = c.model.mtp or 0 if c.stack.predicts_further else 0
        odd = end_layers(layers + further, chunks, further)[0] < 0
    else:
        return False
    return (c.pp > 1) & (chunks <= layers) & odd


def _stage_layers_words(c: RuleCase) -> Words:
    chunks, layers = c.pp * c.virtual_stages, c.model.layers
    cut = f"{counted(layers, 'layer')} into {counted(c.pp, 'stage')}"
    rule = f"is not possible: {c.stack.name} cannot split {cut}"
    if c.virtual_stages > 1:
        rule += f" of {c.virtual_stages} virtual stages"
    asked = replace(c, virtual_stages=1)
    most = max(1, layers // c.pp)
    virtual = [v for v in range(1, most + 1) if not _stage_layers(replace(c, virtual_stages=v))]
    if virtual:
        hint = f"use virtual_stages {few(virtual, c.virtual_stages)}"
        return "policy.virtual_stages", c.virtual_stages, rule, hint
    stages = [p for p in range(1, layers + 1) if not _stage_layers(replace(asked, pp=p))]
    return "layout.pp", c.pp, f"{rule} ({chunks} in all)", f"use pp {few(stages, c.pp)}"


def _tied_stages_words(c: RuleCase) -> Words:
    rule = f"is not supported by {c.stack.name} with tied embeddings"
    return "layout.pp", c.pp, rule, "use pp = 1, or an untied model"


def _plain_dp(c: RuleCase) -> Truth:
    others = (c.pp > 1) | (c.cp > 1) | (c.tp > 1) | (c.ep > 1)
    return c.stack.plain_dp_alone & (c.zero == 0) & ((c.dp > 1) & others | (c.cp > 1))


def _plain_dp_words(c: RuleCase) -> Words:
    rule = f"is supported by {c.stack.name} only without tp, cp, pp and ep"
    return "policy.sharding", "zero0", rule, "use sharding = zero2 or zero3"


RULES = (
    Rule("positions", _positions, _positions_words),
    divides("heads", "tp", "heads"),
    Rule("kv-heads", _kv_heads, _kv_heads_words),
    Rule("ffn", lambda c: c.model.ffn % c.tp != 0, _ffn_words),
    Rule("ulysses-heads", _ulysses_heads, _ulysses_heads_words),
    Rule("seq-cp", _seq_cp, _seq_cp_words),
    Rule("seq-tp", _seq_tp, _seq_tp_words),
    Rule(
        "async-tp",
        lambda c: c.policy.async_tp & (c.tp > 1) & (c.sequence_parallel == 0),
        lambda c: ("policy.async_tp", True, "needs sequence_parallel = true", "change one of them"),
    ),
    Rule("stages", lambda c: c.pp > c.model.layers, _stages_words),
    Rule(
        "virtual-stages",
        lambda c: (c.pp <= c.model.layers) & (c.pp * c.virtual_stages > c.model.layers),
        _virtual_stages_words,
    ),
    Rule("stage-layers", _stage_layers, _stage_layers_words),
    Rule(
        "tied-stages",
        lambda c: (c.pp > 1) & (c.model.tied and not c.stack.ties_stages),
        _tied_stages_words,
    ),
    Rule("plain-dp", _plain_dp, _plain_dp_words),
)
