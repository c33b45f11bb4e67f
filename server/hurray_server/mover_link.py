"""hurrayd's side of its mover: starts it, talks to it, notices its death, starts the next one.

One mover runs at a time. When it dies, or no longer answers, everything that was asked of it fails with
DataPlaneUnavailable, the owner is told (`on_down`), and another is started. All in the event loop; nothing here blocks.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Final, Protocol

import structlog

from hurray_server.firewall import Firewall
from hurray_server.framing import FRAME_OVERHEAD_BYTES, FrameConnection, Frames
from hurray_server.mover_config import MoverConfig
from hurray_wire.errors import DataPlaneUnavailable, HurrayError, ProtocolViolation
from hurray_wire.status import from_status
from hurray_wire.transport.ucx_config import PORTS_FIELD, at_one_port
from hurray_wire.transport.ucx_devices import may_start
from hurray_wire.v1 import mover_pb2 as mpb
from hurray_wire.v1 import transfer_pb2 as pb

_log = structlog.get_logger("hurray.mover_link")

START_S: Final = 30.0
"""Longest time for a mover to come up."""

PING_S: Final = 2.0
ANSWER_S: Final = 10.0
"""A mover that says nothing for this long, though it is asked every PING_S, is taken for dead."""

RESTART_DELAYS_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Before each try to start the next one; the last one repeats. Back to the first after a start that worked."""

GUARDED_TRIES: Final = 5
"""A guarded port is chosen before the mover starts: how many may meanwhile turn out to be another process's."""

EXIT_S: Final = 5.0
"""How long a mover may take to exit after its socket was closed; longer than it gives itself for an orderly end."""


class Outputs(Protocol):
    """Where the reports on one transfer go."""

    def on_output(self, output: mpb.TransferOutput) -> None:
        """Called in order; `ended` is the last."""

    def on_mover_down(self, error: HurrayError) -> None:
        """The mover is gone, and the transfer with it. Called instead of everything that would follow."""


