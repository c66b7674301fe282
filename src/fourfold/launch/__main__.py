"""Runs one spec without a store: `python -m fourfold.launch RUN.toml FOLDER`."""

from __future__ import annotations

import getopt
import sys
from dataclasses import replace
from pathlib import Path

from fourfold import files
from fourfold.errors import UserError
from fourfold.launch.local import run_job
from fourfold.launch.permit import Permit
from fourfold.result.job import Job, JobReport
from fourfold.spec import RunSpec, codec
from fourfold.spec.site import parse_assignments

USAGE = """\
usage: python -m fourfold.launch [OPTION]... RUN.toml FOLDER
Run one spec; job file, logs and report go into FOLDER, the report to standard output.
  --job run|ping     train (run), or only let every rank answer (ping)
  --env NAME=VALUE   set a variable for the ranks; may be repeated
  --oversubscribe    allow more ranks than this host has room for"""
_OPTIONS = ["help", "job=", "env=", "oversubscribe"]
_JOBS = ("run", "ping")


def main(argv: list[str] | None = None) -> int:
    try:
        options, words = getopt.gnu_getopt(sys.argv[1:] if argv is None else argv, "h", _OPTIONS)
        if {"-h", "--help"} & {name for name, _ in options}:
            print(USAGE)
            return 0
        report = _run(options, words)
    except getopt.GetoptError as error:
        print(f"{USAGE}\nerror: {error.msg}", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
    print(codec.to_json(report), end="")
    return 0 if report.outcome == "ok" else 1


def _run(options: list[tuple[str, str]], words: list[str]) -> JobReport:
    if len(words) != 2:
        raise getopt.GetoptError(f"expected RUN.toml and FOLDER, not {len(words)} arguments")
    kind = dict(options).get("--job", "run")
    if kind not in _JOBS:
        raise getopt.GetoptError(f"--job is {' or '.join(_JOBS)}, not '{kind}'")
    variables = parse_assignments([value for name, value in options if name == "--env"])
    permit = Permit(env=variables, oversubscribe="--oversubscribe" in dict(options))
    spec = codec.from_toml(RunSpec, files.read_text(words[0], field="spec"))
    env = tuple((dict(spec.policy.env) | dict(permit.env)).items())
    job = Job(job=kind, specs=(replace(spec, policy=replace(spec.policy, env=env)),))
    return run_job(job, Path(words[1]), progress=_to_stderr, permit=permit)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
