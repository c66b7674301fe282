"""Token files: NAME.bin holds little-endian uint16 or uint32 tokens and nothing else, NAME.json
says what they are. A pair is whole when the size and the ends of NAME.bin are those it names.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from fourfold import files
from fourfold.errors import UserError, inside
from fourfold.spec import check, codec

TokenDtype = Literal["uint16", "uint32"]
TOKEN_BYTES: dict[str, int] = {"uint16": 2, "uint32": 4}
# How much of each end is looked at whenever a file is opened; all of it by 'data show'.
_EDGE_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInfo:
    """`vocab`: all tokens are below it. `end`: the token after each document; -1: there is none.

    `sha256` is that of all tokens, `edges` that of the first and last MiB. `unigram_nats` is the
    entropy of a token drawn at random: the loss of a model that knows frequencies alone.
    """

    dtype: TokenDtype
    vocab: int
    tokens: int
    documents: int
    end: int
    tokenizer: str
    unigram_nats: float
    sha256: str
    edges: str

    def __post_init__(self) -> None:
        check.whole(1, 2**32, vocab=self.vocab)
        check.whole(0, tokens=self.tokens, documents=self.documents)
        check.whole(-1, 2**32, end=self.end)
        if self.vocab > 2 ** (8 * TOKEN_BYTES[self.dtype]):
            raise UserError(f"does not fit {self.dtype}", field="vocab", value=self.vocab)

    @property
    def size_bytes(self) -> int:
        return self.tokens * TOKEN_BYTES[self.dtype]

    def windows(self, seq_len: int) -> int:
        """Sequences of one epoch: each has `seq_len` tokens and the target after the last."""
        return max(0, (self.tokens - 1) // seq_len)


def token_paths(name: str | Path) -> tuple[Path, Path]:
    """(tokens, side file) of a token file, by its name or by either path."""
    text = str(name)
    stem = text.removesuffix(".bin") if text.endswith(".bin") else text.removesuffix(".json")
    check.that(stem and not stem.endswith("/"), "data", text, "is not the name of a token file")
    return Path(f"{stem}.bin"), Path(f"{stem}.json")


def tokenizer_path(name: str | Path) -> Path:
    """Where the tokenizer.json that made the tokens lies, if one did."""
    return token_paths(name)[0].with_suffix(".tokenizer.json")


def tokenizer_name(path: str, text: str) -> str:
    """What TokenInfo calls it: its content counts, not where it lies."""
    import hashlib

    return f"{Path(path).name} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def read_info(name: str | Path) -> TokenInfo:
    """What NAME.json says, once NAME.bin was seen to have its size and its ends."""
    tokens, side = token_paths(name)
    if not side.exists():
        rule = f"has no {side.name} beside its tokens" if tokens.exists() else "does not exist"
        hint = f"create it with 'fourfold data make --out {name} FILE...'"
        raise UserError(rule, field="data", value=str(name), hint=hint)
    with inside(side):
        info = codec.from_json(TokenInfo, files.read_text(side, field="data"))
    size = _size(tokens)
    if size != info.size_bytes:
        rule = f"has {size:,} bytes instead of the {info.size_bytes:,} in its .json file"
        raise _torn(tokens, rule)
    if edges_of(tokens, size) != info.edges:
        raise _torn(tokens, "has other tokens than its .json file describes")
    return info


def require_fit(info: TokenInfo, *, name: str, vocab: int, seq_len: int) -> None:
    """Refuse a file that a model can't read or that holds less than one sequence."""
    rule = f"has tokens up to {info.vocab - 1}, but the model's vocabulary ends at {vocab - 1}"
    hint = f"use a model with a vocabulary of at least {info.vocab}"
    check.that(info.vocab <= vocab, "data", name, rule, hint)
    rule = f"has {info.tokens:,} tokens, but a sequence needs {seq_len + 1:,}"
    check.that(info.windows(seq_len) > 0, "data", name, rule, "use more text or a shorter sequence")


