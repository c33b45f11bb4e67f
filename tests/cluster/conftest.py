"""The image, once for all tests, and the table at the end."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import matrix
from cluster.harness import Cluster, cluster
from cluster.engine import ROOT, Engine, remove_leavings, require_engine

BUILD_S = 900


@pytest.fixture(scope="session")
def image() -> None:
    """Built from this tree; quick where it was built before."""
    require_engine()
    built = subprocess.run(
        [ROOT / "deploy/build.sh"], capture_output=True, text=True, timeout=BUILD_S, check=False, cwd=ROOT
    )
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]


@pytest.fixture(scope="module")
def engine(image: None) -> Iterator[Engine]:
    remove_leavings()
    made = Engine()
    try:
        yield made
    finally:
        made.remove_all()


@pytest.fixture(scope="module")
def bare(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A network without nodes."""
    with cluster(engine, tmp_path_factory.mktemp("pki")) as made:
        yield made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if matrix.ROWS:
        terminalreporter.section("what came of each fault")
        for line in matrix.table():
            terminalreporter.write_line(line)
