"""One rank of another engine's job in this process: tensors are fake, the process group answers at
once, and a ledger keeps the history of all storages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fourfold.engine import compat, compat_fsdp, compat_modes
from fourfold.engine.observe.cuda_operators import cuda_operators
from fourfold.engine.observe.history import StorageLedger

# torch's notes on CUDA: cuBLAS keeps one workspace for each thread that multiplies, from the first
# product on: of the forward pass, and of autograd.
_CUBLAS_BYTES = 2 * 32 * 2**20


class CountedRank(contextlib.ExitStack):
    """Inside, this process is rank `rank` of a world of which no other rank exists. `packages`: the
    folders of the engine's code. `is_fake`: False counts real tensors, by the CPU's operators."""

    def __init__(self, rank: int, world: int, *packages: Path, is_fake: bool = True) -> None:
        super().__init__()
        self.rank, self.world, self.is_fake = rank, world, is_fake
        self.ledger = StorageLedger(*packages)
        self.has_storage = False

    def __enter__(self) -> CountedRank:
        super().__enter__()
        compat.quiet()
        torch.set_num_threads(1)
        store = compat.fake_store()
        dist.init_process_group("fake", rank=self.rank, world_size=self.world, store=store)
        self.callback(dist.destroy_process_group)
        self.enter_context(cuda_operators())
        self.enter_context(compat_fsdp.watch_fsdp_buffers(self._own_buffer))
        return self

    def _own_buffer(self, buffer: Tensor) -> None:
        self.ledger.own("communication", buffer)

    def begin_storage(self) -> None:
        """From here on tensors are fake and counted, once: what comes before, such as meshes and
        the wrapping of a model without storage, works with real numbers."""
        if not self.has_storage:
            self.has_storage = True
            if self.is_fake:
                self.enter_context(compat_modes.fake_mode())
            self.enter_context(self.ledger)

    def own_model(self, parts: Iterable[nn.Module]) -> None:
        """Name the weights and buffers of a model, and what its library keeps beside it."""
        for part in parts:
            self.ledger.modules.add(part)
            for parameter in part.parameters():
                self.ledger.own("parameters", parameter)
            for buffer in part.buffers():
                self.ledger.own("other state", buffer)
        self.ledger.hold(_CUBLAS_BYTES, "workspace", "cuBLAS")

    def own_gradients(self, parts: Iterable[nn.Module]) -> None:
        """Name gradients as of now, those too that are not reduced yet."""
        parts = list(parts)
        for part in parts:
            for parameter in part.parameters():
                if parameter.grad is not None:
                    self.ledger.own("gradients", parameter.grad)
        for parameter in compat_fsdp.fsdp_parameters(parts):
            if parameter.unsharded_accumulated_grad is not None:
                self.ledger.own("gradients", parameter.unsharded_accumulated_grad_data)

    def own_optimizer(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        self.ledger.own("optimizer", value)
