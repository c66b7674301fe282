"""Token files for tests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fourfold.spec.tokens import write_tokens


def write_array(name: str, tokens: Iterable[int], *, vocab: int) -> None:
    """A token file from whole numbers at hand: one document, without an end token."""
    with write_tokens(name, vocab=vocab, end=-1, tokenizer="given") as writer:
        writer.add(np.fromiter(tokens, np.int64))
        writer.end_document()
