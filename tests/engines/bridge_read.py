"""Runs in an environment of Megatron-Bridge: what does it make of exported settings?

Reads a JSON list of cases ({"args": [...], "folder": ..., "world": N, ...}) from standard input.
Its own recipe functions make the configuration, Hydra reads the overrides, and what its `pretrain`
does first (precision, overlap, every check of its container) is done for a world of that size.
Writes what the configuration then says.

What is not here is stood in for (STANDINS): names of it can be imported and do nothing. A check
that asks a stand-in decides nothing, so it is named in the answer.
"""

from __future__ import annotations

import abc
import importlib.abc
import importlib.machinery
import logging
import os
import runpy
import sys
import types
import typing
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)
os.environ["HF_HUB_OFFLINE"] = "1"

# What stands where something is missing, and for what.
STANDINS = {
    "transformer_engine": "Transformer Engine, which needs CUDA",
    "nvidia_resiliency_ext": "restarts of a job, which need CUDA",
    "modelopt": "quantization of weights after training",
    "megatron.energon": "data of images and sound",
    "megatron.bridge.diffusion": "its models of images and video",
}
ASKED: set[str] = set()  # checks that asked a stand-in for its release
NEWEST = "99.0"


class Anything(abc.ABCMeta):
    """A class of which any attribute is another one."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return made(name, cls.__module__)


def made(name: str, module: str) -> Any:
    return Anything(name, (), {"__module__": module, "__init__": lambda self, *a, **k: None})


class Standin(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes modules of what is missing: any name can be imported from them."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in STANDINS):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__version__ = NEWEST  # pyrefly: ignore

        def name_in(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if name.islower() and name in ("common", "pytorch", "recipe"):
                return importlib.import_module(f"{spec.name}.{name}")
            setattr(module, name, made(name, spec.name))
            return getattr(module, name)

        module.__getattr__ = name_in  # pyrefly: ignore
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


if not hasattr(typing, "override"):  # of Python 3.12
    typing.override = lambda method: method  # pyrefly: ignore
    STANDINS["typing.override"] = "a decorator of Python 3.12"
sys.meta_path.insert(0, Standin())

import torch  # noqa: E402
from megatron.core import utils  # noqa: E402
from packaging.version import Version  # noqa: E402
from telling import plain, tell, whole  # noqa: E402
from transformers import AutoConfig  # noqa: E402


class Asked(Version):
    """The release of Transformer Engine that would be there: new enough for whoever asks, and who
    asks is noted."""

    def __ge__(self, other: Version) -> bool:
        frame = sys._getframe(1)
        while frame.f_code.co_name in ("is_te_min_version", "__gt__", "__ge__"):
            frame = frame.f_back or frame
        ASKED.add(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name} {other}")
        return True

    __gt__ = __ge__  # pyrefly: ignore


utils._te_version = Asked(NEWEST)

# Its packages of recipes are imported one by one: together they need models of images and sound.
import megatron.bridge  # noqa: E402

_recipes = types.ModuleType("megatron.bridge.recipes")
_recipes.__path__ = [f"{megatron.bridge.__path__[0]}/recipes"]
sys.modules[_recipes.__name__] = _recipes

from megatron.bridge.training import config as checks  # noqa: E402
from megatron.bridge.training import pretrain as start  # noqa: E402


class Gpu:
    """A GPU of the kind that the settings are for."""

    major, minor, name = 9, 0, "NVIDIA H100 80GB HBM3"
    total_memory = 80 * 2**30


torch.cuda.get_device_properties = lambda *_: Gpu  # pyrefly: ignore
torch.cuda.get_device_capability = lambda *_: (Gpu.major, Gpu.minor)  # pyrefly: ignore


_from_hub = AutoConfig.from_pretrained


def answer(case: dict[str, Any]) -> dict[str, Any]:
    ASKED.clear()
    Gpu.major, Gpu.name = case["gpu"]
    models: list[str] = []

    def from_folder(name: str, **more: Any) -> Any:
        models.append(str(name))
        return _from_hub(case["folder"], **more | {"trust_remote_code": False})

    AutoConfig.from_pretrained = from_folder  # pyrefly: ignore
    known = dict(os.environ)
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ |= {"WORLD_SIZE": str(case["world"]), **case["env"]}
    found: list[Any] = []
    start.pretrain = lambda config, forward_step_func: found.append(config)  # pyrefly: ignore
    argv, sys.argv = sys.argv, ["pretrain.py", *case["args"]]
    try:
        runpy.run_path(str(Path(case["folder"]) / "pretrain.py"))
        (config,) = found
        checks.runtime_config_update(config)
    finally:
        sys.argv = argv
        os.environ.clear()
        os.environ.update(known)
    said = {name: plain(value(config, name)) for name in case["names"]}
    return {
        "said": said,
        "whole": whole(model=config.model, ddp=config.ddp, optimizer=config.optimizer),
        "asked": sorted(ASKED),
        "dp": config.data_parallel_size,
        "models": models,
    }


def value(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


if __name__ == "__main__":
    tell(answer, [*STANDINS, "a GPU's properties", "config.json of the Hub"])
