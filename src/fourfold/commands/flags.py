"""Flags that many commands share: a run's layout and batch, a spec file, --set, --format."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fourfold import files
from fourfold.errors import UserError
from fourfold.show.table import FORMATS
from fourfold.spec import codec, words
from fourfold.spec.run import RunSpec
from fourfold.spec.variables import parse_assignments
from fourfold.spec.words import BUNDLES
from fourfold.units import count_from, size_from

if TYPE_CHECKING:
    from fourfold.launch.permit import Permit

# flag -> (path in a run's table, metavar, help); a flag mirrors its field, which reads the word.
_LAYOUT_FLAGS: dict[str, tuple[str, str, str]] = {
    "--gpus": ("gpus", "N", "ranks in all"),
    "--dp": (
        "layout.dp",
        "X",
        "data parallel: 8, or 2x4 = 2 copies sharded over 4 (default: the rest)",
    ),
    "--tp": ("layout.tp", "N", "tensor parallel"),
    "--cp": ("layout.cp", "N", "context parallel"),
    "--pp": ("layout.pp", "N", "pipeline stages"),
    "--micro-batch": ("batch.micro_batch", "N", "sequences of one micro batch"),
    "--global-batch": (
        "batch.global_batch",
        "N",
        "sequences of one step; 4M or 4Mtokens: that many tokens",
    ),
    "--seq-len": ("batch.seq_len", "N", "tokens of one sequence: 8192 or 8k (k = 1024)"),
    "--sharding": (
        "policy.sharding",
        "X",
        "zero0 to zero3; ddp, fsdp (zero3), hsdp (with --dp 2x4)",
    ),
    "--recompute": ("policy.recompute", "X", "none, full, selective or every-N"),
    "--cp-kind": ("policy.cp_kind", "X", "ring, allgather or ulysses"),
    "--schedule": ("policy.schedule", "X", "gpipe, 1f1b, interleaved or zero-bubble"),
    "--virtual-stages": ("policy.virtual_stages", "N", "model chunks of one pipeline rank"),
    "--precision": ("policy.precision", "X", f"one of {', '.join(BUNDLES)}; bf16 is bf16-mixed"),
}


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=FORMATS, default="text", help="form of the output")


def add_convention(parser: argparse.ArgumentParser) -> None:
    from fourfold.cost.count.flops import DEFAULT

    parser.add_argument(
        "--convention",
        default=DEFAULT,
        metavar="ID",
        help=f"how FLOPs are counted (default {DEFAULT}; 'fourfold flops' lists them)",
    )


def add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--force", action="store_true", help="replace a file that is no earlier result"
    )


def add_layout(parser: argparse.ArgumentParser, *, without: Sequence[str] = ()) -> None:
    """The layout flags: the same names in every command. `without`: flags it has in its own way."""
    group = parser.add_argument_group("layout, batch and policy")
    for flag, (_, metavar, text) in _LAYOUT_FLAGS.items():
        if flag not in without:
            group.add_argument(flag, metavar=metavar, help=text)


def size(text: str) -> int:
    """For argparse: a length, a width, a number of ranks; 8k is 8192."""
    return _read(size_from, text)


def count(text: str) -> int:
    """For argparse: tokens of a training, parameters, steps; 20B is 20e9."""
    return _read(count_from, text)


def number(text: str) -> float:
    """For argparse: 85144.5, or 3.2M with the same letters as `count`."""
    try:
        return float(text)
    except ValueError:
        return float(count(text))


def _read(read: Callable[[str], int], text: str) -> int:
    try:
        return read(text)
    except UserError as error:  # argparse puts the flag's name before it
        raise argparse.ArgumentTypeError(str(error)) from None


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


def add_permit(parser: argparse.ArgumentParser) -> None:
    """What only a command line may allow; see `launch.permit`."""
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the ranks; some only this flag may set, for this start",
    )
    parser.add_argument(
        "--oversubscribe", action="store_true", help="more ranks than this host has room for"
    )


def permit(args: argparse.Namespace) -> Permit:
    from fourfold.launch.permit import Permit  # 20 ms that no light command should pay

    return Permit(env=parse_assignments(args.env), oversubscribe=args.oversubscribe)


def run_table(args: argparse.Namespace, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The run as plain data: the spec file (or what is `known`), then flags, --set and --env."""
    table: dict[str, Any] = dict(known or {})
    if getattr(args, "spec", None):
        text = files.read_text(args.spec, field="spec")
        try:
            table = codec.parse_toml(text)
        except UserError as error:
            raise error.inside(args.spec) from None
    if getattr(args, "model", None):
        table["model"] = args.model
    for flag, (path, _, _) in _LAYOUT_FLAGS.items():
        value = getattr(args, flag[2:].replace("-", "_"))
        if value is not None:
            put(table, path, value)
    for assignment in getattr(args, "set", []):
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise UserError("must be FIELD=VALUE", field="--set", value=assignment)
        path, value = path.strip(), toml_value(text)
        is_text = path in ("note", "tag", "data") or path.startswith("policy.env.")
        # A shell eats the quotes of policy.env.X="1".
        put(table, path, text.strip() if is_text and not isinstance(value, str) else value)
    put_env(table, args)
    return _understood(table)


def _understood(table: dict[str, Any]) -> dict[str, Any]:
    """Numbers and the fields' own words; what was meant by others goes to stderr."""
    hybrid = (
        words.is_hybrid(table.get("policy", {}).get("sharding")) if _has_policy(table) else False
    )
    tidy, notes = words.tidied(table)
    if notes:
        print(f"read as: {'; '.join(notes)}", file=sys.stderr)
    if hybrid:  # RunSpec asks whether the layout has copies
        tidy["policy"]["sharding"] = words.HYBRID[0]
    return tidy


def _has_policy(table: Mapping[str, Any]) -> bool:
    return isinstance(table.get("policy"), dict)


def put_env(table: dict[str, Any], args: argparse.Namespace) -> None:
    """Of commands that have --env: the variables are the run's, and decide which run it is."""
    for name, value in parse_assignments(getattr(args, "env", [])):
        put(table, f"policy.env.{name}", value)


def run_spec(args: argparse.Namespace) -> RunSpec:
    table = run_table(args)
    if "model" not in table:
        raise UserError("is missing", field="model", hint="add --model NAME ('fourfold models')")
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
