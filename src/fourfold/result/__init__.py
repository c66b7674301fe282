"""Keep: what a prediction says and what a run measured, as facts."""

from fourfold.result.estimate import Estimate, Part
from fourfold.result.report import OUTCOMES, Failure, RankMemory, RankSteps, RunReport, StepReport

__all__ = [
    "OUTCOMES",
    "Estimate",
    "Failure",
    "Part",
    "RankMemory",
    "RankSteps",
    "RunReport",
    "StepReport",
]
