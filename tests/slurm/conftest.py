"""One cluster for all tests here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.local_slurm import LocalSlurm, why_not
from tests.slurm.user import User


@pytest.fixture(scope="session")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[LocalSlurm]:
    reason = why_not()
    if reason and os.environ.get("FOURFOLD_SLURM") == "1":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    made = LocalSlurm(tmp_path_factory.mktemp("slurm"))
    terminal = request.config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None:
        terminal.write_line(f"\nSlurm of {len(made.names)} nodes: {made.kind}")
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def user(cluster: LocalSlurm, tmp_path: Path) -> Iterator[User]:
    """Leaves an empty queue and nodes on which nothing of a job runs."""
    yield User(cluster, tmp_path)
    left = cluster.jobs()
    cluster.run(["scancel", *left]) if left else None
    cluster.wait_for(lambda: not cluster.jobs(), "the queue to be empty")
    assert not left, f"jobs {left} were left"
