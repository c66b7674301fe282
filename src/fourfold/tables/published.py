"""How is one figure printed in a published table? Digits, units and words of the three styles."""

from __future__ import annotations

import math

from fourfold.tables.record import Record

# Our precision -> the MPT tables' Precision and MP Mode. `amp` keeps fp32 weights, DEFAULT reduces
# gradients in fp32, PURE in what is computed with.
_PRECISION = {
    "bf16-mixed": ("amp_bf16", "DEFAULT"),
    "bf16-pure": ("bf16", "PURE"),
    "fp8": ("amp_fp8", "DEFAULT"),
}
_SHARDING = {"zero3": "FULL_SHARD", "zero2": "SHARD_GRAD_OP", "zero0": "NO_SHARD"}


def precision_cells(precision: str, mode: str = "") -> tuple[str, str]:
    """(Precision, MP Mode) of a precision, ours or already the tables' word with its own mode."""
    return _PRECISION.get(precision, (precision, mode or "DEFAULT"))


def precision_of(cell: str, mode: str) -> str:
    """Our name for a row's two cells; words that name nothing of ours stay as they are."""
    found = {cells: ours for ours, cells in _PRECISION.items()}
    by_word = {word: ours for ours, (word, _) in _PRECISION.items() if word.startswith("amp_")}
    return found.get((cell, mode), by_word.get(cell, cell))


def figure(value: float | None) -> str:
    """Two decimals as the tables print them, and at least four digits of a small value."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:.2f}"
    digits = max(2, 3 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 12)}f}"


def gigabytes(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}GB" if value >= 10 else f"{figure(value)}GB"


def size(params: int) -> str:
    """'181B', '6.7B', '125M'."""
    for unit, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if params >= scale:
            count = params / scale
            return f"{count:.0f}{unit}" if count >= 10 else f"{count:.1f}{unit}"
    return str(params)


def _cut(value: float | None) -> str:
    """Throughputs are whole numbers, cut off; slow ones would all read 0 and keep decimals."""
    if value is None:
        return "-"
    return str(math.floor(value)) if value >= 10 else figure(math.floor(value * 1e4) / 1e4)


def _percent(value: float | None) -> str:
    return "-" if value is None else figure(value) if value < 1 else f"{value:.2f}"


def mpt_cells(record: Record) -> tuple[str, ...]:
    """The twenty cells of the MPT tables. A failed run says why in place of its MFU."""
    good = record.status == "ok"
    samples = record.tokens_s / record.seq_len if record.tokens_s and record.seq_len else None
    word = {"oom": "OOM", "hang": "hang"}.get(record.status, "fail")
    tflops = record.tflops_gpu
    return (
        record.label.removeprefix("mpt-"),
        str(record.seq_len or ""),
        str(record.gpus or ""),
        (record.hardware or "").replace("-", "_").replace(" ", "_"),
        (record.text("mfu_pct") or _percent(record.mfu_pct)) if good else word,
        (record.text("hfu_pct") or _percent(record.hfu_pct)) if good else "-",
        "-" if tflops is None or not good else _model_tflop(tflops / 100),
        "" if record.micro_batch is None else str(record.micro_batch),
        "" if record.grad_accum is None else str(record.grad_accum),
        "" if record.global_batch is None else str(record.global_batch),
        (record.text("samples_s") or _cut(samples)) if good else "-",
        _cut(record.tokens_s) if good else "-",
        _cut(record.tokens_s_gpu) if good else "-",
        str((record.global_batch or 0) * (record.seq_len or 0)),
        *precision_cells(record.precision, record.text("mp_mode")),
        _strategy(record),
        {"full": "True", "none": "False"}.get(record.recompute, record.recompute),
        record.text("offload") or str(record.offload not in ("", "none")),
        "" if record.params is None else str(record.params),
    )


def _model_tflop(value: float) -> str:
    return f"{value:.6f}" if value >= 0.01 else f"{value:.4g}"


def _strategy(record: Record) -> str:
    """The published word for data parallelism; other axes stand behind it."""
    word = _SHARDING.get(record.sharding, record.sharding)
    axes = [("pp", record.pp), ("cp", record.cp), ("tp", record.tp)]
    return " ".join([word, *(f"{name}{size}" for name, size in axes if size and size > 1)])
