"""Options of the commands as data, derived from the fields they set; `cli` builds parsers."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from fourfold.errors import UserError
from fourfold.escape import FORMATS
from fourfold.flag import Option
from fourfold.spec import Batch, Layout, Policy, RunSpec, catalog, check, codec, texts, words
from fourfold.spec.run import nested, short_names
from fourfold.spec.site import parse_assignments

if TYPE_CHECKING:
    from fourfold.flag import Arguments

T = TypeVar("T")
# Where the fields of a run are; a flag's text is read by its field.
_RUN = (("", RunSpec), ("layout", Layout), ("batch", Batch), ("policy", Policy))


def option(name: str, text: str, metavar: str | None = None, **rest: Any) -> Option:
    """An option that sets no field."""
    return Option(names=(name,), help=text, metavar=metavar, **rest)


FORMAT = option("--format", "output format (default text)", choices=FORMATS)
FORCE = option(
    "--force", "overwrite even if fourfold did not write the file", switch=True, rare=True
)
SET = option(
    "--set",
    "set any field of the run, such as policy.compile=true",
    "FIELD=VALUE",
    repeated=True,
    rare=True,
)


def of(cls: type, *only: str, **changes: Any) -> tuple[Option, ...]:
    """The options that set a dataclass's fields: all that have a flag, or those named."""
    hints = codec.type_hints(cls)
    flags = {f.name: f for f in dataclasses.fields(cls) if "flag" in f.metadata}
    return tuple(_of_field(flags[name], hints[name])._replace(**changes) for name in only or flags)


def _of_field(field: dataclasses.Field[Any], hint: Any) -> Option:
    one: Option = field.metadata["flag"]
    one = one._replace(dest=field.name, names=one.names or (f"--{field.name.replace('_', '-')}",))
    kind = hint
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kind = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return one._replace(read=one.read or kind.__metadata__[0])
    if origin is typing.Literal:
        return one._replace(choices=one.choices or typing.get_args(kind))
    if origin is tuple:
        item = typing.get_args(kind)[0]
        return one._replace(repeated=one.nargs is None, read=item if item is int else None)
    if kind is bool:
        return one._replace(switch=not one.pair)
    return one._replace(read=one.read or kind) if kind in (int, float) else one


def grouped(options: typing.Iterable[Option], group: str) -> tuple[Option, ...]:
    return tuple(one._replace(group=group) for one in options)


