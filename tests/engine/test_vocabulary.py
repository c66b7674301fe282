"""Does any tensor parallel rank ever hold a tensor as wide as the vocabulary? Every tensor that a
step makes, forwards and backwards, is looked at.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from fourfold.engine.jobs import dryrun
from fourfold.engine.observe.ledger import Ledger
from fourfold.spec.catalog import shape
from tests.specs import run_spec

# A prime: no other size of the model is a multiple of it, and the two ranks' parts differ.
_VOCAB, _PARTS = 521, (261, 260)


def recorder(shapes: set[tuple[int, ...]]) -> type[Ledger]:
    """A ledger that also keeps the shapes of all it sees, views too."""

    class Recorder(Ledger):
        def see(self, tensor, op="given"):
            shapes.add(tuple(tensor.shape))
            super().see(tensor, op)

    return Recorder


@pytest.mark.parametrize(
    ("tied", "sequence_parallel"),
    [(True, True), (False, False)]
    + [pytest.param(*one, marks=pytest.mark.slow) for one in ((True, False), (False, True))],
)
def test_no_rank_holds_the_whole_vocabulary(monkeypatch, tied, sequence_parallel):
    model = replace(
        shape("llama", layers=2, hidden=32, ffn=64, heads=4, kv_heads=2, vocab=_VOCAB), tied=tied
    )
    fields = {"seq_len": 16, "global_batch": 2, "precision": "fp32", "sharding": "zero1"}
    spec = run_spec(model, "tp2", sequence_parallel=sequence_parallel, **fields)
    for rank, part in enumerate(_PARTS):
        shapes: set[tuple[int, ...]] = set()
        monkeypatch.setattr(dryrun, "Ledger", recorder(shapes))
        dryrun.count_rank(spec, rank)
        assert (16, part) in shapes, "its own logits must have been seen"
        assert (part, 32) in shapes, "and its rows of the table"
        assert not [one for one in shapes if _VOCAB in one or 16 * _VOCAB in one]
