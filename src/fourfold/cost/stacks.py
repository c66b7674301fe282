"""What each training stack can run, and what it does when nobody says: data/stacks.toml."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fourfold.cost.dispatch import DISPATCHERS, OVERLAPS
from fourfold.errors import UserError
from fourfold.spec import catalog, codec
from fourfold.spec.layout import EXPERT_AXES, MODEL_AXES
from fourfold.spec.model import FAMILIES
from fourfold.spec.words import CP_KINDS, DTYPE_BYTES, PRECISIONS, RECOMPUTE_KINDS, SCHEDULES

T = TypeVar("T", "EngineRules", "StackDefaults", "ExportEngine")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """Limits of one engine; the defaults are those of an engine that can do everything.

    `batch_rule`: "any" micro batch; "shares": equal shares for all dp ranks, any micro batch in
    them; "whole": dp x micro batch divides the global batch.
    """

    name: str
    axes: tuple[str, ...] = (*MODEL_AXES, *EXPERT_AXES)
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
    # Which stages it can cut: "any"; "even": equal ones, but for fewer layers, or none, at both
    # ends; "filled" to a number of layers a stage, in order, none left empty.
    stage_rule: str = "any"
    even_pieces: bool = False  # early and late pieces of the sequence also under Ulysses
    # Of those kinds, what attention in windows has, and with sinks.
    window_cp_kinds: tuple[str, ...] = CP_KINDS
    sink_cp_kinds: tuple[str, ...] = CP_KINDS
    ulysses_copies_kv: bool = True  # KV heads are repeated until Ulysses can deal them
    plain_dp_alone: bool = False  # zero0 runs without any other axis only
    ties_stages: bool = True  # tied embeddings may lie on two stages
    loops_zero_bubble: bool = False  # zero-bubble needs virtual stages
    compiles_zero_bubble: bool = True
    fp8_multiple: int = 1  # of which sides of a product in fp8 must be a multiple
    scalings: tuple[str, ...] = ("tensor", "delayed", "block", "mx", "row")  # of products in fp8
    splits_fp8: bool = True  # zero-bubble's divided backward in fp8
    dispatchers: tuple[str, ...] = DISPATCHERS
    latent_dispatchers: tuple[
        str, ...
    ] = ()  # of these, those of models with latent attention alone
    overlaps: tuple[str, ...] = tuple(OVERLAPS)  # of an exchange of tokens, data/overlaps.toml
    # combined-1f1b needs ep, virtual stages in a pipeline, and layers that are not recomputed.
    overlap_in_1f1b: bool = False
    not_with_experts: tuple[str, ...] = ()  # precisions and kinds of recompute
    not_with_delayed: tuple[str, ...] = ()  # kinds of recompute, in fp8 with delayed scaling
    # Experts are cut over tp where ep is 1, and never where it is more.
    experts_follow_tp: bool = False
    predicts_further: bool = False  # trains layers that predict further tokens (mtp)
    whole_graphs: bool = True  # records the micro batches of a step as one CUDA graph
    # ... of one length, and with experts whose rows are never counted by the host.
    static_graphs: bool = False
    is_ours: bool = False  # src/fourfold/engine, whose gaps are rules too


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
    # (cost/memory/unseen.py). `autocast`: without FSDP, weights are cast for each use.
    counted: bool = False
    reserved: float = 1.0
    autocast: bool = False
    reduces_in_fp32: bool = False  # gradients of a pure precision too
    selective_share: float = 1.0  # of what a layer keeps, under "selective" by operators
    whole_layers: float = 0.0  # share of layers that "selective" recomputes whole; 0 = core only
    selective_mlp: bool = False  # "selective" recomputes the MLP, not the attention core
    shard_group: int = 0  # ZeRO-3 group on large jobs; 0 = all data-parallel ranks
    reports_rank0: bool = False  # printed memory is rank 0's, not the fullest rank's
    reports_last: bool = False  # ... or the last rank's
    dispatcher: str = "alltoall"  # of experts on other ranks, where a policy leaves it open
    host_dispatcher: str = ""  # ... where runs were published whose NVLink domains are hosts
    overlap: str = "combined-1f1b"  # how it hides their exchange, where it does
    tests_vocab: int = 0  # of the tests that an engine publishes, where they do not say
    graphs_experts: bool = False  # parts of layers with experts are CUDA graphs
    fuses_softmax: bool = False  # in what it calls unfused attention (Transformer Engine)
    narrow_moments: tuple[str, ...] = ()  # families whose moments its recipes hold in bf16
    flash2: bool = False  # attention by FlashAttention 2 on every GPU, not by the GPU's fastest

    def gradient_bytes(self, compute: str) -> tuple[float, float]:
        """(on the wire, held) of a gradient, where products are computed in this format: fp16 is
        summed as it is, and what is wider than 16 bits stays so."""
        if DTYPE_BYTES[compute] > 2.0:
            return DTYPE_BYTES[compute], DTYPE_BYTES[compute]
        return self.grad_bytes, 2.0 if compute == "fp16" else self.acc_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportEngine:
    """An engine that settings are written for. `package`: its distribution's name; `before`: the
    newer one, which comes first where both can run a layout; `on_demand`: named only where somebody
    asks for it; `older_flags`: names of flags that the newest release has renamed, as they were;
    `plain_queries`: latent attention leaves queries without a norm where it has none."""

    name: str
    stack: str
    writer: str = ""
    release: str = ""
    package: str = ""
    title: str = ""
    before: str = ""
    on_demand: bool = False
    older_flags: dict[str, str] = field(default_factory=dict)
    plain_queries: bool = True


def _read(cls: type[T], tables: dict[str, Any], known: dict[str, T]) -> dict[str, T]:
    """Entries by name. `like` takes over one that stands before, or one of `known`."""
    found: dict[str, T] = {}
    for name, table in tables.items():
        fields = dict(table)
        base = fields.pop("like", None)
        taken = codec.encode((found | known)[base]) if base else {}
        found[name] = codec.decode(cls, taken | fields, name)
    return found


def _named(tables: dict[str, Any]) -> dict[str, Any]:
    return {name: {"name": name, **table} for name, table in tables.items()}


_TABLES = catalog.data("stacks.toml")
ENGINES: dict[str, EngineRules] = _read(EngineRules, _named(_TABLES["rules"]), {})
# What a release lacks of that, by the engine that settings are written for (search/export).
RELEASES: dict[str, EngineRules] = _read(EngineRules, _TABLES["releases"], ENGINES)
EXPORTS: dict[str, ExportEngine] = _read(ExportEngine, _named(_TABLES["exports"]), {})
# By the stack's name without its year; the longest matching prefix counts.
STACKS: dict[str, StackDefaults] = _read(StackDefaults, _TABLES["stacks"], {})


def _matches(stack: str, name: str) -> bool:
    """'megatron-lm-2024' is a 'megatron-lm', 'megatron-deepspeed-2022b' one of 2022."""
    rest = stack.removeprefix(name)
    return rest != stack and (rest[:1] in ("", "-") or name[-1].isdigit())


def _known_name(stack: str) -> str:
    """Return the longest known name that a stack's begins with, else that stands in it between
    dashes: 'my-megatron' is a 'megatron'; '' where there is none."""
    own = without_experts(stack.lower())
    begins = [name for name in STACKS if _matches(own, name)]
    holds = [name for name in STACKS if f"-{name}-" in f"-{own}-"]
    return max(begins or holds, key=len, default="")


@functools.lru_cache(maxsize=1024)
def stack_defaults(stack: str) -> StackDefaults:
    """Return the habits of the known stack that a name begins with or holds; of `generic`, where it
    does neither."""
    habits = STACKS[_known_name(stack) or "generic"]
    is_compiled = without_experts(stack.lower()).endswith("-compile")
    return replace(habits, compiled=True) if is_compiled else habits


def is_known(stack: str) -> bool:
    return bool(_known_name(stack))


def stack_rules(stack: str) -> EngineRules:
    if not stack.strip():
        hint = "pass a name, such as --stack megatron"
        raise UserError("is empty", field="stack", value=stack, hint=hint)
    return ENGINES[stack_defaults(stack).rules]


def release_of(stack: str) -> str:
    """The engine of RELEASES that a name without a year stands for; '': a measured engine."""
    name = stack.strip().lower()
    name = "megatron" if name == "nemo" else name
    export = EXPORTS.get(name)
    return name if name in RELEASES and not (export and export.on_demand) else ""


_EXPERTS = " with experts"


def with_experts(stack: str) -> str:
    """What runs with experts are calibrated as: layers with experts are another program. Releases
    of an engine have few of them each, and differ by less than layouts do: they are one."""
    return family_of(stack) + _EXPERTS


def site_of(cluster: str) -> str:
    """'nvidia-gb200' -> 'nvidia': where runs with experts were measured. Machines of one site share
    what is learned of them: each has few models, which differ more than machines do."""
    return cluster.rpartition("-")[0] or cluster


def has_experts(stack: str) -> bool:
    return stack.endswith(_EXPERTS)


def place_of(stack: str, cluster: str) -> str:
    """Where what runs of this stack taught is kept: by cluster, or by site."""
    return site_of(cluster) if has_experts(stack) else cluster


def without_experts(stack: str) -> str:
    return stack.removesuffix(_EXPERTS)


@functools.cache
def family_of(stack: str) -> str:
    """'nemo-2024' -> 'nemo', 'megatron-bridge-26.04' -> 'megatron-bridge': the engine without its
    year."""
    return re.sub(r"-(20\d\d|v?\d\d?\.\d).*", "", without_experts(stack))


def stack_of_release(stack: str, release: str) -> str:
    """Return the name of a stack with the year of its release, where that is named by date:
    'megatron-bridge' of 26.04 is 'megatron-bridge-2026'. Other releases are not told apart."""
    named, released = year_of(stack), year_of(f"-{release.strip()}")
    if released is None or named == released:
        return stack
    if named is not None:
        rule = f"contradicts the year of {stack}"
        raise UserError(rule, field="engine_release", value=release)
    return f"{stack}-{released}"


@functools.cache
def year_of(stack: str) -> int | None:
    """By its name, or by its release: 26.04 is of 2026."""
    year = re.search(r"20\d\d|-v?2\d(?=\.\d\d)", stack)
    return int(year[0][-2:]) + 2000 if year else None
