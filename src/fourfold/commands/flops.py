"""MFU, HFU and TFLOPs of a measured speed, under every convention that people publish.

Give tokens/s over all GPUs, or seconds per step with a global batch. Without a speed only the
FLOPs per token are printed. A percentage is against the GPU's dense peak in the run's precision
(fp8 against the fp8 peak). HFU counts what the recompute policy runs again.
"""

from __future__ import annotations

import argparse
from typing import Any

from fourfold.commands import flags
from fourfold.cost.count.flops import CONVENTIONS, FlopsQuery, convention, utilisation_pct
from fourfold.cost.count.params import model_params
from fourfold.errors import UserError
from fourfold.show.table import json_text, render
from fourfold.spec import catalog
from fourfold.spec.batch import Batch
from fourfold.spec.model import windowed

EXAMPLES = """\
examples:
  fourfold flops --model mpt-7b --seq-len 2048 --tokens-per-s 85144 --gpus 8 --gpu h100-80gb
  fourfold flops --model llama-3.1-8b --seq-len 8192 --step-s 6.1 --global-batch 128 --gpus 8 \\
      --gpu h100-80gb --precision fp8 --recompute selective
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu", metavar="ID", help="for MFU and HFU: h100-80gb ('fourfold clusters')"
    )
    parser.add_argument("--convention", metavar="ID", help=f"only one of {', '.join(CONVENTIONS)}")
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument(
        "--tokens-per-s", type=flags.number, metavar="X", help="over all GPUs: 85144 or 3.2M"
    )
    speed.add_argument("--step-s", type=float, metavar="X", help="with --global-batch")
    flags.add_run(parser)
    flags.add_format(parser)


def run(args: argparse.Namespace) -> int:
    answer = _answer(args)
    if args.format == "json":
        print(json_text(answer))
        return 0
    rows = [
        [
            name,
            f"{row['flops_per_token'] / 1e9:.3f}",
            _cell(row.get("tflops_gpu")),
            _cell(row.get("mfu_pct")),
            _cell(row.get("hfu_pct")),
            CONVENTIONS[name].formula,
        ]
        for name, row in answer["conventions"].items()
    ]
    headings = ["convention", "GFLOP/token", "TFLOP/s/GPU", "MFU %", "HFU %", "formula"]
    print(render(headings, rows, args.format))
    if args.format != "csv":
        print(f"\n{_conditions(answer)}")
    return 0


def _answer(args: argparse.Namespace) -> dict[str, Any]:
    spec, given = flags.run_spec(args), flags.run_table(args).get("batch", {})
    if "seq_len" not in given:
        raise UserError("is missing", field="seq-len", hint="add --seq-len N")
    model, batch, policy, gpus = spec.model, spec.batch, spec.policy, spec.gpus
    tokens_per_s = _tokens_per_s(args, batch, batch_given="global_batch" in given)
    device = catalog.device(args.gpu) if args.gpu else None
    ask = FlopsQuery.of(model=model, seq_len=batch.seq_len, layout=spec.layout, policy=policy)
    answer: dict[str, Any] = {
        "model": model.name,
        "params": model_params(model, batch.seq_len),
        "seq_len": batch.seq_len,
        "gpus": gpus,
        "precision": policy.precision,
        "recompute": policy.recompute,
    }
    if windowed(model, batch.seq_len):
        answer["window"] = model.window
    if device is not None:
        answer |= {"gpu": device.id, "peak_flops": device.peak(policy.precision)}
    if tokens_per_s is not None:
        answer["tokens_per_s"] = tokens_per_s
    answer["conventions"] = {}
    asked = (convention(args.convention),) if args.convention else CONVENTIONS.values()
    for rule in asked:
        count = rule.count(ask)
        row = {"flops_per_token": count.printed}
        if tokens_per_s is not None:
            row["tflops_gpu"] = count.printed * tokens_per_s / gpus / 1e12
            if device is not None:
                peak = device.peak(policy.precision)
                row["mfu_pct"] = utilisation_pct(count.model, tokens_per_s / gpus, peak)
                row["hfu_pct"] = utilisation_pct(count.hardware, tokens_per_s / gpus, peak)
        answer["conventions"][rule.id] = row
    return answer


def _tokens_per_s(args: argparse.Namespace, batch: Batch, *, batch_given: bool) -> float | None:
    if args.step_s is not None:
        if not 0 < args.step_s < 1e12:
            raise UserError("must be above 0", field="step-s", value=args.step_s)
        if not batch_given:
            raise UserError(
                "is missing", field="global-batch", hint="--step-s needs --global-batch"
            )
        return _in_range("step-s", args.step_s, batch.tokens / args.step_s)
    if args.tokens_per_s is not None:
        _in_range("tokens-per-s", args.tokens_per_s, args.tokens_per_s)
    return args.tokens_per_s


def _in_range(field: str, value: float, tokens_per_s: float) -> float:
    if not 0 < tokens_per_s < 1e18:
        raise UserError(
            "must give a speed above 0 and below 1e18 tokens/s", field=field, value=value
        )
    return tokens_per_s


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
