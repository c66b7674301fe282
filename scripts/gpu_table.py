"""The rows of results/h200/rows.txt: what the planner says of them, and what was measured.

python scripts/gpu_table.py predict > results/h200/predicted.csv    before they are run
python scripts/gpu_table.py bench RUNS     'fourfold bench' of each, on a GPU
python scripts/gpu_table.py compare        results/h200/table beside predicted.csv, as Markdown
python scripts/gpu_table.py chart FILE     results/h200/table beside peers.csv, as bars
python scripts/gpu_table.py grid           results/h200/grid.csv against the planner's choice
"""

from __future__ import annotations

import argparse
import csv
import io
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import NamedTuple

from fourfold.cost.table.reports import read_reports
from fourfold.result.report import Prediction
from fourfold.search.predict import predict
from fourfold.spec import catalog, codec
from fourfold.spec.run import RunSpec
from fourfold.text_table import render

HERE = Path(__file__).parents[1] / "results" / "h200"
HEADINGS = ("row", "tokens_s", "tokens_s_low", "tokens_s_high", "peak_gib")
COLOURS = {"one-file PyTorch": "#b8b8b8", "torchtitan 0.2.2": "#f2b880", "fourfold": "#3b6ea5"}


class Measured(NamedTuple):
    tokens_s: float
    gib: float


def rows() -> list[str]:
    return [line for line in (HERE / "rows.txt").read_text().splitlines() if line]


