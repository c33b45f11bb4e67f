"""hurrayctl doctor names the cause: on a host where much is wrong at once, and of a node that differs.

Injected is one thing: a CUDA install as pip leaves it, with a cupy that finds no driver. All else is as it would be.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sdk.test_node import free_port
from support.daemon import UCX_PORTS, environment, running_daemon
from support.identities import tls_table
from transport.certificates import Authority

pytest.importorskip("ucxx")
pytestmark = pytest.mark.ucx

CLOCK = Path(__file__).parent / "clock"
CUPY_WITHOUT_DRIVER = """
class cuda:
    class runtime:
        class CUDARuntimeError(RuntimeError):
            status = 35
        def getDeviceCount():
            raise cuda.runtime.CUDARuntimeError("cudaErrorInsufficientDriver")
        def driverGetVersion():
            return 0
"""
TINY = "mount -t tmpfs -o size=1m tiny /dev/shm"


@dataclass
class Report:
    """What doctor said."""

    status: int
    findings: list[dict[str, Any]]

    def of(self, check: str, status: str, *words: str) -> list[dict[str, Any]]:
        """Findings of a check with these words."""
        return [
            item
            for item in self.findings
            if (item["check"], item["status"]) == (check, status) and all(word in item["what"] for word in words)
        ]


def run(*arguments: str, prefix: Sequence[str] = (), **variables: str) -> Report:
    ports = {"HURRAY_UCX__FIRST_PORT": str(UCX_PORTS[0]), "HURRAY_UCX__LAST_PORT": str(UCX_PORTS[1])}
    ran = subprocess.run(
        [*prefix, str(Path(sys.executable).with_name("hurrayctl")), "doctor", *arguments, "--json"],
        env=environment(**(ports | variables)),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ran.stdout, ran.stderr
    found = json.loads(ran.stdout)
    assert found["ok"] == (ran.returncode == 0), found
    return Report(ran.returncode, found["findings"])


def can_make_shm_tiny() -> bool:
    return (
        os.geteuid() == 0
        and not subprocess.run(["unshare", "--mount", "sh", "-c", TINY], capture_output=True).returncode
    )


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    """A host with RDMA configured and not there, 64 KiB to lock, a tiny /dev/shm, cupy without a driver, an expired
    certificate, a port that this process has, and an advertised address where nobody listens."""
    folder = tmp_path_factory.mktemp("sick")
    installed = folder / "cupy_cuda12x-14.0.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: cupy-cuda12x\nVersion: 14.0.0\n")
    (folder / "cupy.py").write_text(CUPY_WITHOUT_DRIVER)
    node = Authority(folder).issue("node-x", spiffe="spiffe://hurray/node/x", expired=True, hosts=["localhost"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = folder / "hurrayd.toml"
        config.write_text(
            f'listen = "127.0.0.1:{free_port()}"\nadvertise = "127.0.0.2:{free_port()}"\n'
            f'[metrics]\nlisten = "127.0.0.1:{taken.getsockname()[1]}"\n'
            f'[ucx]\ntls = ["rc", "tcp"]\ntrusted = ["127.0.0.0/8"]\n[tls]\n{tls_table(node)[6:]}'
            f'[tls.data]\nlisten = "127.0.0.1:0"\n'
        )
        tiny = ["unshare", "--mount", "sh", "-c", f'{TINY} && exec "$@"', "-"] if can_make_shm_tiny() else []
        yield run("--config", str(config), prefix=[*tiny, "prlimit", "--memlock=65536"], PYTHONPATH=str(folder))


def test_a_sick_host_fails(sick: Report) -> None:
    assert sick.status == 1


def test_ucx_without_verbs(sick: Report) -> None:
    if sick.of("rdma", "failed", "no RDMA device:"):
        pytest.skip("UCX WITHOUT VERBS IS NOT TESTED: the one that is loaded has them")
    assert sick.of("rdma", "failed", "built without verbs", "libucp.so")


def test_memlock(sick: Report) -> None:
    assert sick.of("memlock", "failed", "64 KiB")


def test_a_port_that_is_taken(sick: Report) -> None:
    assert sick.of("ports", "failed", "metrics.listen", "is taken", f"(pid {os.getpid()})")


def test_an_advertised_address_that_leads_nowhere(sick: Report) -> None:
    assert sick.of("advertise", "failed", "127.0.0.2", "is not reached")


def test_a_certificate_that_has_expired(sick: Report) -> None:
    assert sick.of("certificates", "failed", "tls.certificate has expired", "node-x.pem", "was valid until")


def test_a_tiny_shared_memory(sick: Report) -> None:
    if not can_make_shm_tiny():
        pytest.skip("A TINY /dev/shm IS NOT TESTED: no mount namespace can be had")
    assert sick.of("dev_shm", "warning", "/dev/shm is tiny, 1 MiB")


def test_a_cuda_install_without_a_driver(sick: Report) -> None:
    assert sick.of("gpu", "failed", "cupy-cuda12x 14.0.0", "no NVIDIA driver")


def test_a_node_that_differs_in_segment_size_and_clock_and_is_not_where_it_says(tmp_path: Path) -> None:
    away = f"127.0.0.2:{free_port()}"
    variables = {"PYTHONPATH": str(CLOCK), "HURRAYTEST_CLOCK_S": "90"}
    with running_daemon(
        f'advertise = "{away}"\ntransports = ["ucx", "tcp"]\n[ucx]\ntcp_tx_seg_size_bytes = 524288', env=variables
    ) as daemon:
        listen = daemon.ready.partition(" listen=")[2].partition(" ")[0]
        found = run(listen)
    assert found.status == 1
    assert found.of("clock", "failed", "clock skew", "ahead of this one")
    assert found.of("advertise", "failed", away, "is not reached")
    (differs,) = found.of("bandwidth", "warning", "ucx: ", "seg_size differs: 1048576 here, 524288 there")
    assert "equal on all nodes" in differs["remedy"]
    (moved,) = found.of("bandwidth", "ok", "tcp: ", "GB/s")
    assert moved["facts"]["gigabytes_per_second"] > 0
    assert found.of("transport", "failed", "ucx.tcp_tx_seg_size"), "which is why nothing is moved unasked"


def test_a_node_that_runs_is_found_and_is_well() -> None:
    port = free_port()
    with running_daemon(f'listen = "127.0.0.1:{port}"\ntransports = ["tcp"]\nadvertise = "localhost:{port}"') as daemon:
        config = daemon.log_path.with_name("hurrayd.toml")
        found = run(daemon.address, "--config", str(config))
    assert found.status == 0, found
    assert found.of("transport", "ok", "tcp would be chosen")
    assert found.of("clock", "ok")
    assert found.of("node", "ok", "test runs at", "ready")
    assert found.of("advertise", "ok", "leads back here")
    assert not found.of("ports", "failed")
