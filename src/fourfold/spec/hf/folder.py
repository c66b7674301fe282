"""A folder of Hugging Face weights: whose model it is, which tensors it has and of what sizes. Read
without torch, so that what does not fit is refused before ranks start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from fourfold import files
from fourfold.errors import UserError, inside, install
from fourfold.spec import check, codec, texts
from fourfold.spec.hf.shapes import shape_from_config
from fourfold.spec.hf.tensors import MODULES, Location, is_buffer, locate
from fourfold.spec.model import ModelShape

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# What decides the function beside sizes. Dropout is a run's, not the weights'.
_FUNCTION = (
    "norm",
    "norm_eps",
    "activation",
    "positions",
    "heads",
    "kv_heads",
    "tied",
    "qk_norm",
    "norms",
    "block",
    "window",
    "mixers",
    "variants",
    "top_k",
)
_ROUTING = (
    "moe.score",
    "moe.normalised",
    "moe.scale",
    "moe.groups",
    "moe.group_top_k",
    "moe.group_score",
)


class Named(Protocol):
    """A parameter of ours, as cost/count/params.py lists them."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class HfFolder:
    """A folder with config.json and safetensors, open for reading."""

    def __init__(self, folder: str | Path, *, framework: str = "numpy") -> None:
        self.folder = Path(folder)
        self.config = _config(self.folder)
        self.kind = str(self.config.get("model_type", ""))
        rule, hint = f"has the unsupported model type '{self.kind}'", ", ".join(MODULES)
        self._must(not self.kind or self.kind in MODULES, rule, f"supported: {hint}")
        self.shape = shape_from_config(self.config, name=self.folder.name or "custom")
        self._framework = framework
        self._files = self._tensor_files()
        self._open: dict[Path, Any] = {}

    def _must(self, holds: bool, rule: str, hint: str = "") -> None:
        check.that(holds, "weights", str(self.folder), rule, hint)

    def require(self, model: ModelShape, tensors: Iterable[Named]) -> None:
        """Refuse weights that are not those of `model`: another function, names or sizes."""
        self._same_function(model)
        wanted = {name: size for name, size, _ in theirs(self.kind, model, tensors)}
        for name, size in wanted.items():
            stored = tuple(self.slice_of(name).get_shape())
            rule = f"has {name} of shape {list(stored)}, but the model has {list(size)}"
            self._must(stored == size, rule, self._own_model)
        # The file of a tied model may hold the same values a second time.
        known = {*wanted, "lm_head.weight"}
        extra = [n for n in self._files if self._full(n) not in known and not is_buffer(n)]
        names = ", ".join(sorted(extra)[:4])
        self._must(not extra, f"has tensors that the model does not have: {names}")

    def _same_function(self, model: ModelShape) -> None:
        """Sizes are compared by tensor; what has no tensor here."""
        ours, theirs = _function(model), _function(self.shape)
        for field, value in ours.items():
            rule = f"has {field} = {theirs[field]}, the model {value}"
            self._must(value == theirs[field], rule, self._own_model)

    @property
    def _own_model(self) -> str:
        return f"use its own model: omit --model, or --model {self.folder / CONFIG}"

    def _full(self, name: str) -> str:
        """A file of the bare model leaves the first word of its names out."""
        prefix = MODULES[self.kind]["embedding"].partition(".")[0]
        return name if name.startswith((f"{prefix}.", "lm_head.")) else f"{prefix}.{name}"

    def slice_of(self, name: str) -> Any:
        short = name if name in self._files else name.partition(".")[2]
        self._must(short in self._files, f"has no tensor {name}", "is a file missing?")
        path = self._files[short]
        if path not in self._open:
            self._open[path] = self._opened(path)
        return self._open[path].get_slice(short)

    def _tensor_files(self) -> dict[str, Path]:
        folder = self.folder
        if (folder / INDEX).exists():
            plain = texts.parse_json(files.read_text(folder / INDEX, field="weights"))
            index = plain.get("weight_map") if isinstance(plain, dict) else None
            if not isinstance(index, dict):
                raise UserError("has no weight_map", field="weights", value=str(folder / INDEX))
            # Only names: an index must not point out of its folder.
            return {str(name): folder / Path(str(file)).name for name, file in index.items()}
        if (folder / WHOLE).exists():
            return dict.fromkeys(self._opened(folder / WHOLE).keys(), folder / WHOLE)
        rule = f"has neither {WHOLE} nor {INDEX}"
        hint = "save it with safe_serialization; other formats are not supported"
        raise UserError(rule, field="weights", value=str(folder), hint=hint)

    def _opened(self, path: Path) -> Any:
        package = safetensors()
        files.open_regular(path, field="weights").close()  # a pipe would wait for a writer
        try:
            return package.safe_open(path, framework=self._framework, device="cpu")
        except (OSError, package.SafetensorError) as error:
            raise UserError(f"cannot be read ({error})", field="weights", value=str(path)) from None


def _function(shape: ModelShape) -> dict[str, Any]:
    plain = codec.encode(
        replace(shape, variants=tuple(one for one in shape.variants if one != "dropout"))
    )
    places, routing = plain["positions"], plain.get("moe") or {}
    if shape.positions.kind == "learned":  # the table is a tensor
        plain["positions"] = "learned"
    else:  # by what they compute
        places.pop("made_for", None)
    return {name: plain.get(name) for name in _FUNCTION} | {
        name: routing.get(name.partition(".")[2]) for name in _ROUTING
    }


def theirs(
    kind: str, model: ModelShape, tensors: Iterable[Named]
) -> Iterator[tuple[str, tuple[int, ...], list[tuple[str, Location]]]]:
    """Every tensor of a Hugging Face model: its name and size, and which of ours lie in it."""
    parts: dict[str, list[tuple[Named, Location]]] = {}
    for tensor in tensors:
        if tensor.name.endswith("router.load"):  # what a router keeps between steps, no weight
            continue
        location = locate(kind, model, tensor.name)
        parts.setdefault(location.name, []).append((tensor, location))
    for name, held in parts.items():
        size = (sum(tensor.shape[0] for tensor, _ in held), *held[0][0].shape[1:])
        ours = [(tensor.name, location) for tensor, location in held]
        yield name, size[::-1] if held[0][1].transposed else size, ours


def safetensors() -> Any:
    """The package, imported where it is used: it is an extra."""
    try:
        import safetensors
    except ModuleNotFoundError:
        rule = "Hugging Face weights need the package 'safetensors', which is not installed"
        raise UserError(rule, hint=install("safetensors")) from None
    return safetensors


def _config(folder: Path) -> dict[str, Any]:
    rule = f"is not a Hugging Face folder: it has no {CONFIG}"
    hint = "of a training, 'fourfold weights export' writes one"
    check.that((folder / CONFIG).exists(), "weights", str(folder), rule, hint)
    text = files.read_text(folder / CONFIG, field="weights")
    with inside(folder / CONFIG):
        config = texts.parse_json(text)
        if not isinstance(config, dict):
            raise UserError("is not a JSON object")
        return config
