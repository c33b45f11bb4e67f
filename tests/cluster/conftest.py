"""The image, once for all tests, and the table at the end."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import matrix
from cluster.engine import ROOT, remove_leavings, require_engine
from cluster.harness import Cluster, cluster

BUILD_S = 900


@pytest.fixture(scope="session", autouse=True)
def image() -> None:
    """Built from this tree; quick where it was built before."""
    require_engine()
    remove_leavings()
    built = subprocess.run(
        [ROOT / "deploy/build.sh"], capture_output=True, text=True, timeout=BUILD_S, check=False, cwd=ROOT
    )
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Cluster]:
    """A network without nodes."""
    with cluster(tmp_path) as made:
        yield made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if matrix.ROWS:
        terminalreporter.section("what came of each fault")
        for line in matrix.table():
            terminalreporter.write_line(line)
