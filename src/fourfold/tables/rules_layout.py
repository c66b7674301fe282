"""Lint rules on the configuration of a row: products of axes, batch, parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from fourfold.cost.count.params import model_params
from fourfold.spec.engine import GENERIC, engine_of
from fourfold.tables import cells
from fourfold.tables.finding import FileCheck, Finding, Problem, RowCheck, TablesFile, finding
from fourfold.tables.records import axes_world
from fourfold.tables.row import PublishedRow
from fourfold.tables.shape import (
    NOTES_SEQ_LEN,
    implied_batches,
    named_shape,
    params_range,
    shape_of,
)
from fourfold.units import show_count

# Labels are rounded by hand and count embeddings in some tables: this much beyond rounding is fine.
_LABEL_SLACK = 0.03
# Our own tables state uneven micro-batches: 'micro 11+11+4'.
_UNEVEN_MICRO_BATCHES = re.compile(r"\bmicro\s+[0-9]+(?:\+[0-9]+)*")
_PROXY_LAYERS = re.compile(r"proxy([0-9]+)l\b")


def scaling_axes(record: PublishedRow, gpus: int) -> Iterator[Problem]:
    if record.outcome == "ok" and gpus % record.model_ranks:
        yield (
            f"{record.text('tflops_gpu')} on {gpus} GPUs",
            f"tp x cp x pp = {record.model_ranks} divides the GPUs",
            "the value belongs elsewhere",
        )


def gpus_axes(record: PublishedRow, gpus: int) -> Iterator[Problem]:
    if record.outcome == "crashed" and not (record.step_s or record.tflops_gpu or record.mem_gb):
        return  # axes that can't be are why such a row has no result
    world = axes_world(record) if "dp" in record.cells else None
    if world is None and record.tp and gpus % record.model_ranks:
        world = record.model_ranks
    if world is not None and world != gpus:
        yield f"{_axes(record)} = {world}", _gpus(record), _axis_fix(record)


def _axes(record: PublishedRow) -> str:
    sizes = (("DP", record.dp), ("TP", record.tp), ("CP", record.cp), ("PP", record.pp))
    return " x ".join(f"{name} {size}" for name, size in sizes if size is not None)


def _gpus(record: PublishedRow) -> str:
    if "gpus" in record.cells or not record.nodes:
        return f"{record.gpus} GPUs"
    return f"{record.gpus} GPUs ({record.nodes} nodes x {record.gpus_per_node})"


def _axis_fix(record: PublishedRow) -> str:
    """DP first: it is what the other axes leave, and what people forget to change."""
    sizes = {"DP": record.dp, "PP": record.pp, "TP": record.tp, "CP": record.cp}
    gpus = record.gpus or 1
    fixes = []
    for name, size in sizes.items():
        if size is None:
            continue
        others = math.prod(value or 1 for other, value in sizes.items() if other != name)
        if gpus % others == 0 and gpus // others != size:
            fixes.append(f"{name} {gpus // others}")
    return " or ".join(fixes) if fixes else "two axes or the GPU count are wrong"


def batch_reach(record: PublishedRow, batch: int, dp: int) -> Iterator[Problem]:
    micro = record.micro_batch or 1
    step = dp * micro
    # The others stop unless dp x micro batch divides the batch.
    rules = engine_of(record.stack).rules
    splits_unevenly = rules.name != GENERIC and rules.batch_rule != "whole"
    uneven = splits_unevenly or _UNEVEN_MICRO_BATCHES.search(record.note)
    if batch % step and not uneven:
        low = batch - batch % step
        near = f"{low} or {low + step}" if low else f"{step}"
        expected = f"a multiple of DP {dp} x MBS {micro} = {step}"
        yield f"GBS {batch}", expected, f"GBS {near}, or another micro batch"


def accumulation(
    record: PublishedRow, batch: int, dp: int, accumulated: int, micro: int
) -> Iterator[Problem]:
    """MPT: GradAccum micro batches a rank, the last one smaller if need be (48 = 4 x 11 + 4)."""
    share = -(-batch // dp)
    needed = -(-share // micro)
    if needed != accumulated:
        yield (
            f"{micro} x {accumulated} on {dp} ranks for {batch}",
            f"GradAccum {needed}",
            f"GlobalBatchSize {micro * accumulated * dp} or GradAccum {needed}",
        )


def batch_heading(file: TablesFile) -> Iterator[Finding]:
    names = (("global_batch", "GBS"), ("seq_len", "sequence length"), ("micro_batch", "MBS"))
    for number, (_, text) in enumerate(file.tables):
        for name, shown in names:
            stated = getattr(text, name)
            if stated is None:
                continue
            for record in file.rows_of(number):
                value = getattr(record, name)
                if name in record.cells and value is not None and value != stated:
                    yield finding(
                        record,
                        "batch-heading",
                        f"{shown} {value}",
                        f"{stated}, as the text above says",
                        _heading_fix(record, name, stated),
                    )


def _heading_fix(record: PublishedRow, name: str, stated: int) -> str:
    """Seconds and TFLOPs know which of the two is right."""
    implied = implied_batches(record) if name == "global_batch" else []
    written = (stated, record.global_batch or stated)
    pairs = [(batch, size) for batch in implied for size in written]
    if not pairs:
        return f"{stated} in the row, or another value in the text"
    batch, size = min(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1))
    if abs(batch / size - 1) > 0.05:
        return f"{stated}, or neither: seconds and TFLOPs imply {batch:.0f}"
    where = "in the row" if size == stated else "in the text"
    return f"{size} {where}: seconds and TFLOPs imply {batch:.0f}"


def batch_tokens(record: PublishedRow, tokens: int, batch: int, seq_len: int) -> Iterator[Problem]:
    wanted = batch * seq_len
    if tokens != wanted:
        whole = tokens % seq_len == 0
        fix = f"{wanted} tokens" + (f" or GlobalBatchSize {tokens // seq_len}" if whole else "")
        yield f"{tokens}", f"{batch} x {seq_len} = {wanted}", fix


def parameters(record: PublishedRow, params: int) -> Iterator[Problem]:
    shape, seq_len = shape_of(record), record.seq_len or NOTES_SEQ_LEN
    if shape is None or not shape.vocab_known:
        return
    wanted = model_params(shape.model, seq_len)
    if params != wanted:
        right = f"{wanted} for {record.label} at {seq_len} tokens"
        yield f"{params} parameters", right, "check model and SeqLen"


def size_label(record: PublishedRow, label: str) -> Iterator[Problem]:
    shape, said = shape_of(record), cells.size_label(label)
    if shape is None or said is None or named_shape(record) or _PROXY_LAYERS.search(label):
        return
    model, seq_len = shape.model, record.seq_len or NOTES_SEQ_LEN
    low, high = params_range(shape, seq_len)
    if said[1] < low * (1 - _LABEL_SLACK) or said[0] > high * (1 + _LABEL_SLACK):
        size = f"{model_params(model, seq_len) / 1e9:.1f}B with {model.vocab:,} words"
        yield (
            label,
            f"{show_count(low)} to {show_count(high)} for {model.layers} layers of {model.hidden}",
            f"label {size}, or other layers",
        )


def name_against_shape(
    record: PublishedRow, label: str, layers: int, hidden: int
) -> Iterator[Problem]:
    """A name of the catalogue, or '...-proxy7l', against the row's own shape columns."""
    proxy, named = _PROXY_LAYERS.search(label), named_shape(record)
    if proxy and int(proxy.group(1)) != layers:
        yield label, f"{layers} layers", "other name or layers"
    elif not proxy and named and (layers, hidden) != (named.layers, named.hidden):
        right = f"{named.name} has {named.layers} of {named.hidden}"
        yield f"{layers} layers of {hidden}", right, "other name or shape"


