"""Predict step time, memory and fit of every row of a table in the reference schema.

Writes one line per row: row_id,step_s,step_s_low,step_s_high,tokens_s_gpu,tflops_gpu,mfu_pct,
mem_gb,fits,reason. The interval holds 80% of measured runs. A row that cannot be expressed keeps
its line, blank but for the reason. mem_gb is in GiB, of the rank the stack prints (rank 0 for
nanotron, the fullest elsewhere); fits looks at the fullest stage.
"""

from __future__ import annotations

import argparse
import gc
import sys

from fourfold.commands.flags import add_force

EXAMPLES = """\
example:
  fourfold predict rows.csv --out predicted.csv
  fourfold predict rows.csv --out predicted.csv --calibration mine.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rows", metavar="ROWS.csv", help="runs to predict, reference schema")
    parser.add_argument("--out", required=True, metavar="OUT.csv", help="where the answers go")
    parser.add_argument(
        "--calibration", metavar="FILE", help="from 'fourfold fit'; default: the shipped one"
    )
    add_force(parser)


def run(args: argparse.Namespace) -> int:
    from fourfold import files
    from fourfold.cost.fit.calibration import load, shipped
    from fourfold.cost.table.predict import FIELDS, predict
    from fourfold.cost.table.reference import read_table
    from fourfold.cost.table.rows import parse

    files.require_mine(args.out, mark=",".join(FIELDS), force=args.force)
    calibration = load(args.calibration) if args.calibration else shipped()
    gc.disable()  # a large table is millions of texts and no cycles: walking them costs seconds
    table = read_table(args.rows)
    if table.length > 50_000:
        print(f"predicting {table.length} rows", file=sys.stderr)
    rows = parse(table)
    answers = predict(rows, calibration)
    files.write_text(args.out, _csv(table.column("row_id"), answers))
    gc.enable()
    told = int(rows.usable.sum())
    fits, tight = answers.fits[rows.usable], answers.tight[rows.usable]
    print(
        f"{told} of {table.length} rows predicted, {int((fits & ~tight).sum())} fit, "
        f"{int(tight.sum())} may (tight), {int((~fits & ~tight).sum())} do not; "
        f"calibration {calibration.name}; written to {args.out}",
        file=sys.stderr,
    )
    return 0


def _csv(row_ids: list[str], answers) -> str:  # type: ignore[no-untyped-def]
    import itertools

    from fourfold.cost.table.predict import FIELDS
    from fourfold.escape import csv_text

    numeric = (
        answers.step_s, answers.low_s, answers.high_s, answers.tokens_s_gpu, answers.tflops_gpu,
        answers.mfu_pct, answers.mem_gb,
    )  # fmt: skip
    texts = [["" if v != v else f"{v:.6g}" for v in column.tolist()] for column in numeric]
    known = [value == value for value in answers.step_s.tolist()]
    verdicts = [
        [("1" if yes else "0") if told else "" for yes, told in zip(column, known, strict=True)]
        for column in (answers.fits.tolist(), answers.tight.tolist())
    ]
    rows = zip(row_ids, *texts, *verdicts, answers.reasons, strict=True)
    return csv_text(itertools.chain([FIELDS], rows))
