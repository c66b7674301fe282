"""Convert a measured speed to MFU, HFU and TFLOP/s under every published convention.

Give tokens/s over all GPUs, or seconds per step with a global batch. Without a speed only the
FLOPs per token are printed. A percentage is against the GPU's dense peak in the run's precision
(fp8 against the fp8 peak). HFU includes the recomputation of the policy.
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import options
from fourfold.cost.count.flops import CONVENTIONS
from fourfold.events import notes
from fourfold.options import option
from fourfold.output import Output, Stderr
from fourfold.show.table import Grid, Part

EXAMPLES = """\
examples:
  fourfold flops --model mpt-7b --seq-len 2048 --tokens-per-s 85144 --gpus 8 --gpu h100-80gb
  fourfold flops --model llama-3.1-8b --seq-len 8192 --step-s 6.1 --global-batch 128 --gpus 8 \\
      --gpu h100-80gb --precision fp8 --recompute selective
"""
OPTIONS = (
    option("--gpu", "GPU for MFU and HFU, such as h100-80gb", "ID"),
    option("--convention", f"only one of {', '.join(CONVENTIONS)}", "ID"),
    option("--tokens-per-s", "tokens/s over all GPUs: 85144 or 3.2M", "X", read=options.number,
           either="speed"),
    option("--step-s", "seconds per step, with --global-batch", "X", read=float, either="speed"),
    *options.run_options(),
    options.FORMAT,
)  # fmt: skip


def run(args: Any) -> Output:
    answer = fourfold.flops(
        options.run_table(args, note=notes(Stderr())),
        gpu=args.gpu,
        rule=args.convention,
        tokens_per_s=args.tokens_per_s,
        step_s=args.step_s,
    )
    return Output.of(answer, lambda: _page(answer.facts))


def _page(answer: dict[str, Any]) -> list[Part]:
    rows = [
        [
            name,
            f"{row['flops_per_token'] / 1e9:.3f}",
            *(_cell(row.get(key)) for key in ("tflops_gpu", "mfu_pct", "hfu_pct")),
            CONVENTIONS[name].formula,
        ]
        for name, row in answer["conventions"].items()
    ]
    headings = ["convention", "GFLOP/token", "TFLOP/s/GPU", "MFU %", "HFU %", "formula"]
    return [Grid(headings, rows), "", _conditions(answer)]


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _conditions(answer: dict[str, Any]) -> str:
    text = (
        f"{answer['model']}: {answer['params']:,} parameters at {answer['seq_len']} tokens; "
        f"{answer['precision']}, recompute {answer['recompute']}; GPUs: {answer['gpus']}"
    )
    if "window" in answer:
        text += f"; attention counted by its window of {answer['window']} tokens"
    if "gpu" in answer:
        text += f" of {answer['gpu']} at {answer['peak_flops'] / 1e12:g} TFLOP/s dense"
    if "tokens_per_s" in answer:
        text += f"; {answer['tokens_per_s']:,.0f} tokens/s"
    return text + _impossible(answer)


def _impossible(answer: dict[str, Any]) -> str:
    """No run beats the peak: one of the numbers is not what it was taken for."""
    most = max((row.get("hfu_pct", 0.0) for row in answer["conventions"].values()), default=0.0)
    if most <= 100:
        return ""
    return (
        f"\nHFU up to {most:.0f}% is more than the GPU can do: is --tokens-per-s over all GPUs and "
        "--step-s of a whole step? are --gpus, --gpu, --precision and --recompute those of the run?"
    )
