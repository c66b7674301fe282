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
from fourfold.commands import Command
from fourfold.options import FORMATS, option
from fourfold.output import Output, Stderr
from fourfold.show.table import Grid, Part
from fourfold.spec.words import DTYPES
from fourfold.units import show_bytes

EXAMPLES = """\
examples:
  fourfold weights export trained llama-out
  fourfold weights export trained/checkpoints/step-00000300 llama-out --dtype bf16
  python -c 'from transformers import AutoModelForCausalLM as A; A.from_pretrained("llama-out")'
  fourfold train --weights llama-out --gpus 2 --steps 100 --out further
  fourfold weights export trained torch-out --format dcp
"""
_FOLDERS = ("hf", "dcp")


def export(args: Any) -> Output:
    show = Stderr()
    answer = fourfold.export_weights(
        args.checkpoint,
        args.out,
        dtype=args.dtype,
        folder_format=next((f for f in reversed(args.format or ()) if f in _FOLDERS), "hf"),
        force=bool(args.force),
        on_event=show,
    )
    show.close()
    return Output.of(answer, lambda: _page(answer.facts))


ACTIONS = {
    "export": Command(
        "export",
        "Write a checkpoint as safetensors, or in torch's own format.",
        (
            option("checkpoint", "training folder, or one checkpoint", "CHECKPOINT"),
            option("out", "folder to create", "OUT"),
            option(
                "--dtype",
                "dtype of the values (default: unchanged)",
                choices=tuple(name for name in DTYPES if name not in ("fp8", "fp4")),
            ),
            option("--force", "replace an earlier export", switch=True),
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


def _page(facts: dict[str, Any]) -> list[Part]:
    rows = [
        ["folder", facts["out"], f"{len(facts['files'])} files, {show_bytes(facts['size_bytes'])}"],
        ["model_type", facts["model_type"], f"of {facts['model']}"]
        if facts["model_type"] != "dcp"
        else ["format", "torch.distributed.checkpoint", f"weights and moments of {facts['model']}"],
        ["values", facts["dtype"], ""],
        ["checkpoint", facts["checkpoint"], f"after {facts['step']:,} steps"],
    ]
    return [Grid(["quantity", "value", "note"], rows)]
