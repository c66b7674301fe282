"""Which tokens of a file does a step see? Sequence n of a run is a window of the file: epoch n //
windows, a place in that epoch's own order. Any layout reads the same; the position of a run is one
number, the sequences seen.

A rank reads only its windows and positions, a step ahead of their use, on a thread. On CUDA they
wait in pinned memory and are copied without a synchronisation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from fourfold.engine.data import rng
from fourfold.engine.data.rng import shuffled
from fourfold.engine.model.decoder import IGNORE
from fourfold.errors import UserError
from fourfold.spec.tokens import read_info, require_fit, token_paths

# Index tensors whose values are kept on the host; a run uses one per micro batch.
_KNOWN = 4096


class TokenFile:
    """A source of tokens. `seed` decides the order, which differs from epoch to epoch."""

    def __init__(self, name: str, *, vocab: int, seq_len: int, seed: int = 0) -> None:
        self.name, self.seq_len, self.seed = name, seq_len, seed
        self.info = read_info(name)
        require_fit(self.info, name=name, vocab=vocab, seq_len=seq_len)
        self.windows = self.info.windows(seq_len)
        kind = np.dtype(self.info.dtype).newbyteorder("<")
        self._tokens = np.memmap(token_paths(name)[0], dtype=kind, mode="r")
        self._known: dict[int, tuple[Tensor, Tensor]] = {}
        self._ahead: dict[tuple[int, int, int], tuple[Future[Tensor], Tensor, Tensor]] = {}
        self._reader: ThreadPoolExecutor | None = None
        self.waited_s = 0.0

    def batch(self, first: int, sequences: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, targets) on the device of `sequences`; see `data.Source`."""
        ready = self._ahead.pop((first, id(sequences), id(positions)), None)
        places = None if ready else (self._host(sequences), self._host(positions))
        began = time.perf_counter()
        if ready is not None:
            pair = ready[0].result()
        else:
            assert places is not None
            pair = self._read(first, *places, sequences.device)
        self.waited_s += time.perf_counter() - began
        # A copy also where the host is the device, so that what counts live bytes sees it.
        tokens, targets = pair.to(sequences.device, non_blocking=True, copy=True)
        return tokens, targets

    def ahead(self, first: int, sequences: Sequence[Tensor], positions: Tensor) -> None:
        """Read the batches of the step that begins at `first` while this one computes."""
        self._ahead.clear()
        if not sequences:
            return
        device = sequences[0].device
        if self._reader is None:
            self._reader = _reader(device)
        for micro in sequences:
            job = self._reader.submit(
                self._read, first, self._host(micro), self._host(positions), device
            )
            # The tensors are kept beside it: their ids stay theirs.
            self._ahead[first, id(micro), id(positions)] = (job, micro, positions)

    def _host(self, index: Tensor) -> Tensor:
        """The values of an index tensor; waits for the device the first time it is seen."""
        if index.device.type == "cpu":
            return index
        if id(index) not in self._known:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            self._known[id(index)] = (index, index.cpu())
        return self._known[id(index)][1]

    def _read(
        self, first: int, sequences: Tensor, positions: Tensor, device: torch.device
    ) -> Tensor:
        """[2, sequences, positions]: tokens and targets, ready to be copied to the device."""
        start = self._window(first, sequences) * self.seq_len
        at = (start[:, None] + positions).numpy()
        pair = np.stack([self._tokens[at], self._tokens[at + 1]]).astype(np.int64)
        if pair.size and pair.max() >= self.info.vocab:
            raise UserError(
                f"has token {pair.max()}, not below the vocab {self.info.vocab} of its .json file",
                field="data",
                value=self.name,
                hint="create it again ('fourfold data show' checks the whole file)",
            )
        read = torch.from_numpy(pair)
        read[1, sequences < 0] = IGNORE
        return read.pin_memory() if device.type == "cuda" else read

    def _window(self, first: int, sequences: Tensor) -> Tensor:
        """The window that each sequence is; a padding sequence is any."""
        number = torch.where(sequences >= 0, sequences + first, first)
        epoch = number.div(self.windows, rounding_mode="floor")
        place = number % self.windows
        window = torch.empty_like(place)
        for epoch_number in epoch.unique().tolist():
            in_epoch = epoch == epoch_number
            order = rng.key(self.seed, "epoch", epoch_number)
            window[in_epoch] = shuffled(place[in_epoch], self.windows, order)
        return window


def _reader(device: torch.device) -> ThreadPoolExecutor:
    """One thread. On CUDA it must stand on the rank's own device: pinning memory on another would
    make a context there."""
    if device.type == "cuda":
        return ThreadPoolExecutor(1, "tokens", torch.cuda.set_device, (device,))
    return ThreadPoolExecutor(1, "tokens")
