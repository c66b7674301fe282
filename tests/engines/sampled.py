"""Layouts of six models for each engine, and of others with experts, drawn by a fixed seed among
the legal ones."""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fourfold.cost.count.params import model_params
from fourfold.cost.run import columns_of
from fourfold.cost.step.pipeline import chunk_layers
from fourfold.search import export
from fourfold.search.export.setup import Setup
from fourfold.search.legal import Target, why_not
from fourfold.spec import catalog
from fourfold.spec.batch import Batch, Ramp
from fourfold.spec.engine import EXPORTS, engine_of
from fourfold.spec.experts import Moe
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec
from tests.specs import shape_of

ROOT = Path(__file__).parent.parent.parent
CLUSTER = catalog.cluster("nvidia-h100")


MODELS, EXPERTS = (
    {engine: tuple(map(shape_of, models)) for engine, models in kind.items()}
    for kind in tomllib.loads(Path(__file__).with_name("models.toml").read_text()).values()
)
MEGATRON = ("megatron", "megatron-0.16")
VENVS = {
    "megatron": "megatron",
    "megatron-0.16": "megatron-0.16",
    "torchtitan": "torchtitan-0.3",
    "torchtitan-0.2": "torchtitan-0.2",
}
STACKS = dict.fromkeys(("megatron", "megatron-0.16", "megatron-bridge"), "megatron-bridge-2026")


