"""'data make': texts -> tokens, a few MiB at a time: a file may be larger than memory."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fourfold import files
from fourfold.commands import progress
from fourfold.errors import UserError
from fourfold.spec.tokens import chunks, token_paths, tokenizer_name, tokenizer_path, write_tokens
from fourfold.units import show_bytes

if TYPE_CHECKING:
    import numpy as np

_QUIET_S = 2.0
_BYTES = 256
# Texts go through a tokenizer in pieces of about this many characters, several at once.
_PIECE, _AT_ONCE = 2**18, 16
# Where tokenizers never join what stands on both sides: before a line's end after a letter or
# digit. Any line's end and any space are second and third best.
_CUTS = (re.compile(r"(?<=\w)(?=\n)"), re.compile(r"(?=\n)"), re.compile(r"(?=\s)"))
_END_TOKENS = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]",
)  # fmt: skip


class Meter:
    """Progress in bytes, from two seconds on."""

    def __init__(self, word: str, total: int) -> None:
        self.word, self.total, self.done = word, total, 0
        self.began_at = time.monotonic()
        self.say = progress.progress_lines()

    def add(self, count: int) -> None:
        self.done += count
        passed = time.monotonic() - self.began_at
        if passed < _QUIET_S:
            return
        of = f" of {show_bytes(self.total)}" if self.total else ""
        self.say(f"{self.word} {show_bytes(self.done)}{of}, {show_bytes(self.done / passed)}/s")

    def end(self) -> None:
        if time.monotonic() - self.began_at >= _QUIET_S:
            progress.end_line()


@dataclass(frozen=True, slots=True)
class Encoder:
    """`tokens` turns the bytes of one document into arrays of tokens."""

    name: str
    vocab: int
    end: int
    tokens: Callable[[Iterator[bytes], str], Iterator[np.ndarray[Any, Any]]]
    text: str = ""  # of its tokenizer.json, which is kept beside the tokens


def run_make(args: argparse.Namespace) -> str:
    """The name of the file that was made."""
    path, side = token_paths(args.out)
    kept = tokenizer_path(args.out)
    for old in (path, side, kept):
        if os.path.lexists(old) and not args.force:
            raise UserError(
                "exists", field="out", value=str(old), hint="add --force, or name another"
            )
    total = sum(_size(name) for name in args.files)
    encoder = _encoder(args)
    _require_vocab(encoder, args.vocab)
    meter = Meter("read", 0 if "-" in args.files else total)
    with write_tokens(
        args.out, vocab=encoder.vocab, end=encoder.end, tokenizer=encoder.name
    ) as writer:
        for name in args.files:
            for tokens in encoder.tokens(_metered(name, meter), name):
                writer.add(tokens)
            writer.end_document()
        if not writer.tally.tokens:
            raise UserError("hold no text", field="files", value=" ".join(args.files))
    meter.end()
    if encoder.text:
        files.write_text(kept, encoder.text)
    else:
        kept.unlink(missing_ok=True)
    return args.out


def _size(name: str) -> int:
    """Bytes of an input, or why it can't be one, before anything is written."""
    if name == "-":
        return 0
    try:
        found = os.stat(name)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"cannot be read ({reason})", field="file", value=name, hint="check the path"
        ) from None
    if stat.S_ISDIR(found.st_mode):
        raise UserError("is a folder", field="file", value=name, hint=f"name files: {name}/*")
    if stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
        raise UserError("is a device", field="file", value=name, hint="name a text file")
    return found.st_size


def _metered(name: str, meter: Meter) -> Iterator[bytes]:
    for content in chunks(name):
        yield content
        meter.add(len(content))


def _encoder(args: argparse.Namespace) -> Encoder:
    if args.tokenizer == "bytes":
        if args.end_token is not None:
            raise UserError(
                "byte tokens end a document by themselves", field="--end-token",
                value=args.end_token, hint="leave it out, or name a --tokenizer",
            )  # fmt: skip
        # A model of 256 tokens has none to spare: a zero byte, which texts do not hold.
        spare = args.vocab != _BYTES
        return Encoder("bytes", _BYTES + spare, _BYTES if spare else 0, _from_bytes)
    return _from_file(args.tokenizer, args.end_token)


def _require_vocab(encoder: Encoder, vocab: int | None) -> None:
    if vocab is not None and vocab < encoder.vocab:
        raise UserError(
            f"the tokenizer '{encoder.name}' needs {encoder.vocab}",
            field="--vocab",
            value=vocab,
            hint="take a model with a larger vocabulary, or another tokenizer",
        )


def _from_bytes(content: Iterator[bytes], name: str) -> Iterator[np.ndarray[Any, Any]]:
    import numpy as np

    for plain in content:
        yield np.frombuffer(plain, np.uint8)


def _from_file(path: str, end_token: str | None) -> Encoder:
    """A Hugging Face tokenizer; special tokens are not added, nothing is cut off or padded."""
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise UserError(
            "needs the package 'tokenizers', which is not installed",
            field="--tokenizer",
            value=path,
            hint="pip install tokenizers, or use --tokenizer bytes",
        ) from None
    text = files.read_text(path, field="tokenizer")
    try:
        made = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises nothing narrower
        raise UserError(
            f"is no tokenizer.json ({error})", field="--tokenizer", value=path
        ) from None
    made.no_truncation()
    made.no_padding()
    known = made.get_vocab(with_added_tokens=True)

    def encode(content: Iterator[bytes], source: str) -> Iterator[np.ndarray[Any, Any]]:
        import numpy as np

        texts = pieces(_decoded(content, source))
        while some := list(itertools.islice(texts, _AT_ONCE)):
            for one in made.encode_batch_fast(some, add_special_tokens=False):
                yield np.array(one.ids, np.int64)

    end = _end_token(known, end_token, path)
    return Encoder(tokenizer_name(path, text), max(known.values()) + 1, end, encode, text)


def _end_token(known: dict[str, int], wanted: str | None, path: str) -> int:
    if wanted == "none":
        return -1
    names = _END_TOKENS if wanted is None else (wanted,)
    for name in names:
        if name in known:
            return known[name]
    raise UserError(
        "has no such token" if wanted else "has none of the usual end tokens",
        field="--end-token" if wanted else "--tokenizer",
        value=wanted or path,
        hint="--end-token TEXT names one of its tokens, 'none' joins documents without one",
    )


def _decoded(content: Iterator[bytes], source: str) -> Iterator[str]:
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    try:
        for plain in content:
            yield decoder.decode(plain)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise UserError(
            "is not UTF-8 text", field="file", value=source, hint="--tokenizer bytes takes any"
        ) from None


def pieces(texts: Iterator[str], size: int = _PIECE) -> Iterator[str]:
    """The same characters in pieces of about `size`, cut where a tokenizer would cut anyway."""
    held = ""
    for text in texts:
        held += text
        while len(held) > 2 * size:
            at = _cut(held, size)
            yield held[:at]
            held = held[at:]
    if held:
        yield held


def _cut(text: str, size: int) -> int:
    """The first good place from `size` to twice that; where there is none, `size`."""
    for pattern in _CUTS:
        found = pattern.search(text, size, 2 * size)
        if found is not None:
            return found.start()
    return size
