"""Lint rules on values in the wrong place: exchanged columns, repeated rows, copied cells."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from fourfold.result.record import MODEL_FIELDS, Record, grouped
from fourfold.spec.layout import MODEL_AXES
from fourfold.tables import cells
from fourfold.tables.records import Finding, Problem, RowRule, TablesFile, finding
from fourfold.tables.shape import agree, hardware_ratio, row_work, shape_of

# Equal values that chance alone would give a table; above this, equality says little.
_MOST_BY_CHANCE = 0.5
_NEAR = 20
# Equal values, and nearly equal ones, that a row is compared with: its nearest. All would make the
# work grow with the square of a table of equal rows.
_MOST_COMPARED = 50
# Without a twin row, exchanged columns are seen only when the columns' ranges lie this far apart.
_APART = 1.15
_LAYOUT = (*MODEL_AXES, "micro_batch")
# Whether equal values of two rows would be a copy.
Related = Callable[[Record, Record], bool]


def swapped_values(file: TablesFile) -> Iterator[Finding]:
    for number in range(len(file.tables)):
        rows = [record for record in file.rows_of(number) if row_work(record) is not None]
        if rows and rows[0].style == "topology":
            yield from _swapped_by_range(rows)
    yield from _swapped_by_twin(file)


def swapped_utilisation(record: Record, mfu: float, hfu: float) -> Iterator[Problem]:
    shape = shape_of(record)
    ratio = hardware_ratio(shape, record) if shape else None
    if ratio and hfu < mfu and agree(mfu, hfu * ratio, 0.005):
        yield f"MFU {mfu:g}, HFU {hfu:g}", f"HFU = {ratio:.3g} x MFU", "exchange MFU and HFU"


def _exchanged(record: Record, why: str) -> Problem:
    seconds, tflops = record.text("step_s"), record.text("tflops_gpu")
    right = f"{tflops} s, {seconds} TFLOPs {why}"
    return f"{seconds} s, {tflops} TFLOPs", right, "exchange Sec/it and TFLOPs"


def _swapped(record: Record, why: str) -> Finding:
    return finding(record, "swapped-values", *_exchanged(record, why))


def _swapped_by_twin(file: TablesFile) -> Iterator[Finding]:
    """Seconds x TFLOPs does not change when the two are exchanged, so arithmetic cannot see it: a
    row elsewhere in the file with the same two numbers the other way round can."""
    rows = [record for record in file.records if row_work(record) is not None]
    seen: dict[tuple[object, float, float], list[Record]] = defaultdict(list)
    sums: dict[tuple[object, ...], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for record in rows:
        seen[_model(record), record.step_s or 0, record.tflops_gpu or 0].append(record)
        for key in _sum_keys(record):
            for at, value in enumerate((1, record.step_s or 0.0, record.tflops_gpu or 0.0)):
                sums[key][at] += value
    for record in rows:
        model, seconds, tflops = _model(record), record.step_s or 0, record.tflops_gpu or 0
        twins = seen.get((model, tflops, seconds), [])
        if not twins or record.step_s == record.tflops_gpu:
            continue
        # Which of the two is wrong: the one whose seconds fit worse to the other rows of the model.
        whole, pair = (sums[key] for key in _sum_keys(record))
        others = [all_rows - alike for all_rows, alike in zip(whole, pair, strict=True)]
        if _misfit(record, others) > _misfit(twins[0], others) or (
            not others[0] and len(twins) >= len(seen[model, seconds, tflops])
            and record.line > twins[0].line
        ):  # fmt: skip
            yield _swapped(record, f"as in line {twins[0].line}")


def _model(record: Record) -> tuple[object, ...]:
    """The same run: a twin under other axes would only be a coincidence."""
    axes = (record.dp, record.tp, record.cp, record.pp, record.micro_batch)
    return (record.label, record.gpus, record.global_batch, *axes)


def _sum_keys(record: Record) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Rows of the same model on as many GPUs, and those of them with the same two numbers."""
    pair = frozenset((record.step_s, record.tflops_gpu))
    return (record.label, record.gpus), (record.label, record.gpus, pair)


