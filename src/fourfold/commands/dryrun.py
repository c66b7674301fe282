"""Count what any rank of any layout holds, computes and sends, without hardware.

One process acts as the rank: every operator and collective of a step of the real engine runs on
fake tensors, which have shapes but no memory. It counts rank 0, --rank R, or with --stages one rank
of every pipeline stage. Steps of more than 2 pp micro batches are counted at pp + 2 and 2 pp and
extrapolated linearly.
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import options
from fourfold.events import OnEvent, notes
from fourfold.options import option
from fourfold.output import Output
from fourfold.result.one_rank import RESERVED_RATIO
from fourfold.show.table import Part, named, table
from fourfold.spec.layout import AXES
from fourfold.spec.run import run_of
from fourfold.units import counted, show_bytes

EXAMPLES = """\
examples:
  fourfold dryrun --model llama-3.1-8b --gpus 64 --tp 8 --pp 2 --seq-len 8192 --global-batch 64
  fourfold dryrun --model gpt-181b --tp 8 --pp 12 --dp 4 --micro-batch 2 --global-batch 2048 \\
      --seq-len 2048 --recompute full --sharding zero1 --precision fp16 --stages
"""
OPTIONS = (
    option("--rank", "rank to count (default 0)", "R", read=int, either="which"),
    option("--stages", "count one rank of every pipeline stage", switch=True, either="which"),
    *options.run_options(),
    options.FORMAT,
)


def run(args: Any, show: OnEvent) -> Output:
    spec = run_of(options.run_table(args, note=notes(show)))
    answer = fourfold.dryrun(spec, rank=args.rank, stages=bool(args.stages), on_event=show)
    return Output.of(answer, lambda: _page(answer))


def _page(answer: Any) -> list[Part]:
    spec, worst, moved = answer.spec, answer.worst, answer.moved_bytes
    axes = [axis for axis in AXES if spec.layout.size(axis) > 1]
    counts = table(
        answer.counts,
        *named("stage", "rank", "params:count", "state=state_bytes:bytes"),
        *named("activations=activation_bytes:bytes", "peak=peak_bytes:bytes", "at=peak_phase"),
        *named("FLOPs=flops:count"),
        *((axis, lambda one, axis=axis: show_bytes(moved(one, axis))) for axis in axes),
    )
    low, high = RESERVED_RATIO
    return [
        counts,
        "",
        f"{spec.model.name} on {counted(spec.gpus, 'rank')}, {spec.layout}; per rank and step; "
        f"{', '.join(AXES)}: payload of collectives",
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
