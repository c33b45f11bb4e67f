"""How hurrayd starts, fails to start, and stops."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hurray_wire.errors import DataPlaneUnavailable, NodeDraining
from hurray_wire.v1 import transfer_pb2 as pb
from hurray_wire.v1.transfer_pb2_grpc import TransferServiceStub
from support.daemon import (
    command,
    cpu_seconds,
    environment,
    eventually,
    running_daemon,
    state,
)
from support.raw import WAIT_S, Prepared, Put, RawClient, refusal, snapshot

pytest.importorskip("ucxx")
pytestmark = pytest.mark.ucx


def stalled(client: RawClient, key: str = "stalled") -> tuple[Prepared, Put]:
    """A put that has been accepted and stops in the middle of its pages."""
    prepared = Prepared.of(snapshot(layers=8, pages=64), chunk_bytes=8192)
    put = client.put(prepared, prepared.offer(key, client.incarnation), ready_tensors=4)
    put.accepted.result(WAIT_S)
    return prepared, put


def exit_status(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=40, check=False, env=environment()
    )


def test_a_port_that_is_taken_is_fatal() -> None:
    with running_daemon() as daemon:
        second = exit_status("--listen", daemon.address, "--arena", "2MiB")
        assert second.returncode == 1
        assert "cannot listen" in second.stderr
        assert daemon.address in second.stderr
        assert "ready" not in second.stdout
        assert daemon.node_state().ready


def test_a_data_plane_that_cannot_start_is_fatal_and_says_why(tmp_path: Path) -> None:
    path, names = tmp_path / "hurrayd.toml", tmp_path / "names"
    names.mkdir()
    path.write_text(f'listen = "127.0.0.1:0"\n[shm]\npath = "{names}/node.sock"\n')
    device = ("--net-device", "nosuchdevice0", "--ucx-trusted", "nosuchdevice0")
    failed = exit_status("--config", str(path), "--arena", "2MiB", *device)
    assert failed.returncode == 1
    assert "nosuchdevice0" in failed.stderr
    assert list(names.iterdir()) == []
    failed = exit_status("--config", str(path), "--arena", "60TiB")
    assert failed.returncode == 1
    assert "arena.bytes" in failed.stderr


def test_sigterm_lets_what_runs_finish_and_takes_nothing_new() -> None:
    with running_daemon() as daemon, RawClient(daemon.address) as client:
        prepared, put = stalled(client)
        daemon.terminate()
        eventually(lambda: daemon.logged("draining"), 5, "the drain begins")
        assert not client.stub.GetNode(pb.GetNodeRequest(), timeout=5).ready
        with pytest.raises(NodeDraining) as raised:
            client.transfer("other", snapshot())
        assert raised.value.stage == "offer"
        assert daemon.process.poll() is None
        client.plane.announce(put.number, len(prepared.plan.descriptors))
        assert put.over.result(WAIT_S) is None
        assert len(put.receipts) == 1
        assert daemon.wait() == 0


def test_an_administrator_drains_with_a_deadline_of_his_own() -> None:
    with running_daemon("drain_s = 600.0") as daemon, RawClient(daemon.address) as client:
        _, put = stalled(client)
        response = client.stub.Drain(pb.DrainRequest(deadline=Duration(nanos=300_000_000)), timeout=5)
        assert response.transfer_count == 1
        error = put.over.result(WAIT_S)
        assert isinstance(error, NodeDraining)
        assert error.stage == "pages"
        assert daemon.wait() == 0
        assert put.receipts == []


def test_a_second_signal_cuts_the_drain_short() -> None:
    with running_daemon("drain_s = 600.0") as daemon, RawClient(daemon.address) as client:
        _, put = stalled(client)
        waiting = client.stub.Get(
            iter(
                [
                    pb.GetRequest(
                        open=pb.GetOpen(
                            key="never",
                            request_id="6b0c4a1e-3f0e-4c53-9a86-0a7f2f1d5b11",
                            incarnation=client.incarnation,
                            transports=["ucx"],
                            wait=Duration(seconds=500),
                        )
                    )
                ]
            ),
            timeout=600,
        )
        client.stub.GetNode(pb.GetNodeRequest(), timeout=5)
        daemon.terminate()
        refused = refusal(lambda: next(waiting))
        assert isinstance(refused, NodeDraining)
        assert refused.stage == "wait"
        os.kill(daemon.pid, signal.SIGINT)
        assert isinstance(put.over.result(WAIT_S), NodeDraining)
        assert daemon.wait() == 0


def test_a_mover_does_not_outlive_its_daemon_and_ignores_signals_that_are_not_for_it() -> None:
    with running_daemon() as daemon:
        mover = daemon.mover_pid
        assert mover is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(mover, number)
        assert daemon.node_state().ready
        assert daemon.mover_pid == mover
        daemon.kill()
        eventually(lambda: state(mover) in (None, "Z"), 5, "the mover is gone")
        port = daemon.address.rpartition(":")[2]
        assert not listening(int(port))


def listening(port: int) -> bool:
    rows = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return any(row.split()[1].endswith(f":{port:04X}") and row.split()[3] == "0A" for row in rows)


def test_an_idle_daemon_with_a_connected_client_takes_no_time() -> None:
    with running_daemon() as daemon, RawClient(daemon.address) as client:
        client.transfer("k", snapshot())
        eventually(lambda: daemon.logged("arena prefaulted"), 10, "the start is over")
        mover = daemon.mover_pid
        assert mover is not None
        seconds = 4.0
        before, began = cpu_seconds(daemon.pid) + cpu_seconds(mover), time.monotonic()
        time.sleep(seconds)  # what is measured is the time that passes, nothing is waited for
        used = (cpu_seconds(daemon.pid) + cpu_seconds(mover) - before) / (time.monotonic() - began)
        assert used < 0.01, f"{used:.2%}"
        client.transfer("k2", snapshot())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_callers_may_come_before_the_daemon_and_before_its_data_plane() -> None:
    port = free_port()
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.initial_reconnect_backoff_ms", 100)]) as channel:
        early = TransferServiceStub(channel).GetNode.future(pb.GetNodeRequest(), timeout=30, wait_for_ready=True)
        hello = pb.SessionRequest(hello=pb.Hello(protocol_version=1, incarnation=5))
        refused = TransferServiceStub(channel).Session(iter([hello]), timeout=30, wait_for_ready=True)
        health = health_pb2_grpc.HealthStub(channel).Check.future(
            health_pb2.HealthCheckRequest(), timeout=30, wait_for_ready=True
        )
        with running_daemon(f'listen = "127.0.0.1:{port}"') as daemon:
            assert not early.result().ready
            assert health.result().status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert isinstance(refusal(lambda: next(refused)), DataPlaneUnavailable)
            assert daemon.node_state().ready
