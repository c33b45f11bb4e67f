"""A node that is stopped in the middle of a put and comes back later must not take the source's process with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdk.ports import WIDE_PORTS

pytestmark = pytest.mark.ucx


def test_a_stopped_node_that_comes_back_harms_nobody() -> None:
    script = Path(__file__).with_name("stopped_peer.py")
    environment = {**os.environ, **WIDE_PORTS, "HURRAY_UCX__USER_TIMEOUT_S": "1"}
    ran = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    *outcomes, last = ran.stdout.splitlines()
    assert last == "alive"
    assert {outcome.split()[0] for outcome in outcomes} <= {"DEADLINE_EXCEEDED", "OUTCOME_UNKNOWN", "COMMITTED"}
