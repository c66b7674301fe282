"""Styles of published tables: one list of columns each, with the field and the cell of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fourfold.cost.count.params import active_params, model_params
from fourfold.cost.table.reference import REFERENCE_COLUMNS
from fourfold.result.report import published_word
from fourfold.spec import catalog
from fourfold.spec.words import OURS
from fourfold.tables import cells
from fourfold.tables.document import Table
from fourfold.tables.row import PublishedRow, Style
from fourfold.tables.shape import shape_of

SHARDING = {"zero3": "FULL_SHARD", "zero2": "SHARD_GRAD_OP", "zero0": "NO_SHARD"}
CHECKPOINTING = {"full": "True", "none": "False"}


@dataclass(frozen=True, slots=True)
class Column:
    """`field`: what a cell is read into; `write`: the cell of a record; `needed`: whether a table
    of these records has the column."""

    heading: str
    field: str
    write: Callable[[PublishedRow], str]
    needed: Callable[[Sequence[PublishedRow]], bool] = lambda records: True


def _plain(heading: str, field: str) -> Column:
    return Column(
        heading, field, lambda r: "" if getattr(r, field) is None else f"{getattr(r, field)}"
    )


def _if_ok(write: Callable[[PublishedRow], str]) -> Callable[[PublishedRow], str]:
    return lambda r: write(r) if r.outcome == "ok" else "-"


def _failed(record: PublishedRow) -> str:
    """A failed run says why in place of its MFU."""
    return {"oom": "OOM", "hung": published_word("hung")}.get(record.outcome, "fail")


def _samples(record: PublishedRow) -> str:
    if not (record.tokens_s and record.seq_len):
        return record.text("samples_s") or "-"
    return record.text("samples_s") or cells.cut(record.tokens_s / record.seq_len)


def _model_tflop(record: PublishedRow) -> str:
    if record.tflops_gpu is None:
        return "-"
    value = record.tflops_gpu / 100
    return f"{value:.6f}" if value >= 0.01 else f"{value:.4g}"


def _strategy(record: PublishedRow) -> str:
    """The published word for data parallelism; other axes stand behind it."""
    word = SHARDING.get(record.sharding, record.sharding)
    names = {"pp": "pp", "vp": "virtual_stages", "cp": "cp", "tp": "tp", "ep": "ep", "etp": "etp"}
    axes = [(name, getattr(record, field)) for name, field in names.items()]
    return " ".join([word, *(f"{name}{size}" for name, size in axes if size and size > 1)])


def _mfu(record: PublishedRow) -> str:
    if record.outcome != "ok":
        return _failed(record)
    return record.text("mfu_pct") or cells.percent(record.mfu_pct)


def _precision(record: PublishedRow) -> tuple[str, str]:
    if record.style == "reference" and record.precision == "bf16":  # of weights kept in fp32
        word, mode = cells.precision_cells("bf16-mixed")
        return word, "PURE" if "pure" in record.note.split("; ") else mode
    return cells.precision_cells(record.precision, record.text("mp_mode"))


MPT = (
    Column("Model", "label", lambda r: r.label.removeprefix("mpt-")),
    Column("SeqLen (T)", "seq_len", lambda r: str(r.seq_len or "")),
    Column("# GPUs", "gpus", lambda r: str(r.gpus or "")),
    Column("GPU", "hardware", lambda r: re.sub("[- ]", "_", r.hardware or "")),
    Column("MFU", "mfu_pct", _mfu),
    Column("HFU", "hfu_pct", _if_ok(lambda r: r.text("hfu_pct") or cells.percent(r.hfu_pct))),
    Column("Model TFLOP", "model_tflop", _if_ok(_model_tflop)),
    _plain("MicroBatchSize", "micro_batch"),
    _plain("GradAccum", "grad_accum"),
    _plain("GlobalBatchSize", "global_batch"),
    Column("Throughput (S/s)", "samples_s", _if_ok(_samples)),
    Column("Throughput (T/s)", "tokens_s", _if_ok(lambda r: cells.cut(r.tokens_s))),
    Column("Throughput (T/s/GPU)", "tokens_s_gpu", _if_ok(lambda r: cells.cut(r.tokens_s_gpu))),
    Column("GlobalBatchSize (T)", "batch_tokens", lambda r: str(r.tokens)),
    Column("Precision", "precision", lambda r: _precision(r)[0]),
    Column("MP Mode", "mp_mode", lambda r: _precision(r)[1]),
    Column("Sharding Strategy", "sharding", _strategy),
    Column(
        "Activation Checkpointing",
        "recompute",
        lambda r: CHECKPOINTING.get(r.recompute, r.recompute),
    ),
    Column(
        "Activation CPUOffload",
        "offload",
        lambda r: r.text("offload") or str(r.offload not in ("", "none")),
    ),
    _plain("NumParams", "params"),
)
# Beside the published columns, where runs differ in what these do not say.
SETTINGS = Column(
    "Settings", "variant", lambda r: r.variant, lambda rows: len({r.variant for r in rows}) > 1
)
# Where some are of a training, others of a benchmark.
EQUIVALENCE = Column(
    "Equivalence",
    "equivalence",
    lambda r: r.equivalence,
    lambda rows: len({r.equivalence for r in rows}) > 1,
)


def _size(record: PublishedRow) -> str:
    shape = shape_of(record)
    if shape is None:
        return record.label
    return cells.size(model_params(shape.model, record.seq_len or 2048))


def _active(record: PublishedRow) -> str:
    """Parameters that a token touches, both embeddings with them."""
    shape = shape_of(record) if record.experts else None
    return (
        "" if shape is None else cells.size(active_params(shape.model, record.seq_len or 2048).all)
    )


def _on_nodes(records: Sequence[PublishedRow]) -> bool:
    return any((record.nodes or 1) > 1 for record in records)


def _shards_differ(records: Sequence[PublishedRow]) -> bool:
    kinds = {record.sharding for record in records}
    return len(kinds) > 1 or not kinds <= {"", "zero1"}


def _above_one(field: str) -> Callable[[Sequence[PublishedRow]], bool]:
    return lambda records: any((getattr(record, field) or 1) > 1 for record in records)


def _seconds(record: PublishedRow) -> str:
    if record.outcome == "ok":
        return cells.figure(record.step_s)
    word = published_word(record.outcome)
    return "" if word in ("oom", "absent") else word


def _engines_differ(records: Sequence[PublishedRow]) -> bool:
    """Or a stored run is another's than ours."""
    stacks = {record.stack for record in records}
    return len(stacks) > 1 or any(r.stored and r.stack != OURS for r in records)


