"""The mover: the child process of hurrayd that owns the arena, the transports, and the contents of snapshots.

`python -m hurray_server.mover FD CONFIG` speaks MoverCommand and MoverReport (mover.proto) on the socket FD. It keeps
no key, name or policy, takes its orders from that socket alone, and exits when the socket ends. Two threads matter:
this one reads commands, the data-plane thread moves bytes and reports.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from hurray_server.arena import Arena, Bytes, TransferMemory
from hurray_server.framing import FRAME_OVERHEAD_BYTES, Frames, FrameSender, receive
from hurray_server.grains import raise_descriptor_limit
from hurray_server.logs import configure_logs
from hurray_server.mover_config import MoverConfig, TransportsConfig
from hurray_server.pins import Pins
from hurray_wire import cuda
from hurray_wire import session as s
from hurray_wire.checksum import NONE, XXH3_64, hash_of
from hurray_wire.dataplane import DataPlane
from hurray_wire.errors import (
    DataPlaneUnavailable,
    HurrayError,
    LimitExceeded,
    ProtocolViolation,
    SnapshotLost,
    Unsupported,
)
from hurray_wire.image import ImagePlan, is_viewable
from hurray_wire.limits import MAX_WINDOW
from hurray_wire.memory import HOST, Place
from hurray_wire.messages import (
    read_offer,
    read_source_message,
    read_target_message,
    read_transport,
    to_duration,
    to_source_message,
    to_target_message,
    to_transport,
)
from hurray_wire.orders import Ended, Output, PrepareCommit, SourceOrder, TargetOrder
from hurray_wire.peers import Connected
from hurray_wire.source_payloads import ImageSource
from hurray_wire.status import from_status, to_status
from hurray_wire.target_payloads import LateImageTarget
from hurray_wire.transport.base import Transport
from hurray_wire.transport.shm import ShmConfig, ShmTransport
from hurray_wire.transport.tls import TcpTransport, TlsTransport
from hurray_wire.transport.ucx import UcxTransport, has_fabric, loaded_ucx, why_no_ucx
from hurray_wire.v1 import mover_pb2 as mpb
from hurray_wire.v1 import transfer_pb2 as pb
from hurray_wire.validate import Counts
from hurray_wire.view import Shown

_log = structlog.get_logger("hurray.mover")

_SWITCH_INTERVAL_S: Final = 0.0005
"""How soon a thread that waits for the interpreter gets it: the data-plane thread shares it with the command reader."""

_LATE_TENSORS: Final = 128
_LATE_SEQUENCES: Final = 1024
"""The plan of an offer of no more is made in the data-plane thread, while the source hears that it may begin."""

_STOP_S: Final = 3.0
"""Longest time for an orderly end after the socket has ended."""


@dataclass(frozen=True, slots=True)
class _Running:
    """A transfer that runs. `offer`: as it came, or goes out. `received`: of a target. `sent`: of a source."""

    transport: str
    window: int
    offer: pb.Offer
    received: LateImageTarget | None = None
    sent: ImagePlan | None = None


class Mover:
    """Carries out commands, reports what came of them."""

    def __init__(self, config: MoverConfig, report: Callable[[mpb.MoverReport], None]) -> None:
        """Raises HurrayError where arena or data plane cannot be had."""
        self._config = config
        self._report = report
        self._running: dict[int, _Running] = {}
        self._opening = threading.Lock()
        """Held from the order to connect until its answer is bound to be reported: no loss is reported before that."""
        self._place = _place(config.gpu)
        self._arena = Arena(config.arena_bytes, place=self._place, on_change=self._report_usage)
        self._pins = Pins()
        self._plane = DataPlane(_makers(config.transports), on_peer_lost=self._peer_lost, cpus=config.cpus)

    def start(self) -> mpb.MoverReport:
        """Start the data plane; the report that says so. Raises HurrayError for a transport that cannot be had, unless
        it may be left out."""
        self._plane.start(())
        try:
            kinds, left_out = self._start_transports()
        except HurrayError:
            self._plane.stop()  # else what had started leaves the name of its socket behind
            raise
        if self._config.prefault:
            threading.Thread(target=self._prefault, name="hurray-prefault", daemon=True).start()
        return mpb.MoverReport(
            started=mpb.MoverStarted(
                incarnation=self._plane.incarnation,
                transports=[to_transport(item) for item in self._plane.start_transports(kinds)],
                arena=self._arena_usage(),
                ucx=_describe_ucx() if "ucx" in kinds else "",
                left_out=left_out,
                staging=[kind for kind in kinds if self._stages(kind)],
            )
        )

    def _start_transports(self) -> tuple[list[str], dict[str, str]]:
        """Those that run, best first, and why not the others."""
        config = self._config.transports
        left_out: dict[str, str] = {}
        for kind in config.kinds:
            reason = why_no_ucx() if kind == "ucx" and kind in config.optional else None
            if reason is None:
                try:
                    self._plane.start_transports([kind])
                except DataPlaneUnavailable as error:
                    if kind == "ucx" or kind not in config.optional:
                        raise
                    reason = error.message
            if reason is not None:
                left_out[kind] = reason
        kinds = [kind for kind in config.kinds if kind not in left_out]
        if not kinds:
            raise DataPlaneUnavailable(
                "no transport can be had: " + "; ".join(f"{kind}: {why}" for kind, why in left_out.items()),
                stage="start",
            )
        if config.by_merit and "ucx" in kinds and not has_fabric(config.ucx):
            kinds.remove("ucx")
            kinds.append("ucx")
        return kinds, left_out

    def stop(self) -> None:
        """Fail what runs, close every connection."""
        self._plane.stop()

    def carry_out(self, command: mpb.MoverCommand) -> None:
        """One command."""
        match command.WhichOneof("command"):
            case "open_peer":
                self._open_peer(command.open_peer)
            case "close_peer":
                peer = command.close_peer.peer
                closed = self._plane.close_peer(peer, abort=command.close_peer.abort)
                closed.add_done_callback(lambda _: self._report(mpb.MoverReport(peer_closed=mpb.PeerClosed(peer=peer))))
            case "begin_target":
                order = command.begin_target
                self._attempt(order.transfer, lambda: self._begin_target(order))
            case "begin_source":
                begin = command.begin_source
                self._attempt(begin.transfer, lambda: self._begin_source(begin))
            case "input":
                self._input(command.input)
            case "free_snapshot":
                self._arena.free(command.free_snapshot.snapshot)
            case "report_usage":
                if not self._plane.running:
                    raise DataPlaneUnavailable("the data-plane thread has ended")
                self._report_usage()
            case unknown:
                raise AssertionError(f"unknown command {unknown}")

    # --- peers ----------------------------------------------------------------------------------------------------

    def _open_peer(self, order: mpb.OpenPeer) -> None:
        def opened(future: Future[Connected]) -> None:
            error = future.exception()
            report = mpb.PeerOpened(peer=order.peer)
            if isinstance(error, HurrayError):
                report.error.CopyFrom(to_status(error))
            else:
                report.transports.extend(future.result().kinds)
            self._report(mpb.MoverReport(peer_opened=report))

        try:
            parameters = [read_transport(item) for item in order.transports]
        except HurrayError as error:
            self._report(mpb.MoverReport(peer_opened=mpb.PeerOpened(peer=order.peer, error=to_status(error))))
            return
        with self._opening:
            self._plane.open_peer(order.peer, parameters).add_done_callback(opened)

    def _peer_lost(self, peer: int, error: HurrayError) -> None:
        with self._opening:
            self._report(mpb.MoverReport(peer_lost=mpb.PeerLost(peer=peer, error=to_status(error))))

    # --- transfers ------------------------------------------------------------------------------------------------

    def _attempt(self, transfer: int, begin: Callable[[], None]) -> None:
        """Begin a transfer; one that cannot begin has ended."""
        try:
            begin()
        except HurrayError as error:
            self._running.pop(transfer, None)
            self._output(transfer, ended=mpb.TransferEnded(error=to_status(error)))

    def _begin_target(self, order: mpb.BeginTarget) -> None:
        memory = TransferMemory(self._arena, order.transfer, order.tenant)

        def read() -> tuple[ImagePlan, Counts]:
            offered = read_offer(order.offer, self._config.limits)
            return offered.plan, offered.token_counts

        payload = LateImageTarget(
            order.image_bytes, read, memory, place=self._place, in_host=self._stages(order.transport)
        )
        self._running[order.transfer] = _Running(order.transport, order.window, order.offer, payload)
        if len(order.offer.tensors) > _LATE_TENSORS or len(order.offer.token_counts) > _LATE_SEQUENCES:
            _ = payload.plan  # now, in this thread: it takes its time
        self._plane.begin_target(
            order.transfer,
            TargetOrder(
                peer=order.peer,
                transport=order.transport,
                payload=payload,
                hash=hash_of(order.offer.checksum),
                budget_s=order.budget_s,
                window=order.window,
                listener=lambda output: self._target_output(order.transfer, output),
                checksums=tuple(order.offer.checksums),
                chunk_counts=(order.chunk_count, order.index_chunk_count),
            ),
        )

    def _begin_source(self, order: mpb.BeginSource) -> None:
        shown = self._show(order) if order.offer.view else None
        try:
            offered = read_offer(order.offer, self._config.limits)
            image = self._pin(order)
        except HurrayError:
            if shown is not None:
                shown.pin.close()
            raise
        self._running[order.transfer] = _Running(order.offer.transports[0], MAX_WINDOW, order.offer, sent=offered.plan)
        self._plane.begin_source(
            order.transfer,
            SourceOrder(
                peer=order.peer,
                payload=ImageSource(
                    offered.plan,
                    image,
                    lambda: self._arena.unpin(order.snapshot),
                    shown,
                    place=self._place,
                    in_host=self._stages(order.offer.transports[0]),
                ),
                hash=NONE if order.offer.checksums else offered.hash,  # all that there are were told with the offer
                budget_s=order.budget_s,
                listener=lambda output: self._source_output(order.transfer, output),
            ),
        )

    def _stages(self, transport: str) -> bool:
        """Whether what is on this side's GPU goes through host memory on its way to or from this transport."""
        return self._place is not HOST and not self._plane.takes_device_memory(transport)

    def _pin(self, order: mpb.BeginSource) -> Bytes:
        image = self._arena.pin(order.snapshot)
        if image is None:
            raise SnapshotLost("the data plane does not hold this snapshot", stage="offer")
        return image

    def _show(self, order: mpb.BeginSource) -> Shown:
        """The grains of a snapshot, held for a reader until its end of the pin is closed everywhere."""
        gone = mpb.MoverReport(reader_gone=mpb.ReaderGone(transfer=order.transfer))
        try:
            self._pin(order)
        except HurrayError:
            self._report(gone)
            raise

        def let_go() -> None:
            self._arena.unpin(order.snapshot)
            self._report(gone)

        try:
            pin = self._pins.give(let_go)
        except OSError as error:
            let_go()
            raise LimitExceeded(
                f"this node cannot watch another reader: {error.strerror}", retry_after_s=1.0, field="max_readers"
            ) from None
        showable = self._arena.show(order.snapshot)
        assert showable is not None, "said to be viewable"
        return Shown(showable.grains, showable.grain_bytes, showable.nbytes, pin)

    def _input(self, message: mpb.TransferInput) -> None:
        transfer, running = message.transfer, self._running.get(message.transfer)
        if running is None:
            return  # it is over
        try:
            event = self._event(transfer, running, message)
            if isinstance(event, pb.Accept):
                self._accept(transfer, running, event)
            else:
                self._plane.post(transfer, event)
        except HurrayError as error:
            self._plane.post(transfer, s.Failed(error))

    def _event(self, transfer: int, running: _Running, message: mpb.TransferInput) -> s.Event | pb.Accept:
        match message.WhichOneof("input"):
            case "source" if running.sent is None:
                return read_source_message(message.source)
            case "target" if running.sent is not None:
                return read_target_message(message.target)
            case "stream_lost":
                return s.StreamLost()
            case "commit":
                return self._commit(transfer, message.commit)
            case "cancel":
                return s.Failed(from_status(message.cancel))
        raise ProtocolViolation("message of the wrong side", offered=message.WhichOneof("input"))

    def _commit(self, transfer: int, result: mpb.CommitResult) -> s.Event:
        if result.HasField("error"):
            return s.CommitRefused(from_status(result.error))
        # From here on it is a snapshot: readers and deletion may come before the machine hears of it.
        self._arena.hold(transfer)
        return s.Committed(None)

    def _accept(self, transfer: int, running: _Running, accept: pb.Accept) -> None:
        if accept.transport != running.transport:
            raise ProtocolViolation(
                "accepted on another transport",
                field="transport",
                offered=accept.transport[:16],
                required=running.transport,
            )
        self._plane.accept(transfer, accept.transfer, accept.transport, min(accept.window, MAX_WINDOW))

    # --- outputs, in the data-plane thread ----------------------------------------------------------------------------

    def _source_output(self, transfer: int, output: Output) -> None:
        if isinstance(output, Ended):
            self._ended(transfer, output)
        else:
            self._output(transfer, source=to_source_message(output))

    def _target_output(self, transfer: int, output: Output) -> None:
        running = self._running[transfer]
        match output:
            case Ended():
                self._ended(transfer, output)
            case PrepareCommit():
                self._output(transfer, prepared=self._prepared(transfer, running, output))
            case s.TellReceipt():
                pass  # whoever committed has done so
            case s.TellAccept():
                accept = pb.Accept(transfer=transfer, transport=running.transport, window=running.window)
                target = to_target_message(output, lambda: accept)
                self._output(transfer, target=target, arena=self._arena_usage())
                # The kernel likes to put whom a message wakes on the waker's core, where it would wait until the plan
                # is made, which may be made meanwhile.
                os.sched_yield()
            case _:
                self._output(transfer, target=to_target_message(output, pb.Accept))

    def _prepared(self, transfer: int, running: _Running, output: PrepareCommit) -> mpb.Prepared:
        summary, received = output.summary, running.received
        assert received is not None
        viewable = self._arena.can_show(transfer) and all(map(is_viewable, summary.descriptors))
        staged = running.offer.staged or self._stages(running.transport) or summary.changed_device
        return mpb.Prepared(
            receipt=pb.Receipt(
                wire_bytes=summary.wire_bytes,
                tensor_count=len(running.offer.tensors),
                logical_page_count=summary.logical_page_count,
                distinct_page_count=summary.distinct_page_count,
                dead_slot_count=summary.dead_slot_count,
                dirty_dead_slot_count=summary.dirty_dead_slot_count,
                verified_chunk_count=output.verified_chunk_count,
                checksum=running.offer.checksum,
                transport=running.transport,
                stages=_stage_times(output.stages),
                staged_bytes=summary.wire_bytes if staged else 0,
                device_tag=self._place.device_tag,
            ),
            viewable=viewable,
            index_checksum=XXH3_64(received.index) if viewable and received.plan.index_chunk_count == 1 else None,
        )

    def _ended(self, transfer: int, output: Ended) -> None:
        running = self._running.pop(transfer)
        ended = mpb.TransferEnded()
        if output.error is not None:
            ended.error.CopyFrom(to_status(output.error))
        elif (plan := running.sent) is not None:
            ended.source.wire_bytes, ended.source.mapped_bytes = plan.wire_bytes, plan.mapped_bytes
            ended.source.stages.extend(_stage_times(output.stages))
        self._output(transfer, ended=ended, arena=None if running.sent is not None else self._arena_usage())

    def _output(
        self,
        transfer: int,
        *,
        source: pb.SourceMessage | None = None,
        target: pb.TargetMessage | None = None,
        prepared: mpb.Prepared | None = None,
        ended: mpb.TransferEnded | None = None,
        arena: pb.ArenaUsage | None = None,
    ) -> None:
        output = mpb.TransferOutput(
            transfer=transfer, source=source, target=target, prepared=prepared, ended=ended, arena=arena
        )
        self._report(mpb.MoverReport(output=output))

    # --- memory ---------------------------------------------------------------------------------------------------

    def _prefault(self) -> None:
        if not self._arena.shows and self._place is HOST:
            _log.warning("this system has no memory that can be shown: readers get copies")
        if self._arena.prefault():
            _log.info("arena prefaulted", bytes=self._arena.total_bytes)
        else:
            _log.warning("arena not prefaulted: first transfers are slower", bytes=self._arena.total_bytes)

    def _arena_usage(self) -> pb.ArenaUsage:
        usage = self._arena.usage()
        return pb.ArenaUsage(
            total_bytes=usage.total_bytes,
            free_bytes=usage.free_bytes,
            held_bytes=usage.held_bytes,
            receiving_bytes=usage.receiving_bytes,
            quarantined_bytes=usage.quarantined_bytes,
        )

    def _report_usage(self) -> None:
        usage = mpb.MoverUsage(
            arena=self._arena_usage(),
            unknown_tag_count=self._plane.unknown_tag_count,
            peer_count=self._plane.peer_count,
            transfer_count=self._plane.transfer_count,
            unusable=self._plane.unusable,
        )
        self._report(mpb.MoverReport(usage=usage))


