"""What a row may not say."""

from __future__ import annotations

import numpy as np

from fourfold.cost.stacks import StackDefaults
from fourfold.cost.table.reference import LARGEST, Distinct, Draft, numbers
from fourfold.spec.layout import MODEL_AXES


def check_values(draft: Draft) -> None:
    """Refuse what is no number of anything, so that nonsense never looks like an answer."""
    f = draft.facts
    for name in (*MODEL_AXES, "vpp", "dp", "micro", "ffn", "kv_heads"):
        wrong = (f[name] < 1) | (f[name] % 1 != 0) | (f[name] > LARGEST)
        draft.refuse(wrong, f"{name} must be a whole number of at least 1")
        f[name] = np.where(wrong, 1.0, f[name])
    draft.refuse(f["heads"] > f["hidden"], "n_heads exceeds d_model")


def check_layout(draft: Draft) -> None:
    """Refuse what no engine could run."""
    f = draft.facts
    draft.refuse(f["tp"] * f["cp"] * f["pp"] * f["dp"] != f["gpus"], "dp x tp x cp x pp != n_gpus")
    draft.refuse(f["pp"] > f["layers"], "pp exceeds n_layers")
    draft.refuse(f["dp"] > f["batch"], "dp exceeds the global batch")
    draft.refuse(f["cp"] > f["seq"], "cp exceeds seq_len")
    f["micro"] = np.minimum(f["micro"], np.maximum(1.0, np.ceil(f["batch"] / f["dp"])))


def check_vocab(draft: Draft, stack: Distinct[StackDefaults]) -> None:
    """Tests of an engine that leave it out have one vocabulary."""
    known = stack.array(lambda s: s.tests_vocab)
    cells = draft.table.column("vocab")
    left_out = np.array([not cell for cell in cells], dtype=bool) & (known > 0)
    values = np.where(left_out, known, numbers(cells))
    wrong = np.isnan(values) | (values < 1) | (values > LARGEST) | (values % 1 != 0)
    draft.refuse(wrong, "vocab must be a whole number of at least 1")
    draft.assume(left_out, "vocab taken as that of the engine's tests")
    draft.facts["vocab"] = np.where(wrong, 1.0, values)
