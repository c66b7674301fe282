"""Operations of a traced layer: the tensors they read and write, how they are printed, FLOPs.

They are counted by cost/trace/walk.py and run on real tensors by engine/trace/steps.py. Shapes are
symbolic: each dimension is a size such as 'tokens/ranks'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fourfold.result.trace import How, Op, TensorCount

Dims = tuple[str, ...]
Rearrangement = Literal["by_owner", "by_token", "by_head", "in_order", "stack", "cast"]


@dataclass(frozen=True, slots=True)
class TensorOutput:
    """A tensor that an operation writes."""

    name: str
    dims: Dims


@dataclass(frozen=True, slots=True)
class TensorInput:
    """A tensor that an operation reads. `index`: one slice of its first dimension; `half`: the
    early or the late half of its tokens."""

    name: str
    index: int | None = None
    half: Literal["", "early", "late"] = ""

    def __str__(self) -> str:
        index = "" if self.index is None else f"[{self.index}]"
        return f"{self.half} {self.name}{index}".lstrip()


@dataclass(frozen=True, slots=True)
class Operation:
    """One formula of a step."""

    outputs: tuple[TensorOutput, ...]
    inputs: tuple[TensorInput, ...] = ()

    @property
    def formula(self) -> str:
        """The formula as it is printed; empty for tensors that exist from the start."""
        return ""

    @property
    def how(self) -> How:
        """How the outputs came about."""
        return "new"

    def flops(self, outputs: Sequence[TensorCount], inputs: Sequence[TensorCount]) -> int:
        """Return the FLOPs of one rank."""
        return 0

    def _assigned(self, expression: str) -> str:
        return f"{', '.join(output.name for output in self.outputs)} = {expression}"

    def _called(self, function: str) -> str:
        return self._assigned(f"{function}({', '.join(map(str, self.inputs))})")


@dataclass(frozen=True, slots=True)
class Given(Operation):
    """Weights and inputs, which exist before the first step."""


@dataclass(frozen=True, slots=True)
class Gemm(Operation):
    """A GEMM. `transposed`: its right side is; `activated`: an activation follows in place."""

    transposed: bool = False
    activated: bool = False

    @property
    def formula(self) -> str:
        left, right = self.inputs
        expression = f"{left} x {right}{'^T' if self.transposed else ''}"
        return self._assigned(f"act({expression})" if self.activated else expression)

    def flops(self, outputs: Sequence[TensorCount], inputs: Sequence[TensorCount]) -> int:
        """Two per multiply-add."""
        return 2 * outputs[0].elements * inputs[0].shape[-1]


@dataclass(frozen=True, slots=True)
class InPlace(Operation):
    """Adds to its first input, or multiplies it."""

    sign: Literal["+", "*"] = "+"

    @property
    def formula(self) -> str:
        target, operand = self.inputs
        return f"{target} {self.sign}= {operand}"


@dataclass(frozen=True, slots=True)
class Copy(Operation):
    """A copy in another order or dtype."""

    function: Rearrangement = "stack"

    @property
    def formula(self) -> str:
        return self._called(self.function)

    @property
    def how(self) -> How:
        return "copied"


@dataclass(frozen=True, slots=True)
class View(Operation):
    """The same memory in another shape."""

    @property
    def formula(self) -> str:
        return self._called("parts")

    @property
    def how(self) -> How:
        return "view"


@dataclass(frozen=True, slots=True)
class StartSums(Operation):
    """Zeros to which the blocks of attention are added; `row_sums`: with a sum for each row."""

    row_sums: bool = False

    @property
    def formula(self) -> str:
        return self._called("start_sums" if self.row_sums else "zeros")


@dataclass(frozen=True, slots=True)
class AttentionCore(Operation):
    """Causal attention in one kernel. `function`: over all keys at hand; each half of the queries
    over the keys before it; or over one block of keys and values."""

    function: Literal["attention", "attention_of_halves", "attention_of_block"] = "attention"

    @property
    def formula(self) -> str:
        return self._called(self.function)

    def flops(self, outputs: Sequence[TensorCount], inputs: Sequence[TensorCount]) -> int:
        """Two GEMMs over half of the square: the causal mask's."""
        return 2 * inputs[0].elements * inputs[1].shape[-3]


@dataclass(frozen=True, slots=True)
class Communication(Operation):
    """A collective over the program's first group, or a send to the next rank of it."""

    op: Op = "send"

    @property
    def formula(self) -> str:
        return self._called(self.op.replace("-", "_"))

    @property
    def how(self) -> How:
        return "received"

    def buffer_bytes(self, outputs: Sequence[TensorCount], inputs: Sequence[TensorCount]) -> int:
        """Return the bytes of the whole buffer, of which a rank sends its share."""
        return max(outputs[0].bytes, inputs[0].bytes)


def given(name: str, *dims: str) -> Given:
    return Given((TensorOutput(name, dims),))


def gemm(name: str, dims: Dims, left: str, right: str | TensorInput) -> Gemm:
    return Gemm((TensorOutput(name, dims),), _inputs(left, right))


def activated_gemm(name: str, dims: Dims, left: str, right: str) -> Gemm:
    return Gemm((TensorOutput(name, dims),), _inputs(left, right), activated=True)


def scores_gemm(dims: Dims, queries: str, keys: str | TensorInput) -> Gemm:
    return Gemm((TensorOutput("scores", dims),), _inputs(queries, keys), transposed=True)


def add_to(target: str, operand: str) -> InPlace:
    return InPlace((), _inputs(target, operand))


def multiply_by(target: str, operand: str) -> InPlace:
    return InPlace((), _inputs(target, operand), sign="*")


def communication(op: Op, name: str, dims: Dims, source: str) -> Communication:
    return Communication((TensorOutput(name, dims),), _inputs(source), op=op)


def start_sums(*outputs: TensorOutput) -> StartSums:
    """Zeros in the shape of `outputs`; the second, where there is one, takes row sums."""
    return StartSums(outputs, _inputs("q"), row_sums=len(outputs) > 1)


def copy(function: Rearrangement, name: str, dims: Dims, *sources: str) -> Copy:
    return Copy((TensorOutput(name, dims),), _inputs(*sources), function=function)


def parts(name: str, dims: Dims, source: str) -> View:
    return View((TensorOutput(name, dims),), _inputs(source))


def _inputs(*names: str | TensorInput) -> tuple[TensorInput, ...]:
    return tuple(TensorInput(name) if isinstance(name, str) else name for name in names)
