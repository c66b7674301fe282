"""Weights from Hugging Face safetensors (names: spec/hf/tensors.py); a rank reads only what it
holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold import files
from fourfold.cost.count import params
from fourfold.engine.parallel.shards import Rect, Shard
from fourfold.engine.training.trainer import Trainer
from fourfold.errors import UserError, inside, install
from fourfold.spec import check, codec
from fourfold.spec.hf.shapes import shape_from_config
from fourfold.spec.hf.tensors import MODULES, Spot, is_buffer, spot_of
from fourfold.spec.model import ModelShape

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# What decides the function beside sizes. Dropout is a run's, not the weights'.
_FUNCTION = (
    "norm", "norm_eps", "activation", "positions", "heads", "kv_heads", "tied", "qk_norm", "norms",
    "block", "window", "local_layers", "variants",
)  # fmt: skip
_SUPPORTED = ", ".join(MODULES)
# What of a rectangle is in host memory at once.
_READ_BYTES = 2**28


class HfWeights:
    """A folder with config.json and safetensors, open for reading."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = _config(self.folder)
        self.shape = shape_from_config(self.config, name=self.folder.name or "custom")
        self.kind = str(self.config["model_type"])
        rule, hint = f"has the unsupported model type '{self.kind}'", f"supported: {_SUPPORTED}"
        self._must(self.kind in MODULES, rule, hint)
        self._files = _tensor_files(self.folder)
        self._open: dict[Path, Any] = {}

    def _must(self, holds: bool, rule: str, hint: str = "") -> None:
        check.that(holds, "weights", str(self.folder), rule, hint)

    def rectangle(self, model: ModelShape, name: str, rect: Rect, *, matrix: bool) -> Tensor:
        """A part of the published tensor `name`: [rows, columns] of a matrix, else [rows]."""
        spot = spot_of(self.kind, model, name)
        part = self._slice(spot.name)
        top, bottom = (spot.start + row for row in rect.rows)
        if not matrix:
            return part[top:bottom]
        left, right = rect.columns
        return part[left:right, top:bottom].T if spot.transposed else part[top:bottom, left:right]

    def require(self, model: ModelShape, seq_len: int) -> None:
        """Refuse weights that are not those of `model`: another function, names or sizes."""
        self._same_function(model)
        wanted = {name: size for name, size, _ in theirs(self.kind, model, seq_len)}
        for name, size in wanted.items():
            stored = tuple(self._slice(name).get_shape())
            rule = f"has {name} of shape {list(stored)}, but the model has {list(size)}"
            self._must(stored == size, rule, f"use its own model: --model {self.folder / CONFIG}")
        # The file of a tied model may hold the same values a second time.
        known = {*wanted, "lm_head.weight"}
        extra = [n for n in self._files if self._full(n) not in known and not is_buffer(n)]
        names = ", ".join(sorted(extra)[:4])
        self._must(not extra, f"has tensors that the model does not have: {names}")

    def _same_function(self, model: ModelShape) -> None:
        """Sizes are compared by tensor; what has no tensor here."""
        ours, theirs = (
            codec.encode(
                replace(shape, variants=tuple(v for v in shape.variants if v != "dropout"))
            )
            for shape in (model, self.shape)
        )
        for field in _FUNCTION:
            if field == "positions" and model.positions.kind == "learned":
                ours[field], theirs[field] = model.positions.kind, self.shape.positions.kind
            elif field == "positions":  # by what they compute
                ours[field].pop("made_for", None)
                theirs[field].pop("made_for", None)
            rule = f"has {field} = {theirs.get(field)}, the model {ours.get(field)}"
            hint = f"use its own model: --model {self.folder / CONFIG}"
            self._must(ours.get(field) == theirs.get(field), rule, hint)

    def _full(self, name: str) -> str:
        """A file of the bare model leaves the first word of its names out."""
        prefix = MODULES[self.kind]["embedding"].partition(".")[0]
        return name if name.startswith((f"{prefix}.", "lm_head.")) else f"{prefix}.{name}"

    def _slice(self, name: str) -> Any:
        short = name if name in self._files else name.partition(".")[2]
        self._must(short in self._files, f"has no tensor {name}", "is a file missing?")
        path = self._files[short]
        if path not in self._open:
            self._open[path] = _opened(path)
        return self._open[path].get_slice(short)


