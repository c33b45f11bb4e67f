"""Metrics and readiness: what moves when something happens, and that nothing else does."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hurray_client as ht
from hurray_server.endpoint import HEAD_MAX_BYTES
from support.daemon import RunningDaemon, command, environment, eventually, running_daemon
from support.raw import WAIT_S, Prepared, RawClient, put_corrupted, snapshot
from support.scrape import Series, moved, read_page, scrape, series

pytest.importorskip("ucxx")
pytestmark = pytest.mark.ucx

TESTS = Path(__file__).parents[1]
CPU = {"process_cpu_seconds_total", "hurray_mover_process_cpu_seconds_total"}
"""Counters that move by themselves."""


def counters(daemon: RunningDaemon) -> Series:
    """All but those of CPU time. Histograms are durations, not counters: those of failures are not in them anyway."""
    return {key: value for key, value in scrape(daemon.watched, "counter").items() if key[0] not in CPU}


def durations(daemon: RunningDaemon) -> Series:
    return scrape(daemon.watched, "histogram")


def gauge(daemon: RunningDaemon, name: str, **labels: str) -> float:
    return scrape(daemon.watched, "gauge")[series(name, **labels)]


def transfers(cause: str, direction: str = "in", outcome: str = "failed") -> Any:
    return series("hurray_transfers_total", direction=direction, transport="ucx", outcome=outcome, cause=cause)


def check_moves(daemon: RunningDaemon, happen: Callable[[], None], expected: Series) -> None:
    """What happens moves these counters, and nothing else."""
    before = counters(daemon)
    happen()
    eventually(lambda: expected.keys() <= moved(before, counters(daemon)).keys(), 10, str(expected))
    assert moved(before, counters(daemon)) == expected


def refused(peer: RawClient) -> None:
    with pytest.raises(ht.KeyExists):
        peer.transfer("held", snapshot())


def killed(daemon: RunningDaemon) -> None:
    sessions = gauge(daemon, "hurray_sessions")
    with subprocess.Popen(
        [sys.executable, "-m", "support.stalled_source", daemon.address, "stalled"],
        stdout=subprocess.PIPE,
        env=environment(PYTHONPATH=str(TESTS)),
        text=True,
    ) as source:
        assert source.stdout is not None
        assert source.stdout.readline() == "stalled\n"
        assert gauge(daemon, "hurray_transfers_running", direction="in") == 1
        assert gauge(daemon, "hurray_arena_bytes", state="receiving") > 0
        source.kill()
    eventually(lambda: gauge(daemon, "hurray_sessions") == sessions, 10, "its session is closed")
    assert gauge(daemon, "hurray_transfers_running", direction="in") == 0


def corrupted(peer: RawClient) -> None:
    assert isinstance(put_corrupted(peer, "corrupted"), ht.ChecksumMismatch)


def expired(daemon: RunningDaemon, peer: RawClient) -> None:
    peer.transfer("short", snapshot(), lease={"nanos": 1_000_000})
    eventually(lambda: gauge(daemon, "hurray_leases") == 1, 10, "its lease ends")


def test_each_cause_moves_its_own_counter_by_one_and_no_other_moves() -> None:
    with running_daemon() as daemon, RawClient(daemon.address) as peer:
        receipt = peer.transfer("held", snapshot())
        refusal = series("hurray_requests_refused_total", method="put", cause="KEY_EXISTS")
        expiry = series("hurray_leases_ended_total", cause="KEY_EXPIRED")
        put = {
            transfers("OK", outcome="succeeded"): 1,
            series("hurray_transfer_bytes_total", direction="in", transport="ucx"): receipt.wire_bytes,
        }
        start, times = counters(daemon), durations(daemon)
        check_moves(daemon, lambda: refused(peer), {refusal: 1})
        check_moves(daemon, lambda: killed(daemon), {transfers("PEER_UNAVAILABLE"): 1})
        check_moves(daemon, lambda: corrupted(peer), {transfers("CHECKSUM_MISMATCH"): 1})
        assert moved(times, durations(daemon)) == {}, "durations are of what succeeds"
        check_moves(daemon, lambda: expired(daemon, peer), {expiry: 1, **put})
        eventually(lambda: gauge(daemon, "hurray_mover_transfers") == 0, 10, "all is settled")
        each_by_one = (refusal, transfers("PEER_UNAVAILABLE"), transfers("CHECKSUM_MISMATCH"), expiry)
        assert moved(start, counters(daemon)) == dict.fromkeys(each_by_one, 1) | put, "and nothing follows later"
        assert len(daemon.logged("lease ended", key="short", tenant="local")) == 1


def test_a_get_counts_what_crossed_and_what_was_mapped(daemon: RunningDaemon) -> None:
    settings = ht.ClientConfig(transports=("shm",), shm={"path": daemon.shm_path})  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    caches = {(0, role): rng.standard_normal((512, 16, 4, 64)).astype(np.float16) for role in ("key", "value")}
    value = ht.KVSnapshot.from_paged(caches, block_tables=[list(range(512))], token_counts=[512 * 16])
    with ht.connect(daemon.address, config=settings) as client:
        client.put("mapped", value)
        before = counters(daemon)
        with client.get("mapped") as got:
            assert got.receipt.mapped_bytes > 0
            flow = {"direction": "out", "transport": "shm"}
            expected = {
                series("hurray_transfers_total", **flow, outcome="succeeded", cause="OK"): 1,
                series("hurray_transfer_bytes_total", **flow): got.receipt.wire_bytes,
                series("hurray_transfer_mapped_bytes_total", **flow): got.receipt.mapped_bytes,
            }
            eventually(lambda: moved(before, counters(daemon)) == expected, 10, "all is counted")
            held_bytes = client.stat("mapped").info.held_bytes
            assert gauge(daemon, "hurray_arena_pinned_bytes", key="held") == held_bytes
            assert gauge(daemon, "hurray_readers") == 1
            client.delete("mapped")
            assert gauge(daemon, "hurray_arena_pinned_bytes", key="held") == 0
            assert gauge(daemon, "hurray_arena_pinned_bytes", key="gone") == held_bytes
        stages = {
            dict(labels)["stage"] for name, labels in durations(daemon) if name.endswith("stage_duration_seconds_count")
        }
        assert {"offer", "pages", "receipt", "reserve", "check_contents"} <= stages
    eventually(lambda: gauge(daemon, "hurray_readers") == 0, 10, "let go of")


def test_no_name_is_in_the_metrics(daemon: RunningDaemon, peer: RawClient) -> None:
    peer.transfer("a-name/of-a-key", snapshot(), annotations={"a-name": "a-value"})
    text = read_page(daemon.watched, "/metrics")[1]
    names = ("a-name", "of-a-key", "a-value", '"local"', f"{peer.incarnation:016x}")
    assert not [name for name in names if name in text]


def test_readiness_follows_the_data_plane(daemon: RunningDaemon) -> None:
    assert read_page(daemon.watched, "/readyz") == (200, "ready\n")
    assert gauge(daemon, "hurray_mover_up") == 1
    restarts = series("hurray_mover_restarts_total")
    before = counters(daemon)
    daemon.kill_mover()
    eventually(lambda: read_page(daemon.watched, "/readyz") == (503, "the data plane is not up\n"), 10)
    assert read_page(daemon.watched, "/healthz") == (200, "ok\n")
    eventually(lambda: read_page(daemon.watched, "/readyz")[0] == 200, 20)
    assert moved(before, counters(daemon))[restarts] == 1


def test_a_node_that_drains_is_not_ready_and_still_there() -> None:
    with running_daemon() as daemon, RawClient(daemon.address) as peer:
        prepared = Prepared.of(snapshot(layers=8, pages=64), chunk_bytes=8192)
        put = peer.put(prepared, prepared.offer("stalled", peer.incarnation), ready_tensors=4)
        put.accepted.result(WAIT_S)
        daemon.terminate()
        eventually(lambda: read_page(daemon.watched, "/readyz") == (503, "draining\n"), 10)
        assert gauge(daemon, "hurray_draining") == 1
        daemon.terminate()
        assert daemon.wait() == 0


def test_pages_are_to_be_read_and_no_more(daemon: RunningDaemon) -> None:
    host, _, port = daemon.watched.partition(":")
    for method, path, status in (("HEAD", "/metrics", 200), ("POST", "/metrics", 405), ("GET", "/", 404)):
        connection = http.client.HTTPConnection(host, int(port), timeout=10)
        connection.request(method, path)
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("Connection")) == (status, "close")
        connection.close()
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"GET /" + b"x" * HEAD_MAX_BYTES)
        assert connection.recv(1) == b"", "a head without an end is not read for ever"


@pytest.mark.parametrize("tells_where", [True, False])
def test_metrics_may_be_off_and_a_port_that_is_taken_is_fatal(daemon: RunningDaemon, tells_where: bool) -> None:
    if tells_where:
        done = subprocess.run(
            command("--listen", "127.0.0.1:0", "--arena", "1MiB"),
            env=environment(HURRAY_METRICS__LISTEN=daemon.watched, HURRAY_TRANSPORTS="tcp"),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 1
        assert f"field=metrics.listen, offered={daemon.watched}" in done.stderr
    else:
        with running_daemon('transports = ["tcp"]\n[metrics]\nenabled = false') as other:
            assert other.watched == "off"