def _misfit(record: Record, others: list[float]) -> float:
    """How far seconds and TFLOPs lie from the means of `others` (count and both sums), as a
    ratio."""
    count, seconds, tflops = others
    if not count or not seconds > 0 or not tflops > 0:
        return 0.0
    ratio = (record.step_s or 1) / seconds * tflops / (record.tflops_gpu or 1)
    return max(ratio, 1 / ratio)


def _swapped_by_range(rows: list[Record]) -> Iterator[Finding]:
    """Where all seconds exceed all TFLOPs (or the reverse), one row the other way round."""
    if len(rows) < 4:
        return
    columns = ([row.step_s or 0.0 for row in rows], [row.tflops_gpu or 0.0 for row in rows])
    # Without one row the least is the second least where that row has the least.
    ends = [(sorted(column)[:2], sorted(column)[-2:]) for column in columns]
    for record, *values in zip(rows, *columns, strict=True):
        for high, low in ((0, 1), (1, 0)):
            (least, second_least), (second_most, most) = ends[high][0], ends[low][1]
            low_end = second_least if values[high] == least else least
            high_end = second_most if values[low] == most else most
            apart = low_end > _APART * high_end
            if apart and values[high] < high_end * 1.1 and values[low] > low_end / 1.1:
                yield _swapped(record, "like the other rows")


def swapped_reference(
    record: Record, step_s: float, tflops: float, speed: float, gpus: int, batch: int, seq_len: int
) -> Iterator[Problem]:
    """tokens/s/GPU ties seconds to the batch, so here arithmetic does see it."""
    right = batch * seq_len / gpus / speed
    wrong = abs(step_s / right - 1) > 0.01
    if record.outcome == "ok" and wrong and abs(tflops / right - 1) < 0.001:
        yield _exchanged(record, "by tokens_s_gpu")


def duplicate_row(file: TablesFile) -> Iterator[Finding]:
    """The same row twice in one table. Across tables rows repeat on purpose, as a baseline."""
    for number, (table, _) in enumerate(file.tables):
        seen: dict[tuple[object, ...], int] = {}
        # Rows of '-' repeat without meaning anything.
        measured = {rec.line: rec for rec in file.rows_of(number) if rec.outcome == "ok"}
        for row in table.data:
            record = measured.get(row.line)
            if record is None or not any(row.cells):
                continue
            key = tuple(row.cells)
            if record.style == "reference":
                named = record.cells.items()
                key = tuple(text for name, text in named if name not in ("run_id", "note"))
            if key in seen:
                yield finding(
                    replace(record, column=""), "duplicate-row", " | ".join(row.cells)[:120],
                    "every row once", f"remove it, or correct it: same as line {seen[key]}",
                )  # fmt: skip
            seen.setdefault(key, row.line)


def copied_cell(file: TablesFile) -> Iterator[Finding]:
    for number in range(len(file.tables)):
        rows = [record for record in file.rows_of(number) if record.outcome == "ok"]
        for name, digits, related in _COPIED[rows[0].style] if rows else ():
            # Of a timed row of the notes TFLOPs follow from the seconds.
            timed = name == "tflops_gpu" and rows[0].style == "topology"
            asked = [record for record in rows if record.step_s is None] if timed else rows
            yield from _copies(asked, name, digits, related)


def _copies(rows: list[Record], name: str, digits: int, related: Related) -> Iterator[Finding]:
    # Trailing zeros are often dropped ('182.6'): the table's longest cell tells its precision.
    shown = "model_tflop" if name == "tflops_gpu" and rows and rows[0].style == "mpt" else name
    places = max((cells.decimals(record.text(shown)) for record in rows), default=0)
    counted = [
        record
        for record in rows
        if (value := getattr(record, name)) and _digits(record, value, shown, places) >= digits
    ]
    is_copy = _beyond_chance(counted, name, related, 10.0**-places)
    for same in grouped(counted, (name,)).values():
        for place, second in enumerate(same):
            for first in same[max(0, place - _MOST_COMPARED) : place]:
                if not is_copy(first, second):
                    continue
                yield finding(
                    second, "copied-cell", second.text(shown),
                    f"a value of its own; {first.place} has the same {name}",
                    "measure or look up both again",
                )  # fmt: skip
                break


