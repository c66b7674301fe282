"""What follows from a record's own numbers and the model's shape: seconds, tokens/s, TFLOPs, MFU. A
stored run also gets the words and columns that tables have.

Whether a row's steps are those of a training, or lack what only a training has: tokens that come
in their own proportions, experts that choose them, an optimizer.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

from fourfold.cost.count import flops
from fourfold.cost.count.params import model_params, stage_layers
from fourfold.errors import UserError
from fourfold.result.record import Record, json_of, model_of
from fourfold.spec import Batch, Layout, ModelShape, Policy, catalog
from fourfold.spec.cluster import device_id
from fourfold.spec.words import OURS
from fourfold.tables.shape import SHAPE_FIELDS, peak_tflops, shape_of

TRAINING, BENCHMARK = "training-equivalent", "benchmark-only"
# What a note or a setting says -> what is not as in a training. `collect` writes these names.
_LACKS = {
    "forced routing": re.compile(
        r"forced (?:routing|balance)|routing=forced|load[- _]balancing on"
    ),
    "random tokens": re.compile(r"(?:random|mock|synthetic|dummy)[- _](?:tokens|data)"),
    "no optimizer": re.compile(r"(?:no|without) optimi[sz]er|(?:forward|fwd)[- _]?only"),
}
_HAS_DATA = re.compile(r"\breal tokens\b|\bdata=\S")


def equivalence(record: Record) -> str:
    """'training-equivalent', 'benchmark-only (WHY)', or '' where nothing says."""
    said = " ".join((record.note, record.settings, record.variant)).lower()
    lacks = [name for name, words in _LACKS.items() if words.search(said)]
    if record.text("routing") == "forced":
        lacks.append("forced routing")
    elif record.model_json and not record.experts:  # nothing is routed, whatever the setting
        lacks = [name for name in lacks if name != "forced routing"]
    is_own = bool(record.torch) and record.stack in ("", OURS)
    if is_own and not _HAS_DATA.search(said):
        lacks.append("random tokens")
    if lacks:
        return f"{BENCHMARK} ({', '.join(dict.fromkeys(lacks))})"
    return TRAINING if _HAS_DATA.search(said) else ""


def derive(record: Record, rule: str) -> Record:
    """The record with what follows filled in; TFLOPs and MFU by the convention `rule`. Figures
    already printed by it stay: they may come from more digits than the row shows."""
    record = _with_speed(record)
    record = replace(
        record,
        equivalence=record.equivalence or equivalence(record),
        grad_accum=record.grad_accum or _accumulated(record),
    )
    shape = shape_of(record)
    if shape is None or not record.seq_len:
        return record
    record = _with_shape(record, shape.model)
    ask = (shape.model, record.seq_len or 1, record.tp or 1, record.pp or 1, record.recompute)
    own = flops.ALIASES.get(record.convention, record.convention)
    if record.tokens_s_gpu is None and record.tflops_gpu and own in flops.CONVENTIONS:
        speed = record.tflops_gpu * 1e12 / _count(own, ask).printed
        record = replace(record, tokens_s_gpu=speed)
    if record.tokens_s_gpu is not None:
        record = _with_utilisation(record, ask, None if own == rule else rule)
    return _with_speed(record)


# What a count depends on: model, sequence length, tp, pp, recompute.
Ask = tuple[ModelShape, int, int, int, str]


def _with_shape(record: Record, model: ModelShape) -> Record:
    return replace(
        record,
        label=record.label or model.name,
        model_json=json_of(model),
        **{name: getattr(model, name) for name in SHAPE_FIELDS},
        params=record.params or _params(model, record.seq_len or 1),
    )


@functools.lru_cache(maxsize=4096)
def _params(model: ModelShape, seq_len: int) -> int:
    return model_params(model, seq_len)


def _with_utilisation(record: Record, ask: Ask, restated: str | None) -> Record:
    """TFLOPs, MFU and HFU where they are missing; all of them when restated by another rule."""
    count = _count(restated or record.convention, ask)
    speed = record.tokens_s_gpu or 0.0
    rates: dict[str, Any] = {"tflops_gpu": count.printed * speed / 1e12}
    peak = peak_tflops(record)
    if peak is not None:
        rates["mfu_pct"] = flops.utilisation_pct(count.model, speed, peak * 1e12)
        rates["hfu_pct"] = flops.utilisation_pct(count.hardware, speed, peak * 1e12)
    if restated:
        cells = {name: text for name, text in record.cells.items() if name not in _BY_CONVENTION}
        return replace(record, convention=restated, cells=cells, **rates)
    missing: dict[str, Any] = {k: v for k, v in rates.items() if getattr(record, k) is None}
    return replace(record, **missing)


_BY_CONVENTION = ("tflops_gpu", "model_tflop", "mfu_pct", "hfu_pct")


def _with_speed(record: Record) -> Record:
    """Seconds per step and tokens/s say the same thing once batch and GPUs are known."""
    tokens = (record.global_batch or 0) * (record.seq_len or 0)
    if record.step_s and record.tokens_s and record.tokens_s_gpu:
        return record
    if not tokens or not record.gpus:
        return record
    if record.step_s:
        total = tokens / record.step_s
    elif record.tokens_s:
        total = record.tokens_s
    elif record.tokens_s_gpu:
        total = record.tokens_s_gpu * record.gpus
    else:
        return record
    return replace(
        record,
        step_s=record.step_s or tokens / total,
        tokens_s=record.tokens_s or total,
        tokens_s_gpu=record.tokens_s_gpu or total / record.gpus,
    )


@functools.lru_cache(maxsize=4096)
def _count(rule: str, ask: Ask) -> flops.FlopsPerToken:
    """A sweep asks the same few questions thousands of times."""
    model, seq_len, tp, pp, recompute = ask
    try:
        policy = Policy(recompute=recompute or "none")
    except UserError:
        policy = Policy()
    layout = Layout(tp=tp, pp=pp)
    query = flops.FlopsQuery.of(model=model, seq_len=seq_len, layout=layout, policy=policy)
    return flops.convention(rule).count(query)


@functools.lru_cache(maxsize=256)
def hardware_of(device: str) -> str:
    """An id of the catalogue where the device's name is known, else the name."""
    return device_id(device, catalog.device_names()) or device


