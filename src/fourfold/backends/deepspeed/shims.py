"""What makes DeepSpeed run without the C++ that it compiles on first use."""

from __future__ import annotations

import importlib
import types
from typing import Any


def nothing_compiled() -> None:
    """DeepSpeed compiles C++ on first use: a shared-memory all-reduce, which gloo does too, and the
    two functions of torch that join and split tensors."""
    import deepspeed.runtime.engine as engine
    from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

    # As an attribute of its package it is torch itself.
    comm: Any = importlib.import_module("deepspeed.comm.torch")
    comm.build_shm_op = lambda: None
    joins = {"flatten": _flatten_dense_tensors, "unflatten": _unflatten_dense_tensors}
    engine.UtilsBuilder = lambda: types.SimpleNamespace(load=lambda: types.SimpleNamespace(**joins))
