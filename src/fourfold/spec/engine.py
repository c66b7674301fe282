"""What an engine is: what it can run, what it does when nobody says, whose settings are written for
it and how its logs are read. Each lies in a folder of `engines`. And what runs were measured as."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, get_args

from fourfold.errors import UserError
from fourfold.spec import codec, words
from fourfold.spec.layout import EXPERT_AXES, MODEL_AXES
from fourfold.spec.model import FAMILIES
from fourfold.spec.texts import DATA, data
from fourfold.spec.words import (
    CP_KINDS,
    DTYPE_BYTES,
    PRECISIONS,
    RECOMPUTE_KINDS,
    SCHEDULES,
    plain_word,
)

T = TypeVar("T", "EngineRules", "EngineHabits")
# A folder an engine: what it can run and its habits in engine.toml, which this file explains.
FOLDER = os.path.join(os.path.dirname(DATA), "backends")
_DISPATCHERS, _OVERLAPS = get_args(words.Dispatcher)[1:], get_args(words.OverlapKind)[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """Limits of one engine; the defaults are those of an engine that can do everything.

    `batch_rule`: "any" micro batch; "shares": equal shares for all dp ranks, any micro batch in
    them; "whole": dp x micro batch divides the global batch.
    """

    name: str  # as refusals have it
    axes: tuple[str, ...] = (*MODEL_AXES, *EXPERT_AXES)
    cp_kinds: tuple[str, ...] = CP_KINDS
    schedules: tuple[str, ...] = SCHEDULES
    recompute: tuple[str, ...] = RECOMPUTE_KINDS
    precisions: tuple[str, ...] = PRECISIONS
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    pipeline_zeros: tuple[int, ...] = (0, 1, 2, 3)
    hybrid: bool = True
    families: tuple[str, ...] = FAMILIES
    batch_rule: str = "any"
    whole_families: tuple[str, ...] = ()  # of those, which it does not cut into stages
    gathers_tp: bool = True  # tensor parallelism runs without sequence parallelism too
    copies_kv_heads: bool = True
    fills_pipeline: bool = False  # needs as many micro batches as stages
    whole_rounds: bool = False  # interleaving needs micro batches in multiples of the stages
    equal_rounds: bool = False  # interleaving needs rounds of equal size, of stages or more
    # Which stages it can cut: "any"; "even": equal ones, but for fewer layers, or none, at both
    # ends; "filled" to a number of layers a stage, in order, none left empty.
    stage_rule: str = "any"
    even_pieces: bool = False  # early and late pieces of the sequence also under Ulysses
    # Of those kinds, what attention in windows has, and with sinks.
    window_cp_kinds: tuple[str, ...] = CP_KINDS
    sink_cp_kinds: tuple[str, ...] = CP_KINDS
    ulysses_copies_kv: bool = True  # KV heads are repeated until Ulysses can deal them
    plain_dp_alone: bool = False  # zero0 runs without any other axis only
    ties_stages: bool = True  # tied embeddings may lie on two stages
    loops_zero_bubble: bool = False  # zero-bubble needs virtual stages
    compiles_zero_bubble: bool = True
    fp8_multiple: int = 1  # of which sides of a product in fp8 must be a multiple
    scalings: tuple[str, ...] = ("tensor", "delayed", "block", "mx", "row")  # of products in fp8
    splits_fp8: bool = True  # zero-bubble's divided backward in fp8
    dispatchers: tuple[str, ...] = _DISPATCHERS
    latent_dispatchers: tuple[str, ...] = ()  # of these, those of latent attention alone
    overlaps: tuple[str, ...] = _OVERLAPS  # of an exchange of tokens, data/overlaps.toml
    # combined-1f1b needs ep, virtual stages in a pipeline, and layers that are not recomputed.
    overlap_in_1f1b: bool = False
    not_with_experts: tuple[str, ...] = ()  # precisions and kinds of recompute
    not_with_delayed: tuple[str, ...] = ()  # kinds of recompute, in fp8 with delayed scaling
    # Experts are cut over tp where ep is 1, and never where it is more.
    experts_follow_tp: bool = False
    whole_biased_experts: bool = False  # biases of experts are not cut: etp is 1 with them
    predicts_further: bool = False  # trains layers that predict further tokens (mtp)
    whole_graphs: bool = True  # records the micro batches of a step as one CUDA graph
    # ... of one length, and with experts whose rows are never counted by the host.
    static_graphs: bool = False
    one_gradient_buffer: bool = False  # gradients are summed and sent in one dtype
    is_ours: bool = False  # src/fourfold/engine, whose gaps are rules too


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHabits:
    """What an engine does when nobody says. Gradients travel in `grad_bytes` and are held in
    `acc_bytes`, per element."""

    grad_bytes: float = 4.0
    acc_bytes: float = 4.0
    sharding: str = "zero1"
    recompute: str = "none"
    sequence_parallel: bool = True
    overlap_dp: bool = False
    overlap_tp: bool = False
    balanced: bool = False
    cuts_by_cost: bool = False  # stages as our engine cuts them (count/params.py)
    even_stages: bool = False  # equal stages, only the first and the last may hold fewer layers
    split_loss: bool = True
    # The vocabulary is padded to a multiple of this on each tensor rank; 0: it is not.
    vocab_multiple: int = 0
    eager: bool = False
    # Where its layers are not compiled, norms are operators of their own too, as activation, rope
    # and residual are; torch has a kernel for them, models of transformers do not call it.
    plain_norms: bool = False
    compiled: bool = False
    compiles: bool = False  # in new runs, but for a schedule that splits the backward pass
    compiles_loss: bool = False  # where it compiles at all
    # In fp8: bytes of an input that a product keeps for its backward (Transformer Engine keeps the
    # cast, torchao the original), and of a weight that ZeRO-3 gathers.
    fp8_saved_bytes: float = 1.0
    fp8_gather_bytes: float = 2.0
    # Its tensors are those of torch's FSDP2, counted one by one (memory/moments.py); the memory it
    # prints is what the allocator reserved, with FSDP so much more than they take
    # (cost/memory/unseen.py). `autocast`: without FSDP, weights are cast for each use.
    counted: bool = False
    reserved: float = 1.0
    autocast: bool = False
    reduces_in_fp32: bool = False  # gradients of a pure precision too
    selective_share: float = 1.0  # of what a layer keeps, under "selective" by operators
    whole_layers: float = 0.0  # share of layers that "selective" recomputes whole; 0 = core only
    selective_mlp: bool = False  # "selective" recomputes the MLP, not the attention core
    shard_group: int = 0  # ZeRO-3 group on large jobs; 0 = all data-parallel ranks
    reports_rank0: bool = False  # printed memory is rank 0's, not the fullest rank's
    reports_last: bool = False  # ... or the last rank's
    dispatcher: str = "alltoall"  # of experts on other ranks, where a policy leaves it open
    host_dispatcher: str = ""  # ... where runs were published whose NVLink domains are hosts
    overlap: str = "combined-1f1b"  # how it hides their exchange, where it does
    tests_vocab: int = 0  # of the tests that an engine publishes, where they do not say
    graphs_experts: bool = False  # parts of layers with experts are CUDA graphs
    fuses_softmax: bool = False  # in what it calls unfused attention (Transformer Engine)
    narrow_moments: tuple[str, ...] = ()  # families whose moments its recipes hold in bf16
    flash1: bool = False  # attention by FlashAttention 1, in Triton
    flash2: bool = False  # attention by FlashAttention 2 on every GPU, not by the GPU's fastest
    attention: str = ""  # the kernel of its measured runs, where newer releases have another

    def gradient_bytes(self, compute: str) -> tuple[float, float]:
        """(on the wire, held) of a gradient, where products are computed in this format: fp16 is
        summed as it is, and what is wider than 16 bits stays so."""
        if DTYPE_BYTES[compute] > 2.0:
            return DTYPE_BYTES[compute], DTYPE_BYTES[compute]
        return self.grad_bytes, 2.0 if compute == "fp16" else self.acc_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsExport:
    """How settings are written for an engine."""

    predicted_as: str = ""  # the engine whose numbers are the exported run's
    # The module of its folder that writes them; '': ours, which takes the run's own file.
    writer: str = ""
    package: str = ""  # its distribution's name
    title: str = ""  # what people call it, where that is not its name
    before: str = ""  # the newer release, which comes first where both can run a layout
    on_demand: bool = False  # named only where somebody asks for it
    user_script: bool = False  # the model and the loop are a script of the user's
    # Names of flags that the newest release has renamed, as they were.
    older_flags: dict[str, str] = field(default_factory=dict)
    plain_queries: bool = True  # latent attention leaves queries without a norm where it has none


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAdapter:
    """What counts a rank of an engine for `dryrun --engine`, and of which of its runs."""

    file: str  # of its folder
    axes: tuple[str, ...]
    precisions: tuple[str, ...]
    shardings: tuple[str, ...]  # over `min_shards` ranks or more
    min_shards: int = 2
    recompute: tuple[str, ...] = ()  # empty: all that the engine's export has
    # Its models are those of transformers: built from a config.json, not from an export, by every
    # release from this one on. Empty: the release of the export counts, and no other one.
    transformers_since: str = ""
    experts: bool = False
    compiled: bool = False
    config_option: str = ""  # that names a file of its own settings; '': they are not read
    config_fields: tuple[str, ...] = ()  # of a run beside such a file, which decides them
    # Options that an export sets and nobody asked for: a dry run leaves them as the engine has
    # them. Those of `sharding` stay where another sharding is asked for than the engine's own.
    left: tuple[str, ...] = ()
    left_of_sharding: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAdapter:
    """What speaks to an engine for `verify --engine`."""

    package: str  # the engine's distribution
    file: str = "adapter"  # of its folder
    below: dict[str, str] = field(default_factory=dict)  # files for releases before a version
    imports: tuple[str, ...] = ()  # distributions that it needs without saying so
    memory: dict[str, MemoryAdapter] = field(default_factory=dict)  # by the export of a release

    def file_of(self, version: str) -> str:
        """Return the file of the engine's folder that speaks to a release."""
        older = (
            file for end, file in self.below.items() if version_key(version) < version_key(end)
        )
        return next(older, self.file)


