"""Which requests run and what became of them: the reason why a retry never commits twice.

Pure: no I/O and no clock. A request is known by its tenant and id; its digest tells whether a retry asks for the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from hurray_server.shares import Remembered
from hurray_wire.errors import RequestIdReused
from hurray_wire.v1 import transfer_pb2 as pb

MIN_KEPT_S: Final = 600.0
"""A receipt is kept this long at least, and as long as its snapshot's lease."""

MAX_KEPT: Final = 100_000


@dataclass(eq=False, slots=True)
class Running:
    """A request that runs."""

    tenant: str
    request_id: str
    digest: bytes
    waiters: dict[Callable[[], None], None] = field(default_factory=dict)

    def watch(self, notify: Callable[[], None]) -> Callable[[], None]:
        """Have `notify` called when it has ended in any way, until the function that this returns is called."""
        self.waiters[notify] = None
        return lambda: self.waiters.pop(notify, None)


@dataclass(frozen=True, slots=True)
class _Done:
    digest: bytes
    receipt: bytes
    """Encoded, which takes a tenth of the memory: most are never asked for."""
    until_s: float


class Requests:
    """See the module."""

    def __init__(self, *, max_kept: int = MAX_KEPT) -> None:
        self._running: dict[tuple[str, str], Running] = {}
        self._done: Remembered[tuple[str, str], _Done] = Remembered(max_kept)

    def __len__(self) -> int:
        return len(self._running) + len(self._done)

    def look_up(self, tenant: str, request_id: str, digest: bytes, now_s: float) -> Running | pb.Receipt | None:
        """What is known of a request: it runs, it succeeded with this receipt, or nothing.

        Raises RequestIdReused where the id was given to another request.
        """
        name = (tenant, request_id)
        done = self._done.get(name)
        if done is not None and done.until_s <= now_s:
            self._done.drop(name)
            done = None
        known = done or self._running.get(name)
        if known is not None and known.digest != digest:
            raise RequestIdReused("this request id was used for another request", request_id=request_id)
        return pb.Receipt.FromString(known.receipt) if isinstance(known, _Done) else known

    def begin(self, tenant: str, request_id: str, digest: bytes) -> Running:
        """A request of which nothing is known begins; it runs until `succeed` or `fail`."""
        name = (tenant, request_id)
        assert name not in self._running, name
        running = self._running[name] = Running(tenant, request_id, digest)
        return running

    def succeed(self, running: Running, receipt: pb.Receipt, *, lease_s: float, now_s: float) -> None:
        """It committed: retries get this receipt."""
        done = _Done(running.digest, receipt.SerializeToString(), now_s + max(lease_s, MIN_KEPT_S))
        for _ in self._done.drop_oldest(lambda item: item.until_s <= now_s):
            pass
        self._done.add(running.tenant, (running.tenant, running.request_id), done)
        self._end(running)

    def fail(self, running: Running) -> None:
        """It left no trace: a retry runs anew. Nothing happens for one that has ended."""
        self._end(running)

    def forget_receipts(self) -> None:
        """All that was committed is lost: retries run anew."""
        self._done.clear()

    def _end(self, running: Running) -> None:
        if self._running.get((running.tenant, running.request_id)) is running:
            del self._running[running.tenant, running.request_id]
            for notify in running.waiters:
                notify()