def theirs(
    kind: str, model: ModelShape, seq_len: int
) -> Iterator[tuple[str, tuple[int, ...], list[tuple[str, Spot]]]]:
    """Every tensor of a Hugging Face model: its name and size, and which of ours lie in it."""
    parts: dict[str, list[tuple[params.Param, Spot]]] = {}
    for tensor in params.tensors(model, seq_len):
        if tensor.name.endswith(f"router.{params.LOAD}"):
            continue
        spot = spot_of(kind, model, tensor.name)
        parts.setdefault(spot.name, []).append((tensor, spot))
    for name, tensors in parts.items():
        size = (sum(tensor.shape[0] for tensor, _ in tensors), *tensors[0][0].shape[1:])
        ours = [(tensor.name, spot) for tensor, spot in tensors]
        yield name, size[::-1] if tensors[0][1].transposed else size, ours


def begin_from(trainer: Trainer, folder: str, tick: Callable[[], None]) -> None:
    """Give a trainer the weights of a folder, if they are those of its model."""
    weights, spec = HfWeights(folder), trainer.spec
    weights.require(spec.model, spec.batch.seq_len)
    fill(trainer.shards, weights, spec.model, tick)


@torch.no_grad()
def fill(
    shards: Iterable[Shard],
    weights: HfWeights,
    model: ModelShape,
    tick: Callable[[], None] = lambda: None,
) -> None:
    for shard in shards:
        if shard.name.endswith(f"router.{params.LOAD}"):  # no batch came before
            shard.values.fill_(1.0 / shard.shape[0])
            continue
        (top, bottom), columns = shard.rect.rows, shard.rect.columns
        rows = max(1, _READ_BYTES // (4 * (columns[1] - columns[0])))
        for first in range(top, bottom, rows):
            last = min(bottom, first + rows)
            read = weights.rectangle(
                model, shard.name, Rect((first, last), columns), matrix=len(shard.shape) > 1
            )
            shard.values[first - top : last - top].copy_(read)
        tick()


def safetensors() -> Any:
    """The package, imported where it is used: it is an extra."""
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        rule = "Hugging Face weights need the package 'safetensors', which is not installed"
        raise UserError(rule, hint=install("safetensors")) from None
    return safetensors


def _config(folder: Path) -> dict[str, Any]:
    text = files.read_text(folder / CONFIG, field="weights")
    with inside(folder / CONFIG):
        config = codec.parse_json(text)
        if not isinstance(config, dict):
            raise UserError("is not a JSON object")
        return config


def _tensor_files(folder: Path) -> dict[str, Path]:
    if (folder / INDEX).exists():
        plain = codec.parse_json(files.read_text(folder / INDEX, field="weights"))
        index = plain.get("weight_map") if isinstance(plain, dict) else None
        if not isinstance(index, dict):
            raise UserError("has no weight_map", field="weights", value=str(folder / INDEX))
        # Only names: an index must not point out of its folder.
        return {str(name): folder / Path(str(file)).name for name, file in index.items()}
    if (folder / WHOLE).exists():
        return dict.fromkeys(_opened(folder / WHOLE).keys(), folder / WHOLE)
    rule = f"has neither {WHOLE} nor {INDEX}"
    hint = "save it with safe_serialization; other formats are not supported"
    raise UserError(rule, field="weights", value=str(folder), hint=hint)


def _opened(path: Path) -> Any:
    package = safetensors()
    if path.exists() and not path.is_file():  # a pipe would wait for a writer
        raise UserError("is not a regular file", field="weights", value=str(path))
    try:
        return package.safe_open(path, framework="pt", device="cpu")
    except (OSError, package.SafetensorError) as error:
        raise UserError(f"cannot be read ({error})", field="weights", value=str(path)) from None
