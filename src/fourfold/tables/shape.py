"""The model shape behind a published row, how sure that is, and what work the row claims.

TFLOPs x seconds x GPUs / batch = FLOPs of one sequence: for one model and convention a constant,
whatever the layout, which ties the columns together.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fourfold.cost.count.flops import CONVENTIONS, TRIED, FlopsQuery, convention
from fourfold.cost.count.params import layer_params, model_params
from fourfold.errors import UserError
from fourfold.spec import Layout, Policy, catalog, codec
from fourfold.spec.model import FAMILIES, ModelShape
from fourfold.tables import cells
from fourfold.tables.row import PublishedRow

# BLOOM's padded vocabulary and length, those of all topology notes; used where a table is silent.
NOTES_VOCAB = 250_880
NOTES_SEQ_LEN = 2048
# What a row may say of its model, by the names of ModelShape.
SHAPE_FIELDS = (
    "family",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "tied",
)
# Vocabularies in use, for bounds where none is stated.
_LEAST_VOCAB, _MOST_VOCAB = 32_000, 262_144

# What `collect` misses of a run whose FLOPs are not those of its sizes: Mamba layers, adapters,
# experts that the log does not count.
_UNCOUNTED = {"dense-model", "all-weights", "experts"}


@dataclass(frozen=True, slots=True)
class Shape:
    model: ModelShape
    vocab_known: bool


def named_shape(record: PublishedRow) -> ModelShape | None:
    """The catalogue's shape of the row's name: 'mpt-7b', '7b' in an MPT table, the text's model."""
    known = catalog.model_names()
    names = [record.label.lower(), record.model]
    if record.style == "mpt":
        names.insert(0, f"mpt-{record.label.lower()}")
    for name in names:
        if name in known:
            return _named(name)
    return None


@functools.cache
def _named(name: str) -> ModelShape:
    return catalog.model(name)


def shape_of(record: PublishedRow) -> Shape | None:
    if record.shape:
        return Shape(record.shape, True)
    if _UNCOUNTED.intersection(record.text("missing").split()):
        return None
    if record.layers and record.hidden:
        built = _built(record)
        return Shape(built, record.vocab is not None) if built else None
    named = named_shape(record)
    return Shape(named, True) if named else None


def _built(record: PublishedRow) -> ModelShape | None:
    """None where the row has experts whose sizes nobody says."""
    named = named_shape(record)
    family = record.family or (named.family if named else "gpt")
    if family not in FAMILIES:
        return None
    hidden = record.hidden or 1
    heads = record.heads if record.heads and hidden % record.heads == 0 else 1
    told = _told(record)
    if named is not None and _same(named, record, told):
        return named
    near = named if named and named.hidden == hidden else None
    if near and not told:
        plain = codec.encode(near)
        told = {name: plain[name] for name in _BEYOND if name in plain}
    if record.experts and not told.get("top_k"):
        return None
    fields = told | {
        "layers": record.layers,
        "hidden": hidden,
        "heads": record.heads if told.get("head_dim") or told.get("latent") else heads,
        "kv_heads": record.kv_heads or (named.kv_heads if named and named.heads == heads else None),
        "ffn": record.ffn or (near.ffn if near else told.get("moe", {}).get("ffn")),
        "vocab": record.vocab or NOTES_VOCAB,
        "tied": record.tied if record.tied is not None else (named.tied if named else None),
    }
    return _shape(family, json.dumps(fields))


_BEYOND = ("head_dim", "experts", "top_k", "moe", "latent", "mtp")


def _told(record: PublishedRow) -> dict[str, Any]:
    """Heads of a size of their own, experts and latent attention, from the reference schema."""

    def size(name: str) -> int:
        return cells.whole(record.text(name)) or 0

    told: dict[str, Any] = {"mtp": size("mtp_layers")}
    if rank := size("kv_lora_rank"):
        rope = size("qk_rope_dim")
        nope, v = size("head_dim") - rope, size("v_head_dim")
        told["latent"] = {
            "kv_rank": rank,
            "q_rank": size("q_lora_rank"),
            "nope": nope,
            "rope": rope,
            "v": v,
        }
    else:
        told["head_dim"] = size("head_dim")
    if record.experts and size("experts_per_token"):
        told |= {"experts": record.experts, "top_k": size("experts_per_token")}
        told["moe"] = {
            "ffn": size("expert_ffn") or record.ffn,
            "shared_ffn": size("shared_ffn"),
            "dense_first": size("dense_layers"),
            "every": size("moe_every") or 1,
        }
    return {name: value for name, value in told.items() if value}


def _same(named: ModelShape, record: PublishedRow, told: dict[str, Any]) -> bool:
    """Whether nothing that the row says contradicts the catalogue's shape."""
    said = {name: getattr(record, name) for name in SHAPE_FIELDS if name != "family"}
    said |= {"experts": record.experts, "top_k": told.get("top_k")}
    return all(value in (None, getattr(named, name)) for name, value in said.items())


@functools.cache
def _shape(family: str, fields: str) -> ModelShape | None:
    """`fields` as JSON."""
    try:
        return catalog.shape(family, **json.loads(fields))
    except UserError:
        return None


