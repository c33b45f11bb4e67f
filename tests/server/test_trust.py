"""Two tenants on one node, and everybody who is neither: what each may do, and that a refusal tells nothing.

THREAT_MODEL.md names these tests.
"""

from __future__ import annotations

import base64
import json
import socket
import ssl
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from hurray_wire.credentials import Credentials
from hurray_wire.errors import (
    HurrayError,
    KeyExists,
    KeyNotFound,
    LimitExceeded,
    PeerUnavailable,
    PermissionDenied,
    ProtocolViolation,
    QuotaExceeded,
    Unauthenticated,
)
from hurray_wire.status import from_trailers
from hurray_wire.transport.base import chunk_tag
from hurray_wire.v1 import transfer_pb2 as pb
from support.daemon import eventually
from support.identities import TRUSTED_UCX, Identified, identified_daemon
from support.raw import WAIT_S, Prepared, RawClient, Stream, messages, open_channel, refusal, snapshot
from transport.certificates import Authority

SERVICE = pb.DESCRIPTOR.services_by_name["TransferService"]
SHARED = "a/shared/x"
OWN = "a/x"
GRPC_LINE = ".cc:"
"""In what gRPC itself logs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trust")


@pytest.fixture(scope="module")
def node(folder: Path) -> Iterator[Identified]:
    pytest.importorskip("ucxx")
    with identified_daemon(folder, TRUSTED_UCX, env={"GRPC_VERBOSITY": "info"}, noise=GRPC_LINE) as running:
        yield running


@pytest.fixture(scope="module")
def a(node: Identified) -> Iterator[RawClient]:
    """Tenant a, who holds `a/x` and shares `a/shared/x`."""
    with node.raw("a") as client:
        for key in (OWN, SHARED):
            client.transfer(key, snapshot())
        yield client


@pytest.fixture(scope="module")
def b(node: Identified, a: RawClient) -> Iterator[RawClient]:
    """Tenant b, who may get and list what a shares, and no more."""
    with node.raw("b") as client:
        yield client


def fresh(prefix: str = "") -> str:
    return f"{prefix}{uuid.uuid4()}"


def stream_error(method: Any, message: Any) -> HurrayError:
    stream = Stream(method)
    stream.send(message)
    assert list(messages(stream)) == []
    assert stream.error is not None
    return stream.error


def opening(client: RawClient, key: str, **fields: Any) -> pb.GetRequest:
    given = {"request_id": str(uuid.uuid4()), "incarnation": client.incarnation, "transports": ["tls"], "key": key}
    return pb.GetRequest(open=pb.GetOpen(**given | fields))


def put_error(client: RawClient, key: str, **fields: Any) -> HurrayError:
    offer = Prepared.of(snapshot()).offer(**{"key": key, "incarnation": client.incarnation} | fields)
    return stream_error(client.stub.Put, pb.PutRequest(source=pb.SourceMessage(offer=offer)))


# --- another tenant's keys ------------------------------------------------------------------------------------------

ATTEMPTS: dict[str, Callable[..., HurrayError]] = {
    "put": put_error,
    "overwrite": lambda client, key: put_error(client, key, overwrite=True),
    "get": lambda client, key: stream_error(client.stub.Get, opening(client, key)),
    "get of a generation": lambda client, key, generation=1: stream_error(
        client.stub.Get, opening(client, key, generation=generation)
    ),
    # It would be worth waiting for: that alone must not be told.
    "wait": lambda client, key: stream_error(client.stub.Get, opening(client, key, wait=Duration(seconds=500))),
    "consume": lambda client, key: stream_error(client.stub.Get, opening(client, key, consume=True)),
    "stat": lambda client, key: refusal(lambda: client.stub.Stat(pb.StatRequest(key=key), timeout=5)),
    "stat of a generation": lambda client, key, generation=1: refusal(
        lambda: client.stub.Stat(pb.StatRequest(key=key, generation=generation), timeout=5)
    ),
    "delete": lambda client, key: refusal(lambda: client.stub.Delete(pb.DeleteRequest(key=key), timeout=5)),
    "delete of a generation": lambda client, key, generation=1: refusal(
        lambda: client.stub.Delete(pb.DeleteRequest(key=key, generation=generation), timeout=5)
    ),
    "renew": lambda client, key: refusal(lambda: client.stub.Renew(pb.RenewRequest(key=key), timeout=5)),
    "renew of a generation": lambda client, key, generation=1: refusal(
        lambda: client.stub.Renew(pb.RenewRequest(key=key, generation=generation), timeout=5)
    ),
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_another_tenants_key_is_refused_alike_whether_or_not_it_is_held(
    node: Identified, a: RawClient, b: RawClient, attempt: str
) -> None:
    generation = a.stub.Stat(pb.StatRequest(key=OWN), timeout=5).snapshot.generation
    errors, stolen = [], {"generation": generation} if "generation" in attempt else {}
    for key in (OWN, "a/none", "nobody/none", "/none"):
        error = ATTEMPTS[attempt](b, key, **stolen)
        assert type(error) is PermissionDenied
        assert error.details.pop("key") == key
        errors.append((error.message, error.details, error.retry_after_s))
    assert all(error == errors[0] for error in errors)
    action = {"overwrite": "put", "wait": "get", "consume": "get"}.get(attempt, attempt.split(maxsplit=1)[0])
    told = node.told(event="refused", action=action, tenant="b", key=OWN)
    assert told[-1]["identity"] == "spiffe://hurray/tenant/b"
    assert told[-1]["address"].startswith("ipv4:127.0.0.1:")
    assert (told[-1]["outcome"], told[-1]["why"]) == ("PERMISSION_DENIED", "no grant allows this")
    assert a.stub.Stat(pb.StatRequest(key=OWN), timeout=5).snapshot.generation == generation


GRANTED = {"get", "get of a generation", "wait", "stat", "stat of a generation"}


@pytest.mark.parametrize("attempt", sorted(ATTEMPTS.keys() - GRANTED))
def test_a_grant_grants_what_it_says_and_no_more(a: RawClient, b: RawClient, attempt: str) -> None:
    for key in (SHARED, "a/shared/none"):
        assert type(ATTEMPTS[attempt](b, key)) is PermissionDenied
    assert b.stub.Stat(pb.StatRequest(key=SHARED), timeout=5).snapshot.key == SHARED
    assert type(ATTEMPTS["stat"](b, "a/shared/none")) is KeyNotFound
    assert type(ATTEMPTS["get"](b, "a/shared/none")) is KeyNotFound


def test_a_hand_off_goes_through_a_grant_in_either_direction(node: Identified, a: RawClient, b: RawClient) -> None:
    stream = Stream(b.stub.Get)
    stream.send(opening(b, SHARED))
    assert stream.read().source.offer.key == SHARED
    stream.cut()
    key = fresh("b/inbox/")
    receipt = a.transfer(key, snapshot())
    assert b.stub.Stat(pb.StatRequest(key=key), timeout=5).snapshot.generation == receipt.generation
    for attempt in ("stat", "get", "delete", "overwrite"):
        assert type(ATTEMPTS[attempt](a, key)) is PermissionDenied
    assert type(put_error(a, key)) is KeyExists  # who may put to a key meets what is there
    assert b.stub.Delete(pb.DeleteRequest(key=key), timeout=5).generation == receipt.generation
    assert node.told(event="allowed", action="put", tenant="a", key=key)[0]["generation"] == receipt.generation
    assert node.told(event="allowed", action="delete", tenant="b", key=key)[0]["generation"] == receipt.generation


def test_a_key_without_a_slash_is_the_callers_own(a: RawClient, b: RawClient) -> None:
    name = fresh()
    first, second = a.transfer(name, snapshot()), b.transfer(name, snapshot())
    assert (first.key, second.key) == (f"a/{name}", f"b/{name}")
    for client, receipt in ((a, first), (b, second)):
        assert client.stub.Stat(pb.StatRequest(key=name), timeout=5).snapshot.generation == receipt.generation
        client.stub.Delete(pb.DeleteRequest(key=name), timeout=5)
    assert put_error(a, "x" * 511).field == "key"  # with its tenant it is too long


def listed(client: RawClient, prefix: str, size: int = 1) -> tuple[list[str], list[str]]:
    keys, tokens, token = [], [], ""
    while True:
        page = client.stub.List(pb.ListRequest(prefix=prefix, page_size=size, page_token=token), timeout=5)
        keys += [item.key for item in page.snapshots]
        token = page.next_page_token
        if not token:
            return keys, tokens
        tokens.append(base64.urlsafe_b64decode(token).decode())


def test_a_listing_and_its_page_tokens_show_only_what_may_be_listed(
    node: Identified, a: RawClient, b: RawClient
) -> None:
    a.transfer("a/hidden", snapshot(), overwrite=True)
    for key in ("b/1", "b/2", "a/shared/y"):
        (b if key.startswith("b") else a).transfer(key, snapshot(), overwrite=True)
    expected = ["a/shared/x", "a/shared/y", "b/1", "b/2"]
    for size in (1, 2, 100):
        keys, tokens = listed(b, "", size)
        assert keys == expected
        assert set(tokens) <= set(expected)
    assert listed(b, "1")[0] == ["b/1"]
    assert listed(b, "a/sh")[0] == listed(b, "a/")[0] == ["a/shared/x", "a/shared/y"]
    for prefix in ("a/x", "a/h", "nobody/", "/"):
        error = refusal(lambda prefix=prefix: b.stub.List(pb.ListRequest(prefix=prefix), timeout=5))
        assert (type(error), error.message) == (PermissionDenied, "no grant allows this")
        assert node.told(event="refused", action="list", tenant="b", prefix=prefix)
    forged = base64.urlsafe_b64encode(b"a/a").decode()
    page = b.stub.List(pb.ListRequest(page_token=forged), timeout=5)
    assert [item.key for item in page.snapshots] == expected


def test_request_ids_of_different_tenants_have_nothing_to_do_with_each_other(a: RawClient, b: RawClient) -> None:
    request_id, name = str(uuid.uuid4()), fresh()
    first = a.transfer(name, snapshot(), request_id=request_id)
    other = b.transfer(name, snapshot(seed=1), request_id=request_id)
    assert other.generation != first.generation
    assert a.transfer(name, snapshot(), request_id=request_id) == first


def test_only_who_was_granted_it_drains_the_node(node: Identified, b: RawClient) -> None:
    error = refusal(lambda: b.stub.Drain(pb.DrainRequest(), timeout=5))
    assert type(error) is PermissionDenied
    assert error.details["right"] == "admin"
    assert node.told(event="refused", action="drain", tenant="b")
    with node.calling("ops") as ops:
        assert type(refusal(lambda: ops.Stat(pb.StatRequest(key=OWN), timeout=5))) is PermissionDenied


# --- another tenant's sessions and transfers ------------------------------------------------------------------------


def test_a_stolen_incarnation_opens_nothing_and_tells_nothing(node: Identified, a: RawClient, b: RawClient) -> None:
    key = fresh("b/")
    for incarnation in (a.incarnation, 7):
        error = put_error(b, key, incarnation=incarnation)
        assert type(error) is PeerUnavailable
        assert error.message == "this process has no open session here"
        error = stream_error(b.stub.Get, opening(b, SHARED, incarnation=incarnation))
        assert type(error) is PeerUnavailable
        assert error.message == "this process has no open session here"
    for action, key_ in (("put", key), ("get", SHARED)):

        def told_twice(action: str = action, key_: str = key_) -> list[dict[str, Any]]:
            told = node.told(action=action, tenant="b", key=key_, outcome="PEER_UNAVAILABLE")
            return told if len(told) >= 2 else []

        told = eventually(told_twice, WAIT_S, "the audit log is told, after the answer")
        assert told[-1]["why"] == "this process has no open session here"
    with node.calling("b") as stub:  # nor does a Hello under that name meet a's session, or end it
        stream = Stream(stub.Session)
        stream.send(b.hello(incarnation=a.incarnation))
        assert stream.read().HasField("welcome")
        a.transfer(fresh("a/"), snapshot())
        stream.cut()
    a.transfer(fresh("a/"), snapshot())


@pytest.mark.parametrize("kind", ["tls", "tcp", "shm"])
def test_a_stolen_transfer_number_reaches_nothing(node: Identified, kind: str) -> None:
    """Chunks are matched within the connection they came on."""
    with node.raw("a", kind) as owner, node.raw("b", kind) as thief:
        prepared, key = Prepared.of(snapshot(layers=4, pages=64), chunk_bytes=8192), fresh("a/")
        put = owner.put(prepared, prepared.offer(key, owner.incarnation), ready_tensors=1)
        accept = put.accepted.result(WAIT_S)
        assert accept.transport == kind
        sent: list[HurrayError | None] = []

        def send_forged() -> None:
            endpoint = thief.plane._peers.entries[thief.peer].endpoints[kind]
            for chunk in prepared.plan.chunks[-4:]:
                forged = np.full(chunk.nbytes, 0x55, np.uint8)
                endpoint.send(chunk_tag(accept.transfer, chunk.index), forged, sent.append)

        thief.plane._submit(send_forged)
        eventually(lambda: len(sent) >= 1 or kind == "shm", WAIT_S, "the forged chunks are under way")
        thief.transfer(fresh("b/"), snapshot())
        owner.plane.announce(put.number, len(prepared.plan.descriptors))
        assert put.over.result(WAIT_S) is None
        assert put.receipts[0].verified_chunk_count == len(prepared.plan.chunks)


def test_over_ucx_a_stolen_transfer_number_costs_the_transfer_and_commits_nothing(node: Identified) -> None:
    """UCX matches tags of all connected peers together: checksums, which go by the control plane, show the forgery."""
    with node.raw("a", "ucx") as owner, node.raw("b", "ucx") as thief:
        prepared, key = Prepared.of(snapshot(layers=4, pages=64), chunk_bytes=8192), fresh("a/")
        put = owner.put(prepared, prepared.offer(key, owner.incarnation), ready_tensors=1)
        accept = put.accepted.result(WAIT_S)
        first = next(
            n for n, chunk in enumerate(prepared.plan.chunks) if chunk.index >= prepared.plan.index_chunk_count
        )

        def send_forged() -> None:
            endpoint = thief.plane._peers.entries[thief.peer].endpoints["ucx"]
            for chunk in prepared.plan.chunks[first:]:
                forged = np.full(chunk.nbytes, 0x55, np.uint8)
                endpoint.send(chunk_tag(accept.transfer, chunk.index), forged, lambda _: None)

        thief.plane._submit(send_forged)
        thief.transfer(fresh("b/"), snapshot())
        owner.plane.announce(put.number, len(prepared.plan.descriptors))
        error = put.over.result(WAIT_S)
        assert error is not None
        assert put.receipts == []
        assert type(refusal(lambda: owner.stub.Stat(pb.StatRequest(key=key), timeout=5))) is KeyNotFound


def test_a_receipt_for_what_was_not_accepted_consumes_nothing(a: RawClient) -> None:
    key = fresh("a/")
    generation = a.transfer(key, snapshot()).generation
    for message in (
        pb.TargetMessage(receipt=pb.Receipt()),
        pb.TargetMessage(receipt=pb.Receipt(generation=generation)),
    ):
        stream = Stream(a.stub.Get)
        stream.send(opening(a, key, consume=True))
        assert stream.read().source.HasField("offer")
        stream.send(pb.GetRequest(target=message))
        for told in messages(stream):
            assert told.source.HasField("stop")
        assert type(stream.error) is ProtocolViolation
        assert a.stub.Stat(pb.StatRequest(key=key), timeout=5).snapshot.generation == generation


# --- certificates ---------------------------------------------------------------------------------------------------


def unary(channel: grpc.Channel, name: str) -> HurrayError | None:
    """How a call of each service ends."""
    try:
        match name:
            case "health":
                health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            case "watch":
                next(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=5))
            case "reflection":
                request = reflection_pb2.ServerReflectionRequest(list_services="")
                stub = reflection_pb2_grpc.ServerReflectionStub(channel)
                next(stub.ServerReflectionInfo(iter([request]), timeout=5))
            case "Put" | "Get" | "Session":
                next(channel.stream_stream(f"/hurray_wire.v1.TransferService/{name}")(iter([b""]), timeout=5))
            case _:
                channel.unary_unary(f"/hurray_wire.v1.TransferService/{name}")(b"", timeout=5)
    except grpc.RpcError as error:
        failed: Any = error
        return from_trailers(failed.code().name, failed.details(), failed.trailing_metadata())
    return None


SERVICES = [*(method.name for method in SERVICE.methods), "health", "watch", "reflection"]


def test_health_and_reflection_answer_every_tenant(node: Identified) -> None:
    with open_channel(node.address, node.tenant("b")) as channel:
        for name in ("GetNode", "health", "watch", "reflection"):
            assert unary(channel, name) is None


def refused_handshakes(node: Identified, why: str) -> int:
    """Lines of gRPC in the node's log."""
    lines = node.daemon.log_path.read_text().splitlines()
    return sum("Handshake failed" in line and why in line for line in lines)


