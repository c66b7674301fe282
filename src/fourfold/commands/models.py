"""What a model is and what a rank of it does: commands that count, without a cost model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fourfold
from fourfold import options
from fourfold.commands import command
from fourfold.errors import UserError
from fourfold.events import OnEvent, notes
from fourfold.options import option
from fourfold.output import Output
from fourfold.show import shapes
from fourfold.show.engine_memory import memory_page
from fourfold.spec import check
from fourfold.spec.layout import AXES
from fourfold.spec.run import put_layout
from fourfold.text_table import Part, named, table
from fourfold.units import counted, show_bytes
from fourfold.verbs.engine_memory_request import EngineMemoryRequest
from fourfold.verbs.shapes import FlopsRequest

if TYPE_CHECKING:
    from fourfold.flag import Arguments
    from fourfold.verbs.predict import DryRun

_MODELS = """\
examples:
  fourfold models
  fourfold models llama-3.1-8b
  fourfold models gpt-181b --tp 8 --pp 12 --dp 4 --sharding zero1
  fourfold models gpt-3-175b --gpus 64 --tp 8 --pp 4 --rank 63
  fourfold models ./config.json --format json
  fourfold models ./Qwen3-8B                  a downloaded model's folder
"""


@command(
    option("name", "a preset, or the path of a config.json or of its folder", "NAME", nargs="?"),
    option("--rank", "show one rank instead of the first of each stage", "R", read=int),
    *options.layout_options(),
    examples=_MODELS,
)
def models(args: Arguments, show: OnEvent) -> Output:
    """List model presets, or show one model's shape and size.

    Without a name it lists every preset. With a name, or the path of a Hugging Face config.json, it
    shows the shape and exact parameter count; with layout flags also what the first rank of each
    pipeline stage (or --rank) holds and owns. Stages are balanced by cost, so their layers may
    differ.
    """
    table = options.run_table(args)
    table.setdefault("batch", {}).setdefault("seq_len", 2048)
    if args.name is None:
        if "layout" in table or "gpus" in table or args.rank is not None:
            raise UserError("is required", field="name", hint="a layout is of one model")
        listed = fourfold.models(int(table["batch"]["seq_len"]))
        return Output.of(listed, lambda: shapes.models_page(listed))
    answer = fourfold.model(table | {"model": args.name}, rank=args.rank)
    return Output.of(answer, lambda: shapes.model_page(answer))


_FLOPS = """\
examples:
  fourfold flops --model mpt-7b --seq-len 2048 --tokens-per-s 85144 --gpus 8 --gpu h100-80gb
  fourfold flops --model llama-3.1-8b --seq-len 8192 --step-s 6.1 --global-batch 128 --gpus 8 \\
      --gpu h100-80gb --precision fp8 --recompute selective
"""


@command(*options.of(FlopsRequest), *options.run_options(), examples=_FLOPS)
def flops(args: Arguments, show: OnEvent) -> Output:
    """Convert a measured speed to MFU, HFU and TFLOP/s under every published convention.

    Give tokens/s over all GPUs, or seconds per step with a global batch. Without a speed only the
    FLOPs per token are printed. A percentage is against the GPU's dense peak in the run's precision
    (fp8 against the fp8 peak). HFU includes the recomputation of the policy.
    """
    run = options.run_table(args, note=notes(show))
    answer = fourfold.flops(run, options.load(FlopsRequest, args))
    return Output.of(answer, lambda: shapes.flops_page(answer))


_ENGINE = options.of(EngineMemoryRequest, "engine", "config", "layout", "gpu", "limit", "engines")
_DRYRUN = """\
examples:
  fourfold dryrun --model llama-3.1-8b --gpus 64 --tp 8 --pp 2 --seq-len 8192 --global-batch 64
  fourfold dryrun --model gpt-181b --tp 8 --pp 12 --dp 4 --micro-batch 2 --global-batch 2048 \\
      --seq-len 2048 --recompute full --sharding zero1 --precision fp16 --stages
  fourfold dryrun --engine torchtitan==0.2.2 --model llama-3.1-8b --layout "dp64 zero3" \\
      --seq-len 8192 --gpu h100-80gb              another engine's own code, against a GPU's memory
  fourfold dryrun --engine torchtitan==0.2.2 --config llama3_8b.toml --gpus 64 --gpu h100-80gb
