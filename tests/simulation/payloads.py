"""Payloads that a fault may spoil: what a source stages, the memory of a target, the bits on their way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hurray_server.arena import TransferMemory
from hurray_wire.image import ImagePlan
from hurray_wire.source_payloads import ImageSource, SnapshotSource
from simulation.engines import Op
from simulation.faults import Fault, spoil
from simulation.registry import Registry
from simulation.transport import SimulatedTransport


class Payloads(Registry):
    """See the module."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.lie = False
        """The next checksum that is computed is told wrong."""
        self.flips: dict[tuple[SimulatedTransport, int], Op] = {}

    def forget(self) -> None:
        super().forget()
        self.flips.clear()

    def snapshot_source(self, prepared: Any, plan: ImagePlan, *_: Any, **__: Any) -> SnapshotSource:
        """Stands for SnapshotSource."""
        op = self.kernel.current.op if self.kernel.current is not None else None
        if op is not None:
            op.soiled.append(0)
        return _SpoiledSnapshot(self, op, prepared, plan)

    def image_source(
        self, plan: ImagePlan, image: Any, on_release: Callable[[], None], shown: Any, **_: Any
    ) -> ImageSource:
        """Stands for ImageSource."""
        return _SpoiledImage(self, plan, image, on_release, shown)

    def transfer_memory(self, arena: Any, number: int, tenant: int) -> TransferMemory:
        """Stands for TransferMemory."""
        return _Memory(self, arena, number, tenant)

    def take_lie(self) -> int:
        """What is wrong with the checksum that is computed now."""
        lie, self.lie = self.lie, False
        return int(lie)

    def flip(self, op: Op, plane: Any, tag: int) -> None:
        """Flip a bit of this chunk when it arrives."""
        for transport in plane._peers.transports.values():  # another plane of this process may use the same tag
            transport.faults.corrupt(
                tag=tag, offset_bytes=self.random.randrange(4096), mask=1 << self.random.randrange(8)
            )
            self.flips[transport, tag] = op


class _SpoiledSnapshot(SnapshotSource):
    def __init__(self, world: Payloads, op: Op | None, prepared: Any, plan: ImagePlan) -> None:
        super().__init__(prepared, plan)
        self._world, self._op = world, op

    def stage(self, chunk: Any, *others: Any) -> Any:
        staged = super().stage(chunk, *others)
        return staged if self._op is None else spoil(self._op, self.plan, chunk, staged, self._world)


class _SpoiledImage(ImageSource):
    def __init__(self, world: Payloads, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._world = world

    def stage(self, chunk: Any, *others: Any) -> Any:
        staged = super().stage(chunk, *others)
        op = self._world.op_of_payload(self)
        return staged if op is None else spoil(op, self.plan, chunk, staged, self._world)


class _Memory(TransferMemory):
    """May find the arena full."""

    def __init__(self, world: Payloads, arena: Any, number: int, tenant: int) -> None:
        super().__init__(arena, number, tenant)
        self._op = world.node_transfers.get((world.kernel.process.link, number))

    def reserve(self, nbytes: int) -> Any:
        if self._op is not None and Fault.ARENA_FULL in self._op.armed:
            self._op.armed.remove(Fault.ARENA_FULL)
            raise self._arena._full(nbytes)
        return super().reserve(nbytes)