class MoverLink:
    """See the module.

    `on_up(started)`: a mover is ready. `on_down(error)`: it is gone. `on_peer_lost(peer, error)`: it lost a connection.
    `on_reader_gone(transfer)`: who got a view by this transfer has let go of it. `on_unusable(kinds)`: which transports
    connect no more, and why, is not what it was. `firewall`: guards UCX's port, from
    before a mover listens at it until after that has ended.
    """

    def __init__(
        self,
        config: MoverConfig,
        *,
        on_up: Callable[[mpb.MoverStarted], None],
        on_down: Callable[[HurrayError], None],
        on_peer_lost: Callable[[int, HurrayError], None],
        on_reader_gone: Callable[[int], None],
        on_unusable: Callable[[Mapping[str, str]], None] = lambda _kinds: None,
        firewall: Firewall | None = None,
    ) -> None:
        self._config = config
        self._firewall = firewall
        self._on_up = on_up
        self._on_down = on_down
        self._on_peer_lost = on_peer_lost
        self._on_reader_gone = on_reader_gone
        self._on_unusable = on_unusable
        self._numbers = itertools.count(1)
        self._transfers: dict[int, Outputs] = {}
        self._opening: dict[int, deque[asyncio.Future[tuple[str, ...]]]] = {}
        """The mover answers every open, in order: an answer nobody waits for must not pass for a later one's."""
        self._closing: dict[int, asyncio.Future[None]] = {}
        self._connected: set[int] = set()
        self._connection: FrameConnection[mpb.MoverReport] | None = None
        self._early: deque[mpb.MoverReport] | None = None
        """Reports of a mover that comes up; None: it is up, and they are taken as they come."""
        self._came = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._pidfd = -1
        self.supervisor: asyncio.Task[None] | None = None
        """Runs from `start` to `stop`; nothing ends it before but a fault of this program."""
        self._stopping = False
        self._heard_s = 0.0
        self.started: mpb.MoverStarted | None = None
        """What the mover said when it came up; None while none is up."""
        self.usage = mpb.MoverUsage()
        """What it last said of itself; zero while none is up."""
        self._unknown_tags_before = 0

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the first mover. Raises what keeps it from coming up; later ones are tried again and again."""
        for left in reversed(range(1 if self._firewall is None else GUARDED_TRIES)):
            try:
                await self._start_one()
                break
            except DataPlaneUnavailable as error:
                if error.field != PORTS_FIELD or not left:
                    raise
        self.supervisor = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        """End the mover in order; it settles what runs before it exits."""
        self._stopping = True
        if self.supervisor is not None:
            self.supervisor.cancel()
            await asyncio.gather(self.supervisor, return_exceptions=True)
        await self._end_process(kill=False)

    @property
    def unknown_tag_count(self) -> int:
        """Messages that no transfer waited for, of all movers so far."""
        return self._unknown_tags_before + self.usage.unknown_tag_count

    @property
    def pid(self) -> int | None:
        """Of the mover; None while there is none."""
        return None if self._process is None else self._process.pid

    @property
    def up(self) -> bool:
        """Whether a mover is ready."""
        return self.started is not None

    @property
    def transports(self) -> list[pb.Transport]:
        """Those that peers can connect by now, best first, with addresses; none while no mover is up."""
        running = [] if self.started is None else self.started.transports
        return [transport for transport in running if transport.kind not in self.usage.unusable]

    def require_up(self, stage: str) -> mpb.MoverStarted:
        """What the mover said when it came up. Raises DataPlaneUnavailable while none is up."""
        if self.started is None:
            raise DataPlaneUnavailable("the data plane of this node is not up", retry_after_s=1.0, stage=stage)
        return self.started

    # --- commands -------------------------------------------------------------------------------------------------

    async def open_peer(self, peer: int, transports: Iterable[pb.Transport]) -> tuple[str, ...]:
        """Connect the mover to a peer; by which kinds of transport. Raises DataPlaneUnavailable, CapabilityMismatch,
        PeerUnavailable."""
        self.require_up("session")
        self._connected.discard(peer)
        future: asyncio.Future[tuple[str, ...]] = asyncio.get_running_loop().create_future()
        self._opening.setdefault(peer, deque()).append(future)
        self._send(mpb.MoverCommand(open_peer=mpb.OpenPeer(peer=peer, transports=transports)))
        return await future

    def close_peer(self, peer: int, *, abort: bool) -> asyncio.Future[None]:
        """Close the connection to a peer; the future is done when nothing is left of it."""
        self._connected.discard(peer)
        future = self._closing.get(peer)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            if self.up:
                self._closing[peer] = future
            else:
                future.set_result(None)
        self._send(mpb.MoverCommand(close_peer=mpb.ClosePeer(peer=peer, abort=abort)))
        return future

    def new_transfer(self, outputs: Outputs) -> int:
        """A number for a transfer, never given twice, under which `outputs` is told of it. Raises
        DataPlaneUnavailable."""
        self.require_up("offer")
        number = next(self._numbers)
        self._transfers[number] = outputs
        return number

    def begin_target(self, order: mpb.BeginTarget) -> None:
        """Receive a snapshot."""
        self._send(mpb.MoverCommand(begin_target=order))

    def begin_source(self, order: mpb.BeginSource) -> None:
        """Send a held snapshot."""
        self._send(mpb.MoverCommand(begin_source=order))

    def input(self, message: mpb.TransferInput) -> None:
        """Something happened to a transfer; one that is over ignores it."""
        if message.transfer in self._transfers:
            self._send(mpb.MoverCommand(input=message))

    def free(self, snapshot: int) -> None:
        """Give back the memory of a snapshot."""
        self._send(mpb.MoverCommand(free_snapshot=mpb.FreeSnapshot(snapshot=snapshot)))

    def condemn(self, why: str) -> None:
        """The mover does not do what it must: kill it. Its end is noticed as any other."""
        if self._process is not None and self._process.returncode is None:
            _log.error("mover condemned", why=why, pid=self._process.pid)
            self._kill()

    async def drain(self) -> None:
        """Wait until the mover has taken enough of what it was told for more to be sent."""
        if self._connection is not None:
            await self._connection.drain()

    def _send(self, command: mpb.MoverCommand) -> None:
        if self._connection is not None:
            self._connection.send(command)

    # --- supervision ------------------------------------------------------------------------------------------------

    async def _start_one(self) -> None:
        try:
            await self._spawn()
        except OSError as error:  # no more descriptors, processes or memory: perhaps later
            await self._end_process(kill=True)
            raise DataPlaneUnavailable(
                f"the data plane of this node cannot be started: {error}", retry_after_s=1.0, stage="start"
            ) from None
        try:
            async with asyncio.timeout(START_S):
                report = await self._first_report()
        except (EOFError, TimeoutError, ProtocolViolation):
            await self._end_process(kill=True)
            raise DataPlaneUnavailable("the data plane of this node did not come up", stage="start") from None
        if report.WhichOneof("report") != "started" or report.started.HasField("error"):
            await self._end_process(kill=True)
            raise from_status(report.started.error)
        await self._check_guarded(report.started)
        self._heard_s = asyncio.get_running_loop().time()
        self.started = report.started
        self.usage = mpb.MoverUsage(arena=report.started.arena)
        self._on_up(report.started)
        early, self._early = self._early, None
        if self._connection is not None and early:
            self._connection.take_all(early)

    async def _spawn(self) -> None:
        config = await self._guarded()
        ours, theirs = socket.socketpair()
        kept = () if self._firewall is None else self._firewall.descriptors
        with theirs, ExitStack() as undo:
            undo.enter_context(ours)
            ours.setblocking(False)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", "hurray_server.mover", str(theirs.fileno()), config.to_json()),
                pass_fds=(theirs.fileno(), *kept),
                stdin=asyncio.subprocess.DEVNULL,
            )
            self._pidfd = os.pidfd_open(self._process.pid)
            self._early = deque()
            self._came.clear()
            frames = Frames(mpb.MoverReport, self._config.limits.max_message_bytes + FRAME_OVERHEAD_BYTES)
            _, self._connection = await asyncio.get_running_loop().create_unix_connection(
                lambda: FrameConnection(frames, self._hear), sock=ours
            )
            undo.pop_all()

    async def _guarded(self) -> MoverConfig:
        """What to start a mover with, at a port that the firewall guards already. Raises DataPlaneUnavailable."""
        config = self._config
        if self._firewall is not None:
            ucx = at_one_port(config.transports.ucx)
            await self._firewall.guard(ucx.first_port)
            config = replace(config, transports=replace(config.transports, ucx=ucx))
        return config

    async def _check_guarded(self, started: mpb.MoverStarted) -> None:
        """Whether the firewall has stood since before there was this mover: nobody could condemn it until there was.
        Without UCX, leave the port to other processes. Raises DataPlaneUnavailable."""
        if self._firewall is None:
            return
        try:
            if all(item.kind != "ucx" for item in started.transports):
                await self._firewall.guard(None)
            elif not self._firewall.stands:
                raise DataPlaneUnavailable("the firewall of this node has failed", retry_after_s=1.0, stage="start")
        except HurrayError:
            await self._end_process(kill=True)
            raise

    async def _supervise(self) -> None:
        while True:
            error = await self._run_one()
            self._go_down(error)
            await self._end_process(kill=True)
            for delay_s in itertools.chain(RESTART_DELAYS_S, itertools.repeat(RESTART_DELAYS_S[-1])):
                await asyncio.sleep(delay_s)
                try:
                    await self._start_one()
                except HurrayError as failed:
                    _log.error("mover does not start", error=str(failed))
                else:
                    break

    async def _run_one(self) -> DataPlaneUnavailable:
        """Wait until the mover ends; why it did."""
        ping = asyncio.create_task(self._ping())
        assert self._connection is not None
        try:
            await self._connection.ended
            return DataPlaneUnavailable("the data plane of this node ended", retry_after_s=1.0)
        except ProtocolViolation as error:
            return DataPlaneUnavailable(f"the data plane of this node said nonsense: {error}", retry_after_s=1.0)
        finally:
            ping.cancel()

    async def _ping(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            asked_s = loop.time()
            self._send(mpb.MoverCommand(report_usage=mpb.ReportUsage()))
            await asyncio.sleep(PING_S)
            # Counted from what this loop itself has seen, so that a pause of the whole host condemns nobody.
            if loop.time() - asked_s < 2 * PING_S and asked_s - self._heard_s > ANSWER_S:
                self.condemn(f"no answer for {ANSWER_S:g} s")

    async def _first_report(self) -> mpb.MoverReport:
        """What a mover says when it comes up. Raises EOFError, ProtocolViolation."""
        assert self._connection is not None
        ended = self._connection.ended
        came = asyncio.ensure_future(self._came.wait())
        try:
            waits: set[asyncio.Future[Any]] = {ended, came}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            came.cancel()
        if not self._early:
            ended.result()
            raise EOFError
        return self._early.popleft()

    def _hear(self, report: mpb.MoverReport) -> None:
        if self._early is not None:
            self._early.append(report)
            self._came.set()
        else:
            self._heard_s = asyncio.get_running_loop().time()
            self._take(report)

    def _take(self, report: mpb.MoverReport) -> None:
        match report.WhichOneof("report"):
            case "output":
                transfer = report.output.transfer
                outputs = self._transfers.get(transfer)
                if outputs is None:
                    raise ProtocolViolation("report on a transfer that does not run", offered=transfer)
                if report.output.HasField("arena"):
                    self.usage.arena.CopyFrom(report.output.arena)
                if report.output.WhichOneof("output") == "ended":
                    del self._transfers[transfer]
                try:
                    outputs.on_output(report.output)
                except Exception:
                    # One transfer's fault is not the end of all others; its own time limit ends it.
                    _log.exception("internal error", transfer=transfer)
            case "usage":
                before, self.usage = self.usage, report.usage
                if before.unusable != self.usage.unusable:
                    self._on_unusable(self.usage.unusable)
                self._renew()
            case "peer_opened":
                waiting = self._opening.get(report.peer_opened.peer)
                if not waiting:
                    raise ProtocolViolation("an answer that nobody asked for", offered="peer_opened")
                opened = waiting.popleft()
                if not waiting:
                    del self._opening[report.peer_opened.peer]
                if not opened.done():
                    if report.peer_opened.HasField("error"):
                        opened.set_exception(from_status(report.peer_opened.error))
                    else:
                        self._connected.add(report.peer_opened.peer)
                        opened.set_result(tuple(report.peer_opened.transports))
            case "peer_closed":
                closed = self._closing.pop(report.peer_closed.peer, None)
                if closed is not None and not closed.done():
                    closed.set_result(None)
            case "peer_lost":
                # The loss of a connection that is being replaced or closed is nobody's any more.
                if report.peer_lost.peer in self._connected:
                    self._connected.remove(report.peer_lost.peer)
                    self._on_peer_lost(report.peer_lost.peer, from_status(report.peer_lost.error))
            case "reader_gone":
                self._on_reader_gone(report.reader_gone.transfer)
            case other:
                raise ProtocolViolation("unexpected report", offered=other)

    def _renew(self) -> None:
        """Have another mover in the place of one with a transport that only another process can use, as soon as the end
        of this one costs nothing: no transfer runs, and it holds nothing, for readers neither."""
        arena = self.usage.arena
        if (
            self.usage.unusable
            and not self._transfers
            and arena.free_bytes == arena.total_bytes
            and may_start(self._config.transports.ucx)
        ):
            self.condemn("another has to take its place: " + "; ".join(self.usage.unusable.values()))

    def _go_down(self, error: DataPlaneUnavailable) -> None:
        pid = self._process.pid if self._process is not None else None
        _log.error("mover down", pid=pid, error=str(error), transfers=len(self._transfers))
        self.started = None
        self._unknown_tags_before = self.unknown_tag_count
        self.usage = mpb.MoverUsage()
        self._connected.clear()
        transfers, self._transfers = self._transfers, {}
        for outputs in transfers.values():
            outputs.on_mover_down(error)
        opening, self._opening = self._opening, {}
        for opened in (future for waiting in opening.values() for future in waiting):
            if not opened.done():
                opened.set_exception(error)
        closing, self._closing = self._closing, {}
        for closed in closing.values():
            if not closed.done():
                closed.set_result(None)
        self._on_down(error)

    async def _end_process(self, *, kill: bool) -> None:
        """Close the socket and see the process out."""
        self.started = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is None:
            return
        if kill:
            self._kill()
        try:
            async with asyncio.timeout(EXIT_S):
                await self._process.wait()
        except TimeoutError:
            self._kill()
            await self._process.wait()
        self._process = None
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _kill(self) -> None:
        # Not by Process.kill: that reaps the process, and asyncio then misses it. Without a descriptor of it the closed
        # socket has to do.
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
