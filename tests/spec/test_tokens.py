"""Token files: what is written is read back; a torn or wrong pair is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from fourfold.errors import UserError
from fourfold.spec.tokens import read_info, token_paths, write_tokens
from tests.spec.token_files import write_array


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    name = str(tmp_path / "deep" / "data")
    with write_tokens(name, vocab=5, end=4, tokenizer="test") as writer:
        writer.add(np.array([0, 1, 2, 3]))
        writer.end_document()
        writer.add(np.array([], dtype=np.int64))
        writer.end_document()
        writer.add(np.array([3], dtype=np.uint8))
        writer.end_document()
    info = read_info(name)
    assert (info.tokens, info.documents, info.end, info.dtype) == (7, 2, 4, "uint16")
    assert (tmp_path / "deep" / "data.bin").read_bytes() == b"".join(
        n.to_bytes(2, "little") for n in (0, 1, 2, 3, 4, 3, 4)
    )
    assert info.unigram_nats == pytest.approx(3 / 7 * math.log(7) + 4 / 7 * math.log(7 / 2))
    assert read_info(f"{name}.bin") == read_info(f"{name}.json") == info
    assert info.windows(6) == 1
    assert info.windows(7) == 0


def test_wide_tokens_take_four_bytes(tmp_path: Path) -> None:
    write_array(str(tmp_path / "wide"), [70_000, 1], vocab=2**16 + 5000)
    assert read_info(tmp_path / "wide").dtype == "uint32"
    assert (tmp_path / "wide.bin").read_bytes() == (70_000).to_bytes(4, "little") + b"\1\0\0\0"


def test_a_torn_or_wrong_pair_is_refused(tmp_path: Path) -> None:
    name = str(tmp_path / "data")
    with pytest.raises(UserError, match="does not exist"):
        read_info(name)
    write_array(name, range(100), vocab=100)
    tokens, side = token_paths(name)
    whole = tokens.read_bytes()
    for content, words in (
        (whole[:-1], "has 199 bytes"),
        (whole + b"\0\0", "has 202 bytes"),
        (whole[:-2] + b"\0\0", "other tokens"),
    ):
        tokens.write_bytes(content)
        with pytest.raises(UserError, match=words):
            read_info(name)
    tokens.write_bytes(whole)
    plain = json.loads(side.read_text())
    for change, words in (
        ({"dtype": "int8"}, "is not one of uint16, uint32"),
        ({"vocab": 2**17}, "does not fit uint16"),
        ({"schema": 99}, "newer fourfold"),
        ({"tokens": -1}, "tokens"),
    ):
        side.write_text(json.dumps(plain | change))
        with pytest.raises(UserError, match=words):
            read_info(name)
    side.unlink()
    with pytest.raises(UserError, match=r"has no data\.json beside its tokens"):
        read_info(name)


def test_a_failure_leaves_the_old_pair_and_no_rest(tmp_path: Path) -> None:
    name = str(tmp_path / "data")
    write_array(name, range(100), vocab=100)
    before = read_info(name)
    with pytest.raises(UserError, match="from 0 to vocab - 1 = 99"):
        write_array(name, [1, 100], vocab=100)
    assert read_info(name) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.json"]
