"""This process and a node: whether they reach each other, by which transport, and how fast."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np

from hurray_client.client import Client
from hurray_client.config import load_config
from hurray_client.doctor.calls import ask, calling
from hurray_client.doctor.configuration import look_at_certificate, look_at_unusable
from hurray_client.doctor.findings import Finding, Status, failed_by
from hurray_client.info import NodeInfo
from hurray_client.receipt import Receipt
from hurray_wire.credentials import Credentials
from hurray_wire.errors import HurrayError
from hurray_wire.paged import CacheKey
from hurray_wire.snapshot import KVSnapshot
from hurray_wire.transport.settings import KINDS

SKEW_WARNING_S: Final = 1.0
SKEW_FAILED_S: Final = 30.0
"""Certificates that are young, or short of their end, are refused by then, and no two logs can be read together."""

PROBE_MIN_BYTES: Final = 1 << 20
PROBE_MAX_BYTES: Final = 64 << 20
PROBE_S: Final = 1.0
"""About how long the larger probe may take."""

TRANSFER_S: Final = 20.0
LEASE_S: Final = 60.0

_PAGE_BYTES: Final = 64 << 10
_SHAPE: Final = (16, 8, 256)
"""A page of the probe: 64 KiB of float16."""


def look_at_pair(target: str, tls: Credentials | None) -> Iterator[Finding]:
    """One finding for each check, and for each transport. Puts probes to the node, and deletes them."""
    files = tls or load_config().tls
    if files is not None:
        mine = look_at_certificate("tls", files)
        yield mine
        if mine.status is Status.FAILED:
            return
    try:
        with calling(target, tls) as client:
            client.node(timeout_s=TRANSFER_S)
            asked_s, before_s = time.time(), time.monotonic()
            node = client.node(timeout_s=TRANSFER_S)
            took_s = time.monotonic() - before_s
    except HurrayError as error:
        yield failed_by("node", error, f"see that hurrayd runs there, and what is between here and {target}")
        return
    yield _look_at_node(node, took_s)
    yield from look_at_unusable(node)
    yield _look_at_clock(node, asked_s, took_s)
    if node.address and node.address != target:
        yield _dial_back(node, tls)
    if node.ready:
        yield from _look_at_transports(target, tls, node)


def _look_at_node(node: NodeInfo, took_s: float) -> Finding:
    facts: dict[str, Any] = {"node": node.node, "version": node.version, "answer_s": took_s}
    if not node.ready:
        what = f"{node.node} takes no transfers: it drains, or its data plane is not up"
        return Finding("node", Status.FAILED, what, "its log says why", facts)
    return Finding(
        "node", Status.OK, f"{node.node} answers in {took_s * 1e3:.1f} ms, version {node.version}", facts=facts
    )


def _look_at_clock(node: NodeInfo, asked_s: float, took_s: float) -> Finding:
    if node.time is None:
        return Finding("clock", Status.NOTE, "the node does not say what time it is")
    skew_s = (node.time - datetime.fromtimestamp(asked_s + took_s / 2, UTC)).total_seconds()
    facts = {"skew_s": skew_s, "uncertain_s": took_s / 2}
    off_s = max(0.0, abs(skew_s) - took_s / 2)
    if off_s < SKEW_WARNING_S:
        return Finding("clock", Status.OK, f"clocks agree within {abs(skew_s) + took_s / 2:.3f} s", facts=facts)
    status = Status.FAILED if off_s >= SKEW_FAILED_S else Status.WARNING
    what = (
        f"clock skew: the clock of {node.node} is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} this one"
    )
    remedy = "keep clocks by NTP on both hosts: certificates, expiry times in receipts and logs go by them"
    return Finding("clock", status, what, remedy, facts)


def _dial_back(node: NodeInfo, tls: Credentials | None) -> Finding:
    facts = {"field": "advertise", "offered": node.address}
    remedy = "advertise of the node must be an address by which this host reaches it"
    try:
        reached = ask(node.address, tls)
    except HurrayError as error:
        what = f"the advertised address {node.address} is not reached from here: {error.message}"
        return Finding("advertise", Status.FAILED, what, remedy, facts)
    if reached.incarnation != node.incarnation:
        what = f"the advertised address {node.address} leads to another node, {reached.node}"
        return Finding("advertise", Status.FAILED, what, remedy, facts)
    return Finding("advertise", Status.OK, f"the advertised address {node.address} leads to it", facts=facts)


# --- transports ---------------------------------------------------------------------------------------------------


def _look_at_transports(target: str, tls: Credentials | None, node: NodeInfo) -> Iterator[Finding]:
    """What would be chosen and why, then each that the node has."""
    chosen = ""
    try:
        with calling(target, tls) as client:
            chosen = _put(client, PROBE_MIN_BYTES).transport
    except HurrayError as error:
        yield failed_by("transport", error, _remedy("", error))
    why = {kind: _try(target, tls, kind, node) for kind in node.transports}
    if chosen:
        better = node.transports[: node.transports.index(chosen)]
        passed = "; ".join(f"{kind} is not: {_short(why[kind])}" for kind in better)
        told = load_config().transports
        reason = f"named first of {', '.join(told)}" if told else "the node's best that is used unasked"
        yield Finding(
            "transport",
            Status.OK,
            f"{chosen} would be chosen: {reason}" + (f"; {passed}" if passed else ""),
            facts={"transport": chosen, "node": node.transports, "here": KINDS},
        )
    yield from why.values()


def _short(finding: Finding) -> str:
    return "reached, but not connected unasked" if finding.status is Status.OK else finding.what


def _try(target: str, tls: Credentials | None, kind: str, node: NodeInfo) -> Finding:
    """Whether it connects, and how fast it is: one put to connect and to guess, one to measure."""
    room = min(node.arena.free_bytes // 4, node.max_snapshot_bytes)
    try:
        with calling(target, tls, kind) as client:
            first = _put(client, PROBE_MIN_BYTES)
            again = _put(client, PROBE_MIN_BYTES)
            size = int(again.wire_bytes / max(again.transfer_s, 1e-6) * PROBE_S)
            size = max(PROBE_MIN_BYTES, min(size, PROBE_MAX_BYTES, room))
            best = max((_put(client, size) for _ in range(3)), key=lambda receipt: receipt.gigabytes_per_second)
    except HurrayError as error:
        return Finding(
            "bandwidth",
            Status.NOTE if kind == "shm" else Status.WARNING,
            f"{kind}: {_explained(error)}",
            _remedy(kind, error),
            {"transport": kind, "reason": error.reason, **error.details},
        )
    rate = best.gigabytes_per_second
    return Finding(
        "bandwidth",
        Status.OK,
        f"{kind}: {rate:.2f} GB/s in puts of {best.wire_bytes / 1e6:.1f} MB; "
        f"a first one of {first.wire_bytes / 1e6:.1f} MB took {first.transfer_s * 1e3:.0f} ms",
        facts={"transport": kind, "gigabytes_per_second": rate, "bytes": best.wire_bytes},
    )


def _explained(error: HurrayError) -> str:
    field, offered, required = (error.details.get(name) for name in ("field", "offered", "required"))
    if field is None or not field.startswith(("ucx.", "tcp.", "tls.", "shm.")) or required is None:
        return error.message
    return f"{field} differs: {offered} here, {required} there" if "equal" in error.message else error.message


def _remedy(kind: str, error: HurrayError) -> str:
    if "seg_size" in (error.field or ""):
        return "segment sizes must be equal on all nodes and clients: [ucx] of hurrayd.toml, HURRAY_UCX__* of clients"
    if kind == "shm":
        return "for processes of the node's host alone: HURRAY_SHM__PATH names the node's socket"
    return "see what is between the two hosts, and which address the node listens at"


def _put(client: Client, nbytes: int) -> Receipt:
    """One probe of about so many bytes, deleted again."""
    pages = max(1, nbytes // (2 * _PAGE_BYTES))
    pools: dict[CacheKey, object] = {(0, role): np.zeros((pages, *_SHAPE), np.float16) for role in ("key", "value")}
    snapshot = KVSnapshot.from_paged(pools, block_tables=[list(range(pages))], token_counts=[pages * _SHAPE[0]])
    key = f"doctor-{uuid.uuid4()}"
    receipt = client.put(key, snapshot, lease_s=LEASE_S, timeout_s=TRANSFER_S)
    with suppress(HurrayError):  # its lease is short
        client.delete(key, timeout_s=TRANSFER_S)
    return receipt
