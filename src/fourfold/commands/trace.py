"""What does every step of a parallel layer do on one rank? Computed, or run with --run.

Tensors as `name [symbolic] = [numbers]`, their elements and bytes, FLOPs of one rank and of all,
bytes sent and over which link, copied or view, live and peak memory after every step.

In ulysses, allgather and ring the sequence is divided over the whole world (tp x cp x dp); mlp
divides over tp; in mlp2d a rank holds tokens/dp (gathered over tp) and ffn/tp; layer is a whole
decoder layer of a model under tp x cp x dp, forward and backward.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from fourfold import files
from fourfold.commands import flags
from fourfold.commands.progress import end_line, progress_lines
from fourfold.cost.trace.ask import Ask
from fourfold.cost.trace.layer import layer_program, layer_rows, layer_spec, payload_bytes
from fourfold.cost.trace.steps import CP_KINDS, KINDS, WORKSPACE_BYTES, Program, generic_cluster
from fourfold.cost.trace.walk import StepRow, build, walk
from fourfold.errors import UserError
from fourfold.launch.local import JobError
from fourfold.launch.trace import count_layer, local_device, run_layer, run_list
from fourfold.result.trace import TraceMeasure
from fourfold.search.legal import require_legal
from fourfold.show import trace as show
from fourfold.show import trace_run
from fourfold.show.table import json_text
from fourfold.spec import catalog, check, codec
from fourfold.spec.cluster import Cluster
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec

if TYPE_CHECKING:
    from fourfold.cost.trace.advice import Advice

EXAMPLES = """\
examples:
  fourfold trace ulysses --tokens 60000 --hidden 16384 --heads 128 --tp 8 --dp 2 --attention naive
  fourfold trace ring --model llama-3.1-8b --tokens 131072 --cp 16 --cluster nvidia-h100
  fourfold trace layer --model llama-3.1-70b --tokens 32768 --tp 8 --cp 2 --dp 4 --sharding zero3
  fourfold trace ring --tokens 512 --hidden 256 --heads 8 --cp 4 --dtype fp32 --run
  fourfold trace mlp2d --tokens 60000 --hidden 16384 --ffn 53248 --layers 126 --tp 8 --dp 2
"""
DTYPES = ("bf16", "fp16", "fp32", "fp64", "fp8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument(
        "--tokens", type=flags.size, required=True, metavar="N", help="of the sequence"
    )
    parser.add_argument("--model", metavar="NAME", help="a preset or config.json for the sizes")
    sizes = parser.add_argument_group("sizes (each overrides the model's)")
    for name, text in (
        ("hidden", "width of the model"),
        ("heads", "query heads"),
        ("kv-heads", "key and value heads (default: as many as heads)"),
        ("ffn", "width of the MLP"),
        ("layers", "layers whose weights a rank holds, in mlp and mlp2d"),
    ):
        sizes.add_argument(f"--{name}", type=flags.size, metavar="N", help=text)
    layout = parser.add_argument_group("layout")
    for axis, text in (("tp", "tensor"), ("cp", "context"), ("dp", "data")):
        layout.add_argument(
            f"--{axis}", type=int, default=1, metavar="N", help=f"{text} parallel ranks"
        )
    layout.add_argument("--rank", type=int, default=0, metavar="R", help="the rank that is shown")
    only = parser.add_argument_group("of kind layer")
    only.add_argument("--cp-kind", choices=CP_KINDS, help="default: ring")
    only.add_argument("--sharding", metavar="X", help="zero0, zero1 (default), zero2 or zero3")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of tensors and weights")
    parser.add_argument(
        "--attention",
        choices=("flash", "naive"),
        default="flash",
        help="naive keeps the N x N scores",
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help="for link levels: a name or a TOML file (default: hosts of 8 H100, 400 Gbit/s a GPU)",
    )
    parser.add_argument(
        "--run",
        action="store_true",
        dest="run_steps",
        help="do the steps on this host, one process per rank; computed beside measured",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="of --run"
    )
    parser.add_argument("--picture", metavar="FILE.png", help="draw memory over the steps")
    flags.add_format(parser)


class Traced(NamedTuple):
    """`rows` takes the bytes of the matrix library's workspace, `measure` a device."""

    program: Program
    cluster: Cluster
    rows: Callable[[int], Sequence[StepRow]]
    measure: Callable[[str], TraceMeasure]
    advice: Advice | None = None


def run(args: argparse.Namespace) -> int:
    device = local_device(args.device, _layout(args).world) if args.run_steps else ""
    if args.run_steps and args.rank:
        raise UserError("a run shows rank 0", field="rank", value=args.rank, hint="--rank 0")
    measured = None
    try:
        traced = _layer(args) if args.kind == "layer" else _list(args)
        rows = traced.rows(WORKSPACE_BYTES)
        if args.picture:
            from fourfold.show.trace_picture import picture

            drawn = picture(traced.program, rows, args.picture)
            files.write_bytes(args.picture, drawn, field="picture")
        if args.run_steps:
            measured = traced.measure(device)
            end_line()
    except JobError as error:
        print(f"trace: {error}", file=sys.stderr)
        return 1
    if measured is not None and measured.peaks_from == "ledger":
        rows = traced.rows(0)
    print(_text(args.format, traced, rows, measured))
    return 1 if measured is not None and measured.wrong else 0


