"""A peer of hurrayd below the SDK: a data plane and bare stubs, so that a test can stop, cut or lie where it wants."""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from hurray_wire import session as s
from hurray_wire.checksum import XXH3_64
from hurray_wire.credentials import Credentials
from hurray_wire.dataplane import DataPlane
from hurray_wire.errors import HurrayError
from hurray_wire.image import ImagePlan, plan_image
from hurray_wire.limits import Limits
from hurray_wire.messages import (
    PROTOCOL_VERSION,
    read_target_message,
    read_transport,
    to_source_message,
    to_transport,
)
from hurray_wire.orders import Ended, Output, SourceOrder
from hurray_wire.prepare import PreparedSnapshot, prepare
from hurray_wire.snapshot import KVSnapshot
from hurray_wire.source_payloads import SnapshotSource
from hurray_wire.status import STATUS_TRAILER, from_trailers
from hurray_wire.transport.base import Transport
from hurray_wire.transport.ucx import UcxTransport
from hurray_wire.transport.ucx_config import UcxConfig
from hurray_wire.v1 import transfer_pb2 as pb
from hurray_wire.v1.transfer_pb2_grpc import TransferServiceStub
from support.daemon import UCX_PORTS

WAIT_S = 20.0


def snapshot(layers: int = 2, pages: int = 2, *, seed: int = 0) -> KVSnapshot:
    """float16, page_size 4, 2 heads of 8, two sequences that share page 0; the last page is partly dead."""
    rng = np.random.default_rng(seed)
    caches = {
        (layer, role): rng.standard_normal((pages, 4, 2, 8)).astype(np.float16)
        for layer in range(layers)
        for role in ("key", "value")
    }
    return KVSnapshot.from_paged(caches, block_tables=[list(range(pages)), [0]], token_counts=[4 * pages - 2, 3])


@dataclass
class Prepared:
    """A snapshot ready to be offered."""

    prepared: PreparedSnapshot
    plan: ImagePlan

    @classmethod
    def of(cls, value: KVSnapshot, *, chunk_bytes: int = 64 << 10) -> Prepared:
        ready = prepare(value)
        return cls(ready, plan_image([tensor.descriptor for tensor in ready.tensors], chunk_bytes, Limits()))

    def offer(self, key: str, incarnation: int, **fields: Any) -> pb.Offer:
        return pb.Offer(
            **{
                "request_id": str(uuid.uuid4()),
                "key": key,
                "incarnation": incarnation,
                "tensors": [pb.TensorOffer(descriptor=d.encode()) for d in self.plan.descriptors],
                "token_counts": self.prepared.structure.token_counts.tolist(),
                "transports": ["shm", "tls", "tcp", "ucx"],
                "checksum": pb.CHECKSUM_XXH3_64,
                "chunk_bytes": self.plan.chunk_bytes,
            }
            | fields
        )


class Stream:
    """One bidirectional call. `read` gives the next message, None at its end; then `error` is set, or None for OK."""

    def __init__(self, method: Any, *, timeout_s: float = WAIT_S) -> None:
        self._out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.error: HurrayError | None = None
        self.answered = False
        """Whether `error` is what the node said, not gRPC."""
        self.call = method(iter(self._out.get, None), timeout=timeout_s)

    def send(self, message: Any) -> None:
        self._out.put(message)

    def finish(self) -> None:
        """Say nothing more."""
        self._out.put(None)

    def cut(self) -> None:
        """Break it."""
        self.call.cancel()
        self._out.put(None)

    def read(self) -> Any:
        try:
            return next(self.call)
        except StopIteration:
            return None
        except grpc.RpcError as error:
            call: Any = error
            self.error = from_trailers(call.code().name, call.details(), call.trailing_metadata())
            self.answered = STATUS_TRAILER in dict(call.trailing_metadata() or ())
            return None
        finally:
            if not self.call.is_active():
                self._out.put(None)


@dataclass
class Put:
    """A put that runs. `told`: what the node said, in order. `ended`: how the machine here ended. `over`: how the
    stream did."""

    number: int
    stream: Stream
    told: list[pb.TargetMessage] = field(default_factory=list)
    accepted: Future[pb.Accept] = field(default_factory=Future)
    ended: Future[Ended] = field(default_factory=Future)
    over: Future[HurrayError | None] = field(default_factory=Future)
    sent: queue.SimpleQueue[Output] = field(default_factory=queue.SimpleQueue)

    @property
    def receipts(self) -> list[pb.Receipt]:
        return [message.receipt for message in self.told if message.HasField("receipt")]


