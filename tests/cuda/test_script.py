"""tests/gpu/run.sh where it cannot run: it says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "gpu" / "run.sh"


def run(folder: Path, path: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": path, "PYTHON": sys.executable, "OUT": str(folder / "out"), "TMPDIR": str(folder)}
    return subprocess.run(
        ["bash", SCRIPT], env=env, cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )


def test_without_a_driver_it_says_so(tmp_path: Path) -> None:
    ran = run(tmp_path, "/usr/bin:/bin")

    assert ran.returncode == 3
    assert "no NVIDIA driver here" in ran.stderr


def test_without_cupy_it_names_what_is_missing(tmp_path: Path) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 0, NVIDIA H200, 580.00, 143771 MiB\n")
    driver.chmod(0o755)

    ran = run(tmp_path, f"{tmp_path}:/usr/bin:/bin")

    assert ran.returncode == 3
    assert "cupy: No module named 'cupy'" in ran.stderr
    assert [path.name for path in tmp_path.iterdir() if "work" in path.name] == []
