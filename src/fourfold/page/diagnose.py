"""A diagnosis as one HTML file: measured and expected step as bars, a timeline of one step with its
gaps, ranks side by side. Nothing is fetched, and every text is escaped. A script draws the part of
the timeline that is zoomed into; without it the whole step stands there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

import fourfold
from fourfold.page.document import asset, data_block, grid_html, still_document
from fourfold.show.diagnose import best_line, part_cells
from fourfold.traces import parts
from fourfold.traces.examined import Examined
from fourfold.traces.host import Stretch
from fourfold.verbs.diagnosis import Diagnosis

# Kinds of parts share a colour (core.js has the same ones).
_COLORS = (
    ("GEMM", "#4477aa"),
    (parts.CONVOLUTION, "#7799cc"),
    (parts.ATTENTION, "#ee6677"),
    (parts.ELEMENTWISE, "#228833"),
    (parts.LOSS, "#c8a415"),
    (parts.OPTIMIZER, "#aa3377"),
    (parts.COPIES, "#3fa7c4"),
    (parts.ROUTING, "#6a5acd"),
    (parts.EMBEDDING, "#2aa198"),
    ("communication", "#e07b39"),
    ("computing", "#4477aa"),
    ("waiting", "#c0392b"),
    (parts.BETWEEN, "#c9ced6"),
)
_OTHER = "#8c8c8c"
_WIDE, _HIGH = 1200.0, 34.0
# Spans that the page keeps to be zoomed into; of longer steps neighbours are summed.
_MAX_SPANS = 100_000
# A window is about a pixel: what is shorter is drawn with its neighbours, by part.
_WINDOWS = 1200


class _Bar(NamedTuple):
    label: str
    pieces: Sequence[tuple[str, float]]


def diagnosis_page(answer: Diagnosis) -> str:
    settings = ", ".join(f"{one.name} {one.value}" for one in answer.settings.values())
    body = f"""<header><div class="head"><h1>{escape(answer.model)}</h1>
<p class="sub">{escape(settings)}</p></div></header><main>
<p class="answer">{escape(answer.verdict)}</p>
{f'<p class="note">{escape(best_line(answer.best))}</p>' if answer.best else ""}
{f'<p class="note">{escape(answer.scope)}</p>' if answer.scope and answer.causes else ""}
{_section("Measured and expected step", _bars(_steps(answer)) + _legend(answer))}
{_section("Causes and remedies", _causes(answer))}
{_section("One step on the device", _timeline(answer.found))}
{_ranks(answer)}
{_section("Parts", grid_html(part_cells(answer)))}
</main><footer><p class="note">fourfold {fourfold.__version__}; {escape(answer.basis)}</p></footer>
"""
    title = f"{answer.model}: {answer.verdict}"
    style = asset("page.css") + asset("diagnose.css")
    return still_document(title=title, style=style, body=body, script=asset("diagnose.js"))


def _section(title: str, inner: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2>{inner}</section>'


def _color(part: str) -> str:
    return next((color for word, color in _COLORS if part.startswith(word)), _OTHER)


def _steps(answer: Diagnosis) -> list[_Bar]:
    """Parts in one order, so that bars can be compared."""
    order = [row.name for row in answer.rows_of]
    measured = answer.found.parts
    bars = [_Bar("measured", [(name, measured.get(name, 0.0)) for name in order])]
    if answer.expected is not None and answer.expected_step is not None:
        bars.append(_Bar("expected", [(name, answer.expected.mid(name)) for name in order]))
    if answer.fixed is not None:
        bars.append(_Bar("with remedies", [("step", answer.fixed.step.mid)]))
    return bars


def _bars(bars: Sequence[_Bar]) -> str:
    longest = max(sum(s for _, s in bar.pieces) for bar in bars) or 1.0
    shapes = []
    for row, bar in enumerate(bars):
        x, y = 110.0, row * (_HIGH + 10.0)
        total = sum(s for _, s in bar.pieces)
        shapes.append(f'<text x="0" y="{y + 22:.0f}">{escape(bar.label)}</text>')
        for name, seconds in bar.pieces:
            wide = seconds / longest * (_WIDE - 220.0)
            shapes.append(_rect(x, y, wide, _HIGH, _color(name), f"{name}: {1e3 * seconds:.1f} ms"))
            x += wide
        shapes.append(f'<text x="{x + 8:.1f}" y="{y + 22:.0f}">{1e3 * total:.1f} ms</text>')
    return _svg(len(bars) * (_HIGH + 10.0), shapes, "seconds by part")


def _rect(x: float, y: float, wide: float, high: float, color: str, words: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(wide, 0.0):.2f}" height="{high:.0f}" '
        f'fill="{color}"><title>{escape(words)}</title></rect>'
    )


def _svg(high: float, shapes: Iterable[str], label: str) -> str:
    box = f'viewBox="0 0 {_WIDE:.0f} {high:.0f}" role="img" aria-label="{escape(label)}"'
    return f"<svg {box}>{''.join(shapes)}</svg>"


def _legend(answer: Diagnosis) -> str:
    seen = {row.name for row in answer.rows_of if row.seconds > 0.0005 * answer.step_s}
    kinds = [(word, color) for word, color in _COLORS if any(n.startswith(word) for n in seen)]
    marks = (
        f'<span><svg viewBox="0 0 12 12">{_rect(0, 0, 12, 12, color, word)}</svg>'
        f"{escape(word)}</span>"
        for word, color in kinds
    )
    return f'<p class="legend">{"".join(marks)}</p>'


def _causes(answer: Diagnosis) -> str:
    if not answer.causes:
        return f"<p>{escape(answer.verdict)}.</p>"
    items = (
        f"<li><b>{escape(cause.name)}</b>: {1e3 * cause.seconds:.1f} ms "
        f"({'measured' if cause.sure == 'measured' else 'likely'}). {escape(cause.evidence)}. "
        f"<b>Remedy:</b> {escape(cause.remedy)}.</li>"
        for cause in answer.causes
    )
    return f"<ol>{''.join(items)}</ol>"


def _timeline(found: Examined) -> str:
    """Of the last step: computation and communication above, waits below."""
    last = found.times[-1]
    spans = in_windows(last.spans, last.seconds / _WINDOWS)
    start = last.spans[0].start if last.spans else 0.0
    scale = _WIDE / max(last.seconds, 1e-12)
    shapes = []
    for span in spans:
        is_gap = span.part in parts.WAITS
        y = 44.0 if is_gap else 4.0
        words = f"{span.part} {span.what.removeprefix('-')}".strip()
        words += f": {1e3 * span.seconds:.3f} ms at {1e3 * (span.start - start):.2f} ms"
        wide = max(span.seconds * scale, 0.8 if is_gap else 0.0)
        shapes.append(_rect((span.start - start) * scale, y, wide, _HIGH, _color(span.part), words))
    ticks = []
    for tick in range(6):
        at = last.seconds * tick / 5
        anchor = "start" if tick == 0 else "end" if tick == 5 else "middle"
        text = f"{1e3 * at:.0f} ms"
        ticks.append(f'<text x="{at * scale:.0f}" y="98" text-anchor="{anchor}">{text}</text>')
    return f"""<p class="note">{_TIMELINE_NOTE}</p>
