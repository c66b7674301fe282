"""Lint rules on the configuration of a row: headings, axes, batch, layers, size label."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

from fourfold.cost.count.params import model_params
from fourfold.result.record import Record
from fourfold.tables import cells, styles
from fourfold.tables.records import Finding, Problem, TablesFile, axes_world, finding
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
_STATED_PARTS = re.compile(r"\b(stages|micro)\s+([0-9]+(?:\+[0-9]+)*)")
_PROXY_LAYERS = re.compile(r"proxy([0-9]+)l\b")
# Engines that split a batch unevenly; the others stop unless dp x micro batch divides it.
_UNEVEN_STACKS = ("fourfold", "llm-foundry")


def heading_count(file: TablesFile) -> Iterator[Finding]:
    """Once for the table when all rows agree with each other, else for each odd row."""
    for number, (table, _) in enumerate(file.tables):
        style = styles.style_of(table)
        rows = [row for row in table.data if any(row.cells)]
        counts = Counter(len(row.cells) for row in rows)
        wanted = len(table.headings)
        if not counts or set(counts) == {wanted}:
            continue
        missing = styles.missing_heading(table, style)
        if len(counts) == 1:
            (count,) = counts
            repair = f"add the heading '{missing}'" if missing else "compare headings and cells"
            yield Finding(
                rule="heading-count", row=table.line, table=number + 1, place=f"line {table.line}",
                value=f"{wanted} headings", expected=f"{count}, as the rows have", repair=repair,
            )  # fmt: skip
            continue
        usual = counts.most_common(1)[0][0]
        for row in rows:
            if len(row.cells) != usual:
                yield Finding(
                    rule="heading-count", row=row.line, table=number + 1, place=f"line {row.line}",
                    value=f"{len(row.cells)} cells", expected=f"{usual} cells",
                    repair="a cell was lost" if len(row.cells) < usual else "a cell was added",
                )  # fmt: skip


def gpus_axes(record: Record) -> Iterator[Problem]:
    if record.gpus is None:
        return
    inner = record.model_ranks
    if record.style == "scaling":
        if record.outcome == "ok" and record.gpus % inner:
            yield (
                f"{record.text('tflops_gpu')} on {record.gpus} GPUs",
                f"tp x cp x pp = {inner} divides the GPUs",
                "the value belongs elsewhere",
            )
        return
    if record.outcome == "crashed" and not (record.step_s or record.tflops_gpu or record.mem_gb):
        return  # axes that can't be are why such a row has no result
    world = axes_world(record) if "dp" in record.cells else None
    if world is None and record.tp and record.gpus % inner:
        world = inner
    if world is not None and world != record.gpus:
        yield (f"{_axes(record)} = {world}", _gpus(record), _axis_fix(record))


def _axes(record: Record) -> str:
    sizes = (("DP", record.dp), ("TP", record.tp), ("CP", record.cp), ("PP", record.pp))
    return " x ".join(f"{name} {size}" for name, size in sizes if size is not None)


def _gpus(record: Record) -> str:
    if "gpus" in record.cells or not record.nodes:
        return f"{record.gpus} GPUs"
    return f"{record.gpus} GPUs ({record.nodes} nodes x {record.gpus_per_node})"


def _axis_fix(record: Record) -> str:
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


def batch_reach(record: Record) -> Iterator[Problem]:
    if record.style == "scaling" or not record.global_batch or not record.dp:
        return
    if record.style == "mpt":
        yield from _accumulation(record)
        return
    if record.stack.startswith(_UNEVEN_STACKS) or _stated(record, "micro"):
        return
    step = record.dp * (record.micro_batch or 1)
    if record.global_batch % step:
        low = record.global_batch - record.global_batch % step
        near = f"{low} or {low + step}" if low else f"{step}"
        yield (
            f"GBS {record.global_batch}",
            f"a multiple of DP {record.dp} x MBS {record.micro_batch or 1} = {step}",
            f"GBS {near}, or another micro batch",
        )


def _accumulation(record: Record) -> Iterator[Problem]:
    """MPT: GradAccum micro batches a rank, the last one smaller if need be (48 = 4 x 11 + 4)."""
    if not (record.grad_accum and record.micro_batch and record.global_batch and record.dp):
        return
    share = -(-record.global_batch // record.dp)
    if -(-share // record.micro_batch) != record.grad_accum:
        full = record.micro_batch * record.grad_accum * record.dp
        yield (
            f"{record.micro_batch} x {record.grad_accum} on {record.dp} ranks for "
            f"{record.global_batch}",
            f"GradAccum {-(-share // record.micro_batch)}",
            f"GlobalBatchSize {full} or GradAccum {-(-share // record.micro_batch)}",
        )


def _stated(record: Record, what: str) -> tuple[int, ...]:
    """Our own tables say how uneven parts are cut: 'stages 9+8+8', 'micro 11+11+4'."""
    for name, parts in _STATED_PARTS.findall(record.note):
        if name == what:
            return tuple(map(int, parts.split("+")))
    return ()


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
                        record, "batch-heading", f"{shown} {value}",
                        f"{stated}, as the text above says", _heading_fix(record, name, stated),
                    )  # fmt: skip


def _heading_fix(record: Record, name: str, stated: int) -> str:
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


def batch_tokens(record: Record) -> Iterator[Problem]:
    if record.batch_tokens and record.global_batch and record.seq_len:
        wanted = record.global_batch * record.seq_len
        if record.batch_tokens != wanted:
            fix = f"{wanted} tokens"
            if record.batch_tokens % record.seq_len == 0:
                fix += f" or GlobalBatchSize {record.batch_tokens // record.seq_len}"
            yield (
                f"{record.batch_tokens}",
                f"{record.global_batch} x {record.seq_len} = {wanted}",
                fix,
            )


def layers_stages(record: Record) -> Iterator[Problem]:
    shape = shape_of(record)
    # A row that did not run may say so truthfully, whatever its layout.
    ran = record.outcome == "ok" or (record.outcome == "oom" and record.style != "scaling")
    if shape is None or not record.pp or record.pp == 1 or not ran:
        return
    layers, chunks = shape.model.layers, record.pp * (record.virtual_stages or 1)
    stated = _stated(record, "stages")
    if stated:
        good = sum(stated) == layers and len(stated) == record.pp
    elif record.style == "scaling" or record.stack.startswith("fourfold"):
        good = chunks <= layers  # uneven stages are legal; a stage without a layer is not
    else:
        good = any((layers + ends) % chunks == 0 for ends in (0, 1, 2))
    if not good:
        sizes = [size for size in range(1, layers + 1) if layers % size == 0]
        near = sorted(sorted(sizes, key=lambda size: abs(size - record.pp))[:2])
        yield (
            f"PP {record.pp} over {layers} layers",
            f"{chunks} equal parts (with embedding and head: {layers + 1} or {layers + 2})",
            f"PP {' or '.join(map(str, near))}, or other layers",
        )


def size_label(record: Record) -> Iterator[Problem]:
    if record.style == "scaling":
        return
    yield from _name_against_shape(record)
    shape = shape_of(record)
    if shape is None:
        return
    seq_len = record.seq_len or NOTES_SEQ_LEN
    if record.params and shape.vocab_known:
        wanted = model_params(shape.model, seq_len)
        if record.params != wanted:
            yield (
                f"{record.params} parameters",
                f"{wanted} for {record.label} at {seq_len} tokens",
                "check model and SeqLen",
            )
    label = cells.size_label(record.label)
    if label is None or named_shape(record) or _PROXY_LAYERS.search(record.label):
        return
    low, high = params_range(shape, seq_len)
    if label[1] < low * (1 - _LABEL_SLACK) or label[0] > high * (1 + _LABEL_SLACK):
        likely = model_params(shape.model, seq_len)
        yield (
            record.label,
            f"{show_count(low)} to {show_count(high)} for {shape.model.layers} layers of "
            f"{shape.model.hidden}",
            f"label {likely / 1e9:.1f}B with {shape.model.vocab:,} words, or other layers",
        )


def _name_against_shape(record: Record) -> Iterator[Problem]:
    """A name of the catalogue, or '...-proxy7l', against the row's own shape columns."""
    proxy = _PROXY_LAYERS.search(record.label)
    named = named_shape(record)
    if proxy and record.layers and int(proxy.group(1)) != record.layers:
        yield (record.label, f"{record.layers} layers", "other name or layers")
        return
    if named is None or proxy or not (record.layers and record.hidden):
        return
    if (record.layers, record.hidden) != (named.layers, named.hidden):
        yield (
            f"{record.layers} layers of {record.hidden}",
            f"{named.name} has {named.layers} of {named.hidden}",
            "other name or shape",
        )


