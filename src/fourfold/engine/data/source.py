"""The tokens of a step, from a file or synthetic: f(seed, sequence, position), the same under every
layout; and which sequences a data-parallel rank takes, in which micro batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fourfold import files
from fourfold.engine.data import rng
from fourfold.engine.data.rng import shuffled
from fourfold.engine.model.decoder import IGNORE
from fourfold.spec import check
from fourfold.spec.batch import Batch
from fourfold.spec.run import RunSpec
from fourfold.spec.tokens import read_info, require_fit, token_paths


class Source(Protocol):
    """`sequences` count from 0 within the step; -1 is padding, whose targets do not count."""

    @property
    def waited_s(self) -> float:
        """Seconds that `batch` has waited for tokens so far. Not the time of a call: on CUDA that
        is mostly the queue of the device, full of the step before."""
        ...

    def batch(self, first: int, sequences: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, targets), both [len(sequences), len(positions)]; `first` is the number of
        sequences of all steps before this one."""
        ...

    def ahead(self, first: int, sequences: Sequence[Tensor], positions: Tensor) -> None:
        """Batches that will be asked for next; one that comes without warning is right too."""
        ...


def source_of(spec: RunSpec) -> Source:
    vocab, seq_len, seed = spec.model.vocab, spec.batch.seq_len, spec.seed
    if spec.data:
        return TokenFile(spec.data, vocab=vocab, seq_len=seq_len, seed=seed)
    return Synthetic(vocab=vocab, seq_len=seq_len, seed=seed)


def data_facts(spec: RunSpec) -> dict[str, str]:
    if not spec.data:
        return {}
    info = read_info(spec.data)
    return {
        "data.sha256": info.sha256,
        "data.tokens": str(info.tokens),
        "data.tokenizer": info.tokenizer,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """`masked` is the share of targets that do not count; the share differs between sequences."""

    vocab: int
    seq_len: int
    seed: int = 0
    masked: float = 0.0

    @property
    def waited_s(self) -> float:
        """They are computed where they are needed, like everything else in a step."""
        return 0.0

    def batch(self, first: int, sequences: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        stream = rng.key(self.seed, "tokens")
        number = (sequences + first)[:, None]
        index = number * (self.seq_len + 1) + positions
        tokens = rng.below(stream, index, self.vocab)
        targets = rng.below(stream, index + 1, self.vocab)
        drop = (sequences < 0)[:, None].expand_as(targets)
        if self.masked > 0.0:
            drop = drop | self._masked(number, index)
        return tokens, torch.where(drop, IGNORE, targets)

    def ahead(self, first: int, sequences: Sequence[Tensor], positions: Tensor) -> None:
        """Made on the device in no time when they are asked for."""

    def _masked(self, number: Tensor, index: Tensor) -> Tensor:
        """Sequence i drops between none and twice the share of its targets."""
        scale = 1 << 16
        most = max(1, int(2 * self.masked * scale))
        share = rng.below(rng.key(self.seed, "share"), number, most)
        return rng.below(rng.key(self.seed, "mask"), index, scale) < share


def micro_sizes(batch: Batch, dp: int, rank: int) -> tuple[int, ...]:
    """Sequences of each micro batch of data-parallel rank `rank`. Ranks meet in collectives with
    every micro batch, so all run as many as the busiest; a rank with fewer sequences adds micro
    batches of one padding sequence, which counts nothing."""
    sizes = batch.micro_sizes(batch.shares(dp)[rank])
    return sizes + (1,) * (batch.micro_count(dp) - len(sizes))


def micro_sequences(batch: Batch, dp: int, rank: int, device: torch.device) -> list[Tensor]:
    """Numbers, within a step, of the sequences of each micro batch; -1 is padding."""
    shares = batch.shares(dp)
    start, stop = sum(shares[:rank]), sum(shares[: rank + 1])
    made = []
    for size in micro_sizes(batch, dp, rank):
        real = torch.arange(start, min(start + size, stop), device=device)
        padding = torch.full((size - real.numel(),), -1, device=device)
        made.append(torch.cat([real, padding]))
        start = min(start + size, stop)
    return made


# Index tensors whose values are kept on the host; a run uses one per micro batch.
_KNOWN = 4096


class TokenFile:
    """Windows of a file: sequence n is a place in the order of epoch n // windows, which `seed`
    decides. A rank reads only its own windows and positions, a step ahead, on a thread; on CUDA
    they wait in pinned memory and are copied without a synchronisation."""

    def __init__(self, name: str, *, vocab: int, seq_len: int, seed: int = 0) -> None:
        self.name, self.seq_len, self.seed = name, seq_len, seed
        self.info = read_info(name)
        require_fit(self.info, name=name, vocab=vocab, seq_len=seq_len)
        self.windows = self.info.windows(seq_len)
        kind = np.dtype(self.info.dtype).newbyteorder("<")
        with files.open_regular(token_paths(name)[0], field="data") as stream:
            self._tokens = np.memmap(stream, dtype=kind, mode="r")
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
        most, vocab = pair.max(initial=0), self.info.vocab
        rule = f"has token {most}, not below the vocab {vocab} of its .json file"
        hint = "create it again ('fourfold data show' checks the whole file)"
        check.that(most < vocab, "data", self.name, rule, hint)
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
