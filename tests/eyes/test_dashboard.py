"""The dashboard and the rules against a real Prometheus that scrapes a node which has moved, refused and lost things;
and the same node as text."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hurray_client as ht
from hurray_wire.transport.tls import SocketConfig, TcpTransport
from sdk.test_cli import hurrayctl
from sdk.test_node import free_port
from support.daemon import RunningDaemon, eventually, running_daemon
from support.raw import RawClient, put_corrupted
from support.scrape import read_page

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/hurray.json").read_text())
QUERIES = [
    (panel["title"], target["expr"], target["legendFormat"])
    for panel in DASHBOARD["panels"]
    if panel["type"] != "row"
    for target in panel["targets"]
]
NEVER_HERE = {"Part of the link that is used"}
"""Loopback has no speed."""

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="NO QUERY OF THE DASHBOARD IS TESTED: there is no prometheus (Debian: apt install prometheus)",
)


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Its address, when it runs."""
    config = (DEPLOY / "prometheus/prometheus.yml").read_text()
    config, found = re.subn(r"targets: \[.*\]", f"targets: ['{target}']", config)
    assert found == 1
    (folder / "prometheus.yml").write_text(config.replace(": 5s", ": 1s"))
    shutil.copy(DEPLOY / "prometheus/rules.yml", folder)
    address = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["prometheus", *options, f"--web.listen-address={address}"], stdout=log, stderr=subprocess.STDOUT
        )
    with process:
        try:
            eventually(lambda: process.poll() is not None or _is_ready(address), 60, "prometheus starts")
            assert process.poll() is None, (folder / "log").read_text()
            yield address
        finally:
            process.kill()


def _is_ready(address: str) -> bool:
    try:
        return read_page(address, "/-/ready")[0] == 200
    except OSError:
        return False


def query(address: str, expr: str) -> list[dict[str, Any]]:
    """The result of a query, for now. Variables of the dashboard are as Grafana would have them."""
    expr = expr.replace("$__rate_interval", "30s").replace("$__range", "1m").replace("$node", ".*")
    with urllib.request.urlopen(f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expr})}") as answer:
        found = json.load(answer)
    assert found["status"] == "success", found
    result: list[dict[str, Any]] = found["data"]["result"]
    return result


def use(daemon: RunningDaemon) -> None:
    """Puts, a mapped get, a refusal and a failure."""
    settings = ht.ClientConfig(transports=("shm", "tcp"), shm={"path": daemon.shm_path})  # type: ignore[arg-type]
    caches: Any = {(0, role): np.ones((512, 16, 4, 64), np.float16) for role in ("key", "value")}
    value = ht.KVSnapshot.from_paged(caches, block_tables=[list(range(512))], token_counts=[512 * 16])
    with ht.connect(daemon.address, config=settings) as client:
        client.put("used", value)
        with client.get("used"), pytest.raises(ht.KeyExists):
            client.put("used", value)
        client.delete("used")
    with RawClient(daemon.address, transports={"tcp": lambda: TcpTransport(SocketConfig())}) as peer:
        assert isinstance(put_corrupted(peer, "corrupted"), ht.ChecksumMismatch)


@needs_prometheus
def test_the_rules_are_rules() -> None:
    subprocess.run(
        ["promtool", "check", "config", DEPLOY / "prometheus/prometheus.yml"], check=True, capture_output=True
    )


@needs_prometheus
def test_every_panel_has_something_to_show(tmp_path: Path) -> None:
    with running_daemon('transports = ["shm", "tcp"]') as daemon, prometheus(tmp_path, daemon.watched) as address:
        eventually(lambda: query(address, "hurray_ready == 1"), 30, "a first scrape, before anything happens")
        use(daemon)
        last = 'hurray_transfers_total{cause="CHECKSUM_MISMATCH"} == 1'
        eventually(lambda: query(address, last), 30, "a scrape after it all")
        for title, expr, legend in QUERIES:
            found = query(address, expr)
            if title in NEVER_HERE:
                assert found == []
                found = query(address, expr.replace("hurray_link_speed_bytes", "hurray_arena_size_bytes"))
            assert found, (title, expr)
            labels = set(re.findall(r"\{\{(\w+)\}\}", legend))
            for item in found:
                assert labels <= item["metric"].keys(), (title, legend, item["metric"])
        for expr, least in (
            ('sum(rate(hurray_transfer_bytes_total{direction="in"}[30s]))', 1000),
            ('sum(increase(hurray_transfers_total{outcome="failed"}[30s]))', 0.5),
            ('sum(increase(hurray_requests_refused_total{cause="KEY_EXISTS"}[30s]))', 0.5),
        ):
            assert float(query(address, expr)[0]["value"][1]) >= least, expr
        firing = eventually(lambda: query(address, 'ALERTS{alertstate="firing"}'), 30, "an alert")
        assert [item["metric"]["alertname"] for item in firing] == ["HurrayDataLoss"]


def counted(daemon: RunningDaemon) -> Any:
    """What hurrayctl says of the node once a put, a get and three things that came to nothing are over."""
    values = json.loads(hurrayctl("stat", "--node", daemon.watched, "--over", "0.1", "--json"))
    idle = not any(values["moving"]["running"].values())
    return values if idle and (len(values["speed"]["flows"]), len(values["failing"])) == (2, 3) else None


def test_the_same_as_text() -> None:
    with running_daemon('transports = ["shm", "tcp"]') as daemon:
        use(daemon)
        values = eventually(lambda: counted(daemon), 30, "what happened is counted, which nobody waits for")
        shown = hurrayctl("stat", "--node", daemon.watched, "--over", "0.1")
    assert values["moving"] | {"peers": 0} == {
        "ready": True,
        "draining": False,
        "mover_up": True,
        "mover_restarts": 0,
        "transports": {"shm": "up", "tcp": "up"},
        "peers": 0,
        "running": {"in": 0, "out": 0},
    }
    (put, got) = sorted(values["speed"]["flows"], key=lambda flow: str(flow["direction"]))
    assert (put["direction"], put["transport"], put["transfers"]) == ("in", "shm", 1)
    assert put["bytes"] > 0 < put["bytes_per_s_of_a_transfer"]
    assert (got["direction"], got["transfers"]) == ("out", 1)
    assert got["mapped_bytes"] > 0
    failing = {(item["what"], item["cause"], item["of"]): item["count"] for item in values["failing"]}
    assert failing == {
        ("transfer", "CHECKSUM_MISMATCH", "in tcp"): 1,
        ("call refused", "KEY_EXISTS", "put"): 1,
        ("snapshot gone", "KEY_DELETED", ""): 1,
    }
    assert values["memory"]["arena_bytes"] == 64 << 20
    for words in ("Is it moving?", "How fast?", "CHECKSUM_MISMATCH", "What holds memory?"):
        assert words in shown


def test_an_address_that_is_no_node_s() -> None:
    address = f"127.0.0.1:{free_port()}"
    error = json.loads(hurrayctl("stat", "--node", address, "--json", status=4))["error"]
    assert error["reason"] == "PEER_UNAVAILABLE"
    assert "one of them" in hurrayctl("stat", "key", "--node", address, status=1)
