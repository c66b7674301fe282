"""The words of a policy: each closed choice is spelled here and imported elsewhere; then what other
engines and papers call the same (fsdp, 1F1B, 8k), which fields read in files and in flags.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from fourfold.errors import UserError
from fourfold.spec.texts import data
from fourfold.units import size_from

Precision = Literal["fp32", "fp64", "bf16-pure", "bf16-mixed", "fp16", "fp8", "fp4"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
Dtype = Literal["bf16", "fp16", "fp8", "fp4", "fp32", "fp64"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
DTYPE_BYTES = {"fp64": 8.0, "fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5}
# Formats of matrix products alone; everything around them computes in the other.
AROUND: dict[str, Dtype] = {"fp8": "bf16", "fp4": "bf16"}
# Format -> formats that hold each of its values.
WIDER = {"bf16": ("fp32", "fp64"), "fp16": ("fp32", "fp64"), "fp32": ("fp64",)}
# param (what the optimizer updates), compute, reduce (between ranks), grad (accumulation),
# optimizer (moments). bf16-pure keeps everything in bf16; the mixed ones keep fp32 masters.
BUNDLES: dict[str, tuple[Dtype, Dtype, Dtype, Dtype, Dtype]] = {
    "fp64": ("fp64", "fp64", "fp64", "fp64", "fp64"),
    "fp32": ("fp32", "fp32", "fp32", "fp32", "fp32"),
    "bf16-pure": ("bf16", "bf16", "bf16", "bf16", "bf16"),
    "bf16-mixed": ("fp32", "bf16", "fp32", "fp32", "fp32"),
    "fp16": ("fp32", "fp16", "fp16", "fp16", "fp32"),
    "fp8": ("fp32", "fp8", "fp32", "fp32", "fp32"),
    "fp4": ("fp32", "fp4", "fp32", "fp32", "fp32"),
}


def precision_name(bundle: str, compute: str) -> str:
    """What a run computes in, then what is kept: bf16-pure with products in fp8 is fp8-pure."""
    usual = BUNDLES[bundle]
    if compute == usual[1]:
        return bundle
    same = (usual[0], compute, *usual[2:])
    kept = "pure" if set(usual) == {usual[1]} else bundle
    return next((name for name, dtypes in BUNDLES.items() if dtypes == same), f"{compute}-{kept}")


Sharding = Literal["zero0", "zero1", "zero2", "zero3"]
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
CpKind = Literal["ring", "allgather", "ulysses"]
CP_KINDS: tuple[CpKind, ...] = get_args(CpKind)
Schedule = Literal["1f1b", "interleaved", "gpipe", "zero-bubble"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
# "fused": any of torch's kernels that keep no scores; "fused-softmax": Megatron's of 2022, which
# keeps them and is only planned for.
Attention = Literal["auto", "flash", "cudnn", "efficient", "fused", "fused-softmax", "unfused"]
# Kernels that the cost model tells apart. "flash" is one made for the GPU it runs on: of those that
# keep no scores FlashAttention 2 on Ampere, 3 or cuDNN's on Hopper and later, where 2 is "flash2".
PRICED_ATTENTION = ("flash", "fused-softmax", "unfused", "flash1", "flash2")
KEEPS_SCORES = ("fused-softmax", "unfused")
# Selective: the attention core. norm+act: outputs of norms and of the MLP's activation; norm+mlp:
# the MLP's first product too. Beside these, whole layers: each N-th (every-N), or the first N of
# each model chunk of a stage (block-N, Megatron's method of that name). Of layers with experts
# alone: routing, exchange and experts (moe), or the experts' activation (moe-act).
RECOMPUTE = ("none", "selective", "norm+act", "norm+mlp", "full")
NUMBERED_RECOMPUTE = ("every", "block")
MOE_RECOMPUTE = ("moe", "moe-act")
RECOMPUTE_KINDS = (*RECOMPUTE, *NUMBERED_RECOMPUTE, *MOE_RECOMPUTE)
OURS = "fourfold"  # the engine of src/fourfold/engine, among others
# How tokens reach experts of other ranks. auto: local where all experts are at hand, else alltoall.
# The last three are libraries whose kernels send a token once to each node, which are priced only.
Dispatcher = Literal["auto", "local", "alltoall", "allgather", "deepep", "hybridep", "ncclep"]
# What an exchange hides under, data/overlaps.toml; auto: the engine's habit.
OverlapKind = Literal["auto", "combined-1f1b", "dualpipe", "two-batch", "shared-expert"]
# Scales of products in fp8: auto is one a tensor; data/scalings.toml.
Scaling = Literal["auto", "tensor", "delayed", "block", "mx", "row"]
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
# forced: every token goes to the next experts in turn, so that all have as many.
Routing = Literal["natural", "forced"]

# What others call them. Keys are lower case with '-' for '_' and blanks.
SHARDING = {
    "ddp": "zero0",
    "no-shard": "zero0",
    "none": "zero0",
    "distributed-optimizer": "zero1",
    "distopt": "zero1",
    "shard-grad-op": "zero2",
    "fsdp": "zero3",
    "fsdp1": "zero3",
    "fsdp2": "zero3",
    "full-shard": "zero3",
    "hsdp": "zero3",
    "hybrid-shard": "zero3",
    **{f"{word}{n}": f"zero{n}" for n in range(4) for word in ("", "zero-", "stage", "stage-")},
}
# FSDP inside groups of ranks, with a copy of the state in each group.
HYBRID = ("hsdp", "hybrid-shard")
PRECISION = {
    "bf16": "bf16-mixed",
    "bfloat16": "bf16-mixed",
    "amp-bf16": "bf16-mixed",
    "amp-fp8": "fp8",
    "amp-fp16": "fp16",
    "fp16-mixed": "fp16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8": "fp8",
    "fp8-mixed": "fp8",
    "nvfp4": "fp4",
}
SCHEDULE = {
    "interleaved1f1b": "interleaved",
    "interleaved-1f1b": "interleaved",
    "afab": "gpipe",
    "zerobubble": "zero-bubble",
    "zb": "zero-bubble",
    "zbh1": "zero-bubble",
    "zb-h1": "zero-bubble",
    "vpp": "interleaved",
}
CP_KIND = {
    "p2p": "ring",
    "ring-attention": "ring",
    "all-gather": "allgather",
    "a2a": "ulysses",
    "all-to-all": "ulysses",
}


def plain_word(text: str) -> str:
    """'FULL_SHARD' -> 'full-shard'."""
    return re.sub(r"[\s_]+", "-", text.strip().lower())


# Megatron-LM's modules of selective recompute.
RECOMPUTE_MODULES = {
    "core_attn": "selective",
    "layernorm mlp": "norm+mlp",
    "moe": "moe",
    "moe_act": "moe-act",
}
POLICY = {
    "sharding": SHARDING,
    "precision": PRECISION,
    "schedule": SCHEDULE,
    "cp_kind": CP_KIND,
    "recompute": {
        f"{start}{plain_word(modules)}": kind
        for modules, kind in RECOMPUTE_MODULES.items()
        for start in ("", "selective:")
    },
}
_SIZES = (
    "gpus",
    "policy.virtual_stages",
    "batch.seq_len",
    "batch.micro_batch",
    "batch.global_batch",
    "layout.pp",
    "layout.cp",
    "layout.tp",
    "layout.replicate",
    "layout.shard",
    "layout.ep",
    "layout.etp",
)
_TOKENS = re.compile(r"(.*?)\s*(tok|toks|token|tokens)\Z", re.IGNORECASE)


@functools.cache
def scaled_precisions() -> dict[str, tuple[str, str]]:
    """Return precision and scaling by the name of both: 'mxfp8' is fp8 with scaling mx, and so are
    'fp8-mx' and every 'fp8-NAME' whose NAME data/scalings.toml has ('fp8-blockwise', 'fp8-cs')."""
    found: dict[str, tuple[str, str]] = {}
    for kind, table in data("scalings.toml").items():
        for name in (kind, *table["names"]):
            own = re.search("fp[48]", name)
            found[name if own else f"fp8-{plain_word(name)}"] = (own[0] if own else "fp8", kind)
    return {name: pair for name, pair in found.items() if pair[1] in SCALINGS}


def with_scaling(policy: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy's table with precision and scaling apart, where its precision names both."""
    typed = policy.get("precision")
    name = plain_word(typed) if isinstance(typed, str) else ""
    if name not in scaled_precisions():
        return dict(policy)
    precision, scaling = scaled_precisions()[name]
    stated = policy.get("scaling", scaling)
    if stated not in (scaling, "auto"):
        rule, hint = f"contradicts precision {name}, whose scaling is {scaling}", "omit one of them"
        raise UserError(rule, field="policy.scaling", value=stated, hint=hint)
    return {**policy, "precision": precision, "scaling": scaling}


