"""What a node does, as text, out of its metrics: is it moving, how fast, what fails, what holds memory."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from hurray_wire.errors import InvalidRequest, PeerUnavailable

ANSWER_MAX_BYTES: Final = 16 << 20

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """Values by name and labels, as they were at one moment of a clock that never steps."""

    at_s: float
    values: Mapping[tuple[str, Labels], float]

    def value(self, name: str, **labels: str) -> float:
        """The sum of all series with these labels among theirs; 0 of none."""
        wanted = labels.items()
        return sum(value for (found, has), value in self.values.items() if found == name and wanted <= has)

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Sums by the values of these labels."""
        sums: dict[tuple[str, ...], float] = {}
        for (found, has), value in self.values.items():
            if found == name:
                named = dict(has)
                key = tuple(named.get(label, "") for label in labels)
                sums[key] = sums.get(key, 0.0) + value
        return sums


def scrape(address: str, *, timeout_s: float) -> Scrape:
    """Ask a node, at the address of its metrics ("host:port"). Raises PeerUnavailable, InvalidRequest for what answers
    with something else."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=timeout_s) as answer:
            text = answer.read(ANSWER_MAX_BYTES).decode()
        at_s = time.monotonic()
        values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    except (OSError, urllib.error.URLError) as error:
        why = getattr(error, "reason", error)
        raise PeerUnavailable(f"the metrics of {address} are not reached: {why}", stage="connect") from None
    except ValueError as error:
        raise InvalidRequest(f"not the metrics of a node: {error}", field="node", offered=address) from None
    if not any(name == "hurray_ready" for name, _ in values):
        raise InvalidRequest("not the metrics of a node", field="node", offered=address, required="hurray_ready")
    return Scrape(at_s, values)


def report(before: Scrape, after: Scrape) -> dict[str, Any]:
    """The four answers, as JSON values. Rates are of the time between the two."""
    over_s = max(after.at_s - before.at_s, 1e-9)
    return {
        "over_s": round(over_s, 3),
        "moving": {
            "ready": bool(after.value("hurray_ready")),
            "draining": bool(after.value("hurray_draining")),
            "mover_up": bool(after.value("hurray_mover_up")),
            "mover_restarts": int(after.value("hurray_mover_restarts_total")),
            "transports": {
                kind: "up" if up else "down" for (kind,), up in after.by("hurray_transport_up", "transport").items()
            },
            "peers": int(after.value("hurray_sessions")),
            "running": {way: int(n) for (way,), n in after.by("hurray_transfers_running", "direction").items()},
        },
        "speed": _speed(before, after, over_s),
        "failing": _failing(before, after),
        "memory": _memory(after),
    }


def _speed(before: Scrape, after: Scrape, over_s: float) -> dict[str, Any]:
    flows = []
    labels = ("direction", "transport")
    bytes_before = before.by("hurray_transfer_bytes_total", *labels)
    took_s = after.by("hurray_transfer_duration_seconds_sum", *labels)
    succeeded = {
        key[:2]: count
        for key, count in after.by("hurray_transfers_total", *labels, "outcome").items()
        if key[2] == "succeeded"
    }
    mapped = after.by("hurray_transfer_mapped_bytes_total", *labels)
    for key, nbytes in after.by("hurray_transfer_bytes_total", *labels).items():
        if succeeded.get(key):
            flows.append(
                {
                    "direction": key[0],
                    "transport": key[1],
                    "transfers": int(succeeded[key]),
                    "bytes": int(nbytes),
                    "mapped_bytes": int(mapped.get(key, 0)),
                    "bytes_per_s": round((nbytes - bytes_before.get(key, 0)) / over_s),
                    "bytes_per_s_of_a_transfer": round(nbytes / took_s[key]) if took_s.get(key) else None,
                }
            )
    links = {device: int(speed) for (device,), speed in after.by("hurray_link_speed_bytes", "device").items()}
    return {"flows": flows, "link_bytes_per_s": links}


def _failing(before: Scrape, after: Scrape) -> list[dict[str, Any]]:
    """Causes that were ever met, the most frequent first."""
    found = []
    for name, what, labels in (
        ("hurray_transfers_total", "transfer", ("cause", "direction", "transport")),
        ("hurray_requests_refused_total", "call refused", ("cause", "method")),
        ("hurray_leases_ended_total", "snapshot gone", ("cause",)),
    ):
        earlier = before.by(name, *labels)
        for key, count in after.by(name, *labels).items():
            if count and key[0] != "OK":
                now = int(count - earlier.get(key, 0))
                found.append({"what": what, "cause": key[0], "of": " ".join(key[1:]), "count": int(count), "now": now})
    for name, what in (
        ("hurray_dirty_dead_slots_total", "dirty dead slots"),
        ("hurray_unknown_tags_total", "unknown tags"),
    ):
        if count := int(after.value(name)):
            found.append({"what": what, "cause": "", "of": "", "count": count, "now": count - int(before.value(name))})
    return sorted(found, key=lambda item: -int(item["count"]))


def _memory(after: Scrape) -> dict[str, Any]:
    arena = {state: int(nbytes) for (state,), nbytes in after.by("hurray_arena_bytes", "state").items()}
    return {
        "arena_bytes": int(after.value("hurray_arena_size_bytes")),
        **{f"{state}_bytes": nbytes for state, nbytes in arena.items()},
        "pinned_bytes": int(after.value("hurray_arena_pinned_bytes", key="held")),
        "pinned_without_key_bytes": int(after.value("hurray_arena_pinned_bytes", key="gone")),
        "snapshots": int(after.value("hurray_leases")),
        "mapped_by_readers": int(after.value("hurray_readers")),
    }
