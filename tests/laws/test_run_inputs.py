"""A run described by flags, --spec and --set, however odd: a RunSpec or a UserError."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fourfold import options
from fourfold.cli import command_parser
from fourfold.errors import UserError
from fourfold.spec.run import RunSpec, run_of
from tests.sampling import examples

SPEC = (Path(__file__).parents[1] / "samples" / "inputs" / "every_part.toml").read_text()
PATHS = [
    "model", "gpus", "layout", "layout.dp", "layout.order", "layout.tp", "batch", "batch.ramp",
    "batch.ramp.start", "batch.seq_len", "policy", "policy.env", "policy.env.A B", "policy.env.X",
    "policy.precision", "policy.recompute", "memory_limit", "start_limit_s", "fault", "fault.where",
    "", ".", "..", "a..b", "layout..tp", "model.hidden", "gpus.x", "schema", "type",
]  # fmt: skip
VALUES = [
    "", "1", "-1", "0", "2x2", "true", "nan", "inf", "1e400", "[1, 2]", "{a = 1}", "{}", "'x'",
    "1979-05-27", "07:32:00", "0x" + "f" * 5000, "9" * 25, "dp2 tp2", "pp2 pp2", "tp dp pp cp",
    "1\nmodel = 2", "\x00", "=", "[" * 200, "llama-tiny", "./nowhere.json", "3us", "none\n",
]  # fmt: skip


def described(words: list[str]) -> RunSpec | None:
    parser = command_parser("dryrun")
    try:
        return run_of(options.run_table(parser.parse_args(words)))
    except UserError:
        return None


assignments = st.tuples(
    st.sampled_from(PATHS) | st.text(max_size=8), st.sampled_from(VALUES) | st.text(max_size=8)
).map(lambda pair: f"--set={pair[0]}={pair[1]}")


def test_a_number_too_long_to_print_is_refused() -> None:
    with pytest.raises(UserError, match="must be a table"):
        run_of({"model": "llama-tiny", "batch": {"seq_len": 64, "ramp": 16**4000}})


@settings(max_examples=examples(400))
@given(st.lists(assignments, min_size=1, max_size=4))
@example(["--set=layout=dp2 tp2", "--set=gpus=4"])
@example(["--set="])
def test_any_assignment(words):
    described(["--model", "llama-tiny", "--seq-len", "64", *words])


@settings(max_examples=examples(400))
@given(st.integers(0, len(SPEC)), st.integers(0, 40), st.sampled_from(VALUES) | st.text(max_size=6))
def test_any_spec_file(start, length, insert):
    content = (SPEC[:start] + insert + SPEC[start + length :]).encode(errors="surrogatepass")
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        Path("run.toml").write_bytes(content)
        described(["--spec", "run.toml"])
        assert Path("run.toml").read_bytes() == content


def test_the_whole_file_is_a_run(tmp_path):
    (tmp_path / "run.toml").write_text(SPEC)
    run = described(["--spec", str(tmp_path / "run.toml"), "--set", "policy.compile=true"])
    assert (str(run.layout), run.policy.compile) == ("pp2 dp1 cp1 tp2", True)
    assert (run.memory_limit, run.start_limit_s) == (2 * 2**30, 600.0)
    assert run.policy.precision == "bf16-mixed"
    assert run.batch.micro_sizes(16) == (3, 3, 3, 3, 3, 1)


def test_text_stays_text():
    run = described(["--model", "llama-tiny", "--set", "policy.env.CUDA_LAUNCH_BLOCKING=1",
                     "--set", "tag=2024", "--set", 'note="5"'])  # fmt: skip
    assert run.policy.env == (("CUDA_LAUNCH_BLOCKING", "1"),)
    assert (run.tag, run.note) == ("2024", "5")


def test_fields_of_a_preset_change_under_a_name_that_says_so():
    words = ["--model", "llama-tiny", "--set", "model.layers=3", "--set", "model.norm_eps=1e-6"]
    again = ["--set", "model.layers=2", *words]
    changed, preset = described(again).model, described(words[:2]).model
    name = "llama-tiny layers=3 norm_eps=1e-6"
    assert changed == replace(preset, layers=3, norm_eps=1e-6, name=name)
    for more in ([], ["--set", "model.layers=4"]):
        assert described(["--set", "model.name=mine", *words, *more]).model.name == "mine"
    assert described([*words[:2], "--set", "model.name=mine"]).model == replace(preset, name="mine")