def scaled_name(precision: str, scaling: str) -> str:
    """Return the field's name of a precision with a stated scaling: 'mxfp8', 'fp8-block'."""
    if precision == "fp4":
        return "nvfp4"
    if precision != "fp8" or scaling == "auto":
        return precision
    return "mxfp8" if scaling == "mx" else f"fp8-{scaling}"


# What 'plan' prints beside a layout's axes, and the fields of a run that it stands for.
_BESIDE_AXES = re.compile(
    rf"""(?<![^\s,;*/])(?:
        v(?P<virtual_stages>[0-9]{{1,9}}) | (?P<cp_kind>{"|".join(CP_KINDS)})
        | (?P<schedule>{"|".join(SCHEDULES)}) | (?P<sharding>{"|".join(SHARDINGS)})
        | recompute\s+(?P<recompute>[a-z0-9+-]+)
        | (?:micro[ -]batch\s+|mbs)(?P<micro_batch>[0-9]{{1,9}})
    )(?=[\s,;*/]|\Z)""",
    re.VERBOSE,
)


def split_layout(text: str) -> tuple[str, dict[str, Any]]:
    """Return the axes of a layout as it is printed, and the fields that its other words decide.

    'pp4 dp2 cp2 tp1 ring v3' -> ('pp4 dp2 cp2 tp1', {'policy.cp_kind': 'ring',
    'policy.virtual_stages': 3}).
    """
    fields: dict[str, Any] = {}
    for match in _BESIDE_AXES.finditer(text.lower()):
        for name, word in match.groupdict().items():
            if word is not None:
                path = f"batch.{name}" if name == "micro_batch" else f"policy.{name}"
                value = int(word) if word.isdecimal() else word
                if fields.setdefault(path, value) != value:
                    rule = f"says {name} {fields[path]} and {value}"
                    raise UserError(rule, field="layout", value=text, hint="omit one of them")
    return _BESIDE_AXES.sub(" ", text.lower()).strip() if fields else text, fields


