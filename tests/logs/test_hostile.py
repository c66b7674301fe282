"""Logs are hostile input: whatever is in a file, there is an answer and no traceback."""

from __future__ import annotations

import json
import math
import os
import pprint
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.errors import UserError
from fourfold.logs import lines, nested
from fourfold.logs.book import LogReader, read_log
from fourfold.logs.row import complete, row_of
from fourfold.logs.series import MOST_LINES, Series
from tests.fuzz import NASTY, damaged
from tests.logs import test_shapes, written
from tests.logs.reading import BLOOM, GOLDEN, collected, one, rows, table
from tests.sampling import examples
from tests.spec.test_nccl_tests import log_text

TEXTS = {
    "megatron": written.megatron(BLOOM[0]),
    "restarted": written.megatron(BLOOM[0]) * 3 + written.megatron({**BLOOM[1], "status": "oom"}),
    "torchtitan": written.titan([2000, 6600, 6650, 6640], ranks=3),
    "nanotron": written.nanotron([9000, 4870, 4860, 4850]),
    "llm-foundry": written.composer([0, 0, 10600, 10643, 10650]),
    "reference": (GOLDEN / "bloom.csv").read_text(),
    "metrics": "_step,_timestamp,throughput(tps)\n1,100,10\n2,101,20\n3,103,21\n4,102,20\n",
    "nemo": test_shapes.HYDRA + "\n".join(test_shapes.bar(n, f"{n}.0", 2.5) for n in range(5)),
    "bridge": test_shapes.BRIDGE + test_shapes.YAML + written.iteration(2, 2.0, 64, {}),
    "nccl-tests": log_text("sendrecv", 2, 1, 1e-5, 2e10),
    "chart": '"Step","a - iteration-time","b - iteration-time"\n1,9,8\n2,2.5,\n3,2.5,3.5\n',
    "json": '{"_step": 1, "iteration-time": 9.5}\n{"_step": 2, "iteration-time": 2.5}\n' * 2,
}
_NASTY = (
    *NASTY, b" iteration ", b"step:", b"elapsed time per iteration (ms): ", b"[rank0]:",
    b"------ arguments ------", b"Config(", b"[batch=3/4]:\n",
)  # fmt: skip


