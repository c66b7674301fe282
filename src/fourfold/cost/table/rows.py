"""The runs that a table describes: texts of the reference schema -> Columns, with reasons.

A row that cannot be expressed keeps its place: `usable` is False there and `reasons` says why.
Blank policy fields take the stack's usual value, and `reasons` says that too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats, columns
from fourfold.cost.run import device_facts, fabric_facts
from fourfold.cost.stacks import StackDefaults, is_known, site_of, stack_defaults, with_experts
from fourfold.cost.table import experts
from fourfold.cost.table.check import check_layout, check_values, check_vocab
from fourfold.cost.table.kernels import attention, choice, kernels
from fourfold.cost.table.open_fields import (
    blank,
    fill_layouts,
    fill_open,
    open_fields,
    open_layouts,
)
from fourfold.cost.table.reference import (
    INCOMPLETE,
    Distinct,
    Draft,
    NoteWords,
    RowTable,
    each,
    measured,
    numbers,
)
from fourfold.errors import UserError
from fourfold.spec import catalog
from fourfold.spec.cluster import Cluster
from fourfold.spec.layout import MODEL_AXES
from fourfold.spec.words import CP_KINDS, DTYPES, SCHEDULES, SHARDINGS

Bools = NDArray[np.bool_]
UNGATED = ("mpt", "gpt", "falcon", "nemotron")
SELECTIVE = -1.0
RECOMPUTED = {"none": 0.0, "selective": SELECTIVE, "full": 1.0}


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


def parse(table: RowTable, clusters: Mapping[str, Cluster] | None = None) -> Rows:
    """`clusters`: machines by name beside those of the catalogue."""
    draft = Draft(table)
    lacks = np.array([cell == INCOMPLETE for cell in table.column("status")], dtype=bool)
    draft.refuse(lacks, "the run is incomplete; 'fourfold collect' names its missing fields")
    words = Distinct(table.column("note"), NoteWords)
    no_layout = open_layouts(table)
    stack = Distinct(table.column("stack"), stack_defaults)
    check_vocab(draft, stack)
    _model(draft, words)
    _layout(draft, no_layout)
    _policy(draft, words, stack, no_layout)
    _hardware(draft, words, clusters or {})
    experts.layout(draft, stack)
    check_values(draft)
    fill_layouts(draft, no_layout)
    check_layout(draft)
    unknown = Distinct(table.column("stack"), is_known).mask(lambda known: not known)
    draft.assume(unknown, "stack unknown: generic habits")
    fill_open(draft.facts, draft.assume, open_fields(table, draft.facts["pp"]))
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
        stack=_stacks(draft),
        cluster=_clusters(draft),
        hardware=np.array(each(table.column("hardware"), str.lower), dtype=str),
        step_s=measured(table.column("step_s")),
        mem_gb=measured(table.column("mem_gb")),
        status=np.array(table.column("status"), dtype=str),
    )


def _stacks(draft: Draft) -> NDArray[np.str_]:
    stacks = zip(draft.table.column("stack"), draft.facts["experts"] > 0, strict=True)
    return np.array([with_experts(name) if has else name for name, has in stacks], dtype=str)


def _clusters(draft: Draft) -> NDArray[np.str_]:
    clusters = zip(draft.table.column("cluster"), draft.facts["experts"] > 0, strict=True)
    return np.array([site_of(name) if has else name for name, has in clusters], dtype=str)


def _model(draft: Draft, words: Distinct[NoteWords]) -> None:
    need = draft.need
    need("layers", "n_layers")
    hidden = need("hidden", "d_model")
    heads = need("heads", "n_heads")
    families = Distinct(draft.table.column("family"), str)
    gated = families.array(lambda family: family not in UNGATED)
    gated = np.where(words.mask(lambda w: w.two_matrices), 0.0, gated)
    draft.facts["gated"] = gated
    size = words.array(lambda w: w.head_size)
    draft.facts["width"] = np.where(size > 0, heads * size, hidden)
    draft.fill("kv_heads", "n_kv_heads", heads, "taken as n_heads")
    usual = np.where(gated > 0, 256.0 * np.ceil(hidden * 8.0 / 3.0 / 256.0), 4.0 * hidden)
    draft.fill("ffn", "d_ff", usual, "taken as the family's usual")
    tied = families.array(lambda family: family in ("mpt", "gpt"))
    draft.fill("tied", "tied", tied, "")
    experts.shape(draft)


def _layout(draft: Draft, no_layout: Bools) -> None:
    need = draft.need
    need("seq", "seq_len")
    need("batch", "gbs")
    gpus = need("gpus", "n_gpus")
    degrees = []
    for name in MODEL_AXES:
        degrees.append(draft.fill(name, name, 1.0, ""))
        draft.assume(blank(draft.table, name) & ~no_layout, f"{name} taken as 1")
    draft.fill("vpp", "vpp", 1.0, "")
    model_ranks = np.maximum(1.0, degrees[0] * degrees[1] * degrees[2])
    draft.fill("dp", "dp", np.floor(gpus / model_ranks), "")
    draft.fill("micro", "mbs", 1.0, "")


def _policy(
    draft: Draft, words: Distinct[NoteWords], stack: Distinct[StackDefaults], no_layout: Bools
) -> None:
    table, facts = draft.table, draft.facts
    facts["precision"] = choice(draft, "precision", DTYPES, "bf16")
    place = facts["precision"].astype(np.intp), np.arange(table.length)
    for i, name in enumerate(("grad_bytes", "acc_bytes")):
        each = [stack.array(lambda s, d=d, i=i: s.gradient_bytes(d)[i]) for d in DTYPES]
        facts[name] = np.stack(each)[place]
    facts["grad_bytes"] = np.where(words.mask(lambda w: w.pure), 2.0, facts["grad_bytes"])
    named = zip(table.column("stack"), table.column("family"), strict=True)
    narrow = Distinct(list(named), lambda one: one[1] in stack_defaults(one[0]).narrow_moments)
    less = words.mask(lambda w: w.one_moment) | narrow.mask(bool)
    facts["opt_bytes"] = np.where(less, 8.0, 12.0)
    low = np.isin(facts["precision"], [DTYPES.index("fp8"), DTYPES.index("fp4")])
    facts["act_bytes"] = np.where(facts["precision"] == DTYPES.index("fp32"), 4.0, 2.0)
    saved, gather = (
        stack.array(lambda s: s.fp8_saved_bytes),
        stack.array(lambda s: s.fp8_gather_bytes),
    )
    facts["saved_bytes"] = np.where(low, saved, facts["act_bytes"])
    facts["gather_bytes"] = np.where(low, gather, facts["act_bytes"])
    _zero(draft, words, stack, no_layout)
    _recompute(draft, words, stack)
    facts["attention"] = attention(draft, words, stack)
    gathers = words.mask(lambda w: w.gathers_kv)
    facts["cp_kind"] = np.where(gathers, CP_KINDS.index("allgather"), CP_KINDS.index("ring"))
    usual_sp = stack.array(lambda s: s.sequence_parallel)
    draft.fill("sp", "sequence_parallel", usual_sp, "taken as the stack's usual")
    facts["fused_norm"] = words.array(lambda w: not w.plain_norm)
    kernels(draft, words, stack)
    looped, plain = SCHEDULES.index("interleaved"), SCHEDULES.index("1f1b")
    facts["schedule"] = np.where(facts["vpp"] > 1, float(looped), float(plain))
    draft.assume(blank(table, "precision"), "precision bf16 assumed")


def _zero(
    draft: Draft, words: Distinct[NoteWords], stack: Distinct[StackDefaults], no_layout: Bools
) -> None:
    facts = draft.facts
    stages = {name: float(i) for i, name in enumerate(SHARDINGS)} | {"none": 0.0, "ddp": 0.0}
    cells = Distinct(draft.table.column("sharding"), str)
    unsaid = cells.mask(lambda cell: cell == "")
    draft.assume(unsaid & ~no_layout, "sharding taken as the stack's usual")
    stated = cells.array(lambda cell: stages.get(cell, -1.0))
    values = np.where(unsaid, stack.array(lambda s: stages[s.sharding]), stated)
    draft.refuse(values < 0, f"sharding is not one of {', '.join(SHARDINGS)}")
    facts["zero"] = np.maximum(values, 0.0)
    everyone = facts["dp"] * facts["cp"]
    node = numbers(draft.table.column("gpus_per_node"))
    group = words.array(lambda w: w.shard_group)
    usual = stack.array(lambda s: s.shard_group)
    group = np.where((group == 0) & (usual > 0) & (everyone >= 512), usual, group)
    in_node = words.mask(lambda w: w.shards_in_node)
    group = np.where(in_node & (group == 0), np.where(np.isnan(node), 8.0, node), group)
    facts["shard"] = np.where(group > 0, np.minimum(group, everyone), everyone)


def _recompute(draft: Draft, words: Distinct[NoteWords], stack: Distinct[StackDefaults]) -> None:
    cells = Distinct(draft.table.column("act_ckpt"), str)
    unsaid = cells.mask(lambda cell: cell == "")
    draft.assume(unsaid, "act_ckpt taken as the stack's usual")
    usual = stack.array(lambda s: RECOMPUTED.get(s.recompute, -1.0))
    usual = np.where(words.mask(lambda w: w.recomputes), RECOMPUTED["full"], usual)
    share = np.where(unsaid, usual, cells.array(recomputed))
    blocks = cells.array(recomputed_block)
    chunks = draft.facts["pp"] * draft.facts["vpp"]
    share = np.where(blocks > 0, np.minimum(1.0, blocks * chunks / draft.facts["layers"]), share)
    draft.facts["block_ckpt"] = blocks
    selective = share == SELECTIVE
    whole = stack.array(lambda s: s.whole_layers)
    draft.refuse(np.isnan(share), "act_ckpt is not one of none, selective, full, every-N, block-N")
    draft.facts["full_ckpt"] = np.where(selective, whole, np.nan_to_num(share))
    mlp = selective & stack.mask(lambda s: s.selective_mlp)
    draft.facts["attn_ckpt"] = (selective & (whole == 0) & ~mlp).astype(np.float64)
    draft.facts["norm_ckpt"] = draft.facts["mlp_ckpt"] = mlp.astype(np.float64)


def recomputed(kind: str) -> float:
    """Share of layers recomputed whole; SELECTIVE, or NaN for a word without meaning."""
    every = kind.removeprefix("every-")
    if every != kind and every.isdigit() and int(every) > 0:
        return 1.0 / int(every)
    return RECOMPUTED.get(kind, float("nan"))


def recomputed_block(kind: str) -> float:
    """Layers recomputed whole at the beginning of each model chunk; 0: not by blocks."""
    number = kind.removeprefix("block-")
    return float(number) if number != kind and number.isdecimal() and len(number) < 6 else 0.0


def _hardware(draft: Draft, words: Distinct[NoteWords], clusters: Mapping[str, Cluster]) -> None:
    """Device and cluster facts, looked up once per different combination."""
    table, facts = draft.table, draft.facts
    node = numbers(table.column("gpus_per_node"))
    names = list(zip(table.column("hardware"), table.column("cluster"), table.column("precision"),
                     node.tolist(), strict=True))  # fmt: skip
    machines = Distinct(names, lambda key: _machine(*key, clusters=clusters))
    draft.refuse(machines.mask(lambda m: m is None), "hardware is not a known GPU")
    # Only its names of facts are used: a table without one known GPU still has all columns.
    usual = _machine("h100-80gb", "", "", 8.0, clusters={})
    assert usual is not None, "this GPU is in the catalogue"
    for fact in usual:
        facts[fact] = machines.array(lambda m, fact=fact: 1.0 if m is None else m[fact])
    strange = machines.mask(lambda m: m is not None and m["unknown_cluster"] > 0)
    per_gpu, per_node = (
        words.array(lambda w: w.net_bytes_per_s),
        words.array(lambda w: w.net_bytes_per_s_of_node),
    )
    stated = np.maximum(per_gpu * facts["node"], per_node)
    facts["net"] = np.where(strange & (stated > 0), stated, facts["net"])
    draft.assume(strange, "cluster unknown: usual fabric of this GPU")
    del facts["unknown_cluster"]
    seen = np.nan_to_num(measured(table.column("net_gbs"))) * 1e9
    several = facts["gpus"] > facts["node"]
    facts["net_seen"] = np.where(several & (seen > 0), seen, 0.0)
    facts["net_open"] = (strange & (stated == 0) & (seen == 0)).astype(np.float64)
    inside = np.nan_to_num(measured(table.column("net_node_gbs"))) * 1e9
    facts["link"] = np.where(inside > 0, np.minimum(facts["link"], inside), facts["link"])
    # In the slow state the measured rate falls with the nodes; where it does not, the state was
    # fast whatever the note says (nanotron, 512 GPUs).
    nodes = facts["gpus"] / facts["node"]
    fast = facts["net_seen"] * nodes > 3.0 * facts["net"]
    facts["slow"] = (words.mask(lambda w: w.slow_network) & ~fast).astype(np.float64)


def _machine(
    hardware: str,
    cluster: str,
    precision: str,
    node: float,
    *,
    clusters: Mapping[str, Cluster],
) -> dict[str, float] | None:
    name = cluster.strip().lower()
    place = clusters.get(name)
    try:
        device = place.device if place else catalog.device(hardware.strip().lower())
    except UserError:
        return None
    if place is None and name in catalog.cluster_names():
        place = catalog.cluster(name)
    if node != node or node < 1:
        node = float(place.host_gpus if place else device.usual_host_gpus)
    facts = device_facts(device, precision or "bf16") | fabric_facts(device, place, node)
    return facts | {"unknown_cluster": float(place is None)}
