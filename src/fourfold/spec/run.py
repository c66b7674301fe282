"""A run: everything that decides its result, in one hashable value."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from fourfold.errors import UserError, nearest
from fourfold.flag import flag
from fourfold.spec import check, codec, texts, words
from fourfold.spec.batch import Batch
from fourfold.spec.cluster import Size
from fourfold.spec.layout import AXES, EXPERT_AXES, SIZES, Layout
from fourfold.spec.model import ModelShape, shape_of
from fourfold.spec.policy import Policy
from fourfold.spec.words import (
    CP_KINDS,
    NUMBERED_RECOMPUTE,
    RECOMPUTE_KINDS,
    SCHEDULES,
    SHARDINGS,
    Schedule,
)
from fourfold.units import count_from, counted, seconds_from

Seconds = Annotated[float, seconds_from]
Count = Annotated[int, count_from]
# What a person may change without making it another run.
_NOT_HASHED = ("note", "tag", "settle")


class LayoutSizeError(UserError):
    """The axes do not multiply to the number of GPUs; in a sweep that is a row, not a mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A failure on purpose, for tests of failure; `where` (an expression) picks runs of a sweep."""

    kind: Literal["hang", "crash", "oom", "nonfinite"]
    rank: int = 0
    step: int = 0
    where: str = ""

    def __post_init__(self) -> None:
        check.whole(0, rank=self.rank, step=self.step)


def _of_flat(given: dict[str, Any]) -> Mapping[str, Any]:
    """Return a RunSpec's fields of keywords that are those of a run's table: a model by its name, a
    layout as text, and any field of batch and policy."""
    given = {name: shape_of(value) if name == "model" else value for name, value in given.items()}
    table = {name: given.get(name) for name in ("model", "layout", "batch", "policy")}
    names = codec.type_hints(RunSpec).keys()
    is_table = any(isinstance(value, str | Mapping) for value in table.values())
    if not is_table and given.keys() <= names:
        return given
    flat = nested(given)
    if not flat.keys() <= names:
        return flat
    plain = {name: codec.encode(value) for name, value in flat.items()}
    spec = RunSpec.from_plain({"settle": False, **plain})
    return {name: getattr(spec, name) for name in names}


@codec.takes_more(_of_flat, lambda: short_names())
@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """`memory_limit` is bytes of one rank; the limits in seconds end a run that stays silent.

    `settle`: warm-up goes on after `warmup` steps until they no longer drift; so it is for a run
    whose table does not say `warmup`. `refused`: why these axes can't be a run at all; such a spec
    is only kept, never started, and its layout need not multiply to `gpus`.
    `data` names a token file ('fourfold data make'); without it tokens are synthetic.
    """

    model: ModelShape
    gpus: int = flag("total number of GPUs (or CPU ranks)", "N", default=MISSING)
    layout: Layout = field(default_factory=Layout)
    batch: Batch = field(default_factory=lambda: Batch(seq_len=2048))
    policy: Policy = field(default_factory=Policy)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    steps: Count = flag("timed steps (default 10)", "N", default=10)
    warmup: Count = flag("warm-up steps (default: until step times are steady)", "N", default=3)
    seed: int = 0
    memory_limit: Size | None = None
    start_limit_s: Seconds = 600.0
    step_limit_s: Seconds = 300.0
    note: str = flag("note stored with the run", "TEXT", rare=True, default="")
    tag: str = flag("tag stored with the run", "TEXT", rare=True, default="")
    fault: Fault | None = None
    refused: str = ""
    data: str = flag("token file (default: synthetic tokens)", "NAME", rare=True, default="")
    settle: bool = False

    def __post_init__(self) -> None:
        check.name(tag=self.tag)
        check.whole(1, 2**24, gpus=self.gpus)
        check.whole(1, 10**7, steps=self.steps)
        check.whole(0, 10**7, warmup=self.warmup)
        check.whole(0, 2**63 - 1, seed=self.seed)
        check.positive(start_limit_s=self.start_limit_s, step_limit_s=self.step_limit_s)
        check.whole(1, 2**60, memory_limit=self.memory_limit)
        if self.layout.world != self.gpus and not self.refused:
            raise wrong_size(self.layout, self.gpus)

    @property
    def run_id(self) -> str:
        """Hash of what decides the result; fields added later at their default do not change it."""
        import hashlib
        import json

        plain = {k: v for k, v in codec.encode(self, sparse=True).items() if k not in _NOT_HASHED}
        plain["layout"] = codec.encode(self.layout)
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @classmethod
    def from_plain(cls, data: object, path: str = "") -> RunSpec:
        """A table in which `model` may be a name or a path, and dp may be left out."""
        if not isinstance(data, dict):
            raise UserError("must be a table with the fields of RunSpec", field=path, value=data)
        table, _ = words.tidied(nested(data))
        for name in table.keys() - codec.type_hints(RunSpec).keys():
            field, hint = f"{path}.{name}" if path else name, nearest(str(name), short_names())
            raise UserError("unknown field", field=field, hint=hint)
        if isinstance(table.get("model"), str):
            from fourfold.spec.catalog import model

            table["model"] = codec.encode(model(table["model"]))
        table.setdefault("settle", "warmup" not in table)
        table["layout"], table["gpus"] = _fill_dp(table.get("layout", {}), table.get("gpus"))
        policy = nested(data).get("policy")
        if isinstance(policy, dict) and words.is_hybrid(policy.get("sharding")):
            _must_have_copies(Layout.from_plain(table["layout"], "layout"))
        return codec.decode_fields(cls, table, path)


AnyRun = RunSpec | Mapping[str, Any]  # or its table


def run_of(run: AnyRun) -> RunSpec:
    """A run as it is, or that of a table, which must name its model."""
    if isinstance(run, RunSpec):
        return run
    if not isinstance(run, Mapping):
        rule = f"needs a RunSpec or a table of its fields, not a {type(run).__name__}"
        raise TypeError(
            f"{rule}; a RunSpec takes the layout, micro_batch and policy of a plan's row"
        )
    check.given("model" in run, "model", "'fourfold models' lists presets")
    return codec.load(RunSpec, dict(run))


def nested(table: Mapping[str, Any], own: Collection[str] = ()) -> dict[str, Any]:
    """Return a run's table with each flat field in the table that it belongs to.

    {'seq_len': 8192, 'tp': 2} -> {'batch': {'seq_len': 8192}, 'layout': {'tp': 2}}; fields named in
    `own` stay where they are.
    """
    paths = {name: path for name, path in short_names().items() if "." in path}
    flat = [name for name in table if name in paths and name not in own]
    result = {name: value for name, value in table.items() if name not in flat}
    for name in flat:
        head, value = paths[name].partition(".")[0], table[name]
        inner = result.get(head) or {}
        if isinstance(inner, Layout | Batch | Policy):
            inner = codec.encode(inner)
        if isinstance(inner, str):
            hint = f"write layout = '{inner} {name}{value}'"
            raise UserError(
                f"does not go beside layout = '{inner}'", field=name, value=value, hint=hint
            )
        if not isinstance(inner, Mapping):
            return dict(table)  # what is no table has a reader that refuses it
        stated = inner.get(name)
        if None not in (stated, value) and stated != value:
            rule, hint = f"contradicts {paths[name]} = {stated}", "omit one of them"
            raise UserError(rule, field=name, value=value, hint=hint)
        result[head] = {**inner, name: stated if value is None else value}
    return result


def put_layout(table: Mapping[str, Any], text: str, *, replaces: bool = False) -> dict[str, Any]:
    """Return a run's table with the layout of a text, which may add a sharding and any fields:
    'pp4 dp16 tp8 zero1 batch.micro_batch=2'. Only one that `replaces` takes a layout's place."""
    if "layout" in table and not replaces:
        rule, hint = "does not go with another layout", "omit --dp, --tp, --cp and --pp"
        raise UserError(rule, field="--layout", value=text, hint=hint)
    result = {name: dict(v) if isinstance(v, Mapping) else v for name, v in table.items()}
    axes = []
    for word in text.split():
        if word in SHARDINGS:
            codec.put(result, "policy.sharding", word)
        elif "=" in word:
            path, _, value = word.partition("=")
            codec.put(result, path, texts.toml_value(value))
        else:
            axes.append(word)
    if axes:
        result["layout"] = " ".join(axes)
    return result


