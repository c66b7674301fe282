"""The matrix: releases by axis and option, a cell for each."""

from __future__ import annotations

# Column -> the cell that shows it. Experts need sequence parallelism with tp in some engines: the
# first cell of a column that the engine does not refuse is the column's.
COLUMNS: dict[str, tuple[str, ...]] = {
    "one rank": ("",),
    "tp": ("tp2",),
    "sp": ("tp2 sp",),
    "pp": ("pp2",),
    "interleaved": ("pp2 interleaved",),
    "cp": ("cp2",),
    "dp": ("dp2",),
    "zero1": ("dp2 zero1",),
    "zero2": ("dp2 zero2",),
    "zero3": ("dp2 zero3",),
    "fsdp": ("dp2 fsdp",),
    "hsdp": ("dp2x2 fsdp",),
    "experts, tp": ("tp2 sp experts", "tp2 experts", "tp2 ep2 experts"),
    "ep": ("dp2 ep2 experts", "dp2 fsdp ep2 experts", "tp2 ep2 experts"),
    "etp": ("tp2 sp etp1 experts", "tp2 ep2 etp1 experts"),
    "tied": ("pp2 tied", "dp2 fsdp tied", "dp2 zero1 tied"),
    "sinks": ("tp2 sinks", "dp2 sinks"),
    "uneven batch": ("dp2 uneven", "dp2 fsdp uneven"),
    "accumulation": ("dp2 zero2 accumulate", "dp2 fsdp accumulate", "dp2 accumulate"),
    "clipping": ("dp2 tp2", "dp2 fsdp tp2", "dp4 zero1", "dp4 fsdp", "dp4"),
    "recompute": ("tp2 recompute", "dp2 recompute"),
}
