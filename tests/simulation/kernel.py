"""Processes, threads and what they wait on, simulated in one thread: the part of an operating system that the programs
under test ask for.

A thread is a greenlet; it runs until it waits for something here, and is woken by a timer of the simulated loop. So
everything happens in an order that the seed decides, and time passes only between two steps. Nothing here knows what
the programs do.
"""

from __future__ import annotations

import concurrent.futures
import queue
import random
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import greenlet

from simulation.loop import SimulatedLoop

LEAST_WAIT_S = 1e-6
"""A wait is never shorter: rounding must not let a thread spin at one point in time."""

FIRST_DESCRIPTOR = 1 << 24


class Killed(BaseException):
    """Ends the threads of a process that is killed."""


class Process:
    """What lives and dies together. `op`: whatever its threads work on, inherited by those they start."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.frozen = False
        self.frozen_s = 0.0
        self.threads: dict[Thread, None] = {}
        self.on_death: list[Callable[[], None]] = []
        self.link: Any = None
        """Of a mover: the daemon's end of it."""
        self.node: Any = None
        """Of a daemon: its state."""
        self._held: list[tuple[Thread, int, bool]] = []
        self._froze_at = 0.0

    def __repr__(self) -> str:
        return f"<Process {self.name}{'' if self.alive else ' dead'}>"


class Kernel:
    """The one kernel of a world: clock, scheduler, and the objects that threads wait on."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.loop = SimulatedLoop()
        self.hub = greenlet.getcurrent()
        self.current: Thread | None = None
        self.outside = Process("world")
        self.process = self.outside
        """Whose code runs: that of `current`, or what `within` says."""
        self.wall_offset_s = 1.8e9
        self.preemption = 0.1
        self.crashes: list[tuple[Thread, BaseException]] = []
        self._descriptors: dict[int, Eventfd | Socket] = {}
        self._next_descriptor = FIRST_DESCRIPTOR

    # --- time and chance ------------------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        """The monotonic clock."""
        return self.loop.now_s

    def moment(self) -> float:
        """A scheduling delay: short, sometimes not. Seconds."""
        chance = self.random.random()
        return 2e-6 + (chance * 4e-5 if chance < 0.9 else chance * 1e-3 if chance < 0.995 else chance * 2e-2)

    def after(self, delay_s: float, call: Callable[..., object], *args: Any) -> Any:
        """A timer of the world's."""
        return self.loop.call_at(self.now_s + delay_s, call, *args)

    def uuid4(self) -> uuid.UUID:
        """Of this seed."""
        return uuid.UUID(int=self.random.getrandbits(128), version=4)

    # --- processes ------------------------------------------------------------------------------------------------

    @contextmanager
    def within(self, process: Process) -> Iterator[None]:
        """What is made in this block belongs to that process."""
        before, self.process = self.process, process
        try:
            yield
        finally:
            self.process = before

    def kill(self, process: Process) -> None:
        """End it as SIGKILL does. Called by the world, never by a thread."""
        assert self.current is None
        if not process.alive:
            return
        process.alive = False
        for call in process.on_death:
            call()
        for thread in list(process.threads):
            thread._end_now()
        process.threads.clear()

    def freeze(self, process: Process, duration_s: float) -> None:
        """Stop its threads for a while, as SIGSTOP does."""
        if process.frozen or not process.alive:
            return
        process.frozen = True
        process._froze_at = self.now_s
        self.after(duration_s, self.thaw, process)

    def thaw(self, process: Process) -> None:
        """Let it go on."""
        if not process.frozen:
            return
        process.frozen = False
        process.frozen_s += self.now_s - process._froze_at
        held, process._held = process._held, []
        for thread, wait, woken in held:
            self.loop.call_soon(self._resume, thread, wait, woken)

    # --- threads --------------------------------------------------------------------------------------------------

    def block(self, timeout_s: float | None = None) -> bool:
        """Let the current thread wait until `wake` (True), or for that long (False)."""
        thread = self.current
        assert thread is not None, "only threads wait"
        if not thread.process.alive:
            raise Killed
        thread.wait += 1
        timer = None
        if timeout_s is not None:
            due_s = self.now_s + max(LEAST_WAIT_S, timeout_s)
            timer = self.loop.call_at(due_s, self._resume, thread, thread.wait, False)
        woken: bool = self.hub.switch()
        if timer is not None:
            timer.cancel()
        if not thread.process.alive:
            raise Killed
        return woken

    def wake(self, thread: Thread) -> None:
        """End a thread's wait, after a moment."""
        self.after(self.moment(), self._resume, thread, thread.wait, True)

    def pause(self) -> None:
        """Let others run before the current thread goes on, sometimes for as long as a message takes there and back;
        outside of threads, and mostly, nothing happens."""
        if self.current is not None and self.current.process.alive and self.random.random() < self.preemption:
            self.block(self.moment() if self.random.random() < 0.7 else self.random.random() * 5e-3)

    def _resume(self, thread: Thread, wait: int, woken: bool) -> None:
        if thread.wait != wait or not thread.is_alive():
            return
        if thread.process.frozen:
            thread.process._held.append((thread, wait, woken))
            return
        thread.wait += 1
        self._switch(thread, woken)

    def _switch(self, thread: Thread, value: object) -> None:
        assert self.current is None
        self.current, self.process = thread, thread.process
        try:
            thread.greenlet.switch(value)
        finally:
            self.current, self.process = None, self.outside

    # --- descriptors ----------------------------------------------------------------------------------------------

    def add_descriptor(self, thing: Eventfd | Socket) -> int:
        """A number for something that can be polled."""
        self._next_descriptor += 1
        self._descriptors[self._next_descriptor] = thing
        return self._next_descriptor

    def descriptor(self, number: int) -> Eventfd | Socket:
        """What has this number."""
        return self._descriptors[number]

    def close_descriptor(self, number: int) -> None:
        """Forget it."""
        del self._descriptors[number]


