"""Print a completion script for bash, zsh or fish.

It completes commands, flags, choices and catalogue names by asking fourfold at each TAB, and file
names elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fourfold.commands import COMMANDS, load
from fourfold.cost.count.flops import ALIASES, CONVENTIONS
from fourfold.errors import UserError
from fourfold.events import OnEvent
from fourfold.flag import Option
from fourfold.options import option
from fourfold.output import Output
from fourfold.spec import catalog, words

EXAMPLES = """\
install:
  bash   echo 'eval "$(fourfold completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(fourfold completion zsh)"' >> ~/.zshrc     (after compinit)
  fish   fourfold completion fish > ~/.config/fish/completions/fourfold.fish
"""
_BASH = """\
_fourfold() {
    local word
    COMPREPLY=()
    while IFS= read -r word; do
        COMPREPLY+=("$word")
    done < <("${COMP_WORDS[0]/#\\~/$HOME}" completion words \\
        "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o bashdefault -o default -F _fourfold fourfold ./fourfold
"""
_ZSH = """\
#compdef fourfold
_fourfold() {
    local -a found
    found=("${(@f)$("${words[1]/#\\~/$HOME}" completion words \\
        "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "${found[1]}" ]]; then
        compadd -a found
    else
        _files
    fi
}
if [[ "${funcstack[1]}" == _fourfold ]]; then
    _fourfold "$@"
else
    compdef _fourfold fourfold
fi
"""
_FISH = """\
function __fourfold_complete
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    test (count $current) -eq 0; and set current ''
    $before[1] completion words $before[2..-1] $current 2>/dev/null
end
complete -c fourfold -f -n 'count (__fourfold_complete) >/dev/null' -a '(__fourfold_complete)'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


OPTIONS = (
    option("shell", "shell: bash, zsh or fish", "{bash,zsh,fish}", nargs="?"),
    # 'completion words ...' is what the scripts call: what follows 'fourfold', up to the cursor.
    option("words", "", nargs="...", rare=True),
)


def run(args: Any, show: OnEvent) -> Output:
    if args.shell == "words":
        return Output(raw="".join(f"{word}\n" for word in candidates(args.words)))
    if args.shell not in _SCRIPTS or args.words:
        raise UserError(
            "is required" if args.shell is None else "has no completion script",
            field="shell",
            value=" ".join([args.shell, *args.words]) if args.shell else None,
            hint=f"use {', '.join(_SCRIPTS)}",
        )
    return Output(raw=_SCRIPTS[args.shell])


def candidates(typed: list[str]) -> list[str]:
    """What may stand where the last word is; nothing for a place that takes any text or a file."""
    # bash cuts '--format=json' into three words.
    *before, current = [word for word in typed[:-1] if word != "="] + (typed[-1:] or [""])
    current = "" if current == "=" else current
    if not before or before == ["help"]:
        found: Iterable[str] = (*COMMANDS, *(() if before else ("help", "--help", "--version")))
    elif before[0] not in COMMANDS:
        found = ()
    else:
        flag, equals, value = current.partition("=")
        if current.startswith("--") and equals:
            values = _after(before[0], [*before[1:], flag], value)
            return [f"{flag}={word}" for word in values if word.startswith(value)]
        found = _after(before[0], before[1:], current)
    return [word for word in found if word.startswith(current)]


def _after(name: str, before: list[str], current: str) -> tuple[str, ...]:
    command = load(name)
    places = [i for i, word in enumerate(before) if word in command.actions]
    actions = () if places else tuple(command.actions)
    if places:  # the options of 'data make' once 'make' was typed
        command, before = command.actions[before[places[0]]], before[places[0] + 1 :]
    flags = {flag: one for one in command.options for flag in one.names if flag[0] == "-"}
    last = flags.get(before[-1]) if before else None
    if last is not None and _takes_value(last):
        return _values(name, last)
    if current.startswith("-"):
        return (*flags, "--help", "--help-all")
    free = [one for one in command.options if one.names[0][0] != "-" and one.help]
    given = sum(
        1
        for i, word in enumerate(before)
        if not word.startswith("-") and not (i and _takes_value(flags.get(before[i - 1])))
    )
    return (*(_values(name, free[given]) if given < len(free) else ()), *actions)


def _takes_value(one: Option | None) -> bool:
    return one is not None and not one.switch and not one.pair


def _values(command: str, one: Option) -> tuple[str, ...]:
    """Names and choices an argument takes, by the meaning its name has in every command."""
    if one.choices:
        return one.choices
    if (command, one.key) == ("completion", "shell"):
        return tuple(_SCRIPTS)
    if one.key == "model" or (command, one.key) == ("models", "name"):
        return tuple(catalog.model_names())
    if one.key == "gpu":
        return (*catalog.device_names(), *(("all",) if command == "clusters" else ()))
    if one.key == "cluster":
        return tuple(catalog.cluster_names())
    return {
        "convention": (*CONVENTIONS, *ALIASES),
        "precision": (*words.BUNDLES, "bf16"),
        "sharding": words.SHARDINGS,
        "cp_kind": words.CP_KINDS,
        "schedule": words.SCHEDULES,
        "recompute": (*words.RECOMPUTE, "every-2"),
    }.get(one.key, ())