@pytest.mark.parametrize(
    ("wrong", "logged"),
    [
        ("none", "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        ("foreign", "unable to get local issuer certificate"),
        ("expired", "certificate has expired"),
        ("a node's", "certificate purpose"),
        ("for servers", "certificate purpose"),
    ],
)
def test_a_certificate_that_the_authority_did_not_issue_for_this_meets_nobody(
    node: Identified, folder: Path, wrong: str, logged: str
) -> None:
    """TLS itself refuses it. gRPC logs so, where GRPC_VERBOSITY asks for it, and tells hurrayd nothing."""
    authority = node.authority
    (folder / wrong).mkdir(exist_ok=True)
    uri = "spiffe://hurray/tenant/a"
    ca, key, certificate = authority.path.read_bytes(), None, None
    credentials: Credentials | None = None
    match wrong:
        case "foreign":
            credentials = Authority(folder / wrong).issue("a", spiffe=uri, trusts=authority)
        case "expired":
            credentials = authority.issue("expired", spiffe=uri, expired=True)
        case "a node's":
            credentials = node.node
        case "for servers":
            credentials = authority.issue("for-servers", spiffe=uri, usages=["server"])
    if credentials is not None:
        key, certificate = credentials.key.read_bytes(), credentials.certificate.read_bytes()
    options = [("grpc.use_local_subchannel_pool", 1)]
    before, failed = len(node.audit()), refused_handshakes(node, logged)
    with grpc.secure_channel(node.address, grpc.ssl_channel_credentials(ca, key, certificate), options) as channel:
        for name in SERVICES:
            error = unary(channel, name)
            assert error is not None
            assert error.code == "UNAVAILABLE"
    eventually(lambda: refused_handshakes(node, logged) > failed, 5, f"a line with {logged}")
    with grpc.insecure_channel(node.address, options) as channel:
        error = unary(channel, "GetNode")
        assert error is not None
        assert error.code == "UNAVAILABLE"
    assert len(node.audit()) == before


@pytest.mark.parametrize(
    "options",
    [
        {"uris": ["spiffe://hurray/tenant/a", "spiffe://hurray/tenant/b"]},
        {"common_name": None, "hosts": ["a.example"]},
        {"uris": ["spiffe://hurray/node/n"]},
    ],
)
def test_a_certificate_that_is_not_one_tenants_is_refused_by_name(node: Identified, options: dict[str, Any]) -> None:
    credentials = node.authority.issue("not-one", **options)
    with open_channel(node.address, credentials) as channel:
        for name in SERVICES:
            error = unary(channel, name)
            assert type(error) is Unauthenticated
            assert error.field == "certificate"
            assert error.details["required"]
    for method in SERVICE.methods:
        assert node.told(event="refused", action=method.name.lower(), outcome="UNAUTHENTICATED")
    assert node.told(event="refused", action="/grpc.health.v1.Health/Check")


def test_a_certificate_of_another_tenant_makes_no_data_connection(node: Identified) -> None:
    """b's data plane under a's session: whoever has stolen what a told the node does not have a's key."""
    tls = node.tenant("b")
    with RawClient(node.address, tls=node.tenant("a"), transports={"tls": node.transport("tls", tls)}) as mixed:
        prepared, key = Prepared.of(snapshot()), fresh("a/")
        put = mixed.put(prepared, prepared.offer(key, mixed.incarnation))
        error = put.over.result(WAIT_S)
        assert isinstance(error, (Unauthenticated, PeerUnavailable))  # from when on it is known that there is none
        assert put.receipts == []
        assert type(refusal(lambda: mixed.stub.Stat(pb.StatRequest(key=key), timeout=5))) is KeyNotFound
        assert mixed.session is not None
        assert list(messages(mixed.session)) == []
        assert type(mixed.session.error) is Unauthenticated
        assert "spiffe://hurray/tenant/b" in mixed.session.error.message
    assert node.told(event="refused", action="session", tenant="a")


@pytest.mark.parametrize("version", ["TLSv1_1", "TLSv1_2", "TLSv1_3"])
def test_nothing_below_tls_1_2_is_spoken(node: Identified, version: str) -> None:
    context = ssl.create_default_context(cafile=str(node.authority.path))
    own = node.tenant("a")
    context.load_cert_chain(own.certificate, own.key)
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.set_alpn_protocols(["h2"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    host, port = node.address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as plain:
        if version == "TLSv1_1":
            with pytest.raises(ssl.SSLError):
                context.wrap_socket(plain, server_hostname=host)
        else:
            with context.wrap_socket(plain, server_hostname=host) as connection:
                assert connection.version() == version.replace("_", ".")


# --- quotas ---------------------------------------------------------------------------------------------------------

QUOTAS = """
[quotas]
default = { snapshots = 2, transfers = 2 }
b = { bytes = 65536 }
"""


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Identified]:
    folder = tmp_path_factory.mktemp("quotas")
    audit = f'[audit]\npath = "{folder}/audit.jsonl"\n'
    with identified_daemon(folder, QUOTAS + audit) as running:
        yield running


def test_quotas_bound_what_each_tenant_holds_and_are_given_back(bounded: Identified) -> None:
    with bounded.raw("a") as a, bounded.raw("b") as b:
        a.transfer("1", snapshot())
        a.transfer("2", snapshot(), lease=Duration(nanos=700_000_000))
        error = put_error(a, "3")
        assert type(error) is QuotaExceeded
        assert (error.field, error.details["offered"], error.details["allowed"]) == ("snapshots", "3", "2")
        assert error.retry_after_s is not None
        assert type(put_error(a, "1", overwrite=True)) is QuotaExceeded  # both are there until it commits
        b.transfer("1", snapshot())  # another tenant's is its own
        eventually(lambda: taken(a, "3"), 10, "the lease of 2 ended")
        a.stub.Delete(pb.DeleteRequest(key="3"), timeout=5)
        held = Stream(a.stub.Get)
        held.send(opening(a, "1"))
        assert held.read().source.HasField("offer")
        a.stub.Delete(pb.DeleteRequest(key="1"), timeout=5)
        a.transfer("4", snapshot())
        assert type(put_error(a, "5")) is QuotaExceeded  # 1 is charged for until its reader has gone
        held.cut()
        eventually(lambda: taken(a, "5"), 10, "the reader of 1 has gone")
        error = put_error_of(b, snapshot(layers=8, pages=8), "2")
        assert type(error) is QuotaExceeded
        assert (error.field, error.details["allowed"], error.retry_after_s) == ("bytes", "65536", None)


def taken(client: RawClient, key: str) -> bool:
    """Whether one more snapshot of this tenant is."""
    try:
        client.transfer(key, snapshot())
    except QuotaExceeded:
        return False
    return True


def put_error_of(client: RawClient, value: Any, key: str) -> HurrayError:
    offer = Prepared.of(value).offer(key, client.incarnation)
    return stream_error(client.stub.Put, pb.PutRequest(source=pb.SourceMessage(offer=offer)))


def test_transfers_at_a_time_are_counted_with_those_that_wait(bounded: Identified) -> None:
    with bounded.raw("c") as c:
        waits = [Stream(c.stub.Get) for _ in range(2)]
        for number, stream in enumerate(waits):
            stream.send(opening(c, f"never/{number}".replace("never", "c/never"), wait=Duration(seconds=15)))

        def refused() -> HurrayError | None:
            error = stream_error(c.stub.Get, opening(c, "c/none"))
            return error if type(error) is QuotaExceeded else None

        error = eventually(refused, 10, "both wait")
        assert error.field == "transfers"
        assert type(put_error(c, "c/1")) is QuotaExceeded
        for stream in waits:
            stream.cut()
        eventually(lambda: type(stream_error(c.stub.Get, opening(c, "c/none"))) is KeyNotFound, 10, "nobody waits")


LIMITS = "[limits]\nmax_sessions = 4\nmax_transfers = 4\nmax_calls = 16\n"


def test_no_tenant_takes_all_sessions_transfers_or_calls(tmp_path: Path) -> None:
    prepared = Prepared.of(snapshot(layers=4, pages=8), chunk_bytes=8192)
    with identified_daemon(tmp_path, LIMITS) as node, node.raw("a") as a, node.raw("a") as other, node.raw("b") as b:
        error = stream_error(a.stub.Session, a.hello(incarnation=7))
        assert type(error) is LimitExceeded
        assert (error.field, error.message) == (
            "max_sessions",
            "this tenant has as many sessions as are left for others",
        )
        for client in (a, other):
            client.put(prepared, prepared.offer(fresh("a/"), client.incarnation), ready_tensors=1).accepted.result(
                WAIT_S
            )
        error = put_error(a, fresh("a/"))
        assert type(error) is LimitExceeded
        assert error.field == "max_transfers"
        b.transfer(fresh("b/"), snapshot())
        silent = [Stream(a.stub.Get) for _ in range(9)]
        full = eventually(lambda: refused_call(a), 10, "all calls are taken that may be")
        assert type(full) is LimitExceeded
        assert full.field == "max_calls"
        assert node.told(event="refused", action="stat", tenant="a", outcome="LIMIT_EXCEEDED")
        b.transfer(fresh("b/"), snapshot())
        assert node.state().ready
        for stream in silent:
            stream.cut()
        eventually(lambda: refused_call(a) is None, 10, "the calls are over")


def refused_call(client: RawClient) -> HurrayError | None:
    """Why a call is refused that otherwise finds nothing."""
    error = refusal(lambda: client.stub.Stat(pb.StatRequest(key="a/none"), timeout=5))
    return None if type(error) is KeyNotFound else error


def test_what_fails_or_is_lost_is_charged_to_nobody(bounded: Identified) -> None:
    prepared = Prepared.of(snapshot(layers=4, pages=8), chunk_bytes=8192)
    with bounded.raw("e") as e:
        for number in range(2):
            put = e.put(prepared, prepared.offer(f"{number}", e.incarnation), ready_tensors=1)
            put.accepted.result(WAIT_S)
        assert type(put_error(e, "2")) is QuotaExceeded
    with bounded.raw("e") as e:  # its process went away in the middle of both
        for number in range(2):
            eventually(lambda number=number: taken(e, f"{number}"), 10, "the puts that were cut are settled")
        assert not taken(e, "2")
        bounded.daemon.kill_mover()
        eventually(lambda: (now := bounded.state()).ready and not now.arena.held_bytes, 20, "another mover is up")
    with bounded.raw("e") as e:
        assert taken(e, "2")
        assert taken(e, "3")


def test_who_puts_is_charged_and_who_renews_takes_the_charge_over(bounded: Identified) -> None:
    with bounded.raw("a") as a, bounded.raw("b") as b:
        for client in (a, b):
            for info in client.stub.List(pb.ListRequest(), timeout=5).snapshots:
                client.stub.Delete(pb.DeleteRequest(key=info.key), timeout=5)
        for number in range(2):
            a.transfer(f"b/inbox/{number}", snapshot())
        assert type(put_error(a, "x")) is QuotaExceeded
        b.transfer("own", snapshot())  # what others put to b is not charged to b
        b.stub.Renew(pb.RenewRequest(key="b/inbox/0"), timeout=5)
        assert type(put_error(b, "x")) is QuotaExceeded
        error = refusal(lambda: b.stub.Renew(pb.RenewRequest(key="b/inbox/1"), timeout=5))
        assert type(error) is QuotaExceeded
        a.transfer("x", snapshot())


def test_the_audit_log_tells_each_decision_once_and_no_secret(bounded: Identified, tmp_path: Path) -> None:
    path = bounded.authority.folder / "audit.jsonl"
    with bounded.raw("d") as d:
        key = fresh("d/")
        receipt = d.transfer(key, snapshot())
        assert type(ATTEMPTS["delete"](d, OWN)) is PermissionDenied
        d.stub.Delete(pb.DeleteRequest(key=key), timeout=5)
        secrets = [bytes(item.address) for item in d.plane.parameters]
    lines = eventually(lambda: _lines(path, "delete", key), 5, "the line of the deletion") and [
        json.loads(line) for line in path.read_text().splitlines()
    ]
    told = [line for line in lines if line.get("tenant") == "d"]
    assert all(line["identity"] == "spiffe://hurray/tenant/d" for line in told)
    assert all(line["address"] and line["timestamp"] for line in told)
    assert [(line["action"], line["event"], line["outcome"]) for line in told] == [
        ("session", "allowed", "OK"),
        ("put", "allowed", "OK"),
        ("delete", "refused", "PERMISSION_DENIED"),
        ("delete", "allowed", "OK"),
    ]
    assert told[1].items() >= {"key": key, "generation": receipt.generation, "logger": "hurray.audit"}.items()
    text = path.read_text() + bounded.daemon.log_path.read_text()
    for secret in secrets:
        token = secret[:32]
        for form in (token.hex(), base64.b64encode(token).decode()[:40], repr(token)[2:-1]):
            assert form not in text
    assert "PRIVATE KEY" not in text
    assert not bounded.audit(tenant="d")  # a file of its own: the log has none of it


def _lines(path: Path, action: str, key: str) -> list[str]:
    return [line for line in path.read_text().splitlines() if f'"{action}"' in line and key in line]