def _are_noted(records: Sequence[PublishedRow]) -> bool:
    """Of stored runs, whose notes have every setting."""
    return all(record.variant in record.note for record in records)


TOPOLOGY = (
    Column("Engine", "stack", lambda r: r.stack, _engines_differ),
    Column("Nodes", "nodes", lambda r: str(r.nodes or ""), _on_nodes),
    Column("GPUs", "gpus", lambda r: str(r.gpus), lambda records: not _on_nodes(records)),
    Column("Size", "label", _size),
    Column("ZS", "sharding", lambda r: r.sharding.removeprefix("zero"), _shards_differ),
    _plain("DP", "dp"),
    _plain("TP", "tp"),
    Column("CP", "cp", lambda r: "" if r.cp is None else str(r.cp), _above_one("cp")),
    _plain("PP", "pp"),
    Column("EP", "ep", lambda r: str(r.ep), _above_one("ep")),
    Column("ETP", "etp", lambda r: str(r.etp), _above_one("etp")),
    Column("Experts", "experts", lambda r: str(r.experts or ""), _above_one("experts")),
    Column("Active", "active", _active, _above_one("experts")),
    Column(
        "VP", "virtual_stages", lambda r: str(r.virtual_stages or 1), _above_one("virtual_stages")
    ),
    _plain("MBS", "micro_batch"),
    _plain("GBS", "global_batch"),
    Column("Mem", "mem_gb", lambda r: "OOM" if r.outcome == "oom" else cells.gigabytes(r.mem_gb)),
    Column("Sec/it", "step_s", _seconds),
    Column(
        "TFLOPs", "tflops_gpu", lambda r: cells.figure(r.tflops_gpu) if r.outcome == "ok" else ""
    ),
    EQUIVALENCE,
    replace(SETTINGS, needed=lambda rows: SETTINGS.needed(rows) and not _are_noted(rows)),
    Column("Notes", "note", lambda r: r.note),
)
# The same under names of other logs and spreadsheets.
_OTHER_NAMES = {
    heading: field
    for field, headings in catalog.data("columns.toml")["topology"].items()
    for heading in headings
}
# Heading in lower case -> field, by style.
_FIELDS: dict[str, dict[str, str]] = {
    "mpt": {column.heading.lower(): column.field for column in (*MPT, EQUIVALENCE, SETTINGS)},
    "topology": {column.heading.lower(): column.field for column in TOPOLOGY} | _OTHER_NAMES,
    # `outcome`: of what was collected, where the status only says that something is missing.
    "reference": {name: field or name for name, field in REFERENCE_COLUMNS.items()}
    | {"outcome": "outcome", "ep": "ep", "etp": "etp", "experts": "experts"},
}
_SCALING_FIRST = re.compile(r"\(\s*tp\s*,\s*cp\s*,\s*pp\s*,\s*(micro[ -]?batch|mbs)\s*\)\Z")
_GPU_COLUMN = re.compile(r"([0-9]+)\s*(?:x\s*)?gpus?\Z", re.IGNORECASE)
_TOPOLOGY_LEAST = {"tflops_gpu", "step_s", "mem_gb"}


