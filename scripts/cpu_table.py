"""How far predictions of our engine on this host's cores are from what it measures.

python scripts/cpu_table.py [--quick] RUNS [ROW ...]

Measures the machine (`fourfold calibrate`), runs the rows with `fourfold bench` and measures the
machine again, since a neighbour changes both. Prints a table of seconds predicted by either profile
and measured, as Markdown, and by how much the profiles themselves differ. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from fourfold.result.profile import HardwareProfile
from fourfold.search.predict import predict
from fourfold.spec import catalog
from fourfold.spec.batch import Batch
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec
from fourfold.text_table import render
from fourfold.verbs.bench import bench
from fourfold.verbs.calibrate import calibrate
from fourfold.verbs.run_requests import BenchRequest, CalibrateRequest


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    spec: RunSpec


def row(name: str, hidden: int, tokens: int, layout: Layout, micros: int = 4, **policy: Any) -> Row:
    """Llama-like, of true width and few layers, in fp32."""
    tiny = catalog.model("llama-tiny")
    sizes = {"hidden": hidden, "ffn": 11 * hidden // 4, "heads": hidden // 64, "vocab": 8192}
    model = replace(tiny, name=f"llama-{hidden}", kv_heads=hidden // 128, **sizes)
    batch = Batch(seq_len=tokens, micro_batch=1, global_batch=micros * layout.dp)
    return Row(
        name,
        RunSpec(
            model=model,
            gpus=layout.world,
            layout=layout,
            batch=batch,
            policy=Policy(precision="fp32", **policy),
            device="cpu",
            steps=8,
        ),
    )


ROWS = (
    row("one rank", 512, 256, Layout()),
    row("one rank, full recompute", 512, 256, Layout(), recompute="full"),
    row("one rank, wide", 1024, 512, Layout(), micros=2),
    row("dp2 zero0", 512, 256, Layout(shard=2), sharding="zero0"),
    row("dp2 zero1", 512, 256, Layout(shard=2)),
    row("dp2 zero3", 512, 256, Layout(shard=2), sharding="zero3"),
    row("tp2", 512, 256, Layout(tp=2)),
    row("tp2, whole sequence", 1024, 128, Layout(tp=2), sequence_parallel=False),
    row("cp2", 512, 512, Layout(cp=2)),
    row("pp2", 512, 256, Layout(pp=2), micros=8),
    row("pp2, full recompute", 512, 256, Layout(pp=2), micros=8, recompute="full"),
    row("dp2 tp2", 512, 256, Layout(shard=2, tp=2)),
    row("pp2 dp2", 512, 256, Layout(pp=2, shard=2), micros=8),
)


def profile_of(quick: bool) -> HardwareProfile:
    return calibrate(CalibrateRequest(quick=quick, device="cpu")).profile


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", help="run store")
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(one.name for one in ROWS)}")
    parser.add_argument("--quick", action="store_true", help="calibrate in 20 seconds")
    asked = parser.parse_args()
    rows = [one for one in ROWS if not asked.rows or one.name in asked.rows]
    before = profile_of(asked.quick)
    reports = [bench(one.spec, BenchRequest(runs=asked.runs)).runs[0] for one in rows]
    after = profile_of(asked.quick)
    cells, errors = [], []
    for one, report in zip(rows, reports, strict=True):
        said = [predict([one.spec], profile=known)[0].step_s for known in (before, after)]
        measured = report.get("step_s")
        if measured is None:
            cells.append([one.name, *(f"{s:.3f}" for s in said), report["outcome"], "-"])
            continue
        off = (said[0] * said[1]) ** 0.5 / measured - 1.0
        errors.append(abs(off))
        cells.append(
            [one.name, *(f"{s:.3f}" for s in said), f"{measured:.3f}", f"{100 * off:+.0f}%"]
        )
    heads = ["run", "predicted s, before", "after", "measured s", "off by"]
    print(render(heads, cells, "md"))
    change = after.sustained_flops_per_s / before.sustained_flops_per_s - 1.0
    print(f"\n{before.device_name}, {before.cores} cores, torch {before.torch}, {before.made_at}; "
          f"products {100 * change:+.0f}% after the runs")  # fmt: skip
    if errors:
        print(f"median {100 * median(errors):.0f}%, worst {100 * max(errors):.0f}%")
    return 0 if len(errors) == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
