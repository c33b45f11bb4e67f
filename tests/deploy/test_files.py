"""The files by which hurrayd is deployed are what the tools that read them take."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from hurray_server.config import Config, load_config
from hurray_wire.transport.ucx_config import UcxConfig

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = list(yaml.safe_load_all((DEPLOY / "kubernetes/hurrayd.yaml").read_text()))
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = [item for item in KUBERNETES if item["kind"] == kind]
    return dict(found)


@pytest.mark.parametrize("manifest", KUBERNETES, ids=[item["kind"] for item in KUBERNETES])
def test_manifests_fit_the_schema_of_kubernetes(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_the_policy_fences_the_ports_of_ucx() -> None:
    """Nobody comes to them who is not a node or a client of one."""
    policy = of_kind("NetworkPolicy")["spec"]
    pods = of_kind("DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= pods.items()
    (fence,) = [rule for rule in policy["ingress"] if rule["ports"][0]["port"] == UcxConfig().first_port]
    assert fence["ports"] == [{"protocol": "TCP", "port": UcxConfig().first_port, "endPort": UcxConfig().last_port}]
    assert all(peer.get("podSelector", {}).get("matchLabels") for peer in fence["from"])


def test_configurations_are_ones_that_hurrayd_takes(tmp_path: Path) -> None:
    (toml,) = of_kind("ConfigMap")["data"].values()
    advertise = {"advertise": "node-a:7411"}
    path = tmp_path / "hurrayd.toml"
    path.write_text(toml)
    assert load_config(path, advertise).transports_config.kinds == ("shm", "tls")
    environment = COMPOSE["services"]["node-a"]["environment"]
    files = {name.rpartition("__")[2].lower(): value for name, value in environment.items() if "TLS" in name}
    with_tls = advertise | {"tls": {name: files[name] for name in ("certificate", "key", "ca")}}
    config = load_config(DEPLOY / "cluster/hurrayd.toml", with_tls)
    assert config.transports_config.kinds == ("shm", "ucx", "tls")


def test_environments_of_nodes_have_no_key_that_hurrayd_does_not_know() -> None:
    named = {name for item in COMPOSE["services"].values() for name in item.get("environment", {}) if "HURRAY_" in name}
    named |= {item["name"] for item in of_kind("DaemonSet")["spec"]["template"]["spec"]["containers"][0]["env"]} - {
        "POD_IP"
    }
    assert {name.removeprefix("HURRAY_").partition("__")[0].lower() for name in named} <= set(Config.model_fields)


def test_nodes_of_the_cluster_differ_in_their_names_alone() -> None:
    nodes = [{**COMPOSE["services"][f"node-{letter}"]} for letter in "abc"]
    texts = {re.sub(r"(node|socket)-[abc]", r"\1", str(node)) for node in nodes}
    assert len(texts) == 1


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd/hurrayd.service").read_text()
    unit = tmp_path / "hurrayd.service"
    unit.write_text(text.replace("/opt/hurray/bin/hurrayd", "/bin/true"))  # it must be there
    ran = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    complaints = [line for line in ran.stderr.splitlines() if "hurrayd.service" in line]
    assert ran.returncode == 0, ran.stderr
    assert not complaints


def test_the_image_installs_what_the_project_names() -> None:
    extras = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set(re.findall(r'"(\w+)"', (DEPLOY / "Dockerfile").read_text().split("UCX ")[0]))
    assert {"ucx", "cuda12", "cuda13"} <= named & set(extras)
