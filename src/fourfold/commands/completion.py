"""A completion script for bash, zsh or fish: commands, flags, choices and catalogue names.

The script asks fourfold itself at each TAB and so never grows stale; files where no name fits.
"""

from __future__ import annotations

import argparse
import typing
from collections.abc import Callable, Iterable, Mapping

from fourfold.cost.count.flops import ALIASES, CONVENTIONS
from fourfold.errors import UserError
from fourfold.spec import catalog, policy

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
# Command -> what makes its parser, given its name.
Parsers = Mapping[str, Callable[[str], argparse.ArgumentParser]]
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", nargs="?", metavar="{bash,zsh,fish}", help="whose script to print")
    # 'completion words ...' is what the scripts call: what follows 'fourfold', up to the cursor.
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    if args.shell == "words":
        print("".join(f"{word}\n" for word in candidates(args.words, args.parsers)), end="")
        return 0
    if args.shell not in _SCRIPTS or args.words:
        raise UserError(
            "is missing" if args.shell is None else "is not a shell with a script",
            field="shell",
            value=" ".join([args.shell, *args.words]) if args.shell else None,
            hint=f"fourfold completion {'|'.join(_SCRIPTS)}",
        )
    print(_SCRIPTS[args.shell], end="")
    return 0


def candidates(words: list[str], parsers: Parsers) -> list[str]:
    """What may stand where the last word is; nothing for a place that takes any text or a file."""
    # bash cuts '--format=json' into three words.
    *before, current = [word for word in words[:-1] if word != "="] + (words[-1:] or [""])
    current = "" if current == "=" else current
    if not before or before == ["help"]:
        found: Iterable[str] = (*parsers, *(() if before else ("help", "--help", "--version")))
    elif before[0] not in parsers:
        found = ()
    else:
        flag, equals, typed = current.partition("=")
        if current.startswith("--") and equals:
            values = _after(before[0], [*before[1:], flag], typed, parsers)
            return [f"{flag}={value}" for value in values if value.startswith(typed)]
        found = _after(before[0], before[1:], current, parsers)
    return [word for word in found if word.startswith(current)]


def _after(command: str, before: list[str], current: str, parsers: Parsers) -> tuple[str, ...]:
    actions, before = _within(parsers[command](command), before)
    options = {name: action for action in actions for name in action.option_strings}
    last = options.get(before[-1]) if before else None
    if last is not None and last.nargs != 0:
        return _values(command, last)
    if current.startswith("-"):
        return tuple(name for name, action in options.items() if action.help != argparse.SUPPRESS)
    free = [action for action in actions if not action.option_strings]
    given = sum(
        1
        for i, word in enumerate(before)
        if not word.startswith("-") and not (i and _takes_value(options.get(before[i - 1])))
    )
    return _values(command, free[given]) if given < len(free) else ()


def _within(
    parser: argparse.ArgumentParser, before: list[str]
) -> tuple[list[argparse.Action], list[str]]:
    """The arguments that count here: those of 'data make' once 'make' was typed."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for i, word in enumerate(before):
                if word in action.choices:
                    return action.choices[word]._actions, before[i + 1 :]
    return parser._actions, before


def _takes_value(action: argparse.Action | None) -> bool:
    return action is not None and action.nargs != 0


def _values(command: str, action: argparse.Action) -> tuple[str, ...]:
    """Names and choices an argument takes, by the meaning its name has in every command."""
    if action.choices is not None:
        return tuple(map(str, action.choices))
    if (command, action.dest) == ("completion", "shell"):
        return tuple(_SCRIPTS)
    if action.dest == "model" or (command, action.dest) == ("models", "name"):
        return tuple(catalog.model_names())
    if action.dest == "gpu":
        return (*catalog.device_names(), *(("all",) if command == "clusters" else ()))
    if action.dest == "cluster":
        return (*catalog.cluster_names(), *(("new",) if command == "clusters" else ()))
    return {
        "convention": (*CONVENTIONS, *ALIASES),
        "precision": (*policy.BUNDLES, "bf16"),
        "sharding": typing.get_args(policy.Sharding),
        "cp_kind": typing.get_args(policy.CpKind),
        "schedule": typing.get_args(policy.Schedule),
        "recompute": ("none", "full", "selective", "every-2"),
    }.get(action.dest, ())
