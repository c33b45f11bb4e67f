"""Two containers that share nothing but a Unix socket hand a cache over through shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster import matrix
from cluster.engine import docker
from cluster.harness import PORT, TENANT, Cluster
from cluster.matrix import Row

pytestmark = pytest.mark.timeout(200)


def test_over_shm_through_a_shared_socket_alone(bare: Cluster) -> None:
    """Their /dev/shm are as small as they come and not the same, and neither are their IPC and PID namespaces."""
    node = bare.make_node("node-a", arena_mib=600)
    node.start()
    agent = bare.make_agent("agent", beside="node-a")
    agent.start()
    for do in ("put", "get"):
        said = agent.ask(do=do, key=f"{TENANT}/one", node=f"node-a:{PORT}", transport="shm", mib=256, budget_s=30)
        assert (said["reason"], said["transport"]) == ("OK", "shm"), said
    for namespace in ("ipc", "pid", "mnt", "net", "uts"):
        assert len({inode(container.pid, namespace) for container in (node, agent)}) == 2, namespace
    for container in (node, agent):
        assert docker("inspect", "--format", "{{.HostConfig.ShmSize}}", container.name) == str(64 << 20)
        assert docker("exec", container.name, "ls", "/dev/shm") == ""
    node.clear()
    books = node.balanced()
    matrix.ROWS.append(Row("only a socket shared, /dev/shm of 64 MB", "shm", "committed, got", None, books, True))
    assert books == "balanced"


def inode(pid: int, namespace: str) -> str:
    return str(Path(f"/proc/{pid}/ns/{namespace}").readlink())
