"""The `fourfold` command: names, one help line each; a command is imported only when called."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, TextIO, cast

from fourfold import __version__, files
from fourfold.errors import UserError, nearest
from fourfold.escape import Screen, one_line

# name -> what it answers; the order is the order of work.
COMMANDS = {
    "demo": "the main job on this machine, start to end",
    "plan": "which layout is fastest on these GPUs, does it fit, how sure is that",
    "advise": "which hidden size, heads, vocabulary and micro batch suit a GPU",
    "models": "which model shapes are known, and how large they are",
    "clusters": "which GPUs and clusters are known; 'clusters new' describes yours",
    "flops": "MFU, HFU and TFLOPs of a measured speed, under every convention",
    "trace": "what every step of a parallel layer does: shapes, FLOPs, bytes, memory",
    "bench": "one run: how fast, how sure, what to doubt",
    "train": "train a model: data, schedule, checkpoints, resumed on any layout",
    "sweep": "many runs, every outcome kept, resumed where it stopped",
    "data": "token files: make one from text, look at one",
    "weights": "a training's weights as a Hugging Face folder",
    "runs": "what is stored: every run with outcome, speed and memory",
    "diff": "what differs between two stored runs, and whether it matters",
    "report": "results as people publish them: MPT, topology and scaling tables",
    "lint": "mistakes in published tables, found by rule, with the likely repair",
    "dryrun": "what any rank of any world would hold, compute and send, without hardware",
    "calibrate": "what this machine can do: a hardware profile for plan and demo",
    "predict": "a table of runs -> seconds, memory and fit of each",
    "fit": "measured runs -> a calibration; or which runs would teach most",
    "score": "a calibration against measured tables: errors, ranking, regret, coverage",
    "verify": "does every layout compute what one process computes? train both and compare",
    "completion": "a completion script for bash, zsh or fish",
}
_EPILOG = """\
Data goes to stdout, progress to stderr. Exit code: 0 done; 1 the asked thing failed, findings
were found, or nothing fits; 2 bad request. 'fourfold COMMAND --help' teaches each command.
"""


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UserErrors, so that every bad request reads the same."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message, hint=f"see '{self.prog} --help'")


def command_parser(name: str) -> Parser:
    """The parser of one command; imports that command's file and nothing else."""
    module = importlib.import_module(f"fourfold.commands.{name}")
    parser = Parser(
        prog=f"fourfold {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=getattr(module, "EXAMPLES", None),
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    # Completion asks every command's parser; commands do not import this module.
    parser.set_defaults(run=module.run, parsers=dict.fromkeys(COMMANDS, command_parser))
    return parser


def _overview() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {line}" for name, line in COMMANDS.items())
    return (
        "usage: fourfold COMMAND [options]\n\n"
        "How should this model be laid out on these GPUs, will it fit, how fast does it run?\n\n"
        f"commands:\n{rows}\n\n"
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
    except UserError as error:
        return _say(f"error: {error}", error.status)
    except KeyboardInterrupt:
        return _say("stopped", 130)
    except BrokenPipeError:
        _drop_stdout()  # the reader (head, less) has enough
        return 0
    except OSError as error:
        if error.filename is not None:  # a path nobody looked after: too long, a loop, no folder
            said = files.refused(error, error.filename, field="path", verb="used")
            return _say(f"error: {said}", said.status)
        _drop_stdout()
        return _say(f"error: stdout: cannot be written ({error.strerror}); free some space", 1)


def _say(message: str, code: int) -> int:
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # nobody is left to tell
            print(one_line(message), file=sys.stderr)
    return code


def _drop_stdout() -> None:
    """Keep Python from complaining when it closes a stdout that takes no more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        if len(words) > 1 and words[0] == "help":
            return _dispatch([words[1], "--help"])
        print(_overview(), end="")
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"fourfold {__version__}")
        return 0
    name, *rest = words
    if name not in COMMANDS:
        raise UserError(
            "unknown command", field="command", value=name, hint=nearest(name, COMMANDS)
        )
    try:
        args = command_parser(name).parse_args(rest)
    except SystemExit as leaving:  # argparse leaves this way after --help
        return int(leaving.code or 0)
    if isinstance(sys.stdout, Screen):
        sys.stdout.page = getattr(args, "format", "") == "md"
    return args.run(args)
