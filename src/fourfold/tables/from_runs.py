"""Which record does a stored run make? The same words that published rows are read into."""

from __future__ import annotations

import functools

from fourfold.cost.count.params import model_params
from fourfold.cost.count.stages import stage_layers
from fourfold.result.read.summary import Summary
from fourfold.spec import catalog, codec
from fourfold.spec.batch import Batch
from fourfold.spec.model import ModelShape
from fourfold.spec.nccl_tests import device_id
from fourfold.tables.record import Record, Status

_STATUS: dict[str, Status] = {"ok": "ok", "oom": "oom", "hung": "hang"}


@functools.lru_cache(maxsize=4096)
def model_of(model_json: str) -> ModelShape:
    return codec.decode(ModelShape, codec.parse_json(model_json))


@functools.lru_cache(maxsize=4096)
def _params(model_json: str, seq_len: int) -> int:
    return model_params(model_of(model_json), seq_len)


@functools.lru_cache(maxsize=256)
def hardware_of(device: str) -> str:
    """An id of the catalogue where the device's name is known, else the name."""
    return device_id(device, catalog.device_names()) or device


def record_of(summary: Summary, number: int) -> Record:
    """`number` keeps the order of the store, for runs that started in the same second."""
    model = model_of(summary.model_json)
    return Record(
        style="other",
        table=0,
        line=0,
        row=number,
        row_id=summary.run_id,
        label=summary.model,
        model=summary.model,
        family=model.family,
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        ffn=model.ffn,
        vocab=model.vocab,
        tied=model.tied,
        seq_len=summary.seq_len,
        hardware=hardware_of(summary.device),
        nodes=summary.nodes,
        gpus_per_node=summary.gpus // summary.nodes,
        gpus=summary.gpus,
        dp=summary.dp,
        tp=summary.tp,
        cp=summary.cp,
        pp=summary.pp,
        virtual_stages=summary.virtual_stages,
        sharding=summary.sharding,
        precision=summary.precision,
        recompute=summary.recompute,
        offload=summary.offload,
        variant=_variant(summary),
        stack="fourfold",
        shape=model,
        micro_batch=summary.micro_batch,
        grad_accum=_micro_count(summary),
        global_batch=summary.global_batch,
        batch_tokens=summary.tokens,
        step_s=summary.step_s,
        tokens_s=summary.tokens / summary.step_s if summary.step_s else None,
        tokens_s_gpu=summary.tokens_s_gpu,
        params=_params(summary.model_json, summary.seq_len),
        mem_gb=None if summary.peak_bytes is None else summary.peak_bytes / 2**30,
        status=_STATUS.get(summary.outcome, "fail"),
        note="; ".join(filter(None, notes(summary, model))),
        measured_at=summary.started_at,
    )


def _variant(summary: Summary) -> str:
    """Settings that make another configuration, though the published columns do not show them."""
    said = [f"{name}={value}" for name, value in summary.env]
    said += [summary.attention, "compiled" if summary.compiled else ""]
    said.append(f"copies {summary.replicate}" if summary.replicate > 1 else "")
    said.append(summary.cp_kind if summary.cp > 1 else "")
    said.append(summary.schedule if summary.pp > 1 else "")
    said.append("" if summary.sequence_parallel or summary.tp == 1 else "no sequence parallel")
    said.append(summary.order if summary.gpus > 1 else "")
    return " ".join(filter(None, said))


def _micro_count(summary: Summary) -> int | None:
    return _batch(summary).micro_count(summary.dp) if summary.micro_batch else None


def _batch(summary: Summary) -> Batch:
    return Batch(
        seq_len=summary.seq_len, micro_batch=summary.micro_batch, global_batch=summary.global_batch
    )


def notes(summary: Summary, model: ModelShape) -> list[str]:
    """What the columns cannot say: uneven parts, other settings, and why a run failed."""
    said = [summary.note, summary.tag]
    parts = _micro_parts(summary)
    if parts:
        said.append(f"micro {parts}")
    uneven = 1 < summary.pp <= model.layers and model.layers % summary.pp != 0
    if uneven and summary.virtual_stages == 1:
        stages = stage_layers(model, summary.pp, summary.seq_len)
        said.append("stages " + "+".join(str(len(stage)) for stage in stages))
    if summary.cp > 1:
        said.append(f"cp {summary.cp_kind}")
    if summary.schedule != "1f1b":
        said.append(summary.schedule)
    if summary.compiled:
        said.append("compiled")
    said += [f"{name}={value}" for name, value in summary.env]
    if summary.retries:
        said.append(f"{summary.retries} allocator retries")
    if summary.outcome != "ok":
        said.append(f"{summary.outcome}: {summary.failure}".rstrip(": "))
    return said


def _micro_parts(summary: Summary) -> str:
    """'11+11+11+11+4' where the micro batch does not divide the largest share evenly."""
    if not summary.micro_batch:
        return ""
    batch = _batch(summary)
    shares = batch.shares(summary.dp)
    sizes = batch.micro_sizes(shares[0])
    if len(set(sizes)) <= 1 and len(set(shares)) == 1 and sizes[:1] == (summary.micro_batch,):
        return ""
    if len(sizes) > 6:
        return f"{sizes[0]}+{sizes[1]}+...+{sizes[-1]}"
    return "+".join(map(str, sizes))
