"""Whatever is typed or lies in a file: exit 0, 1 or 2, never a traceback, no user file changed.

7,000 random or mutilated inputs in this process and 350 in processes of their own; a tenth of them
in `./test`.
"""

from __future__ import annotations

import contextlib
import json
import os
import string
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fourfold.cli import COMMANDS as ALL_COMMANDS
from fourfold.spec import catalog, codec
from tests.fuzz import call, damaged
from tests.result.test_profile import make
from tests.sampling import examples
from tests.spec.test_hf import GPT2, LLAMA, LLAMA3

SOURCE = Path(__file__).parents[2] / "src"
SAMPLES = Path(__file__).parents[1] / "samples"
GOLDEN = Path(__file__).parents[1] / "golden"
# These start processes of the engine, or a server; every other command is light, also one that is
# added later.
ENGINE = {"bench", "calibrate", "demo", "dryrun", "mcp", "serve", "sweep", "train", "verify"}
COMMANDS = tuple(name for name in ALL_COMMANDS if name not in ENGINE)
FILES = {
    "config.json": json.dumps(LLAMA | {"rope_theta": 1e4, "rope_scaling": LLAMA3, "hidden_act":
        "silu", "attention_dropout": 0.0, "tie_word_embeddings": False}, indent=1),
    "gpt2.json": json.dumps(GPT2),
    "model.toml": codec.to_toml(catalog.model("llama-tiny")),
    "gpu.toml": codec.to_toml(catalog.device("h100-80gb")),
    "cluster.toml": codec.to_toml(catalog.cluster("jean-zay")),
    "topo.txt": (SAMPLES / "topo_8xh100.txt").read_text(),
    "nccl.log": (SAMPLES / "all_reduce_1x8.log").read_text(),
    "rows.csv": "".join((GOLDEN / "mpt.csv").read_text().splitlines(keepends=True)[:4]),
    "table.md": (SAMPLES / "inputs" / "table.md").read_text(),
}  # fmt: skip
SHIPPED = json.loads((SOURCE / "fourfold/data/calibrations/shipped.json").read_text())
FILES |= {
    "calibration.json": json.dumps(SHIPPED | {"entries": SHIPPED["entries"][:2]}, indent=1),
    "spec.toml": (SAMPLES / "inputs" / "spec.toml").read_text(),
    "profile.json": codec.to_json(make()),
}
FILES["sweep.toml"] = FILES["spec.toml"] + "[sweep]\ntp = [1, 2]\nmicro_batch = [1, 2]\n"
TABLE = tomllib.loads(Path(__file__).with_name("inputs.toml").read_text())
LINES = TABLE.pop("lines")


def words_of(line: str) -> list[str]:
    """With the beginnings that the table names."""
    for name in ("PRICED", "SMALL", "NEW"):
        line = line.replace(name, TABLE[name])
    return line.split()


READERS = {file: [words_of(line) for line in lines] for file, lines in LINES.items()}


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    found = sorted(folder.iterdir())
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


