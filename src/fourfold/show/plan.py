"""How does a plan read? The planner's plain data as a table with what makes it believable."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import wrap
from typing import Any

from fourfold.show.plan_table import GIB, layout_text, plan_records, plan_table, short_s
from fourfold.show.table import render


def plan_text(
    answer: dict[str, Any], style: str, *, details: bool = False, columns: int = 0
) -> str:
    """The ranking; text and Markdown also say how sure it is and what was looked at. Sentences are
    folded at `columns` (0: not at all); rows of the table never are."""
    if style == "csv":
        return render(*plan_records(answer), style) if answer["ranked"] else ""
    table = render(*plan_table(answer["ranked"], details=details), style)
    shown = ["", table] if answer["ranked"] else []
    folded = [_folded(part, columns) for part in (_head, _belief, _search)]
    head, belief, search = (fold(answer) for fold in folded)
    if details:
        search.append("seconds of parts are what is not hidden; pp s = pipeline bubble and sends")
    return "\n".join([*head, *shown, "", *belief, "", *search])


def _folded(part: Callable[[dict[str, Any]], list[str]], columns: int) -> Callable[..., list[str]]:
    def fold(answer: dict[str, Any]) -> list[str]:
        lines = part(answer)
        if columns < 40:
            return lines
        return [
            text
            for line in lines
            for text in wrap(line, columns, subsequent_indent="  ", break_on_hyphens=False) or [""]
        ]

    return fold


def stacks_text(rows: list[dict[str, Any]], style: str) -> str:
    """Names that --stack takes."""
    cells = []
    for row in rows:
        where = ", ".join(f"{name} ({count})" for name, count in row["measured"].items())
        stands_for = row["stands_for"] if row["stands_for"] != row["stack"] else "itself"
        cells.append([row["stack"], stands_for, row["rules"], where or "-"])
    return render(["stack", "stands for", "limits of", "measured on (rows)"], cells, style)


def _head(answer: dict[str, Any]) -> list[str]:
    hosts = -(-answer["gpus"] // answer["host_gpus"])
    cal = answer["calibration"]
    stack = "a typical engine" if answer["stack"] == "generic" else answer["stack"]
    lines = [
        f"{answer['model']} ({answer['params'] / 1e9:.1f}B) on {answer['cluster']}: "
        f"{answer['gpus']} x {answer['gpu']} ({hosts} host{'s' * (hosts > 1)}), "
        f"{answer['global_batch']} sequences of {answer['seq_len']} tokens a step, "
        f"{answer['precision']}"
    ]
    if cal["note"]:
        lines.append(
            f"seconds as {stack} would take them; {cal['note']}, so the 80% interval is "
            f"{cal['interval_low_pct']:+.0f}% to {cal['interval_high_pct']:+.0f}%"
        )
    else:
        held_out = "too few to hold any out for an error"
        if cal["error_median_pct"] is not None:
            held_out = (
                f"error on held-out layouts {cal['error_median_pct']:.1f}% median, "
                f"{cal['error_p90_pct']:.1f}% in 9 of 10"
            )
        lines.append(
            f"seconds as {stack} takes them there: calibration '{cal['name']}' from "
            f"{cal['rows']} measured rows, {held_out}"
        )
    if answer["remarks"]:
        lines.append(f"approximated: {'; '.join(answer['remarks'])}")
    return lines


def _belief(answer: dict[str, Any]) -> list[str]:
    rows = answer["ranked"]
    if not rows:
        return [f"nothing to rank: {answer['reason']}"]
    tied, width = answer["tied_with_first"], answer["tie_width_pct"]
    if tied > 1:
        first = f"1-{tied} can't be told apart: differences under {width:.1f}% are within the error"
    elif len(rows) > 1:
        first = f"1 is ahead by more than the {width:.1f}% that can be told apart"
    else:
        first = "it is the only one"
    lines = [first]
    safe = next((row for row in rows if not row["tight"]), None)
    if rows[0]["tight"]:
        lines.append(
            f"1 may not fit; the fastest here that surely does: {safe['rank']} "
            f"({layout_text(safe)}, {short_s(safe['step_s'])} s)"
            if safe is not None
            else "none of these surely fits; "
            f"--where 'mem_gib < {_sure_gib(answer):.0f}' finds some"
        )
    whose = " (rows of other stacks and clusters)" if answer["calibration"]["note"] else ""
    lines.append(f"evidence for 1{whose}: {_evidence(rows[0])}")
    if not answer["flips"] and len(rows) > 1:
        lines.append(
            "would flip: nothing that is still open in the calibration, one knob at a time"
        )
    for flip in answer["flips"]:
        lines.append(
            f"would flip: {flip['about']} ({flip['knob']}) at {flip['other']:.3g} instead of "
            f"{flip['value']:.3g}: then {flip['winner']} ({flip['layout']}) leads by "
            f"{100 * (flip['gain'] - 1):.0f}%"
        )
    if answer["deciding"]:
        named = "; ".join(f"{layout_text(r)} micro {r['micro_batch']}" for r in answer["deciding"])
        lines.append(f"runs that would decide: {named}")
    near = answer["near_miss"]
    if near is not None:
        lines.append(
            f"faster, but over the memory by our best estimate: {near['layout']} micro "
            f"{near['micro_batch']} {near['sharding']} recompute {near['recompute']}, "
            f"{short_s(near['step_s'])} s, about {near['peak_bytes'] / GIB:.1f} GiB of "
            f"{answer['memory_bytes'] / GIB:.0f}; it may fit all the same"
        )
    new = answer["unproven_best"]
    if new is not None:
        lines.append(
            f"set aside: {answer['set_aside']:,} that use what was never measured there; the "
            f"fastest, {new['layout']} micro {new['micro_batch']} {new['sharding']} recompute "
            f"{new['recompute']}, would take {short_s(new['step_s'])} s "
            f"(no rows: {', '.join(new['without_rows'])}); --explore ranks them"
        )
    return lines


def _sure_gib(answer: dict[str, Any]) -> float:
    """GiB below which the upper end of the memory interval would fit."""
    row = answer["ranked"][0]
    return 0.98 * answer["memory_bytes"] * row["peak_bytes"] / row["peak_bytes_high"] / GIB


def _evidence(row: dict[str, Any]) -> str:
    rows = [f"{name}: {count} measured rows" for name, count in row["evidence"].items()]
    rows = [text.replace(": 1 measured rows", ": 1 measured row") for text in rows]
    rows += [f"{text}: none" for text in row["outside"]]
    return "; ".join(rows) or "the calibration file does not say"


def _search(answer: dict[str, Any]) -> list[str]:
    axes = "; ".join(f"{name} {_values(values)}" for name, values in answer["axes"].items())
    refused = ", ".join(f"{name} {count:,}" for name, count in answer["refused"].items())
    unfit = answer["legal"] - answer["fitting"]
    lines = [
        f"looked at {answer['candidates']:,} points: {axes}",
        f"refused: {refused or 'none'}; legal {answer['legal']:,}, of which {unfit:,} do not fit",
        f"ranked {answer['ranked_in_all']:,}; pipelines of the best {answer['played']} were played "
        "event by event",
    ]
    others = [one for one in answer.get("tried_gpus", []) if one["gpus"] != answer["gpus"]]
    if others:
        named = ", ".join(f"{one['gpus']}: {short_s(one['step_s'])} s" for one in others[:6])
        lines.append(f"fewer GPUs, best of each: {named}{', ...' if len(others) > 6 else ''}")
    if answer["dropped_by_where"]:
        lines.append(f"--where dropped {answer['dropped_by_where']:,}")
    lines.append(
        f"TFLOP/s count {answer['flop_rule']}; 80% intervals hold 8 of 10 measured runs; "
        "tight = may not fit"
    )
    return lines


def _values(values: list[Any]) -> str:
    if len(values) > 4 and all(isinstance(value, int) for value in values):
        return f"{len(values)} values {values[0]}-{values[-1]}"
    return "/".join(str(value) for value in values)


def explain_text(said: dict[str, Any], style: str) -> str:
    """One layout in words and two small tables."""
    if not said["legal"]:
        lines = [f"{said['layout']} is illegal:"]
        lines += [
            f"  [{one['reason']}] {one['field']}={one['value']}: {one['rule']}; {one['hint']}"
            for one in said["refusals"]
        ]
        near = "; ".join(said["nearest"]) or "none with these GPUs and this batch"
        return "\n".join([*lines, f"nearest legal: {near}"])
    if not said["fits"]:
        small = said["smallest"]
        kinds = ", ".join(f"{n} {b / GIB:.1f}" for n, b in small["memory_bytes"].items())
        return "\n".join(
            [
                f"{said['layout']} is legal but does not fit: at micro batch "
                f"{small['micro_batch']}, {small['sharding']}, recompute {small['recompute']} its "
                f"fullest rank needs {small['peak_bytes'] / GIB:.1f} GiB of "
                f"{small['limit_bytes'] / GIB:.1f}",
                f"GiB by kind: {kinds}",
                f"nearest that fit: {'; '.join(said['nearest']) or 'none'}",
            ]
        )
    return "\n".join(_explained(said, style))


def _explained(said: dict[str, Any], style: str) -> list[str]:
    row, best = said["row"], said["best"] or said["row"]
    kinds = [*row["parts_s"]]
    parts = [
        [name, short_s(row["parts_s"][name]), short_s(best["parts_s"][name]),
         f"{row['parts_s'][name] - best['parts_s'][name]:+.2f}"]
        for name in kinds
        if max(row["parts_s"][name], best["parts_s"][name]) > 0.0005 * row["step_s"]
    ]  # fmt: skip
    memory = [[name, f"{size / GIB:.2f}"] for name, size in row["memory_bytes"].items()]
    return [
        f"{layout_text(row)}, micro batch {row['micro_batch']}, {row['policy']['sharding']}, "
        f"recompute {row['policy']['recompute']}: the best of {said['ways']:,} ways to run it",
        f"{short_s(row['step_s'])} s a step (80%: {short_s(row['step_s_low'])} to "
        f"{short_s(row['step_s_high'])}), place {said['rank']:,} of {said['of']:,} layouts"
        + (" (never measured ones included)" if said["with_unproven"] else "")
        + "; "
        f"{row['tflops_gpu']:.0f} TFLOP/s/GPU; {100 * (row['step_s'] / best['step_s'] - 1):+.1f}% "
        f"against the best, {layout_text(best)} micro {best['micro_batch']} "
        f"(under {said['tie_width_pct']:.1f}% can't be told apart)",
        "",
        render(["part", "s", "best s", "difference"], parts, style),
        "",
        f"fullest rank {row['peak_bytes'] / GIB:.1f} GiB (80%: {row['peak_bytes_low'] / GIB:.0f} "
        f"to {row['peak_bytes_high'] / GIB:.0f} of {said['memory_bytes'] / GIB:.0f}):",
        render(["kind", "GiB"], memory, style),
        "",
        "its best variants:",
        render(*plan_table(said["variants"]), style),
        "",
        f"evidence: {_evidence(row)}",
    ]
