"""A step on this device beside what no step can avoid: its GEMMs, its attention, its bytes.

python scripts/floor.py SPEC.toml [--picture FILE.png]

SPEC.toml is a run of one GPU, as 'fourfold bench --spec' reads it. The step is run and, in the same
process, a loop of its GEMMs and attention calls, mixed with copies of the bytes that cannot be
avoided, until the device is as hot as in a long run. Prints both by part, and their ratio.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fourfold.cost.columns import Columns
from fourfold.cost.kinds import DENSE
from fourfold.cost.ops.ends import embedding, head, update
from fourfold.cost.ops.layer import decoder_layer
from fourfold.cost.ops.op import Op, of_one
from fourfold.launch.permit import gpu_count
from fourfold.result.one_rank import OneRankResult, micro_s
from fourfold.search.legal import require_legal
from fourfold.show.one_rank import name_of
from fourfold.show.pictures import COLOURS, content, empty_figure
from fourfold.spec import texts
from fourfold.text_table import render
from fourfold.verbs.bench import described
from fourfold.verbs.one_rank import StagePlanner, measure_ranks
from fourfold.verbs.run_requests import OneRankRequest

# Enough for a GPU to be as hot as in a long run.
WARMUP, STEPS, HOT_S, HOT_CPU_S = 8, 10, 6.0, 1.0


@dataclass(frozen=True, slots=True)
class StepPart:
    """Seconds of a step by kind of work. `limit_s`: what cannot be avoided; `engine_s`: taken."""

    name: str
    limit_s: float
    engine_s: float

    @property
    def gap_s(self) -> float:
        return self.engine_s - self.limit_s


def step_parts(result: OneRankResult) -> list[StepPart]:
    """Return the parts of a rank whose floor was measured. Recomputing is work that could be
    avoided; the last part is what the watched kernels leave of the step."""
    floor, n = result.floor, result.micro_batches
    assert floor is not None
    kernel_s = _kernel_seconds(result)
    recomputed_s = n * (floor.again_products_s + floor.again_attention_s)
    products = kernel_s.get("matrix products", 0.0) - n * floor.again_products_s
    attention = kernel_s.get("attention", 0.0) - n * floor.again_attention_s
    update_s = result.phase("optimizer").seconds + result.phase("reduce").seconds
    rows = [
        StepPart("matrix products", n * floor.products_s, products),
        StepPart("attention", n * floor.attention_s, attention),
        StepPart("computed again", 0.0, recomputed_s),
        StepPart(
            "norms, element-wise, loss",
            n * floor.moved_bytes / floor.bytes_per_s,
            kernel_s.get("norms and element-wise", 0.0),
        ),
        StepPart("copies and casts", 0.0, kernel_s.get("copies and casts", 0.0)),
        StepPart("norm of gradients, update", floor.update_bytes / floor.bytes_per_s, update_s),
    ]
    rest = result.compute_s - sum(row.engine_s for row in rows)
    return [*rows, StepPart("waiting for the host, rest", 0.0, rest)]


def _kernel_seconds(result: OneRankResult) -> dict[str, float]:
    """Return seconds of a step by kind of kernel. Small operators of a CPU take longer while they
    are watched: then their shares are those of the micro batch that was not."""
    micro_batch_s = {part.name: part.seconds for part in result.parts if part.name != "fills"}
    scale = min(1.0, micro_s(result) / (sum(micro_batch_s.values()) or 1.0))
    return {name: result.micro_batches * scale * s for name, s in micro_batch_s.items()}


def least_bytes(c: Columns) -> tuple[float, float, float, float]:
    """Return the bytes that cannot be avoided besides GEMMs and attention, of the one run in `c`:
    of a micro batch in a layer, in the first and the last end; of the update, an element of this
    rank's own weights. Of experts' rows a rank alone has as many as it sends."""
    c = replace(c, our_kernels=np.ones_like(c.our_kernels), imbalance=np.zeros_like(c.imbalance))

    def moved(ops: list[Op]) -> float:
        return of_one(sum(op.bytes for op in ops if op.kind in ("norm", "elementwise", "copy")))

    layer = [op for op in decoder_layer(c, c.micro) if op.kind != "copy"]
    ends = moved(embedding(c, c.micro)), moved(head(c, c.micro))
    return moved(layer), *ends, moved(update(c, c.shards, DENSE))


def report(name: str, result: OneRankResult, tokens: float) -> str:
    """Return the table of a step's parts. `tokens`: of a step, for each GPU."""
    rows = step_parts(result)
    limit_s, step_s = sum(row.limit_s for row in rows), sum(row.engine_s for row in rows)
    cells = [
        [
            row.name,
            f"{1e3 * row.limit_s:.3f}" if row.limit_s else "-",
            f"{1e3 * row.engine_s:.3f}",
            f"{1e3 * row.gap_s:+.3f}",
            f"{100 * row.gap_s / step_s:+.1f}%",
        ]
        for row in [*rows, StepPart("step", limit_s, step_s)]
    ]
    heads = ["ms per step", "unavoidable", "engine", "gap", "of the step"]
    speed = f"{tokens / step_s:,.0f} of at most {tokens / limit_s:,.0f} tokens/s per GPU"
    return (
        f"{name}, {result.device}, torch {result.torch}\n{render(heads, cells, 'md')}\n"
        f"{speed}: {100 * limit_s / step_s:.1f}% of the limit"
    )


def picture(titled: Sequence[tuple[str, Sequence[StepPart]]], path: str) -> bytes:
    """Two bars for each step: what cannot be avoided, and what it took."""
    figure = empty_figure(path, 9.0, 1.4 + 1.1 * len(titled))
    axes = figure.subplots()
    names: list[str] = []
    for title, rows in titled:
        for what, seconds in (
            ("limit", [r.limit_s for r in rows]),
            ("", [r.engine_s for r in rows]),
        ):
            place, left = len(names), 0.0
            names.append(f"{title} {what}".strip())
            for row, value, colour in zip(rows, seconds, COLOURS, strict=True):
                width = max(0.0, 1e3 * value)
                label = row.name if place == 0 else "_"
                axes.barh(place, width, left=left, color=colour, label=label)
                left += width
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return content(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec", help="SPEC.toml, a run of one GPU")
    parser.add_argument("--picture", help="FILE.png or .svg: bars by part")
    args = parser.parse_args()
    table = {"steps": STEPS, "warmup": WARMUP, **texts.read(args.spec, field="spec")}
    spec = described(table, ranks=1)
    require_legal(spec)
    request = OneRankRequest()
    avoidable = least_bytes(StagePlanner(request, spec).columns)
    options = [
        ("ranks", "0"),
        ("least", " ".join(map(str, avoidable))),
        ("hot_s", f"{HOT_S if gpu_count() else HOT_CPU_S:g}"),
    ]
    ((run, result),) = measure_ranks([spec], options, request)
    if result is None:
        raise SystemExit(f"{run.outcome}: {run.failure.said if run.failure else ''}")
    print(report(name_of(spec), result, spec.batch.tokens / spec.gpus))
    if args.picture:
        Path(args.picture).write_bytes(picture([(name_of(spec), step_parts(result))], args.picture))


if __name__ == "__main__":
    main()
