"""The link to a mover that starts, dies, hangs or lies: a stand-in for the mover, told what to do by a file."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hurray_server import mover_link
from hurray_server.mover_config import MoverConfig, TransportsConfig
from hurray_server.mover_link import MoverLink
from hurray_wire.errors import DataPlaneUnavailable, HurrayError, PeerUnavailable, ProtocolViolation
from hurray_wire.limits import Limits
from hurray_wire.status import to_status
from hurray_wire.transport.shm import ShmConfig
from hurray_wire.transport.tls import SocketConfig
from hurray_wire.transport.ucx_config import UcxConfig
from hurray_wire.v1 import mover_pb2 as mpb
from hurray_wire.v1 import transfer_pb2 as pb

TRANSPORTS = TransportsConfig(("ucx",), ShmConfig(), SocketConfig(), UcxConfig())
CONFIG = MoverConfig(1 << 20, False, TRANSPORTS, Limits(), "info", "json")

STAND_IN = """\
    #!{python}
    import os, signal, socket, sys
    from pathlib import Path
    from hurray_server.framing import Frames, pack, receive
    from hurray_wire.errors import CapabilityMismatch
    from hurray_wire.status import to_status
    from hurray_wire.v1 import mover_pb2 as mpb
    connection = socket.socket(fileno=int(sys.argv[4]))
    script = Path({script!r})
    steps = script.read_text().split()
    def say(**report):
        connection.sendall(pack(mpb.MoverReport(**report)))
    if steps and steps[0] == "refuse":
        say(started=mpb.MoverStarted(error=to_status(CapabilityMismatch("not here"))))
        sys.exit(1)
    if steps and steps[0] == "exit":
        with script.with_name("attempts").open("a") as attempts:
            attempts.write("x")
        sys.exit(3)
    kinds = [dict(kind="tcp"), dict(kind="ucx")]
    say(started=mpb.MoverStarted(incarnation=os.getpid(), transports=kinds))
    for command in receive(connection, Frames(mpb.MoverCommand, 1 << 20)):
        kind = command.WhichOneof("command")
        step = script.read_text().strip()
        if step == "hang":
            signal.pause()
        elif kind == "report_usage" and step.startswith("unusable"):
            arena = dict(total_bytes=9, free_bytes=int(step.split()[1]))
            say(usage=mpb.MoverUsage(unusable=dict(ucx="of old age"), arena=arena))
        elif kind == "report_usage":
            say(usage=mpb.MoverUsage(peer_count=7))
        elif kind == "open_peer" and step == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "open_peer" and step == "nonsense":
            connection.sendall(bytes([4, 0, 0, 0]) + bytes([255] * 4))
        elif kind == "open_peer" and step == "lie":
            say(output=mpb.TransferOutput(transfer=99))
        elif kind == "open_peer" and command.open_peer.peer == 13:
            say(peer_opened=mpb.PeerOpened(peer=13, error=to_status(CapabilityMismatch("unlucky"))))
        elif kind == "open_peer":
            say(peer_opened=mpb.PeerOpened(peer=command.open_peer.peer))
        elif kind == "free_snapshot":
            say(peer_lost=mpb.PeerLost(peer=command.free_snapshot.snapshot))
        elif kind == "close_peer":
            say(peer_closed=mpb.PeerClosed(peer=command.close_peer.peer))
        elif kind == "begin_target":
            number = command.begin_target.transfer
            say(output=mpb.TransferOutput(transfer=number, target=dict(receipt=dict(key="k"))))
            say(output=mpb.TransferOutput(transfer=number, ended=mpb.TransferEnded()))
            say(reader_gone=mpb.ReaderGone(transfer=number))