def expert_ranks(record: Record) -> Iterator[Problem]:
    """Experts divide the ranks of a stage once more."""
    spread, stages = record.ep * record.etp, record.pp or 1
    if spread == 1 or not record.gpus or record.gpus % (stages * spread) == 0:
        return
    yield (
        f"PP {stages}, EP {record.ep}, ETP {record.etp} on {record.gpus} GPUs",
        f"PP x EP x ETP = {stages * spread} divides the GPUs",
        "other GPUs, PP or EP",
    )


def experts_divide(record: Record) -> Iterator[Problem]:
    """Every rank holds as many experts, or as wide a slice of each."""
    named = named_shape(record)
    experts = record.experts or (named.experts if named else 0)
    if experts and experts % record.ep:
        yield (f"EP {record.ep}", f"divides {experts} experts", "other EP or model")
    moe = named.moe if named else None
    if moe and moe.ffn % record.etp:
        yield (f"ETP {record.etp}", f"divides the width of an expert, {moe.ffn}", "other ETP")


ROW_CHECKS = {
    "gpus-axes": gpus_axes, "expert-ranks": expert_ranks, "experts-divide": experts_divide,
    "batch-reach": batch_reach, "batch-tokens": batch_tokens,
    "layers-stages": layers_stages, "size-label": size_label,
}  # fmt: skip
CHECKS = (heading_count, batch_heading)
