"""Lay out language-model pretraining on GPUs: predict, choose, run, keep and show.

The verbs take a typed request and return a frozen dataclass; `docs/library.md` shows them at work.
They are imported when they are first used: `import fourfold` itself costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fourfold.events import Event as Event
    from fourfold.spec.batch import Batch as Batch
    from fourfold.spec.cluster import Cluster as Cluster
    from fourfold.spec.layout import Layout as Layout
    from fourfold.spec.policy import Policy as Policy
    from fourfold.spec.run import RunSpec as RunSpec
    from fourfold.verbs.advise import advise as advise
    from fourfold.verbs.export import export as export
    from fourfold.verbs.plan import explain as explain
    from fourfold.verbs.plan import plan as plan
    from fourfold.verbs.plan import stacks as stacks
    from fourfold.verbs.requests import AdviseRequest as AdviseRequest
    from fourfold.verbs.requests import PlanRequest as PlanRequest

__version__ = "0.1.0"

# name -> module; no submodule of this package has a verb's name.
_HOMES = {
    "AdviseRequest": "verbs.requests",
    "Batch": "spec.batch",
    "Cluster": "spec.cluster",
    "Event": "events",
    "Layout": "spec.layout",
    "PlanRequest": "verbs.requests",
    "Policy": "spec.policy",
    "RunSpec": "spec.run",
    "advise": "verbs.advise",
    "explain": "verbs.plan",
    "export": "verbs.export",
    "plan": "verbs.plan",
    "stacks": "verbs.plan",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'fourfold' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"fourfold.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
