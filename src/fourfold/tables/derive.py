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
from fourfold.result.stored_run import StoredRun
from fourfold.spec import Layout, ModelShape, Policy, RunSpec, catalog
from fourfold.spec.cluster import device_id
from fourfold.spec.words import OURS
from fourfold.tables.row import PublishedRow
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


def equivalence(record: PublishedRow) -> str:
    """'training-equivalent', 'benchmark-only (WHY)', or '' where nothing says."""
    said = f"{record.note} {record.variant}".lower()
    lacks = [name for name, words in _LACKS.items() if words.search(said)]
    if record.text("routing") == "forced":
        lacks.append("forced routing")
    elif record.shape and not record.experts:  # nothing is routed, whatever the setting
        lacks = [name for name in lacks if name != "forced routing"]
    if (
        record.stored
        and record.stored.torch
        and record.stack == OURS
        and not _HAS_DATA.search(said)
    ):
        lacks.append("random tokens")
    if lacks:
        return f"{BENCHMARK} ({', '.join(dict.fromkeys(lacks))})"
    return TRAINING if _HAS_DATA.search(said) else ""


def derive(record: PublishedRow, rule: str) -> PublishedRow:
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


def _with_shape(record: PublishedRow, model: ModelShape) -> PublishedRow:
    return replace(
        record,
        label=record.label or model.name,
        shape=model,
        **{name: getattr(model, name) for name in SHAPE_FIELDS},
        params=record.params or _params(model, record.seq_len or 1),
    )


@functools.lru_cache(maxsize=4096)
def _params(model: ModelShape, seq_len: int) -> int:
    return model_params(model, seq_len)


def _with_utilisation(record: PublishedRow, ask: Ask, restated: str | None) -> PublishedRow:
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


def _with_speed(record: PublishedRow) -> PublishedRow:
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


def published(stored: StoredRun, number: int) -> PublishedRow:
    """`number` keeps the order of the store, for runs that started in the same second."""
    spec = stored.spec
    model, layout, batch, policy = spec.model, spec.layout, spec.batch, spec.policy
    row = PublishedRow(
        run_id=stored.run_id,
        stored=stored,
        row=number,
        stack=stored.engine or OURS,
        label=stored.model,
        model=stored.model,
        shape=model,
        family=model.family,
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        ffn=model.ffn,
        vocab=model.vocab,
        tied=model.tied,
        experts=model.experts or None,
        hardware=hardware_of(stored.device),
        gpus_per_node=spec.gpus // stored.nodes,
        gpus=spec.gpus,
        nodes=stored.nodes,
        pp=layout.pp,
        dp=layout.dp,
        cp=layout.cp,
        tp=layout.tp,
        ep=layout.ep,
        etp=layout.etp,
        virtual_stages=policy.virtual_stages,
        seq_len=batch.seq_len,
        micro_batch=batch.micro_batch,
        global_batch=batch.global_batch,
        batch_tokens=batch.tokens,
        precision=policy.precision_name,
        sharding=policy.sharding,
        recompute=policy.recompute,
        offload=policy.offload,
        sequence_parallel=policy.sequence_parallel,
        attention=policy.attention,
        variant=stored.unlisted,
        outcome=stored.outcome,
        failure=stored.failure,
        note="; ".join(filter(None, _notes(stored))),
        step_s=stored.step_s,
        tokens_s=batch.tokens / stored.step_s if stored.step_s else None,
        tokens_s_gpu=stored.tokens_s_gpu,
        mem_gb=None if stored.peak_bytes is None else stored.peak_bytes / 2**30,
        peak_bytes=stored.peak_bytes,
        predicted=stored.predicted,
    )
    return replace(row, grad_accum=_accumulated(row))


def _accumulated(record: PublishedRow) -> int | None:
    """Micro batches of the busiest rank in a step."""
    if not (record.micro_batch and record.global_batch and record.dp):
        return None
    share = -(-record.global_batch // record.dp)
    return -(-share // record.micro_batch)


def _notes(stored: StoredRun) -> list[str]:
    """What the columns cannot say: uneven parts, other settings, and why a run failed."""
    spec = stored.spec
    parts = _micro_parts(spec)
    words = [spec.note, spec.tag, f"micro {parts}" if parts else ""]
    layers, pp = spec.model.layers, spec.layout.pp
    if 1 < pp <= layers and layers % pp and spec.policy.virtual_stages == 1:
        stages = stage_layers(spec.model, pp, spec.batch.seq_len)
        words.append("stages " + "+".join(str(len(stage)) for stage in stages))
    words.append(stored.unlisted)
    words.append(f"{stored.retries} allocator retries" if stored.retries else "")
    if stored.outcome != "ok":
        words.append(f"{stored.outcome}: {stored.failure}".rstrip(": "))
    return words


def _micro_parts(spec: RunSpec) -> str:
    """'11+11+11+11+4' where the micro batch does not divide the largest share evenly."""
    batch = spec.batch
    if not batch.micro_batch:
        return ""
    shares = batch.shares(spec.layout.dp)
    sizes = batch.micro_sizes(shares[0])
    if len(set(sizes)) <= 1 and len(set(shares)) == 1 and sizes[:1] == (batch.micro_batch,):
        return ""
    if len(sizes) > 6:
        return f"{sizes[0]}+{sizes[1]}+...+{sizes[-1]}"
    return "+".join(map(str, sizes))
