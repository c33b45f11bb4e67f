"""Which networks a device of this host is on, and whether the configuration trusts them."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from hurray_wire.errors import Misuse

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_SIOCGIFCONF: Final = 0x8912
_IFREQ_BYTES: Final = 40
_IFREQS_MAX: Final = 4096


def addresses_of(device: str) -> list[Address]:
    """The addresses of a network device; none for one that is not there, or that speaks no IP."""
    found: list[Address] = [address for name, address in _ipv4() if name == device]
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            fields = line.split()
            if fields[-1] == device:
                found.append(ipaddress.IPv6Address(bytes.fromhex(fields[0])))
    return found


def devices_of(host: str) -> set[str]:
    """The network devices that have this address; for the one that means all addresses, all but loopback. None for a
    name, which is not looked up."""
    try:
        wanted = ipaddress.ip_address(host)
    except ValueError:
        return set()
    if wanted.is_unspecified:
        return {name for name, address in _ipv4() if not address.is_loopback}
    if wanted.version == 4:
        return {name for name, address in _ipv4() if address == wanted}
    return {device for _, device in socket.if_nameindex() if wanted in addresses_of(device)}


def _ipv4() -> list[tuple[str, Address]]:
    """Device and address of every IPv4 address of this host."""
    buffer = array.array("B", bytes(_IFREQ_BYTES * _IFREQS_MAX))
    request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        (length, _) = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, request))
    entries = [bytes(buffer[start : start + _IFREQ_BYTES]) for start in range(0, length, _IFREQ_BYTES)]
    return [
        # An alias, eth0:1, is an address of its device.
        (entry[:16].split(b"\0")[0].decode().partition(":")[0], ipaddress.IPv4Address(entry[20:24]))
        for entry in entries
    ]


def check_trusted(devices: Sequence[str], trusted: Sequence[str], field: str) -> None:
    """Raise Misuse for a device that strangers may reach: `trusted` names neither the device nor, for each of its
    addresses, a network that holds it. Loopback needs no naming. An address of the link does not count beside others.
    """
    networks = [ipaddress.ip_network(entry, strict=False) for entry in trusted if is_network(entry)]
    for device in devices:
        if device in trusted:
            continue
        addresses = addresses_of(device)
        routed = [address for address in addresses if not address.is_link_local] or addresses
        strange = [address for address in routed if not address.is_loopback and not _within(address, networks)]
        if strange or not addresses:
            place = f"its address is {strange[0]}" if strange else "it has no address here"
            raise Misuse(
                f"whoever reaches {device} can read and write this process: {place}, which is not in {field}",
                field=field,
                offered=", ".join(trusted) or "nothing",
                required=f"{device}, or every network it is on",
            )


def is_network(text: str) -> bool:
    """Whether it is an IP network, or an address."""
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def _within(address: Address, networks: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]) -> bool:
    return any(address in network for network in networks if network.version == address.version)
