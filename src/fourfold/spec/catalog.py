"""Models, devices and clusters that are known by name, from data files shipped with the package. A
path to a file stands in for a name everywhere.
"""

from __future__ import annotations

import functools
import glob
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any, TypeVar

from fourfold import files
from fourfold.errors import UserError, inside, nearest
from fourfold.spec import check, codec, texts
from fourfold.spec.cluster import Cluster, Device, KernelRates, device_id, stretched
from fourfold.spec.model import FAMILIES, ModelShape
from fourfold.spec.texts import DATA, data, text

T = TypeVar("T")
# Of kernels on a GPU that no table knows.
UNMEASURED = {"product_spread": 0.15, "attention_spread": 0.4, "guessed": ["product", "attention"]}
_LISTED = 8  # presets of a family in one line of an error
_PATHLIKE = re.compile(r"[/\\]|\.(json|toml)\Z")
_HUB_ID = re.compile(r"(?!.*\.(json|toml)\Z)\w[\w.-]*/\w[\w.-]*", re.ASCII)
# Small models that `verify` trains, as different as families get: learned positions; ALiBi, a norm
# after the embedding, a vocabulary that nothing divides; rotary positions, a gate, shared KV heads
# and a head of its own. The first three are tried unless others are asked for: biases of queries
# and keys, norms of them by head, a head size of its own; norms after blocks, norms of queries and
# keys over their whole width; experts balanced by a loss over the batch; and experts in groups,
# with a bias, shared ones, a dense first layer and latent attention.
TINY = {
    "mpt": "mpt-tiny",
    "gpt": "bloom-tiny",
    "llama": "llama-tiny",
    "qwen": "qwen-tiny",
    "olmo2": "olmo2-tiny",
    "mixtral": "mixtral-tiny",
    "deepseek": "deepseek-tiny",
}


def kinds(cls: type[T], name: str) -> dict[str, T]:
    """Entries of a data file by their names."""
    return {one: codec.decode(cls, table, one) for one, table in data(name).items()}


@functools.cache
def _folder(name: str) -> dict[str, str]:
    """Stem -> file name of a data folder."""
    files = (os.path.splitext(file) for file in os.listdir(os.path.join(DATA, name)))
    return {stem: f"{name}/{stem}.toml" for stem, suffix in files if suffix == ".toml"}


def model_names() -> dict[str, str]:
    """Every preset -> its family, in the order of the files."""
    return {name: family for family in FAMILIES for name in data(f"models/{family}.toml")["models"]}


def is_preset(one: ModelShape) -> bool:
    """Whether its name alone says all of it."""
    return one.name in model_names() and model(one.name) == one


def shape(family: str, **fields: Any) -> ModelShape:
    """A model of a family from its sizes; what is not given is the family's habit."""
    if family not in FAMILIES:
        hint = nearest(family, FAMILIES)
        raise UserError("unknown family", field="family", value=family, hint=hint)
    defaults = dict(data(f"models/{family}.toml")["defaults"])
    per_hidden = defaults.pop("ffn_per_hidden", None)
    table = {"family": family, **defaults, **{k: v for k, v in fields.items() if v is not None}}
    given, habit = table.get("positions"), defaults["positions"]
    if isinstance(given, dict) and given.get("kind", habit["kind"]) == habit["kind"]:
        table["positions"] = {**habit, **given}
    table.setdefault("kv_heads", table.get("heads"))
    if per_hidden and "hidden" in table:
        table.setdefault("ffn", per_hidden * table["hidden"])
    return codec.decode(ModelShape, table)


def model(name: str) -> ModelShape:
    """A preset by name, or the shape in a config.json or a file in our own words."""
    check.that(isinstance(name, str) and name, "model", name, "must be a name or a path")
    if _HUB_ID.fullmatch(name) and not os.path.exists(name):
        return _hub_model(name)
    if _PATHLIKE.search(name):
        return _model_file(name)
    key = name.lower()
    for family in FAMILIES:  # a family's file is read only if those before it lack the name
        if key in data(f"models/{family}.toml")["models"]:
            return _preset(family, key)
    if os.path.isfile(os.path.join(name, "config.json")):
        return _model_file(name)
    listed = "'fourfold models' lists them; the path of a config.json works too"
    near = _near_models(key)
    hint = f"{near} ({listed})" if near else listed
    raise UserError("unknown model", field="model", value=name, hint=hint)