def _drawn(engine: str, model: ModelShape, dice: random.Random) -> Setup:
    """Any layout and policy of the kinds the engine has at all."""
    rules = EXPORTS[engine].rules
    kinds = tuple(
        {"every": "every-2", "block": "block-1"}.get(kind, kind) for kind in rules.recompute
    )
    layout = Layout(
        pp=dice.choice((1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)),
        replicate=dice.choice((1, 1, 1, 2)) if rules.hybrid else 1,
        shard=dice.choice((1, 2, 3, 4, 8, 16)),
        cp=dice.choice((1, 1, 2, 4)) if "cp" in rules.axes else 1,
        tp=dice.choice((1, 2, 4, 8, 16)),
    )
    if model.moe:
        ep = dice.choice((1, 2, 4, 8, 16, 32, 64))
        slices = layout.tp if rules.experts_follow_tp else dice.choice((1, 1, 2))
        layout = replace(layout, ep=ep, etp=1 if rules.experts_follow_tp and ep > 1 else slices)
    loops = "interleaved" in rules.schedules and layout.pp > 1
    virtual = dice.choice((1, 1, 2, 3, 4, 5, 6, 7)) if loops else 1
    plain = tuple(name for name in rules.schedules if name in ("1f1b", "gpipe"))
    looped = tuple(name for name in rules.schedules if name not in ("1f1b", "gpipe"))
    micro = dice.choice((1, 2, 4))
    rounds = dice.choice((1, 2, 3, 4, 8, 16)) * dice.choice((1, layout.pp))
    size = micro * layout.dp * rounds
    ramp = Ramp(start=size // 2, increment=size // 2, samples=9000) if size % 4 == 0 else None
    policy = Policy(
        precision=dice.choice(("bf16-mixed", *rules.precisions)),
        sharding=f"zero{dice.choice(rules.pipeline_zeros if layout.pp > 1 else rules.zeros)}",
        sequence_parallel=dice.choice((True, True, engine == "torchtitan-0.2")),
        cp_kind=dice.choice(rules.cp_kinds),
        schedule=dice.choice(looped if virtual > 1 else plain) if layout.pp > 1 else "1f1b",
        virtual_stages=virtual,
        recompute=dice.choice(kinds),
        compile=engine.startswith("torchtitan") and dice.random() < 0.3,
    )
    policy = _with_experts(engine, model, layout, policy, dice) if model.moe else policy
    return Setup(
        model=model,
        layout=layout,
        batch=Batch(
            seq_len=dice.choice((2048, 4096, 8192)) if model.family != "gpt" else 2048,
            micro_batch=micro,
            global_batch=size,
            ramp=ramp if engine in MEGATRON and dice.random() < 0.2 else None,
        ),
        policy=policy,
        host_gpus=8,
        engine=engine_of(STACKS.get(engine, export.stack_of(engine))),
        device="h100-80gb",
    )


def _with_experts(
    engine: str, model: ModelShape, layout: Layout, policy: Policy, dice: random.Random
) -> Policy:
    kinds = ("auto", *(kind for kind in EXPORTS[engine].rules.dispatchers if kind != "local"))
    if engine == "torchtitan-0.2" and not model.latent:
        kinds = ("auto", "alltoall")
    kind = dice.choice(kinds)
    # Under another micro batch's layers: Megatron's, and where nothing is computed again around it.
    hides = layout.ep > 1 and kind != "allgather" and policy.recompute in ("none", "moe-act")
    hides &= engine.startswith("megatron") and (layout.pp == 1) == (policy.virtual_stages == 1)
    return replace(
        policy, dispatcher=kind, routing=dice.choice(("natural", "forced")),
        overlap_exchange=hides and policy.precision == "bf16-mixed" and dice.random() < 0.5
        and (not model.mtp or layout.pp > 1),
    )  # fmt: skip


def sampled(engine: str, count: int, models: Sequence[ModelShape] = ()) -> list[Setup]:
    """Legal setups that the engine's release can express, the models in turn."""
    dice = random.Random(f"{engine} 1")
    models = models or MODELS[engine]
    found: list[Setup] = []
    while len(found) < count:
        model = models[len(found) % len(models)]
        one = _drawn(engine, model, dice)
        target = Target(engine=one.engine, release=engine, gpus=one.layout.world)
        if why_not(model, one.layout, one.batch, one.policy, target):
            continue
        export.write_folder(engine, one)  # what is legal for a release, it has settings for
        found.append(one)
    return found


def expected(engine: str, one: Setup) -> dict[str, Any]:
    """Layers of each stage as they are priced, parameters as counted, tokens of a step."""
    spec = RunSpec(
        model=one.model,
        gpus=one.layout.world,
        layout=one.layout,
        batch=one.batch,
        policy=one.policy,
    )
    columns = columns_of([spec], cluster=CLUSTER, engine=one.engine)
    chunks = one.layout.pp * one.policy.virtual_stages
    layers = chunk_layers(columns, chunks)[:, 0] if one.layout.pp > 1 else [one.model.layers]
    params = model_params(one.model, one.batch.seq_len)
    if one.model.moe and one.model.moe.choice_bias:  # which these engines do not count
        params -= one.model.experts * one.model.count_layers("experts")
    if engine in MEGATRON:  # rows are added until tp divides the vocabulary
        rows = -one.model.vocab % one.layout.tp
        params += rows * one.model.hidden * (1 if one.model.tied else 2)
    return {
        "layers": [int(count) for count in layers],
        "params": params,
        "tokens": one.batch.tokens,
        **(_expected_experts(one, one.model.moe) if one.model.moe else {}),
    }


_MODULES = {"selective": ["core_attn"], "moe": ["moe"], "moe-act": ["moe_act"]}


def _expected_experts(one: Setup, moe: Moe) -> dict[str, Any]:
    model, layout = one.model, one.layout
    # torchtitan's other dispatchers are for ep.
    local = layout.ep * (layout.etp if one.engine.name.startswith("megatron") else 1) == 1
    return {
        "experts": model.experts,
        "top_k": model.top_k,
        "expert_ffn": moe.ffn,
        "shared_ffn": moe.shared_ffn,
        "routed": [
            i for i, kind in enumerate(model.layer_kinds()) if kind.feed_forward == "experts"
        ],
        "ep": layout.ep,
        "group": _expert_group(layout),
        "dispatcher": "alltoall" if local or one.dispatcher == "local" else one.dispatcher,
        "forced": one.policy.routing == "forced",
        "router": [moe.score, moe.normalised, moe.scale, moe.groups, moe.group_top_k],
        **(
            {
                "etp": layout.etp,
                "modules": _MODULES.get(one.policy.recompute, []),
                "mtp": model.mtp or 0,
                "capacity": moe.capacity,
                "hides_exchange": one.policy.overlap_exchange,
            }
            if one.engine.name.startswith("megatron")
            else {}
        ),
    }


def _expert_group(layout: Layout) -> list[int]:
    """Ranks that hold one copy of all experts with rank 0."""
    size = layout.shard * layout.cp * layout.tp
    places = [layout.expert_place(rank) for rank in range(size)]
    return [rank for rank, (edp, _, etp) in enumerate(places) if (edp, etp) == (0, 0)]


def environment(engine: str) -> Path:
    """The interpreter of the engine's own environment (scripts/engines makes them)."""
    python = ROOT / ".engines" / VENVS.get(engine, engine) / "bin" / "python"
    if not python.exists():
        missing = f"{python.parent.parent} is missing: run scripts/engines"
        assert not os.environ.get("FOURFOLD_ENGINES"), missing
        pytest.skip(missing)
    return python


def read_back(engine: str, setups: list[Setup], folder: Path) -> list[dict[str, Any]]:
    """What the engine's own code makes of each."""
    cases = []
    for place, one in enumerate(setups):
        here = folder / str(place)
        here.mkdir()
        for name, text in export.write_folder(engine, one).items():
            (here / name).write_text(text)
        words = (here / "engine.args").read_text().split()
        cases.append(
            {"args": words, "folder": str(here), "env": exports_of((here / "env.sh").read_text()),
             "world": one.layout.world, "layers": one.model.layers, "device": one.device}
        )  # fmt: skip
    return asked(engine, cases, folder)


def exports_of(text: str) -> dict[str, str]:
    """Return the variables that an env.sh exports."""
    lines = [line.removeprefix("export ") for line in text.splitlines() if line[:1] not in "#"]
    return {
        name: "".join(shlex.split(value)) for name, _, value in (x.partition("=") for x in lines)
    }


def verdict(engine: str, count: int, by: str, answers: Sequence[dict[str, Any]],
            left: Sequence[str] = ()) -> str:  # fmt: skip
    """Which release took how many exports, by what of its own; what was stood in for, and what is
    `left` because a stand-in answers for it."""
    name = VENVS.get(engine, engine)
    pins = (ROOT / "scripts" / "engines.txt").read_text().splitlines()
    release = next(line for line in pins if line.startswith(f"{name}: ")).partition(": ")[2]
    standins = sorted({one for answer in answers for one in answer["standins"]})
    text = f"\n{release}: {count} exports accepted by {by}; stood in for: {', '.join(standins)}"
    rest = f"; not shown to start, as a stand-in answers for them: {', '.join(left)}"
    return text + (rest if left else "")


READERS = {
    "megatron": "megatron_args.py",
    "megatron-0.18": "megatron_args.py",
    "megatron-0.16": "megatron_read.py",
    "megatron-bridge": "bridge_read.py",
}


def asked(engine: str, cases: list[dict[str, Any]], folder: Path, *words: str) -> Any:
    """What the engine's reader says of each case, in the engine's own environment."""
    python = environment(engine)
    reader = Path(__file__).with_name(READERS.get(engine, "titan_read.py"))
    done = subprocess.run(
        [python, reader, *words],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