"""


class Recorder:
    """What the owner of a link is told."""

    def __init__(self) -> None:
        self.up: asyncio.Queue[int] = asyncio.Queue()
        self.down: asyncio.Queue[HurrayError] = asyncio.Queue()
        self.outputs: asyncio.Queue[Any] = asyncio.Queue()
        self.lost: asyncio.Queue[int] = asyncio.Queue()
        self.gone: asyncio.Queue[int] = asyncio.Queue()
        self.unusable: asyncio.Queue[dict[str, str]] = asyncio.Queue()
        self.link = MoverLink(
            CONFIG,
            on_up=lambda started: self.up.put_nowait(started.incarnation),
            on_down=self.down.put_nowait,
            on_peer_lost=lambda peer, _error: self.lost.put_nowait(peer),
            on_reader_gone=self.gone.put_nowait,
            on_unusable=lambda kinds: self.unusable.put_nowait(dict(kinds)),
        )

    def on_output(self, output: mpb.TransferOutput) -> None:
        self.outputs.put_nowait(output.WhichOneof("output"))

    def on_mover_down(self, error: HurrayError) -> None:
        self.outputs.put_nowait(error)


Play = Callable[[str], None]
Run = Callable[[Callable[[Recorder], Awaitable[None]]], None]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Tells the stand-in, now or later, what to do."""
    script, program = tmp_path / "script", tmp_path / "mover"
    script.write_text("")
    program.write_text(textwrap.dedent(STAND_IN).format(python=sys.executable, script=str(script)))
    program.chmod(0o755)
    monkeypatch.setattr(mover_link.sys, "executable", str(program))
    return lambda step: script.write_text(step) and None


def run(body: Callable[[Recorder], Awaitable[None]]) -> None:
    async def main() -> None:
        recorder = Recorder()
        await recorder.link.start()
        try:
            async with asyncio.timeout(20):
                await body(recorder)
        finally:
            await recorder.link.stop()

    asyncio.run(main())


TRANSPORTS = [pb.Transport(kind="ucx")]


def test_commands_are_answered(play: Play) -> None:
    async def body(recorder: Recorder) -> None:
        link = recorder.link
        assert await recorder.up.get() == link.require_up("s").incarnation
        await link.open_peer(5, TRANSPORTS)
        with pytest.raises(HurrayError, match="unlucky"):
            await link.open_peer(13, TRANSPORTS)
        await link.close_peer(5, abort=False)
        first, second = link.new_transfer(recorder), link.new_transfer(recorder)
        assert first != second
        link.begin_target(mpb.BeginTarget(transfer=first))
        assert await recorder.outputs.get() == "target"
        assert await recorder.outputs.get() == "ended"
        assert await recorder.gone.get() == first
        link.input(mpb.TransferInput(transfer=first, stream_lost=mpb.StreamLost()))  # late: nothing happens
        await link.close_peer(6, abort=True)
        assert link.usage.peer_count == 7

    run(body)


def test_only_the_loss_of_the_connection_that_is_open_is_told(play: Play) -> None:
    async def body(recorder: Recorder) -> None:
        link = recorder.link
        link.free(5)  # the stand-in says that peer 5 is lost
        await link.open_peer(5, TRANSPORTS)
        await link.open_peer(6, TRANSPORTS)
        link.free(5)
        await link.close_peer(6, abort=True)
        link.free(6)
        link.free(5)
        await link.open_peer(7, TRANSPORTS)
        assert recorder.lost.get_nowait() == 5
        assert recorder.lost.empty()

    run(body)


