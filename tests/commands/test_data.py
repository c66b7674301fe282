"""`fourfold data`: token files from texts, and what they say of themselves."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.output import Stderr
from fourfold.spec.tokens import read_info, tokenizer_path
from fourfold.verbs import weights
from fourfold.verbs.tokens import pieces


def tokens(name: str) -> list[int]:
    return np.fromfile(f"{name}.bin", f"<u{2 if read_info(name).dtype == 'uint16' else 4}").tolist()


@pytest.fixture
def name(tmp_path: Path) -> str:
    return str(tmp_path / "corpus")


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_bytes(b"caf\xc3\xa9\r\n")
    return str(path)


def test_bytes_are_tokens_and_256_ends_a_document(cli, name, text, tmp_path):
    (tmp_path / "empty").touch()
    cli("data", "make", "--out", name, text, tmp_path / "empty", text)
    assert tokens(name) == [*b"caf\xc3\xa9\r\n", 256] * 2
    info = read_info(name)
    assert (info.documents, info.vocab, info.tokenizer, info.dtype) == (2, 257, "bytes", "uint16")
    shown = cli("data", "show", name)
    assert re.search(r"checksum +matches", shown)
    assert f"{info.unigram_nats:.4f} nats" in shown
    assert "caf\\xe9" in shown
    data = cli.json("data", "show", name)
    assert data["first_tokens"] == tokens(name)
    assert data["distinct_tokens"] == 8


def test_a_vocabulary_of_256_has_a_zero_byte_for_the_end(cli, name, text):
    cli("data", "make", "--out", name, "--vocab", "256", text)
    assert tokens(name)[-1] == 0
    assert read_info(name).vocab == 256
    assert "is below the 257 of the tokenizer" in cli(
        "data", "make", "--out", f"{name}2", "--vocab", "255", text, status=2
    )


def test_stdin_is_a_text(cli, name, monkeypatch):
    content = bytes(range(256)) * (20 * 2**10)  # more than one chunk
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    cli("data", "make", "--out", name, "-")
    assert tokens(name) == [*content, 256]


def test_an_old_file_is_kept_unless_forced(cli, name, text):
    cli("data", "make", "--out", name, text)
    assert "use --force" in cli("data", "make", "--out", name, text, status=2)
    cli("data", "make", "--out", name, "--force", text, text)
    assert read_info(name).documents == 2


def test_damage_is_found(cli, name, tmp_path):
    path = tmp_path / "long"
    path.write_bytes(b"x" * (3 * 2**20))
    cli("data", "make", "--out", name, path)
    with open(f"{name}.bin", "r+b") as stream:
        stream.seek(3 * 2**20)
        stream.write(b"\xff")
    assert "ends match" in cli("data", "show", name, "--quick")
    assert "differs" in cli("data", "show", name, status=1)
    with open(f"{name}.bin", "ab") as stream:
        stream.write(b"\0")
    assert "create it again" in cli("data", "show", name, status=2)


@given(st.lists(st.text(alphabet="ab \n.\u00e9", max_size=30)), st.integers(1, 12))
def test_pieces_are_the_text(texts, size):
    found = list(pieces(iter(texts), size))
    assert "".join(found) == "".join(texts)
    assert all(len(piece) <= 2 * size for piece in found)


def test_rows_of_jsonl_are_documents(cli, name, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "ab", "id": 1}\n\n{"text": "\\u00e9"}')
    cli("data", "make", "--out", name, path)
    assert tokens(name) == [97, 98, 256, 0xC3, 0xA9, 256]
    assert read_info(name).documents == 2
    path.write_text('{"content": "c"}\n')
    cli("data", "make", "--out", name, "--force", "--text-field", "content", path)
    assert tokens(name) == [99, 256]
    assert "fields: content" in cli("data", "make", "--out", f"{name}2", path, status=2)
    for line, rule in (("{", "line 1"), ('{"text": "\\ud800"}', "half of a character")):
        path.write_text(line)
        assert rule in cli("data", "make", "--out", f"{name}2", path, status=2)


def test_rows_of_parquet_are_documents(cli, name, tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pyarrow", None)
        path.touch()
        assert "pip install pyarrow" in cli("data", "make", "--out", name, path, status=2)
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["ab", "c"], "id": [1, 2]}), path)
    cli("data", "make", "--out", name, path)
    assert tokens(name) == [97, 98, 256, 99, 256]
    said = cli("data", "make", "--out", f"{name}2", "--text-field", "id", path, status=2)
    assert "row 1 in" in said
    assert "has no text 'id'" in said
    path.write_bytes(b"no parquet")
    assert "cannot be read" in cli("data", "make", "--out", f"{name}2", path, status=2)


def test_a_tokenizer_needs_its_package(cli, name, text, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    said = cli("data", "make", "--out", name, "--tokenizer", "t.json", text, status=2)
    assert "pip install tokenizers" in said


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    import tokenizers as package

    made = package.Tokenizer(package.models.BPE())
    made.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = package.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the cat sat on the mat, the end. " * 20], trainer)
    made.enable_truncation(4)  # a file may ask for it; a corpus does not want it
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def export_of(name: str, out: Path) -> None:
    """What 'weights export' does about the tokenizer of a training on these tokens."""
    out.mkdir()
    state = SimpleNamespace(spec=SimpleNamespace(data=name))
    weights._copy_tokenizer(SimpleNamespace(state=state), out, Stderr())  # pyrefly: ignore


def test_a_tokenizer_file_makes_the_tokens(cli, capsys, name, tokenizer, tmp_path, monkeypatch):
    import tokenizers as package

    body = "the cat sat\n\non the mat.\n  \u00e9nd\n" * 300
    path = tmp_path / "cats.txt"
    path.write_text(body, encoding="utf-8")
    monkeypatch.setattr("fourfold.verbs.tokens.pieces.__defaults__", (100,))
    cli("data", "make", "--out", name, "--tokenizer", tokenizer, path, path)
    whole = package.Tokenizer.from_file(tokenizer)
    whole.no_truncation()
    one = [*whole.encode(body).ids, whole.token_to_id("<|endoftext|>")]
    assert tokens(name) == one * 2
    assert len(one) < len(body.encode())
    assert read_info(name).tokenizer.startswith("tokenizer.json ")
    kept = tokenizer_path(name)
    assert kept.read_text() == Path(tokenizer).read_text()
    export_of(name, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == kept.read_text()
    kept.write_text("{}")
    export_of(name, tmp_path / "other")
    assert "is not the one that made the tokens" in capsys.readouterr().err
    assert not (tmp_path / "other" / "tokenizer.json").exists()
    path.write_bytes(b"\xff\xfe")
    for words, said in (
        ([str(path)], "is not UTF-8"),
        ([str(path), "--end-token", "<nope>"], "is not a token of this tokenizer"),
        ([str(path), "--vocab", "20"], "is below the 272"),
    ):
        made = ["make", "--out", f"{name}2", "--tokenizer", tokenizer, *words]
        assert said in cli("data", *made, status=2)
    wrong = cli("data", "make", "--out", f"{name}2", "--tokenizer", path, "x", status=2)
    assert "No such file" in wrong
