"""A collected run as a row of the reference schema, with what is still missing of it.

Nothing is guessed: what follows from other fields by arithmetic is filled in (dp from the GPUs and
the other axes, seconds from a rate and the batch), the sizes of a model that the catalogue knows by
name, the GPU of a named cluster. A row that still lacks a field is `incomplete`: kept, not fitted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fourfold.cost.table.reference import INCOMPLETE, SCHEMA, NoteWords
from fourfold.errors import UserError, nearest
from fourfold.logs.book import LogRun
from fourfold.logs.models import model_columns
from fourfold.logs.nested import ADAPTERS, OFFLOADED, number, whole
from fourfold.logs.words import COUNTS, NUMBERS
from fourfold.spec import catalog
from fourfold.spec.cluster import device_id
from fourfold.spec.engine import is_known
from fourfold.spec.layout import AXES, EXPERT_AXES
from fourfold.spec.words import policy_word

COLUMNS = SCHEMA
# After those of the schema: how the run ended, what is missing, how step_s was found, and what no
# column can say of the model or its training.
EXTRA = (
    "outcome",
    "missing",
    "engine",
    "steps",
    "step_rule",
    "unread_lines",
    "log",
    "unmodelled",
)
# Without these no row can be predicted, or only by guessing what was run.
NEEDED = (
    "stack",
    "hardware",
    "n_layers",
    "d_model",
    "n_heads",
    "vocab",
    "seq_len",
    "n_gpus",
    "tp",
    "pp",
    "dp",
    "sharding",
    "mbs",
    "gbs",
    "precision",
    "act_ckpt",
)
# What a run would have to be for the model to apply; else a dense model of equal layers.
_WINDOWS = re.compile(r"windows of ([0-9]{1,9}) tokens")
_WANTED = {OFFLOADED: "no-offload", ADAPTERS: "all-weights"}
_OF_EXPERTS = ("experts_per_token", "expert_ffn")
# Experts whose sizes a log does not print: 'experts', '128 experts'.
_BARE_EXPERTS = re.compile(r"(?:([0-9]{1,6}) )?experts")
_MOST_CHARS = 300


@dataclass(slots=True)
class Row:
    """Cells as texts, by column; '' where nobody says."""

    cells: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> str:
        return self.cells.get(name, "")

    def fill(self, **cells: Any) -> None:
        """Where the cell is empty."""
        for name, value in cells.items():
            if value not in (None, "") and not self[name]:
                self.cells[name] = text_of(value)

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(filter(None, self["missing"].split()))

    @property
    def is_usable(self) -> bool:
        return self["status"] in ("ok", "oom")

    def plain(self) -> dict[str, Any]:
        """With numbers as numbers."""
        plain: dict[str, Any] = {name: self[name] or None for name in (*COLUMNS, *EXTRA)}
        for name in (*COUNTS, "tied", "sequence_parallel", "steps", "unread_lines"):
            plain[name] = whole(self[name])
        for name in NUMBERS:
            plain[name] = number(self[name])
        return plain | {"missing": list(self.missing), "notes": self.notes}


def text_of(value: Any) -> str:
    """One line, short; a float in as few digits as say it."""
    if isinstance(value, bool):
        return str(int(value))
    text = f"{value:.9g}" if isinstance(value, float) else str(value)
    return " ".join(text.split())[:_MOST_CHARS]


def row_of(run: LogRun, engine: str) -> Row:
    measured = run.steps.measured(run.interval)
    known = (*COLUMNS, "unmodelled")
    row = Row({name: text_of(v) for name, v in run.facts.items() if name in known})
    _note(row, text_of(run.facts.get("steps_of", "")))
    gbs = whole(row["gbs"])
    if measured.batch:
        row.cells["gbs"] = str(measured.batch)
        if gbs and gbs != measured.batch:
            row.notes.append(f"steps of global batch {measured.batch} (configured: {gbs})")
    memory = [gib for gib in (run.mem_gib, measured.mem_gib) if gib]
    has_steps = measured.seconds is not None or measured.tokens_s_gpu is not None
    row.fill(
        stack=engine,
        engine=engine,
        step_s=measured.seconds,
        tokens_s_gpu=measured.tokens_s_gpu,
        tflops_gpu=measured.tflops,
        mem_gb=max(memory, default=None),
        steps=measured.iterations,
        step_rule=measured.rule,
        # A run that was measured and crashed later was measured.
        outcome=run.end if run.end == "oom" or not has_steps else "ok",
    )
    if run.steps.first is None and not run.end:
        said = (
            f"none of {run.unread} lines of steps could be read"
            if run.unread
            else ("the log has neither a step nor an error")
        )
        row.notes.append(said)
    # It went on: how fast is what is missing.
    row.fill(outcome="fail" if run.steps.first is None and not run.unread else "ok")
    if measured.drift:
        row.notes.append(f"{measured.drift}: the median is of neither end")
    if run.end:
        row.notes.append(f"the log ends with: {run.end_words}")
        _note(row, row.notes[-1])
    return row


def _note(row: Row, words: str) -> None:
    row.cells["note"] = "; ".join(filter(None, (row["note"], words)))[:_MOST_CHARS]


def complete(row: Row, given: Mapping[str, str]) -> Row:
    """The row with what the user says, what follows from it, and what is missing still."""
    for name, value in given.items():
        if row[name] and row[name] != value and name not in ("stack", "cluster", "source", "note"):
            row.notes.append(f"{name} {value} as given, not {row[name]}")
        row.cells[name] = value
    if row["engine"] and row["stack"] and not is_known(row["stack"]):
        hint = f"call it {row['engine']}-{row['stack']} to keep that engine's limits and habits"
        row.notes.append(f"stack {row['stack']} does not name its engine; {hint}")
    _tidy(row)
    _named(row)
    _layout(row)
    _speed(row)
    row.fill(outcome="ok" if row["step_s"] or row["tokens_s_gpu"] else "")
    missing = [name for name in NEEDED if not row[name]]
    has_experts = _has_experts(row)
    if has_experts:
        absent = [name for name in ("experts", *_OF_EXPERTS) if not row[name]]
        missing += absent
        if absent:
            sizes = " ".join(f"--set {name}=N" for name in absent)
            row.notes.append(f"the run has experts whose sizes the log does not print; add {sizes}")
    if row["outcome"] == "ok" and not row["step_s"]:
        missing.append("step_s")
    if row["unmodelled"] not in ("", "experts") and not _is_covered(row):
        missing.append(_WANTED.get(row["unmodelled"], "dense-model"))
        row.notes.append(f"the run has {row['unmodelled']}, which is not modelled")
    row.cells["missing"] = " ".join(missing)
    row.cells["status"] = INCOMPLETE if missing else row["outcome"]
    return row


def _is_covered(row: Row) -> bool:
    """Return whether no sequence of the run is longer than the windows of its attention."""
    window = _WINDOWS.fullmatch(row["unmodelled"])
    return window is not None and 0 < (whole(row["seq_len"]) or 0) <= int(window[1])


def _has_experts(row: Row) -> bool:
    """Return whether the run has experts; where their number is known, they are no longer noted as
    what no column holds."""
    bare = _BARE_EXPERTS.fullmatch(row["unmodelled"])
    if bare:
        row.fill(experts=bare[1] or "")
    if bare and row["experts"]:
        row.cells["unmodelled"] = ""
    return bare is not None or bool(row["experts"])


def _tidy(row: Row) -> None:
    """Our words for what others write; what is no number or no word of ours is noted and blank."""
    _replicas(row)
    for name in (*COUNTS, *NUMBERS):
        text = row[name]
        if not text:
            continue
        value = whole(text) if name in COUNTS else number(text)
        if value is None or value <= 0:
            row.notes.append(f"{name} is no number above 0: {text[:40]}")
        row.cells[name] = text_of(value) if value and value > 0 else ""
    for column, name in (("sharding", "sharding"), ("precision", "precision")):
        if row[column]:
            word = str(policy_word(name, row[column]))
            row.cells[column] = {"bf16-mixed": "bf16"}.get(word, word)
    for name in ("tied", "sequence_parallel"):
        word = row[name].lower()
        row.cells[name] = {"true": "1", "false": "0", "yes": "1", "no": "0"}.get(word, word)
    word = row["act_ckpt"].lower()
    row.cells["act_ckpt"] = {"false": "none", "true": "full", "off": "none"}.get(word, word)
    if row["hardware"]:
        _hardware(row)


def _replicas(row: Row) -> None:
    """'2x4': two copies of the states, each over four ranks (HSDP); in the schema, a note."""
    copies, times, shards = row["dp"].partition("x")
    sizes = whole(copies), whole(shards)
    if times and all(size and size > 0 for size in sizes):
        group = (sizes[1] or 1) * (whole(row["cp"]) or 1)
        row.cells["dp"] = str((sizes[0] or 1) * (sizes[1] or 1))
        if sizes[0] != 1 and f"over {group} ranks" not in row["note"]:
            row.cells["note"] = "; ".join(filter(None, [row["note"], f"zero3 over {group} ranks"]))


def shown_layout(row: Row) -> str:
    """'dp2x4 cp1 tp2': replicas, where a note names the group that shards."""
    dp, cp, group = whole(row["dp"]), whole(row["cp"]) or 1, NoteWords(row["note"]).shard_group
    sizes = {axis: row[axis] for axis in (*AXES, *EXPERT_AXES)}
    if dp and group and group < dp * cp and dp * cp % group == 0:
        copies = dp * cp // group
        sizes["dp"] = f"{copies}x{dp // copies}"
    shown = {axis: size for axis, size in sizes.items() if axis in AXES or size != "1"}
    return " ".join(f"{axis}{size}" for axis, size in shown.items() if size)


def _hardware(row: Row) -> None:
    text = row["hardware"]
    names = catalog.device_names()
    try:
        row.cells["hardware"] = catalog.device(text).id
    except UserError:
        known = device_id(text, names)
        row.cells["hardware"] = known or ""
        if known is None:
            row.notes.append(f"hardware is not one GPU of the catalogue: {text[:40]}")


def _named(row: Row) -> None:
    """Sizes of a model, and the GPU of a cluster, that are known by name."""
    try:
        model = catalog.model(row["model"].lower()) if row["model"] else None
    except UserError:
        model = None
    if model is not None and not row["n_layers"]:
        row.fill(**model_columns(model))
    if row["cluster"] in catalog.cluster_names():
        place = catalog.cluster(row["cluster"])
        row.fill(hardware=place.device.id, gpus_per_node=place.host_gpus)


def _layout(row: Row) -> None:
    sizes = {axis: whole(row[axis]) for axis in AXES}
    gpus = whole(row["n_gpus"])
    unknown = [axis for axis, size in sizes.items() if size is None]
    product = 1
    for size in sizes.values():
        product *= size or 1
    if not unknown:
        row.fill(n_gpus=product)
    elif gpus and product == gpus:
        row.fill(**dict.fromkeys(unknown, 1))
    elif gpus and len(unknown) == 1 and gpus % product == 0:
        row.fill(**{unknown[0]: gpus // product})
    row.fill(n_kv_heads=row["n_heads"] if row["family"] in ("gpt", "mpt") else "")


def _speed(row: Row) -> None:
    tokens = (whole(row["gbs"]) or 0) * (whole(row["seq_len"]) or 0)
    gpus, rate, step_s = whole(row["n_gpus"]), number(row["tokens_s_gpu"]), number(row["step_s"])
    if tokens and gpus and step_s and not rate:
        row.fill(tokens_s_gpu=tokens / step_s / gpus)
    elif tokens and gpus and rate and not step_s:
        row.fill(step_s=tokens / rate / gpus)


def require_column(name: str, *, field: str) -> str:
    """A column of the schema; said with the nearest name otherwise."""
    if name not in COLUMNS:
        raise UserError("unknown field", field=field, value=name, hint=nearest(name, COLUMNS))
    return name
