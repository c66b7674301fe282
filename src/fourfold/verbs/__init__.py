"""The verbs: a typed request in, a frozen dataclass out; events go to the caller's `on_event`.

Fields of a request as a program gives them: texts with units become numbers, and what they must
be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, get_args, get_origin

from fourfold.escape import html_table
from fourfold.spec import Batch, Layout, Policy, check, codec
from fourfold.units import counted

LAYOUT_RULE = "must be a table, a text such as 'tp8 pp2', or a Layout"


def read_plan(request: Any) -> None:
    """What a PlanRequest may also be given: sizes with units, a Layout, a Policy."""
    if isinstance(request.global_batch, str):
        plain = {"seq_len": request.seq_len, "global_batch": request.global_batch}
        set_field(request, "global_batch", codec.decode(Batch, plain).global_batch)
    read_units(request)
    if isinstance(request.layout, Layout):
        require_world(request.layout, request.gpus)
        set_field(request, "layout", str(request.layout))
    if isinstance(request.policy, Policy):
        set_field(request, "policy", codec.encode(request.policy))
    check.that(isinstance(request.layout, str | Mapping), "layout", request.layout, LAYOUT_RULE)
    check.that(isinstance(request.policy, Mapping), "policy", request.policy, "must be a table")


def read_units(request: Any) -> None:
    """Texts with units ('8k', '300B', '10%') as the numbers they mean, in a request that a program
    makes; the command line has read its own. Other texts, and what is no number, are refused."""
    for name, hint in codec.type_hints(type(request)).items():
        value = getattr(request, name)
        (kind, *others) = [one for one in get_args(hint) or (hint,) if one is not type(None)]
        if get_origin(hint) is Annotated:
            kind, others = hint, []
        if value is None or others:
            continue
        has_units = get_origin(kind) is Annotated
        base = get_args(kind)[0] if has_units else kind
        if base in (int, float, bool) or (has_units and isinstance(value, str)):
            plain = value.item() if hasattr(value, "item") else value  # of NumPy
            set_field(request, name, codec.decode_value(kind, plain, name))


def set_field(request: Any, name: str, value: Any) -> None:
    """Of a frozen request, while it is made."""
    object.__setattr__(request, name, value)


def require_world(layout: Layout, gpus: int | None) -> None:
    """A layout of a program has every axis, unlike a text that names some."""
    rule = f"uses {counted(layout.world, 'GPU')}, not {gpus}"
    hint = "a Layout decides every axis; 'tp2' as a text decides one"
    check.that(gpus in (None, layout.world), "layout", str(layout), rule, hint)


def measured(one: Any) -> dict[str, Any]:
    """The fields of a score; what could not be scored (NaN) is None."""
    return {name: None if value != value else value for name, value in asdict(one).items()}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a verb returns. `plain` is its JSON, without fields that are None; `rows` are flat dicts
    in base units, one for each line of a table."""

    def plain(self) -> Any:
        return codec.encode(self)

    def rows(self) -> list[dict[str, Any]]:
        return [self.plain()]

    def _repr_html_(self) -> str:
        return html_table(self.rows())
