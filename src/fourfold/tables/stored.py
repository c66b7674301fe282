"""How is a stored run published? Its record with the words and columns that tables have."""

from __future__ import annotations

import functools
from dataclasses import replace

from fourfold.cost.count.stages import stage_layers
from fourfold.result.record import Record
from fourfold.spec import catalog
from fourfold.spec.batch import Batch
from fourfold.spec.device import device_id
from fourfold.spec.model import ModelShape
from fourfold.tables.shape import SHAPE_FIELDS, model_of


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
        stack="fourfold",
        grad_accum=_batch(record).micro_count(record.dp or 1) if record.micro_batch else None,
        batch_tokens=record.tokens,
        tokens_s=record.tokens / record.step_s if record.step_s else None,
        mem_gb=None if record.peak_bytes is None else record.peak_bytes / 2**30,
        variant=_variant(record),
        note="; ".join(filter(None, _notes(record, model))),
    )


def _variant(record: Record) -> str:
    """Settings that make another configuration, though the published columns do not show them."""
    settings = [f"{name}={value}" for name, value in record.env]
    settings += [record.attention, "compiled" if record.compiled else ""]
    settings.append(f"copies {record.replicate}" if record.replicate > 1 else "")
    settings.append(record.cp_kind if record.cp != 1 else "")
    settings.append(record.schedule if record.pp != 1 else "")
    sequence_parallel = record.sequence_parallel or record.tp == 1
    settings.append("" if sequence_parallel else "no sequence parallel")
    settings.append(record.order if record.gpus != 1 else "")
    return " ".join(filter(None, settings))


def _batch(record: Record) -> Batch:
    return Batch(
        seq_len=record.seq_len or 1,
        micro_batch=record.micro_batch or 0,
        global_batch=record.global_batch or 1,
    )


def _notes(record: Record, model: ModelShape) -> list[str]:
    """What the columns cannot say: uneven parts, other settings, and why a run failed."""
    words = [record.note, record.tag]
    parts = _micro_parts(record)
    if parts:
        words.append(f"micro {parts}")
    pp = record.pp or 1
    if 1 < pp <= model.layers and model.layers % pp and record.virtual_stages == 1:
        stages = stage_layers(model, pp, record.seq_len or 1)
        words.append("stages " + "+".join(str(len(stage)) for stage in stages))
    if record.cp != 1:
        words.append(f"cp {record.cp_kind}")
    if record.schedule != "1f1b":
        words.append(record.schedule)
    if record.compiled:
        words.append("compiled")
    words += [f"{name}={value}" for name, value in record.env]
    if record.retries:
        words.append(f"{record.retries} allocator retries")
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
