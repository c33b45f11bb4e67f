"""The connection to a node: start order, loss, restarts, versions, errors that come back as what they were."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest

import hurray_client as ht
from hurray_client.call import Alarms, Call
from hurray_client.config import load_config
from hurray_client.node import Node, retrying
from hurray_wire import errors
from hurray_wire.image import Chunk
from hurray_wire.source_payloads import SnapshotSource
from hurray_wire.status import STATUS_TRAILER, to_status
from hurray_wire.target_payloads import ScatterTarget
from hurray_wire.v1 import transfer_pb2 as pb
from hurray_wire.v1 import transfer_pb2_grpc
from sdk.snapshots import assert_same_tokens, make_caches, make_snapshot
from support.daemon import RunningDaemon, eventually, running_daemon


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def large_snapshot() -> ht.KVSnapshot:
    """A thousand chunks of 4096 bytes."""
    caches = make_caches(layers=4, num_pages=128, page_size=16, heads=4, head_dim=32)
    return make_snapshot(caches, tables=[list(range(128))], counts=[2048])


SMALL_CHUNKS = ht.ClientConfig(chunk_bytes=4096, window=1)


def at_chunk(
    monkeypatch: pytest.MonkeyPatch, payload: type[SnapshotSource | ScatterTarget], action: Callable[[], object]
) -> None:
    """Have `action` run in the data-plane thread, once, when chunk 20 is staged or has arrived."""
    name = "stage" if payload is SnapshotSource else "arrived"
    original = getattr(payload, name)

    def method(self: Any, chunk: Chunk, *others: Any) -> Any:
        if chunk.index == 20:
            monkeypatch.setattr(payload, name, original)
            action()
        return original(self, chunk, *others)

    monkeypatch.setattr(payload, name, method)


# --- nodes that are not there -----------------------------------------------------------------------------------------


def test_nobody_listens() -> None:
    config = ht.ClientConfig(retry_s=0.3)
    with ht.connect(f"127.0.0.1:{free_port()}", config=config) as client:
        for ask in (
            lambda: client.put("k", make_snapshot()),
            lambda: client.get("k"),
            lambda: client.stat("k"),
            lambda: client.delete("k"),
            client.node,
        ):
            began = time.monotonic()
            with pytest.raises(ht.PeerUnavailable) as caught:
                ask()
            assert caught.value.stage == "connect"
            assert 0.05 < time.monotonic() - began < 3


def test_the_budget_bounds_the_retries() -> None:
    with ht.connect(f"127.0.0.1:{free_port()}") as client:
        began = time.monotonic()
        with pytest.raises(ht.HurrayError) as caught:
            client.put("k", make_snapshot(), timeout_s=0.3)
        assert caught.value.stage == "connect"
        assert caught.value.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
        assert time.monotonic() - began < 2


def test_a_node_that_does_not_answer_costs_no_more_than_the_budget() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        ht.connect(f"127.0.0.1:{silent.getsockname()[1]}") as client,
    ):
        began = time.monotonic()
        with pytest.raises(ht.HurrayError) as caught:
            client.put("k", make_snapshot(), timeout_s=0.3)
        assert caught.value.stage == "connect"
        assert time.monotonic() - began < 2


@pytest.mark.parametrize("target", ["", "a b:1", "a\n:1"])
def test_targets_that_make_no_sense(target: str) -> None:
    with pytest.raises(ht.InvalidRequest) as caught:
        ht.connect(target)
    assert caught.value.field == "target"


# --- loss -------------------------------------------------------------------------------------------------------------


def test_a_daemon_killed_in_the_middle_is_unavailable_and_a_new_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    listen = f'listen = "127.0.0.1:{port}"'
    with running_daemon(listen) as daemon, ht.connect(daemon.address, config=SMALL_CHUNKS) as client:
        client.put("before", make_snapshot())
        at_chunk(monkeypatch, SnapshotSource, daemon.kill)
        began = time.monotonic()
        with pytest.raises(ht.HurrayError) as caught:
            client.put("during", large_snapshot(), timeout_s=20)
        assert caught.value.code == "UNAVAILABLE"
        assert caught.value.stage in ("pages", "receipt", "cancel", "data_plane")
        assert time.monotonic() - began < 10
        with running_daemon(listen):
            snapshot = make_snapshot()
            client.put("after", snapshot)
            assert_same_tokens(snapshot, client.get("after"))
            with pytest.raises(ht.KeyNotFound):
                client.get("before")


def test_a_mover_killed_in_the_middle_is_unavailable_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_daemon() as daemon, ht.connect(daemon.address, config=SMALL_CHUNKS) as client:
        client.put("before", make_snapshot())
        at_chunk(monkeypatch, SnapshotSource, daemon.kill_mover)
        began = time.monotonic()
        with pytest.raises(ht.HurrayError) as caught:
            client.put("during", large_snapshot(), timeout_s=20)
        assert caught.value.code == "UNAVAILABLE"
        assert caught.value.stage is not None
        client.put("after", make_snapshot(), timeout_s=20)
        assert time.monotonic() - began < 10
        with pytest.raises(ht.SnapshotLost):
            client.get("before")


@pytest.mark.parametrize("kind", ["put", "get"])
def test_a_lost_connection_that_the_session_has_not_seen_yet_is_no_error(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Nothing has moved without a connection: another attempt finds a new one, also after an offer and its Accept."""
    seen = threading.Event()
    settle, pause = Node.settle, Call.pause

    def settle_late(self: Node, session: Any, state: Any, error: Any) -> None:
        assert state.value != "lost" or seen.wait(10)
        settle(self, session, state, error)

    with ht.connect(daemon.address) as client:
        client.put("k", make_snapshot())
        mover = daemon.mover_pid
        assert mover is not None

        def pause_and_let_go(self: Call, seconds: float) -> None:
            if not seen.is_set():
                os.kill(mover, signal.SIGCONT)
                seen.set()
            pause(self, seconds)

        monkeypatch.setattr(Node, "settle", settle_late)
        monkeypatch.setattr(Call, "pause", pause_and_let_go)
        os.kill(mover, signal.SIGSTOP)  # it must not tell the node, nor that one this client
        try:
            session = client._node._session
            assert session is not None
            session.plane.close_peer(session.peer, abort=True).result(10)
            if kind == "put":
                client.put("k", make_snapshot(), overwrite=True)
            else:
                client.get("k")
        finally:
            os.kill(mover, signal.SIGCONT)
            seen.set()
        assert seen.is_set()
        client.delete("k")