def version_key(version: str) -> tuple[int, ...]:
    """Return what releases are sorted by."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A training engine by one of its names."""

    name: str
    folder: str  # of `engines`
    rules: EngineRules
    habits: EngineHabits
    release: str = ""  # that settings are written for; '': an engine as it was measured
    export: SettingsExport = field(default_factory=SettingsExport)
    reader: str = ""  # folder, module and class that read its logs
    runs_as: str = ""  # the engine that is exported for this name without a date
    family: str = ""  # of engines that run kernels at one pace; '': in none
    dated: Mapping[str, EngineHabits] = field(default_factory=dict)  # by year

    @property
    def is_ours(self) -> bool:
        return self.rules.is_ours

    @property
    def title(self) -> str:
        """What people call it."""
        return self.export.title or self.name


def tables_of(file: str) -> dict[str, dict[str, Any]]:
    """Return the tables of one file of every engine's folder that has it, by the folder's name."""
    paths = ((name, os.path.join(FOLDER, name, file)) for name in sorted(os.listdir(FOLDER)))
    return {name.replace("_", "-"): data(path) for name, path in paths if os.path.isfile(path)}


def _folder_of(name: str) -> str:
    """Return the folder of a name of `tables_of`: a Python package has no dashes."""
    return name.replace("-", "_")


