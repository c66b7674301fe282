"""What a row may not say."""

from __future__ import annotations

import numpy as np

from fourfold.cost.table.reference import LARGEST, Draft
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
