"""What a training reads and what it leaves: token files and weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fourfold
from fourfold import options
from fourfold.commands import Command, command
from fourfold.escape import FORMATS
from fourfold.events import OnEvent
from fourfold.options import option
from fourfold.output import Output
from fourfold.text_table import Part, quantities
from fourfold.units import counted, show_bytes
from fourfold.verbs.requests import TokensRequest, WeightsRequest

if TYPE_CHECKING:
    from fourfold.flag import Arguments
    from fourfold.verbs.tokens import Tokens
    from fourfold.verbs.weights import ExportedWeights

_DATA = """\
examples:
  fourfold data make --out corpus README.md docs/*.md
  fourfold data make --out corpus --tokenizer llama/tokenizer.json books/*.txt
  fourfold data make --out web --tokenizer tokenizer.json shard-*.jsonl shard-*.parquet
  zcat dump.gz | fourfold data make --out dump -
  fourfold data show corpus
  fourfold bench --model llama-tiny --gpus 2 --seq-len 128 --global-batch 16 --data corpus
"""


@command(*options.of(TokensRequest), line="make a token file from texts")
def make(args: Arguments, show: OnEvent) -> Output:
    """Turn texts into a token file."""
    answer = fourfold.make_tokens(options.load(TokensRequest, args), on_event=show)
    return Output.of(answer, lambda: _tokens_page(answer))


@command(
    option("name", "name given to 'data make --out'", "NAME"),
    option("--quick", "check only both ends of the file", switch=True),
    line="show and check a token file",
)
def show_file(args: Arguments, show: OnEvent) -> Output:
    """Show and check a token file."""
    answer = fourfold.show_tokens(args.name, quick=bool(args.quick), on_event=show)
    return Output.of(answer, lambda: _tokens_page(answer), status=int(answer.checksum == "differs"))


def _tokens_page(answer: Tokens) -> list[Part]:
    info, distinct = answer.info, answer.distinct_tokens
    checks = {
        "matches": "all tokens read",
        "ends match": "first and last MiB checked",
        "differs": f"side file says {info.sha256[:16]}",
    }
    end = "none" if info.end < 0 else info.end
    rows = [
        ["file", answer.tokens_file, ""],
        ["tokens", f"{info.tokens:,}", f"{info.dtype}, {show_bytes(info.size_bytes)}"],
        ["documents", f"{info.documents:,}", f"end token: {end}"],
        ["tokenizer", info.tokenizer, ""],
        ["vocabulary", f"{info.vocab:,}", f"{distinct:,} of them occur" if distinct else ""],
        ["unigram entropy", f"{answer.unigram_nats:.4f} nats", "loss of a unigram model"],
        ["checksum", answer.checksum, checks[answer.checksum]],
        ["sha256", (answer.found_sha256 or info.sha256)[:16], ""],
        ["first tokens", " ".join(map(str, answer.first_tokens[:12])), ""],
    ]
    if answer.first_text is not None:
        rows.append(["as text", ascii(answer.first_text)[1:-1][:60], ""])
    return [quantities(rows)]


data = Command(
    "data",
    """\
Make and inspect token files, the --data of 'bench', 'sweep' and 'train'.

'data make' writes NAME.bin (little-endian uint16 or uint32 tokens) and NAME.json, its description.
Every FILE is one document, followed by an end token; of .jsonl and .parquet files every row is, by
its field 'text' (--text-field). '-' is stdin. Without --tokenizer a token is a byte and 256 ends a
document. 'data show' reads the whole file and verifies its checksum; it exits
with 1 if that differs.
""",
    examples=_DATA,
    actions={"make": make, "show": show_file},
)


_WEIGHTS = """\
examples:
  fourfold weights export trained llama-out
  fourfold weights export trained/checkpoints/step-00000300 llama-out --dtype bf16
  python -c 'from transformers import AutoModelForCausalLM as A; A.from_pretrained("llama-out")'
  fourfold train --weights llama-out --gpus 2 --steps 100 --out further
  fourfold weights export trained torch-out --format dcp
"""
_FOLDERS = ("hf", "dcp")


@command(
    *options.of(WeightsRequest),
    option(
        "--format",
        "of the folder: hf (default) or dcp; of what is printed: text (default), md, csv "
        "or json; may be given twice",
        choices=(*_FOLDERS, *FORMATS),
        repeated=True,
    ),
    line="write a checkpoint as safetensors",
    formats=False,
)
def export(args: Arguments, show: OnEvent) -> Output:
    """Write a checkpoint as safetensors, or in torch's own format."""
    folder_format = next((one for one in reversed(args.format or ()) if one in _FOLDERS), "hf")
    request = options.load(WeightsRequest, args, folder_format=folder_format)
    answer = fourfold.export_weights(request, on_event=show)
    return Output.of(answer, lambda: _weights_page(answer))


def _weights_page(answer: ExportedWeights) -> list[Part]:
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


weights = Command(
    "weights",
    """\
Export a training run's weights as a Hugging Face folder: config.json and safetensors.

CHECKPOINT is a training folder (its newest checkpoint is used) or one checkpoint. The shape decides
what it is written as: Llama, Mistral, Qwen2, Qwen3, OLMo 2; with experts Mixtral, Qwen3-MoE, OLMoE,
DeepSeek-V2, DeepSeek-V3; GPT-2 (learned positions, biases), MPT (ALiBi) or StarCoder2 (rotary
positions, LayerNorm, GELU). A shape that none of them computes is rejected. 'train --weights DIR'
reads the folder back. '--format dcp' writes torch.distributed.checkpoint's own format instead:
weights and moments of any shape.
""",
    examples=_WEIGHTS,
    actions={"export": export},
)