@functools.cache
def short_names() -> Mapping[str, str]:
    """A field's own name -> its path in a run's table; a run's own fields come first."""
    names = {field.name: f"policy.{field.name}" for field in fields(Policy)}
    names |= {field.name: f"batch.{field.name}" for field in fields(Batch)}
    names |= {axis: f"layout.{axis}" for axis in (*AXES, *EXPERT_AXES, "order")}
    return names | {field.name: field.name for field in fields(RunSpec)}


def _must_have_copies(layout: Layout) -> None:
    if layout.replicate == 1:
        dp = layout.shard
        half = f"2x{dp // 2}" if dp > 2 and dp % 2 == 0 else "2x4"
        hint = f"--dp {half} gives 2 replicas, each sharded over {half[2:]} ranks"
        rule = "needs the number of replicas"
        raise UserError(rule, field="policy.sharding", value="hsdp", hint=hint)


def names_dp(layout: object) -> bool:
    """Whether a layout, as text or as a table, says what dp is."""
    if isinstance(layout, dict):
        return bool({"dp", "shard", "replicate"} & layout.keys())
    return isinstance(layout, str) and "dp" in layout.lower()


def _fill_dp(layout: object, gpus: object) -> tuple[object, object]:
    """dp is what tp, cp and pp leave of `gpus`; without `gpus`, the layout says how many."""
    parsed = Layout.from_plain(layout, "layout")
    if gpus is None:
        return parsed.to_plain(), parsed.world
    if not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1:
        raise UserError("must be a whole number from 1", field="gpus", value=gpus)
    if not names_dp(layout):
        parsed = fill_dp(parsed, gpus)
    return parsed.to_plain(), gpus


