"""What does one published result say, whatever its table's style? Fields in base words and units.

Times in seconds, memory in the GB the source printed, TFLOPs in 1e12 FLOP/s per GPU. None where the
table is silent. `cells` leads from a field back to the printed text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fourfold.spec.model import ModelShape

Style = Literal["mpt", "topology", "scaling", "reference", "other"]
Status = Literal["ok", "oom", "fail", "hang", "absent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """`line` is the row's line in the file, `column` the heading for styles with one result a cell.

    `label` is the name or size in the row itself, `model` a catalogue name in the text above;
    `shape` is the whole shape and `variant` what no column says of the settings (stored runs).
    """

    style: Style
    table: int
    line: int
    row: int
    column: str = ""
    row_id: str = ""
    label: str = ""
    model: str = ""
    family: str = ""
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    tied: bool | None = None
    seq_len: int | None = None
    hardware: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    gpus: int | None = None
    dp: int | None = None
    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    virtual_stages: int | None = None
    sharding: str = ""
    precision: str = ""
    recompute: str = ""
    stack: str = ""
    micro_batch: int | None = None
    grad_accum: int | None = None
    global_batch: int | None = None
    batch_tokens: int | None = None
    step_s: float | None = None
    samples_s: int | None = None
    tokens_s: float | None = None
    tokens_s_gpu: float | None = None
    tflops_gpu: float | None = None
    mfu_pct: float | None = None
    hfu_pct: float | None = None
    mem_gb: float | None = None
    params: int | None = None
    convention: str = ""
    status: Status = "ok"
    measured_at: str = ""
    predicted_s: float | None = None
    offload: str = ""
    variant: str = ""
    note: str = ""
    shape: ModelShape | None = field(default=None, compare=False, repr=False)
    cells: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def text(self, name: str) -> str:
        """The cell as printed, or '' when the field came from elsewhere."""
        return self.cells.get(name, "")

    @property
    def place(self) -> str:
        where = self.row_id or f"line {self.line}"
        return f"{where}, {self.column}" if self.column else where
