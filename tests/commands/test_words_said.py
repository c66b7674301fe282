"""Do commands say what a newcomer needs to hear, before they start and after they end?"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.commands import load
from fourfold.events import Event
from fourfold.output import Stderr
from fourfold.show.runs import _judged
from fourfold.spec.sweep import expand, read_sweep
from fourfold.verbs.calibrate import DemoRun

ROOT = Path(__file__).parents[2]


def test_report_names_what_it_does_not_read(tmp_path: Path, cli) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(
        "model,gpus,tp,pp,dp,micro_batch_size,global_batch_size,sec_per_iter,lr,my note\n"
        "llama-3.1-8b,8,2,1,4,1,64,3.25,3e-4,x\n"
    )
    cli("report", file)
    out, err = cli.out, cli.err
    assert "ignored columns: 'lr', 'my note'" in err
    assert "SEQLEN" not in out
    assert "3.250" in out
    assert re.search(r"\b64\b", out)


def test_demo_gives_a_verdict() -> None:
    failed = DemoRun(
        layout="dp4", sharding="zero1", micro_batch=1, predicted_s=1.0, predicted_s_low=0.5,
        predicted_s_high=2.0, predicted_peak_bytes=1.0, outcome="oom",
    )  # fmt: skip
    inside = replace(failed, outcome="ok", measured_s=1.2, inside_interval=True, flags=[])
    outside = replace(
        failed, layout="tp4", measured_s=3.1, inside_interval=False, flags=["machine changed"]
    )
    assert _judged((inside,))[0] == "1 of 1 measured inside their 80% interval"
    lines = _judged((outside, inside))
    assert lines[0].startswith("1 of 2 measured inside their 80% interval; they took 2.1 times")
    assert "fastest measured: dp4, predicted as number 2 of these" in lines
    assert "suspicious tp4: machine changed" in lines
    assert _judged((failed,)) == []


def test_a_new_phase_is_logged_at_once(capsys) -> None:
    show = Stderr()
    for text in ("starting 2 ranks", "starting 2 ranks", "step 1 of 9, loss 5.2", "step 2 of 9, x"):
        show(Event(text, "progress"))
    assert capsys.readouterr().err.splitlines() == ["starting 2 ranks", "step 1 of 9, loss 5.2"]


def test_progress_stays_on_one_line_of_a_narrow_terminal(monkeypatch) -> None:
    """A line that wraps can't be rewritten: each look would leave another behind."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    monkeypatch.delenv("COLUMNS", raising=False)
    with os.fdopen(theirs, "w") as terminal, os.fdopen(ours, "rb", buffering=0) as seen:
        monkeypatch.setattr("sys.stderr", terminal)
        Stderr()(Event("step 300 of 600, loss 1.63, " + "x" * 100, "progress"))
        assert len(seen.read(1000).removeprefix(b"\r\x1b[K")) == 59


def test_the_shown_sweep_files_are_sweeps() -> None:
    page = (ROOT / "docs" / "running.md").read_text()
    blocks = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (text,) = (block for block in blocks if "[sweep]" in block)
    assert expand(read_sweep(tomllib.loads(text))).total > 4
    help_text = load("sweep").examples.partition("\n")[2].partition("\nexamples:")[0]
    assert expand(read_sweep(tomllib.loads(help_text))).total == 18


@pytest.mark.parametrize("name", ["README.md", "docs/running.md", "CONTRIBUTING.md"])
def test_no_page_installs_from_an_index(name: str) -> None:
    assert "pip install fourfold" not in (ROOT / name).read_text()


@pytest.mark.parametrize("word", ["-h", "--help", "--help-all"])
def test_a_command_of_sub_commands_has_help(word: str, cli) -> None:
    assert "sub-commands:\n  make" in cli("data", word)
