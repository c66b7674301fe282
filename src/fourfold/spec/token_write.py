"""How is a token file written? Piece by piece, however large; both files appear whole or not."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

from fourfold import files
from fourfold.errors import UserError
from fourfold.spec import codec
from fourfold.spec.tokens import TokenDtype, TokenInfo, edges_of, token_paths

if TYPE_CHECKING:
    import numpy as np


@dataclass(slots=True, kw_only=True)
class TokenWriter:
    """An open token file; counts and hashes what goes through it."""

    stream: BinaryIO
    dtype: TokenDtype
    vocab: int
    end: int
    counts: np.ndarray[Any, Any]
    digest: Any = field(default_factory=hashlib.sha256)
    tokens: int = 0
    documents: int = 0

    def add(self, tokens: np.ndarray[Any, Any]) -> None:
        """More tokens of the present document, as whole numbers of any type."""
        import numpy as np

        if not len(tokens):
            return
        if int(tokens.max()) >= self.vocab or int(tokens.min()) < 0:
            raise UserError(
                f"token {int(tokens.max())} is not below vocab={self.vocab}", field="tokens"
            )
        self.counts += np.bincount(tokens.astype(np.int64), minlength=self.vocab)
        plain = tokens.astype(np.dtype(self.dtype).newbyteorder("<")).tobytes()
        self.stream.write(plain)
        self.digest.update(plain)
        self.tokens += len(tokens)

    def end_document(self) -> None:
        import numpy as np

        self.documents += 1
        if self.end >= 0:
            self.add(np.array([self.end]))

    def entropy_nats(self) -> float:
        import numpy as np

        share = self.counts[self.counts > 0] / max(1, self.tokens)
        return float(-(share * np.log(share)).sum()) + 0.0  # no -0.0 for a single kind of token


@contextlib.contextmanager
def write_tokens(name: str, *, vocab: int, end: int, tokenizer: str) -> Iterator[TokenWriter]:
    """NAME.bin and NAME.json, once the block ends well.

    An old side file is removed before its tokens are replaced and the new one comes last, so that a
    crash in between leaves a pair that is refused, never one that disagrees.
    """
    import numpy as np

    path, side = token_paths(name)
    dtype: TokenDtype = "uint16" if vocab <= 2**16 else "uint32"
    with files.pending(path) as stream:
        counts = np.zeros(vocab, np.int64)
        writer = TokenWriter(stream=stream, dtype=dtype, vocab=vocab, end=end, counts=counts)
        yield writer
        with contextlib.suppress(FileNotFoundError):
            os.unlink(side)
    info = TokenInfo(
        dtype=dtype,
        vocab=vocab,
        tokens=writer.tokens,
        documents=writer.documents,
        end=end,
        tokenizer=tokenizer,
        unigram_nats=writer.entropy_nats(),
        sha256=writer.digest.hexdigest(),
        edges=edges_of(path, path.stat().st_size),
    )
    files.write_text(side, codec.to_json(info))


def write_array(name: str, tokens: Iterable[int], *, vocab: int) -> None:
    """A token file from whole numbers at hand: one document, not ended."""
    import numpy as np

    with write_tokens(name, vocab=vocab, end=-1, tokenizer="given") as writer:
        writer.add(np.fromiter(tokens, np.int64))
