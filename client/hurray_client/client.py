"""The SDK's synchronous client: hands snapshots to nodes and takes them from there."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Literal, Self

from hurray_client.call import Call
from hurray_client.config import ClientConfig, load_config, with_choices
from hurray_client.devices import follow, follow_into, read_device
from hurray_client.info import Lease, NodeInfo, SnapshotInfo, SnapshotStat
from hurray_client.node import Node, TryAgain, is_passing, retrying
from hurray_client.plane import LocalDataPlane
from hurray_client.progress import OnProgress
from hurray_client.receipt import Receipt, read_time
from hurray_client.stream import PutStream, ReadyTensors
from hurray_client.transfer import (
    GetOrder,
    PutOrder,
    ReceivedSnapshot,
    check_generation,
    get_once,
    optional_duration,
    put_once,
)
from hurray_wire.checksum import HASHES
from hurray_wire.credentials import Credentials
from hurray_wire.destination import Destination
from hurray_wire.errors import HurrayError, InvalidRequest, Misuse, OutcomeUnknown
from hurray_wire.messages import check_annotations, check_key
from hurray_wire.paged import BlockTables, CacheKey
from hurray_wire.prepare import prepare
from hurray_wire.snapshot import KVSnapshot
from hurray_wire.v1 import transfer_pb2 as pb

Into = Mapping[CacheKey, object] | Destination
ChecksumName = Literal["xxh3_64", "mix64", "none"]

_LIST_PAGE: Final = 1000

CLOSE_S: Final = 10.0
"""How long `close` waits for calls that it cancelled."""


def connect(
    target: str,
    *,
    config: ClientConfig | None = None,
    tls: Credentials | None = None,
    transports: Sequence[str] | None = None,
    data_plane: LocalDataPlane | None = None,
) -> Client:
    """A client of the node at `target`, "host:port". A context manager.

    Nothing is dialled yet: the first call connects, and tries again for `config.retry_s` while the node does not
    listen. `config`: the environment (HURRAY_...) unless given. `tls`: the PEM files by which this client is known and
    knows the node, whose certificate must be for the host in `target`; as `config.tls` says it. `transports`: connect
    by those of them that the node has, and prefer them in this order, as `config.transports` says it. `data_plane`: one
    to share between clients; each has its own otherwise, started with the first transfer.

    Raises InvalidRequest for a target or an environment that makes no sense, Misuse for UCX settings that do not, for
    PEM files that cannot be used, and for clients that share one connection and want another one.
    """
    config = with_choices(config if config is not None else load_config(), transports, tls)
    return Client(target, config, data_plane)


class Client:
    """See `connect`. Any number of threads may share one: they share its session and its data plane.

    Every method spends one budget, `timeout_s`, over all it does, and raises DeadlineExceeded naming the stage. All
    errors are HurrayErrors; those of the node have the class they had there. After `close`, and in a forked child,
    every method raises Misuse.
    """

    def __init__(self, target: str, config: ClientConfig, data_plane: LocalDataPlane | None = None) -> None:
        self.target: Final = target
        self._config = config
        self._owned = LocalDataPlane(config) if data_plane is None else None
        self._plane = data_plane or self._owned
        assert self._plane is not None
        self._node = self._plane.attach(target, lambda: Node(target, config, self._plane))  # type: ignore[arg-type]
        for field in ("transports", "tls"):
            if getattr(self._node.config, field) != getattr(config, field):
                self._plane.detach(target)
                raise Misuse(f"clients that share a connection want other {field} for it", field=field)
        self._pid = os.getpid()
        self._closed = False
        self._changed = threading.Condition()
        self._calls: set[Call] = set()

    # --- transfers --------------------------------------------------------------------------------------------------

    def put(
        self,
        key: str,
        snapshot: KVSnapshot,
        *,
        lease_s: float | None = None,
        overwrite: bool = False,
        request_id: str | None = None,
        timeout_s: float = 60.0,
        checksum: ChecksumName | None = None,
        annotations: Mapping[str, str] | None = None,
        require_transport: str | None = None,
        via_host: bool = False,
        stream: object | None = None,
        on_progress: OnProgress | None = None,
    ) -> Receipt:
        """Hand a snapshot to the node, which keeps it under `key` for `lease_s` seconds (None: the node's default).

        The pages that the snapshot names must not be written until this returns or raises; from then on nothing
        refers to them. `request_id`, a UUID4, makes a repetition by the caller safe: it is committed once, and the
        repetition gets the first receipt. `annotations`: at most 64 pairs kept with the snapshot.
        `require_transport`: fail rather than move the bytes by another one. `on_progress` is called from a thread of
        its own; what it raises cancels the put and is raised here.

        Pages on a GPU are read after what was started on `stream` (None: the streams current in this thread), and
        stay on GPUs: to a node that holds snapshots in other memory they go only with `via_host`. Where the transport
        cannot carry memory of a GPU they pass through the host's; `receipt.staged_bytes` says so. `checksum` None:
        "mix64" from GPU to GPU, else "xxh3_64".

        While the node is unavailable and has not answered the offer, and while the outcome is unknown, the same
        request is tried again. Raises KeyExists and KeyBusy, ArenaFull, InvalidSnapshot, InvalidContents,
        CapabilityMismatch, PeerUnavailable, OutcomeUnknown, DeadlineExceeded, ChecksumMismatch, and others that the
        node has.
        """
        follow(snapshot.device, stream)
        call = Call(timeout_s)
        return self.run_put(
            call,
            key,
            snapshot,
            lease_s=lease_s,
            overwrite=overwrite,
            request_id=request_id,
            checksum=checksum,
            annotations=annotations,
            require_transport=require_transport,
            via_host=via_host,
            on_progress=on_progress,
        )

    def put_stream(
        self,
        key: str,
        snapshot: KVSnapshot,
        *,
        lease_s: float | None = None,
        overwrite: bool = False,
        request_id: str | None = None,
        timeout_s: float = 60.0,
        checksum: ChecksumName | None = None,
        annotations: Mapping[str, str] | None = None,
        require_transport: str | None = None,
        via_host: bool = False,
        on_progress: OnProgress | None = None,
    ) -> PutStream:
        """A `put` that begins before the pages are written, and sends each layer once it is announced:

            with client.put_stream("req/42", snapshot) as stream:
                for layer in range(num_layers):
                    run(layer)
                    stream.ready(layer)
            receipt = stream.receipt

        Pages, scales and zero points of a layer are not read before it is announced, and must not be written from then
        on until the block is left. Leaving it announces the rest and waits for the receipt; not before that can the
        snapshot be committed, and an exception inside the block cancels it. The node reserves memory at the beginning.

        Arguments and errors are those of `put`. One budget covers all, what the block itself takes included; while
        nothing is left to send its stage is "announce". What goes wrong is raised by the next `ready`, or where the
        block is left. As announced pages stay as they are, a put that breaks off is tried again from the start
        whenever it does.
        """
        call = Call(timeout_s)
        return self.make_stream(
            call,
            key,
            snapshot,
            lease_s=lease_s,
            overwrite=overwrite,
            request_id=request_id,
            checksum=checksum,
            annotations=annotations,
            require_transport=require_transport,
            via_host=via_host,
            on_progress=on_progress,
        )

    def get(
        self,
        key: str,
        *,
        wait_s: float = 0.0,
        consume: bool = False,
        generation: int = 0,
        into: Into | None = None,
        block_tables: BlockTables | None = None,
        require: Mapping[str, str] | None = None,
        device: str = "cpu",
        timeout_s: float = 60.0,
        require_transport: str | None = None,
        via_host: bool = False,
        stream: object | None = None,
        on_progress: OnProgress | None = None,
    ) -> ReceivedSnapshot:
        """Take the snapshot under `key`: a KVSnapshot with its `receipt`.

        `wait_s`: how long to wait for a key that is not committed yet. `consume`: the node deletes it afterwards.
        `generation`: that one only; 0 is the newest. What is returned outlives the client. On the node's own host a
        large one is not copied but mapped, and held there until it is closed (see ReceivedSnapshot).

        `into`: the caller's own caches, {(layer, role): array} with `block_tables` as in KVSnapshot.from_paged, or a
        Destination where more than that must be said of them. Pages go straight there, and what is returned is a
        snapshot over those caches by the caller's tables. Any difference that the offer can show raises
        GeometryMismatch (tensor, field, offered, required) before a byte moves; a failure after pages were written
        names them in `details["cleared_pages"]`, and has cleared them.

        `require`: annotations that the snapshot must have. A difference raises GeometryMismatch naming the first as
        `field`, with offered and required, before a byte moves.

        `device`: "cuda:0" receives into memory of that GPU instead of the host's. What the node holds on another kind
        of device than it ends up on is refused without `via_host`. Caches on a GPU are written after what was started
        on `stream` (None: the streams current in this thread), and are complete for every stream when this returns.
        Arrays that were received on a GPU must not be in use by it when the last one goes.

        Raises KeyNotFound, KeyExpired, KeyDeleted, KeyOverwritten and SnapshotLost, and what `put` raises.
        """
        follow_into(into, device, stream)
        call = Call(timeout_s)
        return self.run_get(
            call,
            key,
            wait_s=wait_s,
            consume=consume,
            generation=generation,
            into=into,
            block_tables=block_tables,
            require=require,
            device=device,
            require_transport=require_transport,
            via_host=via_host,
            on_progress=on_progress,
        )

    def run_put(self, call: Call, key: str, snapshot: KVSnapshot, **options: Any) -> Receipt:
        """`put` as part of a call that somebody else may cancel."""
        with self._running(call):
            order = _put_order(key, snapshot, None, **options)
            return retrying(call, self._config.retry_s, lambda: put_once(self._node, call, order))

    def make_stream(self, call: Call, key: str, snapshot: KVSnapshot, **options: Any) -> PutStream:
        """`put_stream` as part of a call that somebody else may cancel."""
        self._check_open()
        ready = ReadyTensors()
        order = _put_order(key, snapshot, ready, **options)

        def attempt() -> Receipt:
            try:
                return put_once(self._node, call, order)
            except HurrayError as error:
                if is_passing(error) and not isinstance(error, OutcomeUnknown):
                    raise TryAgain(error) from None
                raise

        def put() -> Receipt:
            with self._running(call):
                return retrying(call, self._config.retry_s, attempt)

        return PutStream(call, order.prepared, ready, put)

    def run_get(
        self,
        call: Call,
        key: str,
        *,
        into: Into | None = None,
        block_tables: BlockTables | None = None,
        require: Mapping[str, str] | None = None,
        device: str = "cpu",
        **options: Any,
    ) -> ReceivedSnapshot:
        """`get` as part of a call that somebody else may cancel."""
        with self._running(call):
            destination = _destination(into, block_tables)
            order = GetOrder(
                key,
                str(uuid.uuid4()),
                destination=destination,
                require=dict(require or {}),
                device=read_device(device),
                **options,
            )
            return retrying(call, self._config.retry_s, lambda: get_once(self._node, call, order))

    # --- what the node holds ----------------------------------------------------------------------------------------

    def stat(self, key: str, *, generation: int = 0, timeout_s: float = 60.0) -> SnapshotStat:
        """What is under a key: sizes, lease, descriptors, token counts. Raises KeyNotFound and its kin."""
        _check_name(key, generation)
        answer = self._ask("stat", "Stat", pb.StatRequest(key=key, generation=generation), timeout_s)
        return SnapshotStat.from_proto(answer)

    def list(self, prefix: str = "", *, timeout_s: float = 60.0) -> Iterator[SnapshotInfo]:
        """All committed snapshots whose key begins with `prefix`, in key order. Asks for more as it goes; `timeout_s`
        is for each answer."""
        if prefix:
            check_key(prefix)
        token = ""
        while True:
            request = pb.ListRequest(prefix=prefix, page_size=_LIST_PAGE, page_token=token)
            answer = self._ask("list", "List", request, timeout_s)
            yield from map(SnapshotInfo.from_proto, answer.snapshots)
            token = answer.next_page_token
            if not token:
                return

    def delete(self, key: str, *, generation: int = 0, timeout_s: float = 60.0) -> int:
        """Delete a snapshot; the generation that was deleted. Readers that have it keep it. Raises KeyNotFound and its
        kin."""
        _check_name(key, generation)
        request = pb.DeleteRequest(key=key, generation=generation)
        answer = self._ask("delete", "Delete", request, timeout_s, again=False)
        return int(answer.generation)

    def renew(self, key: str, *, lease_s: float | None = None, generation: int = 0, timeout_s: float = 60.0) -> Lease:
        """Let a lease begin anew, for `lease_s` seconds from now (None: the node's default; the node may cut it).

        Raises KeyNotFound and its kin, InvalidRequest.
        """
        _check_name(key, generation)
        request = pb.RenewRequest(key=key, generation=generation, lease=optional_duration(lease_s, "lease_s"))
        answer = self._ask("renew", "Renew", request, timeout_s)
        return Lease(key, answer.generation, read_time(answer.expire_time))

    def node(self, *, timeout_s: float = 60.0) -> NodeInfo:
        """What the node is and can do, as it is now."""
        return NodeInfo.from_proto(self._ask("node", "GetNode", pb.GetNodeRequest(), timeout_s))

    def drain(self, *, deadline_s: float | None = None, timeout_s: float = 60.0) -> int:
        """Let the node take no more transfers, finish those that run within `deadline_s` (None: its default), and stop.
        How many run."""
        request = pb.DrainRequest(deadline=optional_duration(deadline_s, "deadline_s"))
        return int(self._ask("drain", "Drain", request, timeout_s, again=False).transfer_count)

    # --- lifetime ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel what runs, end the session in an orderly way. Snapshots that were got stay. Safe to call twice."""
        if self._pid != os.getpid():
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
            running = list(self._calls)
        for call in running:
            call.cancel()
        until = time.monotonic() + CLOSE_S
        with self._changed:
            while self._calls and time.monotonic() < until:
                self._changed.wait(until - time.monotonic())
        assert self._plane is not None
        self._plane.detach(self.target)
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client {self.target}{' closed' if self._closed else ''}, {len(self._calls)} calls>"

    def _ask(self, stage: str, method: str, request: object, timeout_s: float, *, again: bool = True) -> Any:
        """One unary call. `again`: it may be repeated while the node is unavailable."""
        call = Call(timeout_s)
        node, retry_s = self._node, self._config.retry_s
        with self._running(call):
            retrying(call, retry_s, lambda: node.check(call))
            return retrying(call, retry_s if again else 0.0, lambda: node.unary(call, stage, method, request))

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise Misuse("the client was made in another process: make one after the fork")
        if self._closed:
            raise Misuse("the client is closed")

    @contextmanager
    def _running(self, call: Call) -> Iterator[None]:
        with self._changed:
            self._check_open()
            self._calls.add(call)
        try:
            yield
        finally:
            with self._changed:
                self._calls.discard(call)
                self._changed.notify_all()


def _put_order(
    key: str,
    snapshot: KVSnapshot,
    ready: ReadyTensors | None,
    *,
    request_id: str | None,
    checksum: ChecksumName | None,
    annotations: Mapping[str, str] | None,
    **options: Any,
) -> PutOrder:
    """`ready`: tensors become final one after the other."""
    if checksum is not None and checksum not in HASHES:
        raise InvalidRequest("unknown checksum", field="checksum", offered=checksum, required=" or ".join(HASHES))
    check_annotations(annotations or {})
    return PutOrder(
        key,
        prepare(snapshot, contents_final=ready is None),
        request_id or str(uuid.uuid4()),
        None if checksum is None else HASHES[checksum],
        annotations=dict(annotations or {}),
        ready=ready,
        **options,
    )


def _destination(into: Into | None, block_tables: BlockTables | None) -> Destination | None:
    if into is None or isinstance(into, Destination):
        if block_tables is not None:
            raise InvalidRequest(
                "block_tables belong to caches given as into=", field="block_tables", required="a mapping as into="
            )
        return into
    if block_tables is None:
        raise InvalidRequest("into= needs block_tables=", field="block_tables", required="one table per sequence")
    return Destination.from_paged(into, block_tables=block_tables)


def _check_name(key: str, generation: int) -> None:
    check_key(key)
    check_generation(generation)