def test_a_stopped_daemon_costs_the_budget_and_says_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    listen = f'listen = "127.0.0.1:{free_port()}"'
    with ExitStack() as stack:
        daemon = stack.enter_context(running_daemon(listen))
        client = stack.enter_context(ht.connect(daemon.address, config=SMALL_CHUNKS))
        client.put("before", make_snapshot())
        mover = daemon.mover_pid
        assert mover is not None

        def stop() -> None:
            os.kill(daemon.pid, signal.SIGSTOP)
            os.kill(mover, signal.SIGSTOP)

        at_chunk(monkeypatch, SnapshotSource, stop)
        began = time.monotonic()
        with pytest.raises(ht.HurrayError) as caught:
            client.put("during", large_snapshot(), timeout_s=1)
        assert caught.value.code in ("DEADLINE_EXCEEDED", "UNAVAILABLE")
        assert caught.value.stage in ("pages", "receipt", "cancel", "connect")
        assert time.monotonic() - began < 6
        daemon.kill_mover()
        daemon.kill()
        stack.enter_context(running_daemon(listen))
        client.put("after", make_snapshot(), timeout_s=20)


def test_a_failed_get_into_clears_the_named_pages_and_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_daemon("[transfers]\nchunk_bytes = 4096") as daemon, ht.connect(daemon.address) as client:
        snapshot = large_snapshot()
        client.put("k", snapshot)
        caches = make_caches(layers=4, seed=5, num_pages=130, page_size=16, heads=4, head_dim=32)
        kept = {key: array[[0, 129]].copy() for key, array in caches.items()}
        at_chunk(monkeypatch, ScatterTarget, daemon.kill_mover)
        with pytest.raises(ht.HurrayError) as caught:
            client.get(
                "k",
                into=caches,
                block_tables=[list(range(1, 129))],
                timeout_s=20,
            )
        assert caught.value.code == "UNAVAILABLE"
        assert caught.value.details["cleared_pages"] == "1-128"
        for key, array in caches.items():
            assert not array[1:129].any()
            assert (array[[0, 129]] == kept[key]).all()


