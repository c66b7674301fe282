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
from dataclasses import replace
from typing import TYPE_CHECKING

from fourfold import files
from fourfold.commands import flags
from fourfold.commands.progress import end_line, progress_lines
from fourfold.cost.trace.ask import Ask
from fourfold.cost.trace.build import build
from fourfold.cost.trace.groups import generic_cluster
from fourfold.cost.trace.layer_ask import LayerAsk
from fourfold.cost.trace.step import CP_KINDS, KINDS, WORKSPACE_BYTES, Program
from fourfold.cost.trace.walk import walk
from fourfold.errors import UserError
from fourfold.launch.devices import gpu_count
from fourfold.launch.local import JobError, must_be_ok, run_job
from fourfold.launch.scratch import scratch
from fourfold.result.job import answer_file
from fourfold.result.trace import TraceMeasure
from fourfold.show import trace as show
from fourfold.show import trace_advice, trace_run
from fourfold.show.table import json_text
from fourfold.spec import catalog, codec
from fourfold.spec.cluster import Cluster
from fourfold.spec.job import Job, Limits
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy

if TYPE_CHECKING:
    from fourfold.cost.trace.advice import Advice

# One process per rank: more than this starves any host of memory and cores.
MAX_LOCAL_RANKS = 32
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


def run(args: argparse.Namespace) -> int:
    ask = _layer_ask(args) if args.kind == "layer" else _ask(args)
    program = build(args.kind, ask)
    cluster = _cluster(args.cluster, program.ranks)
    rows = walk(program, cluster)
    if args.picture:
        from fourfold.show.trace_picture import picture

        files.write_bytes(args.picture, picture(program, rows, args.picture), field="picture")
    if args.run_steps:
        return _run_steps(args, ask, program, cluster)
    advice = _advice(ask, args, cluster)
    if args.format == "json":
        answer = show.plain(program, rows, cluster)
        print(json_text(answer | ({"recommendation": codec.encode(advice)} if advice else {})))
    elif args.format == "csv":
        print(show.csv(rows))
    else:
        print(show.text(program, rows, cluster, args.format))
        if advice is not None:
            print(f"\n{trace_advice.text(advice, program, cluster, args.format)}")
    return 0


def _run_steps(
    args: argparse.Namespace, ask: Ask | LayerAsk, program: Program, cluster: Cluster
) -> int:
    """Computed beside measured; exit 1 when a shape or a byte differs."""
    if args.rank:
        raise UserError("a run shows rank 0", field="rank", value=args.rank, hint="--rank 0")
    try:
        measured = _measure(args, ask)
    except JobError as error:
        print(f"trace: {error}", file=sys.stderr)
        return 1
    workspace = 0 if measured.peaks_from == "ledger" else WORKSPACE_BYTES
    rows = walk(program, cluster, workspace_bytes=workspace)
    found = trace_run.pairs(program, rows, measured)
    if args.format == "json":
        answer = show.plain(program, rows, cluster)
        print(json_text(answer | {"measured": trace_run.plain(found, measured)}))
    elif args.format == "csv":
        print(show.csv(rows))
    else:
        print(f"{show.header(program, cluster)}\n")
        print(trace_run.text(found, measured, args.format))
    return 1 if measured.wrong else 0


def _measure(args: argparse.Namespace, ask: Ask | LayerAsk) -> TraceMeasure:
    """One process per rank on this host; gone when it returns."""
    ranks = ask.layout.world
    gpus = gpu_count() if args.device != "cpu" else 0
    if args.device == "cuda" and gpus < ranks:
        raise UserError(
            f"{gpus} visible on this host", field="ranks", value=ranks, hint="--device cpu"
        )
    if ranks > MAX_LOCAL_RANKS:
        raise UserError(
            f"a run starts one process per rank on this host, at most {MAX_LOCAL_RANKS}",
            field="ranks",
            value=ranks,
            hint="leave --run out: any number can be computed",
        )
    device = "cuda" if gpus >= ranks else "cpu"
    options = {"ask": codec.to_json(ask), "device": device, "kind": args.kind}
    job = Job(
        job="trace",
        ranks=ranks,
        options=tuple(sorted(options.items())),
        limits=Limits(start_s=300.0, step_s=300.0),
    )
    with scratch() as folder:
        report = run_job(job, folder, progress=progress_lines())
        end_line()
        must_be_ok(report)
        return codec.from_json(TraceMeasure, files.read_text(answer_file(folder, 0)))


def _advice(ask: Ask | LayerAsk, args: argparse.Namespace, cluster: Cluster) -> Advice | None:
    """Which kind to take; only where there is a sequence group to divide over."""
    if isinstance(ask, LayerAsk) or args.kind not in CP_KINDS or args.format == "csv":
        return None
    if ask.ranks == 1:
        return None
    from fourfold.cost.trace.advice import advise  # NumPy: only paid here

    return advise(ask, cluster)


def _layer_ask(args: argparse.Namespace) -> LayerAsk:
    """A layer of a preset; sizes given as flags change its shape."""
    if args.model is None:
        raise UserError("is missing", field="model", hint="add --model NAME ('fourfold models')")
    if args.attention != "flash":
        raise UserError(
            "a layer with its backward is traced with flash attention",
            field="attention",
            value=args.attention,
            hint="naive belongs to ulysses, allgather and ring",
        )
    model = catalog.model(args.model)
    names = ("hidden", "heads", "kv_heads", "ffn")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    policy = codec.decode(Policy, {"sharding": args.sharding or "zero1"}, "policy")
    return LayerAsk(
        model=replace(model, **given),
        tokens=args.tokens,
        layout=_layout(args),
        rank=args.rank,
        dtype=args.dtype,
        cp_kind=args.cp_kind or "ring",
        sharding=policy.sharding,
        last=args.run_steps,
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
