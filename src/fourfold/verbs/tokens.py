"""make_tokens, show_tokens: texts -> tokens, a few MiB at a time; a file may exceed the memory."""

from __future__ import annotations

import itertools
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np

from fourfold import files
from fourfold.errors import UserError, install
from fourfold.events import OnEvent, ignore, progress
from fourfold.spec import check, codec
from fourfold.spec.tokens import (
    Tally,
    TokenInfo,
    chunks,
    read_info,
    token_paths,
    tokenizer_name,
    tokenizer_path,
    write_tokens,
)
from fourfold.units import show_bytes
from fourfold.verbs import Answer
from fourfold.verbs.documents import documents
from fourfold.verbs.requests import TokensRequest

_QUIET_S = 2.0
_BYTES, _FIRST = 256, 64
# Texts go through a tokenizer in pieces of about this many characters, several at once.
_PIECE, _AT_ONCE = 2**18, 16
# Where tokenizers never join what stands on both sides: before a line's end after a letter or
# digit. Any line's end and any space are second and third best.
_CUTS = (re.compile(r"(?<=\w)(?=\n)"), re.compile(r"(?=\n)"), re.compile(r"(?=\s)"))
_END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eot_id|>",
    "<|im_end|>",
    "[SEP]",
)


class Meter:
    """Progress in bytes, from two seconds on."""

    def __init__(self, word: str, total: int, on_event: OnEvent) -> None:
        self.word, self.total, self.done = word, total, 0
        self.began_at = time.monotonic()
        self.say = progress(on_event)

    def add(self, count: int) -> None:
        self.done += count
        passed = time.monotonic() - self.began_at
        if passed < _QUIET_S:
            return
        of = f" of {show_bytes(self.total)}" if self.total else ""
        self.say(f"{self.word} {show_bytes(self.done)}{of}, {show_bytes(self.done / passed)}/s")


@dataclass(frozen=True, slots=True)
class Encoder:
    """`tokens` turns the bytes of one document into arrays of tokens."""

    name: str
    vocab: int
    end: int
    tokens: Callable[[Iterator[bytes], str], Iterator[np.ndarray[Any, Any]]]
    text: str = ""  # of its tokenizer.json, which is kept beside the tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(Answer):
    """A token file: what its side file says, then what is found in it."""

    info: Annotated[TokenInfo, codec.INLINE]
    size_bytes: int
    tokens_file: str
    checksum: str = "ends match"
    first_tokens: list[int]
    first_text: str | None = None
    found_sha256: str | None = None
    distinct_tokens: int | None = None
    unigram_nats: float


def make_tokens(request: TokensRequest, *, on_event: OnEvent = ignore) -> Tokens:
    out, paths, tokenizer_file = request.out, request.files, tokenizer_path(request.out)
    for old in (*token_paths(out), tokenizer_file):
        if os.path.lexists(old) and not request.force:
            hint = "use --force to overwrite it, or choose another name"
            raise UserError("already exists", field="out", value=str(old), hint=hint)
    total = sum(_size(name) for name in paths)
    encoder = _encoder(request)
    meter = Meter("read", 0 if "-" in paths else total, on_event)
    with write_tokens(out, vocab=encoder.vocab, end=encoder.end, tokenizer=encoder.name) as writer:
        for name in paths:
            for document in documents(name, request.text_field, meter.add):
                for tokens in encoder.tokens(document, name):
                    writer.add(tokens)
                writer.end_document()
        check.that(writer.count, "files", " ".join(paths), "contain no text")
    if encoder.text:
        files.write_text(tokenizer_file, encoder.text)
    else:
        tokenizer_file.unlink(missing_ok=True)
    return show_tokens(out, quick=True)