GENERIC = "generic"  # no engine in particular
_LAST = 100
# In the order of lists.
_TABLES = dict(
    sorted(
        tables_of("engine.toml").items(),
        key=lambda named: (named[1].get("order", _LAST), named[0]),
    )
)
_NAMES = {
    name: (folder, table)
    for folder, own in _TABLES.items()
    for name, table in own.get("names", {}).items()
}


def _changed(base: T, table: Mapping[str, Any], path: str) -> T:
    """Return rules or habits with the fields of a table."""
    return codec.decode(type(base), codec.encode(base) | dict(table), path)


@functools.cache
def _rules(folder: str) -> EngineRules:
    own = _TABLES[folder].get("rules", GENERIC)
    return _rules(own) if isinstance(own, str) else _changed(EngineRules(name=folder), own, folder)


def _habits(table: Mapping[str, Any], base: EngineHabits, path: str) -> EngineHabits:
    """Return the habits of a table over `base`, or over those of the name it says it is `like`."""
    if "like" in table:
        base = _habits_of(table["like"])
    fields = {key: value for key, value in table.items() if key not in _OF_ENGINE}
    return _changed(base, fields, path)


_OF_ENGINE = ("like", "dated", "runs_as", "called", "family")


@functools.cache
def _habits_of(name: str) -> EngineHabits:
    return _habits(_NAMES[name][1], EngineHabits(), name)


