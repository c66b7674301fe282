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


def is_meta(tensor: Any) -> bool:
    """Whether a tensor has no storage even where it is not fake."""
    return (tensor.fake_device if is_fake(tensor) else tensor.device).type == "meta"


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


def unknown_value(func: Any, args: tuple[Any, ...]) -> int | float | None:
    """1 where an operator asks a fake tensor for its only value, which nobody knows; else None."""
    if func is not torch.ops.aten._local_scalar_dense.default or not is_fake(args[0]):
        return None
    return 1.0 if args[0].dtype.is_floating_point else 1


def forward_number() -> int:
    """Number of the autograd node that the running operator of a forward pass made, if it did."""
    return torch.autograd._get_sequence_nr() - 1


def backward_number() -> int | None:
    """Number of the autograd node whose backward is running; None outside of a backward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


class ModulePath:
    """Names of the modules whose forward runs right now, innermost last; those of `model` and of
    other models that were added."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.path: list[str] = []

    def add(self, model: torch.nn.Module) -> None:
        self.names |= {id(module): name for name, module in model.named_modules()}

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, every call of a module is followed."""
        from torch.nn.modules import module as hooks

        def enter(module: torch.nn.Module, _: Any) -> None:
            self.path.append(self.names.get(id(module), ""))

        def leave(*_: Any) -> None:
            self.path.pop()

        # A recomputation ends inside a module, by an exception, once it has what it needs.
        handles = (
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __str__(self) -> str:
        return next((name for name in reversed(self.path) if name), "")