def given(args: Arguments, *names: str) -> dict[str, Any]:
    values = {name: getattr(args, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def only_value(args: Arguments, name: str, why: str) -> int | None:
    """The number of a flag that takes several, where it may have one; 'auto' is None."""
    values, flag = getattr(args, name) or [], f"--{name.replace('_', '-')}"
    if len(values) > 1:
        shown = " ".join(map(str, values))
        raise UserError(f"takes one value {why}", field=flag, value=shown)
    if not values or values[0] == "auto":
        return None
    check.that(str(values[0]).isdecimal(), flag, values[0], "must be a whole number")
    return int(values[0])


def load(cls: type[T], args: Arguments, **given: Any) -> T:
    """The dataclass that the flags describe; what was not given keeps the field's default."""
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        value = getattr(args, field.name, None) if "flag" in field.metadata else None
        if value is not None and field.name not in given:
            given[field.name] = value
    return cls(**given)


@functools.cache
def _run_fields(extra: tuple[str, ...]) -> list[tuple[str, Option]]:
    """(path in a run's table, option) of every field of a run that has a flag of its own."""
    fields = []
    for path, cls in _RUN:
        names = ("gpus", *extra) if cls is RunSpec else ()
        for one in of(cls, *names):
            name = one.names[0][2:].replace("-", "_")
            # The field itself reads the text: 8k, fsdp, 4Mtokens. A plain number reads none.
            read = one.read if one.read is float else None
            plain = one._replace(dest=name, read=read, choices=(), switch=False)
            fields.append((f"{path}.{name}" if path else name, plain))
    return fields


def layout_options(*without: str) -> tuple[Option, ...]:
    """Flags of layout, batch and policy: the same names in every command."""
    fields = (one for _, one in _run_fields(()) if one.names[0] not in without)
    return grouped(fields, "layout, batch and policy")


def run_options(*extra: str) -> tuple[Option, ...]:
    """All that describes a run; `extra` are fields of RunSpec that few commands have flags for."""
    own = [one for path, one in _run_fields(extra) if path in extra]
    return (
        option("--model", "model preset, or path of a config.json", "NAME"),
        option("--spec", "run description; flags override its fields", "FILE.toml", rare=True),
        SET,
        *own,
        *layout_options(),
    )


def run_table(
    args: Arguments,
    known: Mapping[str, Any] | None = None,
    *,
    extra: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    training: bool = False,
    note: typing.Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The run as plain data: the spec file (or what is `known`), then flags, --set and --env.
    What other words were read as goes to `note`. Only a `training` takes the file's [train]."""
    table: dict[str, Any] = nested(known or {})
    if getattr(args, "spec", None):
        table = nested(texts.read(args.spec, field="spec"))
        is_sweep, hint = "sweep" in table, f"run it by 'fourfold sweep {args.spec}'"
        check.that(not is_sweep, "spec", args.spec, "is a sweep, not a single run", hint)
        if not training and table.pop("train", None):
            note(f"note: [train] of {args.spec} is left out: this command does not train")
    if getattr(args, "model", None):
        table["model"] = args.model
    for path, one in _run_fields(extra):
        value = getattr(args, one.dest, None)
        if value is not None and one.dest not in without:
            codec.put(table, path, value)
    assign(table, args)
    return _tidied(table, note)


def assignments(args: Arguments) -> list[tuple[str, str]]:
    """(path, text) of each --set."""
    pairs = []
    for assignment in getattr(args, "set", None) or ():
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise UserError("must be FIELD=VALUE", field="--set", value=assignment)
        pairs.append((path.strip(), text))
    return pairs


def assign(table: dict[str, Any], args: Arguments) -> None:
    """--set and --env, over what the table has."""
    pairs = assignments(args)
    is_named = any(path == "model.name" for path, _ in pairs)
    for typed, text in pairs:
        path = short_names().get(typed, typed)
        value = texts.toml_value(text)
        if path.startswith("model."):
            catalog.open_model(table, "" if is_named else path.removeprefix("model."), text.strip())
        is_text = path in ("note", "tag", "data") or path.startswith("policy.env.")
        # A shell eats the quotes of policy.env.X="1".
        codec.put(table, path, text.strip() if is_text and not isinstance(value, str) else value)
    # Of commands that have --env: the variables are the run's, and decide which run it is.
    for name, value in parse_assignments(getattr(args, "env", None) or ()):
        codec.put(table, f"policy.env.{name}", value)


def refuse(args: Arguments, unused: typing.Iterable[Option], rule: str, hint: str = "") -> None:
    """Flags that would have no effect here."""
    for one in unused:
        if getattr(args, one.key) is not None:
            raise UserError(rule, field=one.names[0], hint=hint)


def _tidied(table: dict[str, Any], note: typing.Callable[[str], None]) -> dict[str, Any]:
    policy = table.get("policy")
    hybrid = isinstance(policy, dict) and words.is_hybrid(policy.get("sharding"))
    tidy, notes = words.tidied(table)
    if notes:
        note(f"read as: {'; '.join(notes)}")
    if hybrid:  # RunSpec asks whether the layout has copies
        tidy["policy"]["sharding"] = words.HYBRID[0]
    return tidy


def by_flag(error: UserError, args: Arguments, flags: Mapping[str, str]) -> UserError:
    """The error as the command line's user knows its field: by the flag that set it, by --set, or
    by its path in the spec, sweep or training file. `flags`: name in `args` -> flag."""
    leaf = error.field.rpartition(".")[2].replace("-", "_")
    if error.source or not error.field or error.field.startswith("-"):
        return error
    for path, _ in assignments(args):
        if path in (error.field, leaf):
            return error.named(f"--set {path}")
    given = getattr(args, leaf, None)
    is_missing = error.rule.startswith(("is required", "is missing"))
    is_given = given is not None and given is not False and given != []
    if leaf in flags and (is_given or is_missing):
        return error.named(flags[leaf])
    spec = getattr(args, "spec", None) or getattr(args, "file", None)
    is_its = spec and spec != error.value and _has(spec, error.field)
    return error.inside(spec) if is_its else error


def _has(spec: str, path: str) -> bool:
    table: Any = texts.read(spec, field="spec")
    if path.rpartition(".")[2] in table:  # a flat field
        return True
    for name in path.split("."):
        if not isinstance(table, dict) or name not in table:
            return False
        table = table[name]
    return True


def completed(
    command: Any, before: list[str], current: str, **known: tuple[str, ...]
) -> tuple[str, ...]:
    """What may stand at `current` after the words `before` of a command of `commands`; `known`:
    values of arguments by name."""
    name = command.name
    places = [i for i, word in enumerate(before) if word in command.actions]
    actions = () if places else tuple(command.actions)
    if places:  # the options of 'data make' once 'make' was typed
        command, before = command.actions[before[places[0]]], before[places[0] + 1 :]
    flags = {flag: one for one in command.options for flag in one.names if flag[0] == "-"}
    last = flags.get(before[-1]) if before else None
    if last is not None and last.takes_value:
        return _values(name, last, known)
    if current.startswith("-"):
        return (*flags, "--help", "--help-all")
    free = [one for one in command.options if one.names[0][0] != "-" and one.help]
    valued = {flag for flag, one in flags.items() if one.takes_value}
    pairs = zip(["", *before], before, strict=False)
    given = sum(not word.startswith("-") and flag not in valued for flag, word in pairs)
    return (*(_values(name, free[given], known) if given < len(free) else ()), *actions)


def _values(command: str, one: Option, known: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Names and choices an argument takes, by the meaning its name has in every command."""
    from fourfold.spec import catalog

    key = "model" if (command, one.key) == ("models", "name") else one.key
    return one.choices or {
        "model": tuple(catalog.model_names()),
        "gpu": (*catalog.device_names(), *(("all",) if command == "clusters" else ())),
        "cluster": catalog.cluster_names(),
        "precision": (*words.BUNDLES, "bf16"),
        "sharding": words.SHARDINGS,
        "cp_kind": words.CP_KINDS,
        "schedule": words.SCHEDULES,
        "recompute": (*words.RECOMPUTE, "every-2", "block-4"),
        **known,
    }.get(key, ())
