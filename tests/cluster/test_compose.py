"""`make cluster-up` and `cluster-down`, as people type them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

from cluster import matrix
from cluster.engine import ROOT, docker
from cluster.matrix import Row
from support.daemon import eventually

pytestmark = pytest.mark.timeout(600)

PROJECT = f"hurray-test-{os.getpid()}"
OURS = ("--filter", f"label=com.docker.compose.project={PROJECT}")


def make(target: str) -> str:
    command = ["make", target, f"PROJECT={PROJECT}"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-5000:]
    return ran.stdout


@pytest.mark.skipif(
    shutil.which("docker-compose") is None and not docker("compose", "version", check=False),
    reason="COMPOSE IS NOT TESTED: it is not there",
)
def test_the_cluster_of_compose() -> None:
    """Within a minute decode says that its tokens are those of prefill; later, too, and after a node was killed."""
    try:
        said = make("cluster-up")
        first = [json.loads(line[line.index("{") :]) for line in said.splitlines() if '"verdict"' in line]
        assert len(first) == 3
        assert {line["verdict"] for line in first} == {"equal"}
        decode, node = container("decode"), container("node-b")
        eventually(lambda: {"shm", "ucx"} <= {line["transport"] for line in lines(decode)}, 60, "by both transports")
        docker("restart", "--time", "0", node)
        before = len(lines(decode))
        eventually(
            lambda: "node-b:7411" in {line["node"] for line in lines(decode)[before:]}, 60, "the node is used again"
        )
        assert {line["verdict"] for line in lines(decode)} == {"equal"}
        tokens = sum(line["tokens"] for line in lines(decode))
        matrix.ROWS.append(Row("compose, one node killed", "shm, ucx", f"{tokens} tokens, all equal", None, "", True))
    finally:
        make("cluster-down")
    assert not docker("ps", "--all", "--quiet", *OURS)
    assert not docker("volume", "ls", "--quiet", *OURS)


def container(service: str) -> str:
    return docker("ps", "--quiet", *OURS, "--filter", f"label=com.docker.compose.service={service}")


def lines(worker: str) -> list[dict[str, object]]:
    """What a worker has to say of its batches."""
    said = map(json.loads, docker("logs", worker).splitlines())
    return [line for line in said if "verdict" in line]
