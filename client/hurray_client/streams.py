"""Streams to one node, kept from one transfer to the next: to open one costs about as much as a small transfer.

A stream is one call of Put or Get. It carries one transfer at a time, and a thread of its own reads it. Between
transfers it is idle, for a while; then it is ended. A transfer never shares a stream: what breaks one breaks no other.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable
from queue import SimpleQueue
from typing import Any, Final, Protocol

from hurray_client.call import Alarms
from hurray_client.channel import Channels
from hurray_wire.errors import Misuse

IDLE_S: Final = 10.0
"""How long an idle stream is kept: less than the node leaves one open without a transfer."""

IDLE_MOST: Final = 16
"""Idle streams of one method that are kept."""

CLOSE_S: Final = 1.0
"""How long the node may take to end idle streams when they are closed, before they are cut."""


class User(Protocol):
    """Whose a stream is while it carries a transfer. Both are called in the stream's thread."""

    def heard(self, response: Any) -> None:
        """The node said this."""

    def lost(self, failure: Exception | None) -> None:
        """The call has ended; `failure` None: with the status OK."""


class Stream:
    """One call. `over`: it has ended. Made and given out by `Streams`."""

    def __init__(self, streams: Streams, method: str, number: int, user: User) -> None:
        self.method: Final = method
        self.over = False
        self.stub: Any = None
        """What the call was made by, once it was."""
        self.idle_since = 0.0
        self._streams = streams
        self._user: User | None = user
        self._call: Any = None
        self._cut = False
        self._outbound: SimpleQueue[Any] = SimpleQueue()
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._run, name=f"hurray-stream-{number}", daemon=True)

    def tell(self, user: User, message: Any) -> None:
        """Send a message of this user's. One that has left tells nothing: it would be taken for the next one's."""
        with self._lock:
            if self._user is user:
                self._outbound.put(message)

    def finish(self) -> None:
        """Nothing more is told: the node ends it as soon as it carries no transfer."""
        self._outbound.put(None)

    def cut(self) -> None:
        """End it now."""
        self._cut = True
        call = self._call
        if call is not None:
            call.cancel()

    def take(self, user: User) -> bool:
        """Carry a transfer of this user from now on. False: it is over."""
        with self._lock:
            if not self.over:
                self._user = user
            return not self.over

    def leave(self) -> None:
        """It carries no transfer any more."""
        with self._lock:
            self._user = None

    def _run(self) -> None:
        failure: Exception | None = None
        try:
            with self._streams.channels.use() as self.stub:
                self._call = getattr(self.stub, self.method)(iter(self._outbound.get, None))
                if self._cut:
                    self._call.cancel()
                for response in self._call:
                    user = self._user
                    if user is not None:
                        user.heard(response)
        except Exception as error:  # whatever it is, it is for the transfer to explain
            failure = error
            self.cut()
        self._call = None  # its destructor is no place for an interrupt
        self._outbound.put(None)  # gRPC's own thread, which waits for more to send, ends, too
        self._streams.forget(self)
        with self._lock:
            self.over = True
            user = self._user
        if user is not None:
            user.lost(failure)


class Streams:
    """See the module. Any number of threads may use it."""

    def __init__(self, channels: Channels, alarms: Alarms) -> None:
        self.channels: Final = channels
        self._alarms = alarms
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._all: set[Stream] = set()
        self._idle: dict[str, deque[Stream]] = {"Put": deque(), "Get": deque()}
        self._reaping = False
        self._closed = False

    @property
    def in_use(self) -> int:
        """Streams that are not idle."""
        with self._lock:
            return len(self._all) - sum(map(len, self._idle.values()))

    def take(self, method: str, user: User) -> Stream:
        """A stream of this method: an idle one of the channel that is current, or a new one. Raises Misuse."""
        stub = self.channels.stub
        while True:
            with self._lock:
                if self._closed:
                    raise Misuse("the client is closed")
                idle = self._idle[method]
                stream = idle.pop() if idle else None
                if stream is None:
                    stream = Stream(self, method, next(self._numbers), user)
                    self._all.add(stream)
                    stream.thread.start()
                    return stream
            if stream.stub is not stub:
                stream.finish()
            elif stream.take(user):
                return stream

    def give_back(self, stream: Stream, *, keep: bool) -> None:
        """The transfer is over at both sides: keep the stream for another, or end it."""
        stream.leave()
        with self._lock:
            idle = self._idle[stream.method]
            keep = keep and stream in self._all and not self._closed and len(idle) < IDLE_MOST
            if keep:
                stream.idle_since = time.monotonic()
                idle.append(stream)
                if not self._reaping:
                    self._reaping = True
                    self._alarms.after(IDLE_S, self._reap)
        if not keep:
            stream.finish()

    def forget(self, stream: Stream) -> None:
        """It has ended."""
        with self._lock:
            self._all.discard(stream)
            idle = self._idle[stream.method]
            if stream in idle:
                idle.remove(stream)

    def close(self) -> None:
        """End every stream, in order where the node answers. Transfers have ended before."""
        with self._lock:
            self._closed = True
            streams = list(self._all)
        for stream in streams:
            stream.finish()
        _join(streams, CLOSE_S)
        for stream in streams:
            if stream.thread.is_alive():
                stream.cut()
        _join(streams, CLOSE_S)

    def _reap(self) -> None:
        """End what has been idle for long."""
        now = time.monotonic()
        with self._lock:
            old = [stream for idle in self._idle.values() for stream in idle if stream.idle_since <= now - IDLE_S]
            for stream in old:
                self._idle[stream.method].remove(stream)
            self._reaping = any(self._idle.values()) and not self._closed
            if self._reaping:
                self._alarms.after(IDLE_S, self._reap)
        for stream in old:
            stream.finish()


def _join(streams: Iterable[Stream], seconds: float) -> None:
    until = time.monotonic() + seconds
    for stream in streams:
        stream.thread.join(max(0.0, until - time.monotonic()))
