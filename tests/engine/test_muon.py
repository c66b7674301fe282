"""Muon: its iteration, its updates beside torch's, and every layout beside one process."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fourfold.engine.parallel.groups import fake_world
from fourfold.engine.parallel.matrices import Matrices, matrices_of
from fourfold.engine.parallel.order import parallelize
from fourfold.engine.training.muon import orthogonal
from fourfold.engine.training.optimizer import OptimizerSettings
from fourfold.engine.training.trainer import Trainer
from fourfold.spec.layout import Layout
from fourfold.spec.muon import Muon
from fourfold.spec.run import RunSpec
from tests.engine.verified import verified
from tests.specs import run_spec

CPU = torch.device("cpu")
TEXT = Path(__file__).parents[2] / "docs" / "engine.md"


def by_formula(matrix: torch.Tensor, muon: Muon) -> torch.Tensor:
    x = matrix / matrix.norm()
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    for a, b, c in muon.polynomials:
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("coefficients", ["simple", "quintic"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_iteration_equals_its_formula(dtype, limit, coefficients):
    muon = Muon(coefficients=coefficients)
    made = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, 24, 64, generator=made, dtype=dtype)
    found = orthogonal(matrices, muon.polynomials)
    for one, update in zip(matrices, found, strict=True):
        assert float((update - by_formula(one, muon)).abs().max()) < limit
    # The polynomials leave singular values near 1, not at 1.
    values = torch.linalg.svdvals(found.double())
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.3


class Text:
    """The bytes of a file, one sequence after another."""

    waited_s = 0.0

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len
        self.tokens = torch.tensor(list(TEXT.read_bytes()), dtype=torch.int64) % 128

    def batch(self, first, sequences, positions):
        at = (sequences + first)[:, None] * self.seq_len + positions
        return self.tokens[at % len(self.tokens)], self.tokens[(at + 1) % len(self.tokens)]

    def ahead(self, first, sequences, positions) -> None:
        pass


SETTINGS = OptimizerSettings(lr=3e-3)


def alone(dtype: str, precision: str = "fp32", model: str = "llama-tiny") -> RunSpec:
    return run_spec(
        model, "dp1", seq_len=64, micro_batch=8, global_batch=8, precision=precision, seed=3,
        device="cpu", optimizer="muon", fused_projections=False, muon=Muon(dtype=dtype),
    )  # fmt: skip


class TorchMuon(Trainer):
    """The same training with torch's own optimizers."""

    def materialize(self, *, initial: bool = True) -> None:
        super().materialize(initial=initial)
        muon, lr, decay = self.spec.policy.muon, self.settings.lr, self.settings.weight_decay
        named = {shard.param: shard.name for shard in self.shards}
        matrices = [p for p, name in named.items() if muon.updates(name, tuple(p.shape))]
        rest = [p for p in named if p not in set(matrices)]
        self.theirs = [
            torch.optim.Muon(
                matrices,
                lr=lr,
                weight_decay=decay,
                momentum=muon.momentum,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(
                [
                    {"params": [p for p in rest if p.ndim > 1], "weight_decay": decay},
                    {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
                ],
                lr=lr,
                betas=self.settings.betas,
                eps=self.settings.eps,
            ),
        ]

    def update(self, norm: torch.Tensor) -> None:
        torch.nn.utils.clip_grad_norm_(list(self.parameters()), self.settings.max_norm)
        for optimizer in self.theirs:
            optimizer.step()
            optimizer.zero_grad()


def trained(kind: type[Trainer], spec: RunSpec, steps: int) -> tuple[Trainer, list[float]]:
    with fake_world(spec.layout, 0) as world:
        trainer = kind(spec, world, device=CPU, settings=SETTINGS, source=Text(spec.batch.seq_len))
        return trainer, [float(trainer.step(index).loss) for index in range(steps)]


def matrices_after(kind: type[Trainer], spec: RunSpec, steps: int) -> dict[str, torch.Tensor]:
    trainer, _ = trained(kind, spec, steps)
    updates = spec.policy.muon.updates
    return {s.name: s.values.clone() for s in trainer.shards if updates(s.name, s.shape)}


def test_update_of_one_step_is_within_1_percent_of_torchs():
    spec = alone("bf16")
    before = matrices_after(Trainer, spec, 0)
    ours, theirs = (matrices_after(kind, spec, 1) for kind in (Trainer, TorchMuon))
    assert ours.keys() == theirs.keys()
    assert len(ours) == 7 * spec.model.layers
    for name, start in before.items():
        right = theirs[name] - start
        assert float((ours[name] - theirs[name]).norm() / right.norm()) < 0.01, name
        assert float(right.norm()) > 0


@pytest.mark.slow
def test_loss_after_300_steps_on_text_is_within_half_a_percent_of_torchs():
    (_, ours), (_, theirs) = (trained(kind, alone("bf16"), 300) for kind in (Trainer, TorchMuon))
    assert theirs[-1] < 0.8 * theirs[0]
    assert abs(ours[-1] / theirs[-1] - 1) < 0.005


@pytest.mark.parametrize(
    ("layout", "sharding", "placement"),
    [("tp2", "zero1", "blocks"), ("dp2", "zero1", "owner"), ("dp2", "zero3", "blocks")],
)
def test_layout_equals_one_process(layout, sharding, placement, tmp_path):
    muon = Muon(dtype="fp64", placement=placement)
    spec = run_spec(
        "llama-tiny", layout, seq_len=32, micro_batch=2, global_batch=8, precision="fp64",
        sharding=sharding, optimizer="muon", muon=muon, device="cpu",
    )  # fmt: skip
    (row,) = verified([spec], tmp_path)
    assert row["pass"], row
    assert row["param_rel"] < 1e-9


FAULTS = {
    "muon-blocks": "as if each rank made its part of a matrix orthogonal apart",
    "muon-scale": "as if updates were scaled by the shorter side",
    "muon-shard": "as if one shard of each matrix was left out",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_named(fault, tmp_path):
    spec = run_spec(
        "llama-tiny", "tp2", seq_len=32, micro_batch=4, global_batch=8, precision="fp64",
        optimizer="muon", muon=Muon(dtype="fp64"), device="cpu",
    )  # fmt: skip
    (row,) = verified([spec], tmp_path, **{"break": fault})
    assert not row["pass"]
    assert row["signature"] == [FAULTS[fault]]


def all_ranks(spec: RunSpec) -> list[tuple[Matrices, tuple[int, ...]]]:
    found = []
    for rank in range(spec.layout.world):
        with fake_world(spec.layout, rank) as world:
            chunks = parallelize(spec, world)
            made = matrices_of(chunks, spec, world, spec.policy.muon)
            found.append((made, made.group.ranks))
    return found


@pytest.mark.parametrize("placement", ["owner", "blocks"])
@pytest.mark.parametrize(
    ("model", "layout", "sharding"),
    [
        ("llama-tiny", "pp2 dp2 cp2 tp2", "zero1"),
        ("llama-tiny", "dp2x2 tp4", "zero3"),
        ("mixtral-tiny", "dp2 cp2 tp2 ep2 etp2", "zero2"),
        ("deepseek-tiny", "dp4 tp2 ep4", "zero0"),
    ],
)
def test_ranks_agree_on_owners_and_what_they_send(model, layout, sharding, placement):
    spec = run_spec(
        model, layout, seq_len=32, micro_batch=1, global_batch=8, sharding=sharding,
        optimizer="muon", muon=Muon(placement=placement), device="cpu",
    )  # fmt: skip
    ranks = all_ranks(spec)
    assert len({len(made.rounds) for made, _ in ranks}) == 1
    # What one rank sends to another in a round is what that one expects of it.
    for number, (made, group) in enumerate(ranks):
        for which, some in enumerate(made.rounds):
            for matrix in some:
                owner = group[matrix.owner]
                own = next(m for m in ranks[owner][0].rounds[which] if m.name == matrix.name)
                assert own.held == matrix.held
                assert own.owner == matrix.owner
        owned = Counter(
            matrix.name for some in made.rounds for matrix in some if group[matrix.owner] == number
        )
        assert not owned or set(owned.values()) == {1}


def test_blocks_stay_where_tensor_ranks_cut_the_longer_side():
    spec = run_spec("llama-tiny", "tp2", optimizer="muon", device="cpu")
    for placement, expected in (("owner", {""}), ("blocks", {"", "rows", "columns"})):
        policy = replace(spec.policy, muon=Muon(placement=placement))
        made, _ = all_ranks(replace(spec, policy=policy))[0]
        assert {matrix.cut for some in made.rounds for matrix in some} == expected


def test_a_rank_alone_sends_nothing():
    with fake_world(Layout(), 0) as world:
        spec = alone("bf16")
        made = matrices_of(parallelize(spec, world), spec, world, spec.policy.muon)
        assert made.group.size == 1
