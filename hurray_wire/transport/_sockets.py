"""The TCP sockets of a library that does not hand them out, found among the process's own file descriptors.

UCX gives no way to bound how long a silent partition stays unnoticed on its sockets (38 to 73 s were measured). The
kernel's TCP_USER_TIMEOUT does. Sockets are recognised by their ports, so that no other part of the process is touched.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager


def open_descriptors() -> frozenset[int]:
    """File descriptors that are open in this process now; without the one that lists them, whose number is free again
    and may be the next socket's."""
    return frozenset(int(name) for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}"))


def listening_ports(first_port: int, last_port: int, *, opened_before: frozenset[int]) -> frozenset[int]:
    """Ports within the range (both ends included) of listening TCP sockets that were opened since."""
    found = set()
    for descriptor in open_descriptors() - opened_before:
        with _tcp_socket(descriptor) as connection:
            if connection is None or not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            port = connection.getsockname()[1]
            if first_port <= port <= last_port:
                found.add(port)
    return frozenset(found)


def set_user_timeout(
    timeout_s: float,
    *,
    local_ports: Collection[int],
    remote_ports: Collection[int],
    opened_before: frozenset[int],
) -> int:
    """Let unacknowledged data break a connection after `timeout_s`, on every TCP socket that was opened since and has
    one of these ports.

    Sockets that a listening socket accepts later inherit it. Returns how many sockets were found.
    """
    count = 0
    for descriptor in open_descriptors() - opened_before:
        with _tcp_socket(descriptor) as connection:
            if connection is None:
                continue
            try:
                remote_port = connection.getpeername()[1]
            except OSError:
                remote_port = None
            if connection.getsockname()[1] in local_ports or remote_port in remote_ports:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout_s * 1000))
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


@contextmanager
def _tcp_socket(descriptor: int) -> Iterator[socket.socket | None]:
    """The TCP socket behind a descriptor, through a duplicate that is closed again; None for anything else."""
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            yield None
            return
        duplicate = os.dup(descriptor)
    except OSError:  # closed meanwhile by its owner
        yield None
        return
    with socket.socket(fileno=duplicate) as connection:
        internet = connection.family in (socket.AF_INET, socket.AF_INET6)
        yield connection if internet and connection.type == socket.SOCK_STREAM else None