"""


@command(
    option(
        "--rank",
        "rank to count (default 0), or of another engine first, last, worst (its default)",
        "R",
        either="which",
    ),
    option("--stages", "count one rank of every pipeline stage", switch=True, either="which"),
    *_ENGINE,
    *options.run_options(),
    examples=_DRYRUN,
)
def dryrun(args: Arguments, show: OnEvent) -> Output:
    """Count what any rank of any layout holds, computes and sends, without hardware.

    One process acts as the rank: every operator and collective of a step of the real engine runs on
    fake tensors, which have shapes but no memory. It counts rank 0, --rank R, or with --stages one
    rank of every pipeline stage. Steps of more than 2 pp micro batches are counted at pp + 2 and 2
    pp and extrapolated linearly.

    With --engine another engine's own model, wrappers, schedule and optimizer take two steps as the
    rank, and a model of torch's allocator says what it allocates and reserves, and whether that
    fits. It needs the release ('fourfold engines install'), no GPU and no weights. --config takes
    the settings that the engine itself is started with, untranslated.
    """
    run = options.run_table(args, note=notes(show))
    if args.engine is None:
        others = [one for one in _ENGINE if one.key != "layout"]
        options.refuse(args, others, "goes with --engine")
        run = run if args.layout is None else put_layout(run, args.layout)
        is_number = args.rank is None or args.rank.isdecimal()
        check.that(is_number, "--rank", args.rank, "must be a number", "add --engine for a name")
        rank = None if args.rank is None else int(args.rank)
        answer = fourfold.dryrun(run, rank=rank, stages=bool(args.stages), on_event=show)
        return Output.of(answer, lambda: _page(answer))
    rule, hint = "does not go with --engine", "use --rank worst, which counts every stage"
    check.that(not args.stages, "--stages", None, rule, hint)
    request = options.load(EngineMemoryRequest, args)
    memory = fourfold.engine_memory(run, request, on_event=show)
    return Output.of(memory, lambda: memory_page(memory), status=0 if memory.runs else 1)


def _page(answer: DryRun) -> list[Part]:
    from fourfold.cost.memory.unseen import RESERVED_RATIO

    worst, moved = answer.worst, answer.moved_bytes
    seen = {traffic.axis for count in answer.stages for traffic in count.comm}
    axes = [axis for axis in (*AXES, "ep", "edp") if axis in seen]
    counts = table(
        answer.stages,
        *named("stage", "rank", "params:count", "state=state_bytes:bytes"),
        *named("activations=activation_bytes:bytes", "peak=peak_bytes:bytes", "at=peak_phase"),
        *named("FLOPs=flops:count"),
        *((axis, lambda one, axis=axis: show_bytes(moved(one, axis))) for axis in axes),
    )
    low, high = RESERVED_RATIO
    iterations = f", {answer.optimizer}" if answer.optimizer.startswith("muon") else ""
    payload = f"; {', '.join(axes)}: payload of collectives" if axes else ""
    return [
        counts,
        "",
        f"{answer.model} on {counted(answer.gpus, 'rank')}, {answer.layout}{iterations}; per rank "
        f"and step{payload}",
        f"fullest: stage {worst.stage}, rank {worst.rank}, in {worst.peak_phase}; its largest:",
        *(
            f"  {show_bytes(large.bytes):>10}  {large.kind}, {large.shape} {large.dtype}, "
            f"{large.op} in {large.phase}"
            for large in worst.largest[:3]
        ),
        f"on a GPU about {answer.peak_with_unseen_bytes / 1e9:.1f} GB; a dry run cannot see:",
        *(f"  {show_bytes(part.bytes):>10}  {part.name} ({part.source})" for part in answer.unseen),
        f"torch's allocator may reserve {low:g} to {high:g} times the peak (measured on an H200) "
        "and returns it when short",
        *([answer.extrapolation] if answer.extrapolation else []),
    ]