# --- lifetime ---------------------------------------------------------------------------------------------------------


def test_a_closed_client_does_nothing(daemon: RunningDaemon) -> None:
    client = ht.connect(daemon.address)
    client.node()
    client.close()
    client.close()
    for ask in (
        lambda: client.put("k", make_snapshot()),
        lambda: client.get("k"),
        lambda: client.stat("k"),
        lambda: next(client.list()),
        lambda: client.delete("k"),
        lambda: client.renew("k"),
        client.drain,
        client.node,
    ):
        with pytest.raises(ht.Misuse):
            ask()


def test_close_ends_the_session_in_an_orderly_way(daemon: RunningDaemon) -> None:
    with ht.connect(daemon.address) as client:
        client.put("orderly", make_snapshot())
        client.delete("orderly")
        before = len(daemon.logged("session closed", aborted=False))
    eventually(lambda: len(daemon.logged("session closed", aborted=False)) == before + 1, 5)


def test_close_ends_what_runs(daemon: RunningDaemon) -> None:
    client = ht.connect(daemon.address)
    client.node()
    with futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.get, "never", wait_s=60)
        eventually(lambda: client._calls, 5)
        began = time.monotonic()
        client.close()
        with pytest.raises(ht.Cancelled):
            waiting.result(10)
        assert time.monotonic() - began < 5


def test_no_threads_are_left(daemon: RunningDaemon) -> None:
    before = set(threading.enumerate())
    with ht.connect(daemon.address) as client:
        client.put("threads", make_snapshot())
        client.get("threads", consume=True)
    ours = {"hurray-alarms", "hurray-dataplane", "hurray-progress"}
    left = [thread for thread in set(threading.enumerate()) - before if thread.name in ours or "session" in thread.name]
    assert left == []


def test_a_forked_child_is_told(daemon: RunningDaemon) -> None:
    with ht.connect(daemon.address) as client:
        # As if forked: a fork with gRPC's threads running is not to be tried.
        actual, client._pid = client._pid, client._pid + 1
        with pytest.raises(ht.Misuse) as caught:
            client.node()
        client._pid = actual
    assert "fork" in str(caught.value)


# --- a node that says what it is told to ------------------------------------------------------------------------------


class Scripted(transfer_pb2_grpc.TransferServiceServicer):
    """Answers GetNode, and everything else with one error."""

    def __init__(self) -> None:
        self.error: errors.HurrayError | None = None
        self.bare: grpc.StatusCode | None = None
        self.version = 1
        self.asked: list[str] = []

    def GetNode(self, request: Any, context: Any) -> pb.GetNodeResponse:
        return pb.GetNodeResponse(protocol_version=self.version, node="scripted", transports=[pb.Transport(kind="ucx")])

    def Stat(self, request: Any, context: Any) -> pb.StatResponse:
        self.asked.append("Stat")
        if self.bare is not None:
            context.abort(self.bare, "as the script says")
        if self.error is not None:
            context.set_trailing_metadata(((STATUS_TRAILER, to_status(self.error).SerializeToString()),))
            context.abort(getattr(grpc.StatusCode, self.error.code), self.error.message)
        return pb.StatResponse()

    Delete = Session = Stat


