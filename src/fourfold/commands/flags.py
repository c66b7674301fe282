"""Flags that many commands share: a run's layout and batch, a spec file, --set, --format."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from fourfold import files
from fourfold.errors import UserError
from fourfold.show.table import FORMATS
from fourfold.spec import codec
from fourfold.spec.policy import BUNDLES, PRECISION_ALIASES
from fourfold.spec.run import RunSpec

# flag -> (path in a run's table, type, help); a flag mirrors its field.
_LAYOUT_FLAGS: dict[str, tuple[str, type, str]] = {
    "--gpus": ("gpus", int, "ranks in all"),
    "--dp": (
        "layout.dp",
        str,
        "data parallel: 8, or 2x4 = 2 copies sharded over 4 (default: the rest)",
    ),
    "--tp": ("layout.tp", int, "tensor parallel"),
    "--cp": ("layout.cp", int, "context parallel"),
    "--pp": ("layout.pp", int, "pipeline stages"),
    "--micro-batch": ("batch.micro_batch", int, "sequences of one micro batch"),
    "--global-batch": ("batch.global_batch", int, "sequences of one step"),
    "--seq-len": ("batch.seq_len", int, "tokens of one sequence"),
    "--sharding": ("policy.sharding", str, "zero0, zero1, zero2 or zero3"),
    "--recompute": ("policy.recompute", str, "none, full, selective or every-N"),
    "--cp-kind": ("policy.cp_kind", str, "ring, allgather or ulysses"),
    "--schedule": ("policy.schedule", str, "gpipe, 1f1b, interleaved or zero-bubble"),
    "--virtual-stages": ("policy.virtual_stages", int, "model chunks of one pipeline rank"),
    "--precision": ("policy.precision", str, f"one of {', '.join((*BUNDLES, *PRECISION_ALIASES))}"),
}


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=FORMATS, default="text", help="form of the output")


def add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--force", action="store_true", help="replace a file that is no earlier result"
    )


def add_layout(parser: argparse.ArgumentParser, *, without: Sequence[str] = ()) -> None:
    """The layout flags: the same names in every command. `without`: flags it has in its own way."""
    group = parser.add_argument_group("layout, batch and policy")
    for flag, (_, kind, text) in _LAYOUT_FLAGS.items():
        if flag in without:
            continue
        group.add_argument(flag, type=kind, metavar="N" if kind is int else "X", help=text)


def add_run(parser: argparse.ArgumentParser) -> None:
    """All that describes a run: model, layout flags, --spec and --set."""
    parser.add_argument("--model", metavar="NAME", help="a preset, or the path of a config.json")
    parser.add_argument(
        "--spec", metavar="FILE.toml", help="a whole run; flags override its fields"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any field of the run, such as policy.compile=true",
    )
    add_layout(parser)


def run_table(args: argparse.Namespace, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The run as plain data: the spec file (or what is `known`), then flags, then --set."""
    table: dict[str, Any] = dict(known or {})
    if getattr(args, "spec", None):
        text = files.read_text(args.spec, field="spec")
        try:
            table = codec.parse_toml(text)
        except UserError as error:
            raise error.within(f"spec {args.spec}") from None
    if getattr(args, "model", None):
        table["model"] = args.model
    for flag, (path, _, _) in _LAYOUT_FLAGS.items():
        value = getattr(args, flag[2:].replace("-", "_"))
        if value is not None:
            put(table, path, int(value) if flag == "--dp" and value.isdecimal() else value)
    for assignment in getattr(args, "set", []):
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise UserError("must be FIELD=VALUE", field="--set", value=assignment)
        path, value = path.strip(), toml_value(text)
        is_text = path in ("note", "tag", "data") or path.startswith("policy.env.")
        # A shell eats the quotes of policy.env.X="1".
        put(table, path, text.strip() if is_text and not isinstance(value, str) else value)
    return table


def run_spec(args: argparse.Namespace) -> RunSpec:
    table = run_table(args)
    if "model" not in table:
        raise UserError("is missing", field="model", way_out="add --model NAME ('fourfold models')")
    return codec.load(RunSpec, table)


def put(table: dict[str, Any], path: str, value: Any) -> None:
    """table['a']['b'] = value for path 'a.b', making tables on the way."""
    *parents, leaf = path.split(".")
    for name in parents:
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            raise UserError(f"'{name}' is not a table", field=path, value=value)
        table = inner
    table[leaf] = value


def toml_value(text: str) -> Any:
    """What --set's value means: a TOML value if it is one, else plain text."""
    text = text.strip()
    try:
        table = codec.parse_toml(f"value = {text}\n")
    except UserError:
        return text
    return table["value"] if set(table) == {"value"} else text
