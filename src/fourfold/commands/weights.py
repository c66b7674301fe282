"""A training's weights as a Hugging Face folder: config.json and safetensors, for transformers.

CHECKPOINT is the folder of a training (its newest checkpoint) or of one checkpoint. Llama shapes
are written as LlamaForCausalLM; learned positions with biases as GPT2LMHeadModel; ALiBi without
biases as MptForCausalLM; rotary positions with LayerNorm and GELU as Starcoder2ForCausalLM. A shape
that none of them computes is refused. The way back is 'train --weights DIR'. '--format dcp' writes
torch.distributed.checkpoint's own format instead: weights and moments of any shape.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.commands import flags, progress
from fourfold.errors import UserError
from fourfold.launch.folder import scratch
from fourfold.launch.local import JobError, must_be_ok, run_job
from fourfold.result.checkpoint import folder as checkpoints
from fourfold.result.checkpoint.folder import Checkpoint
from fourfold.result.checkpoint.state import STATE_FILE
from fourfold.result.files.inside import NotWholeError
from fourfold.result.job import answer_file
from fourfold.show.table import json_text, render
from fourfold.spec import codec
from fourfold.spec.hf.tensors import export_type
from fourfold.spec.job import Job
from fourfold.spec.tokens import read_info, tokenizer_name, tokenizer_path
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
_DTYPES = ("fp64", "fp32", "bf16", "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="{export}")
    one = actions.add_parser("export", help="a checkpoint -> safetensors", allow_abbrev=False)
    one.add_argument("checkpoint", metavar="CHECKPOINT", help="of a training, or one checkpoint")
    one.add_argument("out", metavar="OUT", help="the folder to make")
    one.add_argument("--dtype", choices=_DTYPES, help="format of the values (default: as they are)")
    one.add_argument("--force", action="store_true", help="replace an earlier export")
    one.add_argument(
        "--format",
        action="append",
        choices=(*_FOLDERS, *flags.FORMATS),
        default=[],
        help="of the folder: hf (default) or dcp; of what is printed: text (default), md, csv or "
        "json; may be given twice",
    )


def run(args: argparse.Namespace) -> int:
    folder_format = _last(args.format, _FOLDERS)
    style = _last(args.format, ("text", *flags.FORMATS))
    found = _checkpoint(Path(args.checkpoint))
    kind = export_type(found.state.spec.model) if folder_format == "hf" else folder_format
    _must_be_free(Path(args.out), args.force, folder_format)
    if folder_format == "hf":
        must_have_safetensors("weights export")
    try:
        answer = _exported(found, args, folder_format)
        if folder_format == "hf" and (name := _copy_tokenizer(found, Path(args.out))):
            answer["files"] = [*answer["files"], name]
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
    print(json_text(facts) if style == "json" else _text(facts, style))
    return 0


def _last(given: Sequence[str], choices: Sequence[str]) -> str:
    """The last of these that was given, else the first there is."""
    return next((one for one in reversed(given) if one in choices), choices[0])


def must_have_safetensors(what: str) -> None:
    """Before torch is started, which never needs to be for this."""
    if importlib.util.find_spec("safetensors") is None:
        raise UserError(
            f"'{what}' needs the package 'safetensors', which is not installed",
            hint="pip install safetensors",
        )


def _checkpoint(path: Path) -> Checkpoint:
    """A checkpoint's own folder, or the newest whole one of a training."""
    path = path.resolve() if path.is_symlink() else path  # what the user names may be a link
    if (path / STATE_FILE).exists():
        return checkpoints.read(path)
    torn: list[tuple[str, UserError]] = []
    for root in (path / "checkpoints", path):
        found, some = checkpoints.newest(root), checkpoints.torn(root)
        torn += some
        if found is not None:
            for name, error in some:
                if (len(name), name) < (len(found.folder.name), found.folder.name):
                    continue
                if not isinstance(error, NotWholeError):
                    raise error
                print(f"passed over {name}: {error.rule}", file=sys.stderr)
            return found
    why = f": {torn[-1][0]}: {torn[-1][1].rule}" if torn else ""
    raise UserError(
        f"holds no whole checkpoint{why}",
        field="checkpoint",
        value=str(path),
        hint="name the --out of a 'fourfold train', or one of its checkpoints",
    )


def _must_be_free(out: Path, force: bool, folder_format: str) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError("is a file", field="out", value=str(out), hint="name a folder")
    held = [path.name for path in out.iterdir()]
    if held and not force:
        raise UserError(
            "exists", field="out", value=str(out), hint="add --force, or name another folder"
        )
    made, suffix = {
        "hf": (
            ("config.json", "model.safetensors.index.json", "tokenizer.json"),
            ".safetensors",
        ),
        "dcp": ((".metadata",), ".distcp"),
    }[folder_format]
    other = [name for name in held if name not in made and not name.endswith(suffix)]
    if other:
        raise UserError(
            f"holds more than an export: {', '.join(sorted(other)[:3])}",
            field="out",
            value=str(out),
            hint="name another folder",
        )


def _exported(found: Checkpoint, args: argparse.Namespace, folder_format: str) -> dict[str, Any]:
    options = {
        "checkpoint": str(found.folder.absolute()),
        "out": str(Path(args.out).absolute()),
        "dtype": args.dtype or "",
        "format": folder_format,
        "eos": _end_token(found),
    }
    show = progress.progress_lines()
    phases = {"load": "reading the checkpoint", "save": "writing"}

    def say(text: str) -> None:
        show(phases.get(text.rpartition("now ")[2], "starting"))

    job = Job(job="weights", options=tuple(options.items()))
    with scratch() as folder:
        report = run_job(job, folder, progress=say)
        progress.end_line()
        must_be_ok(report)
        answer = codec.parse_json(files.read_text(answer_file(folder, 0)))
    assert isinstance(answer, dict)
    return answer


def _end_token(found: Checkpoint) -> str:
    """The token that ends a document in the training's token file; '' if there is none, or the
    file has moved since: an export does not need it."""
    data = found.state.spec.data
    try:
        end = read_info(data).end if data else -1
    except UserError as error:
        print(f"eos_token_id is left open: {error}", file=sys.stderr)
        return ""
    return str(end) if end >= 0 else ""


def _copy_tokenizer(found: Checkpoint, out: Path) -> str:
    """The file written: the tokenizer.json that made the training's tokens, where 'data make' kept
    it beside them and it is still that one; ''."""
    data = found.state.spec.data
    try:
        info = read_info(data) if data else None
        kept = tokenizer_path(data)
        if info is None or info.tokenizer in ("bytes", "given"):
            return ""
        text = files.read_text(kept, field="tokenizer")
        if tokenizer_name("", text).split()[-1] != info.tokenizer.split()[-1]:
            raise UserError("is not the one that made the tokens", field="tokenizer", value=kept)
    except UserError as error:
        print(f"tokenizer.json is left out: {error}", file=sys.stderr)
        return ""
    files.write_text(out / "tokenizer.json", text)
    return "tokenizer.json"


def _text(facts: dict[str, Any], style: str) -> str:
    rows = [
        ["folder", facts["out"], f"{len(facts['files'])} files, {show_bytes(facts['size_bytes'])}"],
        ["model_type", facts["model_type"], f"of {facts['model']}"]
        if facts["model_type"] != "dcp"
        else ["format", "torch.distributed.checkpoint", f"weights and moments of {facts['model']}"],
        ["values", facts["dtype"], ""],
        ["checkpoint", facts["checkpoint"], f"after {facts['step']:,} steps"],
    ]
    return render(["quantity", "value", "note"], rows, style)
