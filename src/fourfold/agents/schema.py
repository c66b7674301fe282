"""JSON Schemas of typed requests and answers, made from their fields: nothing is written twice."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from fourfold.search.plan_answer import SHOWN_OF_POLICY, EngineBest, EngineChoice
from fourfold.spec import Cluster, Layout, ModelShape, Policy, Ramp, codec

Schema = dict[str, Any]
_PLAIN: dict[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "string"}
# Types that are given, or answered, in a form of their own.
_GIVEN: dict[Any, Schema] = {
    Layout: {"type": ["string", "object"], "description": "'tp8 pp2 dp4', or a table of axes"},
    Policy: {"type": "object", "description": "fields of a run's [policy] table"},
    Ramp: {"type": "string", "description": "START,INCREMENT,SAMPLES"},
    ModelShape: {"type": "object", "description": "sizes of a model, as 'fourfold models' names"},
    Cluster: {"type": "object", "description": "a cluster, as 'fourfold clusters' prints it"},
}
# Fields that the command line makes of other flags, or that read a text themselves.
_SAID: dict[str, Schema] = {
    "model": {"description": "a preset such as llama-3.1-70b, a file of the folder, or sizes"},
    "seq_len": {"description": "tokens of a sequence: 8192 or 8k"},
    "global_batch": {
        "type": ["integer", "string"],
        "description": "sequences per step; 4M or 4Mtokens: tokens",
    },
    "gpus": {"description": "number of GPUs in all"},
    "layout": {"description": "axes that are decided, such as 'tp8 pp2'; the others are searched"},
    "policy": {"description": "a table of decided fields that are not listed here"},
    "micro_batch": {"description": "sequences per micro batch; left out: searched"},
}
_ANSWERED: dict[Any, Schema] = {Layout: {"type": "string"}}
_ENCODED = {EngineBest: EngineChoice}  # types whose JSON has the fields of another


def of_request(*types_: type, without: Iterable[str] = ()) -> Schema:
    """What a tool takes, of one type's fields or of several; each property says what the field's
    flag says. Beside a policy stand those of its fields that have a flag, as texts."""
    properties, required = {}, []
    listed = [(cls, one) for cls in types_ for one in dataclasses.fields(cls)]  # type: ignore[arg-type]
    if any(one.name == "policy" for _, one in listed):
        flags = [one for one in dataclasses.fields(Policy) if "flag" in one.metadata]
        listed += [(Policy, one) for one in flags]
    for cls, one in listed:
        if one.name in without:
            continue
        known = one.metadata.get("flag")
        words = {"description": known.help} if known is not None and known.help else {}
        choices = {"enum": list(known.choices)} if known is not None and known.choices else {}
        own = _of(codec.type_hints(cls)[one.name], {}, given=True) | choices
        if cls is Policy and "enum" in own:  # and what others call them
            own = {"type": "string"}
        properties[one.name] = own | (words or _SAID.get(one.name, {}))
        if is_required(one):
            required.append(one.name)
    found: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return found | ({"required": required} if required else {})


def of_answer(cls: type, parts: dict[str, Schema]) -> Schema:
    """A reference to what the type looks like as JSON; definitions are added to `parts`."""
    return _of(cls, parts, given=False)


def _of(hint: Any, parts: dict[str, Schema], *, given: bool) -> Schema:
    special = (_GIVEN if given else _ANSWERED).get(hint)
    if special is not None:
        return dict(special)
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:  # a text with a unit is read as the number
        base = _of(inner[0], parts, given=given)
        return {"type": [base["type"], "string"]} if given and base["type"] != "string" else base
    if origin in (types.UnionType, typing.Union):
        kinds = [each for each in inner if not (given and each is type(None))]
        return _one_of([_of(each, parts, given=given) for each in kinds])
    if origin is Literal:
        return {"enum": list(inner)}
    if origin is tuple and inner == (tuple[str, str], Ellipsis):
        return {"type": "object", "additionalProperties": {"type": "string"}}
    if origin in (tuple, list):
        return {"type": "array", "items": _of(inner[0], parts, given=given)}
    if origin in (dict, Mapping) or hint is dict:
        of = _of(inner[1], parts, given=given) if inner else {}
        return {"type": "object"} | ({"additionalProperties": of} if of else {})
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if hint is type(None):
        return {"type": "null"}
    hint = _ENCODED.get(hint, hint)
    if dataclasses.is_dataclass(hint):
        return of_request(typing.cast(type, hint)) if given else _defined(hint, parts)
    return {}


def _one_of(kinds: list[Schema]) -> Schema:
    if len(kinds) == 1:
        return kinds[0]
    if all({*kind} <= {"type", "description"} and isinstance(kind["type"], str) for kind in kinds):
        words = [kind["description"] for kind in kinds if "description" in kind]
        return {"type": [kind["type"] for kind in kinds]} | (
            {"description": "; ".join(words)} if words else {}
        )
    return {"anyOf": kinds}


def _defined(cls: Any, parts: dict[str, Schema]) -> Schema:
    name = cls.__name__
    if name not in parts:
        parts[name] = {}  # a type may hold itself
        hints = codec.type_hints(cls)
        shown = [
            field
            for field in codec.json_fields(cls)
            if field.json != codec.HIDDEN and (cls is not Policy or field.name in SHOWN_OF_POLICY)
        ]
        parts[name] = {
            "type": "object",
            "properties": {
                field.key: _of(hints[field.name], parts, given=False) for field in shown
            },
            "required": [
                field.key for field in shown if type(None) not in get_args(hints[field.name])
            ],
        }
    return {"$ref": f"#/$defs/{name}"}


def is_required(one: dataclasses.Field[Any]) -> bool:
    return one.default is one.default_factory is dataclasses.MISSING