def _engine(name: str) -> Engine:
    folder, table = _NAMES[name]
    habits, dated = _habits_of(name), table.get("dated", {})
    return Engine(
        name=name,
        folder=_folder_of(folder),
        rules=_rules(folder),
        habits=habits,
        reader=READERS.get(folder, ""),
        runs_as=table.get("runs_as", ""),
        family=table.get("family", _TABLES[folder].get("family", "")),
        dated={year: _habits(changes, habits, name) for year, changes in dated.items()},
    )


def _exported(folder: str, name: str, table: Mapping[str, Any]) -> Engine:
    """Return an engine that settings are written for, with what its release lacks."""
    fields = {key: value for key, value in table.items() if key not in ("release", "rules")}
    export = codec.decode(SettingsExport, fields, name)
    return replace(
        ENGINES[export.predicted_as],
        name=name,
        folder=_folder_of(folder),
        release=table.get("release", ""),
        rules=_changed(_rules(folder), table.get("rules", {}), name),
        export=export,
        reader=READERS.get(folder, ""),
    )


# Readers of logs, by their engine.
READERS: dict[str, str] = {
    name: f"{_folder_of(name)}.{own['reader']}" for name, own in _TABLES.items() if "reader" in own
}
# Patterns of what only one engine's traces have in names of groups, marks and operators.
TRACES: dict[str, str] = {name: own["trace"] for name, own in _TABLES.items() if "trace" in own}
# By the engine's distribution: its adapter, and the folder that it is in.
ADAPTERS: dict[str, tuple[str, EngineAdapter]] = {
    own["adapter"]["package"]: (
        os.path.join(FOLDER, _folder_of(name)),
        codec.decode(EngineAdapter, own["adapter"], name),
    )
    for name, own in _TABLES.items()
    if "adapter" in own
}
# Files with the command that `bench --engine` starts, by the engine whose settings it takes.
TEMPLATES: dict[str, str] = {
    own["export"]: os.path.join(FOLDER, _folder_of(name), "bench.toml")
    for name, own in tables_of("bench.toml").items()
}
# By name, without a date; the longest name that another begins with counts.
ENGINES: dict[str, Engine] = {name: _engine(name) for name in _NAMES}
EXPORTS: dict[str, Engine] = {
    name: _exported(folder, name, table)
    for folder, own in _TABLES.items()
    for name, table in own.get("exports", {}).items()
}
# What people call an engine, where that is another name.
_CALLED = {word: name for name, (_, own) in _NAMES.items() for word in own.get("called", ())}

_DATE = re.compile(r"-(?=20\d\d|v?\d\d?\.\d)")
_YEAR = re.compile(r"20\d\d|(?<=-)v?2\d(?=\.\d\d)")
_COMPILED = "-compile"
_EXPERTS = " with experts"