@contextmanager
def served(script: Scripted) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    transfer_pb2_grpc.add_TransferServiceServicer_to_server(script, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.fixture
def script() -> Scripted:
    return Scripted()


@pytest.fixture
def scripted(script: Scripted) -> Iterator[ht.Client]:
    with served(script) as address, ht.connect(address, config=ht.ClientConfig(retry_s=0.2)) as client:
        yield client


ALL_ERRORS = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.HurrayError)),
    key=lambda kind: kind.reason,
)


@pytest.mark.parametrize("kind", [kind for kind in ALL_ERRORS if kind.reason not in ("UNSPECIFIED", "REMOTE")])
def test_errors_come_back_as_what_they_were(
    kind: type[errors.HurrayError], script: Scripted, scripted: ht.Client
) -> None:
    script.error = kind("no", field="page_size", offered=1, required=2, retry_after_s=0.01)
    with pytest.raises(errors.HurrayError) as caught:
        scripted.stat("k")
    assert type(caught.value) is kind
    assert (caught.value.field, caught.value.details["offered"]) == ("page_size", "1")
    assert caught.value.retry_after_s == pytest.approx(0.01)
    again = kind.code == "UNAVAILABLE" and kind is not errors.NodeDraining
    assert (len(script.asked) > 1) == again


def test_what_is_not_safe_to_repeat_is_not_repeated(script: Scripted, scripted: ht.Client) -> None:
    script.error = errors.DataPlaneUnavailable("no")
    with pytest.raises(ht.DataPlaneUnavailable):
        scripted.delete("k")
    assert len(script.asked) == 1


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INTERNAL, ht.RemoteError),
        (grpc.StatusCode.UNIMPLEMENTED, ht.Unsupported),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ht.LimitExceeded),
        (grpc.StatusCode.UNAVAILABLE, ht.PeerUnavailable),
        (grpc.StatusCode.CANCELLED, ht.PeerUnavailable),  # of a node that stops: whoever cancels a call knows it before
    ],
)
def test_bare_codes_get_a_class_too(
    code: grpc.StatusCode, kind: type[ht.HurrayError], script: Scripted, scripted: ht.Client
) -> None:
    script.bare = code
    with pytest.raises(kind) as caught:
        scripted.stat("k")
    assert caught.value.stage == "stat"


@pytest.mark.parametrize("version", [0, 2])
def test_another_version_of_the_protocol_is_refused(version: int, script: Scripted, scripted: ht.Client) -> None:
    script.version = version
    for ask in (lambda: scripted.stat("k"), lambda: scripted.put("k", make_snapshot()), scripted.node):
        with pytest.raises(ht.CapabilityMismatch) as caught:
            ask()
        assert caught.value.field == "protocol_version"
        assert (caught.value.details["offered"], caught.value.details["required"]) == (str(version), "1")
    assert script.asked == []


def test_a_session_that_is_refused_is_the_error_of_the_put(script: Scripted, scripted: ht.Client) -> None:
    script.error = errors.CapabilityMismatch("other segment sizes", field="ucx.tcp_tx_seg_size", offered=1, required=2)
    with pytest.raises(ht.CapabilityMismatch) as caught:
        scripted.put("k", make_snapshot())
    assert caught.value.field == "ucx.tcp_tx_seg_size"
    script.error = errors.NodeDraining("soon gone")
    with pytest.raises(ht.NodeDraining):
        scripted.put("k", make_snapshot())


# --- settings, budgets, alarms ----------------------------------------------------------------------------------------


