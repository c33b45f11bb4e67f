"""Worker addresses that no UCX made, from a peer that is let in.

UCX unpacks them with assertions, and some take its process down. That is why it runs in a process of its own: the node
lives, says what happened, and has another mover within seconds. The first of them has a version that there is not,
which UCX 1.21 does not survive. ADDRESSES makes the run longer.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import partial

import pytest

import hurray_client as ht
from faults.harness import next_works, settings, snapshot
from hurray_wire.messages import to_transport
from hurray_wire.transport.base import TransportParameters
from hurray_wire.v1 import transfer_pb2 as pb
from support.daemon import RunningDaemon, eventually, running_daemon
from support.raw import RawClient, Stream

pytest.importorskip("ucxx")

COUNT = int(os.environ.get("ADDRESSES", "24"))
pytestmark = [pytest.mark.ucx, pytest.mark.timeout(120 + 2 * COUNT)]

SEED = 5


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(noise="") as daemon:  # UCX's last words are its own
        yield daemon


def mutant(dice: random.Random, address: bytes) -> bytes:
    """After the count of ports and the port, which are ours: bytes of UCX's changed, cut off, doubled or added."""
    head, data = address[:3], bytearray(address[3:])
    for _ in range(dice.choice((1, 1, 2, 8))):
        at = dice.randrange(len(data))
        match dice.randrange(5):
            case 0 | 1:
                data[at] = dice.getrandbits(8)
            case 2:
                data[at] ^= 1 << dice.randrange(8)
            case 3:
                del data[at:]
                data += b"\0"
            case _:
                data[at:at] = dice.randbytes(dice.choice((1, 8, 200)))
    return head + bytes(data)


def deaths(daemon: RunningDaemon) -> int:
    return len(daemon.logged("mover down"))


def test_whatever_ucx_makes_of_them_the_node_lives(daemon: RunningDaemon) -> None:
    dice, config = random.Random(SEED), settings(daemon, "shm", chunk_bytes=16 << 10)
    with RawClient(daemon.address) as peer, ht.connect(daemon.address, config=config) as bystander:
        own = next(item for item in peer.plane.parameters if item.kind == "ucx")
        for number in range(COUNT):
            eventually(lambda: daemon.node_state().ready, 20, "a mover that is ready")
            bystander.put("held", snapshot(1, 16), overwrite=True)
            before, mover = deaths(daemon), daemon.mover_pid
            address = mutant(dice, own.address) if number else own.address[:3] + b"\5" + own.address[4:]
            hello(peer, number + 1, TransportParameters("ucx", address, own.settings))
            try:
                bystander.get("held").close()
                assert daemon.mover_pid == mover, number
            except (ht.SnapshotLost, ht.DataPlaneUnavailable, ht.PeerUnavailable):
                said = partial(deaths, daemon)
                eventually(lambda: said() > before, 20, "the node says that its mover died")  # noqa: B023
            assert daemon.process.poll() is None
        next_works(bystander, "after", snapshot(1, 16))
    print(f"{COUNT} addresses, seed {SEED}: the mover died {deaths(daemon)} times")


def hello(peer: RawClient, incarnation: int, transport: TransportParameters) -> None:
    """Open a session, and close it however it was answered."""
    stream = Stream(peer.stub.Session, timeout_s=20)
    message = pb.Hello(protocol_version=1, incarnation=incarnation, transports=[to_transport(transport)])
    stream.send(pb.SessionRequest(hello=message))
    stream.read()
    stream.cut()
