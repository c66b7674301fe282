"""Twenty questions whose best answer was measured, asked by a scripted client over MCP.

A task is a model, machines and a batch of a published table (tests/golden), with the layouts that
were measured there. The client asks the server's `predict` for each of them and takes the fastest
that is 90% likely to fit. Regret: how much longer a step takes than with the best layout; of a
choice that ran out of memory, that of the slowest one that ran. Beside it two that ask nobody, the
baselines of the exam (exam/baselines.py): the rules of thumb of the engines' guides as numbers,
and a constant MFU, which knows no difference (the mean over what these rules believe to fit). The
shipped calibration was fitted with these tables, so the tool knows them: docs/accuracy.md has
errors on tables that it does not.

    python -m scripts.agent_tasks [--tasks N]
"""

from __future__ import annotations

import argparse
import csv
import functools
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import anyio
from mcp import Client, StdioServerParameters, stdio_client

from exam.baselines import rule_of_thumb as predict_by_rules
from fourfold.cost.table.reference import read_table
from fourfold.search.rows.read import parse

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
SOURCES = ("par4d", "bloom")
TASKS, SURE = 20, 0.9
SAME = ("source", "stack", "cluster", "hardware", "gpus_per_node", "family", "model", "n_layers",
        "d_model", "n_heads", "vocab", "n_gpus", "seq_len", "gbs", "precision")  # fmt: skip
_PRESETS = {"llama-3.1-8b"}
_WORDS = {"bf16": "bf16-mixed", "fused": "fused-softmax"}
Row = dict[str, str]


@dataclass(frozen=True)
class Task:
    rows: tuple[Row, ...]

    @property
    def first(self) -> Row:
        return self.rows[0]

    @property
    def name(self) -> str:
        row = self.first
        return (
            f"{row['model']} on {row['n_gpus']} GPUs of {row['cluster']}, {row['seq_len']} tokens"
        )

    @property
    def measured(self) -> list[float]:
        return [float(row["step_s"]) for row in self.rows if row["step_s"]]

    def regret(self, row: Row) -> float:
        taken = float(row["step_s"]) if row["step_s"] else max(self.measured)
        return taken / min(self.measured) - 1.0


def tasks(count: int = TASKS) -> list[Task]:
    """Those with most layouts to choose from."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for source in SOURCES:
        with open(GOLDEN / f"{source}.csv", newline="") as stream:
            for row in csv.DictReader(stream):
                if row["mbs"] and row["status"] in ("ok", "oom"):
                    groups[tuple(row[name] for name in SAME)].append(row)
    found = [Task(tuple(rows)) for rows in groups.values()]
    found = [one for one in found if len(one.rows) >= 3 and len(one.measured) >= 2]
    return sorted(found, key=lambda one: (-len(one.rows), one.name))[:count]


def run_table(row: Row) -> dict[str, Any]:
    """A row as the tool takes it."""
    preset = row["model"] if row["model"] in _PRESETS else None
    sizes = {"layers": "n_layers", "hidden": "d_model", "ffn": "d_ff", "heads": "n_heads",
             "kv_heads": "n_kv_heads", "vocab": "vocab"}  # fmt: skip
    model: Any = preset or {
        "name": row["model"].lower(), "family": "gpt", "norm": "layernorm", "activation": "gelu",
        "bias": True, "tied": True, "positions": {"kind": "learned", "length": 2048},
        **{name: int(row[column]) for name, column in sizes.items()},
    }  # fmt: skip
    return {
        "model": model,
        "gpus": int(row["n_gpus"]),
        "layout": " ".join(f"{axis}{row[axis]}" for axis in ("pp", "dp", "cp", "tp")),
        "batch": {"seq_len": int(row["seq_len"]), "global_batch": int(row["gbs"]),
                  "micro_batch": int(row["mbs"])},
        "policy": {"precision": _WORDS.get(row["precision"], row["precision"]),
                   "sharding": row["sharding"], "recompute": row["act_ckpt"],
                   "sequence_parallel": row["sequence_parallel"] == "1",
                   "attention": _WORDS.get(row["attention"], row["attention"])},
    }  # fmt: skip


async def asked(client: Client, task: Task) -> Row:
    """The client's choice: the fastest of what is sure to fit, else the surest."""
    row = task.first
    given = {"stack": row["stack"], "cluster": row["cluster"]}
    answer = await client.call_tool("predict", {**given, "runs": [run_table(r) for r in task.rows]})
    if answer.is_error:
        raise RuntimeError(answer.content[0].text)  # type: ignore[union-attr]
    told = answer.structured_content["answer"]["runs"]
    pairs = list(zip(told, task.rows, strict=True))
    sure = [pair for pair in pairs if pair[0]["fit_chance"] >= SURE]
    best = (
        min(sure, key=lambda pair: pair[0]["step_s"])
        if sure
        else max(pairs, key=lambda pair: pair[0]["fit_chance"])
    )
    return best[1]


def constant_mfu(task: Task) -> float:
    """Mean regret over what is believed to fit: to it all of them take as long."""
    fitting = [row for row in task.rows if by_rules()[row["row_id"]].fits] or list(task.rows)
    return statistics.mean(task.regret(row) for row in fitting)


def rule_of_thumb(task: Task) -> Row:
    """The fastest of what is believed to fit."""
    said = by_rules()
    return min(
        task.rows, key=lambda row: (not said[row["row_id"]].fits, said[row["row_id"]].step_s)
    )


class Said(NamedTuple):
    step_s: float
    fits: bool


@functools.cache
def by_rules() -> dict[str, Said]:
    """What the rules of thumb say of every row."""
    found = {}
    for source in SOURCES:
        rows = parse(read_table(GOLDEN / f"{source}.csv"))
        said = predict_by_rules(rows)
        pairs = zip(said.step_s.tolist(), said.fits.tolist(), strict=True)
        found |= dict(zip(rows.table.column("row_id"), map(Said._make, pairs), strict=True))
    return found


async def evaluate(count: int) -> list[tuple[Task, Row, Row]]:
    """(task, choice by the tool, choice by the rule of thumb) of each."""
    with tempfile.TemporaryDirectory() as folder:
        server = StdioServerParameters(
            command=sys.executable, args=["-m", "fourfold", "mcp", "--folder", folder]
        )
        async with Client(stdio_client(server)) as client:
            return [(one, await asked(client, one), rule_of_thumb(one)) for one in tasks(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", type=int, default=TASKS)
    found = anyio.run(evaluate, parser.parse_args().tasks)
    print(f"{'task':58} layouts  tool  const. MFU  rule of thumb")
    lines = []
    for task, tool, rule in found:
        numbers = (task.regret(tool), constant_mfu(task), task.regret(rule))
        failed = ["oom" if not row["step_s"] else "" for row in (tool, rule)]
        lines.append((*numbers, *map(bool, failed)))
        print(f"{task.name:58} {len(task.rows):7} {numbers[0]:5.1%}{failed[0]:4} {numbers[1]:7.1%}"
              f" {numbers[2]:13.1%} {failed[1]}")  # fmt: skip
    means = [statistics.mean(line[at] for line in lines) for at in range(3)]
    oom = [sum(line[at] for line in lines) for at in (3, 4)]
    print(f"{'mean':58} {'':7} {means[0]:5.1%}     {means[1]:7.1%} {means[2]:13.1%}")
    print(f"out of memory: tool {oom[0]}, rule of thumb {oom[1]} of {len(lines)}")


if __name__ == "__main__":
    main()