class Waiters:
    """Threads that wait for the same."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._threads: list[Thread] = []

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for `wake`: False after that long."""
        thread = self._kernel.current
        assert thread is not None
        self._threads.append(thread)
        try:
            return self._kernel.block(timeout_s)
        finally:
            if thread in self._threads:
                self._threads.remove(thread)

    def wake(self, count: int | None = None) -> None:
        """Wake that many (None: all)."""
        woken, self._threads = self._threads[:count], self._threads[len(self._threads[:count]) :]
        for thread in woken:
            self._kernel.wake(thread)


class Thread:
    """threading.Thread."""

    def __init__(
        self,
        kernel: Kernel,
        target: Callable[..., object],
        name: str = "thread",
        args: tuple[Any, ...] = (),
        daemon: bool | None = None,
    ) -> None:
        self.name = name
        self.process = kernel.process
        self.op: Any = kernel.current.op if kernel.current is not None else None
        self.call: Any = None
        """The last gRPC call that it made."""
        self.wait = 0
        self.greenlet = greenlet.greenlet(self._run, parent=kernel.hub)
        self._kernel = kernel
        self._target = target
        self._args = args
        self._started = self._over = False
        self._ended = Waiters(kernel)

    def start(self) -> None:
        assert not self._started
        self._started = True
        if not self.process.alive:
            self._over = True
            return
        self.process.threads[self] = None
        self._kernel.wake(self)
        self._kernel.pause()

    def is_alive(self) -> bool:
        return self._started and not self._over

    def join(self, timeout: float | None = None) -> None:
        until_s = None if timeout is None else self._kernel.now_s + timeout
        while self.is_alive():
            left_s = None if until_s is None else until_s - self._kernel.now_s
            if left_s is not None and left_s <= 0:
                return
            self._ended.wait(left_s)

    def _run(self, _woken: bool) -> None:
        try:
            self._target(*self._args)
        except Killed:
            pass
        except BaseException as error:
            if self.process.alive:
                self._kernel.crashes.append((self, error))
        self._over = True
        self.process.threads.pop(self, None)
        self._ended.wake()

    def _end_now(self) -> None:
        kernel = self._kernel
        if self.greenlet.dead or not self.greenlet:
            self._over = True  # never ran
            return
        kernel.current, kernel.process = self, self.process
        try:
            self.greenlet.throw(Killed)
        finally:
            kernel.current, kernel.process = None, kernel.outside


class Lock:
    """threading.Lock and RLock."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._owner: object = None
        self._depth = 0
        self._waiters = Waiters(kernel)

    def acquire(self) -> bool:
        me = self._kernel.current or self._kernel
        while self._owner is not None and self._owner is not me:
            self._waiters.wait()
        self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._waiters.wake(1)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition(Lock):
    """threading.Condition."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._notified = Waiters(kernel)

    def wait(self, timeout: float | None = None) -> bool:
        self.release()
        try:
            return self._notified.wait(timeout)
        finally:
            self.acquire()

    def notify(self, count: int = 1) -> None:
        self._notified.wake(count)

    def notify_all(self) -> None:
        self._notified.wake()