def _stage_times(stages: Iterable[tuple[str, float]]) -> list[pb.StageTime]:
    return [pb.StageTime(stage=stage, duration=to_duration(seconds)) for stage, seconds in stages]


def _place(number: int | None) -> Place:
    """Where the arena is. Raises DataPlaneUnavailable."""
    if number is None:
        return HOST
    try:
        return cuda.gpu(number)
    except Unsupported as error:
        raise DataPlaneUnavailable(
            error.message, stage="start", field="arena.device", offered=error.details["offered"]
        ) from None


def _makers(config: TransportsConfig) -> dict[str, Callable[[], Transport]]:
    return {
        "shm": lambda: _make_shm(config.shm),
        "tcp": lambda: TcpTransport(config.tcp),
        "tls": lambda: _make_tls(config),
        "ucx": lambda: UcxTransport(config.ucx),
    }


def _make_shm(config: ShmConfig) -> ShmTransport:
    with suppress(OSError):  # what keeps it from being there keeps it from being listened in, which says so
        Path(config.path).parent.mkdir(mode=0o755, exist_ok=True)
    return ShmTransport(config)


def _make_tls(config: TransportsConfig) -> TlsTransport:
    assert config.tls is not None, "left out without certificates"
    assert config.credentials is not None
    return TlsTransport(config.tls, config.credentials)


