"""How long does a matrix product take? Seconds for C[M,N] = A[M,K] B[K,N] in 16 bits or fewer.

Tile and wave quantisation: NVIDIA, "Matrix Multiplication Background User's Guide". Alignment of
the shards to 128 bytes: the same guide, and the BigScience head-count tables. Broadcasts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Coefficients = Mapping[str, Any]

# (rows, columns, relative speed) of the tiles libraries choose from; speeds as measured by NVIDIA
# for large products, the smaller ones re-read their inputs more often.
TILES = (
    (256.0, 128.0, 1.0),
    (128.0, 256.0, 1.0),
    (128.0, 128.0, 0.93),
    (64.0, 128.0, 0.78),
    (64.0, 64.0, 0.6),
)


def misalignment(size: Floats) -> Floats:
    """log2 of how far a leading dimension misses 64 elements (128 bytes): 0 aligned, 6 odd."""
    whole = np.maximum(size, 1.0).astype(np.int64)
    return np.log2(64.0 / np.gcd(whole, 64))


def tile_waves(m: Floats, n: Floats, *, sms: Floats, wave: Floats | float) -> Floats:
    """Time of the best tiling in units of (SM-FLOP / K): min over tiles of waves x tile area.

    A wave of tiles takes as long as one tile; `wave` in 0..1 says how much of the last, partly
    filled wave is paid (schedulers and split-K hide some of it).
    """
    best: Floats | None = None
    for rows, cols, speed in TILES:
        tiles = np.ceil(m / rows) * np.ceil(n / cols)
        filled = tiles / sms
        waves = np.maximum(0.5, (1.0 - wave) * filled + wave * np.ceil(filled))
        cost = waves * sms * (2.0 * rows * cols / speed)
        best = cost if best is None else np.minimum(best, cost)
    assert best is not None
    return best


def gemm_s(
    m: Floats,
    n: Floats,
    k: Floats,
    *,
    rate: Floats | float,
    hbm: Floats,
    sms: Floats,
    coef: Coefficients,
) -> Floats:
    """Seconds of one product at `rate` FLOP/s for a perfect shape; never faster than memory."""
    skew = misalignment(n) + misalignment(k)
    shape = (k / (k + 128.0)) * np.maximum(0.25, 1.0 - coef["align"] * skew)
    busy = tile_waves(m, n, sms=sms, wave=coef["wave"]) * k / (rate * shape)
    return np.maximum(busy, 2.0 * (m * k + n * k + m * n) / hbm)
