"""Run one spec through the seam, without a store: `python -m fourfold.launch RUN.toml FOLDER`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from fourfold import files
from fourfold.errors import UserError
from fourfold.launch.local import run_job
from fourfold.launch.permit import Permit
from fourfold.spec import codec
from fourfold.spec.job import Job
from fourfold.spec.run import RunSpec
from fourfold.spec.variables import parse_assignments


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(prog="fourfold.launch", description=__doc__)
    parser.add_argument("spec", help="a run as TOML")
    parser.add_argument("folder", type=Path, help="where job, logs and report go")
    parser.add_argument("--job", choices=("run", "ping"), default="run")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--oversubscribe", action="store_true")
    args = parser.parse_args()
    try:
        spec = codec.from_toml(RunSpec, files.read_text(args.spec, field="spec"))
        permit = Permit(env=parse_assignments(args.env), oversubscribe=args.oversubscribe)
        env = tuple((dict(spec.policy.env) | dict(permit.env)).items())
        spec = replace(spec, policy=replace(spec.policy, env=env))
        job = Job(job=args.job, specs=(spec,))
        report = run_job(job, args.folder, progress=_say, permit=permit)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
    print(codec.to_json(report), end="")
    return 0 if report.outcome == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