@dataclass(frozen=True)
class MeasuredAs:
    """What runs were measured as: an engine, the date or number of its release ('2024', '2022b',
    '26.04'; '' where it is not named), whether all of them were compiled, and whether their models
    have experts."""

    engine: str
    date: str = ""
    compiled: bool = False
    experts: bool = False

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def of(name: str) -> MeasuredAs:
        """Read the name of a stack: 'nemo-2024', 'megatron-bridge-26.04', 'fms-fsdp-2024-compile',
        'nemo with experts'."""
        named = name.removesuffix(_EXPERTS)
        release = named.removesuffix(_COMPILED)
        engine, *date = _DATE.split(release, maxsplit=1)
        return MeasuredAs(engine, *date, compiled=release != named, experts=named != name)

    def __str__(self) -> str:
        return self.text

    @functools.cached_property
    def text(self) -> str:
        """The name that `of` reads."""
        return self.stack + _EXPERTS * self.experts

    @functools.cached_property
    def stack(self) -> str:
        """The name of the engine alone."""
        dated = f"{self.engine}-{self.date}" if self.date else self.engine
        return dated + _COMPILED * self.compiled

    @functools.cached_property
    def year(self) -> int | None:
        return _year(f"-{self.date}")

    def released(self, release: str) -> MeasuredAs:
        """Return it with the year of its release, where that is named by date: 'megatron-bridge' of
        26.04 is of 2026. Other releases are not told apart."""
        released = _year(f"-{release.strip()}")
        if released is None or self.year == released:
            return self
        if self.year is not None:
            rule = f"contradicts the year of {self.stack}"
            raise UserError(rule, field="engine_release", value=release)
        return replace(self, date=f"{self.date}-{released}".removeprefix("-"))

    def with_experts(self) -> MeasuredAs:
        """Return what runs with experts are calibrated as: layers with experts are another program.
        Releases of an engine have few of them each, and differ by less than layouts do: they are
        one."""
        return MeasuredAs(self.engine, experts=True)

    def place(self, cluster: str) -> str:
        """Return where what such runs taught is kept: by cluster, or by site."""
        return site_of(cluster) if self.experts else cluster


def _year(text: str) -> int | None:
    """By a name, or by a release: 26.04 is of 2026."""
    year = _YEAR.search(text)
    return int(year[0][-2:]) + 2000 if year else None


def site_of(cluster: str) -> str:
    """'nvidia-gb200' -> 'nvidia': where runs with experts were measured. Machines of one site share
    what is learned of them: each has few models, which differ more than machines do."""
    return cluster.rpartition("-")[0] or cluster


def _matches(stack: str, name: str) -> bool:
    """'megatron-lm-2024' is a 'megatron-lm', 'megatron-deepspeed-2022b' one of 2022."""
    rest = stack.removeprefix(name)
    return rest != stack and rest[:1] in ("", "-")


def _known_name(engine: str) -> str:
    """Return the longest known name that an engine's begins with, else that stands in it between
    dashes: 'my-megatron' is a 'megatron'; '' where there is none."""
    begins = [name for name in ENGINES if _matches(engine, name)]
    holds = [name for name in ENGINES if f"-{name}-" in f"-{engine}-"]
    return max(begins or holds, key=len, default="")


@functools.lru_cache(maxsize=1024)
def engine_of(stack: str | MeasuredAs) -> Engine:
    """Return the known engine whose name that of a stack begins with or holds, with its habits at
    the stack's date; of none, no engine in particular. One that was measured compiled compiles."""
    measured = MeasuredAs.of(str(stack).lower())
    engine = ENGINES[_known_name(measured.engine) or GENERIC]
    is_dated = measured.engine.endswith(engine.name) and measured.year is not None
    habits = engine.dated.get(str(measured.year), engine.habits) if is_dated else engine.habits
    if measured.compiled:
        habits = replace(habits, compiled=True)
    return engine if habits is engine.habits else replace(engine, habits=habits)


# Of torch's engines those whose layers are compiled are a family of their own.
TORCH = "torch"


def family_of(measured: MeasuredAs) -> str:
    """Return the family of engines that run kernels at the pace of these runs: as the engine's
    folder has it; '' where there is no such engine."""
    engine = engine_of(measured)
    if engine.family != TORCH:
        return engine.family
    is_eager = measured.date.endswith("eager")
    compiles = engine.habits.compiled or engine.habits.compiles
    return f"compiled {TORCH}" if compiles and not is_eager else f"eager {TORCH}"


def is_known(stack: str) -> bool:
    return bool(_known_name(MeasuredAs.of(stack.lower()).engine))


@functools.lru_cache(maxsize=1024)
def spelt(stack: str) -> str:
    """An engine's name as it is here: 'Megatron_LM' is 'megatron-lm', and one that people call
    otherwise (`called` in its file: 'mcore') has its own."""
    name = plain_word(stack)
    return _CALLED.get(name, name)


def release_of(stack: str) -> str:
    """The engine of EXPORTS that a name without a year stands for; '': a measured engine."""
    name = spelt(stack)
    known = ENGINES.get(name)
    name = known.runs_as or name if known else name
    export = EXPORTS[name].export if name in EXPORTS else SettingsExport()
    return name if export.writer and not export.on_demand else ""
