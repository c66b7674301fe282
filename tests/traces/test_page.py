"""The page of a diagnosis: what it draws is what was measured."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import fourfold
from fourfold.page.diagnose import diagnosis_page, in_windows
from fourfold.traces import parts
from fourfold.traces.host import Stretch
from tests.traces import simulated
from tests.traces.simulated import Faults, Recorder, Shape

TITLE = re.compile(r"<title>(?P<part>[^<]*?): (?P<ms>[\d.]+) ms at [\d.]+ ms</title>")


def clipped(tensors: int = 3000) -> dict[str, Any]:
    """Steps that end as an uncompiled run's do: the embedding's gradient, then a kernel of a
    microsecond for each tensor to clip."""
    shape, r = Shape(layers=2, length=1024), Recorder(Faults(launch_s=1.5e-6))
    for step in range(3):
        begin = r.host_s
        simulated.run_micro_batch(r, shape)
        r.run("aten::embedding_dense_backward", "void sum_and_scatter", 2e-5)
        for _ in range(tensors):
            r.run("aten::_foreach_mul_", "void multi_tensor_apply_kernel", 1e-6)
        r.mark(f"ProfilerStep#{step}", begin)
        r.host_s = r.device_s
    return simulated.trace(shape) | {"traceEvents": r.events}


def diagnosed(folder: Path, trace: dict[str, Any]) -> Any:
    path = folder / "trace.json"
    path.write_text(json.dumps(trace))
    return fourfold.diagnose([str(path)])


@pytest.mark.parametrize("kind", ["clipped", "waiting", "experts"])
def test_timeline_has_the_seconds_of_every_part(kind: str, tmp_path: Path) -> None:
    answer = diagnosed(tmp_path, {
        "clipped": clipped,
        "waiting": lambda: simulated.slower(Shape(), loader_s=0.02, sync_s=5e-4),
        "experts": lambda: simulated.trace(Shape(experts=64, layers=8, length=512)),
    }[kind]())  # fmt: skip
    drawn: Counter[str] = Counter()
    html = diagnosis_page(answer)
    section = html.partition("One step on the device")[2]
    for match in TITLE.finditer(section.partition("</section>")[0]):
        names = [*answer.found.parts, *parts.IDLE]
        part = max((n for n in names if match["part"].startswith(n)), key=len)
        drawn[part] += float(match["ms"])
    measured = answer.found.times[-1].parts
    assert dict(drawn) == pytest.approx({n: 1e3 * s for n, s in measured.items()}, abs=0.05)
    assert sum(drawn.values()) == pytest.approx(1e3 * answer.found.times[-1].seconds, abs=0.05)

    data = json.loads(re.search(r'id="step">(.*?)</script>', html)[1])
    kept: Counter[str] = Counter()
    for place, nanoseconds, *_ in data["spans"]:
        kept[data["parts"][place]["name"]] += nanoseconds
    assert dict(kept) == pytest.approx({n: 1e9 * s for n, s in measured.items()}, abs=2000)


def test_page_of_a_long_step_keeps_fewer_spans(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("fourfold.page.diagnose._MAX_SPANS", 200)
    html = diagnosis_page(diagnosed(tmp_path, clipped()))
    data = json.loads(re.search(r'id="step">(.*?)</script>', html)[1])
    assert len(data["spans"]) <= 200


def test_windows_keep_long_spans_and_sum_short_ones() -> None:
    spans = [Stretch("a", 0, 5), Stretch("b", 5, 6), Stretch("c", 6, 8), Stretch("b", 8, 10)]
    spans += [Stretch("a", 10, 11)]
    assert list(in_windows(spans, 4)) == [
        Stretch("a", 0, 5), Stretch("b", 5, 8), Stretch("c", 8, 10), Stretch("a", 10, 11),
    ]  # fmt: skip
