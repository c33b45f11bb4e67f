"""What engines ask for, and what others do to the same keys meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hurray_wire.errors import HurrayError
from simulation.content import SHAPES, Content, Landing
from simulation.engines import Engine, Op
from simulation.judge import Judge
from simulation.nodes import NodeHost
from simulation.oracle import Held

KEYS = tuple(f"k/{number}" for number in range(10))

CONSUMING = 0.2
"""Share of gets that delete what they have received."""


class Workload(Judge):
    """See the module."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None) -> None:
        super().__init__(seed, trace)
        self.hosts: list[NodeHost] = []
        self.engines: list[Engine] = []
        self.chunk_bytes = self.random.choice((4096, 8192))
        self.calm = True
        """No faults."""
        self.begun = 0
        self.quota = 0
        """Transfers that may have begun by now."""
        self._op_count = 0

    def new_op(self, engine: Engine, host: NodeHost, kind: str, key: str) -> Op:
        self._op_count += 1
        op = Op(self._op_count, kind, engine, host, key, self._budget_s())
        if kind == "put":
            op.request_id = str(self.kernel.uuid4())
            self.ops.setdefault(op.request_id, []).append(op)
        return op

    def _budget_s(self) -> float:
        random = self.random
        return random.choice((3.0, 8.0, 20.0)) if random.random() < 0.9 else random.choice((0.001, 0.01, 0.2))

    def new_content(self, shape: Any) -> Content:
        return Content(shape, self.random.getrandbits(40), 4096)

    def next_op(self, engine: Engine) -> Op | None:
        """What a worker does next; None: nothing now."""
        if self.calm or self.begun >= self.quota:
            return None
        random = self.random
        host, key = random.choice(self.hosts), random.choice(KEYS)
        kind = random.choices(("put", "get", "delete", "renew", "stat", "list"), (50, 34, 4, 5, 4, 3))[0]
        op = self.new_op(engine, host, kind, key)
        if kind in ("put", "get"):
            self.begun += 1
        if kind == "put":
            self._fill_put(op)
        elif kind == "get":
            op.wait_s = random.choice((0.0, 0.0, 0.5, 2.0))
            op.consume = random.random() < CONSUMING
            self._fill_get(op)
        elif kind in ("delete", "renew", "stat"):
            op.generation = random.choice((0, 0, self._some_generation(op)))
        return op

    def _fill_put(self, op: Op) -> None:
        random = self.random
        op.content = self.new_content(random.choices(SHAPES, (3, 3, 3, 2, 3, 1))[0])
        op.overwrite = random.random() < 0.5
        op.lease_s = random.choice((0.05, 1.0, 6.0, 30.0))
        op.checksum = "none" if random.random() < 0.08 else "xxh3_64"

    def _fill_get(self, op: Op) -> None:
        """Sometimes a certain generation; sometimes into caches of the caller, which fit what is there now."""
        random = self.random
        op.generation = random.choice((0, 0, 0, self._some_generation(op)))
        held = self._held_now(op)
        if held is not None and random.random() < 0.35 and not held.content.shape.quantized:
            shape = held.content.shape
            order = random.sample(range(len(shape.pages) + 3), len(shape.pages))
            op.landing = Landing(shape, order)

    def _some_generation(self, op: Op) -> int:
        node = op.host.node
        if node is None:
            return 0
        known = sorted(generation for key, generation in node.store.model.all if key == op.key)
        return self.random.choice([*known[-3:], 1 << 40])

    def _held_now(self, op: Op) -> Held | None:
        return None if op.host.node is None else op.host.node.store.model.current.get(op.key)

    def repeat(self, op: Op, *, same: bool) -> None:
        """The request of a put comes again, from any engine, while it runs or soon after."""
        engine = self.random.choice(self.engines)
        again = self.new_op(engine, op.host, "put", op.key)
        self.ops.pop(again.request_id)
        again.request_id = op.request_id
        again.overwrite, again.lease_s, again.checksum = op.overwrite, op.lease_s, op.checksum
        assert op.content is not None
        shape = op.content.shape
        if same:
            again.content = Content(shape, op.content.number, 4096)
        else:
            again.content = self.new_content(shape)
            again.lease_s = 1 + max(known.lease_s for known in self.ops[op.request_id])  # another body each time
        self.ops[op.request_id].append(again)
        self.kernel.after(self.random.choice((0.0, 0.01, 1.0)), engine.in_thread, engine.run, again)

    def put_beside(self, op: Op, host: NodeHost) -> None:
        """Another put to the same key."""
        other = self.new_op(self.random.choice(self.engines), host, "put", op.key)
        self._fill_put(other)
        other.overwrite = True
        other.engine.in_thread(other.engine.run, other)

    def store_call(self, host: NodeHost, call: Callable[[Any, float], object]) -> None:
        """Somebody asks the store for something, as the handlers do: in one step."""
        if host.node is not None:
            try:
                call(host.node.store, self.kernel.now_s)
            except HurrayError:
                return

    def end_lease(self, host: NodeHost, key: str) -> None:
        """The lease of a key ends now."""
        node = host.node
        held = None if node is None else node.store.model.current.get(key)
        if held is None:
            return
        snapshot = node.store._snapshots.get(key)
        if snapshot is not None:
            held.expires_s = self.kernel.now_s
            node.store._snapshots[key] = replace(snapshot, expires_s=self.kernel.now_s)
            node.store._add_lease(node.store._snapshots[key])
            node.leases_changed()
