"""Frozen dataclasses <-> plain data <-> JSON and TOML, with errors that name the field.

A type may define `from_plain(data, path)` / `to_plain()` for a text form of its own. A string given
for a number is read by the function in its `Annotated[...]`, if it has one ("80GiB").
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from fourfold.errors import UserError, nearest
from fourfold.escape import toml_text
from fourfold.spec import texts

T = TypeVar("T")
SCHEMA_VERSION = 1
# Whole numbers beyond this are not exact as JSON numbers elsewhere, and mean nothing here.
MAX_INT = 2**63 - 1


def takes_more(
    place: Callable[[dict[str, Any]], Mapping[str, Any]],
    names: Callable[[], Iterable[str]] = tuple,
) -> Callable[[type[T]], type[T]]:
    """Let a dataclass be made of more keywords, or other types, than its fields have: `place`
    returns its fields of them, `names` are the keywords beside fields. What neither knows is a
    TypeError with the nearest name."""

    def decorate(cls: type[T]) -> type[T]:
        construct = cls.__init__
        own = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]

        @functools.wraps(construct)
        def init(self: T, *args: Any, **given: Any) -> None:
            placed = place(given)
            for name in placed:
                if name not in own:
                    hint = nearest(name, {*own, *names()})
                    raise TypeError(f"{cls.__name__} has no field '{name}'; {hint}")
            construct(self, *args, **placed)

        known = inspect.signature(construct)
        more = inspect.Parameter("fields", inspect.Parameter.VAR_KEYWORD)
        init.__signature__ = known.replace(parameters=[*known.parameters.values(), more])  # type: ignore[attr-defined]
        cls.__init__ = init  # type: ignore[method-assign]
        return cls

    return decorate


@functools.cache
def type_hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


class JsonForm(NamedTuple):
    """The way a dataclass's field stands in JSON, as the mark of its `Annotated` type: under
    another `key`, or in another `form`; with `null` also where it is None.

    Forms: text pairs as a table ('pairs'); its own fields among those around it ('inline'; 'file':
    behind the schema and the type, as in a stored file); without what equals its default
    ('sparse'); not at all ('hidden').
    """

    key: str = ""
    form: Literal["", "pairs", "inline", "file", "sparse", "hidden"] = ""
    null: bool = False


HIDDEN, INLINE, AS_FILE = JsonForm(form="hidden"), JsonForm(form="inline"), JsonForm(form="file")
SPARSE, NULL = JsonForm(form="sparse"), JsonForm(null=True)


class JsonField(NamedTuple):
    """A field of a dataclass, and how it stands in JSON."""

    name: str
    json: JsonForm
    default: Any
    is_compared: bool

    @property
    def key(self) -> str:
        return self.json.key or self.name


@functools.cache
def json_fields(cls: type) -> tuple[JsonField, ...]:
    """Return the fields of a dataclass, in their order."""
    hints = type_hints(cls)
    return tuple(
        JsonField(field.name, _json_form(hints[field.name]), _default_of(field), field.compare)
        for field in dataclasses.fields(cls)
    )


def _json_form(hint: Any) -> JsonForm:
    if hint == tuple[tuple[str, str], ...]:
        return JsonForm(form="pairs")
    marks = getattr(hint, "__metadata__", ())
    return next((mark for mark in marks if isinstance(mark, JsonForm)), JsonForm())


@functools.cache
def _fields(cls: type) -> dict[str, bool]:
    """The names of a dataclass's fields, and whether each must be given."""
    return {
        field.name: _default_of(field) is dataclasses.MISSING for field in dataclasses.fields(cls)
    }


def decode(cls: type[T], data: object, path: str = "") -> T:
    """Plain data -> an instance of the dataclass `cls`; unknown and missing fields are refused."""
    special = getattr(cls, "from_plain", None)
    if special is not None:
        return special(data, path)
    return decode_fields(cls, data, path)


def decode_fields(cls: type[T], data: object, path: str = "") -> T:
    """The field-by-field form of `decode`, for types whose `from_plain` has tidied the data."""
    fields = _fields(cls)
    if not isinstance(data, dict):
        hint = f"fields: {', '.join(fields)}"
        raise UserError("must be a table", field=path, value=data, hint=hint)
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in fields:
            raise UserError("unknown field", field=_join(path, key), hint=nearest(str(key), fields))
        if value is not None:
            values[key] = decode_value(type_hints(cls)[key], value, _join(path, key))
    for name, needed in fields.items():
        if needed and name not in values:
            raise UserError("is missing", field=_join(path, name), hint=f"add {name} = ...")
    try:
        return cls(**values)
    except UserError as error:
        raise error.within(path) from None


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def decode_value(hint: Any, value: object, path: str) -> Any:
    if hint in (float, int, str, bool):  # most of a calibration's thousands of values
        return _decode_scalar(hint, value, path)
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is typing.Annotated:
        if isinstance(value, str) and not isinstance(arguments[1], JsonForm):
            try:
                return arguments[1](value)
            except UserError as error:
                raise error.within(path) from None
        if arguments[0] is int and isinstance(value, float) and value.is_integer():
            value = int(value)  # 2e12 tokens
        return decode_value(arguments[0], value, path)
    if origin in (types.UnionType, typing.Union):
        kinds = [argument for argument in arguments if argument is not type(None)]
        return _decode_one_of(kinds, value, path)
    if origin is Literal:
        return _decode_choice(arguments, value, path)
    if origin is tuple:
        return _decode_tuple(arguments, value, path)
    if origin is dict and isinstance(value, dict):
        return {key: decode_value(arguments[1], v, _join(path, key)) for key, v in value.items()}
    if origin is Mapping and isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(hint):
        done = isinstance(value, typing.cast(type, hint))
        return value if done else decode(typing.cast(type, hint), value, path)
    return _decode_scalar(hint, value, path)