def style_of(table: Table) -> Style:
    names = [heading.strip().lower() for heading in table.headings]
    if names and _SCALING_FIRST.match(names[0]):
        return "scaling"
    if {"row_id", "n_layers", "n_gpus", "step_s"} <= set(names):
        return "reference"
    if {"microbatchsize", "gradaccum", "seqlen (t)"} <= set(names):
        return "mpt"
    fields = {_FIELDS["topology"][name] for name in names if name in _FIELDS["topology"]}
    if fields & {"nodes", "gpus"} and fields & _TOPOLOGY_LEAST:
        return "topology"
    return "other"


def columns(table: Table, style: Style) -> tuple[str, ...]:
    """The field of each cell of a row, '' where the column has no meaning here."""
    if style not in _FIELDS:
        return ()
    names = [heading.strip().lower() for heading in repaired_headings(table, style)]
    # A column that the reference schema lacks keeps its name: its cells tell rows apart.
    other = {name: name for name in names} if style == "reference" else {}
    return tuple((other | _FIELDS[style]).get(name, "") for name in names)


def unread(table: Table) -> tuple[str, ...]:
    """Headings that mean nothing here: their cells are lost to whoever reads the records."""
    style = style_of(table)
    if style == "scaling":
        known = gpu_columns(table)
        return tuple(h for at, h in enumerate(table.headings) if at and at not in known)
    fields = columns(table, style) or ("",) * len(table.headings)
    pairs = zip(repaired_headings(table, style), fields, strict=False)
    return tuple(heading for heading, field in pairs if not field and heading.strip())


def repaired_headings(table: Table, style: Style) -> tuple[str, ...]:
    """The A100-40GB table of the MPT benchmarks prints 20 cells under 19 headings: its rows have
    the `Model TFLOP` cell, its heading line has not. All after HFU are one off."""
    longest = max((len(row.cells) for row in table.data), default=0)
    missing = missing_heading(table, style)
    if not missing or longest != len(table.headings) + 1:
        return table.headings
    at = [column.heading for column in MPT].index(missing)
    return (*table.headings[:at], missing, *table.headings[at:])


def missing_heading(table: Table, style: Style) -> str:
    """The one published heading that an MPT table lacks, or ''."""
    if style != "mpt":
        return ""
    lacking = [column.heading for column in MPT if column.heading not in table.headings]
    return lacking[0] if len(lacking) == 1 else ""


def gpu_columns(table: Table) -> dict[int, int]:
    """Scaling tables: column -> GPUs."""
    counts = {}
    for at, heading in enumerate(table.headings[1:], start=1):
        match = _GPU_COLUMN.match(heading.strip())
        count = int(match.group(1)) if match else cells.whole(heading)
        if count:
            counts[at] = count
    return counts
