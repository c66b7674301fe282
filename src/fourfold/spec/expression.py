"""Conditions of `where`, such as "dp % 4 == 0 and mem_gib < 70": parsed, never eval'ed.

Numbers are 64-bit floats, on plain values and on NumPy columns alike, so both give the same answer.
`and` and `or` look at their right side only where the left one leaves the question open, also row
by row: "dp > 1 and 8 % (dp - 1) == 0" is safe.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fourfold.errors import UserError, nearest
from fourfold.spec.layout import AXES, EXPERT_AXES
from fourfold.units import size_from

NAMES = (
    *AXES,
    *EXPERT_AXES,
    "vp",
    "micro_batch",
    "global_batch",
    "seq_len",
    "gpus",
    "nodes",
    "layers",
    "hidden",
    "heads",
    "mem_gib",
    "mem_gb",
    "step_s",
)
FUNCTIONS = ("log2", "ceil")
MAX_TEXT = 1000
MAX_DEPTH = 40

# A float or a NumPy column of them; a bool or a NumPy column of them.
Number = Any
Truth = Any
Kind = Literal["number", "truth"]

_ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARISONS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
# A number with k or M right behind it: 'seq_len >= 8k'.
_SUFFIXED = re.compile(r"(?<![\w.])[0-9]+(?:\.[0-9]+)?[kKmM](?![\w.])")
# Peak memory of the fullest rank in two units, by name: bytes of one.
MEMORY_UNITS = {"mem_gib": 2.0**30, "mem_gb": 1e9}
_TEACH = "write conditions like 'dp % 4 == 0 and mem_gib < 70'"


@dataclass(frozen=True, slots=True)
class Expression:
    """A checked condition. `names` are the words it reads."""

    text: str
    names: frozenset[str]
    _tree: ast.expr

    def holds(self, values: Mapping[str, Any]) -> Truth:
        """True or False; a column of them if any value it reads is a column."""
        return _truth(self._tree, values, self.text)


def _refused(text: object, rule: str, hint: str = "") -> UserError:
    return UserError(rule, field="where", value=text, hint=hint)


def parse(text: str) -> Expression:
    """Check a condition and keep its tree; a mistake is a UserError that shows the way out."""
    if not isinstance(text, str) or not text.strip():
        raise _refused(text, "must be a condition", _TEACH)
    if len(text) > MAX_TEXT:
        raise _refused(text, f"is longer than {MAX_TEXT} characters")
    typed, text = text, _SUFFIXED.sub(lambda number: str(size_from(number.group())), text)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else "cannot be parsed"
        raise _refused(text, f"is not a condition ({reason})", _TEACH) from None
    names: set[str] = set()
    if _check(tree, text, names, 0) != "truth":
        hint = f"compare it with something: '{text.strip()[:40]} == 0'"
        raise _refused(text, "is a number, not a condition", hint)
    return Expression(typed, frozenset(names), tree)


def _check(node: ast.expr, text: str, names: set[str], depth: int) -> Kind:
    """The kind of a node; collects names, refuses all that is not on the list."""
    if depth > MAX_DEPTH:
        raise _refused(text, f"is nested deeper than {MAX_DEPTH} levels")
    kind, children, wanted = _parts(node, text)
    if isinstance(node, ast.Name):
        names.add(node.id)
    for child in children:
        if _check(child, text, names, depth + 1) != wanted:
            part = ast.get_source_segment(text.strip(), child) or "it"
            what = "is not a condition" if wanted == "truth" else "is not a number"
            raise _refused(text, f"contains '{part}', which {what}", _TEACH)
    return kind


def _parts(node: ast.expr, text: str) -> tuple[Kind, list[ast.expr], Kind]:
    """(kind of the node, its children, the kind they must have)."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            _literal(value, text)
            return "number", [], "number"
        case ast.Name(id=name):
            if name not in NAMES:
                hint = nearest(name, (*NAMES, *FUNCTIONS))
                raise _refused(text, f"contains the unknown name '{name}'", hint)
            return "number", [], "number"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return "number", [left, right], "number"
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return "number", [operand], "number"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return "truth", [operand], "truth"
        case ast.BoolOp(values=parts):
            return "truth", parts, "truth"
        case ast.Compare(left=left, ops=ops, comparators=others) if all(
            type(op) in _COMPARISONS for op in ops
        ):
            return "truth", [left, *others], "number"
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            return "number", [argument], "number"
        case ast.Call(func=ast.Name(id=name)):
            hint = nearest(name, FUNCTIONS) if name not in FUNCTIONS else f"{name}(dp)"
            raise _refused(text, f"cannot call '{name}' like that", hint)
    part = ast.get_source_segment(text.strip(), node) or type(node).__name__
    raise _refused(text, f"contains '{part}', which is not allowed", _TEACH)


