"""Records of tables of any style: one per row, in scaling tables one per cell."""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import replace
from typing import Any

from fourfold.cost.table.reference import NoteWords
from fourfold.result.report import WORST_FIRST
from fourfold.spec.layout import EXPERT_AXES, MODEL_AXES
from fourfold.tables import cells, styles
from fourfold.tables.document import Document, Table, TableRow, Text, after, device_id
from fourfold.tables.row import KINDS, PublishedRow, RowOutcome, Style

# The topology notes come from hosts of eight GPUs; used only where neither text nor rows say more.
_DEFAULT_GPUS_PER_NODE = 8
_MPT_SHARDING = {word: ours for ours, word in styles.SHARDING.items()}
_MPT_RECOMPUTE = {word.lower(): ours for ours, word in styles.CHECKPOINTING.items()}
_SPEEDS = ("step_s", "tflops_gpu", "model_tflop", "tokens_s", "mfu_pct")
_NEVER_ZERO = ("step_s", "tflops_gpu", "mem_gb")
_TELL_APART = (
    "cluster",
    "dispatcher",
    "a2a_overlap",
    "routing",
    "capacity_factor",
    "recompute_modules",
    "cuda_graph",
    "unmodelled",
)
_HANGS = re.compile(r"\bh[au]ngs?\b", re.IGNORECASE)


def with_text(document: Document) -> list[tuple[Table, PublishedRow]]:
    """Every table with what the text above it says of its rows."""
    stated = PublishedRow()
    tables: list[tuple[Table, PublishedRow]] = []
    for block in document.blocks:
        if isinstance(block, Text):
            stated = after(stated, block.lines)
        else:
            tables.append((block, stated))
    return tables


def records(document: Document) -> list[PublishedRow]:
    rows: list[PublishedRow] = []
    for number, (table, stated) in enumerate(with_text(document)):
        style = styles.style_of(table)
        stated = replace(stated, style=style, table=number)
        if style == "scaling":
            rows += _scaling(table, stated)
        elif style != "other":
            fields = styles.columns(table, style)
            filled = ((at, row) for at, row in enumerate(table.data) if any(row.cells))
            rows += [_row(row, fields, replace(stated, row=at)) for at, row in filled]
    return _with_gpus(rows)


def _row(row: TableRow, fields: tuple[str, ...], stated: PublishedRow) -> PublishedRow:
    """What has no column of its own is as `stated` above the table."""
    texts = {name: text for name, text in zip(fields, row.cells, strict=False) if name}
    values: dict[str, Any] = {"cells": texts, "outcome": _outcome(texts)}
    for name, text in texts.items():
        value = _value(name, text)
        if value is not None:
            values[name] = value
    if values["outcome"] not in ("ok", "absent"):
        values["failure"] = texts.get("note", "")
    values |= _tidied(stated.style, texts)
    own = "mpt" if stated.style == "mpt" else ""
    values.setdefault("convention", stated.convention or own)
    record = replace(stated, line=row.line, **values)
    return replace(record, variant=_variant(record)) if stated.style == "reference" else record


def _variant(record: PublishedRow) -> str:
    """What makes another run in columns of the reference schema that no record has a field for."""
    told = ((name, record.text(name)) for name in _TELL_APART)
    words = (f"{name}={text}" for name, text in told if text not in ("", "0", "natural"))
    return " ".join((record.unlisted, *words, *_noted(record.note))).strip()


@functools.lru_cache(maxsize=4096)
def _noted(note: str) -> tuple[str, ...]:
    """What a prediction reads in a note: 'compiled=True', 'shard_group=4' (of HSDP)."""
    usual = vars(NoteWords(""))
    return tuple(f"{n}={v}" for n, v in vars(NoteWords(note)).items() if v != usual[n])


def _value(name: str, text: str) -> Any:
    kind = KINDS.get(name, "")
    if kind == "int | None":
        return cells.whole(text)
    if kind == "int":  # an axis that is 1 where a cell is empty
        return cells.whole(text) or 1
    if kind == "float | None":
        value = cells.number(text)
        return value if value or name not in _NEVER_ZERO else None
    if kind.startswith("bool"):
        return {"1": True, "true": True, "0": False, "false": False}.get(text.strip().lower())
    if name == "hardware":
        return device_id(text) or (text.strip() or None)
    return text if kind == "str" else None


