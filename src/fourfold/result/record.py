"""A run as one row: the same fields for a stored run (from_run.py) and a published one (tables/).
Seconds, bytes (`mem_gb`: in the GB the source printed), TFLOPs per GPU; None where it is silent.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fourfold.result.report import Outcome
from fourfold.spec import ModelShape, codec, texts
from fourfold.spec.expression import memory_values
from fourfold.spec.layout import AXES, EXPERT_AXES, MODEL_AXES

Style = Literal["mpt", "topology", "scaling", "reference", "other"]
# A published row may have neither a figure nor a word for how it ended.
RowOutcome = Outcome | Literal["absent"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """`stack`: the engine ('': ours, of a stored run). `model`: its name in the catalogue;
    `model_json`: the whole shape as sorted JSON, where equal texts are equal models (of a
    table once it is published). `settings`: what else of its policy is not as usual
    ('loss_chunks=4 optimizer=...'). Seconds are of the steps after warm-up, bytes of the fullest
    rank.

    Of a table: `line` is the row's line in the file, `column` the heading for styles with one
    result a cell, `label` the name or size in the row itself; `variant` is what no column says of
    the settings of a stored run. `cells` leads from a field back to the printed text.
    """

    run_id: str = ""
    repeat: int = 0
    device: str = ""
    torch: str = ""
    host: str = ""
    stack: str = ""
    outcome: RowOutcome = "ok"
    model: str = ""
    model_json: str = ""
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    gpus: int | None = None
    nodes: int | None = None
    pp: int | None = None
    dp: int | None = None
    replicate: int = 1
    cp: int | None = None
    tp: int | None = None
    ep: int = 1
    etp: int = 1
    experts: int | None = None
    order: str = " ".join(AXES)
    virtual_stages: int | None = None
    seq_len: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    precision: str = ""
    sharding: str = ""
    recompute: str = ""
    offload: str = ""
    cp_kind: str = ""
    schedule: str = ""
    sequence_parallel: bool = True
    compiled: bool = False
    attention: str = ""
    settings: str = ""
    env: tuple[tuple[str, str], ...] = ()
    tag: str = ""
    note: str = ""
    started_at: str = ""
    step_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    samples: int = 0
    start_s: float = 0.0
    loss: float | None = None
    loss_step: int | None = None
    peak_bytes: int | None = None
    peak_rank: int | None = None
    peak_stage: int | None = None
    retries: int = 0
    failure: str = ""
    predicted_s: float | None = None
    predicted_low_s: float | None = None
    predicted_high_s: float | None = None
    predicted_bytes: float | None = None
    predicted_limit_bytes: float | None = None
    predicted_by: str = ""
    tokens_s_gpu: float | None = None
    # Of tables alone; a stored run gets them when it is published.
    style: Style = "other"
    table: int = 0
    line: int = 0
    row: int = 0
    column: str = ""
    label: str = ""
    family: str = ""
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    tied: bool | None = None
    hardware: str | None = None
    gpus_per_node: int | None = None
    grad_accum: int | None = None
    batch_tokens: int | None = None
    samples_s: int | None = None
    tokens_s: float | None = None
    tflops_gpu: float | None = None
    mfu_pct: float | None = None
    hfu_pct: float | None = None
    mem_gb: float | None = None
    params: int | None = None
    convention: str = ""
    variant: str = ""
    equivalence: str = ""
    cells: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def tokens(self) -> int:
        """Of a step."""
        return (self.seq_len or 0) * (self.global_batch or 0)

    @property
    def model_ranks(self) -> int:
        """tp x cp x pp, an axis that nobody states taken as 1."""
        return math.prod(getattr(self, axis) or 1 for axis in MODEL_AXES)

    @property
    def layout(self) -> str:
        again = [axis for axis in EXPERT_AXES if getattr(self, axis) > 1]
        return " ".join(f"{axis}{self._written(axis)}" for axis in (*self.order.split(), *again))

    @property
    def unlisted(self) -> str:
        """Settings that make another configuration, though few tables have a column for them. What
        has no effect on these axes is left out."""
        kinds = ((self.cp, self.cp_kind, "ring"), (self.pp, self.schedule, "1f1b"))
        words = [
            *(kind for size, kind, usual in kinds if size != 1 and kind != usual),
            "compiled" if self.compiled else "",
            "" if self.attention in ("", "auto") else f"attention={self.attention}",
            "" if self.offload in ("", "none") else f"offload={self.offload}",
            "" if self.sequence_parallel or self.tp == 1 else "no sequence parallel",
            f"copies {self.replicate}" if self.replicate > 1 else "",
            "" if self.gpus == 1 or self.order == " ".join(AXES) else f"order {self.order}",
            self.settings,
            *(f"{name}={value}" for name, value in self.env),
        ]
        return " ".join(filter(None, words))

    def _written(self, axis: str) -> str:
        size = getattr(self, axis) or 1
        split = axis == "dp" and self.replicate > 1
        return f"{self.replicate}x{size // self.replicate}" if split else f"{size}"

    @property
    def config(self) -> tuple[object, ...]:
        """What was run: records with equal configurations are repeats of each other."""
        return tuple(getattr(self, name) for name in CONFIG)

    @property
    def place(self) -> str:
        """Where in a file of tables it stands."""
        where = self.run_id or f"line {self.line}"
        return f"{where}, {self.column}" if self.column else where

    def text(self, name: str) -> str:
        """The cell as printed, or '' when the field came from elsewhere."""
        return self.cells.get(name, "")

    def values(self) -> dict[str, float | None]:
        """What a `where` condition may ask (spec/expression.py)."""
        names = (
            *AXES,
            *EXPERT_AXES,
            "micro_batch",
            "global_batch",
            "seq_len",
            "gpus",
            "nodes",
            "layers",
            "hidden",
            "heads",
            "step_s",
        )
        asked: dict[str, float | None] = {name: getattr(self, name) for name in names}
        return asked | {"vp": self.virtual_stages} | memory_values(self.peak_bytes)


@functools.lru_cache(maxsize=4096)
def json_of(model: ModelShape) -> str:
    """Of equal models it is the same."""
    return json.dumps(codec.encode(model), sort_keys=True)


@functools.lru_cache(maxsize=4096)
def model_of(model_json: str) -> ModelShape:
    """The shape of a stored run."""
    return codec.decode(ModelShape, texts.parse_json(model_json))


KINDS = {each.name: str(each.type) for each in dataclasses.fields(Record)}
# What a stored run says of itself, in the order in which it is listed.
RUN_FIELDS = tuple(KINDS)[: list(KINDS).index("style")]
# The model, the machine, and how the run was set up.
MODEL_FIELDS = ("label", "model", "layers", "hidden", "heads", "seq_len", "hardware")
CONFIG = (
    *MODEL_FIELDS,
    "family",
    "kv_heads",
    "ffn",
    "vocab",
    "tied",
    "model_json",
    "gpus_per_node",
    "gpus",
    *AXES,
    *EXPERT_AXES,
    "experts",
    "virtual_stages",
    "sharding",
    "precision",
    "recompute",
    "stack",
    "micro_batch",
    "global_batch",
    "offload",
    "variant",
    "equivalence",
)


def short_name(run: Record, among: Iterable[Record]) -> str:
    """The start of its id; with its number where it was run again, since an id alone names all its
    repeats."""
    again = any(one.repeat for one in among if one.run_id == run.run_id)
    return run.run_id[:8] + (f"#{run.repeat}" if again else "")


def differing(groups: Iterable[Sequence[Record]], names: Iterable[str]) -> tuple[str, ...]:
    """The fields in which records of one group differ: what would tell apart those that look
    alike."""
    groups = [group for group in groups if len(group) > 1]
    return tuple(
        name
        for name in names
        if any(len({getattr(record, name) for record in group}) > 1 for group in groups)
    )


def grouped(
    records: Iterable[Record], names: Iterable[str]
) -> dict[tuple[object, ...], list[Record]]:
    """Records by their values of these fields, in the order in which they come."""
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(getattr(record, name) for name in names), []).append(record)
    return groups
