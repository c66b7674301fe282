"""What a cause is, and all that causes are looked for in.

Causes in kernels that take longer than they should, or need not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Literal

from fourfold.spec import catalog
from fourfold.traces import parts
from fourfold.traces.examined import Examined
from fourfold.traces.expect import Expected

# A loss below this share of the step is no news.
LEAST_SHARE = 0.015
# Norms, activations and casts, which a compiler fuses.
MEMORY_BOUND = (parts.ELEMENTWISE, parts.LOSS, parts.COPIES)
Sure = Literal["measured", "likely"]


@dataclass(frozen=True, slots=True)
class Cause:
    """`fix`: the word of --what-if that takes it away. `low` and `high`: seconds of a step that may
    be won. `sure`: 'measured' in the trace itself, or 'likely' by what is expected."""

    name: str
    seconds: float
    low: float
    high: float
    sure: Sure
    evidence: str
    remedy: str
    fix: str
    parts: tuple[str, ...] = ()


_CAUSES = catalog.data("causes.toml")
EXPOSED: dict[str, str] = _CAUSES["exposed"]  # remedy by axis


def cause(kind: str, seconds: float, evidence: str, *names: str, **words: object) -> Cause:
    """One of data/causes.toml, in these parts; `words` fill its places."""
    known = _CAUSES[kind]
    name, remedy, fix = (known[field].format(**words) for field in ("name", "remedy", "fix"))
    low, high = known["low"] * seconds, known["high"] * seconds
    return Cause(name, seconds, low, high, known["sure"], evidence, remedy, fix, names)


@dataclass(frozen=True, slots=True)
class TraceCase:
    """All that causes are looked for in. `fits_without`: bytes that the run would hold without
    recomputing, and those of the GPU; None: not known."""

    run: Examined
    expected: Expected
    fits_without: tuple[float, float] | None
    is_priced: bool

    @property
    def measured(self) -> dict[str, float]:
        return self.run.parts

    @property
    def step_s(self) -> float:
        return self.run.steps.seconds

    def spent(self, *names: str) -> float:
        return sum(self.measured.get(name, 0.0) for name in names)

    def over(self, *names: str) -> float:
        """Seconds beyond the middle of what is expected."""
        return self.spent(*names) - self.expected.mid(*names)

    def is_outside(self, *names: str) -> bool:
        mid, high = self.expected.mid(*names), self.expected.high(*names)
        return mid > 0.0 and self.spent(*names) > high


def ratio(case: TraceCase, names: tuple[str, ...]) -> float:
    mid = case.expected.mid(*names)
    return case.spent(*names) / mid if mid else 1.0


def _is_fp32(case: TraceCase) -> bool:
    return case.run.value("precision") == "fp32" and case.is_priced


def fp32(case: TraceCase) -> Iterator[Cause]:
    if not _is_fp32(case):
        return
    names = (*parts.PRODUCTS, parts.ATTENTION, *MEMORY_BOUND)
    over = case.over(*names)
    slow = ratio(case, parts.PRODUCTS)
    evidence = f"GEMMs in fp32 take {slow:.1f} times what they take in bf16"
    yield cause("fp32", over, evidence, *names)


def clock(case: TraceCase) -> Iterator[Cause]:
    """All products slow alike, and attention with them; what runs over memory is not."""
    if _is_fp32(case) or not case.is_outside(*parts.PRODUCTS):
        return
    ratios = {
        name: ratio(case, (name,))
        for name in (*parts.PRODUCTS, parts.ATTENTION)
        if case.expected.mid(name) > 0.02 * case.step_s
    }
    usual = median(ratios.values()) if ratios else 1.0
    alike = bool(ratios) and max(ratios.values()) < 1.35 * min(ratios.values())
    if not alike or min(ratios.values()) < 1.08:
        yield from _slow_products(case, ratios)
        return
    names = (*parts.PRODUCTS, parts.ATTENTION)
    over = case.over(*names)
    evidence = f"all GEMMs take {usual:.2f} times what is expected"
    if parts.ATTENTION in ratios:
        evidence += f", attention {ratios[parts.ATTENTION]:.2f}"
    yield cause("clock", over, evidence, *names)


def _slow_products(case: TraceCase, ratios: dict[str, float]) -> Iterator[Cause]:
    slow = [name for name, share in ratios.items() if share > 1.2 and name in parts.PRODUCTS]
    over = case.over(*slow) if slow else 0.0
    named = ", ".join(name.removeprefix("GEMM: ") for name in slow)
    odd = sorted(
        {
            size
            for at, one in case.run.placed.weighed.items()
            if case.run.placed.part[at] in slow
            for size in (one.ins, one.outs)
            if size % 64
        }
    )
    why = f"; {odd[0]:,} is no multiple of 64" if odd else ""
    evidence = f"{ratio(case, tuple(slow)):.2f} times what their shapes should take{why}"
    yield cause("products", over, evidence, *slow, named=named)


def attention(case: TraceCase) -> Iterator[Cause]:
    if _is_fp32(case) or not case.is_outside(parts.ATTENTION):
        return
    slow, products = ratio(case, (parts.ATTENTION,)), ratio(case, parts.PRODUCTS)
    if slow < 1.3 * products:
        return
    kind = case.run.value("attention", "unknown")
    evidence = f"{kind} takes {slow:.1f} times what this GPU's best kernel takes"
    yield cause("attention", case.over(parts.ATTENTION), evidence, parts.ATTENTION)


def uncompiled(case: TraceCase) -> Iterator[Cause]:
    if _is_fp32(case) or not case.is_outside(*MEMORY_BOUND):
        return
    over = case.over(*MEMORY_BOUND)
    spent = case.spent(*MEMORY_BOUND)
    evidence = f"norms, element-wise, loss and casts take {1e3 * spent:.0f} ms"
    if case.run.value("compile"):
        slow = spent / case.expected.mid(*MEMORY_BOUND)
        evidence += f", {slow:.1f} times what is expected"
        yield cause("fused", over, evidence, *MEMORY_BOUND)
        return
    evidence += ", each as kernels of their own: nothing is fused"
    yield cause("uncompiled", over, evidence, *MEMORY_BOUND)


def recompute(case: TraceCase) -> Iterator[Cause]:
    again = case.run.counts.again
    evidence = (
        f"{100 * again.share:.0f}% of forward GEMMs and {100 * again.attention_share:.0f}% of "
        "attention run twice"
    )
    kind, words = "recompute", {}
    if case.fits_without is not None:
        need, has = (size / 2**30 for size in case.fits_without)
        kind = "recompute-less" if need > 0.95 * has else "recompute-fits"
        words = {"need": f"{need:.0f}", "has": f"{has:.0f}"}
    yield cause(kind, again.total_s, evidence, *again.seconds, **words)
