"""A training's weights as a Hugging Face folder: config.json and safetensors, for transformers.

CHECKPOINT is the folder of a training (its newest checkpoint) or of one checkpoint. Llama shapes
are written as LlamaForCausalLM; learned positions with biases as GPT2LMHeadModel; ALiBi without
biases as MptForCausalLM; rotary positions with LayerNorm and GELU as Starcoder2ForCausalLM. A shape
that none of them computes is refused. The way back is 'train --weights DIR'.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.commands import flags, progress
from fourfold.errors import UserError
from fourfold.launch.local import JobError, must_be_ok, run_job
from fourfold.result import checkpoints
from fourfold.result.checkpoints import STATE_FILE, Checkpoint
from fourfold.result.job import answer_file
from fourfold.show.table import json_text, render
from fourfold.spec import codec
from fourfold.spec.hf_tensors import export_type
from fourfold.spec.job import Job
from fourfold.units import show_bytes

EXAMPLES = """\
examples:
  fourfold weights export trained llama-out
  fourfold weights export trained/checkpoints/step-00000300 llama-out --dtype bf16
  python -c 'from transformers import AutoModelForCausalLM as A; A.from_pretrained("llama-out")'
  fourfold train --weights llama-out --gpus 2 --steps 100 --out further
"""
_DTYPES = ("fp64", "fp32", "bf16", "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="{export}")
    one = actions.add_parser("export", help="a checkpoint -> safetensors", allow_abbrev=False)
    one.add_argument("checkpoint", metavar="CHECKPOINT", help="of a training, or one checkpoint")
    one.add_argument("out", metavar="OUT", help="the folder to make")
    one.add_argument("--dtype", choices=_DTYPES, help="format of the values (default: as they are)")
    one.add_argument("--force", action="store_true", help="replace an earlier export")
    flags.add_format(one)


def run(args: argparse.Namespace) -> int:
    found = _checkpoint(Path(args.checkpoint))
    kind = export_type(found.state.spec.model)
    _must_be_free(Path(args.out), args.force)
    must_have_safetensors("weights export")
    try:
        answer = _exported(found, args)
    except JobError as error:
        progress.end_line()
        said = str(error)
        if " illegal " in said.partition("\n")[0]:  # explained; where it was noticed is no help
            said = said.partition("\nTraceback")[0]
        print(said, file=sys.stderr)
        return 1
    facts = {
        "out": str(args.out),
        "model_type": kind,
        "model": found.state.spec.model.name,
        "checkpoint": str(found.folder),
        "step": found.step,
        **answer,
    }
    print(json_text(facts) if args.format == "json" else _text(facts, args.format))
    return 0


def must_have_safetensors(what: str) -> None:
    """Before torch is started, which never needs to be for this."""
    if importlib.util.find_spec("safetensors") is None:
        raise UserError(
            f"'{what}' needs the package 'safetensors', which is not installed",
            way_out="pip install '.[hf]'",
        )


def _checkpoint(path: Path) -> Checkpoint:
    """A checkpoint's own folder, or the newest whole one of a training."""
    if (path / STATE_FILE).exists():
        return checkpoints.read(path)
    for root in (path / "checkpoints", path):
        found = checkpoints.newest(root)
        if found is not None:
            return found
    raise UserError(
        "holds no whole checkpoint",
        field="checkpoint",
        value=str(path),
        way_out="name the --out of a 'fourfold train', or one of its checkpoints",
    )


def _must_be_free(out: Path, force: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError("is a file", field="out", value=str(out), way_out="name a folder")
    held = [path.name for path in out.iterdir()]
    if held and not force:
        raise UserError(
            "exists", field="out", value=str(out), way_out="add --force, or name another folder"
        )
    made = ("config.json", "model.safetensors.index.json")
    other = [name for name in held if name not in made and not name.endswith(".safetensors")]
    if other:
        raise UserError(
            f"holds more than an export: {', '.join(sorted(other)[:3])}",
            field="out",
            value=str(out),
            way_out="name another folder",
        )


def _exported(found: Checkpoint, args: argparse.Namespace) -> dict[str, Any]:
    options = {
        "checkpoint": str(found.folder.absolute()),
        "out": str(Path(args.out).absolute()),
        "dtype": args.dtype or "",
    }
    show = progress.progress_lines()
    phases = {"load": "reading the checkpoint", "save": "writing"}

    def say(text: str) -> None:
        show(phases.get(text.rpartition("now ")[2], "starting"))

    job = Job(job="weights", options=tuple(options.items()))
    with tempfile.TemporaryDirectory(prefix="fourfold-") as name:
        report = run_job(job, Path(name), progress=say)
        progress.end_line()
        must_be_ok(report)
        answer = codec.parse_json(files.read_text(answer_file(Path(name), 0)))
    assert isinstance(answer, dict)
    return answer


def _text(facts: dict[str, Any], style: str) -> str:
    rows = [
        ["folder", facts["out"], f"{len(facts['files'])} files, {show_bytes(facts['size_bytes'])}"],
        ["model_type", facts["model_type"], f"of {facts['model']}"],
        ["values", facts["dtype"], ""],
        ["checkpoint", facts["checkpoint"], f"after {facts['step']:,} steps"],
    ]
    return render(["quantity", "value", "note"], rows, style)
