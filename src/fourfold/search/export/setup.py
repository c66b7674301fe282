"""What must an engine be told? Layout, batch and policy, and how hosts divide the ranks."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from fourfold.errors import UserError
from fourfold.spec.batch import Batch
from fourfold.spec.layout import AXES, Layout
from fourfold.spec.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One run in fourfold's words. `shape` holds model sizes by the names of ModelShape; `model` is
    the name or path the user gave, '' where a file does not say."""

    layout: Layout
    batch: Batch
    policy: Policy
    host_gpus: int
    shape: tuple[tuple[str, int], ...]
    model: str = ""

    @property
    def hosts(self) -> int:
        return -(-self.layout.world // self.host_gpus)

    @property
    def per_host(self) -> int:
        return min(self.host_gpus, self.layout.world)


SIZES = ("layers", "hidden", "ffn", "heads", "kv_heads")


def no_setting(engine: str, field: str, value: object, way_out: str) -> UserError:
    return UserError(f"{engine} has no setting for it", field=field, value=value, way_out=way_out)


def check_plain(engine: str, setup: Setup) -> None:
    """What no other engine's settings can say."""
    if setup.layout.order != AXES:
        raise no_setting(engine, "layout.order", " ".join(setup.layout.order), "order pp dp cp tp")
    whole = setup.layout.dp * setup.batch.micro_batch
    if setup.batch.global_batch % whole:
        raise UserError(
            f"dp x micro_batch = {whole} must divide it for {engine}",
            field="batch.global_batch",
            value=setup.batch.global_batch,
            way_out="choose a layout found with --stack " + engine,
        )


def comment(engine: str, setup: Setup) -> str:
    return (
        f"# {engine} settings for {setup.layout} on {setup.hosts} hosts of {setup.per_host} GPUs,"
        f" micro batch {setup.batch.micro_batch}, {setup.policy.precision}"
    )


def flag_lines(flags: dict[str, str | None]) -> list[str]:
    """One flag a line, ready for `$(grep -v '^#' FILE)` in a shell; None: a switch."""
    return [name if value is None else f"{name} {value}" for name, value in flags.items()]


def flags_in(text: str) -> dict[str, str]:
    """Flags of a command line or of a file of them; a switch has the value ''."""
    found: dict[str, str] = {}
    name = ""
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise UserError(f"cannot be read ({error})", field="settings") from None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found[name] = value if equals else ""
        elif name:
            found[name] = f"{found[name]} {word}".strip()
    return found


def number(found: dict[str, str], name: str, default: int | None = None) -> int:
    """A whole number among settings; missing is an error unless there is a default."""
    text = found.get(name, "")
    if not text and default is not None:
        return default
    if not text.lstrip("-").isdecimal():
        raise UserError("must be a whole number", field=name, value=text or "nothing")
    return int(text)
