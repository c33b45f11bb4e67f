"""What this node has done since its start, in numbers.

Written and read in the event loop. A transfer costs a few look-ups here: all that is made of the numbers is made when
somebody asks for them (`hurray_server.metrics`). Labels are few and known beforehand, whatever peers say: no key, name
or tenant is among them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import Final

from hurray_wire.errors import HurrayError
from hurray_wire.session_phases import SourcePhase, TargetPhase
from hurray_wire.v1 import transfer_pb2 as pb

OK: Final = "OK"
"""The cause of what succeeded, among reasons."""

BOUNDS_S: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds of the buckets that durations are counted in."""


_STAGES: Final = frozenset(phase.value for phase in (*SourcePhase, *TargetPhase))


class Durations:
    """A histogram of seconds. `counts`: of each bucket alone; the last is of what is above all bounds."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """One more."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


NONE_YET: Final = Durations()
"""Stands for those of what has not happened. Nothing is observed in it."""


class Tally:
    """See the module. A direction is "in" (a put) or "out" (a get)."""

    def __init__(self) -> None:
        self.transfers: Final = Counter[tuple[str, str, str]]()
        """By direction, transport, cause."""
        self.crossed_bytes: Final = Counter[tuple[str, str]]()
        """Of transfers that succeeded, by direction and transport."""
        self.mapped_bytes: Final = Counter[tuple[str, str]]()
        self.transfer_durations: Final[dict[tuple[str, str], Durations]] = {}
        """Of transfers that succeeded, by direction and transport."""
        self.stage_durations: Final[dict[tuple[str, str], Durations]] = {}
        """The same by direction and stage."""
        self.refused: Final = Counter[tuple[str, str]]()
        """Calls that came to nothing, by method and cause."""
        self.leases_ended: Final = Counter[str]()
        """By cause."""
        self.dirty_dead_slot_count = 0
        self.mover_start_count = 0

    def refuse(self, method: str, error: HurrayError) -> None:
        """A call was answered with an error, and nothing had begun."""
        self.refused[method, error.reason] += 1

    def fail(self, direction: str, transport: str, error: HurrayError) -> None:
        """A transfer that had been accepted failed."""
        self.transfers[direction, transport, error.reason] += 1

    def succeed(
        self,
        direction: str,
        transport: str,
        seconds: float,
        stages: Iterable[pb.StageTime],
        *,
        crossed_bytes: int,
        mapped_bytes: int,
    ) -> None:
        """A transfer succeeded."""
        self.transfers[direction, transport, OK] += 1
        self.crossed_bytes[direction, transport] += crossed_bytes
        self.mapped_bytes[direction, transport] += mapped_bytes
        _of(self.transfer_durations, (direction, transport)).observe(seconds)
        for item in stages:
            if item.stage in _STAGES:  # the mover says it, and is not believed
                duration = item.duration
                _of(self.stage_durations, (direction, item.stage)).observe(duration.seconds + duration.nanos / 1e9)

    def end_lease(self, reason: type[HurrayError]) -> None:
        """A snapshot was taken off its key."""
        self.leases_ended[reason.reason] += 1


def _of(durations: dict[tuple[str, str], Durations], labels: tuple[str, str]) -> Durations:
    found = durations.get(labels)
    if found is None:
        found = durations[labels] = Durations()
    return found
