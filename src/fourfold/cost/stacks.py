"""What each training stack can run, and what it does when nobody says: facts of public engines, by
their documentation and defaults in 2026 and the notes of the published tables."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from fourfold.errors import UserError
from fourfold.result.one_rank import RESERVED_RATIO
from fourfold.spec.layout import MODEL_AXES
from fourfold.spec.model import FAMILIES
from fourfold.spec.words import CP_KINDS, DTYPE_BYTES, PRECISIONS, RECOMPUTE_KINDS, SCHEDULES


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
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


ENGINES: dict[str, EngineRules] = {
    engine.name: engine
    for engine in (
        # No engine below recomputes norms and activations but keeps the MLP.
        EngineRules(name="generic", recompute=tuple(k for k in RECOMPUTE_KINDS if k != "norm+act")),
        EngineRules(
            name="fourfold",
            # What src/fourfold/engine runs today, nothing it is only meant to run.
            compiles_zero_bubble=False,
            recompute=("none", "selective", "full", "every", "block"),
            precisions=tuple(name for name in PRECISIONS if name != "fp4"),
            fp8_multiple=16,
            splits_fp8=False,
            is_ours=True,
        ),
        EngineRules(
            name="megatron",
            recompute=("none", "selective", "norm+mlp", "full", "block"),
            schedules=("1f1b", "interleaved"),
            precisions=("fp32", "bf16-mixed", "fp16", "fp8", "fp4"),
            # Its FSDP replaces the distributed optimizer and has no pipeline.
            pipeline_zeros=(0, 1),
            batch_rule="whole",
            whole_rounds=True,
            stage_rule="even",
            even_pieces=True,
            ulysses_copies_kv=False,
        ),
        EngineRules(
            name="torchtitan",
            cp_kinds=("allgather",),
            # Its "selective" chooses operations, not the attention core (`selective_share`).
            recompute=("none", "selective", "full", "every"),
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
        EngineRules(
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
        EngineRules(
            name="llm-foundry",
            axes=(),
            recompute=("none", "full"),
            precisions=("fp32", "bf16-pure", "bf16-mixed", "fp16", "fp8"),
            zeros=(0, 2, 3),
            batch_rule="shares",  # its hf_causal_lm takes any model of transformers
        ),
    )
}
# What a release lacks of that, by the engine that settings are written for (search/export).
RELEASES: dict[str, EngineRules] = {
    "megatron": ENGINES["megatron"],
    "torchtitan": replace(ENGINES["torchtitan"], recompute=("none", "selective", "full")),
    "torchtitan-0.2": replace(
        ENGINES["torchtitan"], name="torchtitan-0.2", whole_families=("qwen",), gathers_tp=False
    ),
    "nanotron": replace(
        ENGINES["nanotron"],
        axes=("tp", "pp"),
        recompute=("none",),
        families=("llama",),
        stage_rule="passing",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StackDefaults:
    """What a stack does when nobody says. `rules` names what it can do, in ENGINES; `grad_bytes`
    travel, `acc_bytes` are held; bytes are per element."""

    rules: str = "generic"
    grad_bytes: float = 4.0
    acc_bytes: float = 4.0
    sharding: str = "zero1"
    recompute: str = "none"
    sequence_parallel: bool = True
    overlap_dp: bool = False
    overlap_tp: bool = False
    balanced: bool = False
    cuts_by_cost: bool = False  # stages as our engine cuts them (count/params.py)
    even_stages: bool = False  # equal stages, only the first and the last may hold fewer layers
    split_loss: bool = True
    eager: bool = False
    compiled: bool = False
    compiles_loss: bool = False  # where it compiles at all
    # In fp8: bytes of an input that a product keeps for its backward (Transformer Engine keeps the
    # cast, torchao the original), and of a weight that ZeRO-3 gathers.
    fp8_saved_bytes: float = 1.0
    fp8_gather_bytes: float = 2.0
    # Its tensors are those of torch's FSDP2, counted one by one (memory/moments.py); the memory it
    # prints is what the allocator reserved, with FSDP so much more than they take
    # (result/one_rank.py). `autocast`: without FSDP, weights are cast for each use.
    counted: bool = False
    reserved: float = 1.0
    autocast: bool = False
    selective_share: float = 1.0  # of what a layer keeps, under "selective" by operators
    whole_layers: float = 0.0  # share of layers that "selective" recomputes whole; 0 = core only
    selective_mlp: bool = False  # "selective" recomputes the MLP, not the attention core
    shard_group: int = 0  # ZeRO-3 group on large jobs; 0 = all data-parallel ranks
    reports_rank0: bool = False  # printed memory is rank 0's, not the fullest rank's
    flash2: bool = False  # attention by FlashAttention 2 on every GPU, not by the GPU's fastest

    def gradient_bytes(self, compute: str) -> tuple[float, float]:
        """(on the wire, held) of a gradient, where products are computed in this format: fp16 is
        summed as it is, and what is wider than 16 bits stays so."""
        if DTYPE_BYTES[compute] > 2.0:
            return DTYPE_BYTES[compute], DTYPE_BYTES[compute]
        return self.grad_bytes, 2.0 if compute == "fp16" else self.acc_bytes


_NVIDIA = StackDefaults(
    rules="megatron",
    grad_bytes=2.0,
    acc_bytes=2.0,
    overlap_dp=True,
    overlap_tp=True,
    even_stages=True,
)
# its published fp8 runs gather weights in fp8
_TITAN = StackDefaults(
    rules="torchtitan",
    sharding="zero3",
    overlap_dp=True,
    fp8_saved_bytes=2.0,
    fp8_gather_bytes=1.0,
    counted=True,
    reserved=sum(RESERVED_RATIO) / 2,
    autocast=True,
    # by operators: every second product, attention and the input, 7 of 22 widths
    selective_share=1.0 / 3.0,
)
# by the stack's name without its year; the longest matching prefix counts
STACKS: dict[str, StackDefaults] = {
    "generic": StackDefaults(even_stages=True),
    "llm-foundry": StackDefaults(
        rules="llm-foundry", sharding="zero3", sequence_parallel=False, flash2=True
    ),
    # fp16 gradients are all-reduced: as much traffic as scattering fp32
    "megatron-deepspeed": StackDefaults(
        rules="megatron", recompute="full", sequence_parallel=False,
    ),
    "megatron": StackDefaults(rules="megatron", even_stages=True),
    "megatron-lm": StackDefaults(rules="megatron", even_stages=True),
    # in bf16 it sums and reduces gradients in fp32; the recipes of the two below do not
    "megatron-lm-2025": replace(_NVIDIA, grad_bytes=4.0, acc_bytes=4.0),
    "megatron-kwai": StackDefaults(rules="megatron", even_stages=True),
    "megatron-bridge": _NVIDIA,
    "nemo": _NVIDIA,
    "nanotron": StackDefaults(
        rules="nanotron", balanced=True, overlap_tp=True, eager=True, reports_rank0=True,
        flash2=True,
    ),
    # bf16 gradients held, and logits gathered over tp before the loss
    "aleph": StackDefaults(grad_bytes=2.0, acc_bytes=2.0, split_loss=False, eager=True),
    "maxtext": StackDefaults(
        sharding="zero3", recompute="full", sequence_parallel=False, overlap_dp=True,
        compiled=True, shard_group=128,
    ),
    "internevo": StackDefaults(grad_bytes=2.0, sequence_parallel=False, overlap_dp=True),
    "fms-fsdp": StackDefaults(
        grad_bytes=2.0, sharding="zero3", sequence_parallel=False, whole_layers=0.5
    ),
    "fms-fsdp-2024-compile": StackDefaults(
        grad_bytes=2.0, sharding="zero3", sequence_parallel=False, whole_layers=0.5, compiled=True
    ),
    # of late 2025 (0.2) and after; before, torch's flash kernel came first, now cuDNN's does
    "torchtitan": replace(_TITAN, compiles_loss=True),
    "torchtitan-2025": replace(_TITAN, compiles_loss=True, flash2=True),
    "torchtitan-2024": replace(_TITAN, flash2=True),
    "fourfold": StackDefaults(
        rules="fourfold", fp8_saved_bytes=2.0, counted=True, cuts_by_cost=True,
    ),
    "olmo-core": StackDefaults(
        sharding="zero3", sequence_parallel=False, overlap_dp=True, compiled=True,
        selective_mlp=True, flash2=True,
    ),
    "mlperf-nvidia": StackDefaults(grad_bytes=2.0, acc_bytes=2.0, overlap_dp=True, overlap_tp=True),
}  # fmt: skip


def _matches(stack: str, name: str) -> bool:
    """'megatron-lm-2024' is a 'megatron-lm', 'megatron-deepspeed-2022b' one of 2022."""
    rest = stack.removeprefix(name)
    return rest != stack and (rest[:1] in ("", "-") or name[-1].isdigit())


def stack_defaults(stack: str) -> StackDefaults:
    """Of the longest known name that a stack's begins with; of `generic` where nobody knows it."""
    names = [name for name in STACKS if _matches(stack.lower(), name)]
    return STACKS[max(names, key=len, default="generic")]


def is_known(stack: str) -> bool:
    return any(_matches(stack.lower(), name) for name in STACKS)


def stack_rules(stack: str) -> EngineRules:
    if not stack.strip():
        hint = "pass a name, such as --stack megatron"
        raise UserError("is empty", field="stack", value=stack, hint=hint)
    return ENGINES[stack_defaults(stack).rules]


def release_of(stack: str) -> str:
    """The engine of RELEASES that a name without a year stands for; '': a measured engine."""
    name = stack.strip().lower()
    name = "megatron" if name == "nemo" else name
    return name if name in RELEASES else ""


def family_of(stack: str) -> str:
    """'nemo-2024' -> 'nemo': the engine without its year."""
    return re.sub(r"-20\d\d.*", "", stack)


def year_of(stack: str) -> int | None:
    year = re.search(r"20\d\d", stack)
    return int(year[0]) if year else None
