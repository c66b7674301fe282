"""A whole decoder layer as its dry run counted it (engine/trace/layer.py): the ledger's steps, its
tensors with symbols."""

from __future__ import annotations

import itertools
from dataclasses import replace
from operator import attrgetter

from fourfold.cost.trace.steps import (
    Program,
    axis_groups,
    expert_axis_groups,
)
from fourfold.cost.trace.symbols import Symbols, bracketed, stretched_sizes
from fourfold.result.trace import LayerTrace, StepCount, TensorCount
from fourfold.spec.batch import Batch
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape, kv_copies
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec
from fourfold.spec.supported import not_run
from fourfold.spec.words import AROUND, CpKind, Dtype, Sharding

SHARDS = "dpxcp"
# Steps that are alike in these are one, done several times.
_CONTENT = attrgetter("name", "tensors", "flops", "messages")


def layer_spec(
    model: ModelShape,
    tokens: int,
    layout: Layout,
    *,
    dtype: Dtype = "bf16",
    cp_kind: CpKind = "ring",
    sharding: Sharding = "zero1",
) -> RunSpec:
    """A run with one sequence a rank, of which a middle layer is traced: what an end of the model
    has does not matter, and a head is turned whole, which takes more room than a part of it."""
    moe = None if model.moe is None else replace(model.moe, dense_first=0, every=1)
    model = replace(model, moe=moe, layers=3, mixers=None, head_bias=False)
    note = ""
    if "rotary" in " ".join(not_run(model, tokens)):
        note = "rotary positions of a whole head, of which the model turns a part"
        positions = replace(model.positions, partial=1.0)
        model = replace(model, family="llama", positions=positions)
    around = AROUND.get(dtype, dtype)
    return RunSpec(
        model=model,
        gpus=layout.world,
        layout=layout,
        batch=Batch(seq_len=tokens, micro_batch=1, global_batch=layout.dp),
        policy=Policy(
            sharding=sharding,
            cp_kind=cp_kind,
            param_dtype=around,
            compute_dtype=dtype,
            reduce_dtype=around,
            grad_dtype=around,
        ),
        device="cpu",
        note=note,
    )


def layer_program(spec: RunSpec, rank: int, trace: LayerTrace) -> Program:
    """What stands above the steps: sizes, groups, a rank's share."""
    model, layout = spec.model, spec.layout
    return Program(
        kind="layer",
        ranks=layout.world,
        sizes=_sizes(spec, trace),
        dtype=spec.policy.dtypes.compute,
        groups=(
            axis_groups(layout, ("tp",), "tp"),
            axis_groups(layout, ("cp",), "cp"),
            axis_groups(layout, ("dp", "cp"), SHARDS),
            *(expert_axis_groups(layout) if model.moe else ()),
        ),
        steps=(),
        per_rank={
            "heads": model.heads // layout.tp,
            "kv_heads": max(1, model.kv_heads // layout.tp),
            "tokens": spec.batch.seq_len // layout.cp,
            "ffn": model.ffn // layout.tp,
        },
        rank=rank,
        notes=_notes(spec),
    )


def _notes(spec: RunSpec) -> tuple[str, ...]:
    shards = spec.layout.dp * spec.layout.cp
    notes = (
        f"{spec.model.name}, one layer forward and backward, batch 1, eager: the engine's own, "
        "counted on fake tensors; flash attention, causal: half the square; norms, biases and "
        "element-wise FLOPs are not counted",
        "weights and gradients in the trace's dtype, no optimizer state; "
        f"{spec.policy.sharding} over dp x cp = {shards}",
        f"cp kind: {spec.policy.cp_kind}" if spec.layout.cp > 1 else "",
        "every expert is chosen by as many tokens" if spec.model.moe else "",
        spec.note,
    )
    return tuple(note for note in notes if note)


def _sizes(spec: RunSpec, trace: LayerTrace) -> dict[str, int]:
    model, layout = spec.model, spec.layout
    kv_rank = max(1, model.kv_heads // layout.tp)
    sizes = {
        "tokens": spec.batch.seq_len,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_size": model.head_size,
        "ffn": model.ffn,
        "tp": layout.tp,
        "cp": layout.cp,
        "dp": layout.dp,
        # Columns of the fused projection on one rank; a KV head may be on several.
        "qkv_width": (model.heads // layout.tp + 2 * kv_rank) * model.head_size,
    }
    if layout.cp > 1 and spec.policy.cp_kind == "ulysses":
        copies = kv_copies(model.heads // layout.tp, kv_rank, layout.cp)
        if copies > 1:
            sizes["kv_copies"] = copies
    if model.moe is not None:
        sizes |= {
            "experts": model.experts,
            "top_k": model.top_k,
            "expert_ffn": model.moe.ffn,
            "ep": layout.ep,
            "etp": layout.etp,
        }
    flat = [t.shape[0] for step in trace.steps for t in step.tensors if t.name == "buffer"]
    if flat:
        sizes["weights"] = max(flat)  # padded to equal parts
    return sizes


def payload_bytes(trace: LayerTrace) -> tuple[int, int]:
    """Whole buffers of all messages, forward and backward."""
    turn = [step.name for step in trace.steps].index("gradient")
    sent = [sum(one.bytes for one in step.messages) for step in trace.steps]
    return sum(sent[:turn]), sum(sent[turn:])


def layer_steps(
    program: Program, spec: RunSpec, counts: tuple[LayerTrace, LayerTrace]
) -> tuple[StepCount, ...]:
    """The ledger's steps with symbols; equal steps in a row are one, `times` over."""
    trace, second = counts
    other_sizes = _sizes(stretched_sizes(spec), second)
    if not _alike(trace, second):  # sizes of 1 may take another way through torch
        second, other_sizes = trace, program.sizes
    symbols = Symbols(program.sizes, other_sizes)
    pairs = zip(trace.steps, second.steps, strict=True)
    steps = []
    for _, group in itertools.groupby(pairs, key=lambda pair: _CONTENT(pair[0])):
        repeats = list(group)
        step, other = repeats[-1]
        steps.append(
            replace(
                step,
                formula=_formula(step),
                times=len(repeats),
                tensors=_tensors(step, other, symbols),
                peak_bytes=max(first.peak_bytes for first, _ in repeats),
            )
        )
    return tuple(steps)


def _alike(one: LayerTrace, two: LayerTrace) -> bool:
    """Whether two counts have the same steps with the same tensors, but for their sizes."""
    first, second = (
        [(s.name, [(t.name, len(t.shape)) for t in s.tensors]) for s in trace.steps]
        for trace in (one, two)
    )
    return first == second


def _formula(step: StepCount) -> str:
    if step.name == "hold":
        return "weights as they are kept, tables of positions, this rank's tokens"
    return ", ".join(step.operators) or "one kernel"


def _tensors(step: StepCount, other: StepCount, symbols: Symbols) -> tuple[TensorCount, ...]:
    """What was made on the way to the first step, and has no name, is gone."""
    pairs = zip(step.tensors, other.tensors, strict=True)
    return tuple(
        _tensor(one, two, symbols) for one, two in pairs if one.named or step.name != "hold"
    )


def _tensor(one: TensorCount, two: TensorCount, symbols: Symbols) -> TensorCount:
    """Without dimensions of 1, the batch's above all."""
    pairs = [pair for pair in zip(one.shape, two.shape, strict=True) if pair != (1, 1)]
    shape = tuple(first for first, _ in pairs)
    return replace(one, shape=shape, symbolic=bracketed(symbols.of(pairs)))
