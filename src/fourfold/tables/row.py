"""A run as a row of a published table: seconds, bytes (`mem_gb`: in the GB the source printed),
TFLOPs per GPU; None where the source is silent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fourfold.result.report import Outcome, Prediction
from fourfold.result.stored_run import NO_SEQUENCE_PARALLEL, StoredRun
from fourfold.spec import ModelShape
from fourfold.spec.layout import AXES, EXPERT_AXES, MODEL_AXES

Style = Literal["mpt", "topology", "scaling", "reference", "other"]
# A published row may have neither a figure nor a word for how it ended.
RowOutcome = Outcome | Literal["absent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """A row of a published table, or a stored run as one (`stored`). `stack`: the engine. `model`:
    its name in the catalogue; `shape`: the whole model, where it is known. Seconds are of the steps
    after warm-up, bytes of the fullest rank.

    `line` is the row's line in the file, `column` the heading for styles with one result a cell,
    `label` the name or size in the row itself; `variant` is what no column says of the settings.
    `cells` leads from a field back to the printed text.
    """

    run_id: str = ""
    stored: StoredRun | None = None
    style: Style = "other"
    table: int = 0
    line: int = 0
    row: int = 0
    column: str = ""
    cells: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    stack: str = ""
    label: str = ""
    model: str = ""
    shape: ModelShape | None = None
    family: str = ""
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    tied: bool | None = None
    experts: int | None = None
    params: int | None = None
    hardware: str | None = None
    gpus_per_node: int | None = None
    gpus: int | None = None
    nodes: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    tp: int | None = None
    ep: int = 1
    etp: int = 1
    virtual_stages: int | None = None
    seq_len: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    grad_accum: int | None = None
    batch_tokens: int | None = None
    precision: str = ""
    sharding: str = ""
    recompute: str = ""
    offload: str = ""
    sequence_parallel: bool = True
    attention: str = ""
    variant: str = ""
    outcome: RowOutcome = "ok"
    failure: str = ""
    note: str = ""
    step_s: float | None = None
    samples_s: int | None = None
    tokens_s: float | None = None
    tokens_s_gpu: float | None = None
    tflops_gpu: float | None = None
    mfu_pct: float | None = None
    hfu_pct: float | None = None
    convention: str = ""
    mem_gb: float | None = None
    peak_bytes: int | None = None
    predicted: Prediction | None = None
    equivalence: str = ""

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
        if self.stored:
            return str(self.stored.spec.layout)
        again = [axis for axis in EXPERT_AXES if getattr(self, axis) > 1]
        return " ".join(f"{axis}{getattr(self, axis) or 1}" for axis in (*AXES, *again))

    @property
    def unlisted(self) -> str:
        """Settings of a row of the reference schema that make another configuration, though other
        styles have no column for them."""
        words = [
            "" if self.attention in ("", "auto") else f"attention={self.attention}",
            "" if self.sequence_parallel or self.tp == 1 else NO_SEQUENCE_PARALLEL,
        ]
        return " ".join(filter(None, words))

    @property
    def started_at(self) -> str:
        return self.stored.started_at if self.stored else ""

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


KINDS = {each.name: str(each.type) for each in dataclasses.fields(PublishedRow)}
# The model, the machine, and how the run was set up.
MODEL_FIELDS = ("label", "model", "layers", "hidden", "heads", "seq_len", "hardware")
CONFIG = (
    *MODEL_FIELDS,
    "family",
    "kv_heads",
    "ffn",
    "vocab",
    "tied",
    "shape",
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


def differing(groups: Iterable[Sequence[PublishedRow]], names: Iterable[str]) -> tuple[str, ...]:
    """The fields in which records of one group differ: what would tell apart those that look
    alike."""
    groups = [group for group in groups if len(group) > 1]
    return tuple(
        name
        for name in names
        if any(len({getattr(record, name) for record in group}) > 1 for group in groups)
    )


def grouped(
    records: Iterable[PublishedRow], names: Iterable[str]
) -> dict[tuple[object, ...], list[PublishedRow]]:
    """Return records by their values of these fields, in the order in which they come."""
    groups: dict[tuple[object, ...], list[PublishedRow]] = {}
    for record in records:
        groups.setdefault(tuple(getattr(record, name) for name in names), []).append(record)
    return groups