def _tidied(style: Style, texts: dict[str, str]) -> dict[str, Any]:
    """Columns whose printed form is not the field's: ZeRO digits, True and False, 1e14 FLOP/s."""
    values: dict[str, Any] = {}
    sharding = texts.get("sharding", "").strip()
    if sharding.isdecimal():
        values["sharding"] = f"zero{sharding}"
    if style == "mpt":
        values |= _mpt_layout(sharding)
        shown = texts.get("recompute", "").strip().lower()
        values["recompute"] = _MPT_RECOMPUTE.get(shown, shown)
        units = cells.number(texts.get("model_tflop", ""))
        if units is not None:
            values["tflops_gpu"] = units * 100.0
    return values


def _mpt_layout(sharding: str) -> dict[str, Any]:
    """'FULL_SHARD' alone is data parallel; our own tables add other axes: 'FULL_SHARD pp2 tp2'."""
    kind, _, axes = sharding.partition(" ")
    values: dict[str, Any] = {"sharding": _MPT_SHARDING.get(kind, kind.lower())}
    sizes = {name: int(size) for name, size in re.findall(r"\b([a-z]+)([0-9]+)\b", axes)}
    values |= {axis: sizes.get(axis, 1) for axis in (*MODEL_AXES, *EXPERT_AXES)}
    return values | ({"virtual_stages": sizes["vp"]} if "vp" in sizes else {})


def _outcome(texts: dict[str, str]) -> RowOutcome:
    """A row's own status column, else what stands in place of its numbers."""
    if "status" in texts:
        return _ended(texts["status"]) or _ended(texts.get("outcome", "")) or "ok"
    speeds = [texts[name] for name in _SPEEDS if name in texts]
    endings = [_ended(text) for text in [*speeds, texts.get("mem_gb", "")]]
    if any(endings):
        # A row that ran out of memory may also say that it failed.
        return "oom" if "oom" in endings else next(o for o in WORST_FIRST if o in endings)
    if speeds and any(cells.number(text) is not None for text in speeds):
        return "ok"
    if _HANGS.search(texts.get("note", "")):
        return "hung"
    return "crashed" if "xxxx" in {text.strip().lower() for text in speeds} else "absent"


def _ended(text: str) -> RowOutcome | None:
    state = cells.state(text)
    return next((outcome for outcome in WORST_FIRST if outcome == state), None)


def _scaling(table: Table, stated: PublishedRow) -> list[PublishedRow]:
    gpus = styles.gpu_columns(table)
    rows = []
    for at, row in enumerate(table.data):
        axes = cells.layout(row.cells[0]) if row.cells else None
        if axes is None:
            continue
        known: dict[str, Any] = dict(zip((*MODEL_AXES, "micro_batch"), axes, strict=True))
        of_row = replace(stated, line=row.line, row=at, **known)
        for column, count in gpus.items():
            text = row.cells[column] if column < len(row.cells) else ""
            rows.append(_cell(of_row, count, text))
    return rows


def _cell(of_row: PublishedRow, gpus: int, text: str) -> PublishedRow:
    tflops = cells.number(text)
    outcome = "oom" if cells.state(text) == "dash" else _ended(text) or "absent"
    return replace(
        of_row,
        column=f"{gpus} GPU",
        gpus=gpus,
        dp=gpus // of_row.model_ranks or None,
        tflops_gpu=tflops,
        outcome=outcome if tflops is None else "ok",
        cells={"tflops_gpu": text},
    )


def _with_gpus(rows: list[PublishedRow]) -> list[PublishedRow]:
    """GPUs of rows that state nodes only: hosts of the size most rows of the file agree on."""
    votes = Counter(
        world // record.nodes
        for record in rows
        if record.nodes and (world := axes_world(record)) and world % record.nodes == 0
    )
    common = votes.most_common(1)[0][0] if votes else _DEFAULT_GPUS_PER_NODE
    filled = []
    for record in rows:
        if record.gpus is None and record.nodes:
            each = record.gpus_per_node or common
            record = replace(record, gpus=record.nodes * each, gpus_per_node=each)
        if record.style == "mpt" and record.gpus:
            record = replace(record, dp=record.gpus // record.model_ranks or None)
        filled.append(record)
    return filled


def axes_world(record: PublishedRow) -> int | None:
    """dp x tp x cp x pp; axes without a column are 1, but a table without dp or tp says nothing."""
    if record.dp is None or (record.tp is None and record.pp is None):
        return None
    return record.dp * record.model_ranks
