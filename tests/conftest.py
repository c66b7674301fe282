"""Settings of all tests: no wall-clock limits, since machines are shared and noisy; which tests
`./test --quick` runs, which `.ci/run` runs again on every other Python, and which need torch.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from fourfold.launch import ranks
from tests import warm
from tests.cli import Cli
from tests.sampling import PROFILE, examples

settings.register_profile(
    "fourfold",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=examples(200),
)
settings.load_profile("fourfold")

HERE = Path(__file__).parent
# By path below tests/, so that a new file of these folders is found without being marked.
QUICK = (
    "test_*.py", "spec/*", "cost/*", "result/*", "show/test_micro.py",
    "tables/test_document.py", "tables/test_publish*.py", "search/test_legal.py",
    "search/test_export*.py", "laws/test_counts.py", "laws/test_ramp.py",
    "laws/test_legal_columns.py", "laws/test_pipeline_events.py", "conformance/test_cell.py",
    "commands/test_refused.py",
)  # fmt: skip
# Of those, the ones that take seconds each: fits, whole pages of docs, start-up in fresh processes.
NOT_QUICK = (
    "test_docs.py", "test_environment.py", "test_library.py", "test_start.py", "cost/test_fit*.py",
    "cost/test_strangers.py", "spec/test_hf_counts.py", "cost/test_folds.py", "cost/test_routed.py",
    "laws/test_counts.py", "result/test_checkpoints.py", "test_files.py", "spec/test_words.py",
)  # fmt: skip
# What depends on the interpreter: files, pickles, processes, signals, text forms of types.
PORTABLE = (
    "engine/test_checkpoint*.py", "engine/test_launch*.py",
    "engine/test_run_job.py", "engine/test_tensor_file.py", "launch/*", "result/*",
    "spec/test_round_trip.py", "spec/test_words.py", "spec/test_expression.py", "test_files.py",
    "test_units.py",
)  # fmt: skip
# Mutilated inputs by the hundred. Together with the tests that open pages in a browser (`view`)
# they are run by `.ci/run` and `./test --all`.
FUZZ = ("laws/test_inputs.py", "laws/test_store_attacks.py")
# These start ranks, which import torch, or import it themselves.
NEEDS_TORCH = (
    "engine/*", "launch/*", "commands/test_bench*.py", "commands/test_train.py",
    "commands/test_sweep*.py", "commands/test_demo.py", "commands/test_verify.py",
    "conformance/test_lab.py", "conformance/test_compare.py", "traces/test_on_cores.py",
)  # fmt: skip

# Half a minute and more of each file.
LONG_FILES = (
    "engine/*", "search/test_plan.py", "conformance/test_lab.py", "search/test_fastest.py",
    "page/*", "test_docs.py", *FUZZ,
)  # fmt: skip

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = list(NEEDS_TORCH)


def _is_one_of(path: Path, patterns: tuple[str, ...]) -> bool:
    # fnmatch's * matches slashes too, and 'test_*.py' must mean this folder alone.
    name = path.relative_to(HERE).as_posix()
    return any(fnmatch(name, pattern) for pattern in patterns if ("/" in pattern) == ("/" in name))


def _is_quick(path: Path) -> bool:
    return _is_one_of(path, QUICK) and not _is_one_of(path, NOT_QUICK)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """`./test --quick` does not import the other files: they import torch. Other interpreters have
    only what the tests for them need."""
    if not collection_path.is_file() or HERE not in collection_path.parents:
        return None
    is_left_out = (PROFILE == "quick" and not _is_quick(collection_path)) or (
        PROFILE == "portable" and not _is_one_of(collection_path, PORTABLE)
    )
    return is_left_out or None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, help="skip what was not begun by then, in any order")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Workers take whole files; those that start with ranks must not be the last of one of them.
    items.sort(key=lambda item: not _is_one_of(item.path, LONG_FILES))
    if config.getoption("--minutes"):
        # An order by the seed, or another each time, and the same in every worker; what takes
        # longer is for --all.
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")
        random.Random(config.getoption("--hypothesis-seed") or run).shuffle(items)
        items[:] = [item for item in items if item.get_closest_marker("timeout") is None]
    for item in items:
        if _is_quick(item.path) and item.get_closest_marker("slow") is None:
            item.add_marker("quick")
        if _is_one_of(item.path, PORTABLE):
            item.add_marker("portable")
        if _is_one_of(item.path, FUZZ) or "view" in getattr(item, "fixturenames", ()):
            item.add_marker("outside")


def pytest_collection_finish() -> None:
    """Modules and collected tests are not garbage: the collector, which a dry run asks for twice,
    need not walk them again each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _only_new_garbage() -> None:
    """Nor what earlier files left."""
    gc.freeze()


_BEGAN_S = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    if minutes and time.monotonic() - _BEGAN_S > 60 * minutes:
        pytest.skip(f"not reached in {minutes:g} minutes")


def pytest_sessionstart() -> None:
    """A shell starts background jobs with SIGINT ignored, and children inherit that; a umask or a
    locale of the caller must not decide either. Tests that are about these set their own."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.pop("COLUMNS", None)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # many ranks on few cores


@pytest.fixture(scope="session", autouse=True)
def _warm_workers() -> Iterator[None]:
    """Workers are forked from a process that has imported torch, which starts with the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "subprocess", warm.SUBPROCESS)
        yield
    warm.end()


@pytest.fixture(autouse=True)
def _cold_start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("cold_start"):
        monkeypatch.setattr(ranks, "subprocess", subprocess)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)