<p class="note" id="range" aria-live="polite"></p>
<svg id="timeline" tabindex="0" viewBox="0 0 {_WIDE:.0f} 104" role="application"
aria-label="timeline of one step; + and - zoom, arrow keys move">
<g id="spans">{"".join(shapes)}</g><g id="ticks">{"".join(ticks)}</g></svg>
{data_block("step", _step_data(last.spans, last.seconds))}"""


_TIMELINE_NOTE = (
    "Above: what runs. Below: gaps of more than 10 us, by what the device waits for. Zoom with the "
    "wheel or + and -, move by dragging or with arrow keys; a double click or 0 shows all."
)


def _step_data(spans: Sequence[Stretch], step_s: float) -> dict[str, Any]:
    """Spans in turn, each [place of its part, nanoseconds, what it waits for]."""
    if len(spans) > _MAX_SPANS:
        spans = list(in_windows(spans, 4.0 * step_s / _MAX_SPANS))
    names = list(dict.fromkeys(span.part for span in spans))
    places = {name: place for place, name in enumerate(names)}
    kinds = [{"name": n, "color": _color(n), "waits": n in parts.WAITS} for n in names]
    rows: list[list[Any]] = []
    for span in spans:
        row = [places[span.part], round(1e9 * (span.end - spans[0].start))]
        row[1] -= round(1e9 * (span.start - spans[0].start))  # ends meet beginnings
        rows.append([*row, span.what] if span.what not in ("", "-") else row)
    return {"parts": kinds, "spans": rows}


def in_windows(spans: Sequence[Stretch], window_s: float) -> Iterator[Stretch]:
    """Yield fewer spans with the same seconds of each part: successive ones shorter than a window
    become one of each part, the longest first, as soon as they fill a window."""
    small: list[Stretch] = []
    for span in spans:
        if span.seconds < window_s:
            small.append(span)
            if span.end - small[0].start < window_s:
                continue
        yield from _by_part(small)
        small = []
        if span.seconds >= window_s:
            yield span
    yield from _by_part(small)


def _by_part(spans: Sequence[Stretch]) -> Iterator[Stretch]:
    seconds: dict[str, float] = defaultdict(float)
    causes: dict[str, str] = {}
    for span in spans:
        seconds[span.part] += span.seconds
        causes.setdefault(span.part, span.what)
    start = spans[0].start if spans else 0.0
    for part in sorted(seconds, key=seconds.__getitem__, reverse=True):
        yield Stretch(part, start, start + seconds[part], causes[part])
        start += seconds[part]


def _ranks(answer: Diagnosis) -> str:
    if len(answer.ranks) < 2:
        return ""
    bars = []
    for row in answer.ranks:
        rest = max(0.0, row.step_s - row.busy_s - row.exposed_s - row.waiting_s)
        pieces = [("computing", row.busy_s), ("communication", row.exposed_s)]
        bars.append(_Bar(f"rank {row.rank}", [*pieces, ("waiting", row.waiting_s), ("rest", rest)]))
    return _section("Ranks: computing, exposed communication, waiting", _bars(bars))
