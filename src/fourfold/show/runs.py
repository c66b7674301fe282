"""Pages of many runs, and of a training, a demo, a comparison and a verification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from fourfold.escape import flattened
from fourfold.result.report import OUTCOMES
from fourfold.result.stored_run import Cell, short_name
from fourfold.show.bench import oom_page
from fourfold.spec.layout import AXES, EXPERT_AXES
from fourfold.spec.sweep import varied_text
from fourfold.text_table import Column, Grid, Part, named, or_dash, quantities, table
from fourfold.units import counted, show_bytes, show_seconds
from fourfold.verbs.sweep import PlannedRun

if TYPE_CHECKING:
    from fourfold.verbs.calibrate import Demo, DemoRun
    from fourfold.verbs.runs import Differences, StoredRuns
    from fourfold.verbs.sweep import SweepPlan, Swept, SweptRun
    from fourfold.verbs.train import CurveSummary, TrainingState
    from fourfold.verbs.verify import Verified

GIB = 2**30
# Columns that tables of runs share.
_RUN = (
    "model",
    "layout",
    "seq=seq_len",
    "micro=micro_batch",
    "global=global_batch",
    "precision",
    "sharding",
)
# Never shown just because runs would look alike without: repeats may be of other hosts, and the
# settings name the variables.
_NOT_TELLING = {"run_id", "repeat", "host", "outcome", "env"}
_FIGURES = ("step time=step_s:seconds", "tokens/s/GPU=tokens_s_gpu:,.0f")


def runs_page(answer: StoredRuns, store: str) -> list[Part]:
    counts = answer.outcomes
    listed = ", ".join(f"{counts[name]} {name}" for name in OUTCOMES if name in counts)
    found = [stored.summary for stored in answer.runs]
    repeated = {run.run_id for run in found if run.repeat}
    rows = [run.row() | {"unlisted": run.unlisted} for run in found]
    run = named(*_RUN)
    settings: list[Column] = [
        *named("engine=stack"),
        ("recompute", lambda row: "" if row["recompute"] == "none" else row["recompute"]),
        *named("settings=unlisted"),
    ]
    alike: dict[tuple[str, ...], list[dict[str, Cell]]] = {}
    for row in rows:
        alike.setdefault(tuple(cell(row) for _, cell in (*run, *settings)), []).append(row)
    rest = [*named("tag"), ("why", lambda row: row["failure"][:60])]
    runs = table(
        rows,
        ("run", lambda row: short_name(row["run_id"], row["repeat"], repeated)),
        *run,
        *named("outcome", *_FIGURES, "memory=peak_bytes:bytes"),
        *(column for column in settings if any(map(column[1], rows))),
        *named(*_telling(alike.values())),
        *(column for column in rest if any(map(column[1], rows))),
    )
    return [
        runs,
        "",
        f"{counted(len(answer.runs), 'run')} in {store}" + (f": {listed}" if listed else ""),
    ]


def _telling(groups: Iterable[list[dict[str, Cell]]]) -> list[str]:
    """Return the settings in which runs differ that look alike."""
    several = [group for group in groups if len(group) > 1]
    names = list(several[0][0]) if several else []
    return [
        name
        for name in names[: names.index("tag") if names else 0]
        if name not in _NOT_TELLING
        and any(len({row[name] for row in group}) > 1 for group in several)
    ]


def sweep_page(answer: Swept, store: str) -> list[Part]:
    """A guess from the cores is kept with the runs, but is not worth three columns here."""
    predicted: list[Column] = [
        *named("predicted step time=predicted.step_s:seconds"),
        ("off by", _off),
        *named("predicted memory=predicted.peak_bytes:bytes"),
    ]
    runs = table(
        answer.runs,
        ("combination", _combination),
        *named("outcome", *_FIGURES, "TFLOP/s/GPU=tflops_gpu:.4g", "memory=peak_bytes:bytes"),
        *([] if answer.is_guess else predicted),
        ("why", lambda run: run.reason[:70]),
    )
    counts = ", ".join(f"{count} {outcome}" for outcome, count in answer.counts.items() if count)
    ended = f"{sum(answer.counts.values())} of {answer.total} runs recorded: {counts}"
    return [runs, "", f"{ended}; store {store}"]


def _combination(run: SweptRun) -> str:
    is_auto = run.combination.get("micro_batch") == "auto" and run.micro_batch
    chosen = f" (micro_batch={run.micro_batch})" if is_auto else ""
    return varied_text(run.combination.items()) + chosen


def _off(run: SweptRun) -> str:
    predicted, measured = run.predicted.step_s, run.step_s
    return f"{100 * (predicted / measured - 1):+.0f}%" if predicted and measured else "-"


def sweep_plan_page(answer: SweepPlan, *, unstarted: bool) -> list[Part]:
    parts: list[Part] = []
    if answer.illegal:
        columns = (
            ("illegal", lambda run: varied_text(run.combination.items())),
            *named("why=reason"),
        )
        parts += [table(answer.illegal, *columns), ""]
    if answer.planned:
        parts += [_planned(answer.planned), ""]
    stored = sum(run.runs_left == 0 for run in answer.planned)
    better = "; 'fourfold calibrate' gives a better estimate" if answer.is_guess else ""
    parts += [
        f"{answer.total} combinations: {len(answer.illegal)} illegal, {len(answer.planned)} legal, "
        f"{stored} of them already stored; {answer.dropped} excluded by conditions",
        f"to run: {answer.to_run}, about {show_seconds(answer.predicted_s)} "
        f"({answer.predicted_s / 3600:.2f} h) by {answer.basis}{better}",
    ]
    return [*parts, *(["nothing was run; add --run to start"] if unstarted else [])]


def _planned(runs: Sequence[PlannedRun]) -> Grid:
    fits = {True: "", None: "", False: ", does not fit"}
    shown = {*PlannedRun.__slots__, "layout", *AXES, *EXPERT_AXES}

    def others(run: PlannedRun) -> str:
        """What the sweep varies beside the columns; an MPT sweep varies two of a batch at once."""
        varied = flattened(run.combination)
        return varied_text((k, v) for k, v in varied.items() if shown.isdisjoint(k.split(".")))

    settings = [("settings", others)] if any(map(others, runs)) else []
    return table(
        runs,
        *named(*_RUN, "recompute", "left=runs_left", "step time=step_s:seconds"),
        (
            "80% interval",
            lambda run: f"{show_seconds(run.step_s_low)} to {show_seconds(run.step_s_high)}",
        ),
        ("memory", lambda run: show_bytes(run.peak_bytes) + fits[run.fits]),
        *named("run=run_s:seconds"),
        *settings,
    )


def training_page(answer: TrainingState) -> list[Part]:
    lines = [
        ["outcome", answer.outcome, answer.note or ""],
        ["steps", f"{answer.steps_done:,}", f"of {answer.steps:,}"],
    ]
    if answer.curve is not None:
        lines += _curve_rows(answer.curve, answer.unigram_nats, answer.convention)
    lines.append(["checkpoint", answer.checkpoint or "none", ""])
    return [quantities(lines), "", f"saved in {answer.folder}"]


def _curve_rows(curve: CurveSummary, unigram_nats: float | None, rule: str) -> list[list[str]]:
    count = curve.recent_steps
    recent = f"of the last {count:,} steps" if count > 1 else "of the last step"
    mean, median = ("mean ", "median ") if count > 1 else ("", "")
    lines = [
        ["first loss", f"{curve.first_loss:.4f}", ""],
        ["recent loss", f"{curve.recent_loss:.4f}", f"{mean}{recent}"],
        ["best loss", f"{curve.best_loss:.4f}", f"step {curve.best_step:,}"],
        ["tokens", f"{curve.tokens:,}", f"{curve.sequences:,} sequences"],
        ["step time", show_seconds(curve.step_s), f"{median}{recent}"],
        ["tokens/s", f"{curve.tokens_s:,.0f}", ""],
    ]
    if unigram_nats is not None:
        gap = curve.recent_loss - unigram_nats
        side = "above" if gap > 0 else "below"
        note = f"entropy of single tokens; the recent loss is {abs(gap):.4f} {side} it"
        lines.insert(2, ["unigram", f"{unigram_nats:.4f}", note])
    if curve.mfu_pct is not None:
        lines.append(["MFU", f"{curve.mfu_pct:.2f} %", f"by {rule}"])
    return lines


def demo_page(answer: Demo) -> list[Part]:
    chosen, batch = answer.scene, answer.scene.batch
    runs = table(
        answer.runs,
        *named("layout", "sharding", "micro=micro_batch", "predicted s=predicted_s:.3f"),
        ("80% interval", lambda row: f"{row.predicted_s_low:.2f}-{row.predicted_s_high:.2f}"),
        ("measured s", lambda row: f"{row.measured_s:.3f}" if row.measured_s else row.outcome),
        (
            "error %",
            lambda row: or_dash(
                row.measured_s, lambda s: f"{100 * (row.predicted_s / s - 1):+.0f}"
            ),
        ),
        ("tokens/s", lambda row: or_dash(row.measured_s, lambda s: f"{batch.tokens / s:,.0f}")),
        ("predicted GiB", lambda row: f"{row.predicted_peak_bytes / GIB:.2f}"),
        ("measured GiB", lambda row: or_dash(row.measured_peak_bytes, lambda b: f"{b / GIB:.2f}")),
        *named("loss:.3f"),
    )
    return [
        runs,
        "",
        f"{chosen.model}, {counted(batch.global_batch, 'sequence')} of {batch.seq_len} tokens, "
        f"{chosen.policy.precision_name}; {counted(chosen.ranks, 'rank')}"
        f" on {answer.device}",
        "predicted from kernels and links measured a minute ago, before any step was run; "
        "'fourfold fit' learns from runs",
        *_judged(answer.runs),
    ]


def _judged(runs: tuple[DemoRun, ...]) -> list[str]:
    """How the prediction did, and what to doubt about the measurement, as `bench` says it."""
    timed = [run for run in runs if run.measured_s]
    if not timed:
        return []
    inside = [run for run in timed if run.inside_interval]
    lines = [f"{len(inside)} of {len(timed)} measured inside their 80% interval"]
    if len(inside) < len(timed):
        ratio = median((run.measured_s or 0.0) / run.predicted_s for run in timed)
        lines[0] += (
            f"; they took {ratio:.2g} times the prediction, which assumes an otherwise idle machine"
        )
    best = min(timed, key=lambda run: run.measured_s or 0.0)
    place = timed.index(best) + 1
    lines.append(f"fastest measured: {best.layout}, predicted as number {place} of these")
    return lines + [f"suspicious {run.layout}: {flag}" for run in timed for flag in run.flags or ()]


def diff_page(answer: Differences) -> list[Part]:
    rows = [["setting", name, _text(a), _text(b)] for name, a, b in answer.settings]
    rows += [["environment", name, _text(a), _text(b)] for name, a, b in answer.environment]
    rows += [["result", name, _shown(name, a), _shown(name, b)] for name, a, b in answer.result]
    headings = ["what", "name", f"A ({answer.names[0]})", f"B ({answer.names[1]})"]
    verdict = answer.verdict
    ratio = f"B takes {verdict.ratio:.4f} x A's time; " if verdict.ratio else ""
    parts: list[Part] = [Grid(headings, rows), "", f"{verdict.verdict}: {ratio}{verdict.why}"]
    for name, oom in answer.post_mortem.items():
        blank, moment, *tables = oom_page(oom)
        parts += [blank, f"{name.upper()} {moment}", *tables]
    return parts


def _text(value: Any) -> str:
    return "-" if value is None else str(value)[:60]


def _shown(name: str, value: Any) -> str:
    if value is None or value == "":
        return "-"
    if name.startswith("link_"):
        return f"{value / 1e9:,.2f} GB/s"
    if name.endswith(("_s", "_low", "_high")):
        return show_seconds(value)
    if name.endswith("_bytes"):
        return show_bytes(value)
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def verified_page(answer: Verified) -> list[Part]:
    layouts = answer.layouts
    # All that failed; of what passed, the worst few say enough.
    shown = [layout for layout in layouts if not layout.passed]
    passed = (layout for layout in layouts if layout.passed)
    shown += sorted(passed, key=lambda layout: -(layout.grad_rel or 0.0))[:12]
    checked = table(
        shown,
        *named("family", "layout", "policy", "loss=loss_diff:.1e", "norm=norm_rel:.1e"),
        *named("grad=grad_rel:.1e", "param=param_rel:.1e"),
        ("result", lambda row: "pass" if row.passed else "error" if row.error else "FAIL"),
    )
    hidden = len(layouts) - len(shown)
    more = [f"{hidden} more passed (--format json has all)"] if hidden > 0 else []
    errors = [
        f"{row.family} {row.layout} {row.policy}: {row.error}" for row in layouts if row.error
    ]
    names = Counter(f"{row.family}: {'; '.join(row.signature)}" for row in layouts if row.signature)
    counts = [name if count == 1 else f"{name} ({count} layouts)" for name, count in names.items()]
    return [checked, "", *more, *errors, *counts, *_routing(answer), _verification(answer)]


def _routing(answer: Verified) -> list[str]:
    """Return lines on the tokens of models with experts, in all layouts together."""
    routed = [layout.routing for layout in answer.layouts if layout.routing]
    if not routed:
        return []
    seeds = {routing.seed for routing in routed}
    redrawn = ", ".join(map(str, sorted(seeds - {min(seeds)})))
    wrong = max(routing.wrong for routing in routed)
    idle = max(routing.idle for routing in routed)
    idle_on_a_rank = max(routing.idle_on_a_rank for routing in routed)
    dropped = max(routing.dropped for routing in routed)
    closest = min(routing.margin for routing in routed)
    return [
        f"experts: {wrong or 'no'} choices differ, smallest margin {closest:.1e} of a score"
        + (f" (redrawn with seed {redrawn})" if redrawn else ""),
        f"in three steps up to {idle} experts without tokens, {idle_on_a_rank} "
        f"without tokens of some rank, {dropped} choices dropped",
    ]


def _verification(answer: Verified) -> str:
    families = Counter(layout.family for layout in answer.layouts)
    by_family = ", ".join(f"{family} {count}" for family, count in families.items())
    refused = ", ".join(f"{reason} {count}" for reason, count in answer.refused.items())
    fault = f", fault {answer.fault} planted" if answer.fault else ""
    if answer.fault and answer.passed == answer.total:
        fault += ", which has no effect in these layouts (docs/engine.md says where it has)"
    micro = f"\nmicro batches, in sequences: {answer.micro_batches}" if answer.micro_batches else ""
    limits = ", ".join(f"{what} {limit:g}" for what, limit in answer.limits.items())
    fault = f", Muon iterates in {answer.iteration}{fault}" if answer.iteration else fault
    device = answer.device + (" (shared, over gloo)" if answer.share_gpu else "")
    return (
        f"{answer.passed} of {counted(answer.total, 'layout')} equal one process ({by_family}); "
        f"rejected: {refused or 'none'}\n{counted(answer.world, 'rank')}, {device}, "
        f"{answer.precision}{fault}; limits: {limits}{micro}"
    )
