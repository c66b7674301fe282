"""Which hidden size, heads, MLP width, vocabulary and micro batch suit a GPU, and what do others
lose?

Sizes are judged against tiles, waves, alignment and kernel rules, by the cost model's own formulas,
and the nearest better value is named. With --params, --tokens and machines: model shapes of about
that many parameters, each laid out at its best, compared by days.
"""

from __future__ import annotations

import argparse
from typing import Any

from fourfold.commands import flags
from fourfold.errors import UserError
from fourfold.show.table import json_text
from fourfold.spec import catalog, words
from fourfold.spec.device import Device
from fourfold.spec.words import BUNDLES

EXAMPLES = """\
examples:
  fourfold advise --gpu a100-80gb --tp 8 --hidden 14400
  fourfold advise --gpu a100-80gb --tp 8 --hidden 13824 --heads 128
  fourfold advise --gpu h100-80gb --model llama-3.1-8b --tp 2 --micro-batch 3 --seq-len 8192
  fourfold advise --cluster jean-zay --max-nodes 48 --params 176e9 --tokens 350e9 --seq-len 2048 \\
      --global-batch 2048 --tp 8
"""
KERNELS = ("flash", "fused-softmax", "unfused")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpu", metavar="ID", help="'fourfold clusters' lists them")
    add("--cluster", metavar="NAME", help="its GPU, and the machines for --params")
    add("--model", metavar="NAME", help="sizes that are not given come from it")
    for name, text in (
        ("hidden", "width of the model"),
        ("heads", "attention heads (default: of size 128)"),
        ("kv-heads", "key and value heads (default: as many as heads)"),
        ("ffn", "width of the MLP (default: 4 x hidden)"),
        ("vocab", "rows of the embedding"),
        ("tp", "tensor parallel ranks (default 1)"),
        ("micro-batch", "sequences of a micro batch (default 1)"),
        ("seq-len", "tokens of a sequence (default 2048)"),
        ("max-nodes", "at most N hosts, for --params"),
        ("global-batch", "sequences of a step, for --params (default 2048)"),
    ):
        add(f"--{name}", type=int if name == "vocab" else flags.size, metavar="N", help=text)
    add("--params", type=flags.count, metavar="P", help="compare shapes of about P parameters: 30B")
    add("--tokens", type=flags.count, metavar="T", help="by days for T tokens: 1T")
    add("--attention", choices=KERNELS, default="flash", help="kernel of the attention core")
    add("--precision", default="bf16-mixed", metavar="X", help="as in 'plan'")
    add("--stack", metavar="NAME", help="whose engine the numbers are for")
    add("--calibration", metavar="FILE", help="made by 'fourfold fit' (default: the shipped one)")
    flags.add_format(parser)


def run(args: argparse.Namespace) -> int:
    from fourfold.show.advise import advice_text

    said = _shapes(args) if args.params is not None else _sizes(args)
    print(json_text(said) if args.format == "json" else advice_text(said, args.format))
    if "shapes" in said:
        return 0 if any(row["days"] is not None for row in said["shapes"]) else 1
    return 0


def _device(args: argparse.Namespace) -> Device:
    if args.cluster:
        return catalog.cluster(args.cluster).device
    if args.gpu:
        return catalog.device(args.gpu)
    raise UserError("is missing", field="gpu", hint="add --gpu ID or --cluster NAME")


def _precision(args: argparse.Namespace, device: Device) -> str:
    precision = words.policy_word("precision", args.precision)
    if precision not in BUNDLES:
        raise UserError(
            "is not a precision", field="precision", value=precision, hint=", ".join(BUNDLES)
        )
    if precision in ("fp8", "fp4"):
        device.peak(precision)
    return precision


def _knobs(args: argparse.Namespace, device: Device) -> tuple[dict[str, float], str]:
    """(knobs, whose they are)."""
    from fourfold.cost.fit import calibration as calibrations
    from fourfold.search.question import entry_for, usual_cluster
    from fourfold.search.stack_names import match_stack

    known = calibrations.load(args.calibration) if args.calibration else calibrations.shipped()
    cluster = catalog.cluster(args.cluster) if args.cluster else usual_cluster(device, 8)
    stack = match_stack(args.stack, cluster, known) if args.stack else "fourfold"
    entry, why = entry_for(known, stack, cluster)
    rows = why or f"{entry.rows_time} measured rows"
    return entry.knobs, f"efficiencies of {stack} on {cluster.name} ({rows})"


def _whole(name: str, value: int) -> int:
    if not 1 <= value <= 2**24:
        raise UserError("must be from 1 to 16777216", field=name, value=value)
    return value


