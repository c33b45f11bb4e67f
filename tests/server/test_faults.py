"""Processes die in the middle of things: what the others are told, how soon, and what is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import hurray_client as ht
from hurray_wire.errors import DataPlaneUnavailable, HurrayError, KeyNotFound, SnapshotLost
from hurray_wire.v1 import transfer_pb2 as pb
from support.daemon import UCX_PORTS, RunningDaemon, environment, eventually, running_daemon
from support.raw import WAIT_S, Prepared, Put, RawClient, Stream, refusal, snapshot

pytest.importorskip("ucxx")
pytestmark = pytest.mark.ucx

TESTS = Path(__file__).parents[1]


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> str:
    """A key of the test's own: the daemon is shared."""
    return str(request.node.name)


def connect(daemon: RunningDaemon) -> ht.Client:
    ucx = {"first_port": UCX_PORTS[0], "last_port": UCX_PORTS[1]}
    return ht.connect(daemon.address, config=ht.ClientConfig(ucx=ucx))  # type: ignore[arg-type]


@contextmanager
def stalled_source(daemon: RunningDaemon, key: str) -> Iterator[subprocess.Popen[str]]:
    """A process that stopped in the middle of a put."""
    with subprocess.Popen(
        [sys.executable, "-m", "support.stalled_source", daemon.address, key],
        stdout=subprocess.PIPE,
        env=environment(PYTHONPATH=str(TESTS)),
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "stalled\n"
            yield process
        finally:
            process.kill()


def stalled_put(client: RawClient, key: str) -> tuple[Prepared, Put]:
    prepared = Prepared.of(snapshot(layers=8, pages=64), chunk_bytes=8192)
    put = client.put(prepared, prepared.offer(key, client.incarnation), ready_tensors=4)
    put.accepted.result(WAIT_S)
    return prepared, put


def settled(daemon: RunningDaemon) -> bool:
    arena = daemon.node_state().arena
    return arena.receiving_bytes == arena.quarantined_bytes == 0


# --- the source dies ------------------------------------------------------------------------------------------------


def test_the_death_of_a_source_is_reported_within_two_seconds_and_holds_nothing(
    daemon: RunningDaemon, fresh: str
) -> None:
    with connect(daemon) as other:
        other.put("undisturbed", snapshot())
        before = daemon.node_state().arena
        with stalled_source(daemon, fresh) as source:
            assert daemon.node_state().arena.receiving_bytes > 0
            source.kill()
            killed_s = time.monotonic()
            failed = eventually(lambda: daemon.logged("transfer failed", key=fresh), 2, "the failure is logged")
            eventually(lambda: daemon.node_state().arena == before, 2 - (time.monotonic() - killed_s), "all is free")
        assert failed[0]["reason"] == "PEER_UNAVAILABLE"
        assert {"transfer", "peer", "tenant", "request_id"} <= failed[0].keys()
        assert other.put(fresh, snapshot()).generation > 0
        with other.get("undisturbed") as got:
            assert got.tokens(layer=0, role="key", seq=1).shape == (3, 2, 8)


def test_a_session_whose_process_died_is_closed(daemon: RunningDaemon, fresh: str) -> None:
    with stalled_source(daemon, fresh) as source:
        peer = daemon.logged("session opened")[0]["peer"]
        source.kill()
        eventually(
            lambda: daemon.logged("session closed", peer=peer) or daemon.logged("session lost", peer=peer), 2, "closed"
        )


# --- the stream breaks ----------------------------------------------------------------------------------------------


def test_a_stream_cut_in_the_middle_leaves_no_trace(daemon: RunningDaemon, fresh: str) -> None:
    with RawClient(daemon.address) as client:
        before = daemon.node_state().arena
        _, put = stalled_put(client, fresh)
        put.stream.cut()
        ended = put.ended.result(WAIT_S)
        assert ended.error is not None
        eventually(lambda: daemon.node_state().arena == before, 5, "all is free")
        assert isinstance(refusal(lambda: client.stub.Stat(pb.StatRequest(key=fresh), timeout=5)), KeyNotFound)


def test_a_stream_cut_after_the_commit_is_resolved_by_a_retry(daemon: RunningDaemon, fresh: str) -> None:
    with RawClient(daemon.address) as client:
        prepared = Prepared.of(snapshot())
        offer = prepared.offer(fresh, client.incarnation)
        put = client.put(prepared, offer)
        stat = eventually(lambda: committed(client, fresh), 5, "committed")
        put.stream.cut()
        client.plane.stop()
    with RawClient(daemon.address) as client:  # another incarnation of the source
        retry = client.put(prepared, prepared.offer(fresh, client.incarnation, request_id=offer.request_id))
        assert retry.over.result(WAIT_S) is None
        assert [receipt.generation for receipt in retry.receipts] == [stat.snapshot.generation]
        assert not retry.accepted.done()


def test_a_stream_cut_with_the_last_byte_has_one_outcome(daemon: RunningDaemon, fresh: str) -> None:
    with RawClient(daemon.address) as client:
        prepared = Prepared.of(snapshot(layers=4))
        count = len(prepared.plan.chunks)
        for round_ in range(12):
            key = f"{fresh}/{round_}"
            offer = prepared.offer(key, client.incarnation)

            def cut_after_the_last(put: Put, message: pb.SourceMessage) -> bool:
                put.stream.send(pb.PutRequest(source=message))
                if message.checksums.first_chunk + len(message.checksums.values) == count:
                    threading.Timer(0.0004 * round_, put.stream.cut).start()  # noqa: B023 -- runs within the round
                return False

            first = client.put(prepared, offer, on_checksums=cut_after_the_last)
            first.ended.result(WAIT_S)
            receipts = [*first.receipts, *retried(client, prepared, offer).receipts]
            assert len({receipt.generation for receipt in receipts}) == 1
            assert committed(client, key).snapshot.generation == receipts[0].generation
        assert len(client.stub.List(pb.ListRequest(prefix=f"{fresh}/"), timeout=5).snapshots) == 12
        eventually(lambda: settled(daemon), 5, "all is settled")


def retried(client: RawClient, prepared: Prepared, offer: pb.Offer) -> Put:
    """The put that at last gave a receipt, with the request id of the first."""
    for _ in range(20):
        put = client.put(prepared, offer)
        error = put.over.result(WAIT_S)
        if error is None:
            return put
        assert error.code == "UNAVAILABLE", error
        put.ended.result(WAIT_S)
        client.connect()
        offer.incarnation = client.incarnation
    raise AssertionError("no retry came through")


def committed(client: RawClient, key: str) -> pb.StatResponse | None:
    try:
        return client.stub.Stat(pb.StatRequest(key=key), timeout=5)
    except Exception:
        return None


# --- the daemon dies ------------------------------------------------------------------------------------------------


def test_the_death_of_a_daemon_is_unavailable_and_names_the_stage(fresh: str) -> None:
    with running_daemon() as daemon, RawClient(daemon.address) as client:
        _, put = stalled_put(client, fresh)
        daemon.kill()
        error = put.over.result(5)
        assert error is not None
        assert error.code == "UNAVAILABLE"
        ended = put.ended.result(5)
        assert ended.error is not None
        assert (ended.error.code, ended.error.stage) == ("UNAVAILABLE", "pages")


def test_a_client_of_a_dead_daemon_gets_its_error_within_its_deadline(fresh: str) -> None:
    with running_daemon() as daemon, connect(daemon) as client, ThreadPoolExecutor(1) as thread:
        client.put(fresh, snapshot())
        began_s = time.monotonic()
        waiting = thread.submit(client.get, "never", wait_s=60, timeout_s=3)
        daemon.kill()
        with pytest.raises(HurrayError) as caught:
            waiting.result(30)
        assert time.monotonic() - began_s < 4
        assert caught.value.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
        assert caught.value.stage


# --- the mover dies -------------------------------------------------------------------------------------------------


def test_the_death_of_a_mover_fails_what_runs_loses_what_is_held_and_is_over_soon(
    daemon: RunningDaemon, fresh: str
) -> None:
    with RawClient(daemon.address) as client:
        client.transfer("held", snapshot())
        _, put = stalled_put(client, fresh)
        health = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert next(health).status == health_pb2.HealthCheckResponse.SERVING
        session, old_mover = client.session, daemon.kill_mover()
        killed_s = time.monotonic()

        error = put.over.result(5)
        assert isinstance(error, DataPlaneUnavailable)
        assert error.stage == "pages"
        assert put.ended.result(5).error is not None
        assert session is not None
        assert session.read() is None
        assert isinstance(session.error, DataPlaneUnavailable)
        assert next(health).status == health_pb2.HealthCheckResponse.NOT_SERVING
        lost = refusal(lambda: client.stub.Stat(pb.StatRequest(key="held"), timeout=5))
        assert isinstance(lost, SnapshotLost)

        assert next(health).status == health_pb2.HealthCheckResponse.SERVING
        assert time.monotonic() - killed_s < 5
        health.cancel()
        assert daemon.mover_pid not in (None, old_mover)
        arena = daemon.node_state().arena
        assert arena.free_bytes == arena.total_bytes
        client.connect()
        client.transfer("held", snapshot())
        client.transfer(fresh, snapshot())


def test_a_receipt_of_what_a_mover_took_with_it_is_not_given_again(daemon: RunningDaemon, fresh: str) -> None:
    with RawClient(daemon.address) as client:
        prepared = Prepared.of(snapshot())
        offer = prepared.offer(fresh, client.incarnation)
        first = client.put(prepared, offer)
        assert first.over.result(WAIT_S) is None
        daemon.kill_mover()
        eventually(lambda: not daemon.node_state().ready, 5, "down")
        eventually(lambda: daemon.node_state().ready, 5, "up again")
        client.connect()
        again = client.put(prepared, offer)
        assert again.over.result(WAIT_S) is None
        assert again.receipts[0].generation > first.receipts[0].generation
        assert committed(client, fresh) is not None


def test_a_client_goes_on_after_the_death_of_a_mover(daemon: RunningDaemon) -> None:
    with connect(daemon) as client:
        client.put("before", snapshot())
        daemon.kill_mover()
        assert client.put("after", snapshot()).generation > 0
        with client.get("after") as got:
            assert got.tokens(layer=0, role="key", seq=0).shape == (6, 2, 8)
        with pytest.raises(SnapshotLost):
            client.get("before")


# --- a peer that does not do its part ------------------------------------------------------------------------------


def test_a_target_that_never_accepts_gives_back_its_pin(daemon: RunningDaemon, fresh: str) -> None:
    with RawClient(daemon.address) as client:
        client.transfer(fresh, snapshot())
        stream = Stream(client.stub.Get, timeout_s=1.0)
        opening = pb.GetOpen(
            key=fresh, request_id=str(uuid.uuid4()), incarnation=client.incarnation, transports=["ucx"]
        )
        stream.send(pb.GetRequest(open=opening))
        while stream.read() is not None:
            pass
        assert stream.error is not None
        assert stream.error.code == "DEADLINE_EXCEEDED"
        eventually(lambda: committed(client, fresh).snapshot.reader_count == 0, 5, "unpinned")


def test_a_source_that_stalls_runs_out_of_its_budget(daemon: RunningDaemon, fresh: str) -> None:
    with RawClient(daemon.address) as client:
        prepared = Prepared.of(snapshot(layers=8, pages=64), chunk_bytes=8192)
        put = client.put(prepared, prepared.offer(fresh, client.incarnation), ready_tensors=4, budget_s=1.0)
        error = put.over.result(WAIT_S)
        assert error is not None
        assert (error.code, error.stage) == ("DEADLINE_EXCEEDED", "announce")
        eventually(lambda: settled(daemon), 5, "settled")
        client.transfer(fresh, snapshot())


def test_a_stopped_client_is_noticed_by_its_silence() -> None:
    script = (
        "import sys, hurray_client as ht\n"
        "with ht.connect(sys.argv[1]) as client:\n"
        "    client.get('never', wait_s=100, timeout_s=100)\n"
    )
    ports = {"HURRAY_UCX__FIRST_PORT": str(UCX_PORTS[0]), "HURRAY_UCX__LAST_PORT": str(UCX_PORTS[1])}
    with (
        running_daemon() as daemon,
        subprocess.Popen([sys.executable, "-c", script, daemon.address], env=environment(**ports)) as client,
    ):
        try:
            eventually(lambda: bool(daemon.logged("session opened")), 20, "the client has a session")
            client.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            eventually(lambda: bool(daemon.logged("session closed")), 30, "its session is closed")
            assert time.monotonic() - began < 20, "by the keepalive: the call itself has 100 s"
        finally:
            client.kill()
