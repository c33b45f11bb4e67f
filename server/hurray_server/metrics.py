"""What Prometheus is told of a node. docs/operations.md has the table.

Everything is made when it is asked for, out of what the node knows anyway. Series that may count something are there
from the start, at 0: the first refusal of a kind is an increase, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, product
from typing import TYPE_CHECKING, Final, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from hurray_server.endpoint import Page
from hurray_server.links import link_speeds
from hurray_server.tally import BOUNDS_S, NONE_YET, OK, Durations
from hurray_wire.errors import (
    ArenaFull,
    Cancelled,
    ChecksumMismatch,
    DataPlaneUnavailable,
    DeadlineExceeded,
    HurrayError,
    InternalError,
    InvalidContents,
    KeyDeleted,
    KeyExpired,
    KeyOverwritten,
    NodeDraining,
    PeerUnavailable,
    ProtocolViolation,
    SnapshotLost,
    all_reasons,
)

if TYPE_CHECKING:
    from hurray_server.node import Node

LabelsT = TypeVar("LabelsT", bound=tuple[str, ...])

DIRECTIONS: Final = ("in", "out")
"""Of puts, and of gets."""

METHODS: Final = ("session", "put", "get")
"""Whose refusals are counted from the start; those of others from the first on."""

_FAILURES: Final[tuple[type[HurrayError], ...]] = (
    ArenaFull,
    Cancelled,
    ChecksumMismatch,
    DataPlaneUnavailable,
    DeadlineExceeded,
    InternalError,
    InvalidContents,
    NodeDraining,
    PeerUnavailable,
    ProtocolViolation,
)
"""What a transfer fails with; others are counted from the first on."""

_LEASE_ENDS: Final[tuple[type[HurrayError], ...]] = (KeyDeleted, KeyExpired, KeyOverwritten, SnapshotLost)

_STAGES: Final = (
    *product(("in",), ("reserve", "index", "check_index", "pages", "check_contents")),
    *product(("out",), ("offer", "pages", "receipt")),
)
"""That every transfer which succeeds has passed."""

_BOUNDS: Final = tuple(map(floatToGoString, BOUNDS_S))


class NodeCollector(Collector):
    """A node's numbers. `version`: of this program."""

    def __init__(self, node: Node, version: str) -> None:
        self._node = node
        self._version = version

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        yield from self._state()
        yield from self._transfers()
        yield from self._memory()
        yield from self._peers()

    def _state(self) -> Iterator[Metric]:
        node, started = self._node, self._node.link.started
        info = GaugeMetricFamily("hurray_build_info", "What runs; always 1.", labels=("version", "ucx"))
        info.add_metric((self._version, "" if started is None else started.ucx), 1)
        yield info
        yield _gauge("hurray_ready", "Whether transfers are taken.", node.ready)
        yield _gauge("hurray_draining", "Whether the node lets transfers end, to stop then.", node.draining)
        yield _gauge("hurray_mover_up", "Whether the process that moves bytes is up.", node.link.up)
        yield _counter(
            "hurray_mover_restarts", "Times that the mover was started anew.", max(0, node.tally.mover_start_count - 1)
        )
        up = GaugeMetricFamily("hurray_transport_up", "Whether the node offers it.", labels=("transport",))
        kinds = {item.kind for item in node.link.transports}
        for kind in sorted(kinds.union(node.config.transports_config.kinds)):
            up.add_metric((kind,), kind in kinds)
        yield up

    def _transfers(self) -> Iterator[Metric]:
        node, tally = self._node, self._node.tally
        flows = list(product(DIRECTIONS, node.config.transports_config.kinds))
        causes = (OK, *(error.reason for error in _FAILURES))
        transfers = CounterMetricFamily(
            "hurray_transfers",
            "Transfers that were accepted and are over. cause: OK, or the reason of the error.",
            labels=("direction", "transport", "outcome", "cause"),
        )
        counted = {(*flow, cause): 0 for flow, cause in product(flows, causes)} | tally.transfers
        for (direction, transport, cause), count in counted.items():
            transfers.add_metric((direction, transport, _outcome(cause), cause), count)
        yield transfers
        running = Counter(transfer.direction for transfer in node.transfers)
        yield _gauges(
            "hurray_transfers_running", "Transfers that run.", ("direction",), {(d,): running[d] for d in DIRECTIONS}
        )
        flow_labels = ("direction", "transport")
        yield _counters(
            "hurray_transfer_bytes",
            "Bytes that crossed the data plane in transfers that succeeded.",
            flow_labels,
            dict.fromkeys(flows, 0) | tally.crossed_bytes,
        )
        yield _counters(
            "hurray_transfer_mapped_bytes",
            "Bytes that readers mapped instead of having them cross.",
            flow_labels,
            dict.fromkeys(flows, 0) | tally.mapped_bytes,
        )
        yield _histogram(
            "hurray_transfer_duration_seconds",
            "Time that transfers took that succeeded, as this node saw them.",
            flow_labels,
            dict.fromkeys(flows, NONE_YET) | tally.transfer_durations,
        )
        yield _histogram(
            "hurray_transfer_stage_duration_seconds",
            "Time in each stage of transfers that succeeded.",
            ("direction", "stage"),
            dict.fromkeys(_STAGES, NONE_YET) | tally.stage_durations,
        )
        yield _counters(
            "hurray_requests_refused",
            "Calls that were answered with an error before anything had begun. cause: the reason of the error.",
            ("method", "cause"),
            dict.fromkeys(product(METHODS, all_reasons()), 0) | tally.refused,
        )

    def _memory(self) -> Iterator[Metric]:
        node, tally, arena = self._node, self._node.tally, self._node.link.usage.arena
        yield _gauge("hurray_arena_size_bytes", "Memory for snapshots.", arena.total_bytes)
        yield _gauges(
            "hurray_arena_bytes",
            "The same by what it is used for: free, receiving, held, quarantined (a failed transfer's, whose peer may "
            "still write).",
            ("state",),
            {
                ("free",): arena.free_bytes,
                ("receiving",): arena.receiving_bytes,
                ("held",): arena.held_bytes,
                ("quarantined",): arena.quarantined_bytes,
            },
        )
        pinned = node.store.pinned()
        yield _gauges(
            "hurray_arena_pinned_bytes",
            "Held memory that readers have now. key: held, or gone where they alone keep it.",
            ("key",),
            {("held",): pinned.keyed_bytes, ("gone",): pinned.unkeyed_bytes},
        )
        yield _gauge("hurray_readers", "Views that are mapped.", len(node.readers))
        yield _gauge("hurray_leases", "Snapshots under a key, each with a lease.", len(node.store))
        ended = {(error.reason,): 0 for error in _LEASE_ENDS}
        yield _counters(
            "hurray_leases_ended",
            "Snapshots taken off their key. cause: what a get of them raises from then on.",
            ("cause",),
            ended | {(cause,): count for cause, count in tally.leases_ended.items()},
        )
        yield _counter(
            "hurray_dirty_dead_slots",
            "Slots without a token that arrived with something in them, and were cleared: a source leaks.",
            tally.dirty_dead_slot_count,
        )

    def _peers(self) -> Iterator[Metric]:
        node, usage = self._node, self._node.link.usage
        yield _gauge("hurray_sessions", "Peers that are connected.", len(node.sessions))
        yield _gauge("hurray_mover_peers", "Connections of the mover.", usage.peer_count)
        yield _gauge("hurray_mover_transfers", "Transfers that the mover has not settled yet.", usage.transfer_count)
        yield _counter(
            "hurray_unknown_tags",
            "Messages on the data plane that no transfer waited for.",
            node.link.unknown_tag_count,
        )
        yield _gauges(
            "hurray_link_speed_bytes",
            "Bytes a second that a network device of the data plane can carry, where it says so.",
            ("device",),
            {(device,): speed for device, speed in link_speeds(node.config.transports_config).items()},
        )


