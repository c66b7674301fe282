"""The runs that a sweep asks for: the product of its axes, less what `where` and `max_nodes` drop.
Every combination becomes a run or a reason why it cannot be one.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fourfold.errors import UserError, nearest
from fourfold.spec import catalog, check, codec, words
from fourfold.spec.expression import MEMORY_UNITS, Expression, parse
from fourfold.spec.layout import Layout
from fourfold.spec.run import LayoutSizeError, RunSpec, names_dp, nested, short_names

_RESERVED = ("where", "max_nodes", "gpus_per_node")
_DEFAULT_GPUS_PER_NODE = 8
MAX_COMBINATIONS = 1_000_000
# Words of a condition whose values are predictions before a run has run.
FORESEEN = frozenset({*MEMORY_UNITS, "step_s"})


@dataclass(frozen=True, slots=True)
class Combination:
    """One point of the product: what was varied, and the run it makes (`spec.refused`: or not)."""

    varied: tuple[tuple[str, Any], ...]
    spec: RunSpec

    @property
    def label(self) -> str:
        return varied_text(self.varied) or "the run"


def varied_text(varied: Iterable[tuple[str, Any]]) -> str:
    """'tp=2 micro_batch=3'; a table's own fields in its place."""
    pairs: list[tuple[str, Any]] = []
    for name, value in varied:
        pairs += list(value.items()) if isinstance(value, dict) else [(name, value)]
    return " ".join(f"{name}={value}" for name, value in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A base run as plain data, the axes in the order written, and what drops combinations."""

    base: dict[str, Any]
    axes: tuple[tuple[str, tuple[Any, ...]], ...]
    where: tuple[Expression, ...] = ()
    max_nodes: int | None = None
    gpus_per_node: int = _DEFAULT_GPUS_PER_NODE


@dataclass(frozen=True, slots=True)
class Expansion:
    """`dropped` combinations were not asked for after all; `same` make a run already listed.

    `foreseen` are the conditions on predicted values (FORESEEN), which nobody here can answer.
    """

    combinations: tuple[Combination, ...]
    dropped: int
    same: int
    foreseen: tuple[Expression, ...] = ()

    @property
    def total(self) -> int:
        return len(self.combinations)


def read_sweep(data: Mapping[str, Any]) -> Sweep:
    """A sweep file as plain data: a run's table with a [sweep] table in it."""
    base = nested(copy.deepcopy(dict(data)))
    table = base.pop("sweep", None)
    if not isinstance(table, dict):
        raise UserError(
            "is missing",
            field="[sweep]",
            hint="add a [sweep] table with lists, such as "
            "tp = [1, 2]; 'fourfold bench --spec FILE' runs a single configuration",
        )
    flat = dict(leaves(table))
    rules = {name: base.pop(name, flat.pop(name, None)) for name in _RESERVED}
    axes = []
    for name, values in flat.items():
        if not isinstance(values, list):
            values = [values]
        check.that(values, f"sweep.{name}", None, "is empty", f"write {name} = [1, 2]")
        axes.append((name, tuple(_plain_value(path_of(name), value) for value in values)))
    return Sweep(
        base=base,
        axes=tuple(axes),
        where=tuple(parse(text) for text in _conditions(rules["where"])),
        max_nodes=_count("max_nodes", rules["max_nodes"]),
        gpus_per_node=_count("gpus_per_node", rules["gpus_per_node"]) or _DEFAULT_GPUS_PER_NODE,
    )


def _plain_value(path: str, value: Any) -> Any:
    """What an axis' word means: "8k" -> 8192, "fsdp" -> zero3. Batches in tokens wait."""
    if path == "batch.global_batch" and isinstance(value, str) and not value.isdecimal():
        return value
    if path == "batch.micro_batch" and value == "auto":
        return value
    if path == "policy.precision" and words.with_scaling({"precision": value}).get("scaling"):
        return value  # says two fields, which the run's table takes apart
    if path == "layout":
        return value  # so may a layout as it is printed: 'pp2 dp2 cp1 tp1 v4'
    head, _, leaf = path.rpartition(".")
    tidy, _ = words.tidied({head: {leaf: value}} if head else {leaf: value})
    return tidy[head][leaf] if head else tidy[leaf]


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of everything that is no table: env.X = [...] without quotes is one in TOML."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _conditions(value: Any) -> list[str]:
    if value is None:
        return []
    conditions = value if isinstance(value, list) else [value]
    texts = all(isinstance(text, str) for text in conditions)
    check.that(texts, "where", value, "must be a list of conditions", 'write ["dp % 4 == 0"]')
    return conditions


def _count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError("must be a whole number from 1", field=name, value=value)
    return value


def path_of(name: str) -> str:
    """The field that an axis means: 'tp' -> 'layout.tp', 'env.X' -> 'policy.env.X'."""
    if name.startswith("env."):
        return f"policy.{name}"
    if name.startswith(("layout.", "batch.", "policy.", "model.", "fault.")):
        return name
    short = dict(short_names())
    del short["env"]  # one by one: env.X
    if name not in short:
        raise UserError("unknown axis", field="sweep", value=name, hint=nearest(name, short))
    return short[name]


def expand(sweep: Sweep) -> Expansion:
    """Every combination once, in the order of the axes; the last axis runs fastest."""
    count = math.prod(len(values) for _, values in sweep.axes)
    rule = f"are more than {MAX_COMBINATIONS:,}"
    check.that(count <= MAX_COMBINATIONS, "combinations", f"{count:,}", rule)
    combinations: list[Combination] = []
    seen: set[str] = set()
    dropped = same = 0
    for values in itertools.product(*(values for _, values in sweep.axes)):
        varied = tuple(zip((name for name, _ in sweep.axes), values, strict=True))
        table = _table(sweep.base, varied)
        combination = _combination(table, varied)
        if not _asked_for(sweep, table, combination):
            dropped += 1
            continue
        if combination.spec.run_id in seen:
            same += 1
            continue
        seen.add(combination.spec.run_id)
        combinations.append(combination)
    foreseen = tuple(condition for condition in sweep.where if condition.names & FORESEEN)
    return Expansion(tuple(combinations), dropped, same, foreseen)


def _table(base: Mapping[str, Any], varied: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    table = words.with_layout_words(copy.deepcopy(dict(base)))
    for name, value in varied:
        *parents, leaf = path_of(name).split(".")
        if parents[:1] == ["model"]:
            catalog.open_model(table, ".".join([*parents[1:], leaf]), str(value))
        inner = table
        for parent in parents:
            known = inner.get(parent)
            if isinstance(known, str) and parent == "layout":
                known = _layout_table(known)
            inner[parent] = dict(known) if isinstance(known, dict) else {}
            inner = inner[parent]
        inner[leaf] = value
    table = words.with_layout_words(table)
    batch = table.get("batch")
    if isinstance(batch, dict) and batch.get("micro_batch") == "auto":
        batch["micro_batch"] = 0
    return table


def _layout_table(text: str) -> dict[str, Any]:
    """A layout written as text, as a table whose axes can vary; dp only where it was named."""
    table = Layout.parse(text).to_plain()
    return {name: size for name, size in table.items() if name != "dp" or "dp" in text.lower()}


def _combination(table: dict[str, Any], varied: tuple[tuple[str, Any], ...]) -> Combination:
    """Axes that do not multiply to the GPUs are a refusal; any other mistake ends the sweep."""
    check.that("model" in table, "model", None, "is missing", 'add model = "llama-tiny"')
    try:
        spec = codec.load(RunSpec, table)
    except LayoutSizeError as error:
        return Combination(varied, _impossible(table, str(error)))
    fault = spec.fault
    if fault is not None and fault.where:
        holds = parse(fault.where).holds(values_of(spec, _DEFAULT_GPUS_PER_NODE))
        always = dataclasses.replace(fault, where="") if holds else None
        spec = dataclasses.replace(spec, fault=always)
    return Combination(varied, spec)


def _impossible(table: dict[str, Any], reason: str) -> RunSpec:
    """The asked axes as they were asked, dp 1 where it was left to be the rest."""
    layout = Layout.from_plain(table.get("layout", {}), "layout").to_plain()
    return codec.load(RunSpec, {**table, "layout": layout, "refused": reason, "fault": None})


def _asked_for(sweep: Sweep, table: dict[str, Any], combination: Combination) -> bool:
    spec = combination.spec
    values = values_of(spec, sweep.gpus_per_node)
    if spec.refused:
        values = _loose_values(sweep, table, spec)
    if sweep.max_nodes is not None and (values["nodes"] or 0) > sweep.max_nodes:
        return False
    asked = (condition for condition in sweep.where if not condition.names & FORESEEN)
    return all(condition.holds(values) for condition in asked)


def values_of(spec: RunSpec, gpus_per_node: int) -> dict[str, float | None]:
    """What a condition may ask about a run that has not run."""
    return {
        **spec.layout.sizes,
        "vp": spec.policy.virtual_stages,
        "micro_batch": spec.batch.micro_batch,
        "global_batch": spec.batch.global_batch,
        "seq_len": spec.batch.seq_len,
        "gpus": spec.gpus,
        "nodes": -(-spec.gpus // gpus_per_node),
        "layers": spec.model.layers,
        "hidden": spec.model.hidden,
        "heads": spec.model.heads,
    }


def _loose_values(sweep: Sweep, table: dict[str, Any], spec: RunSpec) -> dict[str, float | None]:
    """The same for axes that do not divide the GPUs: dp is then a fraction, and `dp % 4 == 0` or
    `dp >= 1` can drop the combination before it counts as illegal."""
    named = table.get("layout", {})
    layout = Layout.from_plain(named, "layout")
    dp = layout.dp if names_dp(named) else spec.gpus / (layout.tp * layout.cp * layout.pp)
    return values_of(spec, sweep.gpus_per_node) | layout.sizes | {"dp": dp}
