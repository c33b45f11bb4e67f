"""A client and a node that are one version of the protocol apart, each in a process of its own: refused by the rule of
ADR 9, in both directions, before anything is offered. What only has more fields is served."""

from __future__ import annotations

import queue
import uuid
from pathlib import Path

import pytest

from faults.remote_client import remote_client
from hurray_wire.messages import PROTOCOL_VERSION
from hurray_wire.v1 import transfer_pb2 as pb
from support.daemon import running_daemon
from support.raw import Prepared, RawClient, snapshot

pytestmark = pytest.mark.ucx

SKEW = str(Path(__file__).with_name("skew"))
TESTS = str(Path(__file__).parents[1])
NEXT = PROTOCOL_VERSION + 1


def speaking(version: int) -> dict[str, str]:
    return {"PYTHONPATH": f"{SKEW}:{TESTS}", "HURRAYTEST_PROTOCOL_VERSION": str(version)}


@pytest.mark.parametrize(("node", "client"), [(PROTOCOL_VERSION, NEXT), (NEXT, PROTOCOL_VERSION)])
def test_one_version_apart_is_refused_by_name_before_anything_is_offered(node: int, client: int) -> None:
    with (
        running_daemon(env=speaking(node)) as daemon,
        remote_client(daemon.address, "another version", **speaking(client)) as other,
    ):
        for command in ("small k", "get k 0", "hold k"):
            other.tell(command)
            heard = other.hear()
            assert (heard["reason"], heard["code"]) == ("CAPABILITY_MISMATCH", "FAILED_PRECONDITION"), heard
            assert "protocol_version" in heard["text"]
            assert {f"offered={node}", f"required={client}"} <= set(heard["text"].strip("()").replace(",", "").split())
        assert not daemon.logged("session opened")
        with RawClient(daemon.address, connect=False) as peer:
            assert peer.stub.GetNode(pb.GetNodeRequest(), timeout=5).protocol_version == node
            assert not peer.stub.List(pb.ListRequest(), timeout=5).snapshots


def test_the_next_version_serves_itself() -> None:
    with (
        running_daemon(env=speaking(NEXT)) as daemon,
        remote_client(daemon.address, "the same version", **speaking(NEXT)) as other,
    ):
        other.tell("small k")
        assert other.hear()["reason"] == "OK"


def test_fields_of_a_later_release_are_passed_over() -> None:
    """Within a version fields are only added: who does not know them does as before."""
    later = b"\xfa\x7d\x05later"  # field 2015, length-delimited
    with running_daemon() as daemon, RawClient(daemon.address) as peer:
        outbound: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        offer = Prepared.of(snapshot()).offer(str(uuid.uuid4()), peer.incarnation)
        source = offer.SerializeToString() + later
        source = b"\x0a" + varint(len(source)) + source + later  # SourceMessage.offer
        outbound.put(b"\x0a" + varint(len(source)) + source + later)  # PutRequest.source
        stream = peer.channel.stream_stream("/hurray_wire.v1.TransferService/Put")(iter(outbound.get, None), timeout=10)
        assert pb.PutResponse.FromString(next(stream)).target.HasField("accept")
        stream.cancel()
        outbound.put(None)


def varint(number: int) -> bytes:
    data = b""
    while number > 127:
        data, number = data + bytes([number & 127 | 128]), number >> 7
    return data + bytes([number])
