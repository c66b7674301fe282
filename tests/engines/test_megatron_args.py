"""Megatron-LM's own parser and checks take what plans export, on the two newest minor releases of
megatron-core whose wheel has them, and hold what was planned.

What can't be installed here is stood in for (megatron_args.py names it). A check that asks such a
stand-in says nothing: the options that raise one are listed here, and are not shown to start.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.spec.engine import EXPORTS
from tests.engines.megatron_plans import KINDS, case_of, expected_values, exported
from tests.engines.sampled import asked, verdict

PLANS = 24
# Options whose check asks Transformer Engine for a version or a kernel.
BY_TRANSFORMER_ENGINE = {
    "--position-embedding-type",
    "--moe-permute-fusion",
    "--moe-grouped-gemm",
    "--fp8-format",
    "--fp4-format",
    "--recompute-granularity",  # of norms and experts' activations, in fp8
    "--recompute-modules",
}
PINS = (Path(__file__).parents[2] / "scripts" / "engines.txt").read_text()


@pytest.mark.parametrize("release", ["megatron", "megatron-0.18"])
def test_plans_are_accepted_and_read_back_equal(release: str, tmp_path: Path, capsys) -> None:
    plans = exported(PLANS)
    told = asked(release, [case_of(*plan) for plan in plans], tmp_path, "--options")
    wrong = []
    for plan, answer in zip(plans, told["answers"], strict=True):
        want, found = expected_values(*plan), answer.get("values", {})
        differ = {name: (value, found.get(name)) for name, value in want.items()
                  if found.get(name) != value}  # fmt: skip
        if "error" in answer or differ:
            wrong.append((str(plan[1].choice), answer.get("error", differ)))
    assert not wrong, wrong
    unproved = {
        option for one in told["asked"] if one["asked"] != "GPU" for option in one["options"]
    }
    assert unproved <= BY_TRANSFORMER_ENGINE, told["asked"]
    by = f"its parse_args and validate_args ({', '.join(KINDS)})"
    with capsys.disabled():
        print(verdict(release, len(plans), by, told["answers"], sorted(unproved)))


def test_the_export_names_the_newest_release_that_is_tested() -> None:
    for engine in ("megatron", "megatron-0.16"):
        version = EXPORTS[engine].release.rpartition(" ")[2]
        assert f"{engine}: {EXPORTS[engine].export.package}=={version}" in PINS.splitlines()