def _beyond_chance(rows: list[Record], name: str, related: Related, unit: float) -> Related:
    """Which equal pairs are copies. In a table of hundreds of cells some agree by chance; there
    only neighbours count, since a slip of the hand lands next to its source."""

    def neighbours(one: Record, other: Record) -> bool:
        return abs(one.row - other.row) <= 1 and related(one, other)

    for is_copy in (related, neighbours):
        if _expected(rows, name, is_copy, unit) <= _MOST_BY_CHANCE:
            return is_copy
    return lambda one, other: False


def _expected(rows: list[Record], name: str, is_copy: Related, unit: float) -> float:
    """Equal pairs that chance would give, from pairs that differ by a few last digits: each of the
    distances 1 to _NEAR holds twice as many pairs as the distance 0."""
    ordered = sorted(rows, key=lambda record: getattr(record, name))
    values = [getattr(record, name) for record in ordered]
    near = 0
    for i, value in enumerate(values):
        j = bisect_right(values, value + 0.5 * unit, lo=i + 1)
        for other in range(j, min(j + _MOST_COMPARED, len(values))):
            if values[other] - value > (_NEAR + 0.5) * unit:
                break
            near += is_copy(ordered[i], ordered[other])
        if near > 2 * _NEAR * _MOST_BY_CHANCE:  # more would not change the answer
            break
    return near / (2 * _NEAR)


def _digits(record: Record, value: float, shown: str, places: int) -> int:
    """Significant digits of a value. A file of the reference schema mixes sources, so there each
    cell speaks for itself, and seconds worked out from coarse tokens/s are as coarse."""
    if record.style != "reference":
        return len(f"{value:.{places}f}".replace(".", "").lstrip("0"))
    texts = [record.text(shown)]
    if shown == "step_s":
        texts.append(record.text("tokens_s_gpu") or texts[0])
    return min(len(text.replace(".", "").lstrip("0")) for text in texts)


def _same_row_or_column(one: Record, other: Record) -> bool:
    """Not two lines of one layout in one column: that is a cell listed again."""
    return _alike(one, other, _LAYOUT) != (one.gpus == other.gpus)


def _other_config(one: Record, other: Record) -> bool:
    return one.config != other.config


def _alike(one: Record, other: Record, names: Sequence[str]) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _one_thing_differs(one: Record, other: Record) -> bool:
    """Same model and stack, and the same layout on other GPUs or another layout on as many."""
    if not _alike(one, other, ("stack", *MODEL_FIELDS)) or one.config == other.config:
        return False
    layout = (*_LAYOUT, "virtual_stages", "sharding")
    return _alike(one, other, layout) or one.gpus == other.gpus


# By style: the field, fewer digits agree by chance, and which rows are compared.
_COPIED: dict[str, tuple[tuple[str, int, Related], ...]] = {
    "scaling": (("tflops_gpu", 4, _same_row_or_column),),
    "topology": (("step_s", 4, _other_config), ("tflops_gpu", 4, _other_config)),
    "reference": (("step_s", 5, _one_thing_differs), ("tflops_gpu", 5, _one_thing_differs)),
    "mpt": (("tflops_gpu", 5, _other_config),),
}
ROW_RULES: tuple[RowRule, ...] = (
    ("swapped-values", "mpt", "mfu_pct hfu_pct", swapped_utilisation),
    ("swapped-values", "reference", "step_s tflops_gpu tokens_s_gpu gpus global_batch seq_len",
     swapped_reference),
)  # fmt: skip
CHECKS = (swapped_values, duplicate_row, copied_cell)
