"""A cell of the matrix: a layout and options of it as words, such as 'pp2 dp2 tp2 sp tied'."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

# Degrees; dp2x4 is two replicas of four shards. etp 0: as the engine has it by default.
DEGREES = ("pp", "dp", "cp", "tp", "ep", "etp")
# Ways to keep the state of a step over data-parallel ranks.
SHARDED = ("zero1", "zero2", "zero3", "fsdp")
OPTIONS = {
    "sp": "sequence parallelism with tp",
    "interleaved": "two virtual stages on every pipeline rank",
    "zero1": "optimizer states sharded",
    "zero2": "and gradients",
    "zero3": "and parameters",
    "fsdp": "torch's fully sharded data parallelism",
    "overlap": "gradients reduced while the backward pass runs",
    "experts": "a mixture of four experts, two for each token",
    "allgather": "tokens gathered, not exchanged, between expert ranks",
    "tied": "embedding and head share weights",
    "sinks": "a learned logit per head in the softmax",
    "recompute": "activations computed again in the backward pass",
    "accumulate": "two micro batches on every rank",
    "uneven": "ranks with very different numbers of targets",
    "per-micro": "the engine's own mean of every micro batch",
    "cp-tokens": "targets counted over context-parallel ranks before they reach the engine",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    pp: int = 1
    replicas: int = 1
    shards: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 0
    options: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Cell:
        """ValueError says which word is wrong and what may stand there."""
        sizes: dict[str, int] = {}
        options: set[str] = set()
        for word in text.replace(",", " ").split():
            word = {"v2": "interleaved"}.get(word, word)  # as plans print it
            found = re.fullmatch(r"([a-z]+)([1-9]\d{0,3})(?:x([1-9]\d{0,3}))?", word)
            if word in OPTIONS and word not in options:
                options.add(word)
            elif found and found[1] in DEGREES and (found[3] is None or found[1] == "dp"):
                names = {"dp": ("replicas", "shards")}.get(found[1], (found[1],))
                if names[0] in sizes:
                    raise ValueError(f"names {found[1]} twice")
                sizes |= dict(zip(names, map(int, filter(None, found.groups()[1:])), strict=False))
            else:
                known = ", ".join((*(f"{axis}N" for axis in DEGREES), *OPTIONS))
                raise ValueError(f"has the word '{word}'; each must be one of {known}, once")
        if "replicas" in sizes and "shards" not in sizes and options & {*SHARDED}:
            sizes["shards"] = sizes.pop("replicas")  # what shards shards all of dp
        return cls(**sizes, options=frozenset(options))

    def __str__(self) -> str:
        both = f"{self.replicas}x{self.shards}"
        dp = both if self.replicas > 1 and self.shards > 1 else str(self.dp)
        sizes = {"pp": self.pp, "dp": dp, "cp": self.cp, "tp": self.tp, "ep": self.ep}
        words = [f"{axis}{size}" for axis, size in sizes.items() if str(size) != "1"]
        words += [f"etp{self.etp}"] if self.etp else []
        return " ".join(words + [word for word in OPTIONS if word in self.options]) or "one rank"

    @property
    def dp(self) -> int:
        return self.replicas * self.shards

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def virtual(self) -> int:
        return 2 if "interleaved" in self.options else 1

    def has(self, *words: str) -> bool:
        return bool(self.options & {*words})

    def alone(self) -> Cell:
        """One rank of the same model and batch: what an engine must get right before it is said
        to be wrong elsewhere."""
        about_the_model = {"experts", "tied", "sinks", "recompute", "uneven", "per-micro"}
        return Cell(options=self.options & about_the_model)

    def only(self, axis: str) -> Cell:
        """The smallest cell that still has `axis`."""
        return replace(self.alone(), **{axis: getattr(self, axis)})

    def illegal(self) -> str:
        """What no engine could run."""
        inner = self.dp * self.cp * self.tp
        width = self.ep * max(1, self.etp)
        rules = {
            "sp needs tp": self.has("sp") and self.tp == 1,
            "interleaved needs pp": self.has("interleaved") and self.pp == 1,
            "ep, etp and allgather need experts": not self.has("experts")
            and (self.ep > 1 or self.etp > 0 or self.has("allgather")),
            "allgather needs ep": self.has("allgather") and self.ep == 1,
            "ep x etp must divide dp x cp x tp": inner % width > 0,
            "sharding needs dp or cp": self.has(*SHARDED) and self.dp * self.cp == 1,
            "one way to shard at a time": len(self.options & {*SHARDED}) > 1,
            "overlap needs dp": self.has("overlap") and self.dp == 1,
            "cp-tokens needs cp": self.has("cp-tokens") and self.cp == 1,
        }
        return next((rule for rule, broken in rules.items() if broken), "")


def candidates(world: int) -> Iterator[Cell]:
    """Every cell of `world` ranks: degrees, then options that come with them. Engines refuse theirs
    of it."""
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    for pp, replicas, shards, cp, tp in itertools.product(sizes, repeat=5):
        if pp * replicas * shards * cp * tp != world:
            continue
        base = Cell(pp=pp, replicas=replicas, shards=shards, cp=cp, tp=tp)
        kinds = SHARDED if shards > 1 else ("", "overlap")
        models: list[tuple[set[str], dict[str, int]]] = [(set(), {}), ({"tied"}, {})]
        for ep, etp in itertools.product(sizes, (0, 1, 2)):
            models.append(({"experts"}, {"ep": ep, "etp": etp}))
        extras = ("", "sp", "interleaved", "recompute", "accumulate", "uneven", "per-micro")
        for kind, (model, degrees), extra in itertools.product(kinds, models, extras):
            options = frozenset(({kind, extra} | model) - {""})
            cell = replace(base, **degrees, options=options)
            if not cell.illegal():
                yield cell