def _sizes(args: argparse.Namespace) -> dict[str, Any]:
    """Advice on each size that was given (all of them with --model)."""
    from fourfold.search import advise

    device = _device(args)
    precision = _precision(args, device)
    knobs, whose = _knobs(args, device)
    shape = _shape(args)
    kernels = advise.Kernels(device, precision, knobs, args.attention)
    said: dict[str, Any] = {
        "gpu": device.id,
        "tp": shape.tp,
        "seq_len": shape.seq_len,
        "micro_batches": shape.micro_batch,
        "precision": precision,
        "attention": args.attention,
        "calibration": whose,
    }
    every = args.model is not None
    said["hidden"] = advise.hidden_advice(
        shape, kernels, free_heads=args.heads is None and not every
    )
    said["heads"] = advise.heads_advice(shape, kernels)
    if every or args.ffn is not None:
        said["ffn"] = advise.ffn_advice(shape, kernels)
    if every or args.vocab is not None:
        said["vocab"] = advise.vocab_advice(shape, kernels)
    said["micro_batch"] = advise.micro_advice(shape, kernels)
    return said


def _shape(args: argparse.Namespace) -> Any:
    from fourfold.search.advise import Shape, auto_heads

    base = catalog.model(args.model) if args.model else None
    hidden = args.hidden if args.hidden is not None else base.hidden if base else None
    if hidden is None:
        raise UserError("is missing", field="hidden", hint="add --hidden N or --model NAME")
    tp = _whole("tp", args.tp if args.tp is not None else 1)
    own = base is not None and hidden == base.hidden
    heads = args.heads if args.heads is not None else base.heads if base and own else None
    heads = auto_heads(_whole("hidden", hidden), tp) if heads is None else _whole("heads", heads)
    kv = args.kv_heads if args.kv_heads is not None else None
    kv = kv if kv is not None else base.kv_heads if base and own and args.heads is None else heads
    ratio = base.ffn / base.hidden if base else 4.0
    ffn = args.ffn if args.ffn is not None else round(ratio * hidden)
    for name, value, whole in (
        ("heads", heads, hidden),
        ("kv-heads", _whole("kv-heads", kv), heads),
    ):
        if whole % value:
            raise UserError(
                f"must divide {whole}", field=name, value=value, hint="choose a divisor"
            )
    return Shape(
        hidden=hidden,
        heads=heads,
        kv_heads=kv,
        ffn=_whole("ffn", ffn),
        vocab=_whole("vocab", args.vocab if args.vocab is not None else base.vocab if base else 1),
        gated=base.gated if base else False,
        seq_len=_whole("seq-len", args.seq_len if args.seq_len is not None else 2048),
        micro_batch=_whole("micro-batch", args.micro_batch if args.micro_batch is not None else 1),
        tp=tp,
    )


def _shapes(args: argparse.Namespace) -> dict[str, Any]:
    """Model shapes of a parameter budget, by days."""
    from fourfold.search.shapes import compare, shapes_near

    if not 1e6 <= args.params <= 1e13:
        raise UserError("must be from 1e6 to 1e13", field="params", value=args.params)
    if args.tokens is None or not 0 < args.tokens < 1e18:
        raise UserError("must be above 0", field="tokens", value=args.tokens, hint="--tokens T")
    ask = _plan_question(args)
    models = shapes_near(ask.model, args.params, ask.batch.seq_len, args.tp or 8)
    if not models:
        raise UserError(
            "no shape comes near it with this vocabulary", field="params", value=args.params
        )
    return {
        "gpu": ask.cluster.device.id,
        "gpus": ask.gpus,
        "stack": ask.stack,
        "tokens": args.tokens,
        "tp": args.tp or 8,
        "seq_len": ask.batch.seq_len,
        "micro_batches": "best",
        "precision": ask.policy.precision,
        "attention": ask.policy.attention,
        "calibration": ask.no_rows or f"{ask.entry.rows_time} measured rows",
        "shapes": compare(ask, models, tokens=args.tokens),
    }


def _plan_question(args: argparse.Namespace) -> Any:
    """The planner's question on these machines, its model only the family to vary."""
    from fourfold.commands import plan

    words = ["--model", args.model or "gpt-3-175b", "--precision", args.precision]
    words += ["--seq-len", str(args.seq_len or 2048)]
    words += ["--global-batch", str(args.global_batch or 2048)]
    for flag in ("cluster", "gpu", "stack", "calibration"):
        value = getattr(args, flag)
        words += [f"--{flag}", value] if value else []
    nodes = args.max_nodes if args.max_nodes is not None else None
    words += ["--max-nodes", str(nodes)] if nodes is not None else []
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    return plan.question(parser.parse_args(words))[0]
