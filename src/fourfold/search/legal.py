"""Why can this layout not run? One answer for planner, sweep, verify and engine.

`why_not` asks every rule of search/rules.py about one run and explains each broken one; a search
asks the same rules about whole columns (search/candidates.py). Memory is not asked here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fourfold.cost.run import chosen
from fourfold.errors import UserError
from fourfold.search.rules import (
    RULES,
    Case,
    Reason,
    fp8_sides,
    micro_count,
    sequence_pieces,
    unbuilt_choices,
)
from fourfold.search.stacks import stack_rules
from fourfold.spec.batch import Batch
from fourfold.spec.device import Device
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec
from fourfold.spec.runnable import not_run
from fourfold.spec.words import CP_KINDS, RECOMPUTE_KINDS, SCHEDULES


@dataclass(frozen=True, slots=True)
class Refusal:
    """One broken rule: which, and what to say about it."""

    reason: Reason
    field: str
    value: object
    rule: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.field}={self.value}: {self.rule}"
        return f"{text}; {self.hint}" if self.hint else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where it should run: whose engine, on how many ranks of what; None: not asked."""

    stack: str = "fourfold"
    gpus: int | None = None
    device: Device | None = None
    runs: bool = True  # False: only planned, so what our engine lacks is no obstacle


def case_of(
    model: ModelShape, layout: Layout, batch: Batch, policy: Policy, target: Target
) -> Case:
    return Case(
        model=model,
        stack=stack_rules(target.stack),
        gpus=target.gpus,
        device=target.device,
        policy=policy,
        **chosen(layout, batch, policy),
        seq_len=batch.seq_len,
        batch_sizes=tuple(size for size, _ in batch.stages()),
        sequence_parallel=int(policy.sequence_parallel),
        runs=target.runs,
    )


def why_not(
    model: ModelShape,
    layout: Layout,
    batch: Batch,
    policy: Policy,
    target: Target | None = None,
) -> tuple[Refusal, ...]:
    """Every broken rule, in the order of REASONS; empty: legal. Memory is not asked here."""
    case = case_of(model, layout, batch, policy, target or Target())
    return tuple(
        Refusal(reason, *_TEXTS[reason](case))
        for reason, is_broken in RULES.items()
        if is_broken(case)
    )


# What a broken rule says: field, value, rule, way out.
Words = tuple[str, object, str, str]


def require_legal(spec: RunSpec) -> None:
    """Raise the first broken rule of a run of our engine."""
    for said in why_not(spec.model, spec.layout, spec.batch, spec.policy, Target(gpus=spec.gpus)):
        raise UserError(said.rule, field=said.field, value=said.value, hint=said.hint)


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _few(values: list[int], near: int, count: int = 6) -> str:
    """The values nearest to `near`, in order."""
    return ", ".join(str(v) for v in sorted(sorted(values, key=lambda v: abs(v - near))[:count]))


def _choice(c: Case, field: str, value: object, allowed: tuple[object, ...]) -> Words:
    words = ", ".join(str(item) for item in allowed) or "nothing"
    return field, value, f"{c.stack.name} does not run it", f"it runs {words}"


def _world(c: Case) -> Words:
    product = c.pp * c.dp * c.cp * c.tp
    rule = f"pp {c.pp} x dp {c.dp} x cp {c.cp} x tp {c.tp} = {product} must equal it"
    inner = c.pp * c.cp * c.tp
    fits = c.gpus is not None and c.gpus % inner == 0
    return "gpus", c.gpus, rule, f"dp = {c.gpus // inner}" if fits and c.gpus else "change an axis"


def _family(c: Case) -> Words:
    lacking = not_run(c.model, c.seq_len) if c.stack.name == "fourfold" else ()
    if lacking:
        rule = f"the engine does not run {', '.join(lacking)}"
        only_long = not not_run(c.model, min(c.seq_len, c.model.window or c.seq_len))
        shorter = f"--seq-len {c.model.window} or fewer, or " if only_long else ""
        return "model", c.model.name, rule, f"{shorter}plan, flops and models take it"
    return _choice(c, "model.family", c.model.family, c.stack.families)


def _precision(c: Case) -> Words:
    return _choice(c, "policy.precision", c.policy.precision, c.stack.precisions)


def _device_precision(c: Case) -> Words:
    assert c.device is not None
    rule = f"{c.device.id} has no matrix unit for it"
    return "policy.precision", c.policy.precision, rule, "precision = bf16"


def _axis(c: Case) -> Words:
    sizes = {"tp": c.tp, "cp": c.cp, "pp": c.pp}
    axis = next(name for name, size in sizes.items() if size > 1 and name not in c.stack.axes)
    return f"layout.{axis}", sizes[axis], f"{c.stack.name} has no such axis", f"{axis} = 1"


def _cp_kind(c: Case) -> Words:
    return _choice(c, "policy.cp_kind", CP_KINDS[c.cp_kind], c.stack.cp_kinds)