def published(record: Record, number: int) -> Record:
    """`number` keeps the order of the store, for runs that started in the same second."""
    model = model_of(record.model_json)
    return replace(
        record,
        row=number,
        label=record.model,
        **{name: getattr(model, name) for name in SHAPE_FIELDS},
        hardware=hardware_of(record.device),
        gpus_per_node=(record.gpus or 1) // (record.nodes or 1),
        stack=record.stack or OURS,
        grad_accum=_accumulated(record),
        batch_tokens=record.tokens,
        tokens_s=record.tokens / record.step_s if record.step_s else None,
        mem_gb=None if record.peak_bytes is None else record.peak_bytes / 2**30,
        variant=record.unlisted,
        note="; ".join(filter(None, _notes(record, model))),
    )


def _accumulated(record: Record) -> int | None:
    """Micro batches of the busiest rank in a step."""
    if not (record.micro_batch and record.global_batch and record.dp):
        return None
    share = -(-record.global_batch // record.dp)
    return -(-share // record.micro_batch)


def _batch(record: Record) -> Batch:
    return Batch(
        seq_len=record.seq_len or 1,
        micro_batch=record.micro_batch or 0,
        global_batch=record.global_batch or 1,
    )


def _notes(record: Record, model: ModelShape) -> list[str]:
    """What the columns cannot say: uneven parts, other settings, and why a run failed."""
    parts = _micro_parts(record)
    words = [record.note, record.tag, f"micro {parts}" if parts else ""]
    pp = record.pp or 1
    if 1 < pp <= model.layers and model.layers % pp and record.virtual_stages == 1:
        stages = stage_layers(model, pp, record.seq_len or 1)
        words.append("stages " + "+".join(str(len(stage)) for stage in stages))
    words.append(record.unlisted)
    words.append(f"{record.retries} allocator retries" if record.retries else "")
    if record.outcome != "ok":
        words.append(f"{record.outcome}: {record.failure}".rstrip(": "))
    return words


def _micro_parts(record: Record) -> str:
    """'11+11+11+11+4' where the micro batch does not divide the largest share evenly."""
    if not record.micro_batch:
        return ""
    batch = _batch(record)
    shares = batch.shares(record.dp or 1)
    sizes = batch.micro_sizes(shares[0])
    if len(set(sizes)) <= 1 and len(set(shares)) == 1 and sizes[:1] == (record.micro_batch,):
        return ""
    if len(sizes) > 6:
        return f"{sizes[0]}+{sizes[1]}+...+{sizes[-1]}"
    return "+".join(map(str, sizes))
