"""The `fourfold` command: an overview, and a parser for each command."""

from __future__ import annotations

import argparse  # noqa: TID251 -- here alone
import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

from fourfold.commands import COMMANDS, GROUPS, Command, load
from fourfold.errors import MachineError, UserError, nearest
from fourfold.escape import FORMATS, Screen, one_line
from fourfold.installed import __version__

if TYPE_CHECKING:
    from fourfold.flag import Arguments, Option

# What argparse says of a flag -> what we say, after the flag's name.
_ARGPARSE = (
    (r"invalid choice: '(.*?)' \(choose from (.*)\)", r"\1 is not one of \2"),
    (r"invalid int value: (.*)", r"\1 is not a whole number"),
    (r"invalid float value: (.*)", r"\1 is not a number"),
    (r"expected one argument", "needs a value"),
    (r"expected (.*)", r"expects \1"),
    (r"not allowed with argument (.*)", r"cannot be combined with \1"),
)
_EPILOG = """\
Results go to stdout, progress to stderr. Exit status: 0 done; 1 the run failed, the lint found
something, or nothing fits; 2 bad request. 'fourfold COMMAND --help' explains each command.
"""


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UserErrors, so that every bad request reads the same."""

    def error(self, message: str) -> NoReturn:
        raise UserError(_plain(message), hint=self._hint(message))

    def _hint(self, message: str) -> str:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        # Without their dashes, which all have in common.
        flags = (flag.lstrip("-") for flag in self.flags().values() if flag != "--help")
        close = nearest(unknown[0].lstrip("-"), flags) if unknown and unknown[0] != "help" else ""
        if close.startswith("did you mean"):
            return close.replace("'", "'--", 1)
        places = [str(action.metavar or action.dest) for action in self._get_positional_actions()]
        plain = f"write {places[0]} without a flag, or " if unknown and places else ""
        return f"{plain}see '{self.prog} --help'"

    def flags(self) -> dict[str, str]:
        """The name of a value in the parsed arguments -> the long flag that sets it."""
        names = self._option_string_actions.items()
        return {action.dest: name for name, action in names if not name.startswith("--no-")}


def _plain(message: str) -> str:
    """A sentence of argparse with the flag as its subject."""
    flag, colon, rest = message.removeprefix("argument ").partition(": ")
    flag = flag.rpartition("/")[2]
    if message.startswith("unrecognized arguments: "):
        return f"unknown option {rest}"
    if message.startswith("the following arguments are required: "):
        return f"{rest} is required" if ", " not in rest else f"{rest} are required"
    if not message.startswith("argument ") or not colon:
        return message
    for was, now in _ARGPARSE:
        if re.match(was, rest):
            return f"{flag} {re.sub(was, now, rest)}"
    return f"{flag} {rest}"


def command_parser(name: str, action: str = "", *, everything: bool = True) -> Parser:
    """The parser of one command or sub-command. Its help leaves rare options out unless
    `everything` is asked for; they are read all the same."""
    command = load(name)
    prog = f"fourfold {name}"
    if action:
        command = command.actions[action]
        prog = f"{prog} {action}"
    rare = [] if everything else [one for one in command.options if one.rare]
    more = f"\nmore options ({len(rare)}): '{prog} --help-all'\n" if rare else ""
    parser = Parser(
        prog=prog,
        description=command.description,
        # argparse's own way to the width imports every compressor.
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=_help_columns()),
        epilog=_actions_text(command) + command.examples + more,
        allow_abbrev=False,
    )
    places: dict[tuple[str, str], Any] = {}
    for one in command.options:
        _add(_place(parser, one, places), one, hidden=one in rare)
    parser.set_defaults(run=command.run)
    return parser


def _help_columns() -> int:
    try:
        return int(os.environ.get("COLUMNS") or os.get_terminal_size().columns) - 2
    except (OSError, ValueError):
        return 78


def _actions_text(command: Command) -> str:
    lines = [f"  {name:<8} {action.line}" for name, action in command.actions.items()]
    return "\n".join(["sub-commands:", *lines, "", ""]) if lines else ""


def _place(parser: Parser, one: Option, places: dict[tuple[str, str], Any]) -> Any:
    """The parser, a group of it, or options of which at most one may be given."""
    place: Any = parser
    if one.group:
        key = ("group", one.group)
        place = places[key] = places.get(key) or parser.add_argument_group(one.group)
    if one.either:
        key = ("either", one.either)
        place = places[key] = places.get(key) or place.add_mutually_exclusive_group()
    return place


def _add(place: Any, one: Option, *, hidden: bool) -> None:
    keywords: dict[str, Any] = {
        "help": argparse.SUPPRESS if hidden else one.help.replace("%", "%%")
    }
    if one.names[0].startswith("-"):
        keywords["dest"] = one.key
        keywords |= {"required": True} if one.required else {}
    if one.pair:
        place.add_argument(*one.names, action=argparse.BooleanOptionalAction, **keywords)
    elif one.switch:
        place.add_argument(*one.names, action="store_true", default=None, **keywords)
    else:
        keywords |= {"action": "append"} if one.repeated else {}
        keywords |= {"type": _reader(one.read)} if one.read else {}
        keywords |= {"choices": one.choices} if one.choices else {}
        keywords |= {"nargs": one.nargs} if one.nargs else {}
        place.add_argument(*one.names, metavar=one.metavar, **keywords)


def _reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A field's reader for argparse, which puts the flag's name before the reason."""

    def reader(text: str) -> Any:
        try:
            return read(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    reader.__name__ = getattr(read, "__name__", "value")
    return reader


def _overview() -> str:
    width = max(map(len, COMMANDS))
    groups = "\n\n".join(
        f"{group}:\n" + "\n".join(f"  {name:<{width}}  {line}" for name, line in lines.items())
        for group, lines in GROUPS.items()
    )
    return (
        "usage: fourfold COMMAND [options]\n\n"
        "Plan, measure and train 4D-parallel pretraining layouts.\n\n"
        f"{groups}\n\n"
        "options:\n  --help     this page\n  --version  version of fourfold\n\n"
        f"{_EPILOG}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Never shows a traceback for something the user can fix."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file name need not be text; printing one must not fail.
        sys.stdout.reconfigure(errors="backslashreplace")
    streams = sys.stdout, sys.stderr
    # They are None when the caller closed them.
    sys.stdout, sys.stderr = (stream and cast(TextIO, Screen(stream)) for stream in streams)
    try:
        return _answered(words)
    finally:
        sys.stdout, sys.stderr = streams


def _answered(words: list[str]) -> int:
    try:
        code = _dispatch(words)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except MachineError as error:  # a job's last words may be several lines
        return _say(f"error: {error}", error.status, lines=True)
    except UserError as error:
        return _say(f"error: {error}", error.status)
    except KeyboardInterrupt:
        return _say("stopped", 130)
    except BrokenPipeError:
        _drop_stdout()  # the reader (head, less) has enough
        return 0
    except OSError as error:
        if error.filename is not None:  # a path nobody looked after: too long, a loop, no folder
            from fourfold import files

            refused = files.refused(error, error.filename, field="path", verb="used")
            return _say(f"error: {refused}", refused.status)
        _drop_stdout()
        return _say(f"error: stdout cannot be written ({error.strerror}); free some space", 1)


def _say(message: str, code: int, *, lines: bool = False) -> int:
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # nobody is left to tell
            print(message if lines else one_line(message), file=sys.stderr)
    return code


def _drop_stdout() -> None:
    """Keep Python from complaining when it closes a stdout that takes no more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview(), end="")
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"fourfold {__version__}")
        return 0
    name, *rest = words
    action = _action(name, rest)
    everything = "--help-all" in rest
    parser = command_parser(name, action, everything=everything)
    if everything:
        print(parser.format_help(), end="")
        return 0
    try:
        args = parser.parse_args(rest[bool(action) :])
    except SystemExit as leaving:  # argparse leaves this way after --help
        return int(leaving.code or 0)
    return _run(parser, args)


def _action(name: str, rest: list[str]) -> str:
    """The sub-command, '' where the command has none or runs without one."""
    if name not in COMMANDS:
        raise UserError(
            "unknown command", field="command", value=name, hint=nearest(name, COMMANDS)
        )
    command = load(name)
    if rest and rest[0] in command.actions:
        return rest[0]
    if (
        command.actions
        and command.run is None
        and rest[:1] not in (["-h"], ["--help"], ["--help-all"])
    ):
        raise UserError(
            "needs a sub-command" if not rest else "is not a sub-command",
            field=f"fourfold {name}" if not rest else "",
            value=" ".join(rest) or None,
            hint=f"use 'fourfold {name} {'|'.join(command.actions)}'",
        )
    return ""


def _run(parser: Parser, args: Arguments) -> int:
    from fourfold.output import Stderr, terminal_columns, text_of

    # The last format given; 'weights export' has two kinds of them.
    given = getattr(args, "format", None) or "text"
    styles = [given] if isinstance(given, str) else given
    style = next((style for style in reversed(styles) if style in FORMATS), "text")
    if isinstance(sys.stdout, Screen):
        sys.stdout.page = style == "md"
    show = Stderr()
    try:
        output = args.run(args, show)
    except UserError as error:
        from fourfold.options import by_flag  # 10 ms, only paid on an error

        raise by_flag(error, args, parser.flags()) from None
    finally:
        show.close()
    text = text_of(output, style, terminal_columns(sys.stdout))
    if text:
        print(text)
    return output.status
