"""`make demo`, run once as people run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ucxx")

ROOT = Path(__file__).parents[2]


@pytest.mark.ucx
def test_the_demo_holds_all_it_checks() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "deploy.demo"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "All checks hold" in ran.stdout
    assert "all 120 tokens are those of decoding without a handoff" in ran.stdout
    for refusal in ("INVALID_CONTENTS", "GEOMETRY_MISMATCH"):
        assert refusal in ran.stdout
    assert "NO " not in ran.stdout