def open_channel(address: str, tls: Credentials | None) -> grpc.Channel:
    """A channel of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    ca, key, certificate = (path.read_bytes() for path in (tls.ca, tls.key, tls.certificate))
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate), options=options)


class RawClient:
    """See the module. A context manager."""

    def __init__(
        self,
        address: str,
        *,
        connect: bool = True,
        transports: Mapping[str, Callable[[], Transport]] | None = None,
        tls: Credentials | None = None,
    ) -> None:
        self.channel = open_channel(address, tls)
        self.stub = TransferServiceStub(self.channel)
        ucx = UcxConfig(first_port=UCX_PORTS[0], last_port=UCX_PORTS[1])
        self.plane = DataPlane(transports or {"ucx": lambda: UcxTransport(ucx)})
        self.session: Stream | None = None
        self.peer = 0
        if connect:
            self.plane.start()
            self.connect()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        if self.session is not None:
            self.session.cut()
            self.plane.stop()
        self.channel.close()

    @property
    def incarnation(self) -> int:
        return self.plane.incarnation

    def hello(self, **fields: Any) -> pb.SessionRequest:
        return pb.SessionRequest(
            hello=pb.Hello(
                **{
                    "protocol_version": PROTOCOL_VERSION,
                    "incarnation": self.incarnation,
                    "transports": [to_transport(item) for item in self.plane.parameters],
                }
                | fields
            )
        )

    def connect(self) -> None:
        self.session = Stream(self.stub.Session, timeout_s=600)
        self.session.send(self.hello())
        welcome = self.session.read()
        assert welcome is not None, self.session.error
        self.peer = welcome.welcome.incarnation
        self.plane.open_peer(self.peer, [read_transport(item) for item in welcome.welcome.transports]).result(WAIT_S)

    def put(
        self,
        prepared: Prepared,
        offer: pb.Offer,
        *,
        ready_tensors: int | None = None,
        budget_s: float = WAIT_S,
        on_checksums: Callable[[Put, pb.SourceMessage], bool] = lambda _put, _message: True,
    ) -> Put:
        """Begin a put. With `ready_tensors` it stops after so many tensors. `on_checksums` decides whether a message of
        checksums is sent."""
        stream = Stream(self.stub.Put, timeout_s=budget_s + 7)  # the node counts 5 less: longer than this side
        put = Put(self.plane.new_transfer(), stream)

        def listen(output: Output) -> None:
            if isinstance(output, Ended):
                put.ended.set_result(output)
                stream.finish()
                return
            message = to_source_message(output)
            if not message.HasField("checksums") or on_checksums(put, message):
                stream.send(pb.PutRequest(source=message))
            put.sent.put(output)

        order = SourceOrder(
            self.peer, SnapshotSource(prepared.prepared, prepared.plan), XXH3_64, budget_s, listen, ready_tensors
        )
        stream.send(pb.PutRequest(source=pb.SourceMessage(offer=offer)))
        self.plane.begin_source(put.number, order)
        threading.Thread(target=self._pump, args=(put,), daemon=True).start()
        return put

    def _pump(self, put: Put) -> None:
        while (message := put.stream.read()) is not None:
            put.told.append(message.target)
            event = read_target_message(message.target)
            if isinstance(event, pb.Accept):
                self.plane.accept(put.number, event.transfer, event.transport, event.window)
                put.accepted.set_result(event)
            else:
                self.plane.post(put.number, event)
        error = put.stream.error
        told = error is not None and put.stream.answered
        self.plane.post(put.number, s.PeerStopped(error) if told and error is not None else s.StreamLost())
        put.over.set_result(error)

    def transfer(self, key: str, value: KVSnapshot, **fields: Any) -> pb.Receipt:
        """Put to the end; the receipt. Raises the error of the stream."""
        prepared = Prepared.of(value)
        put = self.put(prepared, prepared.offer(key, self.incarnation, **fields))
        error = put.over.result(WAIT_S)
        if error is not None:
            raise error
        return put.receipts[0]


def put_corrupted(client: RawClient, key: str) -> HurrayError:
    """A put whose bytes are not those that its checksums are of; how it fails."""

    def lie(_put: Put, message: pb.SourceMessage) -> bool:
        message.checksums.values[0] ^= 1
        return True

    prepared = Prepared.of(snapshot())
    error = client.put(prepared, prepared.offer(key, client.incarnation), on_checksums=lie).over.result(WAIT_S)
    assert error is not None
    return error


def refusal(call: Callable[[], Any]) -> HurrayError:
    """The error that ends a unary call."""
    try:
        call()
    except grpc.RpcError as error:
        failed: Any = error
        return from_trailers(failed.code().name, failed.details(), failed.trailing_metadata())
    raise AssertionError("the call succeeded")


def messages(stream: Stream) -> Iterator[Any]:
    """All that is left of a stream."""
    while (message := stream.read()) is not None:
        yield message