@functools.cache
def _preset(family: str, name: str) -> ModelShape:
    """Return a preset, which is read once in a process."""
    return shape(family, name=name, **data(f"models/{family}.toml")["models"][name])


def _near_models(name: str) -> str:
    """Return 'did you mean ...', or the presets of the same family where the version or the size
    is another; '' where no preset is like it."""
    names = model_names()
    series = re.match(r"[a-z]+", name)
    full = [preset for preset in names if not preset.endswith(("-tiny", "-mini"))]
    family = [preset for preset in full if series and preset.startswith(series[0])]
    near = nearest(name, names)
    close = near.startswith("did you mean")
    numbers = re.findall(r"\d+", name)
    if close and (not numbers or {*numbers} & {*re.findall(r"\d+", near)}):
        return near
    if family:
        return f"known: {', '.join(family[:_LISTED])}{', ...' if len(family) > _LISTED else ''}"
    return near if close else ""


def open_model(table: dict[str, Any], field: str, text: str) -> None:
    """A preset whose fields are about to change stands there with all of them; its name says so,
    unless the user gives one."""
    shape = table.get("model")
    if isinstance(shape, str):
        shape = table["model"] = codec.encode(model(shape))
    if field and isinstance(shape, dict) and isinstance(shape.get("name"), str):
        kept = [word for word in shape["name"].split(" ") if not word.startswith(f"{field}=")]
        shape["name"] = " ".join([*kept, f"{field}={text}"])


def _hub_model(name: str) -> ModelShape:
    """Of a name on a Hugging Face hub, which is never asked: what was downloaded here before, or
    the preset of the same name."""
    downloaded = _downloaded(name)
    last = name.rpartition("/")[2]
    if downloaded:
        return replace(_model_file(downloaded), name=last)
    if last.lower() in model_names():
        return model(last)
    import difflib  # 10 ms, only paid on an error

    close = difflib.get_close_matches(last.lower(), model_names(), n=1, cutoff=0.7)
    hint = f"'hf download {name} config.json' fetches it" + (
        f"; or did you mean the preset '{close[0]}'?" if close else "; then the same name works"
    )
    raise UserError("is no file and no downloaded model here", field="model", value=name, hint=hint)


def _downloaded(name: str) -> str:
    """Return the newest config.json that was downloaded of a name on a hub; '' where none was."""
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    folder = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    pattern = os.path.join(glob.escape(folder), f"models--{name.replace('/', '--')}", "snapshots")
    paths = glob.glob(os.path.join(pattern, "*", "config.json"))
    return max(paths, key=os.path.getmtime, default="")


def hub_config(name: str) -> tuple[str, str] | None:
    """Return (name, text) of the config.json that a path or a hub's name stands for, whatever it
    describes; None for a preset and for a file in our own words, which `model` reads."""
    path = name if _PATHLIKE.search(name) or os.path.isdir(name) else ""
    if _HUB_ID.fullmatch(name) and not os.path.exists(name):
        path = _downloaded(name)
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    if not path or path.endswith(".toml"):
        return None
    text = files.read_text(path, field="model")
    if "model_type" not in texts.parse(text, path):
        return None
    return _file_name(path) if path == name else name.rpartition("/")[2], text


def _file_name(path: str) -> str:
    """Return what a model in a file is called: by the folder of a config.json, else by the file."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.basename(folder if name == "config.json" else os.path.splitext(name)[0])


def _model_file(path: str) -> ModelShape:
    """A file, or a downloaded model's folder with its config.json."""
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    text = files.read_text(path, field="model")
    with inside(path):
        plain = texts.parse(text, path)
        name = _file_name(path)
        ours = plain.get("shape", plain)  # as 'fourfold models NAME --format json' prints it
        if isinstance(ours, dict) and ("family" in ours or path.endswith(".toml")):
            return _described({"name": name, **ours})
        from fourfold.spec.hf.shapes import shape_from_config

        return shape_from_config(plain, name=name or "custom")


def _described(plain: dict[str, Any]) -> ModelShape:
    """In our own words; of a family and its sizes the rest is the family's habit."""
    needed = {one.name for one in fields(ModelShape) if one.default is MISSING}
    if "family" not in plain or needed <= plain.keys():
        return codec.load(ModelShape, plain)
    return shape(**plain)


def device_names() -> tuple[str, ...]:
    return tuple(data("devices.toml")["devices"])


