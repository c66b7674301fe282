"""Runs that a table describes: texts of the reference schema as Columns. A row that cannot be
expressed keeps its place; blank policy fields take the stack's usual value; `reasons` says so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats, columns
from fourfold.cost.run import device_facts, fabric_facts, stack_facts
from fourfold.cost.stacks import StackDefaults, is_known, stack_defaults
from fourfold.cost.table.reference import (
    INCOMPLETE,
    NoteWords,
    RowTable,
    each,
    note_words,
    numbers,
)
from fourfold.errors import UserError
from fourfold.spec import catalog
from fourfold.spec.layout import MODEL_AXES
from fourfold.spec.words import DTYPES, PRICED_ATTENTION, SCHEDULES, SHARDINGS

Bools = NDArray[np.bool_]
# A count above this is a typing error, not a run.
LARGEST = 1e9


def _mask(values: Iterable[bool]) -> Bools:
    return np.array(list(values), dtype=bool)


def _floats(values: Iterable[float]) -> Floats:
    return np.array(list(values), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Rows:
    """Parsed rows of one table. Measured values are NaN where blank; never used to predict."""

    table: RowTable
    columns: Columns
    usable: Bools
    reasons: list[str]
    stack: NDArray[np.str_]
    cluster: NDArray[np.str_]
    hardware: NDArray[np.str_]
    step_s: Floats
    mem_gb: Floats
    status: NDArray[np.str_]


@dataclass(slots=True)
class _Draft:
    """Facts under construction, with what was assumed or is wrong per row."""

    table: RowTable
    facts: dict[str, Floats] = field(default_factory=dict)
    bad: dict[int, str] = field(default_factory=dict)
    assumed: dict[int, list[str]] = field(default_factory=dict)

    def refuse(self, where: Bools, why: str) -> None:
        for i in np.flatnonzero(where):
            self.bad.setdefault(int(i), why)

    def assume(self, where: Bools, what: str) -> None:
        for i in np.flatnonzero(where):
            self.assumed.setdefault(int(i), []).append(what)

    def blank(self, column: str) -> Bools:
        return _mask(each(self.table.column(column), lambda cell: not cell.strip()))

    def fill(self, name: str, column: str, default: Floats | float, what: str) -> Floats:
        """A count from a column; blank takes the default and says so, unreadable refuses."""
        values, blank = numbers(self.table.column(column)), self.blank(column)
        self.refuse(np.isnan(values) & ~blank, f"{column} is not a number")
        if what:
            self.assume(blank, f"{column} {what}")
        self.facts[name] = np.where(np.isnan(values), default, values)
        return self.facts[name]

    def need(self, name: str, column: str) -> Floats:
        self.facts[name] = numbers(self.table.column(column))
        self.need_whole(name, column)
        return self.facts[name]

    def need_whole(self, name: str, column: str) -> None:
        values = self.facts[name]
        wrong = np.isnan(values) | (values < 1) | (values > LARGEST) | (values % 1 != 0)
        self.refuse(wrong, f"{column} must be a whole number of at least 1")
        self.facts[name] = np.where(wrong, 1.0, values)


def parse(table: RowTable) -> Rows:
    """All rows of a table."""
    draft = _Draft(table)
    lacks = np.array([cell == INCOMPLETE for cell in table.column("status")], dtype=bool)
    draft.refuse(lacks, "the run is incomplete; 'fourfold collect' names its missing fields")
    _model(draft)
    _layout(draft)
    words = each(table.column("note"), note_words)
    per_stack = each(table.column("stack"), stack_defaults)
    _policy(draft, words, per_stack)
    _hardware(draft, words)
    _check(draft)
    known = _mask(each(table.column("stack"), is_known))
    draft.assume(~known, "stack unknown: generic habits")
    usable = np.ones(table.length, dtype=bool)
    usable[list(draft.bad)] = False
    reasons = [
        f"not expressible: {draft.bad[i]}"
        if i in draft.bad
        else "; ".join(draft.assumed.get(i, ()))
        for i in range(table.length)
    ]
    return Rows(
        table=table,
        columns=columns(table.length, **draft.facts),
        usable=usable,
        reasons=reasons,
        stack=np.array(table.column("stack"), dtype=str),
        cluster=np.array(table.column("cluster"), dtype=str),
        hardware=np.array(each(table.column("hardware"), str.lower), dtype=str),
        step_s=numbers(table.column("step_s")),
        mem_gb=numbers(table.column("mem_gb")),
        status=np.array(table.column("status"), dtype=str),
    )


def _model(draft: _Draft) -> None:
    draft.need("layers", "n_layers")
    hidden, heads = draft.need("hidden", "d_model"), draft.need("heads", "n_heads")
    draft.need("vocab", "vocab")
    families = draft.table.column("family")
    gated = draft.facts["gated"] = _floats(f in ("llama", "") for f in families)
    draft.fill("kv_heads", "n_kv_heads", heads, "taken as n_heads")
    usual = np.where(gated > 0, 256.0 * np.ceil(hidden * 8.0 / 3.0 / 256.0), 4.0 * hidden)
    draft.fill("ffn", "d_ff", usual, "taken as the family's usual")
    draft.fill("tied", "tied", _floats(f in ("mpt", "gpt") for f in families), "")


def _layout(draft: _Draft) -> None:
    draft.need("seq", "seq_len")
    draft.need("batch", "gbs")
    gpus = draft.need("gpus", "n_gpus")
    degrees = [draft.fill(name, name, 1.0, "taken as 1") for name in MODEL_AXES]
    draft.fill("vpp", "vpp", 1.0, "")
    model_ranks = np.maximum(1.0, np.prod(degrees, axis=0))
    draft.fill("dp", "dp", np.floor(gpus / model_ranks), "")
    draft.fill("micro", "mbs", 1.0, "not stated, 1 assumed")


def _policy(draft: _Draft, words: list[NoteWords], stack: list[StackDefaults]) -> None:
    facts = draft.facts
    precision = facts["precision"] = _choice(draft, "precision", DTYPES, "bf16")
    low = np.isin(precision, [DTYPES.index("fp8"), DTYPES.index("fp4")])
    half, pure = precision == DTYPES.index("fp16"), _mask(w.pure for w in words)
    facts["grad_bytes"] = np.where(pure, 2.0, [h.grad_bytes for h in stack])
    facts["acc_bytes"] = np.where(half, 2.0, [h.acc_bytes for h in stack])
    facts["act_bytes"] = np.where(precision == DTYPES.index("fp32"), 4.0, 2.0)
    facts["saved_bytes"] = np.where(low, [h.fp8_saved_bytes for h in stack], facts["act_bytes"])
    facts["gather_bytes"] = np.where(low, [h.fp8_gather_bytes for h in stack], facts["act_bytes"])
    _zero(draft, words, stack)
    _recompute(draft, stack)
    kinds = _choice(draft, "attention", PRICED_ATTENTION, "flash")
    old = _mask(w.flash1 for w in words) & (kinds == PRICED_ATTENTION.index("flash"))
    facts["attention"] = np.where(old, float(PRICED_ATTENTION.index("flash1")), kinds)
    usual_sp = _floats(h.sequence_parallel for h in stack)
    draft.fill("sp", "sequence_parallel", usual_sp, "taken as the stack's usual")
    by_stack = [stack_facts(h) for h in stack]
    facts |= {
        name: _floats(fact[name] for fact in by_stack) for name in stack_facts(StackDefaults())
    }
    facts["fused_host"] = _floats(h.compiled for h in stack)
    facts["overlap_dp"] = _floats(h.overlap_dp for h in stack)
    facts["overlap_tp"] = _floats(h.overlap_tp for h in stack)
    facts["fused_norm"] = _floats(not w.plain_norm for w in words)
    facts["block_scale"] = _floats(w.block_scale for w in words)
    looped, plain = SCHEDULES.index("interleaved"), SCHEDULES.index("1f1b")
    facts["schedule"] = np.where(facts["vpp"] > 1, float(looped), float(plain))
    draft.assume(draft.blank("precision"), "precision bf16 assumed")


def _choice(draft: _Draft, column: str, words: tuple[str, ...], blank: str) -> Floats:
    index = {word: float(i) for i, word in enumerate(words)}
    index[""] = index[blank]
    if column == "precision":
        index |= {"bf16-mixed": index["bf16"], "bf16-pure": index["bf16"]}
    if column == "attention":
        # The published tables say "fused" of Megatron's fused softmax.
        index["fused"] = index["fused-softmax"]
    values = np.array([index.get(cell, -1.0) for cell in draft.table.column(column)])
    draft.refuse(values < 0, f"{column} is not one of {', '.join(words)}")
    return np.maximum(values, 0.0)


def _zero(draft: _Draft, words: list[NoteWords], stack: list[StackDefaults]) -> None:
    facts = draft.facts
    stages = {name: float(i) for i, name in enumerate(SHARDINGS)} | {"none": 0.0, "ddp": 0.0}
    cells = draft.table.column("sharding")
    draft.assume(draft.blank("sharding"), "sharding taken as the stack's usual")
    filled = [cell or h.sharding for cell, h in zip(cells, stack, strict=True)]
    values = np.array([stages.get(cell, -1.0) for cell in filled])
    draft.refuse(values < 0, f"sharding is not one of {', '.join(SHARDINGS)}")
    facts["zero"] = np.maximum(values, 0.0)
    everyone = facts["dp"] * facts["cp"]
    node = numbers(draft.table.column("gpus_per_node"))
    group, usual = _floats(w.shard_group for w in words), _floats(h.shard_group for h in stack)
    group = np.where((group == 0) & (usual > 0) & (everyone >= 512), usual, group)
    in_node = _mask(w.shards_in_node for w in words)
    group = np.where(in_node & (group == 0), np.where(np.isnan(node), 8.0, node), group)
    facts["shard"] = np.where(group > 0, np.minimum(group, everyone), everyone)


def _recompute(draft: _Draft, stack: list[StackDefaults]) -> None:
    cells = draft.table.column("act_ckpt")
    draft.assume(draft.blank("act_ckpt"), "act_ckpt taken as the stack's usual")
    share, core = np.zeros(len(cells)), np.zeros(len(cells))
    wrong = np.zeros(len(cells), dtype=bool)
    for i, (cell, habit) in enumerate(zip(cells, stack, strict=True)):
        kind = cell or habit.recompute
        if kind == "full":
            share[i] = 1.0
        elif kind == "selective":
            share[i], core[i] = habit.whole_layers, float(habit.whole_layers == 0)
        elif kind.startswith("every-") and kind[6:].isdigit() and int(kind[6:]) > 0:
            share[i] = 1.0 / int(kind[6:])
        elif kind != "none":
            wrong[i] = True
    draft.refuse(wrong, "act_ckpt is not one of none, selective, full, every-N")
    draft.facts |= {"full_ckpt": share, "attn_ckpt": core}


def _hardware(draft: _Draft, words: list[NoteWords]) -> None:
    """Device and cluster facts, looked up once per different combination."""
    table, facts = draft.table, draft.facts
    node = numbers(table.column("gpus_per_node"))
    names = list(zip(table.column("hardware"), table.column("cluster"), table.column("precision"),
                     node.tolist(), strict=True))  # fmt: skip
    by_name = {key: _machine(*key) for key in set(names)}
    machines = [by_name[key] for key in names]
    draft.refuse(_mask(m is None for m in machines), "hardware is not a known GPU")
    # Only its names of facts are used: a table without one known GPU still has all columns.
    usual = next((m for m in machines if m is not None), None) or _machine("h100-80gb", "", "", 8.0)
    assert usual is not None, "this GPU is in the catalogue"
    for fact in usual:
        facts[fact] = np.array([1.0 if m is None else m[fact] for m in machines])
    strange = _mask(m is not None and m["unknown_cluster"] > 0 for m in machines)
    draft.assume(strange, "cluster unknown: usual fabric of this GPU")
    del facts["unknown_cluster"]
    seen = np.nan_to_num(numbers(table.column("net_gbs"))) * 1e9
    several = facts["gpus"] > facts["node"]
    facts["net_seen"] = np.where(several & (seen > 0), seen, 0.0)
    inside = np.nan_to_num(numbers(table.column("net_node_gbs"))) * 1e9
    facts["link"] = np.where(inside > 0, np.minimum(facts["link"], inside), facts["link"])
    # In the slow state the measured rate falls with the nodes; where it does not, the state was
    # fast whatever the note says (nanotron, 512 GPUs).
    nodes = facts["gpus"] / facts["node"]
    fast = facts["net_seen"] * nodes > 3.0 * facts["net"]
    facts["slow"] = (_mask(w.slow_network for w in words) & ~fast).astype(np.float64)


def _machine(hardware: str, cluster: str, precision: str, node: float) -> dict[str, float] | None:
    try:
        device = catalog.device(hardware.strip().lower())
    except UserError:
        return None
    known = cluster.strip().lower() in catalog.cluster_names()
    place = catalog.cluster(cluster.strip().lower()) if known else None
    if node != node or node < 1:
        node = float(place.host_gpus) if place is not None else 8.0
    facts = device_facts(device, precision or "bf16") | fabric_facts(device, place, node)
    return facts | {"unknown_cluster": float(place is None)}


def _check(draft: _Draft) -> None:
    """Refuse what no engine could run, so that nonsense never looks like an answer."""
    f = draft.facts
    for name in (*MODEL_AXES, "vpp", "dp", "micro", "ffn", "kv_heads"):
        draft.need_whole(name, name)
    draft.refuse(f["tp"] * f["cp"] * f["pp"] * f["dp"] != f["gpus"], "dp x tp x cp x pp != n_gpus")
    draft.refuse(f["pp"] > f["layers"], "pp exceeds n_layers")
    draft.refuse(f["heads"] > f["hidden"], "n_heads exceeds d_model")
    draft.refuse(f["dp"] > f["batch"], "dp exceeds the global batch")
    draft.refuse(f["cp"] > f["seq"], "cp exceeds seq_len")
    f["micro"] = np.minimum(f["micro"], np.maximum(1.0, np.ceil(f["batch"] / f["dp"])))
