"""The TCP sockets of a library that does not hand them out, found among the process's own file descriptors.

UCX gives no way to bound how long a silent partition stays unnoticed on its sockets (38 to 73 s were measured). The
kernel's TCP_USER_TIMEOUT does. Nor can it listen at a port that a closed connection keeps in TIME_WAIT, for a minute;
reset on close, a connection keeps none. Sockets are recognised by their ports, so that no other part of the process is
touched.
"""

from __future__ import annotations

import os
import random
import select
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from hurray_wire.transport._pacing import unpace

_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
"""SO_LINGER: on, 0 seconds."""


def open_descriptors() -> frozenset[int]:
    """File descriptors that are open in this process now; without the one that lists them, whose number is free again
    and may be the next socket's."""
    return frozenset(int(name) for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}"))


def open_sockets() -> frozenset[str]:
    """Sockets that are open in this process now, by what the kernel calls them: unlike the number of a descriptor, the
    name of one that another thread closes is not the next one's."""
    return frozenset(filter(None, map(_socket_name, open_descriptors())))


def free_ports(first_port: int, last_port: int) -> Iterator[int]:
    """The ports of a range (both ends included) that nothing is bound to, from a random one on. Another process may
    take one meanwhile."""
    count = last_port - first_port + 1
    start = random.randrange(count)  # noqa: S311 -- no secret
    for step in range(count):
        port = first_port + (start + step) % count
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        yield port


def listening_ports(first_port: int, last_port: int, *, opened_before: frozenset[str]) -> frozenset[int]:
    """Ports within the range (both ends included) of listening TCP sockets that were opened since."""
    found = set()
    for descriptor in _opened_since(opened_before):
        with _tcp_socket(descriptor) as connection:
            if connection is None or not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            port = connection.getsockname()[1]
            if first_port <= port <= last_port:
                found.add(port)
    return frozenset(found)


def guard(
    timeout_s: float,
    *,
    local_ports: Collection[int],
    remote_ports: Collection[int],
    opened_before: frozenset[str],
) -> int:
    """Let unacknowledged data break a connection after `timeout_s`, a close reset it, and nothing pace it on this host,
    on every TCP socket that was opened since and has one of these ports.

    Sockets that a listening socket accepts later inherit it. Returns how many sockets were found.
    """
    count = 0
    for descriptor in _opened_since(opened_before):
        with _tcp_socket(descriptor) as connection:
            if connection is None:
                continue
            try:
                remote_port = connection.getpeername()[1]
            except OSError:
                remote_port = None
            if connection.getsockname()[1] in local_ports or remote_port in remote_ports:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout_s * 1000))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                unpace(connection)
                count += 1
    return count


def any_blocked(*, local_ports: Collection[int], remote_ports: Collection[int], shut: bool = False) -> bool:
    """Whether any connected TCP socket with one of these ports cannot be written to now. `shut` ends those."""
    found = False
    for descriptor in open_descriptors():
        with _tcp_socket(descriptor) as connection:
            if connection is None:
                continue
            try:
                remote_port = connection.getpeername()[1]
            except OSError:
                continue
            if connection.getsockname()[1] in local_ports or remote_port in remote_ports:
                poll = select.poll()
                poll.register(connection, select.POLLOUT)
                if not poll.poll(0):
                    found = True
                    if shut:
                        connection.shutdown(socket.SHUT_RDWR)
    return found


def _opened_since(before: frozenset[str]) -> Iterator[int]:
    for descriptor in open_descriptors():
        name = _socket_name(descriptor)
        if name is not None and name not in before:
            yield descriptor


def _socket_name(descriptor: int) -> str | None:
    """None for what is no socket, or is closed meanwhile by its owner."""
    try:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return None
    return name if name.startswith("socket:") else None


@contextmanager
def _tcp_socket(descriptor: int) -> Iterator[socket.socket | None]:
    """The TCP socket behind a descriptor, through a duplicate that is closed again; None for anything else."""
    # Whose descriptor it is may change between any two steps: what counts is what the duplicate turns out to be.
    connection = None
    if _socket_name(descriptor) is not None:
        with suppress(OSError):
            connection = _as_socket(os.dup(descriptor))
    if connection is None:
        yield None
        return
    with connection:
        internet = connection.family in (socket.AF_INET, socket.AF_INET6)
        yield connection if internet and connection.type == socket.SOCK_STREAM else None


def _as_socket(descriptor: int) -> socket.socket:
    """Takes the descriptor over. Raises OSError for one that is no socket."""
    try:
        return socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise
