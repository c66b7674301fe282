"""Why a layout cannot run: one answer for planner, sweep, verify and engine. A search asks the same
rules about whole columns (candidates.py). Memory is checked elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fourfold.errors import UserError, sentence
from fourfold.search.rules import batch as batch_rules
from fourfold.search.rules import cuts, engine, experts
from fourfold.search.rules.case import Rule, RuleCase
from fourfold.spec.batch import Batch
from fourfold.spec.cluster import Device
from fourfold.spec.engine import EXPORTS, Engine, EngineRules, engine_of
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy
from fourfold.spec.run import CHOSEN, RunSpec, chosen
from fourfold.spec.words import OURS

RULES: tuple[Rule, ...] = (*engine.RULES, *cuts.RULES, *experts.RULES, *batch_rules.RULES)
REASONS = tuple(rule.reason for rule in RULES)
_ONE_RANK = Layout()


@dataclass(frozen=True, slots=True)
class Refusal:
    """One broken rule: which, and what to say about it."""

    reason: str
    field: str
    value: object
    rule: str
    hint: str = ""

    def __str__(self) -> str:
        text = sentence(self.rule, field=self.field, value=self.value)
        return f"{text}; {self.hint}" if self.hint else text

    @property
    def error(self) -> UserError:
        return UserError(self.rule, field=self.field, value=self.value, hint=self.hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where it should run: whose engine, on how many ranks of what; None: not asked."""

    engine: Engine = field(default_factory=lambda: engine_of(OURS))
    release: str = ""  # one of EXPORTS, where that is asked instead
    gpus: int | None = None
    device: Device | None = None
    runs: bool = True  # False: only planned, so what our engine lacks is no obstacle

    @property
    def rules(self) -> EngineRules:
        return EXPORTS[self.release].rules if self.release else self.engine.rules


def case_of(
    model: ModelShape, layout: Layout, batch: Batch, policy: Policy, target: Target
) -> RuleCase:
    habits = target.engine.habits
    return RuleCase(
        model=model,
        stack=target.rules,
        gpus=target.gpus,
        device=target.device,
        policy=policy,
        **chosen(layout, batch, policy),
        seq_len=batch.seq_len,
        batch_sizes=tuple(size for size, _ in batch.stages()),
        sequence_parallel=int(policy.sequence_parallel),
        runs=target.runs,
        dispatcher=habits.dispatcher if policy.dispatcher == "auto" else policy.dispatcher,
        overlap=habits.overlap if policy.overlap_kind == "auto" else policy.overlap_kind,
    )


def why_not(
    model: ModelShape,
    layout: Layout,
    batch: Batch,
    policy: Policy,
    target: Target | None = None,
    *,
    only: tuple[str, ...] = REASONS,
) -> tuple[Refusal, ...]:
    """Return every broken rule, of `only` some, in the order of RULES; empty: legal. Memory is not
    asked here."""
    case = case_of(model, layout, batch, policy, target or Target())
    return tuple(
        Refusal(rule.reason, *rule.words(case))
        for rule in RULES
        if rule.reason in only and rule.broken(case)
    )


def certain_refusals(
    model: ModelShape, batch: Batch, policy: Policy, target: Target
) -> tuple[Refusal, ...]:
    """Return the rules that are broken in every layout: those that read no column of a search but
    the kind of recompute, which no layout changes."""
    case = case_of(model, _ONE_RANK, batch, policy, target)
    names = [name for name in CHOSEN if name != "recompute"]
    columns = case.with_columns({name: np.full(2, getattr(case, name)) for name in names})
    certain = [rule for rule in RULES if np.ndim(broken := rule.broken(columns)) == 0 and broken]
    return tuple(Refusal(rule.reason, *rule.words(case)) for rule in certain)


def require_legal(spec: RunSpec, *, only: tuple[str, ...] = REASONS) -> None:
    """Raise the first broken rule of a run of our engine; `only` some rules, for what cuts a model
    without running it."""
    for refusal in why_not_spec(spec, only=only):
        raise refusal.error


def why_not_spec(spec: RunSpec, *, only: tuple[str, ...] = REASONS) -> tuple[Refusal, ...]:
    """Return every broken rule of a run of our engine, of `only` some."""
    target = Target(gpus=spec.gpus)
    return why_not(spec.model, spec.layout, spec.batch, spec.policy, target, only=only)