def agreed(layout: str, path: str, value: Any, stated: Any) -> Any:
    """Return a layout word's value, which must not contradict what its own field states."""
    name = path.rpartition(".")[2]
    if stated is not None and str(policy_word(name, stated)) != str(value):
        hint = f"omit it, or set {path} = {value}"
        raise UserError(f"contradicts {path} = {stated}", field="layout", value=layout, hint=hint)
    return value


def with_layout_words(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's table with the axes of a layout's text alone; its other words fill their
    fields."""
    layout = table.get("layout")
    if not isinstance(layout, str):
        return dict(table)
    axes, fields = split_layout(layout)
    apart: dict[str, Any] = {**table, "layout": axes}
    for path, value in fields.items():
        head, _, leaf = path.partition(".")
        inner = apart.get(head, {})
        if isinstance(inner, Mapping):  # else its own reader refuses it
            apart[head] = {**inner, leaf: agreed(layout, path, value, inner.get(leaf))}
    return apart


def policy_word(field: str, value: Any) -> Any:
    """The field's own word for what people write; what nobody knows is left to the field's rule."""
    if not isinstance(value, str) or field not in POLICY:
        return value
    word = plain_word(value)
    return POLICY[field].get(word, word)


def is_hybrid(sharding: Any) -> bool:
    return isinstance(sharding, str) and plain_word(sharding) in HYBRID


def sequences_from(text: str, seq_len: Any) -> int:
    """A global batch: '1k' is 1,024 sequences; '4M' and '4Mtokens' are tokens, as nobody has
    millions of sequences in a step."""
    match = _TOKENS.match(text)
    if match is None and not text.strip().lower().endswith("m"):
        return size_from(text)
    tokens = size_from(match.group(1) if match else text)
    length = size_from(seq_len) if isinstance(seq_len, str) else seq_len
    if not isinstance(length, int) or length < 1:
        rule = "counts tokens, which needs a sequence length"
        raise UserError(rule, value=text, hint="add --seq-len N")
    if tokens % length or not tokens:
        whole = max(1, round(tokens / length))
        rule = f"is {tokens:,} tokens, not a whole number of sequences of {length}"
        hint = f"{whole} sequences are {whole * length:,} tokens"
        raise UserError(rule, value=text, hint=hint)
    return tokens // length


def tidied(table: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A run's table with numbers and its own words, and what each other word was taken for."""
    tidy = with_layout_words(table)
    notes: list[str] = []
    policy = tidy.get("policy")
    if isinstance(policy, dict) and (apart := with_scaling(policy)) != policy:
        tidy["policy"] = apart
        what = f"{apart['precision']} with scaling {apart['scaling']}"
        notes.append(f"precision {policy['precision'].strip()} = {what}")
    for path in (*_SIZES, *(f"policy.{name}" for name in POLICY)):
        head, _, leaf = path.rpartition(".")
        inner = tidy.get(head) if head else tidy
        if not isinstance(inner, dict) or not isinstance(inner.get(leaf), str):
            continue
        typed = inner[leaf]
        try:
            value = _reader(path, inner)(typed)
        except UserError as error:
            raise error.within(path) from None
        if value == typed:
            continue
        if head:
            tidy[head] = {**inner, leaf: value}
        else:
            tidy[leaf] = value
        if str(value) != typed.strip().lower() != "auto":
            notes.append(_note(path, typed, value))
    return tidy, notes


def _reader(path: str, inner: Mapping[str, Any]) -> Callable[[str], Any]:
    if path.startswith("policy.") and path not in _SIZES:
        return lambda text: policy_word(path[len("policy.") :], text)
    if path == "batch.global_batch":
        return lambda text: sequences_from(text, inner.get("seq_len"))
    if path == "batch.micro_batch":
        return lambda text: 0 if text.strip().lower() == "auto" else size_from(text)
    return size_from


def _note(path: str, typed: str, value: Any) -> str:
    name = path.rpartition(".")[2].replace("_", "-")
    unit = {
        "batch.seq_len": " tokens",
        "batch.global_batch": " sequences",
        "batch.micro_batch": " sequences",
    }.get(path, "")
    number = f"{value:,}" if isinstance(value, int) else value
    if path == "policy.sharding" and is_hybrid(typed):
        unit = " with replicas"
    return f"{name} {typed.strip()} = {number}{unit}"


Optimizer = Literal["adamw", "adamw-plain", "muon"]
# Planted on purpose: each must fail.
ExpertFault = Literal[
    "expert-scale",
    "expert-group",
    "expert-norm",
    "expert-norm-twice",
    "router-sum",
    "scores-left",
    "scores-twice",
    "scores-cut",
    "shared-sum",
    "balance-micro",
    "balance-scale",
    "balance-lost",
    "balance-rank",
    "bias-twice",
    "drop-order",
    "idle-decay",
]
MuonFault = Literal["muon-blocks", "muon-scale", "muon-shard"]
# Those of the last line are planted below any engine, the others in our own.
Fault = Literal[
    "loss-divisor",
    "tied-grad",
    "cp-positions",
    "norm-grad",
    "layer-skip",
    "kv-head",
    "stale-weight",
    "norm-twice",
    ExpertFault,
    MuonFault,
    "lost-sum",
    "norm-shard",
    "doubled-loss",
]