def test_an_answer_that_nobody_waits_for_does_not_pass_for_the_next_one(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(recorder: Recorder) -> None:
        link = recorder.link
        await recorder.up.get()
        monkeypatch.setattr(link, "_send", lambda _: None)
        given_up = asyncio.ensure_future(link.open_peer(5, TRANSPORTS))
        await asyncio.sleep(0)
        given_up.cancel()
        again = asyncio.ensure_future(link.open_peer(5, TRANSPORTS))
        await asyncio.sleep(0)
        link._take(mpb.MoverReport(peer_opened=mpb.PeerOpened(peer=5)))
        await asyncio.sleep(0)
        assert not again.done()
        error = to_status(PeerUnavailable("unlucky"))
        link._take(mpb.MoverReport(peer_opened=mpb.PeerOpened(peer=5, error=error)))
        with pytest.raises(PeerUnavailable):
            await again
        with pytest.raises(ProtocolViolation):
            link._take(mpb.MoverReport(peer_opened=mpb.PeerOpened(peer=5)))

    run(body)


def test_a_mover_whose_ucx_is_unusable_is_replaced_once_that_costs_nothing_and_another_would_start(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = False
    monkeypatch.setattr(mover_link, "PING_S", 0.02)
    monkeypatch.setattr(mover_link, "may_start", lambda _: starts)

    async def body(recorder: Recorder) -> None:
        async def still_there() -> None:
            """Whether it has told of itself twice, and goes on."""
            for _ in range(2):
                told = link.usage
                while link.usage is told:  # noqa: ASYNC110 -- nothing else tells
                    await asyncio.sleep(0.005)
            assert link.require_up("s").incarnation == old

        nonlocal starts
        link, old = recorder.link, await recorder.up.get()
        assert [transport.kind for transport in link.transports] == ["tcp", "ucx"]
        play("unusable 9")
        assert await recorder.unusable.get() == {"ucx": "of old age"}
        assert [transport.kind for transport in link.transports] == ["tcp"]
        await still_there()
        play("unusable 8")
        await still_there()
        starts = True
        await still_there()
        number = link.new_transfer(recorder)
        play("unusable 9")
        await still_there()
        assert recorder.unusable.empty()
        link.begin_target(mpb.BeginTarget(transfer=number))  # it ends
        assert isinstance(await recorder.down.get(), DataPlaneUnavailable)
        play("")
        assert await recorder.up.get() != old
        assert len(link.transports) == 2

    run(body)


@pytest.mark.parametrize("step", ["die", "nonsense", "lie"])
def test_a_mover_that_ends_or_lies_is_replaced_and_everything_that_waits_for_it_fails(play: Play, step: str) -> None:
    async def body(recorder: Recorder) -> None:
        link = recorder.link
        old = await recorder.up.get()
        link.new_transfer(recorder)
        play(step)
        with pytest.raises(DataPlaneUnavailable):
            await link.open_peer(5, TRANSPORTS)
        assert isinstance(await recorder.outputs.get(), DataPlaneUnavailable)
        assert isinstance(await recorder.down.get(), DataPlaneUnavailable)
        assert not link.up
        for refused in (lambda: link.new_transfer(recorder), lambda: link.require_up("s")):
            with pytest.raises(DataPlaneUnavailable):
                refused()
        await link.close_peer(5, abort=True)
        link.free(3)  # its memory went with it
        play("")
        assert await recorder.up.get() != old
        await link.open_peer(5, TRANSPORTS)

    run(body)


def test_a_mover_that_hangs_is_condemned(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover_link, "PING_S", 0.1)
    monkeypatch.setattr(mover_link, "ANSWER_S", 0.5)

    async def body(recorder: Recorder) -> None:
        old = await recorder.up.get()
        play("hang")
        assert isinstance(await recorder.down.get(), DataPlaneUnavailable)
        play("")
        assert await recorder.up.get() != old

    run(body)


def test_the_next_mover_is_tried_until_it_comes_up(play: Play, tmp_path: Path) -> None:
    async def body(recorder: Recorder) -> None:
        await recorder.up.get()
        play("exit")
        recorder.link.condemn("for this test")
        await recorder.down.get()
        while not (attempts := tmp_path / "attempts").exists() or len(attempts.read_text()) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not recorder.link.up
        play("")
        await recorder.up.get()

    run(body)


@pytest.mark.parametrize("missing", ["socketpair", "create_subprocess_exec", "pidfd_open"])
def test_a_mover_that_cannot_be_started_for_want_of_descriptors_is_tried_again(
    play: Play, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    # A module of the link's own for each: asyncio opens descriptors of processes, too, and is not what is tested.
    name = {"socketpair": "socket", "pidfd_open": "os"}.get(missing, "asyncio")
    owner = SimpleNamespace(**vars(getattr(mover_link, name)))

    async def body(recorder: Recorder) -> None:
        old = await recorder.up.get()
        open_before = len(os.listdir("/proc/self/fd"))
        works, failures = getattr(owner, missing), 0

        def fails(*arguments: Any, **options: Any) -> Any:
            nonlocal failures
            failures += 1
            if failures > 2:
                return works(*arguments, **options)
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(owner, missing, fails)
        monkeypatch.setattr(mover_link, name, owner)
        recorder.link.condemn("for this test")
        assert isinstance(await recorder.down.get(), DataPlaneUnavailable)
        assert await recorder.up.get() != old
        assert failures > 2
        assert recorder.link.supervisor is not None
        assert not recorder.link.supervisor.done()
        assert len(os.listdir("/proc/self/fd")) == open_before

    run(body)


@pytest.mark.parametrize(("step", "said"), [("exit", "did not come up"), ("refuse", "not here")])
def test_a_first_mover_that_does_not_come_up_is_an_error(play: Play, step: str, said: str) -> None:
    async def main() -> None:
        recorder = Recorder()
        try:
            with pytest.raises(HurrayError, match=said) as caught:
                await recorder.link.start()
            assert not isinstance(caught.value, PeerUnavailable)
        finally:
            await recorder.link.stop()

    play(step)
    asyncio.run(main())
