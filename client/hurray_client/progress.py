"""Progress of a transfer, reported from a thread of its own: what it is told to call may take its time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from hurray_client.call import Call

_INTERVAL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a transfer is. In a put `done_bytes` were handed to the transport, in a get they have arrived."""

    done_bytes: int
    total_bytes: int


OnProgress = Callable[[Progress], object]


class Counted:
    """A payload whose chunks are counted as they pass: staged at a source, arrived at a target."""

    def __init__(self, payload: Any, reporter: Reporter) -> None:
        self._payload = payload
        self._reporter = reporter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._payload, name)

    def stage(self, *arguments: Any) -> Any:
        """See SourcePayload."""
        staged = self._payload.stage(*arguments)
        self._reporter.add(arguments[0].nbytes)
        return staged

    def arrived(self, chunk: Any) -> None:
        """See TargetPayload."""
        self._payload.arrived(chunk)
        self._reporter.add(chunk.nbytes)


class Reporter:
    """Calls `on_progress`, at most 20 times a second and once at the end of a success. What it raises cancels the call,
    and is raised where the block is left."""

    def __init__(self, call: Call, on_progress: OnProgress, total_bytes: int) -> None:
        self._call = call
        self._on_progress = on_progress
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._error: Exception | None = None
        self._moved = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hurray-progress", daemon=True)

    def add(self, nbytes: int) -> None:
        """That many bytes more. Called in the data-plane thread."""
        self._done_bytes += nbytes
        self._moved.set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._moved.set()
        self._thread.join()
        if self._error is None and kind is None:
            self._report(self._total_bytes)
        if self._error is not None:
            raise self._error from None

    def _run(self) -> None:
        while not self._ended.is_set():
            self._moved.wait()
            self._moved.clear()
            if self._ended.is_set():
                return
            self._report(self._done_bytes)
            if self._error is not None:
                return
            self._ended.wait(_INTERVAL_S)

    def _report(self, done_bytes: int) -> None:
        try:
            self._on_progress(Progress(done_bytes, self._total_bytes))
        except Exception as error:
            self._error = error
            self._call.cancel()