def _schedule(c: Case) -> Words:
    return _choice(c, "policy.schedule", SCHEDULES[c.schedule], c.stack.schedules)


def _recompute(c: Case) -> Words:
    kind = RECOMPUTE_KINDS[c.recompute]
    return _choice(c, "policy.recompute", kind, c.stack.recompute)


def _sharding(c: Case) -> Words:
    allowed = tuple(f"zero{stage}" for stage in c.stack.zeros)
    return _choice(c, "policy.sharding", f"zero{c.zero}", allowed)


def _zero_pipeline(c: Case) -> Words:
    allowed = ", ".join(f"zero{stage}" for stage in c.stack.pipeline_zeros)
    rule = f"{c.stack.name} does not shard this much with a pipeline (pp={c.pp})"
    return "policy.sharding", f"zero{c.zero}", rule, f"{allowed}, or pp = 1"


def _hybrid(c: Case) -> Words:
    value = f"{c.replicate}x{c.shard}"
    if not c.stack.hybrid:
        return "layout.dp", value, f"{c.stack.name} has no hybrid sharding", f"dp = {c.dp}"
    return "layout.dp", value, "zero0 shards nothing", f"dp = {c.dp}, or sharding = zero1"


def _positions(c: Case) -> Words:
    rows = c.model.positions.length
    rule = f"exceeds the model's {rows} learned positions"
    return "batch.seq_len", c.seq_len, rule, f"at most {rows}, or a model with rope or alibi"


def _heads(c: Case) -> Words:
    heads = c.model.heads
    return "layout.tp", c.tp, f"must divide heads={heads}", f"tp: {_few(divisors(heads), c.tp)}"


def _kv_heads(c: Case) -> Words:
    kv, heads = c.model.kv_heads, c.model.heads
    legal = [d for d in divisors(heads) if kv % d == 0 or (c.stack.copies_kv_heads and d % kv == 0)]
    rule = f"must divide kv_heads={kv}"
    rule += " or be a multiple of it" if c.stack.copies_kv_heads else f" for {c.stack.name}"
    return "layout.tp", c.tp, rule, f"tp: {_few(legal, c.tp)}"


def _ffn(c: Case) -> Words:
    both = [d for d in divisors(c.model.heads) if c.model.ffn % d == 0]
    return "layout.tp", c.tp, f"must divide ffn={c.model.ffn}", f"tp: {_few(both, c.tp)}"