def expert_ranks(record: PublishedRow, gpus: int, ep: int, etp: int) -> Iterator[Problem]:
    """Experts divide the ranks of a stage once more."""
    stages = record.pp or 1
    spread = stages * ep * etp
    if ep * etp > 1 and gpus % spread:
        said = f"PP {stages}, EP {ep}, ETP {etp} on {gpus} GPUs"
        yield said, f"PP x EP x ETP = {spread} divides the GPUs", "other GPUs, PP or EP"


def experts_divide(record: PublishedRow, ep: int, etp: int) -> Iterator[Problem]:
    """Every rank holds as many experts, or as wide a slice of each."""
    named = named_shape(record)
    experts = record.experts or (named.experts if named else 0)
    if experts % ep:
        yield f"EP {ep}", f"divides {experts} experts", "other EP or model"
    if named and named.moe and named.moe.ffn % etp:
        yield f"ETP {etp}", f"divides the width of an expert, {named.moe.ffn}", "other ETP"


_LISTED = ("mpt", "topology", "reference")
ROW_CHECKS = (
    RowCheck("gpus-axes", ("scaling",), ("gpus",), scaling_axes),
    RowCheck("gpus-axes", _LISTED, ("gpus",), gpus_axes),
    RowCheck("expert-ranks", (), ("gpus", "ep", "etp"), expert_ranks),
    RowCheck("experts-divide", (), ("ep", "etp"), experts_divide),
    RowCheck("batch-reach", ("topology", "reference"), ("global_batch", "dp"), batch_reach),
    RowCheck(
        "batch-reach", ("mpt",), ("global_batch", "dp", "grad_accum", "micro_batch"), accumulation
    ),
    RowCheck("batch-tokens", (), ("batch_tokens", "global_batch", "seq_len"), batch_tokens),
    RowCheck("size-label", _LISTED, ("params",), parameters),
    RowCheck("size-label", _LISTED, ("label",), size_label),
    RowCheck("size-label", _LISTED, ("label", "layers", "hidden"), name_against_shape),
)
FILE_CHECKS: tuple[FileCheck, ...] = (batch_heading,)
