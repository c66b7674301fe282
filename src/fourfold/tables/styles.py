"""Which style is a table, and which column is which field? Headings as published and repaired."""

from __future__ import annotations

import re

from fourfold.tables import cells
from fourfold.tables.document import Table
from fourfold.tables.record import Style

MPT_HEADINGS = (
    "Model", "SeqLen (T)", "# GPUs", "GPU", "MFU", "HFU", "Model TFLOP", "MicroBatchSize",
    "GradAccum", "GlobalBatchSize", "Throughput (S/s)", "Throughput (T/s)",
    "Throughput (T/s/GPU)", "GlobalBatchSize (T)", "Precision", "MP Mode", "Sharding Strategy",
    "Activation Checkpointing", "Activation CPUOffload", "NumParams",
)  # fmt: skip
_MPT_FIELDS = (
    "label", "seq_len", "gpus", "hardware", "mfu_pct", "hfu_pct", "model_tflop", "micro_batch",
    "grad_accum", "global_batch", "samples_s", "tokens_s", "tokens_s_gpu", "batch_tokens",
    "precision", "mp_mode", "sharding", "recompute", "offload", "params",
)  # fmt: skip
REFERENCE_HEADINGS = (
    "row_id", "source", "stack", "cluster", "hardware", "gpus_per_node", "family", "model",
    "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab", "tied", "seq_len", "n_gpus",
    "tp", "cp", "pp", "vpp", "dp", "sharding", "sequence_parallel", "mbs", "gbs", "precision",
    "act_ckpt", "attention", "net_gbs", "net_node_gbs", "step_s", "tokens_s_gpu", "tflops_gpu",
    "flop_rule", "mem_gb", "status", "note",
)  # fmt: skip
_REFERENCE_RENAMED = {
    "model": "label", "n_layers": "layers", "d_model": "hidden", "n_heads": "heads",
    "n_kv_heads": "kv_heads", "d_ff": "ffn", "n_gpus": "gpus", "vpp": "virtual_stages",
    "mbs": "micro_batch", "gbs": "global_batch", "act_ckpt": "recompute",
    "flop_rule": "convention",
}  # fmt: skip
_TOPOLOGY_FIELDS = {
    "nodes": "nodes", "gpus": "gpus", "# gpus": "gpus", "ngpus": "gpus",
    "size": "label", "model": "label", "zs": "sharding", "zero": "sharding",
    "dp": "dp", "tp": "tp", "cp": "cp", "pp": "pp", "vp": "virtual_stages", "vpp": "virtual_stages",
    "mbs": "micro_batch", "gbs": "global_batch", "nheads": "heads", "heads": "heads",
    "nhidden": "hidden", "hidden": "hidden", "layers": "layers", "nlayers": "layers",
    "seqlen": "seq_len", "seq len": "seq_len", "seq": "seq_len", "mem": "mem_gb",
    "sec/it": "step_s", "s/it": "step_s", "tflops": "tflops_gpu", "tflops/gpu": "tflops_gpu",
    "notes": "note", "note": "note", "precision": "precision",
    # The same under names of other logs and spreadsheets.
    "s/iter": "step_s", "sec/iter": "step_s", "sec_per_iter": "step_s", "s/step": "step_s",
    "sec/step": "step_s", "step_s": "step_s", "step time (s)": "step_s", "iter time (s)": "step_s",
    "tflop/s/gpu": "tflops_gpu", "tflops_gpu": "tflops_gpu", "tflop/s": "tflops_gpu",
    "micro_batch": "micro_batch", "micro batch": "micro_batch", "micro_batch_size": "micro_batch",
    "global_batch": "global_batch", "global batch": "global_batch",
    "global_batch_size": "global_batch", "seq_len": "seq_len", "sequence_length": "seq_len",
    "mem_gb": "mem_gb", "memory (gb)": "mem_gb", "mem (gb)": "mem_gb", "sharding": "sharding",
    "tokens/s/gpu": "tokens_s_gpu", "tok/s/gpu": "tokens_s_gpu", "tokens_s_gpu": "tokens_s_gpu",
    "n_gpus": "gpus", "num_gpus": "gpus", "num_layers": "layers", "hidden_size": "hidden",
}  # fmt: skip
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
    fields = {_TOPOLOGY_FIELDS[name] for name in names if name in _TOPOLOGY_FIELDS}
    if fields & {"nodes", "gpus"} and fields & _TOPOLOGY_LEAST:
        return "topology"
    return "other"


def columns(table: Table, style: Style) -> tuple[str, ...]:
    """The field of each cell of a row, '' where the column has no meaning here."""
    names = [heading.strip().lower() for heading in repaired_headings(table, style)]
    if style == "mpt":
        known = dict(zip(map(str.lower, MPT_HEADINGS), _MPT_FIELDS, strict=True))
        return tuple(known.get(name, "") for name in names)
    if style == "reference":
        return tuple(_REFERENCE_RENAMED.get(name, name) for name in names)
    if style == "topology":
        return tuple(_TOPOLOGY_FIELDS.get(name, "") for name in names)
    return ()


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
    at = MPT_HEADINGS.index(missing)
    return (*table.headings[:at], missing, *table.headings[at:])


def missing_heading(table: Table, style: Style) -> str:
    """The one published heading that an MPT table lacks, or ''."""
    if style != "mpt":
        return ""
    lacking = [name for name in MPT_HEADINGS if name not in table.headings]
    return lacking[0] if len(lacking) == 1 else ""


def gpu_columns(table: Table) -> dict[int, int]:
    """Scaling tables: column -> GPUs."""
    found = {}
    for at, heading in enumerate(table.headings[1:], start=1):
        match = _GPU_COLUMN.match(heading.strip())
        count = int(match.group(1)) if match else cells.whole(heading)
        if count:
            found[at] = count
    return found
