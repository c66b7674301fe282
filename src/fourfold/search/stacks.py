"""What can each training stack run? Facts of public engines, read from their documentation in 2026.

A stack's name may carry a year or a flavour ("megatron-lm-2024"): the longest known prefix counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fourfold.errors import UserError
from fourfold.spec.layout import MODEL_AXES
from fourfold.spec.model import FAMILIES
from fourfold.spec.words import CP_KINDS, PRECISIONS, RECOMPUTE_KINDS, SCHEDULES


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Limits of one engine; the defaults are those of an engine that can do everything.

    `batch_rule`: "any" micro batch; "shares": equal shares for all dp ranks, any micro batch in
    them; "whole": dp x micro batch divides the global batch.
    """

    name: str
    axes: tuple[str, ...] = MODEL_AXES
    cp_kinds: tuple[str, ...] = CP_KINDS
    schedules: tuple[str, ...] = SCHEDULES
    recompute: tuple[str, ...] = RECOMPUTE_KINDS
    precisions: tuple[str, ...] = PRECISIONS
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    pipeline_zeros: tuple[int, ...] = (0, 1, 2, 3)
    hybrid: bool = True
    families: tuple[str, ...] = FAMILIES
    batch_rule: str = "any"
    whole_families: tuple[str, ...] = ()  # of those, which it does not cut into stages
    gathers_tp: bool = True  # tensor parallelism runs without sequence parallelism too
    copies_kv_heads: bool = True
    fills_pipeline: bool = False  # needs as many micro batches as stages
    whole_rounds: bool = False  # interleaving needs micro batches in multiples of the stages
    equal_rounds: bool = False  # interleaving needs rounds of equal size, of stages or more
    # Which stages it can cut: "any"; "even": equal ones, but for fewer layers at both ends;
    # "filled" to a number of layers a stage, in order, none left empty; "passing": a stage ends
    # with the layer that passes its share of layers and head.
    stage_rule: str = "any"
    even_pieces: bool = False  # early and late pieces of the sequence also under Ulysses
    ulysses_copies_kv: bool = True  # KV heads are repeated until Ulysses can deal them
    plain_dp_alone: bool = False  # zero0 runs without any other axis only
    ties_stages: bool = True  # tied embeddings may lie on two stages
    loops_zero_bubble: bool = False  # zero-bubble needs virtual stages
    compiles_zero_bubble: bool = True
    fp8_multiple: int = 1  # of which sides of a product in fp8 must be a multiple
    splits_fp8: bool = True  # zero-bubble's divided backward in fp8
    is_ours: bool = False  # src/fourfold/engine, whose gaps are rules too


STACKS: dict[str, Stack] = {
    stack.name: stack
    for stack in (
        Stack(name="generic"),
        Stack(
            name="fourfold",
            # What src/fourfold/engine runs today, nothing it is only meant to run.
            compiles_zero_bubble=False,
            precisions=tuple(name for name in PRECISIONS if name != "fp4"),
            fp8_multiple=16,
            splits_fp8=False,
            is_ours=True,
        ),
        Stack(
            name="megatron",
            recompute=("none", "selective", "full"),
            schedules=("1f1b", "interleaved"),
            precisions=("fp32", "bf16-mixed", "fp16", "fp8", "fp4"),
            pipeline_zeros=(
                0,
                1,
            ),  # its FSDP replaces the distributed optimizer and has no pipeline
            batch_rule="whole",
            whole_rounds=True,
            stage_rule="even",
            even_pieces=True,
            ulysses_copies_kv=False,
        ),
        Stack(
            name="torchtitan",
            cp_kinds=("allgather",),
            # Its "selective" chooses operations or every N-th layer, not the attention core.
            recompute=("none", "full", "every"),
            zeros=(0, 2, 3),
            pipeline_zeros=(0, 2, 3),
            precisions=("fp32", "bf16-mixed", "fp8"),
            families=("llama", "qwen"),
            batch_rule="whole",
            copies_kv_heads=False,
            fills_pipeline=True,
            equal_rounds=True,
            stage_rule="filled",
            even_pieces=True,
            plain_dp_alone=True,
            ties_stages=False,
            loops_zero_bubble=True,
            compiles_zero_bubble=False,
            fp8_multiple=16,
            splits_fp8=False,
        ),
        Stack(
            name="nanotron",
            cp_kinds=("ring", "allgather"),
            schedules=("1f1b", "gpipe"),
            recompute=("none", "full"),
            precisions=("fp32", "bf16-mixed", "fp16"),
            zeros=(0, 1),
            pipeline_zeros=(0, 1),
            hybrid=False,
            families=("llama", "qwen"),
            batch_rule="whole",
            copies_kv_heads=False,
            fills_pipeline=True,
        ),
        Stack(
            name="llm-foundry",
            axes=(),
            recompute=("none", "full"),
            precisions=("fp32", "bf16-pure", "bf16-mixed", "fp16", "fp8"),
            zeros=(0, 2, 3),
            batch_rule="shares",  # its hf_causal_lm takes any model of transformers
        ),
    )
}
ALIASES = {"nemo": "megatron"}
# What a release lacks of that, by the engine that settings are written for (search/export).
RELEASES: dict[str, Stack] = {
    "megatron": STACKS["megatron"],
    "torchtitan": replace(STACKS["torchtitan"], recompute=("none", "full")),
    "torchtitan-0.2": replace(STACKS["torchtitan"], whole_families=("qwen",), gathers_tp=False),
    "nanotron": replace(
        STACKS["nanotron"],
        axes=("tp", "pp"),
        recompute=("none",),
        families=("llama",),
        stage_rule="passing",
    ),
}


def stack_rules(name: str) -> Stack:
    """The rules behind a stack's name; a name nobody knows has those of `generic`."""
    if not name.strip():
        raise UserError(
            "is empty", field="stack", value=name, hint="pass a name, such as --stack megatron"
        )
    key = name.lower()
    for prefix in sorted((*STACKS, *ALIASES), key=len, reverse=True):
        if key == prefix or key.startswith(f"{prefix}-"):
            return STACKS[ALIASES.get(prefix, prefix)]
    return STACKS["generic"]