def metrics_page(node: Node, version: str) -> Callable[[], Page]:
    """What makes the page for Prometheus, in its text format."""
    registry = CollectorRegistry()
    registry.register(NodeCollector(node, version))
    ProcessCollector(registry=registry)
    ProcessCollector(namespace="hurray_mover", pid=lambda: str(node.link.pid), registry=registry)
    return lambda: Page(generate_latest(registry), content_type=CONTENT_TYPE_PLAIN_0_0_4)


def _outcome(cause: str) -> str:
    if cause == OK:
        return "succeeded"
    return "cancelled" if cause == Cancelled.reason else "failed"


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _counter(name: str, text: str, value: int) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _gauges(name: str, text: str, labels: tuple[str, ...], values: Mapping[LabelsT, float]) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), values.items())


def _counters(name: str, text: str, labels: tuple[str, ...], values: Mapping[LabelsT, int]) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), values.items())


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Iterable[tuple[LabelsT, float]]) -> Metric:
    for labels, value in values:
        family.add_metric(labels, value)
    return family


def _histogram(name: str, text: str, labels: tuple[str, ...], durations: Mapping[LabelsT, Durations]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, found in durations.items():
        buckets = list(zip((*_BOUNDS, "+Inf"), map(float, accumulate(found.counts)), strict=True))
        family.add_metric(values, buckets, found.sum_s)
    return family