class Event:
    """threading.Event."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._set = False
        self._waiters = Waiters(kernel)

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._waiters.wake()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._waiters.wait(timeout)
        return self._set


class SimpleQueue:
    """queue.SimpleQueue."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._items: deque[Any] = deque()
        self._waiters = Waiters(kernel)

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._waiters.wake(1)
        self._kernel.pause()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        until_s = None if timeout is None else self._kernel.now_s + timeout
        while not self._items:
            left_s = None if until_s is None else until_s - self._kernel.now_s
            if not block or (left_s is not None and left_s <= 0):
                raise queue.Empty
            self._waiters.wait(left_s)
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class Future(concurrent.futures.Future[Any]):
    """concurrent.futures.Future, whose waiting is the kernel's."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        self._kernel.pause()
        super().add_done_callback(fn)

    def result(self, timeout: float | None = None) -> Any:
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout_s: float | None) -> None:
        if self.done():
            return
        waiters = Waiters(self._kernel)
        super().add_done_callback(lambda _: waiters.wake())
        waiters.wait(timeout_s)


class Eventfd:
    """What os.eventfd makes."""

    def __init__(self, kernel: Kernel) -> None:
        self.count = 0
        self.pollers = Waiters(kernel)

    @property
    def readable(self) -> bool:
        return self.count > 0


class Poll:
    """select.epoll and select.poll, for reading from event descriptors and for writing to sockets."""

    def __init__(self, kernel: Kernel, unit_s: float) -> None:
        self._kernel = kernel
        self._unit_s = unit_s
        self._registered: list[Any] = []

    def register(self, descriptor: Any, _events: int = 0) -> None:
        is_number = isinstance(descriptor, int)
        thing = self._kernel.descriptor(descriptor) if is_number else descriptor
        self._registered.append((descriptor if is_number else 0, thing))

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        kernel = self._kernel
        until_s = None if timeout is None or timeout < 0 else kernel.now_s + timeout * self._unit_s
        while not any(thing.readable for _, thing in self._registered):
            left_s = None if until_s is None else until_s - kernel.now_s
            if left_s is not None and left_s <= 0:
                return []
            waiters = [thing.pollers for _, thing in self._registered] or [Waiters(kernel)]
            for other in waiters[1:]:
                other._threads.append(kernel.current)  # type: ignore[arg-type]
            try:
                waiters[0].wait(left_s)
            finally:
                for other in waiters[1:]:
                    if kernel.current in other._threads:
                        other._threads.remove(kernel.current)  # type: ignore[arg-type]
        return [(descriptor, 0) for descriptor, thing in self._registered if thing.readable]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._registered.clear()


class Socket:
    """The mover's end of the socket to its parent: blocking to read from, and with a buffer that may be full.

    `deliver(data)` takes what is sent; `feed` and `feed_eof` are the other end's.
    """

    def __init__(self, kernel: Kernel, deliver: Callable[[bytes], None]) -> None:
        self._kernel = kernel
        self._deliver = deliver
        self._received = bytearray()
        self._eof = False
        self._readers = Waiters(kernel)
        self.full = False
        self.pollers = Waiters(kernel)
        self.process = kernel.process

    @property
    def readable(self) -> bool:
        """Writable, in truth: what a sender polls for."""
        return not self.full

    def recv(self, most: int) -> bytes:
        while not self._received and not self._eof:
            self._readers.wait()
        data = bytes(self._received[:most])
        del self._received[:most]
        return data

    def send(self, data: bytes, _flags: int = 0) -> int:
        if not self.process.alive:
            raise BrokenPipeError
        if self.full:
            raise BlockingIOError
        if self._kernel.random.random() < 0.02:
            # The buffer is full for a while, in the middle of a frame perhaps.
            self.full = True
            self._kernel.after(self._kernel.moment(), self._make_room)
            count = self._kernel.random.randrange(len(data))
            if count == 0:
                raise BlockingIOError
        else:
            count = len(data)
        self._deliver(bytes(data[:count]))
        return count

    def feed(self, data: bytes) -> None:
        self._received += data
        self._readers.wake()

    def feed_eof(self) -> None:
        self._eof = True
        self._readers.wake()

    def _make_room(self) -> None:
        self.full = False
        self.pollers.wake()