def _describe_ucx() -> str:
    ucx = loaded_ucx()
    return f"UCX {ucx['version']} from {ucx['path']}, transports {ucx['transports']}"


def serve(connection: socket.socket, config: MoverConfig) -> int:
    """Run a mover on this socket until it ends; the exit status."""
    sender = FrameSender(connection)
    try:
        mover = Mover(config, sender.send)
        sender.send(mover.start())
    except HurrayError as error:
        sender.send(mpb.MoverReport(started=mpb.MoverStarted(error=to_status(error))))
        return 1
    frames = Frames(mpb.MoverCommand, config.limits.max_message_bytes + FRAME_OVERHEAD_BYTES)
    gc.freeze()  # what was imported stays: no collection has to walk it beside a transfer
    for command in receive(connection, frames):
        mover.carry_out(command)
    stopper = threading.Thread(target=mover.stop, daemon=True)
    stopper.start()
    stopper.join(_STOP_S)
    return 0


def main() -> None:
    """Entry point of the child process."""
    # It lives exactly as long as its socket: signals to the whole group or control group are hurrayd's to obey.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    raise_descriptor_limit()
    descriptor, config = int(sys.argv[1]), MoverConfig.from_json(sys.argv[2])
    configure_logs(config.log_level, config.log_format, "mover")
    try:
        status = serve(socket.socket(fileno=descriptor), config)
    except Exception:
        _log.exception("the mover fails")
        status = 1
    sys.stderr.flush()
    # Neither UCX's destructors nor threads in the middle of something get a say any more.
    os._exit(status)


if __name__ == "__main__":
    main()