@contextlib.contextmanager
def folder_of(files: dict[str, bytes]):
    """A working folder with these files, which must look the same afterwards."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        for file, content in files.items():
            Path(file).write_bytes(content)
        before = snapshot(Path(name))
        yield
        assert snapshot(Path(name)) == before


def check(words: list[str]) -> None:
    code, _, err = call(words)
    assert code in (0, 1, 2), words
    told = any(line.startswith("error: ") for line in err.splitlines())  # progress may precede it
    assert told or code != 2, (words, err)
    assert not told or code in (1, 2), (words, err)


LONG = pytest.mark.timeout(3 * 3600)  # all examples are thousands of commands
many = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
numbers = st.one_of(
    st.integers().map(str),
    st.integers(-3, 70).map(str),
    st.floats().map(str),
    st.sampled_from(
        ["1e9", "0x10", "1_000", "", " ", "-0", "1" * 5000, "nan", "2x4", "3us", "9GB/s"]
    ),
)
names = st.one_of(
    st.sampled_from([*catalog.model_names(), *catalog.device_names(), *catalog.cluster_names()]),
    st.sampled_from(["new", "all", "text", "json", "csv", "md", "bf16", "fp8", "zero3", "full"]),
    st.sampled_from(["./config.json", "./model.toml", "./gpu.toml", "./cluster.toml", "/", "..",
                     "./nowhere.json", "/dev/null", "nccl.log", "topo.txt", "bash", "words",
                     "rows.csv", "table.md", "ring", "layer", "tp % 2 == 0"]),
    st.text(max_size=12),
)  # fmt: skip
FLAGS = [
    "--model", "--gpu", "--tokens-per-s", "--step-s", "--gpus", "--dp", "--tp", "--cp", "--pp",
    "--micro-batch", "--seq-len", "--global-batch", "--sharding", "--recompute", "--cp-kind",
    "--schedule", "--virtual-stages", "--precision", "--format", "--name", "--hosts", "--host-gpus",
    "--nvlink-ranks", "--nvlink", "--network", "--nics", "--nic-rate", "--price", "--topo",
    "--nccl-tests", "--cluster", "--tokens", "--hidden", "--heads", "--rank", "--stack", "--where",
    "--style", "--sort", "--runs", "--ignore", "--rules", "--calibration", "--set", "--spec",
    "--help", "--version", "--nonsense", "-x", "--",
]  # fmt: skip


@st.composite
def command_lines(draw) -> list[str]:
    words = [draw(st.sampled_from(COMMANDS) | names)]
    for _ in range(draw(st.integers(0, 5))):
        words += draw(
            st.one_of(
                st.tuples(st.sampled_from(FLAGS), numbers | names),
                st.tuples(st.sampled_from(FLAGS)),
                st.tuples(names),
            )
        )
    # The one flag pair that may write: an existing file, and no --force. Elsewhere --out replaces.
    if words[0] == "clusters" and draw(st.booleans()):
        words += ["--out", "cluster.toml"]
    return [word.replace("\0", "") for word in words]


def revalued(text: str, dice: Random) -> bytes:
    """A JSON or TOML text with one value swapped for another kind of value."""
    marks = [i for i, letter in enumerate(text) if letter in ":="]
    if not marks:
        return text.encode()
    mark = dice.choice(marks)
    value = dice.choice(["-1", "0", "1", "1.5", "true", "null", '""', '"llama"', "[]", "{}",
                         "1e400", "9" * 30, '"80GiB"', "[[[]]]", '"\\u0000"', "nan", "inf",
                         "99999999"])  # fmt: skip
    stop = mark + 1
    while stop < len(text) and text[stop] not in ",\n}":
        stop += 1
    return f"{text[: mark + 1]} {value}{text[stop:]}".encode()


@st.composite
def file_cases(draw) -> tuple[list[str], str, bytes]:
    file = draw(st.sampled_from(sorted(FILES)))
    dice = draw(st.randoms(use_true_random=False))
    damages = st.sampled_from(["damaged", "damaged", "revalued", "foreign"])
    match draw(damages):
        case "damaged":
            content = damaged(FILES[file].encode(), dice)
        case "revalued":
            content = revalued(FILES[file], dice)
        case _:
            content = draw(st.binary(max_size=200))
    return draw(st.sampled_from(READERS[file])), file, content


ALL = {file: text.encode() for file, text in FILES.items()}


@LONG
@settings(many, max_examples=examples(3300))
@given(command_lines())
def test_any_command_line_is_answered(words):
    with folder_of(ALL):
        check(words)


@LONG
@settings(many, max_examples=examples(3700))
@given(file_cases())
def test_any_file_is_answered(case):
    words, file, content = case
    with folder_of({file: content}):
        check(words)


@st.composite
def either(draw) -> tuple[list[str], dict[str, bytes]]:
    if draw(st.booleans()):
        return draw(command_lines()), ALL
    words, file, content = draw(file_cases())
    return words, {file: content}


@LONG
@settings(many, max_examples=examples(350))
@given(either())
def test_processes_of_their_own_answer_too(case):
    in_a_process(*case)


def in_a_process(words: list[str], files: dict[str, bytes]) -> None:
    words = [word.encode("utf-8", errors="ignore").decode() for word in words]
    with folder_of(files):
        done = subprocess.run(
            [sys.executable, "-m", "fourfold", *words],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
    assert done.returncode in (0, 1, 2), (words, done.stderr)
    assert b"Traceback" not in done.stderr, words


def test_the_readers_work_when_nothing_is_mutilated():
    with folder_of(ALL):
        for ways in READERS.values():
            for words in ways:
                code, _, err = call(words)
                assert code == (1 if words[0] == "lint" and words[1].startswith("table") else 0), (
                    words,
                    err,
                )
                assert "error" not in err, words


@pytest.mark.parametrize("path", ["./loop.json", "./folder.json", "./locked.json", "./pipe.json"])
def test_things_that_are_no_files(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink("loop.json", "loop.json")
    os.mkdir("folder.json")
    os.mkfifo("pipe.json")
    Path("locked.json").touch(mode=0o000)
    check(["models", path])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_and_a_closed_stdout():
    program = f'PYTHONPATH="{SOURCE}" "{sys.executable}" -m fourfold'
    done = subprocess.run(["sh", "-c", f"{program} models > /dev/full"], capture_output=True)
    assert (done.returncode, b"No space left" in done.stderr) == (1, True), done.stderr
    assert b"Traceback" not in done.stderr
    for ending in (">&-", "| head -1", "2>&-"):
        done = subprocess.run(["sh", "-c", f"{program} models {ending}"], capture_output=True)
        assert (done.returncode, done.stderr) == (0, b""), (ending, done.stderr)


def test_words_of_every_letter():
    for letter in string.printable + "\x7f\u00e9\u2028\ud800":
        check(["models", letter])
        check(["clusters", "--gpu", letter])