def show_tokens(name: str, *, quick: bool = False, on_event: OnEvent = ignore) -> Tokens:
    """What a token file holds; all of it is read and checked, unless `quick`."""
    info, (path, _) = read_info(name), token_paths(name)
    kind = np.dtype(info.dtype).newbyteorder("<")
    with files.open_regular(path, field="data") as stream:
        first = np.fromfile(stream, dtype=kind, count=min(_FIRST, info.tokens)).tolist()
    text = None
    if info.tokenizer == "bytes":
        text = bytes(token for token in first if token < 256).decode("utf-8", errors="replace")
    shown = Tokens(
        info=info,
        size_bytes=info.size_bytes,
        tokens_file=str(path),
        first_tokens=first,
        first_text=text,
        unigram_nats=info.unigram_nats,
    )
    return shown if quick else _checked(shown, on_event)


def _checked(shown: Tokens, on_event: OnEvent) -> Tokens:
    info = shown.info
    tally, meter = Tally(info.dtype, info.vocab), Meter("read", info.size_bytes, on_event)
    for plain in chunks(shown.tokens_file):
        tally.add(plain)
        meter.add(len(plain))
    same = tally.sha256 == info.sha256 and tally.beyond == 0
    return replace(
        shown,
        checksum="matches" if same else "differs",
        found_sha256=tally.sha256,
        distinct_tokens=tally.distinct,
        unigram_nats=tally.entropy_nats,
    )


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
        raise UserError("is a folder", field="file", value=name, hint=f"pass its files: {name}/*")
    if stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
        raise UserError("is a device", field="file", value=name, hint="pass a text file")
    return found.st_size


def _encoder(request: TokensRequest) -> Encoder:
    vocab = request.vocab
    if request.tokenizer != "bytes":
        encoder = _from_file(request.tokenizer, request.end_token)
    elif request.end_token is not None:
        rule = "is not used with byte tokens, which have their own end"
        hint = "omit it, or pass --tokenizer"
        raise UserError(rule, field="--end-token", value=request.end_token, hint=hint)
    else:  # a model of 256 tokens has none to spare: a zero byte, which texts do not hold
        spare = vocab != _BYTES
        encoder = Encoder("bytes", _BYTES + spare, _BYTES if spare else 0, _from_bytes)
    if vocab is not None and vocab < encoder.vocab:
        rule = f"is below the {encoder.vocab} of the tokenizer '{encoder.name}'"
        hint = "use a model with a larger vocabulary, or another tokenizer"
        raise UserError(rule, field="--vocab", value=vocab, hint=hint)
    return encoder


def _from_bytes(content: Iterator[bytes], name: str) -> Iterator[np.ndarray[Any, Any]]:
    for plain in content:
        yield np.frombuffer(plain, np.uint8)


def _from_file(path: str, end_token: str | None) -> Encoder:
    """A Hugging Face tokenizer; special tokens are not added, nothing is cut off or padded."""
    try:
        import tokenizers
    except ModuleNotFoundError:
        rule = "needs the package 'tokenizers', which is not installed"
        hint = f"{install('tokenizers')}, or use --tokenizer bytes"
        raise UserError(rule, field="--tokenizer", value=path, hint=hint) from None
    text = files.read_text(path, field="tokenizer")
    try:
        made = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises nothing narrower
        raise UserError(
            f"is not a tokenizer.json ({error})", field="--tokenizer", value=path
        ) from None
    made.no_truncation()
    made.no_padding()
    known = made.get_vocab(with_added_tokens=True)

    def encode(content: Iterator[bytes], source: str) -> Iterator[np.ndarray[Any, Any]]:
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
        "is not a token of this tokenizer" if wanted else "has no common end token",
        field="--end-token" if wanted else "--tokenizer",
        value=wanted or path,
        hint="pass --end-token TEXT, or 'none' to join documents without one",
    )


def _decoded(content: Iterator[bytes], source: str) -> Iterator[str]:
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    try:
        for plain in content:
            yield decoder.decode(plain)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        hint = "use --tokenizer bytes for other files"
        raise UserError("is not UTF-8 text", field="file", value=source, hint=hint) from None


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
