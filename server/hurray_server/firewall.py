"""Who may reach UCX's port of this node: hosts that have a session here, and this host itself.

A table of nftables refuses everyone else at that port, packet by packet, connections that are made already included.
The table is owned (nftables' `flags owner`) by the `nft -i` that made it: nobody else changes it, a flush of the whole
ruleset leaves it in place, and the kernel removes it when that process ends. It ends with its standard input, of which
hurrayd holds the other end, and so does every mover: however hurrayd ends, the port is guarded for as long as there may
be a listener at it, and nothing is left afterwards.

All in the event loop; nothing here blocks, except `check_firewall`, which is for before the start.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import structlog

from hurray_wire.errors import DataPlaneUnavailable, InvalidRequest

_log = structlog.get_logger("hurray.firewall")

FIELD: Final = "ucx.firewall"

ANSWER_S: Final = 5.0
"""Longest time for nft to carry out one command, and to end when it is told to."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NOT_THE_GROUPS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals to the whole control group are hurrayd's to obey: nft ends with hurrayd and its mover, not before them."""


class Firewall:
    """See the module. `name`: of the table, no other's on this host. `on_failed(why)`: nothing may be at the port any
    more, for nobody guards it; the next `guard` begins anew."""

    def __init__(self, name: str, *, on_failed: Callable[[str], None]) -> None:
        self._name = name
        self._on_failed = on_failed
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._stdin = -1
        self.stands = False
        """Whether the table is there; it refuses what `guard` was told last."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._sessions: Counter[Address] = Counter()
        self._admitted: set[Address] = set()
        """Addresses in the table: those of sessions, a moment later."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What a mover inherits, and keeps open until it ends."""
        return (self._stdin,) if self._stdin >= 0 else ()

    async def guard(self, port: int | None) -> None:
        """Refuse this port, and no other, to whom is not admitted; None: no port. Raises DataPlaneUnavailable."""
        commands = [f"flush set inet {self._name} ports"]
        if port is not None:
            commands.append(_element("add", self._name, port))
        async with self._lock:
            if not self.stands:
                await self._begin()
            refused = await self._tell("; ".join(commands), "start")
            if refused is not None:
                raise _unavailable(refused, "start")
        _log.info("firewall", table=self._name, port=port)

    async def admit(self, caller: str) -> Address | None:
        """Let the host of a caller, as gRPC names it, reach the port until it is released as often as it was admitted.
        None: a caller of this host, which needs no admission.

        Raises DataPlaneUnavailable: it is not admitted.
        """
        address = address_of(caller)
        if address is None:
            return None
        self._sessions[address] += 1
        try:
            # Nothing that happens to the caller comes between a command and nft's answer.
            await asyncio.shield(self._start(self._settle(address)))
        except BaseException:
            self.release(address)
            raise
        return address

    def release(self, address: Address) -> None:
        """A session of this host is over."""
        self._sessions[address] -= 1
        if not self._sessions[address]:
            del self._sessions[address]
            self._start(self._settle(address))

    async def stop(self) -> None:
        """Remove the table. The mover must have ended."""
        async with self._lock:
            await self._end()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # told to who waits for it, and by `_failed`

    async def _settle(self, address: Address) -> None:
        """Have the table say of this address what the sessions say. Raises DataPlaneUnavailable."""
        async with self._lock:
            wanted = address in self._sessions
            if wanted == (address in self._admitted):
                return
            if not self.stands:
                raise _unavailable("it is not there", "session")
            refused = await self._tell(_element("add" if wanted else "delete", self._name, address), "session")
            if refused is None:
                (self._admitted.add if wanted else self._admitted.discard)(address)
            elif wanted:
                raise _unavailable(f"{address} cannot be admitted: {refused}", "session")
            else:
                self._failed(f"{address} cannot be shut out: {refused}")

    # --- nft ------------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        await self._end()
        theirs, self._stdin = os.pipe()
        try:
            with _held_signals():
                self._process = await asyncio.create_subprocess_exec(
                    *(find_nft(), "-i"),
                    stdin=theirs,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,  # a terminal's ^C is not for it either
                    restore_signals=False,  # ignores SIGPIPE, as Python does: nobody may be there for its answer
                )
        except OSError as error:
            raise _unavailable(f"nft does not start: {error}", "start") from None
        finally:
            os.close(theirs)
        self.stands = True
        refused = await self._tell("; ".join(_table(self._name)), "start")
        if refused is not None:
            await self._end()
            raise _unavailable(refused, "start")
        self._start(self._watch(self._process))

    async def _tell(self, command: str, stage: str) -> str | None:
        """Why nft refuses a command; None: it is carried out, whole. Raises DataPlaneUnavailable: nobody knows."""
        assert self._process is not None
        assert self._process.stdout is not None
        errors = []
        try:
            os.write(self._stdin, f"{command}\nlist set inet {self._name} ports\n".encode("ascii"))
            async with asyncio.timeout(ANSWER_S):
                while (line := await self._process.stdout.readline()) != b"}\n":  # the end of the set
                    if not line:
                        raise EOFError
                    if b"Error: " in line or b"not permitted" in line:
                        errors.append(line.decode(errors="replace").strip())
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            why = "nft does not answer" if isinstance(error, TimeoutError) else "nft has ended"
            why = "; ".join([why, *errors])
            self._failed(why)
            raise _unavailable(why, stage) from None
        return "; ".join(errors) or None

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        if self._process is process:
            self._failed("nft has ended")

    def _failed(self, why: str) -> None:
        if self.stands:
            self.stands = False
            _log.error("the firewall has failed", table=self._name, why=why)
            self._on_failed(f"its firewall has failed: {why}")

    async def _end(self) -> None:
        """See nft, and with it the table, out."""
        self.stands = False
        self._admitted.clear()
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1
        process, self._process = self._process, None
        if process is None:
            return
        try:
            async with asyncio.timeout(ANSWER_S):
                await process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def check_firewall(net_devices: tuple[str, ...]) -> None:
    """Whether this process could set one up; changes nothing. Raises InvalidRequest."""
    for device in net_devices:
        name = device.partition(":")[0]
        if Path("/sys/class/infiniband", name).exists():
            raise InvalidRequest(f"{FIELD}: what goes over {device} passes no firewall", field=FIELD, offered=device)
    commands = "\n".join(_table("hurrayd_check"))
    try:
        checked = subprocess.run(  # noqa: S603 -- an argument list, and commands of our own
            [find_nft(), "-c", "-f", "-"], input=commands, capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidRequest(f"{FIELD}: nft does not run: {error}", field=FIELD) from None
    if checked.returncode:
        said = (checked.stderr or checked.stdout).strip().partition("\n")[0]
        raise InvalidRequest(
            f"{FIELD}: nft cannot set it up (it takes CAP_NET_ADMIN, and Linux 5.12 or newer): {said}",
            field=FIELD,
            offered="true",
        )


def find_nft() -> str:
    """The path of nft. Raises FileNotFoundError."""
    found = shutil.which("nft", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        raise FileNotFoundError("there is no command nft here: install nftables")
    return found


def address_of(caller: str) -> Address | None:
    """Where a caller is, as gRPC names it ("ipv4:10.0.0.1:40312", "ipv6:[fd00::1]:40312"); None: on this host, by a
    Unix socket or loopback. Raises DataPlaneUnavailable for what the table cannot name."""
    scheme, _, place = unquote(caller).partition(":")
    if scheme == "unix":
        return None
    host = place.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise _unavailable(f"{caller[:256]} is no address that could be admitted", "session") from None
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
        if isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None:
            raise _unavailable(f"{host} is the address of a link, which others have, too", "session")
    return None if address.is_loopback else address


def _table(name: str) -> list[str]:
    """Commands that make it, guarding no port yet. What comes over loopback is of this host, and from which of its
    processes no address tells."""
    stranger = "tcp dport @ports iif != lo"
    return [
        f"add table inet {name} {{ flags owner; }}",
        f"add set inet {name} ports {{ type inet_service; }}",
        f"add set inet {name} sessions4 {{ type ipv4_addr; }}",
        f"add set inet {name} sessions6 {{ type ipv6_addr; }}",
        f"add chain inet {name} arriving {{ type filter hook input priority filter; policy accept; }}",
        f"add rule inet {name} arriving {stranger} ip saddr != @sessions4 reject with tcp reset",
        f"add rule inet {name} arriving {stranger} ip6 saddr != @sessions6 reject with tcp reset",
    ]


def _element(verb: str, name: str, value: Address | int) -> str:
    chosen = "ports" if isinstance(value, int) else f"sessions{value.version}"
    return f"{verb} element inet {name} {chosen} {{ {value} }}"


@contextmanager
def _held_signals() -> Iterator[None]:
    """What is started here never gets these signals: unlike a handler, what is blocked stays so, in nft, too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_THE_GROUPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _unavailable(why: str, stage: str) -> DataPlaneUnavailable:
    return DataPlaneUnavailable(f"the firewall of this node: {why}", retry_after_s=1.0, stage=stage, field=FIELD)
