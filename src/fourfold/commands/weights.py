"""Export a training run's weights as a Hugging Face folder: config.json and safetensors.

CHECKPOINT is a training folder (its newest checkpoint is used) or one checkpoint. Llama shapes
are written as LlamaForCausalLM; learned positions with biases as GPT2LMHeadModel; ALiBi without
biases as MptForCausalLM; rotary positions with LayerNorm and GELU as Starcoder2ForCausalLM. A shape
that none of them computes is rejected. 'train --weights DIR' reads the folder back. '--format dcp'
writes torch.distributed.checkpoint's own format instead: weights and moments of any shape.
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import options
from fourfold.commands import Command
from fourfold.escape import FORMATS
from fourfold.events import OnEvent
from fourfold.options import option
from fourfold.output import Output
from fourfold.show.table import Part, quantities
from fourfold.units import counted, show_bytes
from fourfold.verbs.requests import WeightsRequest

EXAMPLES = """\
examples:
  fourfold weights export trained llama-out
  fourfold weights export trained/checkpoints/step-00000300 llama-out --dtype bf16
  python -c 'from transformers import AutoModelForCausalLM as A; A.from_pretrained("llama-out")'
  fourfold train --weights llama-out --gpus 2 --steps 100 --out further
  fourfold weights export trained torch-out --format dcp
"""
_FOLDERS = ("hf", "dcp")


def export(args: Any, show: OnEvent) -> Output:
    folder_format = next((one for one in reversed(args.format or ()) if one in _FOLDERS), "hf")
    request = options.load(WeightsRequest, args, folder_format=folder_format)
    answer = fourfold.export_weights(request, on_event=show)
    return Output.of(answer, lambda: _page(answer))


ACTIONS = {
    "export": Command(
        "export",
        "Write a checkpoint as safetensors, or in torch's own format.",
        (
            *options.of(WeightsRequest),
            option(
                "--format",
                "of the folder: hf (default) or dcp; of what is printed: text (default), md, csv "
                "or json; may be given twice",
                choices=(*_FOLDERS, *FORMATS),
                repeated=True,
            ),
        ),
        export,
        line="write a checkpoint as safetensors",
    )
}


def _page(answer: Any) -> list[Part]:
    kind = ["model_type", answer.model_type, f"of {answer.model}"]
    if answer.model_type == "dcp":
        kind = ["format", "torch.distributed.checkpoint", f"weights and moments of {answer.model}"]
    rows = [
        [
            "folder",
            answer.out,
            f"{counted(len(answer.files), 'file')}, {show_bytes(answer.size_bytes)}",
        ],
        kind,
        ["values", answer.dtype, ""],
        ["checkpoint", answer.checkpoint, f"after {counted(answer.step, 'step')}"],
    ]
    return [quantities(rows)]