def _literal(value: float, text: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _refused(text, "contains a number that is too large")
    return number


def _truth(node: ast.expr, values: Mapping[str, Any], text: str) -> Truth:
    match node:
        case ast.UnaryOp(operand=operand):
            answer = _truth(operand, values, text)
            return ~answer if hasattr(answer, "shape") else not answer
        case ast.BoolOp(op=op, values=parts):
            return _joined(isinstance(op, ast.And), parts, values, text)
        case ast.Compare(left=left, ops=ops, comparators=others):
            before = _number(left, values, text)
            answer = True
            for op, other in zip(ops, others, strict=True):
                after = _number(other, values, text)
                answer = answer & _COMPARISONS[type(op)](before, after)
                before = after
            return answer
    raise AssertionError(f"unchecked node {node!r}")


def _joined(is_and: bool, parts: list[ast.expr], values: Mapping[str, Any], text: str) -> Truth:
    """`and`, `or` from left to right, each part asked only about rows that are still open."""
    answer = _truth(parts[0], values, text)
    for part in parts[1:]:
        if not hasattr(answer, "shape"):
            if answer != is_and:
                return answer
            answer = _truth(part, values, text)
            continue
        open_rows = answer if is_and else ~answer
        if not open_rows.any():
            return answer
        few = {
            name: value[open_rows] if getattr(value, "shape", ()) else value
            for name, value in values.items()
        }
        answer = answer.copy()
        answer[open_rows] = _truth(part, few, text)
    return answer


def _number(node: ast.expr, values: Mapping[str, Any], text: str) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value):
            return _literal(value, text)
        case ast.Name(id=name):
            return _value(name, values, text)
        case ast.UnaryOp(op=op, operand=operand):
            value = _number(operand, values, text)
            return -value if isinstance(op, ast.USub) else value
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            return _called(name, _number(argument, values, text), text)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _number(left, values, text), _number(right, values, text)
            return _computed(_ARITHMETIC[type(op)], a, b, text)
    raise AssertionError(f"unchecked node {node!r}")


def _value(name: str, values: Mapping[str, Any], text: str) -> Number:
    value = values.get(name)
    if value is None:
        known = ", ".join(word for word in NAMES if values.get(word) is not None)
        raise _refused(text, f"uses '{name}', which has no value here", f"known: {known}")
    return value.astype(float) if getattr(value, "shape", ()) else float(value)


def _computed(work: Callable[[Any, Any], Any], a: Number, b: Number, text: str) -> Number:
    """One operation; whatever has no finite answer is an error, not a NaN that compares false."""
    result: Number = math.nan
    try:
        if hasattr(a, "shape") or hasattr(b, "shape"):
            import numpy as np

            with np.errstate(all="ignore"):
                result = work(a, b)
            finite = bool(np.isfinite(result).all())
        else:
            result = work(a, b)
            finite = not isinstance(result, complex) and math.isfinite(result)
    except (ZeroDivisionError, OverflowError):
        finite = False
    if not finite:
        rule = "has no finite value for some layout (division by zero, or too large)"
        raise _refused(text, rule, "guard it: 'dp > 1 and 8 % (dp - 1) == 0'")
    return result


def _called(name: str, value: Number, text: str) -> Number:
    if hasattr(value, "shape"):
        import numpy as np

        positive, call = bool((value > 0).all()), {"log2": np.log2, "ceil": np.ceil}[name]
    else:
        positive, call = value > 0, {"log2": math.log2, "ceil": math.ceil}[name]
    if name == "log2" and not positive:
        raise _refused(text, "takes log2() of a number that is not above 0")
    result = call(value)
    return result if hasattr(result, "shape") else float(result)


def memory_values(size_bytes: Any) -> dict[str, Any]:
    """Return peak memory (a number of bytes, a column, or None) by the names of its units."""
    return {
        name: None if size_bytes is None else size_bytes / unit
        for name, unit in MEMORY_UNITS.items()
    }
