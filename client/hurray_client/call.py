"""One call of the SDK: its budget, spent over all its stages, and its cancellation."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from hurray_wire.errors import Cancelled, DeadlineExceeded, InvalidRequest

MAX_BUDGET_S: Final = 7 * 86400.0


class Call:
    """A call that runs: how much of its budget is left, and whether it was cancelled. Any thread may cancel it."""

    def __init__(self, budget_s: float) -> None:
        """Raises InvalidRequest for a budget that is not above 0 seconds, or above a week."""
        if not (math.isfinite(budget_s) and 0 < budget_s <= MAX_BUDGET_S):
            raise InvalidRequest(
                "the budget of a call is out of range",
                field="timeout_s",
                offered=budget_s,
                required=f"above 0, at most {MAX_BUDGET_S:g}",
            )
        self.budget_s: Final = budget_s
        self._deadline = time.monotonic() + budget_s
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []

    def left_s(self, stage: str) -> float:
        """Seconds of the budget that are left. Raises DeadlineExceeded and Cancelled, naming the stage."""
        if self._cancelled.is_set():
            raise Cancelled("the call was cancelled", stage=stage)
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self.late(stage)
        return left

    def late(self, stage: str) -> DeadlineExceeded:
        """The error for a budget that ran out in this stage."""
        return DeadlineExceeded("the budget of the call ran out", stage=stage, budget_s=self.budget_s)

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """End the call soon: what it waits for is told."""
        with self._lock:
            self._cancelled.set()
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback()

    @contextmanager
    def on_cancel(self, callback: Callable[[], object]) -> Iterator[None]:
        """While the block runs, a cancellation calls `callback` (at once, if there was one already)."""
        with self._lock:
            self._callbacks.append(callback)
            cancelled = self._cancelled.is_set()
        if cancelled:
            callback()
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.remove(callback)

    def pause(self, seconds: float) -> None:
        """Wait, no longer than the budget lasts, until cancelled."""
        self._cancelled.wait(min(seconds, max(0.0, self._deadline - time.monotonic())))

    def can_wait(self, seconds: float) -> bool:
        """Whether the budget lasts longer than this."""
        return not self._cancelled.is_set() and time.monotonic() + seconds < self._deadline


class Alarm:
    """Something that happens at a time unless it is cancelled before."""

    __slots__ = ("_ring",)

    def __init__(self, ring: Callable[[], object]) -> None:
        self._ring: Callable[[], object] | None = ring

    def cancel(self) -> None:
        """Nothing happens any more."""
        self._ring = None

    def ring(self) -> None:
        """It is time."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring()


class Alarms:
    """Alarms of one node, rung by one thread that is started with the first. What rings must not block or raise."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Alarm]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def after(self, seconds: float, ring: Callable[[], object]) -> Alarm:
        """An alarm in that many seconds."""
        alarm = Alarm(ring)
        at = time.monotonic() + seconds
        with self._changed:
            entry = (at, next(self._numbers), alarm)
            heapq.heappush(self._due, entry)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="hurray-alarms", daemon=True)
                self._thread.start()
            if self._due[0] is entry:
                self._changed.notify()
        return alarm

    def close(self) -> None:
        """End the thread; no alarm rings any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                if not self._due or self._due[0][0] > now:
                    self._changed.wait(self._due[0][0] - now if self._due else None)
                    continue
                alarm = heapq.heappop(self._due)[2]
            alarm.ring()
