"""The rows of results/h200/rows.txt: what the planner says of them, and what was measured.

python scripts/gpu_table.py predict > results/h200/predicted.csv    before they are run
python scripts/gpu_table.py bench RUNS     'fourfold bench' of each, on a GPU
"""

from __future__ import annotations

import argparse
import csv
import io
import shlex
import subprocess
import sys
from pathlib import Path

from fourfold.commands import bench
from fourfold.search.predict import predict
from fourfold.spec import catalog
from fourfold.spec.run import RunSpec

HERE = Path(__file__).parents[1] / "results" / "h200"
SURE = ["--gpus", "1", "--set", "policy.compile=true", "--set", "device=cuda"]
HEADINGS = ("row", "tokens_s", "tokens_s_low", "tokens_s_high", "peak_gib")


def rows() -> list[str]:
    return [line for line in (HERE / "rows.txt").read_text().splitlines() if line]


def spec_of(row: str) -> RunSpec:
    """As `bench` makes it, without looking for a GPU."""
    from fourfold.commands import flags

    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return flags.run_spec(parser.parse_args([*shlex.split(row), *SURE]))


def predicted() -> str:
    cluster = catalog.cluster(str(HERE / "one-h200.toml"))
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(HEADINGS)
    specs = [spec_of(row) for row in rows()]
    for row, spec, said in zip(rows(), specs, predict(specs, cluster=cluster), strict=True):
        tokens = spec.batch.global_batch * spec.batch.seq_len
        speeds = (tokens / said.step_s, tokens / said.step_s_high, tokens / said.step_s_low)
        gib = said.peak_bytes / 2**30
        table.writerow([row, *(f"{speed:.0f}" for speed in speeds), f"{gib:.1f}"])
    return out.getvalue()


def run_all(runs: str) -> int:
    worst = 0
    for row in rows():
        words = [sys.executable, "-m", "fourfold", "bench", *shlex.split(row), "--gpus", "1"]
        worst = max(worst, subprocess.run([*words, "--runs", runs], check=False).returncode)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("predict", "bench"))
    parser.add_argument("runs", nargs="?", default="runs")
    args = parser.parse_args()
    if args.what == "bench":
        return run_all(args.runs)
    print(predicted(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
