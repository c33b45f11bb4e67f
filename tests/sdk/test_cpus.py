"""The threads that move bytes stay on the CPUs that they were given, and no other thread is kept anywhere."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

import hurray_client as ht
from hurray_wire.cpus import read_cpus
from tests.sdk.snapshots import make_snapshot
from tests.support.daemon import START_S, RunningDaemon, command, environment, running_daemon

ALLOWED = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("2", {2}), ("0-3,8", {0, 1, 2, 3, 8}), (" 1 , 1-2", {1, 2}), ("7-7", {7})],
)
def test_a_list_as_people_write_it(text: str, cpus: set[int]) -> None:
    assert read_cpus(text) == cpus


@pytest.mark.parametrize("text", ["", "a", "-1", "1-", "3-1", "1,,2", "0-100000", "1-2-3", "\u0663"])
def test_what_is_no_list(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no list of CPUs"):
        read_cpus(text)
    monkeypatch.setenv("HURRAY_CPUS", text)
    with pytest.raises(ht.InvalidRequest) as caught:
        ht.LocalDataPlane()
    assert caught.value.field == "cpus"


@pytest.mark.skipif(len(ALLOWED) < 2, reason="with one CPU there is no other to stay off")
@pytest.mark.parametrize("transport", ["shm"], indirect=True)
def test_both_sides_keep_to_theirs(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = ALLOWED[:2]
    with running_daemon(env={"HURRAY_TRANSFERS__CPUS": str(target)}) as daemon:
        assert daemon.mover_pid is not None
        monkeypatch.setenv("HURRAY_CPUS", str(source))
        monkeypatch.setenv("HURRAY_SHM__PATH", daemon.shm_path)
        before = _kept(os.getpid())
        with ht.connect(daemon.address) as client:
            assert client.put("kept", make_snapshot()).transport == transport
            assert _kept(os.getpid()) - before == {(source,)}
            assert _kept(daemon.mover_pid) == {(target,)}
            assert _kept(daemon.pid) == set()


def test_a_cpu_that_is_not_to_be_had_is_refused(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HURRAY_CPUS", "60000")
    with ht.connect(daemon.address) as client, pytest.raises(ht.DataPlaneUnavailable) as caught:
        client.put("kept", make_snapshot())
    assert (caught.value.field, caught.value.details["offered"]) == ("cpus", "60000")
    assert caught.value.details["required"] == f"some of {','.join(map(str, ALLOWED))}"
    started = subprocess.run(
        command("--listen", "127.0.0.1:0", "--arena", "1MiB"),
        env=environment(HURRAY_TRANSFERS__CPUS="60000"),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert started.returncode == 1
    assert "cpus" in started.stderr, started.stderr


def _kept(pid: int) -> set[tuple[int, ...]]:
    """What the threads of a process are kept to that may not run on all CPUs."""
    found = {tuple(sorted(os.sched_getaffinity(thread))) for thread in _threads(pid)}
    return found - {tuple(ALLOWED)}


def _threads(pid: int) -> Iterable[int]:
    return (int(path.name) for path in Path(f"/proc/{pid}/task").iterdir())
