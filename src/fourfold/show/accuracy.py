"""A picture of accuracy: predicted against measured seconds, and errors per source.

matplotlib is an optional extra and is imported when a picture is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.errors import UserError

if TYPE_CHECKING:
    from fourfold.cost.fit.accuracy import Result


def draw(results: list[Result], path: str) -> None:
    """One row of two plots per way of scoring; written as PNG (or what the ending says)."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UserError(
            "needs matplotlib", field="--picture", hint="pip install matplotlib"
        ) from None
    ways = list(dict.fromkeys(result.how for result in results))
    figure, axes = pyplot.subplots(
        len(ways), 2, figsize=(12, 4.2 * len(ways)), squeeze=False, layout="constrained"
    )
    for way, (left, right) in zip(ways, axes, strict=True):
        chosen = [result for result in results if result.how == way]
        _scatter(left, chosen, way)
        _curves(right, chosen)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot be written ({error})",
            field="--picture",
            value=path,
            hint="use a name that ends in .png",
        ) from None
    pyplot.close(figure)


def _pairs(result: Result):  # type: ignore[no-untyped-def]
    import numpy as np

    rows, answers = result.rows, result.answers
    ok = rows.usable & result.within & (rows.status != "oom")
    ok = ok & np.isfinite(rows.step_s) & np.isfinite(answers.step_s)
    return rows.step_s[ok], answers.step_s[ok]


def _scatter(axis, results: list[Result], title: str) -> None:  # type: ignore[no-untyped-def]
    import numpy as np

    low, high = np.inf, 0.0
    for result in results:
        measured, predicted = _pairs(result)
        if not measured.size:
            continue
        axis.loglog(measured, predicted, ".", ms=4, alpha=0.6, label=result.score.source)
        low, high = min(low, measured.min()), max(high, measured.max())
    if high > 0:
        line = np.array([low, high])
        axis.loglog(line, line, "k-", lw=0.8)
        axis.fill_between(line, line * 0.9, line * 1.1, color="k", alpha=0.1, lw=0)
    axis.set(xlabel="measured s/step", ylabel="predicted s/step", title=f"{title} (band: 10%)")
    axis.legend(fontsize=8)


def _curves(axis, results: list[Result]) -> None:  # type: ignore[no-untyped-def]
    """Share of rows within an error: read the median at 50% and p90 at 90%."""
    import numpy as np

    for result in results:
        measured, predicted = _pairs(result)
        if not measured.size:
            continue
        error = np.sort(100 * np.abs(predicted / measured - 1))
        share = 100 * (np.arange(error.size) + 1) / error.size
        score = result.score
        label = f"{score.source}: median {score.median_pct:.1f}%, p90 {score.p90_pct:.0f}%"
        axis.plot(error, share, label=label)
    axis.axhline(50, color="k", lw=0.5)
    axis.axhline(90, color="k", lw=0.5)
    axis.set(xlim=(0, 40), ylim=(0, 100), xlabel="error %", ylabel="rows within it, %")
    axis.legend(fontsize=8, loc="lower right")