def edges_of(path: Path, size: int) -> str:
    """Hash of both ends of a file of `size` bytes, cheap however large it is."""
    import hashlib

    digest = hashlib.sha256()
    try:
        with files.open_regular(path, field="data") as stream:
            digest.update(stream.read(_EDGE_BYTES))
            stream.seek(max(0, size - _EDGE_BYTES))
            digest.update(stream.read(_EDGE_BYTES))
    except OSError as error:
        raise _unreadable(path, error) from None
    return digest.hexdigest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot be read ({error.strerror})", field="data", value=str(path))


def _torn(path: Path, rule: str) -> UserError:
    return UserError(
        rule, field="data", value=str(path), hint="create it again, or copy both files"
    )


if TYPE_CHECKING:
    import numpy as np

_CHUNK_BYTES = 2**22  # a multiple of every token's size
_DENSE_VOCAB = 2**22


class Tally:
    """Counts of tokens as they pass, and the hash of their bytes. `beyond`: not below `vocab`."""

    def __init__(self, dtype: TokenDtype, vocab: int) -> None:
        import hashlib

        import numpy as np

        self.kind, self.vocab = np.dtype(dtype).newbyteorder("<"), vocab
        # A file may claim a vocabulary that nobody has: only what occurs is counted then.
        self._is_dense = vocab <= _DENSE_VOCAB
        self.counts = np.zeros(vocab if self._is_dense else 0, np.int64)
        self._seen = np.zeros(0, self.kind)
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
        if self._is_dense:
            self.counts += np.bincount(inside, minlength=self.vocab)
            return
        new, times = np.unique(inside, return_counts=True)
        both = np.concatenate([self._seen, new])
        self._seen, places = np.unique(both, return_inverse=True)
        counts = np.zeros(len(self._seen), np.int64)
        np.add.at(counts, places, np.concatenate([self.counts, times]))
        self.counts = counts

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
        self.end, self.documents, self.count = end, 0, 0
        self.tally = Tally(self.dtype, vocab)
        self._stream, self._began_at = stream, 0
        self._held: list[bytes] = []  # of short documents: counting costs the vocabulary each time
        self._held_bytes = 0

    def add(self, tokens: np.ndarray[Any, Any]) -> None:
        """More tokens of the present document, as whole numbers of any type."""
        if not len(tokens):
            return
        low, high = int(tokens.min()), int(tokens.max())
        rule = f"must be from 0 to vocab - 1 = {self.tally.vocab - 1}"
        check.that(low >= 0 and high < self.tally.vocab, "token", low if low < 0 else high, rule)
        plain = tokens.astype(self.tally.kind).tobytes()
        self.count += len(tokens)
        self._held.append(plain)
        self._held_bytes += len(plain)
        if self._held_bytes >= _CHUNK_BYTES:
            self.flush()

    def flush(self) -> None:
        plain, self._held, self._held_bytes = b"".join(self._held), [], 0
        self._stream.write(plain)
        self.tally.add(plain)

    def end_document(self) -> None:
        """A document of nothing is none."""
        import numpy as np

        if self.count == self._began_at:
            return
        self.documents += 1
        if self.end >= 0:
            self.add(np.array([self.end]))
        self._began_at = self.count


@contextlib.contextmanager
def write_tokens(name: str, *, vocab: int, end: int, tokenizer: str) -> Iterator[TokenWriter]:
    """NAME.bin and NAME.json, once the block ends well. An old side file goes before its tokens do
    and the new one comes last: a crash leaves a pair that is refused, never one that disagrees."""
    path, side = token_paths(name)
    with files.pending(path) as stream:
        writer = TokenWriter(stream, vocab=vocab, end=end)
        yield writer
        writer.flush()
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


def chunks(path: str | Path) -> Iterator[bytes]:
    """A file's bytes, a few MiB at a time; '-' is stdin."""
    import sys

    try:
        with contextlib.ExitStack() as stack:
            plain = (
                sys.stdin.buffer
                if str(path) == "-"
                else stack.enter_context(files.open_stream(path))
            )
            while content := plain.read(_CHUNK_BYTES):
                yield content
    except OSError as error:
        rule = f"cannot be read ({error.strerror or error})"
        raise UserError(rule, field="file", value=str(path), hint="check the path") from None
