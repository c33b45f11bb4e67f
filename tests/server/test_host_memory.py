"""Memory that a control group withholds counts as not there."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hurray_server.host_memory import available_memory
from support.daemon import command, environment

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with 8 GiB to give, and no control group."""
    write(tmp_path / "proc/meminfo", f"MemTotal: {16 << 20} kB\nMemAvailable:    {8 << 20} kB\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def v2(root: Path, group: str, limit: object, usage: int, inactive_file: int = 0) -> None:
    folder = root / "sys/fs/cgroup" / group
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{usage}\n")
    write(folder / "memory.stat", f"anon 5\ninactive_file {inactive_file}\nactive_file 7\n")


def available(root: Path) -> tuple[int, str]:
    found = available_memory(root)
    assert found is not None
    return found.nbytes, found.limited_by.rpartition("/")[0].removeprefix(f"the control group's {root}/")


def test_without_groups_it_is_the_host(root: Path) -> None:
    found = available_memory(root)
    assert found is not None
    assert (found.nbytes, found.limited_by) == (8 * GIB, "the host")


def test_a_host_that_tells_nothing(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None


def test_the_group_of_the_process_and_what_it_has_taken(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/pods/a\n")
    v2(root, "pods/a", 2 * GIB, GIB, inactive_file=GIB // 2)
    assert available(root) == (3 * GIB // 2, "sys/fs/cgroup/pods/a")


def test_a_group_above_it_may_allow_less(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/pods/a\n")
    v2(root, "pods/a", "max", 0)
    v2(root, "pods", 5 * GIB, 4 * GIB)
    assert available(root) == (GIB, "sys/fs/cgroup/pods")


def test_in_a_container_the_group_is_the_root(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    v2(root, "", GIB, GIB // 4)
    assert available(root) == (3 * GIB // 4, "sys/fs/cgroup")


def test_the_groups_of_older_hosts(root: Path) -> None:
    write(root / "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/box\n0::/box\n")
    folder = root / "sys/fs/cgroup/memory/box"
    write(folder / "memory.limit_in_bytes", f"{GIB}\n")
    write(folder / "memory.usage_in_bytes", f"{GIB // 2}\n")
    write(folder / "memory.stat", f"cache 1\ninactive_file 3\ntotal_inactive_file {GIB // 4}\n")
    assert available(root) == (3 * GIB // 4, "sys/fs/cgroup/memory/box")


def test_more_used_than_allowed_is_nothing(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/a\n")
    v2(root, "a", GIB, 2 * GIB)
    assert available(root)[0] == 0


LIMITS = {"sys/fs/cgroup/memory": "memory.limit_in_bytes", "sys/fs/cgroup": "memory.max"}


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of this host that allows 256 MiB."""
    for mount, name in LIMITS.items():
        folder = Path("/", mount, f"hurray-test-{uuid.uuid4().hex[:8]}")
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / name).write_text(str(256 << 20))
        except OSError:
            folder.rmdir()
            continue
        yield folder
        folder.rmdir()
        return
    pytest.skip("NO CONTROL GROUP IS TESTED: this process cannot make one that limits memory")


def test_a_daemon_whose_arena_its_group_does_not_allow_says_so_and_does_not_start(group: Path) -> None:
    refused = subprocess.run(
        [sys.executable, "-c", JOIN, str(group), *command("--listen", "127.0.0.1:0", "--arena", "1GiB")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment(HURRAY_UCX__FIRST_PORT="21000", HURRAY_UCX__LAST_PORT="29999"),
    )
    assert refused.returncode == 1
    assert "arena.bytes" in refused.stderr
    assert str(group) in refused.stderr


JOIN = """
import os, pathlib, sys
pathlib.Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
os.execv(sys.argv[2], sys.argv[2:])
"""
