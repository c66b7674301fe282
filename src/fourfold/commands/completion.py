"""Print a completion script for bash, zsh or fish.

It completes commands, flags, choices and catalogue names by asking fourfold at each TAB, and file
names elsewhere.
"""

from __future__ import annotations

from typing import Any

from fourfold import options
from fourfold.commands import COMMANDS, load
from fourfold.cost.count.flops import ALIASES, CONVENTIONS
from fourfold.errors import UserError
from fourfold.events import OnEvent
from fourfold.options import option
from fourfold.output import Output
from fourfold.spec import catalog

EXAMPLES = """\
install:
  bash   echo 'eval "$(fourfold completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(fourfold completion zsh)"' >> ~/.zshrc     (after compinit)
  fish   fourfold completion fish > ~/.config/fish/completions/fourfold.fish
"""
SHELLS = ("bash", "zsh", "fish")
_KNOWN = {"convention": (*CONVENTIONS, *ALIASES), "shell": SHELLS}
OPTIONS = (
    option("shell", "shell: bash, zsh or fish", "{bash,zsh,fish}", nargs="?"),
    # 'completion words ...' is what the scripts call: what follows 'fourfold', up to the cursor.
    option("words", "", nargs="...", rare=True),
)


def run(args: Any, show: OnEvent) -> Output:
    if args.shell == "words":
        return Output(raw="".join(f"{word}\n" for word in candidates(args.words)))
    if args.shell not in SHELLS or args.words:
        asked = " ".join([args.shell, *args.words]) if args.shell else None
        rule = "has no completion script" if asked else "is required"
        raise UserError(rule, field="shell", value=asked, hint=f"use {', '.join(SHELLS)}")
    return Output(raw=catalog.text(f"completion/fourfold.{args.shell}"))


def candidates(typed: list[str]) -> list[str]:
    """What may stand where the last word is; nothing for a place that takes any text or a file."""
    # bash cuts '--format=json' into three words.
    *before, current = [word for word in typed[:-1] if word != "="] + (typed[-1:] or [""])
    current = "" if current == "=" else current
    if not before or before == ["help"]:
        found: tuple[str, ...] = (*COMMANDS, *(() if before else ("help", "--help", "--version")))
    elif before[0] not in COMMANDS:
        found = ()
    else:
        command, (flag, equals, value) = load(before[0]), current.partition("=")
        if current.startswith("--") and equals:
            values = options.completed(command, [*before[1:], flag], value, **_KNOWN)
            return [f"{flag}={word}" for word in values if word.startswith(value)]
        found = options.completed(command, before[1:], current, **_KNOWN)
    return [word for word in found if word.startswith(current)]
