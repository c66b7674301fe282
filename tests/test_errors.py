"""Do errors read as sentences, with the subject that their reader knows: flag, path or field?"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from fourfold.errors import UserError
from tests.sources import nodes_of


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (UserError("must be above 0", field="gpus", value=0), "gpus=0 must be above 0"),
        (UserError("is too short", field="model", value="x"), "model x is too short"),
        (UserError("is too long", field="--where", value="a b"), "--where 'a b' is too long"),
        (UserError("must be above 0", field="batch.seq_len", value=0).inside("run.toml"),
         "batch.seq_len = 0 in run.toml must be above 0"),
        (UserError("is missing", field="links").inside("c.toml"), "links in c.toml is missing"),
        (UserError("is not TOML").inside("c.toml"), "c.toml is not TOML"),
        (UserError("unknown GPU", field="gpu", value="h10", hint="did you mean h100?"),
         "unknown GPU 'h10'; did you mean h100?"),
        (UserError("unknown field", field="heds").within("model"), "unknown field model.heds"),
        (UserError("is not a number", value="8x"), "'8x' is not a number"),
        (UserError("must be above 0", field="lr", value=0.0).within("train").named("--lr"),
         "--lr 0.0 must be above 0"),
        (UserError("nothing fits"), "nothing fits"),
    ],
)  # fmt: skip
def test_an_error_is_a_sentence(error: UserError, text: str) -> None:
    assert str(error) == text


SOURCE = Path(__file__).parent.parent / "src" / "fourfold"
# How a rule goes on after its subject.
VERBS = {
    "must", "is", "are", "was", "has", "have", "needs", "does", "cannot", "could", "contain",
    "contains", "contradicts", "exceeds", "matches", "makes", "gives", "ends", "lists", "says",
    "names", "lacks", "leaves", "uses", "takes", "changes", "counts", "shows", "already", "times",
    "found", "of", "certainly", "unknown",
    "its",  # of a checkpoint, whose reader puts "is damaged" before it
}  # fmt: skip


def _rules() -> Iterator[tuple[str, str]]:
    """(place, text) of every error with a subject whose rule is written out."""
    for path in SOURCE.rglob("*.py"):
        for node in nodes_of(path):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = node.func.id if isinstance(node.func, ast.Name) else ""
            is_check = isinstance(node.func, ast.Attribute) and node.func.attr == "that"
            fields = {keyword.arg for keyword in node.keywords}
            if is_check or (called.endswith("Error") and fields & {"field", "value"}):
                rule = node.args[3 if is_check else 0]
                parts = rule.values if isinstance(rule, ast.JoinedStr) else [rule]
                if isinstance(parts[0], ast.Constant):
                    yield f"{path.relative_to(SOURCE)}:{node.lineno}", str(parts[0].value)


def test_every_rule_continues_its_subject() -> None:
    rules = list(_rules())
    assert len(rules) > 200
    wrong = [f"{place}: {text}" for place, text in rules if text.split()[0] not in VERBS]
    assert not wrong, "\n".join(wrong)
