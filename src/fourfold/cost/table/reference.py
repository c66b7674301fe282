"""Reads a table of runs: CSV in the reference schema -> one list of texts per column.

Columns may come in any order, may be missing (all blank) and more may be there (ignored). Of a note
only words that state a setting are facts: kernel, network state and rate, pure or default
reductions, fp8/fp4 recipe, shard group, head size, compiled or eager, asynchronous tensor
parallelism, CUDA graphs, kind of context parallelism, an optimizer with one moment; nothing else in
it, and no other label, reaches an answer.
"""

from __future__ import annotations

import csv
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fourfold import door, files
from fourfold.cost.scaling import CALLED
from fourfold.errors import UserError
from fourfold.escape import csv_text
from fourfold.spec import check
from fourfold.spec.layout import EXPERT_AXES

# The columns of the reference schema of measured rows, with the field each is read into ('': none).
REFERENCE_COLUMNS = {
    "row_id": "run_id",
    "source": "",
    "stack": "stack",
    "cluster": "",
    "hardware": "hardware",
    "gpus_per_node": "gpus_per_node",
    "family": "family",
    "model": "label",
    "n_layers": "layers",
    "d_model": "hidden",
    "n_heads": "heads",
    "n_kv_heads": "kv_heads",
    "d_ff": "ffn",
    "vocab": "vocab",
    "tied": "tied",
    "seq_len": "seq_len",
    "n_gpus": "gpus",
    "tp": "tp",
    "cp": "cp",
    "pp": "pp",
    "vpp": "virtual_stages",
    "dp": "dp",
    "sharding": "sharding",
    "sequence_parallel": "sequence_parallel",
    "mbs": "micro_batch",
    "gbs": "global_batch",
    "precision": "precision",
    "act_ckpt": "recompute",
    "attention": "attention",
    "net_gbs": "",
    "net_node_gbs": "",
    "step_s": "step_s",
    "tokens_s_gpu": "tokens_s_gpu",
    "tflops_gpu": "tflops_gpu",
    "flop_rule": "convention",
    "mem_gb": "mem_gb",
    "status": "status",
    "note": "note",
}
_GROUP = re.compile(
    r"zero[123] over (\d+) ranks|\bfsdp ?(\d+)\b|ZeRO-3 over (\d+) GPUs|\bshard (\d+), replicate"
)
_HEAD = re.compile(r"\bhead size (\d+)")
_NETWORK = re.compile(r"\b(?:(\d+) x )?(\d+(?:\.\d+)?) G(b|B)/s\b[^;,.]*? per (GPU|node)")
_RECIPE = re.compile(r"recipe ([a-z0-9-]+)")


class NoteWords:
    """The facts of one note. `shard_group`, `head_size` and the `net_` rates (of a GPU or a node)
    0: not stated; `shards_in_node`: ZeRO within a node, replicas across; `compiled`, `async_tp`
    None: not stated."""

    def __init__(self, note: str) -> None:
        def has(pattern: str) -> bool:
            return re.search(pattern, note) is not None

        group, recipe = _GROUP.search(note), _RECIPE.search(note)
        name = recipe[1] if recipe else ""
        head = _HEAD.search(note)
        clauses = (clause for clause in re.split("[;,]", note) if "NVLink" not in clause)
        network = next(filter(None, map(_NETWORK.search, clauses)), None)
        rate = int(network[1] or 1) * float(network[2]) * 1e9 if network else 0.0
        rate /= 8.0 if network and network[3] == "b" else 1.0
        per_node = network is not None and network[4] == "node"
        self.flash1 = "flash_attentionv1" in note
        self.two_matrices = "MLP of two matrices" in note
        self.plain_norm = "kernel:" in note and "RMS kernel" not in note
        self.slow_network = has(r"\bnetwork slow\b")
        self.pure = has(r"\bpure\b")
        self.scaling = "row" if has(r"\browwise\b") else CALLED.get(name, "tensor")
        self.shard_group = next(int(size) for size in group.groups() if size) if group else 0
        self.shards_in_node = has(r"\bhsdp\b")
        self.head_size = int(head[1]) if head else 0
        self.net_bytes_per_s = 0.0 if per_node else rate
        self.net_bytes_per_s_of_node = rate if per_node else 0.0
        self.compiled = _stated(note, r"torch\.compile|(?:^|; )compiled\b", r"\beager\b")
        self.async_tp = _stated(note, r"\b[Aa]sync ?TP\b", r"\bvanilla TP\b")
        self.graphs = has(r"_cg\b|_cg_|CUDA graphs")
        self.no_overlap = has(r"\boverlap(?: paths)? off\b")
        self.recomputes = has(r"\brecompute on\b")
        self.gathers_kv = "all-gather CP" in note
        self.split_inputs = "checkpoints distributed over TP" in note
        self.one_moment = has(r"\bLION\b")


note_words = functools.lru_cache(maxsize=4096)(NoteWords)


def _stated(note: str, yes: str, no: str) -> bool | None:
    if re.search(yes, note):
        return True
    return False if re.search(no, note) else None