def params_range(shape: Shape, seq_len: int) -> tuple[float, float]:
    """Labels count with or without embeddings; without a stated vocabulary both ends are wide."""
    layers = sum(
        count * layer_params(shape.model, kind).all for kind, count in shape.model.layer_runs
    )
    most = shape.model
    if not shape.vocab_known:
        most = dataclasses.replace(most, vocab=_MOST_VOCAB)
    return float(layers), float(model_params(most, seq_len))


def flops_range(shape: Shape, record: PublishedRow, rule: str, seq_len: int) -> tuple[float, float]:
    """Bounds of the convention's FLOPs per token; equal where the vocabulary is stated."""
    vocabs = (None,) if shape.vocab_known else (_LEAST_VOCAB, _MOST_VOCAB)
    counts = [flops_per_token(shape, record, rule, seq_len, vocab) for vocab in vocabs]
    return min(counts), max(counts)


def flops_per_token(
    shape: Shape, record: PublishedRow, rule: str, seq_len: int, vocab: int | None = None
) -> float:
    """With the assumed vocabulary where none is stated, here or in the table."""
    model = shape.model if vocab is None else dataclasses.replace(shape.model, vocab=vocab)
    layout = Layout(pp=record.pp or 1, tp=record.tp or 1)  # what a convention may ask of it
    query = FlopsQuery.of(model=model, seq_len=seq_len, layout=layout, policy=Policy())
    return convention(rule).count(query).printed


def hardware_ratio(shape: Shape, record: PublishedRow) -> float | None:
    """HFU over MFU in the MPT convention for the row's recompute, None where it is not stated."""
    try:
        policy = Policy(recompute=record.recompute or "none")
    except UserError:
        return None
    length = record.seq_len or NOTES_SEQ_LEN
    query = FlopsQuery.of(model=shape.model, seq_len=length, layout=Layout(), policy=policy)
    count = CONVENTIONS["mpt"].count(query)
    return count.hardware / count.model


def peak_tflops(record: PublishedRow) -> float | None:
    """The device's dense peak in the row's precision; its largest one where that is unclear."""
    if record.hardware not in catalog.device_names():
        return None
    device = catalog.device(record.hardware)
    precision = cells.precision_of(record.precision or "bf16", record.text("mp_mode"))
    try:
        return device.peak(precision) / 1e12
    except UserError:
        peaks = dataclasses.asdict(device.peak_flops_per_s).values()
        return max(peak for peak in peaks if peak) / 1e12


# Beyond rounding of the printed digits; conventions that must be told apart differ by 2% and more.
SLACK = 0.006
_LENGTHS = tuple(2**power for power in range(9, 18))


def row_work(record: PublishedRow) -> float | None:
    """FLOPs of one sequence by the row's own numbers."""
    if record.outcome != "ok" or not (record.step_s and record.tflops_gpu):
        return None
    if not (record.gpus and record.global_batch) or min(record.step_s, record.tflops_gpu) <= 0:
        return None
    return record.tflops_gpu * 1e12 * record.step_s * record.gpus / record.global_batch


def rounding(record: PublishedRow) -> float:
    """Relative error that the printed digits allow."""
    share = 0.0
    for name in ("step_s", "tflops_gpu"):
        value = getattr(record, name)
        if value and record.text(name):
            share += cells.half_unit(record.text(name)) / abs(value)
    return share


def agree(one: float, other: float, slack: float) -> bool:
    return abs(one / other - 1) <= slack


def matching(
    record: PublishedRow, shape: Shape, work: float, seq_len: int, rules: Iterable[str] = ()
) -> list[str]:
    """Which of the rules (else: of those tried) explain the row's work exactly, with the assumed
    vocabulary where none is stated."""
    slack = SLACK + rounding(record)
    return [
        rule
        for rule in rules or tried(record)
        if agree(work, seq_len * flops_per_token(shape, record, rule, seq_len), slack)
    ]


def tried(record: PublishedRow) -> tuple[str, ...]:
    return (record.convention,) if record.convention in CONVENTIONS else TRIED


def possible(record: PublishedRow, shape: Shape, work: float, seq_len: int) -> bool:
    """Whether any convention, with any usual vocabulary, can explain the row's work."""
    slack = SLACK + rounding(record)
    ranges = (flops_range(shape, record, rule, seq_len) for rule in tried(record))
    per_token = work / seq_len
    return any(low * (1 - slack) <= per_token <= high * (1 + slack) for low, high in ranges)


def common_length(records: Sequence[PublishedRow]) -> int:
    """Sequence length of tables that never state it: the one that explains most rows."""
    votes = dict.fromkeys(_LENGTHS, 0)
    for record in records:
        work, shape = row_work(record), shape_of(record)
        if work is None or shape is None or record.seq_len:
            continue
        for length in _LENGTHS:
            votes[length] += bool(matching(record, shape, work, length))
    best = max(votes.values())
    if votes[NOTES_SEQ_LEN] == best:
        return NOTES_SEQ_LEN
    return next(length for length, count in votes.items() if count == best)


def implied_batches(record: PublishedRow) -> list[float]:
    """The global batches for which seconds and TFLOPs are right, one for each convention."""
    work, shape = row_work(record), shape_of(record)
    if work is None or shape is None:
        return []
    seq_len = record.seq_len or NOTES_SEQ_LEN
    tokens_flops = work * (record.global_batch or 1) / seq_len
    return [tokens_flops / flops_per_token(shape, record, rule, seq_len) for rule in tried(record)]