def _text(
    style: str, traced: Traced, rows: Sequence[StepRow], measured: TraceMeasure | None
) -> str:
    """The steps and which kind to take; of a run, computed beside measured."""
    program, cluster, advice = traced.program, traced.cluster, traced.advice
    if style == "csv":
        return show.csv(rows)
    pairs = trace_run.pairs(program, rows, measured) if measured is not None else []
    if style == "json":
        answer = show.plain(program, rows, cluster)
        if measured is not None:
            answer["measured"] = trace_run.plain(pairs, measured)
        elif advice is not None:
            answer["recommendation"] = codec.encode(advice)
        return json_text(answer)
    if measured is not None:
        return f"{show.header(program, cluster)}\n\n{trace_run.text(pairs, measured, style)}"
    text = show.text(program, rows, cluster, style)
    if advice is None:
        return text
    return f"{text}\n\n{show.advice_text(advice, program, cluster, style)}"


def _list(args: argparse.Namespace) -> Traced:
    """A list of steps, computed here."""
    ask = _ask(args)
    program = build(args.kind, ask)
    cluster = _cluster(args.cluster, program.ranks)
    text = codec.to_json(ask)
    return Traced(
        program,
        cluster,
        lambda workspace: walk(program, cluster, workspace_bytes=workspace),
        lambda device: run_list(args.kind, text, program.ranks, device, progress_lines()),
        None if args.run_steps else _advice(ask, args, cluster),
    )


def _layer(args: argparse.Namespace) -> Traced:
    """A layer of a model, counted by a dry run of one rank."""
    spec = _layer_spec(args)
    require_legal(spec)
    cluster = _cluster(args.cluster, spec.gpus)
    counts = count_layer(spec, args.rank, progress_lines())
    end_line()
    program = layer_program(spec, args.rank, counts[0])
    sent = payload_bytes(counts[0])
    return Traced(
        program,
        cluster,
        lambda workspace: layer_rows(program, spec, counts, cluster, workspace_bytes=workspace),
        lambda device: run_layer(spec, sent, device, progress_lines()),
    )


def _advice(ask: Ask, args: argparse.Namespace, cluster: Cluster) -> Advice | None:
    """Which kind to take; only where there is a sequence group to divide over."""
    if args.kind not in CP_KINDS or args.format == "csv" or ask.ranks == 1:
        return None
    from fourfold.cost.trace.advice import advise  # NumPy: only paid here

    return advise(ask, cluster)


def _layer_spec(args: argparse.Namespace) -> RunSpec:
    """A middle layer of a preset, one sequence on a rank; sizes given as flags change its shape."""
    if args.model is None:
        raise UserError("is missing", field="model", hint="add --model NAME ('fourfold models')")
    if args.attention != "flash":
        raise UserError(
            "a layer with its backward is traced with flash attention",
            field="attention",
            value=args.attention,
            hint="naive belongs to ulysses, allgather and ring",
        )
    names = ("hidden", "heads", "kv_heads", "ffn")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    layout = _layout(args)
    check.whole(0, layout.world - 1, rank=args.rank)
    words = {"sharding": args.sharding or "zero1", "cp_kind": args.cp_kind or "ring"}
    policy = codec.decode(Policy, words, "policy")
    return layer_spec(
        replace(catalog.model(args.model), **given),
        args.tokens,
        layout,
        dtype=args.dtype,
        cp_kind=policy.cp_kind,
        sharding=policy.sharding,
    )


def _layout(args: argparse.Namespace) -> Layout:
    return Layout(tp=args.tp, cp=args.cp, shard=args.dp)


def _ask(args: argparse.Namespace) -> Ask:
    """Sizes from flags, else from the model; a size that the kind needs and nobody gave is asked
    for by name."""
    model = catalog.model(args.model) if args.model else None
    needed = ("hidden", "ffn") if args.kind.startswith("mlp") else ("hidden", "heads")
    if model is not None and needed[1] == "heads" and model.attention_width != model.hidden:
        raise UserError(
            f"has heads of {model.head_size}, not hidden / heads",
            field="model",
            value=args.model,
            hint="kind layer traces such heads; else give --hidden and --heads",
        )
    sizes: dict[str, int] = {}
    for name in ("cp_kind", "sharding"):
        if getattr(args, name) is not None:
            raise UserError(
                "belongs to kind layer", field=name.replace("_", "-"), value=getattr(args, name)
            )
    for name in ("hidden", "heads", "kv_heads", "ffn"):
        value = getattr(args, name)
        if value is None and model is not None:
            value = getattr(model, name)
        if value is not None:
            sizes[name] = value
        elif name in needed:
            raise UserError(
                "is missing",
                field=name,
                hint=f"add --{name} N, or --model NAME ('fourfold models')",
            )
    if args.heads is not None and args.kv_heads is None:
        sizes["kv_heads"] = args.heads
    sizes.setdefault("kv_heads", sizes.get("heads", 1))
    if args.layers is not None:
        sizes["layers"] = args.layers
    return Ask(
        tokens=args.tokens,
        layout=_layout(args),
        rank=args.rank,
        dtype=args.dtype,
        attention=args.attention,
        **sizes,
    )


def _cluster(name: str | None, ranks: int) -> Cluster:
    if name is None:
        return generic_cluster(ranks)
    cluster = catalog.cluster(name)
    if ranks > cluster.gpus:
        raise UserError(
            f"the trace needs {ranks} ranks", field="cluster", value=f"{name} of {cluster.gpus}",
            hint="fewer ranks, or a larger cluster",
        )  # fmt: skip
    return cluster