# Of models with experts; blank of others, but for CUDA graphs, which any run may have.
EXPERT_COLUMNS = (
    "head_dim",
    "attn_kind",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_rope_dim",
    "v_head_dim",
    "experts",
    "experts_per_token",
    "expert_ffn",
    "shared_ffn",
    "dense_layers",
    "moe_every",
    "mtp_layers",
    *EXPERT_AXES,
    "dispatcher",
    "a2a_overlap",
    "routing",
    "capacity_factor",
    "recompute_modules",
    "cuda_graph",
)
# Settings in which engines and their releases differ; what is blank is the habit of the engine.
# `overlap`: words of OVERLAP_WORDS, or "none"; `nvlink_domain`: ranks joined by NVLink.
SETTING_COLUMNS = (
    "grad_dtype",
    "reduce_dtype",
    "optimizer_dtype",
    "engine_release",
    "overlap",
    "nvlink_domain",
)
OVERLAP_WORDS = ("grad-reduce", "param-gather", "tp")
# When a row was measured, or published.
DATE_COLUMNS = ("date", "measured")
SCHEMA = (*REFERENCE_COLUMNS, *EXPERT_COLUMNS, *SETTING_COLUMNS, *DATE_COLUMNS)
BATCH = 4096
PLAIN_BYTES = 2**20
MARK = "\x1f"  # the unit separator of ASCII; no table has it
# Status of a collected run that lacks fields; it is kept, and used for nothing.
INCOMPLETE = "incomplete"
# Without these nothing can be said about a row.
NEEDED = ("hardware", "n_layers", "d_model", "n_heads", "vocab", "seq_len", "n_gpus", "gbs")


@dataclass(frozen=True, slots=True)
class RowTable:
    """Texts by column; `name` is the file's stem (a source is one file)."""

    name: str
    texts: dict[str, list[str]]
    length: int

    def column(self, name: str) -> list[str]:
        return self.texts[name]

    def take(self, index: Sequence[int]) -> RowTable:
        texts = {name: [cells[i] for i in index] for name, cells in self.texts.items()}
        return RowTable(self.name, texts, len(index))

    def csv(self) -> str:
        """Return the text that `table_of` reads, without columns that are empty."""
        names = [name for name, cells in self.texts.items() if name in NEEDED or any(cells)]
        rows = zip(*(self.texts[name] for name in names), strict=True)
        return csv_text([names, *rows])


def read_table(path: str | Path) -> RowTable:
    """A table from a CSV file; says which needed column is missing."""
    return table_of(files.read_text(path, field="rows"), path)


def table_of(text: str, path: str | Path) -> RowTable:
    """A table from the text of a CSV file, which errors name by its path."""
    reader = csv.reader(text.splitlines())
    try:
        header = [name.strip().lstrip("\ufeff") for name in next(reader, [])]
        check.that(header, "rows", str(path), "is empty", "add a heading line")
        _check_header(header, str(path))
        stem = Path(path).stem
        table = _plain(stem, header, text) or _columnar(stem, header, reader)
    except csv.Error as error:
        raise UserError(
            f"is not CSV ({error})", field="rows", value=str(path), hint="save it as plain CSV"
        ) from None
    check.that(table.length, "rows", str(path), "has headings but no rows", "add a run")
    _check_row_ids(table, str(path))
    return table


def _check_row_ids(table: RowTable, path: str) -> None:
    """Refuse a name that two rows have: answers are found by it. Rows may have none."""
    first_line: dict[str, int] = {}
    for line, row_id in enumerate(table.column("row_id"), start=2):
        if row_id and row_id in first_line:
            rule = f"names lines {first_line[row_id]} and {line} of {path}"
            hint = "give each row a row_id of its own, or leave it blank"
            raise UserError(rule, field="row_id", value=row_id, hint=hint)
        first_line[row_id] = line


def _check_header(header: list[str], path: str) -> None:
    door.check_headings(header, field="rows", path=path)
    missing = [name for name in NEEDED if name not in header]
    if missing:
        rule = f"lacks the columns {', '.join(missing)}"
        hint = (
            f"'fourfold collect {path}' makes such rows of logs and of tables with other headings"
        )
        raise UserError(rule, field="rows", value=path, hint=hint)


def _plain(name: str, header: list[str], text: str) -> RowTable | None:
    """A large file cut in one go, lines with quotes apart: half the time of the CSV reader.

    None where that could go wrong: a quoted line break, a line with another number of cells.
    """
    if len(text) < PLAIN_BYTES or MARK in text:
        return None
    width = len(header)
    lines = [line for line in text.splitlines() if line]
    for i, line in enumerate(lines):
        if '"' not in line:
            if line.count(",") != width - 1:
                return None
            lines[i] = line.replace(",", MARK)
            continue
        cells = next(csv.reader([line]))
        if line.count('"') % 2 or len(cells) != width:
            return None
        lines[i] = MARK.join(cells)
    flat = MARK.join(lines).split(MARK)
    found = {column: flat[width + i :: width] for i, column in enumerate(header)}
    blank = [""] * (len(lines) - 1)
    return RowTable(name, {column: found.get(column, blank) for column in SCHEMA}, len(lines) - 1)


def _columnar(name: str, header: list[str], reader: Iterator[list[str]]) -> RowTable:
    """A batch at a time: a list of all records would cost more than the model itself."""
    width = len(header)
    cells: list[list[str]] = [[] for _ in header]
    while batch := list(itertools.islice(reader, BATCH)):
        square = [
            record if len(record) == width else (record + [""] * width)[:width]
            for record in batch
            if record
        ]
        for column, values in zip(cells, zip(*square, strict=True), strict=bool(square)):
            column.extend(values)
    length = len(cells[0])
    blank = [""] * length
    by_name = dict(zip(header, cells, strict=True))
    return RowTable(name, {column: by_name.get(column, blank) for column in SCHEMA}, length)
