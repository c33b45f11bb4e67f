"""A put whose tensors become final one after the other: a source announces them as prefill finishes its layers.

The put runs in a thread of its own, like any other, and sends no further than what was announced. What its last chunk
needs is held back until the block is left: a target that lacks it cannot commit, so whatever goes wrong inside the
block leaves no trace.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Final, Self

from hurray_client.call import Call
from hurray_client.devices import follow
from hurray_client.receipt import Receipt
from hurray_wire.dataplane import DataPlane
from hurray_wire.errors import InvalidRequest, Misuse
from hurray_wire.image import ImagePlan
from hurray_wire.prepare import PreparedSnapshot

NOTHING_READY: Final = -1
"""Not even the index may be sent."""


class ReadyTensors:
    """How many leading tensors of a snapshot are final, told to whichever attempt of its put runs. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._limit = 0
        self._released = False
        self._announce: Callable[[int], None] = lambda _: None

    def follow(self, plane: DataPlane, number: int, plan: ImagePlan) -> None:
        """An attempt has begun, with NOTHING_READY."""
        with self._lock:
            self._announce = lambda count: plane.announce(number, count)
            self._limit = plan.chunks[-1].last_tensor
            self._tell()

    def add(self, count: int) -> None:
        """The first `count` tensors are final."""
        with self._lock:
            self._count = count
            self._tell()

    def release(self) -> None:
        """Hold nothing back any more."""
        with self._lock:
            self._released = True
            self._tell()

    def _tell(self) -> None:
        self._announce(self._count if self._released else min(self._count, self._limit))


class PutStream:
    """See Client.put_stream. A context manager, for one thread at a time."""

    def __init__(self, call: Call, prepared: PreparedSnapshot, ready: ReadyTensors, put: Callable[[], Receipt]) -> None:
        """`prepared`: its contents not copied yet. `put` runs the put that follows `ready`, in a thread."""
        self.call: Final = call
        self._prepared = prepared
        self._ready = ready
        self._put = put
        tensors = prepared.snapshot.tensors
        self._ends = {tensor.layer_index: number for number, tensor in enumerate(tensors, 1)}
        self._tensor_count = len(tensors)
        self._ready_count = 0
        self._layer: int | None = None
        self._is_open = False
        self._outcome: Receipt | BaseException | None = None
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hurray-put-stream", daemon=True)

    @property
    def receipt(self) -> Receipt:
        """What the node reports, once the block was left without an error. Raises Misuse before."""
        if self._is_open or not isinstance(self._outcome, Receipt):
            raise Misuse("a stream has its receipt once its block was left without an error")
        return self._outcome

    def ready(self, layer: int | None, *, stream: object | None = None) -> None:
        """All tensors of this layer, and of those before it, are final: they are not written until the stream ends.

        Layers that were left out are announced with the next. Returns at once, but for parameters and pools whose
        pages are no whole bytes, which are copied here. Pages on a GPU are read after what was started on `stream`
        (None: the streams current in this thread).

        Raises what the put has failed with meanwhile, InvalidContents (V11, V12) for what is copied, Misuse for a
        layer that is not behind the last one, InvalidRequest for one that the snapshot does not have.
        """
        self.follow(stream)
        self.announce(layer)

    def follow(self, stream: object | None) -> None:
        """The first half of `ready`, in the caller's thread."""
        follow(self._prepared.snapshot.device, stream)

    def announce(self, layer: int | None) -> None:
        """The second."""
        if not self._is_open:
            raise Misuse("the stream is not open: tensors are announced inside its with block")
        end = self._ends.get(layer)
        if end is None:
            raise InvalidRequest("the snapshot has no such layer", field="layer", offered=layer)
        if end <= self._ready_count:
            raise Misuse("layers are announced in their order, each once", offered=layer, announced=self._layer)
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        self._announce(end)
        self._layer = layer

    def _announce(self, tensor_count: int) -> None:
        self._prepared.copy_small(tensor_count)
        self._ready_count = tensor_count
        self._ready.add(tensor_count)

    def __enter__(self) -> Self:
        if self._is_open or self._outcome is not None:
            raise Misuse("a stream is used once")
        self._is_open = True
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_open = False
        try:
            if kind is None and self._outcome is None:
                self.follow(None)
                self._announce(self._tensor_count)
                self._ready.release()
                self._wait()
        finally:
            if self._outcome is None:
                self.call.cancel()
                self._wait()
        if kind is None and isinstance(self._outcome, BaseException):
            raise self._outcome

    def _run(self) -> None:
        outcome: Receipt | BaseException
        try:
            outcome = self._put()
        except BaseException as error:  # whatever it is, it is raised in the caller's thread
            outcome = error
        self._outcome = outcome
        self._bell.put(None)

    def _wait(self) -> None:
        # Not a condition or a future: an interrupt inside those can leave their lock taken.
        while self._outcome is None:
            self._bell.get()
