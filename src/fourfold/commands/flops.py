"""Convert a measured speed to MFU, HFU and TFLOP/s under every published convention.

Give tokens/s over all GPUs, or seconds per step with a global batch. Without a speed only the
FLOPs per token are printed. A percentage is against the GPU's dense peak in the run's precision
(fp8 against the fp8 peak). HFU includes the recomputation of the policy.
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import options
from fourfold.events import OnEvent, notes
from fourfold.output import Output
from fourfold.show.shapes import flops_page
from fourfold.verbs.flops import FlopsRequest

EXAMPLES = """\
examples:
  fourfold flops --model mpt-7b --seq-len 2048 --tokens-per-s 85144 --gpus 8 --gpu h100-80gb
  fourfold flops --model llama-3.1-8b --seq-len 8192 --step-s 6.1 --global-batch 128 --gpus 8 \\
      --gpu h100-80gb --precision fp8 --recompute selective
"""
OPTIONS = (*options.of(FlopsRequest), *options.run_options(), options.FORMAT)


def run(args: Any, show: OnEvent) -> Output:
    run = options.run_table(args, note=notes(show))
    answer = fourfold.flops(run, options.load(FlopsRequest, args))
    return Output.of(answer, lambda: flops_page(answer))
