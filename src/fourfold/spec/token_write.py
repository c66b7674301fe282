"""How is a token file written? Piece by piece, however large; both files appear whole or not."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fourfold import files
from fourfold.errors import UserError
from fourfold.spec import codec
from fourfold.spec.tokens import TOKEN_BYTES, TokenDtype, TokenInfo, edges_of, token_paths

if TYPE_CHECKING:
    import numpy as np

_CHUNK_BYTES = 2**22  # a multiple of every token's size


class Tally:
    """Counts of tokens as they pass, and the hash of their bytes. `beyond`: not below `vocab`."""

    def __init__(self, dtype: TokenDtype, vocab: int) -> None:
        import hashlib

        import numpy as np

        self.kind, self.vocab = np.dtype(dtype).newbyteorder("<"), vocab
        self.counts = np.zeros(vocab, np.int64)
        self.tokens = self.beyond = 0
        self._hash = hashlib.sha256()

    def add(self, plain: bytes) -> None:
        """Whole tokens, as they stand in the file."""
        import numpy as np

        self._hash.update(plain)
        tokens = np.frombuffer(plain, self.kind)
        self.tokens += len(tokens)
        inside = tokens[tokens < self.vocab]
        self.beyond += len(tokens) - len(inside)
        self.counts += np.bincount(inside, minlength=self.vocab)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    @property
    def distinct(self) -> int:
        return int((self.counts > 0).sum())

    @property
    def entropy_nats(self) -> float:
        """Of a token drawn at random."""
        import numpy as np

        share = self.counts[self.counts > 0] / max(1, self.tokens)
        return float(-(share * np.log(share)).sum()) + 0.0  # not -0.0 where all are the same


class TokenWriter:
    """An open token file."""

    def __init__(self, stream: BinaryIO, *, vocab: int, end: int) -> None:
        self.dtype: TokenDtype = "uint16" if vocab <= 2**16 else "uint32"
        self.end, self.documents = end, 0
        self.tally = Tally(self.dtype, vocab)
        self._stream, self._began_at = stream, 0

    def add(self, tokens: np.ndarray[Any, Any]) -> None:
        """More tokens of the present document, as whole numbers of any type."""
        if not len(tokens):
            return
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.tally.vocab:
            raise UserError(
                f"must be from 0 to vocab - 1 = {self.tally.vocab - 1}",
                field="token",
                value=low if low < 0 else high,
            )
        plain = tokens.astype(self.tally.kind).tobytes()
        self._stream.write(plain)
        self.tally.add(plain)

    def end_document(self) -> None:
        """A document of nothing is none."""
        import numpy as np

        if self.tally.tokens == self._began_at:
            return
        self.documents += 1
        if self.end >= 0:
            self.add(np.array([self.end]))
        self._began_at = self.tally.tokens


@contextlib.contextmanager
def write_tokens(name: str, *, vocab: int, end: int, tokenizer: str) -> Iterator[TokenWriter]:
    """NAME.bin and NAME.json, once the block ends well.

    An old side file is removed before its tokens are replaced and the new one comes last, so that a
    crash in between leaves a pair that is refused, never one that disagrees.
    """
    path, side = token_paths(name)
    with files.pending(path) as stream:
        writer = TokenWriter(stream, vocab=vocab, end=end)
        yield writer
        with contextlib.suppress(FileNotFoundError):
            os.unlink(side)
    tally = writer.tally
    info = TokenInfo(
        dtype=writer.dtype,
        vocab=vocab,
        tokens=tally.tokens,
        documents=writer.documents,
        end=end,
        tokenizer=tokenizer,
        unigram_nats=tally.entropy_nats,
        sha256=tally.sha256,
        edges=edges_of(path, tally.tokens * TOKEN_BYTES[writer.dtype]),
    )
    files.write_text(side, codec.to_json(info))


def write_array(name: str, tokens: Iterable[int], *, vocab: int) -> None:
    """A token file from whole numbers at hand: one document, without an end token."""
    import numpy as np

    with write_tokens(name, vocab=vocab, end=-1, tokenizer="given") as writer:
        writer.add(np.fromiter(tokens, np.int64))
        writer.end_document()


def chunks(path: str | Path, *, size: int = _CHUNK_BYTES) -> Iterator[bytes]:
    """A file's bytes, a few MiB at a time; '-' is stdin."""
    import sys

    try:
        with contextlib.ExitStack() as stack:
            plain = sys.stdin.buffer if str(path) == "-" else stack.enter_context(open(path, "rb"))
            while content := plain.read(size):
                yield content
    except OSError as error:
        raise UserError(
            f"cannot be read ({error.strerror or error})",
            field="file",
            value=str(path),
            hint="check the path",
        ) from None