def test_settings_come_from_the_environment_when_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HURRAY_UCX__NET_DEVICES", "lo,eth7")
    monkeypatch.setenv("HURRAY_UCX__FIRST_PORT", "7430")
    monkeypatch.delenv("HURRAY_UCX__LAST_PORT")
    monkeypatch.setenv("HURRAY_RETRY_S", "3")
    monkeypatch.setenv("HURRAY_LISTEN", "the daemon's, not ours")
    config = load_config()
    assert config.ucx.net_devices == ("lo", "eth7")
    assert (config.ucx.first_port, config.ucx.last_port) == (7430, 7439)
    assert config.retry_s == 3


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("HURRAY_RETRY_S", "-1", "retry_s"),
        ("HURRAY_CHUNK_BYTES", "5000", "chunk_bytes"),
        ("HURRAY_UCX__NET_DEVICES", "[lo", "ucx"),
        ("HURRAY_UCX__FIRST_PORT", "80", "ucx.first_port"),
        ("HURRAY_TRANSPORTS", "shm,pigeon", "transports"),
        ("HURRAY_TRANSPORTS", "shm,shm", "transports"),
        ("HURRAY_SHM__PATH", "relative", "shm.path"),
    ],
)
def test_settings_that_make_no_sense(monkeypatch: pytest.MonkeyPatch, name: str, value: str, field: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises((ht.InvalidRequest, ht.Misuse)) as caught:
        ht.connect("127.0.0.1:1")
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("later", "raised"),
    [
        (ht.DeadlineExceeded("late", stage="connect"), ht.OutcomeUnknown),
        (ht.DeadlineExceeded("late", stage="retry"), ht.OutcomeUnknown),
        (ht.NodeDraining("going", stage="offer"), ht.OutcomeUnknown),
        (ht.DeadlineExceeded("late", stage="pages"), ht.DeadlineExceeded),
        (ht.KeyExists("taken", stage="offer"), ht.KeyExists),
        (ht.Cancelled("enough", stage="connect"), ht.OutcomeUnknown),
        (ht.Cancelled("enough", stage="pages"), ht.Cancelled),
        (ht.Misuse("the client is closed"), ht.OutcomeUnknown),
        (ht.InvalidContents("not read", stage="staging"), ht.OutcomeUnknown),
        (ht.InvalidContents("no value", stage="pages"), ht.InvalidContents),
        (ht.ProtocolViolation("no window", stage="offer"), ht.OutcomeUnknown),
        (ht.DataPlaneUnavailable("the data plane of this process is gone", stage="drain"), ht.OutcomeUnknown),
        (ht.ProtocolViolation("unexpected message", stage="pages"), ht.OutcomeUnknown),
    ],
)
def test_an_outcome_stays_unknown_until_an_attempt_tells(later: ht.HurrayError, raised: type[ht.HurrayError]) -> None:
    failures = [ht.OutcomeUnknown("perhaps", stage="receipt"), later]

    def attempt() -> None:
        raise failures.pop(0)

    with pytest.raises(raised):
        retrying(Call(10), 10, attempt)
    assert failures == []


def test_a_cancellation_is_no_outcome() -> None:
    call = Call(10)

    def attempt() -> None:
        call.cancel()
        raise ht.OutcomeUnknown("perhaps", stage="cancel", cause="CANCELLED")

    with pytest.raises(ht.OutcomeUnknown):
        retrying(call, 10, attempt)


def test_a_cancellation_reaches_who_comes_late() -> None:
    call = Call(5)
    call.cancel()
    told = threading.Event()
    with call.on_cancel(told.set):
        assert told.is_set()
    with pytest.raises(ht.Cancelled) as caught:
        call.left_s("offer")
    assert caught.value.stage == "offer"


def test_alarms_ring_in_order_unless_cancelled() -> None:
    alarms, rung, done = Alarms(), list[int](), threading.Event()
    alarms.after(0.06, done.set)
    alarms.after(0.04, lambda: rung.append(2))
    alarms.after(0.03, lambda: rung.append(9)).cancel()
    alarms.after(0.02, lambda: rung.append(1))
    assert done.wait(5)
    assert rung == [1, 2]
    alarms.close()
