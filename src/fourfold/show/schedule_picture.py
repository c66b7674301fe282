"""A pipeline's timeline as a page without scripts or an image: ranks as rows, one box an action."""

from __future__ import annotations

from html import escape
from math import floor, log10
from statistics import median
from typing import TYPE_CHECKING

from fourfold.cost.schedule import Action, ActionTime, Timeline
from fourfold.show.pictures import content, empty_figure, must_be_picture
from fourfold.spec import catalog

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".html", ".png")
_NAMES = {"F": "forward", "B": "backward", "I": "backward to input", "W": "weight gradients"}
_COLORS = {"F": (59, 110, 165), "B": (201, 111, 45), "I": (201, 111, 45), "W": (72, 140, 92)}
# Pixels of the page: a row, a box of middling length, the narrowest with a number, the widest page.
_ROW, _BOX, _NUMBERED, _WIDEST = 28, 20, 13, 24_000
_LEFT, _TOP = 60, 6
# Points of the image: a micro batch's number, the smallest that can be read; a digit is 0.6 wide.
_LARGEST, _SMALLEST, _DIGIT = 6.0, 3.8, 0.6


def picture(line: Timeline, path: str) -> bytes:
    is_page = must_be_picture(path, "timeline", SUFFIXES) == ".html"
    return _page(line).encode() if is_page else _image(line, path)