def _survives(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    name = rng.choice(sorted(TEXTS))
    log = folder / f"{name}{rng.choice(('.log', '.csv', '.jsonl', ''))}"
    content = TEXTS[name].encode()
    for _ in range(rng.randint(1, 6)):
        content = damaged(content, rng, _NASTY)
    log.write_bytes(content)
    try:
        answer = collected(log, out=folder / "rows.out")
    except UserError:
        return
    finally:
        log.unlink()
    for row in answer.rows_read:
        plain = row.plain()
        for column in ("step_s", "tokens_s_gpu", "mem_gb", "n_gpus", "gbs"):
            value = plain[column]
            assert value is None or (math.isfinite(value) and value > 0), (seed, column, value)
        assert row["status"] in ("ok", "oom", "fail", "hang", "incomplete"), seed
    json.dumps(answer.plain())


@pytest.mark.parametrize(
    "seeds", [range(50), pytest.param(range(1000, 2000), marks=pytest.mark.slow)]
)
def test_mutilated_logs(tmp_path: Path, seeds: range) -> None:
    for seed in seeds:
        _survives(tmp_path, seed)


@given(st.binary(max_size=3000))
@settings(max_examples=examples(60))
def test_any_bytes_are_lines(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "a.log"
    path.write_bytes(content)
    found = list(lines.read_lines(path))
    assert all("\n" not in line.text for line in found)
    assert read_log(path).lines == len(found)


# --- encodings, colours, labels, halves


@pytest.mark.parametrize(
    "encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"]
)
def test_encodings(tmp_path: Path, encoding: str) -> None:
    text = "début\n" + written.megatron(BLOOM[0])
    assert float(one(tmp_path, text.encode(encoding))["step_s"]) == 769.99


@pytest.mark.parametrize("ends", ["\r\n", "\r"])
def test_line_ends(tmp_path: Path, ends: str) -> None:
    text = written.titan([2000, 6600, 6650]).replace("\n", ends)
    assert float(one(tmp_path, text)["tokens_s_gpu"]) == 6650


def test_colours_that_lost_their_escape(tmp_path: Path) -> None:
    text = written.titan([2000, 6600, 6650]).replace("\x1b", "")
    assert float(one(tmp_path, text)["tokens_s_gpu"]) == 6650


@pytest.mark.parametrize("label", ["[default7]:", "7: ", "[1,7]<stdout>:", "[rank7]:", "[7]:"])
def test_labels_of_launchers(tmp_path: Path, label: str) -> None:
    text = "".join(f"{label}{line}\n" for line in written.megatron(BLOOM[0]).splitlines())
    found = one(tmp_path, text, cluster="jean-zay")
    assert (found["status"], float(found["step_s"]), found["mem_gb"]) == ("ok", 769.99, "67")


def test_other_ranks_between_the_lines_of_a_configuration(tmp_path: Path) -> None:
    mine = [f"[default0]:{line}" for line in written.nanotron([9000, 4860, 4860]).splitlines()]
    text = "".join(f"{line}\n[default3]:WARNING: 'unbalanced (text\n" for line in mine)
    assert one(tmp_path, text, hardware="h100-80gb")["status"] == "ok"


def test_two_lines_that_ran_into_each_other_are_read_apart(tmp_path: Path) -> None:
    row = {"seq_len": "2048"}
    first, second = (written.iteration(step, 2.0 + step, 64, row) for step in (2, 3))
    text = written.iteration(1, 9.0, 64, row) + "\n" + first + second + "\n"
    assert float(one(tmp_path, text)["step_s"]) == 4.5
    torn = written.iteration(1, 9.0, 64, row) + "\n" + first[:60] + second + "\n"
    log = tmp_path / "torn.log"
    log.write_text(torn)
    book = read_log(log)
    assert (book.unread, book.shown[0][0]) == (1, 2)
    assert complete(row_of(book.runs[0], ""), {})["steps"] == "1"


def test_half_a_last_line_is_not_read(tmp_path: Path) -> None:
    """tps: 6,650 cut to tps: 6,6 would be a thousand times slower."""
    text = written.titan([2000, 6600, 6650])
    cut = text[: text.rindex("6,650") + 3]
    log = tmp_path / "cut.log"
    log.write_text(cut)
    book = read_log(log)
    assert (book.unread, book.cut) == (1, 1)
    assert float(one(tmp_path, cut)["tokens_s_gpu"]) == 6600
    megatron = written.megatron(BLOOM[0])
    at = megatron.rindex("769.99") + 3
    assert one(tmp_path, megatron[:at])["step_s"] == ""


def test_numbers_that_are_none_are_counted(tmp_path: Path) -> None:
    text = written.megatron(BLOOM[0])
    for nasty in ("nan", "inf", "-3.0", "0.00", "1e999", "12x4", "٧٦٩"):
        log = tmp_path / "a.log"
        log.write_text(text.replace("(s): 769.99 |", f"(s): {nasty} |"))
        assert read_log(log).unread == 1, nasty


def test_a_clock_that_goes_back_is_not_a_negative_step(tmp_path: Path) -> None:
    table_ = tmp_path / "run-a-tag-lm-loss.csv"
    walls = [100.0, 104.0, 106.0, 103.0, 105.0, 107.0]
    table_.write_text(
        "Wall time,Step,Value\n" + "".join(f"{w},{n},1.5\n" for n, w in enumerate(walls, start=1))
    )
    (row,) = collected(table_, out=tmp_path / "o.csv").rows_read
    assert (float(row["step_s"]), row["steps"]) == (2.0, "4")


# --- bounds


def test_a_huge_line_is_cut(tmp_path: Path) -> None:
    good = written.megatron(BLOOM[0])
    found = one(tmp_path, "x" * (3 * lines.MOST_CHARS) + "\n" + good)
    assert float(found["step_s"]) == 769.99
    hostile = '"' + '\\"' * 400_000 + "\n"
    assert float(one(tmp_path, "Config(" + hostile + good)["step_s"]) == 769.99


def _big(folder: Path, size: int) -> Path:
    """Eight ranks talk, one of them has the steps."""
    log = folder / "big.log"
    head = written.megatron(BLOOM[0]).partition(" iteration ")[0]
    with log.open("w") as stream:
        stream.write(head)
        step = 0
        while stream.tell() < size:
            block = []
            for _ in range(200):
                step += 1
                block += [
                    f"[default{rank}]:WARNING: step {step}: {'data is late ' * 9}\n"
                    for rank in range(7)
                ]
                block.append(f"[default7]:{written.iteration(step, 2.0, 2048, BLOOM[0])}\n")
            stream.write("".join(block))
    return log


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    def peak(size: int) -> int:
        log = _big(tmp_path, size)
        tracemalloc.start()
        try:
            book = read_log(log)
            assert book.runs[0].steps.measured().seconds == 2.0
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    read_log(_big(tmp_path, 1))  # what is imported and cached once
    assert peak(4_000_000) < peak(400_000) + 300_000


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_gigabyte_under_a_memory_limit(tmp_path: Path) -> None:
    log = _big(tmp_path, 10**9)
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28))\n"
        "from fourfold.logs.book import read_log\n"
        f"measured = read_log({str(log)!r}).runs[0].steps.measured()\n"
        "print(measured.seconds, measured.iterations)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, iterations = done.stdout.split()
    assert (seconds, int(iterations) > 500_000) == ("2.0", True)
    log.unlink()


