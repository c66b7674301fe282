"""A sweep from flags, in the habit of the MPT scripts: -m models, -s and -b exponents, -t, -g."""

from __future__ import annotations

import argparse
from typing import Any

from fourfold.commands.flags import put, put_env, toml_value
from fourfold.errors import UserError
from fourfold.spec.expression import parse
from fourfold.spec.sweep import Sweep

_MAX_EXPONENT = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a sweep from flags (nothing runs without --run)")
    group.add_argument("-m", "--models", nargs="+", metavar="NAME", help="presets or config.json")
    group.add_argument(
        "-s", "--seq-exp", nargs="+", type=int, metavar="N",
        help="sequence lengths 2^N; two numbers are a range, both ends included",
    )  # fmt: skip
    group.add_argument(
        "-b", "--batch-exp", nargs="+", type=int, metavar="N",
        help="tokens of a global batch 2^N; two numbers are a range, both ends included",
    )  # fmt: skip
    group.add_argument("-t", "--precisions", nargs="+", metavar="P", help="bf16, fp8, fp32, ...")
    group.add_argument("-g", "--gpus", nargs="+", type=int, metavar="N", help="ranks in all")
    group.add_argument("--micro-batch", nargs="+", metavar="N", help="sizes, or auto")
    group.add_argument("--layouts", nargs="+", metavar="L", help="such as 'dp4' 'pp2 tp2'")
    group.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="any field of every run"
    )
    # Not dest "run": that is the command's own function.
    group.add_argument(
        "--run", dest="start", action="store_true", help="run it; without this, only the plan"
    )


def given(args: argparse.Namespace) -> bool:
    return bool(args.models)


def sweep_of(args: argparse.Namespace) -> Sweep:
    """Axes in the order of the MPT scripts: models, GPUs, precisions, lengths, batches."""
    base: dict[str, Any] = {}
    for assignment in args.set:
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise UserError("must be FIELD=VALUE", field="--set", value=assignment)
        put(base, path.strip(), toml_value(text))
    put_env(base, args)
    axes: list[tuple[str, tuple[Any, ...]]] = [("model", tuple(args.models))]
    if args.gpus:
        axes.append(("gpus", tuple(args.gpus)))
    elif "gpus" not in base and not args.layouts:
        base["gpus"] = 1
    if args.layouts:
        axes.append(("layout", tuple(args.layouts)))
    if args.precisions:
        axes.append(("precision", tuple(args.precisions)))
    axes.append(("batch", tuple(_batches(args, base.pop("batch", {})))))
    if args.micro_batch:
        sizes = tuple("auto" if word == "auto" else _size(word) for word in args.micro_batch)
        axes.append(("micro_batch", sizes))
    return Sweep(base=base, axes=tuple(axes), where=tuple(map(parse, args.where)))


def _size(word: str) -> int:
    if not word.isdecimal() or not int(word):
        raise UserError("must be a whole number or auto", field="micro-batch", value=word)
    return int(word)


def exponents(name: str, numbers: list[int]) -> list[int]:
    for number in numbers:
        if not 0 <= number <= _MAX_EXPONENT:
            raise UserError(f"must be from 0 to {_MAX_EXPONENT}", field=name, value=number)
    if len(numbers) == 2:
        if numbers[0] > numbers[1]:
            raise UserError("the range is empty", field=name, value=f"{numbers[0]} {numbers[1]}")
        return list(range(numbers[0], numbers[1] + 1))
    return numbers


def _batches(args: argparse.Namespace, fixed: dict[str, Any]) -> list[dict[str, Any]]:
    """Length and batch together: a batch of 2^b tokens is 2^b / 2^s sequences."""
    lengths = [2**n for n in exponents("-s", args.seq_exp)] if args.seq_exp else []
    lengths = lengths or [fixed.get("seq_len", 2048)]
    found = []
    for length in lengths:
        if not args.batch_exp:
            found.append({"global_batch": 1, **fixed, "seq_len": length})
            continue
        for power in exponents("-b", args.batch_exp):
            if 2**power >= length:
                found.append({**fixed, "seq_len": length, "global_batch": 2**power // length})
    if not found:
        raise UserError(
            "is less than one sequence", field="-b", value=args.batch_exp,
            hint=f"a batch holds at least one sequence of 2^{min(args.seq_exp or [11])} tokens",
        )  # fmt: skip
    return found
