"""What is in a token file? NAME.bin holds little-endian uint16 or uint32 tokens and nothing else,
NAME.json says what they are ('fourfold data make' writes both, tokens first).

A pair is whole when the size and the ends of NAME.bin are those that NAME.json names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fourfold import files
from fourfold.errors import UserError
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
    if not stem or stem.endswith("/"):
        raise UserError("is not the name of a token file", field="data", value=text)
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
        left = f"has no {side.name} beside its tokens" if tokens.exists() else "does not exist"
        raise UserError(
            left,
            field="data",
            value=str(name),
            hint=f"create it with 'fourfold data make --out {name} FILE...'",
        )
    try:
        info = codec.from_json(TokenInfo, files.read_text(side, field="data"))
    except UserError as error:
        raise error.inside(side) from None
    size = _size(tokens)
    if size != info.size_bytes:
        raise _torn(
            tokens, f"has {size:,} bytes instead of the {info.size_bytes:,} in its .json file"
        )
    if edges_of(tokens, size) != info.edges:
        raise _torn(tokens, "has other tokens than its .json file describes")
    return info


def require_fit(info: TokenInfo, *, name: str, vocab: int, seq_len: int) -> None:
    """Refuse a file that a model can't read or that holds less than one sequence."""
    if info.vocab > vocab:
        raise UserError(
            f"has tokens up to {info.vocab - 1}, but the model's vocabulary ends at {vocab - 1}",
            field="data",
            value=name,
            hint=f"use a model with a vocabulary of at least {info.vocab}",
        )
    if not info.windows(seq_len):
        raise UserError(
            f"has {info.tokens:,} tokens, but a sequence needs {seq_len + 1:,}",
            field="data",
            value=name,
            hint="use more text or a shorter sequence",
        )


def edges_of(path: Path, size: int) -> str:
    """Hash of both ends of a file of `size` bytes, cheap however large it is."""
    import hashlib

    found = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            found.update(stream.read(_EDGE_BYTES))
            stream.seek(max(0, size - _EDGE_BYTES))
            found.update(stream.read(_EDGE_BYTES))
    except OSError as error:
        raise _unreadable(path, error) from None
    return found.hexdigest()


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
