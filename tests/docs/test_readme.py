"""What README.md tells people to run, does run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deploy.demo.processes import daemon
from hurray_server.config import load_config
from hurray_wire.errors import HurrayError

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_its_make_targets_exist() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"\bmake ([a-z][a-z-]+)", "".join(blocks("sh"))))
    assert {"demo", "test"} <= named <= set(re.findall(r"make ([a-z-]+)", listed))


def test_its_reasons_are_those_there_are() -> None:
    table = README[README.index("| reason |") : README.index("## UCX with RDMA")]
    named = set(re.findall(r"`([A-Z]+(?:_[A-Z]+)*)`", table))
    every = {error.reason for error in HurrayError.__subclasses__() if error.__module__ == HurrayError.__module__}
    assert named == every - ELSEWHERE


def test_its_sdk_example_runs_against_a_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HURRAY_SHM__PATH", str(tmp_path / "readme.sock"))
    (example,) = blocks("python")
    names: dict[str, Any] = {}
    with daemon("readme", tmp_path) as address:
        exec(example.replace("127.0.0.1:7411", address), names)
    assert names["receipt"].transport == "shm"
    assert names["receipt"].dirty_dead_slot_count == 0
    assert (names["keys"] == 1).all()
    assert names["keys"].shape == (6, 2, 64)
    into = names["caches"][3, "key"]
    assert (into[7] == 1).all()  # six tokens of the first sequence, whose first page the second shares
    assert (into[5, :2] == 1).all()
    assert not into[5, 2:].any()
    assert not into[[0, 1, 2, 3, 4, 6]].any()


def test_its_configuration_is_one_that_hurrayd_takes(tmp_path: Path) -> None:
    for number, block in enumerate(blocks("toml")):
        path = tmp_path / f"{number}.toml"
        path.write_text(block)
        assert load_config(path, {}).ucx.net_devices


ELSEWHERE = {"CANCELLED", "MISUSE"}
"""Of the caller's own making."""
