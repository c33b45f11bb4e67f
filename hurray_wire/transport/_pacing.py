"""TCP connections over loopback: nothing is gained by pacing them.

Where the host's congestion control is one that paces (BBR), loopback runs at half of what it can do: the kernel waits
by timers for a network that is not there.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from typing import Final

_UNPACED: Final = b"reno"
"""Which every Linux has, and every process may choose. What it lacks elsewhere is not missed without a network."""


def unpace(connection: socket.socket) -> None:
    """Give a TCP socket of loopback, listening or at least on its way to its peer, a congestion control that does not
    pace. What a listening socket accepts inherits it. Every other socket keeps what the host's owner chose."""
    address = ipaddress.ip_address(str(connection.getsockname()[0]).partition("%")[0])
    if (getattr(address, "ipv4_mapped", None) or address).is_loopback:
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)
