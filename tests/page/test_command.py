"""The command line that a page shows is read back as the same run, the same plan."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold import options
from fourfold.cli import command_parser
from fourfold.page.run_details import bench_command, plan_command
from fourfold.spec import catalog, codec, texts
from fourfold.spec.batch import Batch, Ramp
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec, run_of
from fourfold.verbs.requests import PlanRequest, decided

from .sample import HOSTILE


def read(line: str):
    assert line.isprintable()
    if "$'" in line:  # as a shell reads it, which the library does not
        shown = ["bash", "-c", f"printf '%s\\0' {line}"]
        words = subprocess.run(shown, capture_output=True, check=True).stdout.decode().split("\0")
        words.pop()
    else:
        words = shlex.split(line)
    assert words[0] == "fourfold"
    return command_parser(words[1]).parse_args(words[2:])


# What a terminal may take for the end of a paste, a key, another order of letters; a line's end.
STEERING = ("\x1b[201~\x03'x'", "\u202egpj.exe \\", "x\ny", "\x9b2J\x7f", "\ue000\U000e0041")
TEXTS = st.sampled_from(["", *HOSTILE, "a b", "--tp", "$(rm -rf x)", "'", *STEERING])
RUNS = st.builds(
    RunSpec,
    model=st.sampled_from(["llama-tiny", "mpt-tiny", "llama-3.1-8b"]).map(catalog.model),
    gpus=st.just(8),
    layout=st.sampled_from(["dp8", "tp2 dp4", "pp2 dp2x2", "cp4 dp2", "pp8"]).map(Layout.parse),
    batch=st.builds(
        Batch,
        seq_len=st.sampled_from([128, 4096]),
        micro_batch=st.integers(1, 9),
        global_batch=st.integers(1, 99),
    ),
    policy=st.builds(
        Policy,
        precision=st.sampled_from(["fp32", "bf16-mixed", "fp8"]),
        compile=st.booleans(),
        env=st.sampled_from([(), (("A", "1"), ("B", "x y"))]),
    ),
    steps=st.integers(1, 50),
    warmup=st.integers(0, 9),
    settle=st.just(False),
    seed=st.integers(0, 9),
    note=TEXTS,
    memory_limit=st.none() | st.integers(1, 2**40),
)


@given(RUNS)
def test_a_runs_command_runs_it_again(spec: RunSpec) -> None:
    args = read(bench_command(spec))
    table = options.run_table(args, extra=("steps", "warmup", "data", "tag", "note"))
    assert run_of(table) == spec


def test_a_model_without_a_preset_has_its_file() -> None:
    spec = replace(
        RunSpec.from_plain({"model": "llama-tiny", "gpus": 2, "warmup": 2, "note": HOSTILE[0]}),
        model=replace(catalog.model("llama-tiny"), layers=5, name=HOSTILE[1]),
    )
    line = bench_command(spec)
    assert line.endswith("\nfourfold bench --spec run.toml")
    text = line.split("<<'END'\n")[1].split("\nEND\n")[0]
    assert codec.load(RunSpec, texts.parse_toml(text)) == spec
    steering = bench_command(replace(spec, note="".join(STEERING)))
    assert steering.replace("\n", "").isprintable()
    text = steering.split("<<'END'\n")[1].split("\nEND\n")[0]
    assert codec.load(RunSpec, texts.parse_toml(text)).note == "".join(STEERING)


@pytest.mark.parametrize(
    "request_",
    [
        PlanRequest(model="llama-3.1-8b", seq_len=8192, global_batch=128, gpus=16, gpu="h100-80gb"),
        PlanRequest(
            model="gpt-3-175b", seq_len=2048, global_batch=2048, cluster="jean-zay", max_nodes=48,
            layout="tp8 pp4", policy={"recompute": "full"}, micro_batch=2, safe=True, top=3,
            ramp=Ramp(start=192, increment=16, samples=9_765_625), tokens=10**12, price=2.5,
            where=("dp % 4 == 0", "mem_gib < 70"), stack="megatron",
        ),
    ],
)  # fmt: skip
def test_a_plans_command_asks_the_same(request_: PlanRequest) -> None:
    args = read(plan_command(request_))
    given_ = decided(options.run_table(args))
    given_ |= {"ramp": args.ramp} if args.ramp else {}
    again = options.load(PlanRequest, args, **given_)
    layout = Layout.parse(request_.layout).to_plain() if request_.layout else {}
    asked = {axis: layout[axis] for axis in layout if axis in request_.layout}
    assert {k: int(v) for k, v in dict(again.layout or {}).items()} == asked
    same = {"layout": "", "policy": {k: str(v) for k, v in again.policy.items()}}
    assert replace(again, **same) == replace(request_, layout="")
