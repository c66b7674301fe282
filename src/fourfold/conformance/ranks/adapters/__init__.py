"""One file for each engine, at most 250 lines: how its releases are built and called."""

from __future__ import annotations

import re

# Package -> (below this version, file); '' is any version.
FILES = {
    "megatron-core": (("", "megatron"),),
    "torchtitan": (("0.3", "titan2"), ("", "titan3")),
    "deepspeed": (("", "zero"),),
    "accelerate": (("", "hf_accelerate"),),
    "transformers": (("", "hf_trainer"),),
    "fourfold": (("", "own"),),
}


def version_key(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def adapter_file(engine: str, version: str) -> str:
    """The file of this folder that speaks to a release."""
    return next(
        name
        for below, name in FILES[engine]
        if not below or version_key(version) < version_key(below)
    )