def _ulysses_heads(c: Case) -> Words:
    each = c.model.heads // c.tp
    rule = f"ulysses deals heads/tp = {each} query heads"
    if not c.stack.copies_kv_heads:
        each = max(1, c.model.kv_heads // c.tp)
        rule += f" and kv_heads/tp = {each} key heads"
    hint = f"cp: {_few(divisors(each), c.cp)}, or cp_kind = ring"
    return "layout.cp", c.cp, f"{rule} to the ranks; it must divide them", hint


def _seq_cp(c: Case) -> Words:
    pieces = sequence_pieces(c)
    each = "one piece" if pieces == c.cp else "two pieces (zig-zag)"
    rule = f"must be a multiple of {pieces}: each of cp={c.cp} ranks takes {each}"
    return "batch.seq_len", c.seq_len, rule, f"seq_len = {-(-c.seq_len // pieces) * pieces}"


def _seq_tp(c: Case) -> Words:
    rule = f"seq_len / cp = {c.seq_len // c.cp} must be a multiple of tp={c.tp}"
    hint = "sequence_parallel = false, or another tp"
    return "policy.sequence_parallel", True, rule, hint


def _async_tp(c: Case) -> Words:
    return "policy.async_tp", True, "needs sequence_parallel = true", "switch one of them"


def _stages(c: Case) -> Words:
    return "layout.pp", c.pp, f"exceeds layers={c.model.layers}", f"pp = {c.model.layers} at most"


def _virtual_stages(c: Case) -> Words:
    most = max(1, c.model.layers // c.pp)
    rule = f"pp x virtual_stages = {c.pp * c.virtual_stages} exceeds layers={c.model.layers}"
    return "policy.virtual_stages", c.virtual_stages, rule, f"at most {most}"


def _stage_layers(c: Case) -> Words:
    chunks, layers = c.pp * c.virtual_stages, c.model.layers
    rule = f"{c.stack.name} cannot cut {layers} layers into {c.pp} stages"
    if c.virtual_stages > 1:
        rule += f" of {c.virtual_stages} virtual ones"
    asked = replace(c, virtual_stages=1)
    most = max(1, layers // c.pp)
    virtual = [
        v for v in range(1, most + 1) if not RULES["stage-layers"](replace(c, virtual_stages=v))
    ]
    if virtual:
        hint = f"virtual_stages: {_few(virtual, c.virtual_stages)}"
        return "policy.virtual_stages", c.virtual_stages, rule, hint
    stages = [p for p in range(1, layers + 1) if not RULES["stage-layers"](replace(asked, pp=p))]
    return "layout.pp", c.pp, f"{rule} ({chunks} in all)", f"pp: {_few(stages, c.pp)}"


def _tied_stages(c: Case) -> Words:
    rule = f"{c.stack.name} does not tie embeddings over stages"
    return "layout.pp", c.pp, rule, "pp = 1, or an untied model"


def _plain_dp(c: Case) -> Words:
    rule = f"{c.stack.name} runs it without tp, cp and pp only"
    return "policy.sharding", "zero0", rule, "sharding = zero2 or zero3"


def _needs_interleaving(c: Case) -> Words:
    rule = f"schedule {SCHEDULES[c.schedule]} runs one chunk a rank"
    hint = "schedule = interleaved or zero-bubble"
    return "policy.virtual_stages", c.virtual_stages, rule, hint


def _needs_virtual_stages(c: Case) -> Words:
    schedule = SCHEDULES[c.schedule]
    return "policy.schedule", schedule, "needs virtual_stages above 1", "virtual_stages = 2"


def _needs_pipeline(c: Case) -> Words:
    looped = SCHEDULES[c.schedule]
    if c.virtual_stages > 1:
        return "policy.virtual_stages", c.virtual_stages, "needs pp above 1", "virtual_stages = 1"
    return "policy.schedule", looped, "needs pp above 1", "schedule = 1f1b"


def _compiled_zero_bubble(c: Case) -> Words:
    rule = "splits the backward, which compiled blocks do not allow"
    return "policy.schedule", "zero-bubble", rule, "compile = false, or schedule = interleaved"


def _fp8_sizes(c: Case) -> Words:
    multiple = c.stack.fp8_multiple
    name, side = next((n, side) for n, side in fp8_sides(c).items() if side % multiple)
    rule = f"{name} = {side} must be a multiple of {multiple} for products in fp8"
    return "policy.precision", c.policy.precision, rule, "precision = bf16, or another tp, cp"


def _fp8_zero_bubble(c: Case) -> Words:
    rule = "splits the backward, which products in fp8 do not allow"
    return "policy.schedule", "zero-bubble", rule, "precision = bf16, or schedule = interleaved"


def _unbuilt(c: Case) -> Words:
    field = next(field for field, is_unbuilt in unbuilt_choices(c).items() if is_unbuilt)
    rule = "the engine does not run it yet"
    return f"policy.{field}", getattr(c.policy, field), rule, "leave it at its default"


def _bad_size(c: Case, is_bad: Callable[[int], bool]) -> tuple[int, str]:
    """The first batch size that breaks a rule, and what to call it."""
    size = next(size for size in c.batch_sizes if is_bad(size))
    return size, "global_batch" if size == c.batch_sizes[-1] else "ramp stage"


def _dp_batch(c: Case) -> Words:
    size, what = _bad_size(c, lambda size: c.dp > size)
    rule = f"exceeds {what} {size}: some ranks would have no sequence"
    return "layout.dp", c.dp, rule, f"dp = {size} at most"


def _equal_shares(c: Case) -> Words:
    size, what = _bad_size(c, lambda size: size % c.dp != 0)
    rule = f"must divide {what} {size} for {c.stack.name}"
    return "layout.dp", c.dp, rule, _reachable(size, c.dp)


def _micro_divides(c: Case) -> Words:
    whole = c.dp * c.micro_batch
    size, what = _bad_size(c, lambda size: size % whole != 0)
    rule = f"dp x micro_batch = {whole} must divide {what} {size} for {c.stack.name}"
    return "batch.micro_batch", c.micro_batch, rule, _reachable(size, whole)


def _reachable(size: int, step: int) -> str:
    below, above = size // step * step, -(-size // step) * step
    return f"nearest batches: {f'{below}, ' if below else ''}{above}"


def _fill(c: Case) -> Words:
    size, what = _bad_size(c, lambda size: micro_count(c, size) < c.pp)
    rule = f"{what} {size} gives {micro_count(c, size)} micro batches, fewer than the stages"
    return "layout.pp", c.pp, rule, f"pp = {micro_count(c, size)} at most for {c.stack.name}"


def _whole_rounds(c: Case) -> Words:
    def is_bad(size: int) -> bool:
        return bool(RULES["whole-rounds"](replace(c, batch_sizes=(size,))))

    size, what = _bad_size(c, is_bad)
    wanted = "rounds of equal size" if c.stack.equal_rounds else f"a multiple of pp={c.pp}"
    rule = f"{what} {size} gives {micro_count(c, size)} micro batches, not {wanted}"
    schedule = SCHEDULES[c.schedule]
    return "policy.schedule", schedule, rule, f"for {c.stack.name}: another micro_batch or pp"


_TEXTS: dict[Reason, Callable[[Case], Words]] = {
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
