"""Where a caller's pages are, and what follows from it: who does the work, in which order, and how the bytes travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hurray_wire import cuda
from hurray_wire.arrays import as_array
from hurray_wire.checksum import MIX64, XXH3_64, Hash
from hurray_wire.destination import Destination
from hurray_wire.errors import InvalidRequest
from hurray_wire.limits import chunk_bytes_for
from hurray_wire.memory import DEVICE_CPU, DEVICE_CUDA, HOST, Place
from hurray_wire.paged import CacheKey

Device = tuple[int, int]
"""Device tag and number."""

CPU: Final[Device] = (DEVICE_CPU, 0)


def read_device(name: str) -> Device:
    """The device that a caller names: "cpu", "cuda" or "cuda:1". Raises InvalidRequest."""
    number = cuda.read_device(name)
    return CPU if number is None else (DEVICE_CUDA, number)


def follow(device: Device, stream: object | None) -> None:
    """Let the work on this device begin after what the caller has started on `stream`, or on the streams that are
    current in this thread. Raises InvalidRequest for a stream of the host, Unsupported where there is no such GPU."""
    if device[0] == DEVICE_CUDA:
        cuda.gpu(device[1]).follow(stream)
    elif stream is not None:
        raise InvalidRequest("the pages are in host memory, which has no streams", field="stream", required="None")


def follow_into(into: Mapping[CacheKey, object] | Destination | None, device: str, stream: object | None) -> None:
    """`follow` for what a get writes to: the caller's caches, or memory of its own on a device."""
    if isinstance(into, Destination):
        follow(into.device, stream)
    elif into:
        view = as_array(next(iter(into.values())))
        follow((view.device_tag, view.device_id), stream)
    else:
        follow(read_device(device), stream)


@dataclass(frozen=True, slots=True)
class Way:
    """How the bytes of one transfer travel on this side. `in_host`: those of a GPU go through host memory, for the
    transport takes no others."""

    place: Place
    in_host: bool

    @classmethod
    def of(cls, device: Device, takes_device_memory: bool) -> Way:
        """For pages on this device. Raises Unsupported where there is no such GPU."""
        if device[0] != DEVICE_CUDA:
            return cls(HOST, False)
        return cls(cuda.gpu(device[1]), not takes_device_memory)

    @property
    def direct(self) -> bool:
        """Whether memory of a GPU is given to the transport."""
        return self.place is not HOST and not self.in_host

    def chunk_bytes(self, transport: str, configured: int | None) -> int:
        """Bytes of the chunks of a put."""
        return configured or (cuda.CHUNK_BYTES if self.direct else chunk_bytes_for(transport))

    def hash(self, device_tags: tuple[int, ...] = (DEVICE_CUDA,)) -> Hash:
        """How chunks are checked where nobody says otherwise: so that both sides do it where the bytes are.
        `device_tags` are the peer's."""
        return MIX64 if self.direct and DEVICE_CUDA in device_tags else XXH3_64