def test_a_folder_device_or_missing_file_is_said(tmp_path: Path) -> None:
    for path in ("/dev/zero", str(tmp_path / "none.log")):
        with pytest.raises(UserError):
            collected(path, out=tmp_path / "o.csv")
    os.mkfifo(tmp_path / "pipe.log")
    assert read_log(tmp_path / "pipe.log").runs == []


# --- properties


_SCALARS = st.one_of(
    st.integers(-(10**9), 10**9), st.booleans(), st.none(),
    st.text(
        st.characters(codec="ascii", exclude_categories=("Cc",), exclude_characters="\\\"'"),
        max_size=12,
    ),
)  # fmt: skip
_KEYS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
_TREES = st.dictionaries(
    _KEYS,
    st.recursive(_SCALARS, lambda inner: st.dictionaries(_KEYS, inner, max_size=4), max_leaves=8),
    min_size=1, max_size=5,
)  # fmt: skip


@given(_TREES, st.integers(20, 100))
@settings(max_examples=examples(80))
def test_printed_configurations_are_read_back(tree: dict[str, Any], width: int) -> None:
    expected = {key: str(value) for key, value in _walk(tree)}
    for text in (repr(tree), pprint.pformat(tree, width=width)):
        reader = nested.Nested()
        for line in text.splitlines():
            reader.feed(line)
        assert reader.is_done
        assert {k: v for k, v in reader.flat.items() if k in expected} == expected
    as_json = nested.Nested()
    for line in json.dumps(tree, indent=2).splitlines():
        as_json.feed(line)
    words = {"True": "true", "False": "false", "None": "null"}
    typed = {
        key: value if isinstance(value, str) else words.get(str(value), str(value))
        for key, value in _walk(tree)
    }
    assert {k: v for k, v in as_json.flat.items() if k in typed} == typed


def _walk(tree: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        found += (
            _walk(value, f"{before}{key}.")
            if isinstance(value, dict)
            else [(f"{before}{key}", value)]
        )
    return found


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 9)), min_size=1, max_size=60))
@settings(max_examples=examples(100))
def test_the_weighted_median_is_that_of_single_iterations(pairs: list[tuple[int, int]]) -> None:
    import statistics

    series = Series()
    for value, weight in pairs:
        series.add(float(value), weight)
    every = [float(value) for value, weight in pairs for _ in range(weight)]
    assert series.median() == statistics.median(every)


def test_a_long_series_is_thinned_and_keeps_its_median() -> None:
    series = Series()
    for number in range(5 * MOST_LINES):
        series.add(float(number % 1000))
    assert len(series.values) <= MOST_LINES + 1
    assert series.median() == pytest.approx(500, abs=5)


@given(
    st.lists(st.floats(0.01, 9000.0), min_size=2, max_size=20),
    st.sampled_from(["s", "ms"]), st.integers(1, 4096),
)  # fmt: skip
@settings(max_examples=examples(60))
def test_any_iteration_lines_are_read_exactly(seconds: list[float], unit: str, batch: int) -> None:
    reader = LogReader()
    printed = []
    for step, value in enumerate(seconds, start=1):
        text = written.iteration(step, value, batch, {"seq_len": "128"}, unit=unit)
        field = text.partition(f"({unit}): ")[2].split()[0]
        printed.append(float(field) / (1000.0 if unit == "ms" else 1.0))
        reader.take(lines.clean(text, step))
    run = reader.finish().runs[0]
    run.steps._flush()
    timed = [value for value in printed[1:] if value > 0]
    assert sorted(run.steps._times.values) == pytest.approx(sorted(timed), rel=1e-15)


def test_rows_of_the_reference_schema_pass_through(tmp_path: Path) -> None:
    answer = collected(GOLDEN / "mpt.csv", out=tmp_path / "o.csv")
    said = table(GOLDEN / "mpt.csv")
    assert len(answer.rows_read) == len(said)
    for row, cells in zip(answer.rows_read, said, strict=True):
        for name in ("row_id", "n_gpus", "mbs", "gbs", "precision", "sharding", "status", "note"):
            assert row[name] == cells[name].strip(), (row["row_id"], name)
        assert float(row["step_s"]) == float(cells["step_s"])


def test_no_run_is_said_and_nothing_written(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("hello\nworld\n")
    assert not collected(log, out=tmp_path / "o.csv").ok
    assert not (tmp_path / "o.csv").exists()
    assert rows(tmp_path, "") == []


def test_a_value_of_dots_takes_no_longer_than_its_length() -> None:
    """Each line of a hostile list may be one: twice the dots, twice the work, not four times."""
    for text in ("." * 4000, "..updated" * 400, "]" * 4000):
        assert nested.argument(f"  name ... {text}") is not None
    assert nested.argument("  a ...... 8..........updated") == ("a", "8")
    assert nested.argument("  a ...... {'stage': 1}default") == ("a", "{'stage': 1}")
    assert nested.argument("  a ...... default") == ("a", "default")
    assert nested.argument("  a ...... not.updated") == ("a", "not.updated")