def _decode_one_of(kinds: list[Any], value: object, path: str) -> Any:
    """Of 'str | Cluster' a text is a name, a table the thing itself."""
    inner = kinds[-1]
    if len(kinds) == 1:
        return decode_value(inner, value, path)
    if isinstance(value, str):
        return value
    if dataclasses.is_dataclass(inner) and isinstance(value, dict):
        try:
            return load(typing.cast(type, inner), value)
        except UserError as error:
            raise error.within(path) from None
    if isinstance(value, typing.get_origin(inner) or inner):
        return value
    raise UserError("must be a text or a table", field=path, value=value)


def _decode_choice(choices: tuple[Any, ...], value: object, path: str) -> Any:
    for choice in choices:
        if isinstance(value, str) and value.strip().lower() == choice.lower():
            return choice
    raise UserError(f"is not one of {', '.join(choices)}", field=path, value=value)


def _decode_tuple(arguments: tuple[Any, ...], value: object, path: str) -> tuple[Any, ...]:
    if arguments == (tuple[str, str], Ellipsis):  # a table of names, stored as sorted pairs
        if not isinstance(value, dict):
            raise UserError("must be a table of strings", field=path, value=value)
        for key, text in value.items():
            if not isinstance(text, str):
                name, hint = _join(path, key), 'put it in "quotes"'
                raise UserError("must be a string", field=name, value=text, hint=hint)
        return tuple(sorted((str(key), text) for key, text in value.items()))
    if not isinstance(value, list | tuple):
        raise UserError("must be a list", field=path, value=value, hint="write [..., ...]")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        hints = [arguments[0]] * len(value)
    else:
        hints = list(arguments)
    if len(hints) != len(value):
        raise UserError(f"must have {len(hints)} entries", field=path, value=value)
    pairs = zip(hints, value, strict=True)
    return tuple(decode_value(hint, item, f"{path}[{i}]") for i, (hint, item) in enumerate(pairs))


def _decode_scalar(hint: Any, value: object, path: str) -> Any:
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > MAX_INT:
            raise UserError("is too large", field=path, value=value, hint="at most 2^63 - 1")
        return value
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not (abs(value) <= 1e300 and math.isfinite(value)):
            raise UserError("must be a finite number", field=path, value=value)
        return float(value)
    if hint is str and isinstance(value, str):
        return value
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    raise UserError(f"must be {wanted.get(hint, 'a table')}", field=path, value=value)


def encode(value: Any, *, sparse: bool = False) -> Any:
    """An instance -> plain data; a number that is none (NaN) is None. `sparse` leaves out what
    equals its default or is never compared (for hashes)."""
    if hasattr(value, "to_plain"):
        return value.to_plain()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain: dict[str, Any] = {}
        for field in json_fields(type(value)):
            content, form = getattr(value, field.name), field.json.form
            if form == "hidden" or (content is None and not field.json.null):
                continue
            if sparse and (content == field.default or not field.is_compared):
                continue
            if form == "pairs":
                plain[field.key] = dict(content)
            elif form in ("inline", "file"):
                plain |= dump(content) if form == "file" else encode(content, sparse=sparse)
            else:
                plain[field.key] = encode(content, sparse=sparse or form == "sparse")
        return plain
    if isinstance(value, tuple | list):
        return [encode(part, sparse=sparse) for part in value]
    if isinstance(value, dict):
        return {key: encode(part, sparse=sparse) for key, part in value.items()}
    return None if isinstance(value, float) and value != value else value


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def dump(value: Any) -> dict[str, Any]:
    """Plain data of a stored file: schema version and type first."""
    return {"schema": SCHEMA_VERSION, "type": type(value).__name__, **encode(value)}


def load(cls: type[T], data: object) -> T:
    """Read what `dump` wrote. Hand-written files may leave `schema` and `type` out."""
    if not isinstance(data, dict):
        raise UserError(f"must be a table with the fields of {cls.__name__}", value=data)
    data = dict(data)
    version = data.pop("schema", SCHEMA_VERSION)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UserError("must be a version number", field="schema", value=version)
    if version > SCHEMA_VERSION:
        rule = f"was written by a newer fourfold (this one reads up to {SCHEMA_VERSION})"
        raise UserError(rule, field="schema", value=version, hint="update fourfold")
    kind = data.pop("type", cls.__name__)
    if kind != cls.__name__:
        raise UserError(f"must be {cls.__name__} in this file", field="type", value=kind)
    return decode(cls, data)


def to_json(value: Any) -> str:
    return json_of(dump(value))


def json_of(plain: dict[str, Any]) -> str:
    """Plain data as the text of a file."""
    return json.dumps(plain, indent=2) + "\n"


def to_toml(value: Any) -> str:
    return toml_text(dump(value))


def from_json(cls: type[T], text: str) -> T:
    return load(cls, texts.parse_json(text))


def from_toml(cls: type[T], text: str) -> T:
    return load(cls, texts.parse_toml(text))


def put(table: dict[str, Any], path: str, value: Any) -> None:
    """table['a']['b'] = value for path 'a.b', making tables on the way."""
    *parents, leaf = path.split(".")
    for name in parents:
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            raise UserError(f"needs a table '{name}', but that is a value", field=path, value=value)
        table = inner
    table[leaf] = value
