"""An asyncio event loop whose time is virtual: it never sleeps, and jumps to the next timer when nothing is ready.

What would come from outside a real loop (sockets, threads) comes from timers here, so that a seed decides the order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Deadlock(AssertionError):
    """Nothing is ready, and no timer is set."""


class _Clock:
    """Stands where a loop waits for files: waiting is moving the clock."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def select(self, timeout_s: float | None) -> list[Any]:
        if timeout_s is None:
            raise Deadlock("nothing is ready, and no timer is set")
        if timeout_s > 0:
            self._loop.now_s = self._loop.next_timer_s()
        return []

    def close(self) -> None:
        """Nothing to close."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self._selector = _Clock(self)

    def time(self) -> float:
        return self.now_s

    def next_timer_s(self) -> float:
        """When the next timer is due."""
        return self._scheduled[0].when()  # type: ignore[attr-defined]

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """A thread's work, as seen from the loop: done a moment later."""
        future = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_later(0.001, work)
        return future

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
        """Nobody sends signals."""

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass
