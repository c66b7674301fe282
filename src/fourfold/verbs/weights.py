"""export_weights: a training's weights as a Hugging Face folder, or in torch's own format."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from fourfold import files
from fourfold.errors import UserError, install
from fourfold.events import Event, OnEvent, ignore, progress
from fourfold.launch.folder import scratch
from fourfold.launch.local import JobError, must_be_ok, run_job
from fourfold.result.checkpoint import folder as checkpoints
from fourfold.result.checkpoint.folder import STATE_FILE, Checkpoint
from fourfold.result.files.stored import NotWholeError
from fourfold.result.job import Job, answer_file
from fourfold.spec import check, codec, texts
from fourfold.spec.hf.tensors import export_type
from fourfold.spec.tokens import read_info, tokenizer_name, tokenizer_path
from fourfold.verbs import Answer
from fourfold.verbs.requests import WeightsRequest

# Files of an export by name, and the ending of the others.
_WRITTEN = {
    "hf": (("config.json", "model.safetensors.index.json", "tokenizer.json"), ".safetensors"),
    "dcp": ((".metadata",), ".distcp"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedWeights(Answer):
    out: str
    model_type: str
    model: str
    checkpoint: str
    step: int
    files: list[str]
    size_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class WrittenWeights:
    """The files that the job wrote, by their names in the folder."""

    files: tuple[str, ...]
    size_bytes: int
    dtype: str


def export_weights(request: WeightsRequest, *, on_event: OnEvent = ignore) -> ExportedWeights:
    found, out = _checkpoint(Path(request.checkpoint), on_event), Path(request.out)
    is_hf = request.folder_format == "hf"
    kind = export_type(found.state.spec.model) if is_hf else request.folder_format
    _must_be_free(out, request.force, request.folder_format)
    if is_hf:
        must_have_safetensors("weights export")
    written = _exported(found, request, on_event)
    copied = _copy_tokenizer(found, out, on_event) if is_hf else ""
    return ExportedWeights(
        out=str(out),
        model_type=kind,
        model=found.state.spec.model.name,
        checkpoint=str(found.folder),
        step=found.step,
        files=[*written.files, *filter(None, [copied])],
        size_bytes=written.size_bytes,
        dtype=written.dtype,
    )


def must_have_safetensors(what: str) -> None:
    """Before torch is started, which never needs to be for this."""
    if importlib.util.find_spec("safetensors") is None:
        rule = f"'{what}' needs the package 'safetensors', which is not installed"
        raise UserError(rule, hint=install("safetensors"))


def _checkpoint(path: Path, on_event: OnEvent) -> Checkpoint:
    """A checkpoint's own folder, or the newest whole one of a training."""
    path = path.resolve() if path.is_symlink() else path  # what the user names may be a link
    if (path / STATE_FILE).exists():
        return checkpoints.read(path)
    torn: list[tuple[str, UserError]] = []
    for root in (path / "checkpoints", path):
        found, some = checkpoints.newest(root), checkpoints.damaged(root)
        torn += some
        if found is not None:
            for name, error in some:
                if (len(name), name) < (len(found.folder.name), found.folder.name):
                    continue
                if not isinstance(error, NotWholeError):
                    raise error
                on_event(Event(f"skipped {name}: {error.rule}"))
            return found
    why = f": {torn[-1][0]}: {torn[-1][1].rule}" if torn else ""
    rule = f"has no intact checkpoint{why}"
    hint = "pass the --out of a 'fourfold train', or one of its checkpoints"
    raise UserError(rule, field="checkpoint", value=str(path), hint=hint)


def _must_be_free(out: Path, force: bool, folder_format: str) -> None:
    if not out.exists():
        return
    check.that(out.is_dir(), "out", str(out), "is a file", "pass a folder")
    names = [path.name for path in out.iterdir()]
    hint = "use --force to overwrite it, or choose another folder"
    check.that(not names or force, "out", str(out), "already exists", hint)
    made, suffix = _WRITTEN[folder_format]
    other = [name for name in names if name not in made and not name.endswith(suffix)]
    if other:
        rule = f"contains files that are not of an export: {', '.join(sorted(other)[:3])}"
        raise UserError(rule, field="out", value=str(out), hint="choose another folder")


def _exported(found: Checkpoint, request: WeightsRequest, on_event: OnEvent) -> WrittenWeights:
    options = {
        "checkpoint": str(found.folder.absolute()),
        "out": str(Path(request.out).absolute()),
        "dtype": request.dtype or "",
        "format": request.folder_format,
        "eos": _end_token(found, on_event),
    }
    show = progress(on_event)
    phases = {"load": "reading the checkpoint", "save": "writing"}

    def say(text: str) -> None:
        show(phases.get(text.rpartition("now ")[2], "reading the checkpoint"))

    job = Job(job="weights", options=tuple(options.items()))
    with scratch() as folder:
        report = run_job(job, folder, progress=say)
        try:
            must_be_ok(report)
        except JobError as error:
            lines = str(error)
            if " illegal " not in lines.partition("\n")[0]:
                raise
            # Explained: where it was noticed is no help.
            raise JobError(lines.partition("\nTraceback")[0]) from None
        answer = texts.parse_json(files.read_text(answer_file(folder, 0)))
    return codec.decode(WrittenWeights, answer)


def _end_token(found: Checkpoint, on_event: OnEvent) -> str:
    """The token that ends a document in the training's token file; '' if there is none, or the
    file has moved since: an export does not need it."""
    data = found.state.spec.data
    try:
        end = read_info(data).end if data else -1
    except UserError as error:
        on_event(Event(f"eos_token_id is left open: {error}"))
        return ""
    return str(end) if end >= 0 else ""


def _copy_tokenizer(found: Checkpoint, out: Path, on_event: OnEvent) -> str:
    """The file written: the tokenizer.json that made the training's tokens, where 'data make' kept
    it beside them and it is still that one; ''."""
    data = found.state.spec.data
    try:
        info = read_info(data) if data else None
        if info is None or info.tokenizer in ("bytes", "given"):
            return ""
        path = tokenizer_path(data)
        text = files.read_text(path, field="tokenizer")
        if tokenizer_name("", text).split()[-1] != info.tokenizer.split()[-1]:
            raise UserError("is not the one that made the tokens", field="tokenizer", value=path)
    except UserError as error:
        on_event(Event(f"tokenizer.json is left out: {error}"))
        return ""
    files.write_text(out / "tokenizer.json", text)
    return "tokenizer.json"
