"""Results as published: records -> a document in the MPT, topology or scaling style, a table for
what can be compared. Of repeats the newest figure is shown; older ones stand below the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from fourfold.cost.count.flops import DEFAULT
from fourfold.result.report import published_word
from fourfold.spec.layout import AXES, EXPERT_AXES
from fourfold.spec.words import OURS
from fourfold.tables.cells import figure
from fourfold.tables.derive import derive
from fourfold.tables.document import Document, Table, TableRow, Text
from fourfold.tables.row import CONFIG, PublishedRow, differing, grouped
from fourfold.tables.shape import shape_of
from fourfold.tables.styles import EQUIVALENCE, MPT, SETTINGS, TOPOLOGY, Column
from fourfold.units import counted

# The published MPT tables have a convention of their own, which their columns keep.
STYLE_CONVENTION = {"mpt": "mpt", "topology": DEFAULT, "scaling": DEFAULT}


def publish(records: Iterable[PublishedRow], style: str, rule: str) -> Document:
    """A document that reads back: its own lint finds nothing in it."""
    filled = [derive(record, rule) for record in records]
    blocks: list[Table | Text] = []
    above: tuple[str, ...] = ()
    for group in grouped(filled, _MPT_GROUP if style == "mpt" else _GROUP).values():
        newest, older = _newest(group)
        for words, part in _parted(newest) if style == "scaling" else [("", newest)]:
            table = _WRITERS[style](part)
            if table is None:
                continue
            blocks += [Text((*above, _heading(part[0], style, rule) + words, "")), table]
            above = ("", *_below(part, older, style), "")
    if above:
        blocks.append(Text(above[:-1]))
    return Document(tuple(blocks))


_GROUP = (
    "label",
    "family",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "tied",
    "shape",
    "seq_len",
    "hardware",
    "precision",
    "recompute",
)
_MPT_GROUP = ("hardware", "precision")


def _newest(
    group: list[PublishedRow],
) -> tuple[list[PublishedRow], dict[tuple[object, ...], list[PublishedRow]]]:
    """The newest record of each configuration, and the older ones by configuration."""
    newest, older = [], {}
    for key, same in grouped(group, CONFIG).items():
        same.sort(key=lambda record: (*_recency(record), record.row))
        newest.append(same[-1])
        if len(same) > 1:
            older[key] = same[:-1]
    return newest, older


# What the cells of a scaling table say.
_AXES = ("gpus", *AXES, "micro_batch")


def _parted(records: list[PublishedRow]) -> list[tuple[str, list[PublishedRow]]]:
    """Records that would share a cell of a scaling table in tables of their own, with the words
    that tell them apart: '; sharding zero3'. Nothing that was measured is dropped."""
    shared = [cell for cell in grouped(records, _AXES).values() if len(cell) > 1]
    if not shared:
        return [("", records)]
    differ = differing(shared, CONFIG)
    parts = []
    for part in grouped(records, differ).values():
        parts.append((_words(part[0], differ), part))
    return parts


def _words(record: PublishedRow, names: Iterable[str]) -> str:
    """'; sharding zero3; compiled': these fields, but for those that say nothing."""
    known = ((name, getattr(record, name)) for name in names)
    return "".join(
        f"; {value}" if name == "variant" else f"; {name.replace('_', ' ')} {value}"
        for name, value in known
        if value
    )


def _heading(record: PublishedRow, style: str, rule: str) -> str:
    """What the columns do not say, in the words that the reader of tables knows."""
    if style == "mpt":
        return f"{record.hardware or 'unknown device'}, {record.precision}; MFU and HFU by {rule}"
    shape = shape_of(record)
    parts = [record.label or "unknown model"]
    if shape is not None:
        model = shape.model
        parts.append(
            f"FAMILY={model.family} / NLAYERS={model.layers} / NHIDDEN={model.hidden} / "
            f"NHEADS={model.heads} / NKVHEADS={model.kv_heads} / NFFN={model.ffn} / "
            f"VOCAB={model.vocab} / TIED={int(model.tied)}"
            + (f" / NEXPERTS={model.experts} / TOPK={model.top_k}" if model.experts else "")
            + (f" / SEQLEN={record.seq_len}" if record.seq_len else "")
        )
    recompute = record.recompute and f"recompute {record.recompute}"
    parts.append(", ".join(filter(None, (record.precision, recompute, record.hardware))))
    rest = "".join(f"; {part}" for part in parts[2:] if part)
    return f"{': '.join(parts[:2])}{rest}; TFLOPs by {rule}"


def _below(
    newest: list[PublishedRow], older: dict[tuple[object, ...], list[PublishedRow]], style: str
) -> list[str]:
    lines = []
    # Settings without which two lines could mean the same rows; some are said by the variant too.
    alike = grouped(newest, (*_COMPARABLE, *_AXES, *EXPERT_AXES, "stack")).values()
    telling = [name for name in differing(alike, CONFIG) if name not in ("offload", "equivalence")]

    def speed(record: PublishedRow) -> str:
        seconds, tflops = figure(record.step_s), figure(record.tflops_gpu)
        return f"{_axes(record)}{_words(record, telling)}, {seconds} s, {tflops} TFLOPs"

    for same in grouped([r for r in newest if r.step_s], _COMPARABLE).values():
        if len(same) > 1:
            best = min(same, key=lambda record: record.step_s or 0.0)
            what = f"{best.label}, {best.seq_len} tokens, global batch {best.global_batch}"
            lines.append(f"Best by seconds per iteration ({what}): {speed(best)}")
            most = max(same, key=lambda record: record.tflops_gpu or 0.0)
            if most is not best and (most.tflops_gpu or 0) > (best.tflops_gpu or 0) * 1.001:
                lines[-1] += f" (most TFLOPs: {speed(most)})"
    for record in newest:
        if record.config in older:
            old = older[record.config]
            was = ", ".join(_figure_of(repeat, style) for repeat in reversed(old[-4:]))
            was += f" and {len(old) - 4} more" if len(old) > 4 else ""
            figures = f"{_figure_of(record, style)} (earlier {was})"
            lines.append(f"Repeat: {_axes(record)}{_words(record, telling)}: {figures}")
    return [*(lines or [counted(len(newest), "configuration")]), *_marks(newest)]


def _marks(records: list[PublishedRow]) -> list[str]:
    """One line: how many are of a training, how many of a benchmark and why."""
    found = Counter(record.equivalence for record in records if record.equivalence)
    unsaid = len(records) - found.total()
    parts = [f"{count} {mark}" for mark, count in found.most_common()]
    parts += [f"{unsaid} not said"] if unsaid else []
    return [f"Steps: {'; '.join(parts)}"] if found else []


# Seconds per iteration compare within these.
_COMPARABLE = ("label", "shape", "seq_len", "global_batch", "hardware")


def _axes(record: PublishedRow) -> str:
    sizes = f"dp{record.dp} tp{record.tp} cp{record.cp or 1} pp{record.pp}"
    of_experts = ((axis, getattr(record, axis)) for axis in EXPERT_AXES)
    sizes += "".join(f" {axis}{size}" for axis, size in of_experts if size > 1)
    engine = f" by {record.stack}" if record.stored and record.stack != OURS else ""
    gpus = f" on {counted(record.gpus, 'GPU')}" if record.gpus else ""
    return f"{sizes} micro batch {record.micro_batch}{gpus}{engine}"


def _figure_of(record: PublishedRow, style: str) -> str:
    value = record.tflops_gpu if style == "scaling" else record.step_s
    return figure(value) if value is not None else published_word(record.outcome)


def _mpt(group: list[PublishedRow]) -> Table | None:
    order = sorted(group, key=lambda r: (-(r.params or 0), -(r.seq_len or 0), -(r.gpus or 0)))
    return _listed(order, (*MPT, EQUIVALENCE, SETTINGS))


def _topology(group: list[PublishedRow]) -> Table | None:
    known = [record for record in group if record.gpus]
    order = sorted(known, key=lambda r: (r.gpus or 0, r.pp or 0, r.tp or 0, r.micro_batch or 0))
    return _listed(order, TOPOLOGY)


def _listed(records: list[PublishedRow], columns: tuple[Column, ...]) -> Table | None:
    """One row a record."""
    needed = [column for column in columns if column.needed(records)]
    rows = tuple(TableRow(tuple(column.write(record) for column in needed)) for record in records)
    return Table(tuple(column.heading for column in needed), rows) if records else None


def _scaling(group: list[PublishedRow]) -> Table | None:
    """Rows (TP, CP, PP, micro batch), columns GPU counts; '-' did not fit or failed."""
    cells: dict[tuple[int, int, int, int], dict[int, PublishedRow]] = {}
    for record in group:
        if record.gpus and record.tp and record.pp and record.micro_batch is not None:
            layout = (record.tp, record.cp or 1, record.pp, record.micro_batch)
            known = cells.setdefault(layout, {}).get(record.gpus)
            if known is None or _recency(record) > _recency(known):
                cells[layout][record.gpus] = record
    if not cells:
        return None
    counts = sorted({gpus for row in cells.values() for gpus in row})
    headings = ("(TP, CP, PP, micro batch)", *(f"{count} GPU" for count in counts))
    rows: list[TableRow] = []
    before = None
    for layout in sorted(cells, key=lambda axes: (-axes[0], axes[1:3], axes[3])):
        if before is not None and layout[:3] != before:
            rows.append(TableRow(tuple("---" for _ in headings), rule=True))
        before = layout[:3]
        shown = [_scaling_cell(cells[layout].get(count)) for count in counts]
        rows.append(TableRow((str(layout), *shown)))
    return Table(headings, tuple(rows))


def _recency(record: PublishedRow) -> tuple[bool, str]:
    """A repeat that failed does not hide a figure that was measured."""
    return record.outcome == "ok", record.started_at


def _scaling_cell(record: PublishedRow | None) -> str:
    if record is None or record.outcome == "absent":
        return ""
    return figure(record.tflops_gpu) if record.outcome == "ok" else "-"


_WRITERS: dict[str, Callable[[list[PublishedRow]], Table | None]] = {
    "mpt": _mpt,
    "topology": _topology,
    "scaling": _scaling,
}


# Keys of a record as other tools read it, in base units; a field has the same name but for these.
_PLAIN = (
    "row_id",
    "stack",
    "label",
    "hardware",
    "gpus",
    "nodes",
    *AXES,
    *EXPERT_AXES,
    "experts",
    "virtual_stages",
    "sharding",
    "precision",
    "recompute",
    "seq_len",
    "micro_batch",
    "global_batch",
    "step_s",
    "tokens_s_gpu",
    "tflops_gpu",
    "mfu_pct",
    "hfu_pct",
    "mem_gb",
    "params",
    "equivalence",
    "status",
    "note",
    "measured_at",
)
_RENAMED = {"row_id": "run_id", "status": "outcome", "measured_at": "started_at"}


def plain_records(records: Iterable[PublishedRow], rule: str) -> list[dict[str, object]]:
    """For other tools: every record, none merged."""
    plain = []
    for record in records:
        full = derive(record, rule)
        row = {key: getattr(full, _RENAMED.get(key, key)) for key in _PLAIN}
        predicted_s = full.predicted.step_s if full.predicted else None
        plain.append(row | {"status": published_word(full.outcome), "predicted_s": predicted_s})
    return plain