def gpu_counts_near(gpus: int, used: int) -> str:
    """The multiples of `used` around `gpus`: '3 or 6'."""
    below = gpus - gpus % used
    return f"{below} or {below + used}" if below else str(used)


def wrong_size(layout: Layout, gpus: int) -> LayoutSizeError:
    """What to say of a layout that does not use all `gpus`."""
    used = layout.pp * layout.cp * layout.tp
    rule = f"uses {layout.world} of {counted(gpus, 'GPU')}"
    if layout.world > gpus:
        rule = f"needs {counted(layout.world, 'GPU')}, but there are {gpus}"
    hint = f"use {gpu_counts_near(gpus, used)} GPUs"
    if gpus % used == 0:
        hint = f"omit dp and it becomes {gpus // used}"
    return LayoutSizeError(rule, field="layout", hint=hint)


def fill_dp(layout: Layout, gpus: int) -> Layout:
    """The layout with dp chosen so that it uses all `gpus`."""
    used = layout.pp * layout.cp * layout.tp
    if gpus % used:
        rule = f"is not divisible by pp x cp x tp = {used}"
        hint = f"use {gpu_counts_near(gpus, used)} GPUs"
        raise LayoutSizeError(rule, field="gpus", value=gpus, hint=hint)
    return replace(layout, replicate=1, shard=gpus // used)


CHOSEN = (
    *SIZES,
    *EXPERT_AXES,
    "cp_kind",
    "virtual_stages",
    "schedule",
    "zero",
    "recompute",
    "micro_batch",
)


def chosen(layout: Layout, batch: Batch, policy: Policy) -> dict[str, int]:
    """The fields of CHOSEN as whole numbers; a micro batch of 0 ('auto') is taken as 1."""
    return {name: getattr(layout, name) for name in (*SIZES, *EXPERT_AXES)} | {
        "cp_kind": CP_KINDS.index(policy.cp_kind),
        "virtual_stages": policy.virtual_stages,
        "schedule": SCHEDULES.index(policy.schedule),
        "zero": policy.zero,
        "recompute": RECOMPUTE_KINDS.index(policy.recompute_kind),
        "micro_batch": max(1, batch.micro_batch),
    }


def chosen_layout(points: Mapping[str, Any], i: int) -> Layout:
    """The layout of one of many points."""
    sizes: dict[str, Any] = {name: int(points[name][i]) for name in (*SIZES, *EXPERT_AXES)}
    return Layout(**sizes)


def chosen_policy(policy: Policy, points: Mapping[str, Any], i: int) -> Policy:
    """A policy with what one of many points says."""
    kind = RECOMPUTE_KINDS[int(points["recompute"][i])]
    return replace(
        policy,
        sharding=SHARDINGS[int(points["zero"][i])],
        cp_kind=CP_KINDS[int(points["cp_kind"][i])],
        schedule=SCHEDULES[int(points["schedule"][i])],
        virtual_stages=int(points["virtual_stages"][i]),
        recompute=policy.recompute if kind in NUMBERED_RECOMPUTE else kind,
    )


def running_schedule(schedule: Schedule, virtual_stages: int) -> Schedule:
    """The order that really runs: virtual stages loop, zero-bubble with them stays zero-bubble, and
    interleaving without them is 1F1B."""
    if schedule == "zero-bubble":
        return schedule
    if virtual_stages > 1:
        return "interleaved"
    return "1f1b" if schedule == "interleaved" else schedule