def spec_of(row: str) -> RunSpec:
    """As `bench` makes it where a GPU is."""
    parser = argparse.ArgumentParser()
    for flag in ("--seq-len", "--micro-batch", "--global-batch"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args(shlex.split(row))
    policy: dict[str, object] = {"precision": args.precision, "compile": True}
    for assignment in args.set:
        name, _, value = assignment.removeprefix("policy.").partition("=")
        policy[name] = int(value) if value.isdecimal() else value
    batch = {name: getattr(args, name) for name in ("seq_len", "micro_batch", "global_batch")}
    table = {"model": args.model, "gpus": 1, "batch": batch, "policy": policy}
    return codec.load(RunSpec, table)


def name_of(spec: RunSpec) -> str:
    batch, formats = spec.batch, spec.policy
    words = [f"{spec.model.name} {batch.seq_len} x {batch.micro_batch}"]
    if spec.model.name.startswith("llama-3.1-8b"):
        words.append("fp8" if formats.compute_dtype == "fp8" else formats.precision)
    if formats.recompute != "none":
        words.append(formats.recompute)
    return " ".join(words)


def planned(specs: list[RunSpec]) -> list[Prediction]:
    return predict(specs, cluster=catalog.cluster(str(HERE / "one-h200.toml")))


def predicted() -> str:
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(HEADINGS)
    specs = [spec_of(row) for row in rows()]
    for row, spec, said in zip(rows(), specs, planned(specs), strict=True):
        seconds = (said.step_s, said.step_s_high, said.step_s_low)
        speeds = [f"{spec.batch.tokens / one:.0f}" for one in seconds]
        table.writerow([row, *speeds, f"{said.peak_bytes / 2**30:.1f}"])
    return out.getvalue()


def measured() -> dict[str, Measured]:
    found = {}
    for report in read_reports(str(HERE / "table")):
        seconds = median(step.seconds for step in report.steps if not step.warmup)
        peak = max(rank.peak_bytes for rank in report.memory)
        found[name_of(report.spec)] = Measured(report.spec.batch.tokens / seconds, peak / 2**30)
    return found


def compared() -> str:
    said = list(csv.DictReader(io.StringIO((HERE / "predicted.csv").read_text())))
    cells, found = [], measured()
    for one in said:
        name = name_of(spec_of(one["row"]))
        if name not in found:
            continue
        speed, gib = float(one["tokens_s"]), float(one["peak_gib"])
        seen = found[name]
        time_off, memory_off = seen.tokens_s / speed - 1, gib / seen.gib - 1
        times = [f"{speed:,.0f}", f"{seen.tokens_s:,.0f}", f"{100 * time_off:+.1f}%"]
        sizes = [f"{gib:.1f}", f"{seen.gib:.1f}", f"{100 * memory_off:+.1f}%"]
        cells.append([name, *times, *sizes])
    heads = ["run", "predicted tokens/s", "measured", "step time off by", "predicted GiB",
             "measured", "off by"]  # fmt: skip
    return render(heads, cells, "md")


def chart(path: str) -> None:
    """Shares of the floor: what no engine on this card exceeds."""
    from matplotlib.figure import Figure

    found = measured()
    peers = [p for p in csv.DictReader((HERE / "peers.csv").open()) if p["row"] in found]
    figure = Figure(figsize=(9.0, 0.62 * len(peers) + 1.0), layout="constrained")
    axes = figure.subplots()
    for at, peer in enumerate(peers):
        floor = float(peer["floor"])
        speeds = (peer["one_file_pytorch"], peer["torchtitan"], found[peer["row"]].tokens_s)
        for place, (colour, speed) in enumerate(zip(COLOURS.values(), speeds, strict=True)):
            share = 100 * float(speed or 0) / floor
            axes.barh(at + 0.26 * (place - 1), share, 0.24, color=colour)
            if share:
                axes.text(share + 0.5, at + 0.26 * (place - 1), f"{float(speed):,.0f}", va="center",
                          fontsize=7)  # fmt: skip
    for name, colour in COLOURS.items():
        axes.barh(0, 0, color=colour, label=name)
    axes.set_yticks(range(len(peers)), [peer["row"] for peer in peers])
    axes.invert_yaxis()
    axes.set_xlim(0, 105)
    axes.set_xlabel("tokens/s on one H200, % of its matrix products and attention alone")
    axes.legend(frameon=False, loc="upper center", ncols=3, bbox_to_anchor=(0.4, 1.1))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def grid() -> str:
    """Of each model: the planner's first choice among what was measured, and what that costs."""
    runs = list(csv.DictReader((HERE / "grid.csv").open()))
    specs = [_grid_spec(run) for run in runs]
    cells = []
    for model in dict.fromkeys(run["model"] for run in runs):
        for compiled in ("true or false", "false"):
            some = [
                (said.step_s, float(run["step_ms"]), run)
                for run, said in zip(runs, planned(specs), strict=True)
                if run["model"] == model and run["compile"] in compiled
            ]
            if len(some) < 2:
                continue
            first, best = min(some, key=lambda s: s[0]), min(some, key=lambda s: s[1])
            names = ("micro_batch", "recompute", "loss", "attention", "compile")
            choice = " ".join(f"{name}={first[2][name]}" for name in names)
            regret = f"{100 * (first[1] / best[1] - 1):.1f}%"
            cells.append([model, compiled, str(len(some)), choice, f"{first[1]:.1f}", regret])
    heads = ["model", "compile", "runs", "planner's first choice", "ms", "regret"]
    return render(heads, cells, "md")


def _grid_spec(run: dict[str, str]) -> RunSpec:
    batch = {name: int(run[name]) for name in ("seq_len", "micro_batch", "global_batch")}
    policy = {name: run[name] for name in ("recompute", "loss", "attention")}
    chosen = {**policy, "compile": run["compile"] == "true"}
    table = {"model": run["model"], "gpus": 1, "batch": batch, "policy": chosen}
    return codec.load(RunSpec, table)


def run_all(runs: str) -> int:
    worst = 0
    for row in rows():
        words = [sys.executable, "-m", "fourfold", "bench", *shlex.split(row), "--gpus", "1"]
        worst = max(worst, subprocess.run([*words, "--runs", runs], check=False).returncode)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("predict", "bench", "compare", "chart", "grid"))
    parser.add_argument("where", nargs="?", default="runs")
    args = parser.parse_args()
    if args.what == "bench":
        return run_all(args.where)
    if args.what == "chart":
        chart(args.where)
        return 0
    texts = {"predict": predicted, "compare": compared, "grid": grid}
    print(texts[args.what](), end="" if args.what == "predict" else "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
