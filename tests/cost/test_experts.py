"""Parameters of published models with experts: totals and what a token meets, exact by shape.

Does every prediction say what it rests on?
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import fourfold
from fourfold import PlanRequest
from fourfold.cost.count.flops import CONVENTIONS, FlopsQuery
from fourfold.cost.count.params import active_params, model_params, mtp_params, rank_params
from fourfold.cost.count.params import stage_layers as stages_of
from fourfold.cost.fit.calibration import PROVENANCES
from fourfold.spec import catalog, codec
from fourfold.spec.catalog import model
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy

# Total, active, active without both embeddings, own weights of layers for further tokens, causal
# GFLOP a token at 4,096 tokens (routers not counted, windows counted). Published: 46.7B and 12.9B
# (Mixtral), 30.5B and 3.3B, 671B and 37B (DeepSeek-V3), 116.8B and 5.1B (GPT-OSS, which leaves the
# input embedding out), 355B with the layer for further tokens (GLM-4.5).
PUBLISHED = {
    "mixtral-8x7b": (46702792704, 12879925248, 12617781248, 0, 79.706),
    "mixtral-8x22b": (140630071296, 39161468928, 38758815744, 0, 242.196),
    "qwen3-30b-a3b": (30532122624, 3353032704, 2730702848, 0, 23.006),
    "qwen3-235b-a22b": (235093634560, 22190763520, 20946103808, 0, 148.035),
    "deepseek-v2-lite": (15706484224, 2661150208, 2241719808, 0, 16.386),
    "deepseek-v2": (235741434880, 21375800320, 20327224320, 0, 155.014),
    "deepseek-v3": (671026419200, 37552297472, 35698939392, 11610068224, 249.811),
    "gpt-oss-20b": (20914757184, 4187440704, 3029173824, 0, 22.912),
    "gpt-oss-120b": (116829156672, 5711982912, 4553716032, 0, 32.630),
    "olmoe-1b-7b": (6919161856, 1282017280, 1075972096, 0, 7.866),
    "llama4-scout": (107769861120, 17172894720, 15103923200, 0, 102.844),
    "llama4-maverick": (400711848960, 17184691200, 15115719680, 0, 102.844),
    "kimi-k2": (1026408232448, 32861500928, 30512690688, 0, 204.477),
    "glm-4.5": (352797829024, 33632266144, 32080373664, 3988069792, 224.470),
    "glm-4.5-air": (106852251264, 13424129664, 12182615680, 2375059584, 90.564),
    "moonlight-16b-a3b": (15960110208, 2914776192, 2243687552, 0, 17.153),
    "grok-1": (315684820992, 83756587008, 82951280640, 0, 512.175),
    "qwen2-57b-a14b": (57408658944, 14249270784, 13160193536, 0, 84.654),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    shape = model(name)
    active = active_params(shape, 4096)
    query = FlopsQuery.of(model=shape, seq_len=4096, layout=Layout(), policy=Policy())
    gflop = CONVENTIONS["causal"].count(query).model / 1e9
    counted = (model_params(shape, 4096), active.all, active.without_both, mtp_params(shape))
    assert (*counted, round(gflop, 3)) == PUBLISHED[name]


LAYOUTS = ("dp4 ep4", "dp2 tp2 ep2", "dp2 tp4 ep2 etp2", "dp2x2 cp2 ep4", "pp2 tp2 etp2")


@pytest.mark.parametrize("words", LAYOUTS)
def test_ranks_of_a_stage_own_each_expert_once_per_copy(words: str) -> None:
    shape, layout = model("deepseek-tiny"), Layout.parse(words)

    def total(layout: Layout, zero: int) -> int:
        stages = stages_of(shape, layout.pp, 32)
        shares = (
            rank_params(shape, layout, seq_len=32, stages=stages, rank=rank, zero=zero)
            for rank in range(layout.world)
        )
        return sum(one.owned for one in shares)

    experts = 3 * 16 * 3 * 64 * 32
    # What tensor ranks keep whole is owned by each of them: norms, router, ways down to latents.
    dense = total(Layout(tp=layout.tp), 0) - layout.tp * experts
    assert total(layout, 1) == layout.replicate * (dense + experts)


GOLDEN = Path(__file__).parent.parent / "golden"


def _first(**machine: object) -> str:
    request = PlanRequest(
        model="llama-3.1-8b", gpus=64, seq_len=8192, global_batch=128, layout="tp2 pp1 cp1", top=1,
        **machine,  # type: ignore[arg-type]
    )  # fmt: skip
    best = fourfold.plan(request).best
    return best.provenance


@pytest.mark.parametrize(
    ("word", "machine"),
    [
        ("near", {"gpu": "h100-80gb", "stack": "megatron"}),  # a twin of a measured cluster
        ("blended", {"gpu": "mi300x", "stack": "megatron"}),  # its engine elsewhere
        ("blended", {"gpu": "a100-80gb", "stack": "fourfold"}),  # other engines on such GPUs
        ("blended", {"gpu": "mi300x", "stack": "fourfold"}),
    ],
)
def test_a_plan_says_what_it_rests_on(word: str, machine: dict[str, object]) -> None:
    assert _first(**machine) == word


def test_a_plan_for_a_new_kind_of_gpu_rests_on_physics(tmp_path: Path) -> None:
    gpu = replace(catalog.device("mi300x"), id="x1", name="X1", generation="x", kernels="")
    path = tmp_path / "x1.json"
    path.write_text(json.dumps(codec.dump(gpu)))
    assert _first(gpu=str(path), stack="fourfold") == "physics"


def test_rows_that_were_fitted_are_measured_and_larger_ones_near(tmp_path: Path) -> None:
    lines = (GOLDEN / "mpt.csv").read_text().splitlines()
    head = lines[0].split(",")
    other = lines[1].split(",")
    other[head.index("seq_len")] = str(64 * int(other[head.index("seq_len")]))
    broken = lines[1].split(",")
    broken[head.index("n_gpus")] = ""
    other[head.index("row_id")], broken[head.index("row_id")] = "longer", "broken"
    rows = tmp_path / "rows.csv"
    rows.write_text("\n".join([*lines[:2], ",".join(other), ",".join(broken)]))
    told = [row["provenance"] for row in fourfold.predict_table(str(rows)).rows()]
    assert told == ["measured", "near", ""]


def test_a_guess_of_this_machine_is_physics() -> None:
    spec = fourfold.RunSpec.from_plain({"model": "llama-tiny", "gpus": 1})
    told = fourfold.predict(spec).provenance
    assert told == "physics"
    assert told in PROVENANCES