def device(name: str) -> Device:
    """A GPU by id ('h100-80gb'), or from a TOML or JSON file with the fields of Device."""
    if _PATHLIKE.search(name):
        return _from_file(name, "gpu", lambda plain: codec.load(Device, plain))
    table = data("devices.toml")["devices"]
    key = _device_id(name, table)
    if key not in table:
        hint = _did_you_mean([other for other in table if other.startswith(key)]) or (
            f"{nearest(key, table)} (to add a GPU, edit a copy of 'fourfold clusters --gpu "
            "h100-80gb --format json' and pass its path)"
        )
        raise UserError("unknown GPU", field="gpu", value=name, hint=hint)
    return _device(key)


@functools.cache
def _device(key: str) -> Device:
    return codec.decode(Device, {"id": key, **data("devices.toml")["devices"][key]})


def kernel_rates(device: Device) -> KernelRates:
    """Return the rates that kernels reach on a device: those it names, else those of the first
    known GPU of its generation, else what is usual, with wide spreads."""
    tables, devices = data("devices.toml")["kernels"], data("devices.toml")["devices"].values()
    alike = (one["kernels"] for one in devices if one["generation"] == generation_of(device))
    name = device.kernels or next(alike, "")
    if name and name not in tables:
        hint = f"known: {', '.join(tables)}"
        raise UserError("unknown table of kernels", field="kernels", value=name, hint=hint)
    return _kernel_rates(name)


@functools.cache
def _kernel_rates(name: str) -> KernelRates:
    table = data("devices.toml")["kernels"].get(name, UNMEASURED)
    return codec.decode(KernelRates, table, f"kernels.{name}")


def peak_of(name: str, precision: str) -> float | None:
    """Dense FLOP/s of a GPU by its driver's name of it; None where the GPU is not known, or has no
    unit for the format."""
    known = device_id(name, device_names())
    try:
        return device(known).peak(precision) if known else None
    except UserError:
        return None


def generation_of(gpu: Device | str) -> str:
    """What GPUs share whose calibrations stand in for each other; one that neither catalogue nor
    its own file places is a generation of its own."""
    if isinstance(gpu, Device) and gpu.generation:
        return gpu.generation
    head = (gpu.id if isinstance(gpu, Device) else gpu).lower().split("-")[0]
    table = data("devices.toml")["devices"].items()
    alike = (known["generation"] for name, known in table if name.split("-")[0] == head)
    return next(alike, head)


def _did_you_mean(names: Sequence[str]) -> str:
    if len(names) < 2:
        return f"did you mean {names[0]}?" if names else ""
    return f"did you mean {', '.join(names[:-1])} or {names[-1]}?"


def _device_id(name: str, known: Iterable[str]) -> str:
    """'H200' is one GPU; of a family of several sizes ('h100') the first listed is meant."""
    key = re.sub(r"[\s_]+", "-", name.strip().lower())
    variants = (other for other in known if other.startswith(f"{key}-"))
    return key if key in known else next(variants, key)


def cluster_names() -> tuple[str, ...]:
    return tuple(sorted(_folder("clusters")))


def cluster(name: str, gpus: int = 0) -> Cluster:
    """A cluster by name ('jean-zay'), or from a TOML file ('fourfold clusters new' writes one). A
    name stands for a kind of machine: there are as many of them as `gpus` need."""
    if _PATHLIKE.search(name):
        return _from_file(name, "cluster", cluster_from)
    known = _folder("clusters")
    if name.lower() not in known:
        hint = f"{nearest(name.lower(), known)} ('fourfold clusters new' describes yours)"
        raise UserError("unknown cluster", field="cluster", value=name, hint=hint)
    return stretched(_cluster(known[name.lower()]), gpus)


@functools.cache
def _cluster(file: str) -> Cluster:
    return cluster_from(data(file))


def profile_text(name: str) -> str:
    """What 'fourfold calibrate' wrote on a machine of this GPU; '' where none comes along."""
    if _PATHLIKE.search(name):
        return ""
    file = f"profiles/{name.lower()}.json"
    return text(file) if os.path.isfile(os.path.join(DATA, file)) else ""


def _from_file(path: str, field: str, build: Callable[[Any], T]) -> T:
    plain = texts.read(path, field=field)
    with inside(path):
        return build(plain)


def cluster_from(plain: Any) -> Cluster:
    """In a cluster file `device` may be an id of the catalogue or a whole table."""
    if isinstance(plain, dict) and isinstance(plain.get("device"), str):
        plain = plain | {"device": device(plain["device"])}
    return codec.load(Cluster, plain)
