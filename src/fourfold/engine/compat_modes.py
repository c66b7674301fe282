"""Modes of torch, through which every operator passes, and fake tensors, which have shapes only, as
compat.py has the rest of torch that is nobody's business but its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from fourfold.engine.compat import patched


class UncompiledMode(TorchDispatchMode):
    """A mode that is entered only where nothing is compiled: it needs none of the wrappers by which
    torch keeps its compiler out of every operator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def fake_mode() -> Any:
    """Operators on shapes only; real tensors may come in."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)


def fake_device(func: Any, tensor: Any) -> torch.device | None:
    """What `prim::device` says of a fake tensor outside of a kernel, and no mode is asked."""
    is_asked = func is torch.ops.prim.device.default and is_fake(tensor)
    return tensor.fake_device if is_asked and not tensor.fake_mode.in_kernel_invocation else None


@contextlib.contextmanager
def around_shape_propagation(around: Callable[[], Any]) -> Iterator[None]:
    """Inside, `around()` is entered whenever DTensor works out a shape, which it does by running
    operators on fake tensors of global size."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    original = getattr(ShardingPropagator, name)

    def propagate(*args: Any, **kwargs: Any) -> Any:
        with around():
            return original(*args, **kwargs)

    with patched(ShardingPropagator, name, propagate):
        yield
