"""The in-process transport on a network that takes time: messages overtake each other, and what a lost connection had
under way arrives or does not. It also sees every write, and holds it against the truth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from hurray_wire.transport.memory import MemoryFabric, MemoryTransport, _Loss, _Message, _Operation
from simulation.kernel import Kernel, Process


class SimulatedTransport(MemoryTransport):
    """`on_land(transport, message, receive)` is told of every message before it is written to its receive. It goes by
    the name of a transport that programs know."""

    kind: ClassVar[str] = "tcp"

    def __init__(
        self,
        kernel: Kernel,
        fabric: MemoryFabric,
        on_land: Callable[[SimulatedTransport, _Message, _Operation], None],
        eager_max_bytes: int,
    ) -> None:
        self.process: Process = kernel.process
        self._kernel = kernel
        self._on_land = on_land
        self._held_arrivals: list[tuple[Any, Any]] = []
        self.stalled = False
        """Nothing arrives, and nobody is told."""
        super().__init__(fabric, eager_max_bytes=eager_max_bytes)

    def stall(self, duration_s: float) -> None:
        """Let nothing arrive for a while."""
        if not self.stalled:
            self.stalled = True
            self._kernel.after(duration_s, self.flow)

    def flow(self) -> None:
        """End a stall."""
        self.stalled = False
        held, self._held_arrivals = self._held_arrivals, []
        for arrival, partner in held:
            self._arrive_late(arrival, partner)

    def die(self) -> None:
        """Its process is killed."""
        self._fabric.crash(self)

    def _deliver(self, arrival: _Message | _Loss) -> None:
        partner = arrival.send.endpoint._partner if isinstance(arrival, _Message) else None
        delay_s = self._kernel.moment()
        if isinstance(arrival, _Loss):
            delay_s += self._kernel.moment()  # after most of what was under way, not all
        self._kernel.after(delay_s, self._arrive_late, arrival, partner)

    def _arrive_late(self, arrival: _Message | _Loss, partner: Any) -> None:
        if self.stalled and isinstance(arrival, _Message):
            self._held_arrivals.append((arrival, partner))
            return
        if isinstance(arrival, _Message) and partner is not None and not partner._open:
            return  # the connection it came by is gone
        super()._deliver(arrival)

    def _land(self, message: _Message, receive: _Operation) -> None:
        self._on_land(self, message, receive)
        super()._land(message, receive)
