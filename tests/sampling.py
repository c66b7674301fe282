"""How much of a product a test takes: all of it in `./test --all`, a twentieth in `./test`, less in
`./test --quick`. Cases of a list that only `--all` needs are marked slow instead."""

from __future__ import annotations

import os

PROFILE = os.environ.get("FOURFOLD_TEST_PROFILE", "sample")
SHARE = {"all": 1.0, "sample": 0.05, "portable": 0.05, "quick": 0.02}[PROFILE]
_LEAST = 10


def examples(whole: int) -> int:
    """Of a property, for `@settings(max_examples=...)`."""
    return max(min(whole, _LEAST), round(whole * SHARE))
