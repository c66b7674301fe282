"""Which runs does a table describe? Texts of the reference schema -> Columns, with reasons.

A row that cannot be expressed keeps its place: `usable` is False there and `reasons` says why.
Blank policy fields take the stack's usual value, and `reasons` says that too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats, columns
from fourfold.cost.run import device_facts, fabric_facts, stack_facts
from fourfold.cost.stacks import StackDefaults, is_known, stack_defaults
from fourfold.cost.table.reference import NoteWords, RowTable, each, note_words, numbers
from fourfold.errors import UserError
from fourfold.spec import catalog
from fourfold.spec.layout import MODEL_AXES
from fourfold.spec.words import DTYPES, PRICED_ATTENTION, SCHEDULES, SHARDINGS

Bools = NDArray[np.bool_]
# A count above this is a typing error, not a run.
LARGEST = 1e9


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

    def fill(self, name: str, column: str, default: Floats | float, what: str) -> Floats:
        """A count from a column; blank takes the default and says so, unreadable refuses."""
        cells = self.table.column(column)
        values = numbers(cells)
        blank = np.array(each(cells, _is_blank), dtype=bool)
        self.refuse(np.isnan(values) & ~blank, f"{column} is not a number")
        if what:
            self.assume(blank, f"{column} {what}")
        self.facts[name] = np.where(np.isnan(values), default, values)
        return self.facts[name]

    def need(self, name: str, column: str) -> Floats:
        cells = self.table.column(column)
        values = numbers(cells)
        wrong = np.isnan(values) | (values < 1) | (values > LARGEST) | (values % 1 != 0)
        self.refuse(wrong, f"{column} must be a whole number of at least 1")
        self.facts[name] = np.where(wrong, 1.0, values)
        return self.facts[name]


def parse(table: RowTable) -> Rows:
    """All rows of a table."""
    draft = _Draft(table)
    _model(draft)
    _layout(draft)
    words = each(table.column("note"), note_words)
    per_stack = each(table.column("stack"), stack_defaults)
    _policy(draft, words, per_stack)
    _hardware(draft, words)
    _check(draft)
    known = each(table.column("stack"), is_known)
    draft.assume(~np.array(known, dtype=bool), "stack unknown: generic habits")
    usable = np.ones(table.length, dtype=bool)
    usable[list(draft.bad)] = False
    reasons = [
        f"not expressible: {draft.bad[i]}"
        if i in draft.bad
        else "; ".join(draft.assumed.get(i, ()))
        for i in range(table.length)
    ]
    text = {name: np.array(table.column(name), dtype=str) for name in ("stack", "cluster")}
    return Rows(
        table=table,
        columns=columns(table.length, **draft.facts),
        usable=usable,
        reasons=reasons,
        stack=text["stack"],
        cluster=text["cluster"],
        hardware=np.array(each(table.column("hardware"), str.lower), dtype=str),
        step_s=numbers(table.column("step_s")),
        mem_gb=numbers(table.column("mem_gb")),
        status=np.array(table.column("status"), dtype=str),
    )


def _is_blank(cell: str) -> bool:
    return cell.strip() == ""


def _model(draft: _Draft) -> None:
    need = draft.need
    need("layers", "n_layers")
    hidden = need("hidden", "d_model")
    heads = need("heads", "n_heads")
    need("vocab", "vocab")
    families = draft.table.column("family")
    gated = np.array([f in ("llama", "") for f in families], dtype=np.float64)
    draft.facts["gated"] = gated
    draft.fill("kv_heads", "n_kv_heads", heads, "taken as n_heads")
    usual = np.where(gated > 0, 256.0 * np.ceil(hidden * 8.0 / 3.0 / 256.0), 4.0 * hidden)
    draft.fill("ffn", "d_ff", usual, "taken as the family's usual")
    tied = np.array([f in ("mpt", "gpt") for f in families], dtype=np.float64)
    draft.fill("tied", "tied", tied, "")


def _layout(draft: _Draft) -> None:
    need = draft.need
    need("seq", "seq_len")
    need("batch", "gbs")
    gpus = need("gpus", "n_gpus")
    degrees = [draft.fill(name, name, 1.0, "taken as 1") for name in MODEL_AXES]
    draft.fill("vpp", "vpp", 1.0, "")
    model_ranks = np.maximum(1.0, degrees[0] * degrees[1] * degrees[2])
    draft.fill("dp", "dp", np.floor(gpus / model_ranks), "")
    draft.fill("micro", "mbs", 1.0, "not stated, 1 assumed")


def _policy(draft: _Draft, words: list[NoteWords], stack: list[StackDefaults]) -> None:
    table, facts = draft.table, draft.facts
    facts["precision"] = _choice(draft, "precision", DTYPES, "bf16")
    half = facts["precision"] == DTYPES.index("fp16")
    pure = np.array([w.pure for w in words])
    facts["grad_bytes"] = np.where(pure, 2.0, [h.grad_bytes for h in stack])
    facts["acc_bytes"] = np.where(half, 2.0, [h.acc_bytes for h in stack])
    low = np.isin(facts["precision"], [DTYPES.index("fp8"), DTYPES.index("fp4")])
    facts["act_bytes"] = np.where(facts["precision"] == DTYPES.index("fp32"), 4.0, 2.0)
    facts["saved_bytes"] = np.where(low, [h.fp8_saved_bytes for h in stack], facts["act_bytes"])
    facts["gather_bytes"] = np.where(low, [h.fp8_gather_bytes for h in stack], facts["act_bytes"])
    _zero(draft, words, stack)
    _recompute(draft, stack)
    kinds = _choice(draft, "attention", PRICED_ATTENTION, "flash")
    old = np.array([w.flash1 for w in words]) & (kinds == PRICED_ATTENTION.index("flash"))
    facts["attention"] = np.where(old, float(PRICED_ATTENTION.index("flash1")), kinds)
    habit_sp = np.array([h.sequence_parallel for h in stack], dtype=np.float64)
    draft.fill("sp", "sequence_parallel", habit_sp, "taken as the stack's usual")
    facts["fused_norm"] = np.array([not w.plain_norm for w in words], dtype=np.float64)
    by_stack = [stack_facts(h) for h in stack]
    facts |= {
        name: np.array([fact[name] for fact in by_stack]) for name in stack_facts(StackDefaults())
    }
    facts["fused_host"] = np.array([h.compiled for h in stack], dtype=np.float64)
    facts["block_scale"] = np.array([w.block_scale for w in words], dtype=np.float64)
    facts["overlap_dp"] = np.array([h.overlap_dp for h in stack], dtype=np.float64)
    facts["overlap_tp"] = np.array([h.overlap_tp for h in stack], dtype=np.float64)
    looped, plain = SCHEDULES.index("interleaved"), SCHEDULES.index("1f1b")
    facts["schedule"] = np.where(facts["vpp"] > 1, float(looped), float(plain))
    draft.assume(
        np.array([p == "" for p in table.column("precision")], dtype=bool), "precision bf16 assumed"
    )


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
    blank = np.array([cell == "" for cell in cells], dtype=bool)
    draft.assume(blank, "sharding taken as the stack's usual")
    filled = [cell or h.sharding for cell, h in zip(cells, stack, strict=True)]
    values = np.array([stages.get(cell, -1.0) for cell in filled])
    draft.refuse(values < 0, f"sharding is not one of {', '.join(SHARDINGS)}")
    facts["zero"] = np.maximum(values, 0.0)
    everyone = facts["dp"] * facts["cp"]
    node = numbers(draft.table.column("gpus_per_node"))
    group = np.array([w.shard_group for w in words], dtype=np.float64)
    usual = np.array([h.shard_group for h in stack], dtype=np.float64)
    group = np.where((group == 0) & (usual > 0) & (everyone >= 512), usual, group)
    in_node = np.array([w.shards_in_node for w in words])
    group = np.where(in_node & (group == 0), np.where(np.isnan(node), 8.0, node), group)
    facts["shard"] = np.where(group > 0, np.minimum(group, everyone), everyone)


def _recompute(draft: _Draft, stack: list[StackDefaults]) -> None:
    cells = draft.table.column("act_ckpt")
    blank = np.array([cell == "" for cell in cells], dtype=bool)
    draft.assume(blank, "act_ckpt taken as the stack's usual")
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
    found = {key: _machine(*key) for key in set(names)}
    machines = [found[key] for key in names]
    draft.refuse(np.array([m is None for m in machines], dtype=bool), "hardware is not a known GPU")
    # Only its names of facts are used: a table without one known GPU still has all columns.
    usual = next((m for m in machines if m is not None), None) or _machine("h100-80gb", "", "", 8.0)
    assert usual is not None, "this GPU is in the catalogue"
    for fact in usual:
        facts[fact] = np.array([1.0 if m is None else m[fact] for m in machines])
    strange = [m is not None and m["unknown_cluster"] > 0 for m in machines]
    draft.assume(np.array(strange, dtype=bool), "cluster unknown: usual fabric of this GPU")
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
    facts["slow"] = (np.array([w.slow_network for w in words]) & ~fast).astype(np.float64)


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
        wrong = (f[name] < 1) | (f[name] % 1 != 0) | (f[name] > LARGEST)
        draft.refuse(wrong, f"{name} must be a whole number of at least 1")
        f[name] = np.where(wrong, 1.0, f[name])
    draft.refuse(f["tp"] * f["cp"] * f["pp"] * f["dp"] != f["gpus"], "dp x tp x cp x pp != n_gpus")
    draft.refuse(f["pp"] > f["layers"], "pp exceeds n_layers")
    draft.refuse(f["heads"] > f["hidden"], "n_heads exceeds d_model")
    draft.refuse(f["dp"] > f["batch"], "dp exceeds the global batch")
    draft.refuse(f["cp"] > f["seq"], "cp exceeds seq_len")
    f["micro"] = np.minimum(f["micro"], np.maximum(1.0, np.ceil(f["batch"] / f["dp"])))
