"""Pages of verdicts on other engines."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fourfold.show.table import Part, or_dash, table

if TYPE_CHECKING:
    from fourfold.conformance.verdicts import Verdict
    from fourfold.verbs.conformance import Conformance, Engines


def verdicts_page(answer: Conformance) -> list[Part]:
    shown = table(
        list(answer.verdicts),
        ("engine", lambda one: f"{one.engine} {one.version}".strip()),
        ("layout", lambda one: one.cell),
        ("verdict", lambda one: one.verdict),
        ("gradients", lambda one: or_dash(one.difference, ".1e")),
        ("norm", lambda one: or_dash(one.norm, ".1e")),
        ("parameters", lambda one: or_dash(one.parameters, ".1e")),
        ("stand-ins", lambda one: ", ".join(one.standins)),
    )
    lines: list[Part] = [line for one in answer.verdicts for line in said_of(one)]
    return [shown, "", *lines, _counted(answer)]


def said_of(one: Verdict) -> list[str]:
    """What a verdict says beyond its row."""
    head = f"{one.engine} {one.cell}: "
    lines = [f"{head}{line}" for line in one.signature]
    if one.hidden:
        lines.append(f"{head}losses and parameters hardly show it: Adam and clipping hide it")
    if one.resembles:
        lines.append(f"{head}resembles {one.resembles}")
    if one.convention:
        lines.append(f"{head}equal under its own convention ({one.convention})")
    return lines + ([f"{head}{one.why}"] if one.why else [])


def _counted(answer: Conformance) -> str:
    counts = Counter(one.verdict for one in answer.verdicts)
    words = ", ".join(f"{count} {word}" for word, count in counts.items())
    broken = f"; fault {answer.fault} planted" if answer.fault else ""
    return (
        f"{words}; largest differences relative to a plain fp64 decoder in one process, "
        f"3 clipped AdamW steps, {answer.device}{broken}"
    )


def engines_page(answer: Engines) -> list[Part]:
    shown = table(
        answer.releases,
        ("engine", lambda one: one["engine"]),
        ("version", lambda one: one["version"]),
        ("folder", lambda one: one["folder"]),
    )
    none = f"no releases in {answer.folder}; 'fourfold engines install NAME==VERSION' adds one"
    return [shown] if answer.releases else [none]