def title(line: Timeline) -> str:
    virtual = f", {line.virtual_stages} virtual stages a rank" if line.virtual_stages > 1 else ""
    return (
        f"{line.name}: {line.schedule}{virtual}, {line.micros} micro batches, "
        f"{_time(line.step_s)} of forward and backward, bubble {100 * line.bubble:.1f}%"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _shade(line: Timeline, action: Action) -> tuple[int, int, int]:
    """Later chunks of a rank are paler."""
    share = 0.6 * (action.chunk // line.stages) / line.virtual_stages
    red, green, blue = (round(c + (255 - c) * share) for c in _COLORS[action.kind])
    return red, green, blue


def _kinds(line: Timeline) -> list[str]:
    seen = {event.action.kind for event in line.events}
    return [kind for kind in _NAMES if kind in seen]


def _ticks(step_s: float) -> list[float]:
    power = 10.0 ** floor(log10(step_s / 10))
    unit = next(power * m for m in (1, 2, 5, 10) if power * m >= step_s / 10)
    return [unit * i for i in range(int(step_s / unit) + 1)]


def _page(line: Timeline) -> str:
    middling = median(event.end_s - event.start_s for event in line.events)
    wide = min(_WIDEST, max(880, round(line.step_s / middling * _BOX)))
    scale = wide / line.step_s
    below = _TOP + _ROW * line.stages
    boxes = "\n".join(_box(line, event, scale) for event in line.events)
    rows = "\n".join(
        f'<text x="4" y="{_TOP + _ROW * rank + 18}">rank {rank}</text>'
        for rank in range(line.stages)
    )
    axis = "\n".join(
        f'<line x1="{at * scale:.1f}" x2="{at * scale:.1f}" y1="{below}" y2="{below + 5}"/>'
        f'<text x="{at * scale + 2:.1f}" y="{below + 18}" class="tick">{_time(at)}</text>'
        for at in _ticks(line.step_s)
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(line.name)}: {line.schedule}</title>
<style>
{catalog.text("timeline.css")}</style></head><body>
<h1>{escape(title(line))}</h1>
<p class="key">{_key(line)}</p>
<div class="chart">
<svg width="{_LEFT}" height="{below + 26}">{rows}</svg>
<div class="scroll"><svg width="{wide + 60}" height="{below + 26}">
{boxes}
{axis}
</svg></div></div>
<details><summary>The order as text: kind, chunk, micro batch</summary><pre>{_listing(line)}</pre>
</details>
</body></html>
"""


def _box(line: Timeline, event: ActionTime, scale: float) -> str:
    action, rank = event.action, event.rank
    x, width = event.start_s * scale, (event.end_s - event.start_s) * scale
    y = _TOP + _ROW * rank
    red, green, blue = _shade(line, action)
    words = (
        f"rank {rank}: {_NAMES[action.kind]} of micro batch {action.micro}, chunk {action.chunk}; "
        f"{_time(event.start_s)} to {_time(event.end_s)}"
    )
    drawn = (
        f'<rect x="{x:.2f}" y="{y}" width="{max(0.4, width - 0.6):.2f}" height="{_ROW - 4}" '
        f'fill="rgb({red},{green},{blue})" data-rank="{rank}" '
        f'data-action="{action.kind} {action.chunk} {action.micro}"><title>{words}</title></rect>'
    )
    if width < _NUMBERED:
        return drawn
    ink = "#fff" if red + green + blue < 430 else "#222"
    return (
        f'{drawn}<text class="number" x="{x + width / 2:.2f}" y="{y + 16}" '
        f'style="fill:{ink}">{action.micro}</text>'
    )


def _key(line: Timeline) -> str:
    spans = []
    for kind in _kinds(line):
        for virtual in range(line.virtual_stages):
            red, green, blue = _shade(line, Action(kind, virtual * line.stages, 0))
            where = f", virtual stage {virtual}" if line.virtual_stages > 1 else ""
            spans.append(
                f'<span><i style="background:rgb({red},{green},{blue})"></i>'
                f"{_NAMES[kind]}{where}</span>"
            )
    return "".join(spans)


def _listing(line: Timeline) -> str:
    return "\n".join(
        f"rank {rank}: "
        + " ".join(f"{a.kind}{a.chunk}.{a.micro}" for a in (e.action for e in line.of_rank(rank)))
        for rank in range(line.stages)
    )


def _image(line: Timeline, path: str) -> bytes:
    middling = median(event.end_s - event.start_s for event in line.events)
    width = min(36.0, max(9.0, 0.2 * line.step_s / middling + 1.0))
    height = 0.34 * line.stages + 0.16 * line.virtual_stages + 1.1
    figure = empty_figure(path, width, height, "timeline")
    _draw(figure.subplots(), line, points_per_s=72 * (width - 0.8) / line.step_s)
    _add_key(figure, line)
    return content(figure, path)


def _draw(axes: Axes, line: Timeline, *, points_per_s: float) -> None:
    scale, unit = (1.0, "s") if line.step_s >= 1 else (1e3, "ms")
    for rank in range(line.stages):
        own = line.of_rank(rank)
        spans = [(e.start_s * scale, (e.end_s - e.start_s) * scale) for e in own]
        colors = [tuple(c / 255 for c in _shade(line, e.action)) for e in own]
        axes.broken_barh(
            spans, (rank - 0.42, 0.84), facecolors=colors, edgecolor="white", linewidth=0.4
        )
        for event, color in zip(own, colors, strict=True):
            number = str(event.action.micro)
            room = (event.end_s - event.start_s) * points_per_s - 1.2
            size = min(_LARGEST, room / (_DIGIT * len(number)))
            if size >= _SMALLEST:
                middle = (event.start_s + event.end_s) / 2 * scale
                ink = "white" if sum(color) < 1.7 else "black"
                axes.text(middle, rank, number, ha="center", va="center", fontsize=size, color=ink)
    axes.set_yticks(range(line.stages), [f"rank {rank}" for rank in range(line.stages)])
    axes.invert_yaxis()
    axes.set_xlim(0, line.step_s * scale)
    axes.set_xlabel(unit)
    axes.set_title(title(line), fontsize=9, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def _add_key(figure: Figure, line: Timeline) -> None:
    """Below the axes: a column for each kind, a row for each virtual stage."""
    from matplotlib.patches import Patch

    shown = [(kind, v) for kind in _kinds(line) for v in range(line.virtual_stages)]
    keys = [_shade(line, Action(kind, v * line.stages, 0)) for kind, v in shown]
    names = [
        _NAMES[kind] + (f", virtual stage {v}" if line.virtual_stages > 1 else "")
        for kind, v in shown
    ]
    handles = [
        Patch(color=(key[0] / 255, key[1] / 255, key[2] / 255), label=name)
        for key, name in zip(keys, names, strict=True)
    ]
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=len(_kinds(line)),
        frameon=False,
        fontsize=7,
    )
