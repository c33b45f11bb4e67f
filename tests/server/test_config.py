"""Configuration: its layers, what it refuses, and the file that is shipped."""

from __future__ import annotations

import os
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hurray_server.config import Config, load_config, split_address, to_toml
from hurray_server.identity import LocalCallers
from hurray_server.mover import Mover
from hurray_server.mover_config import MoverConfig, TransportsConfig
from hurray_server.quotas import Quota
from hurray_server.trust_config import read_quotas
from hurray_wire.credentials import Credentials
from hurray_wire.errors import DataPlaneUnavailable, InvalidRequest, PermissionDenied
from hurray_wire.limits import Limits
from hurray_wire.transport.shm import ShmConfig
from hurray_wire.transport.tls import SocketConfig
from hurray_wire.transport.ucx_config import UcxConfig
from support.daemon import command, environment
from support.identities import tls_table
from transport.certificates import Authority

SHIPPED = Path(__file__).parents[2] / "deploy" / "hurrayd.toml"


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ.keys() - environment().keys():
        monkeypatch.delenv(name)


def write(folder: Path, text: str) -> Path:
    path = folder / "hurrayd.toml"
    path.write_text(text)
    return path


def test_flags_come_before_the_environment_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, 'node = "file"\n[leases]\ndefault_s = 1\nmax_s = 2\n[arena]\nbytes = "2MiB"\n')
    monkeypatch.setenv("HURRAY_LEASES__MAX_S", "50")
    monkeypatch.setenv("HURRAY_NODE", "environment")
    config = load_config(path, {"node": "flag", "arena": {"prefault": False}})
    assert config.node == "flag"
    assert (config.leases.default_s, config.leases.max_s) == (1, 50)
    assert (config.arena.bytes, config.arena.prefault) == (2 << 20, False)
    assert load_config(path, {}).node == "environment"


def test_the_shipped_file_states_the_defaults(tmp_path: Path) -> None:
    shipped, plain = load_config(SHIPPED, {}), load_config(write(tmp_path, ""), {})
    assert shipped.model_dump() == plain.model_dump()
    lines = [line.strip("# ") for line in SHIPPED.read_text().splitlines()]
    stated = {line.split("=")[0].strip() for line in lines if "=" in line} | {
        line.strip("[]") for line in lines if line.startswith("[")
    }
    for name, value in plain.model_dump().items():
        assert name in stated or isinstance(value, dict), name
        assert not isinstance(value, dict) or set(value) <= stated, name


def test_what_it_prints_is_a_file_that_gives_the_same(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, 'node = "ü \\"q\\""\nadvertise = "h:1"\n[ucx]\ntls = ["tcp", "rc"]\n'), {})
    assert load_config(write(tmp_path, to_toml(config)), {}).model_dump() == config.model_dump()


TLS = {"certificate": "c", "key": "k", "ca": "ca"}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"nope": 1}, "nope"),
        ({"arena": {"nope": 1}}, "arena.nope"),
        ({"arena": {"bytes": 5}}, "arena.bytes"),
        ({"ucx": {"nope": 1}}, "ucx.nope"),
        ({"ucx": {"first_port": 80}}, "ucx.first_port"),
        ({"ucx": {"net_devices": ["eth0; rm"]}}, "ucx.net_devices"),
        ({"leases": {"default_s": 10, "max_s": 5}}, "leases"),
        ({"transfers": {"chunk_bytes": 5000}}, "transfers.chunk_bytes"),
        ({"transfers": {"window": 0}}, "transfers.window"),
        ({"transfers": {"cpus": "3-1"}}, "transfers.cpus"),
        ({"log": {"level": "loud"}}, "log.level"),
        ({"node": ""}, "node"),
        ({"ucx": {"trusted": ["10.0.0.0/33"]}}, "ucx.trusted"),
        ({"tls": {"certificate": "c", "key": "k"}}, "tls.ca"),
        ({"tls": {**TLS, "tenants": "spiffe://x/y"}}, "tls.tenants"),
        ({"tls": {**TLS, "data": {"key": "k"}}}, "tls.data"),
        ({"tls": TLS, "grants": [{"tenant": "b", "may": ["get"]}]}, "grants.0"),
        ({"tls": TLS, "grants": [{"tenant": "b", "prefix": "a/sha", "may": ["get"]}]}, "grants.0"),
        ({"tls": TLS, "grants": [{"tenant": "b", "prefix": "a/", "may": []}]}, "grants.0.may"),
        ({"tls": TLS, "grants": [{"tenant": "b", "prefix": "a/", "may": ["own"]}]}, "grants.0.may.0"),
        ({"tls": TLS, "grants": [{"tenant": "b/c", "prefix": "a/", "may": ["get"]}]}, "grants.0.tenant"),
        ({"quotas": {"a": {"bytes": -1}}}, "quotas.a.bytes"),
        ({"quotas": {"a/b": {}}}, "quotas.a/b.[key]"),
    ],
)
def test_a_wrong_key_or_value_is_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load_config(None, values)
    assert caught.value.field == named


@pytest.mark.parametrize(
    "values",
    [
        {"listen": "0.0.0.0:7411"},
        {"listen": "10.0.0.3:7411"},
        {"listen": "decode-3:7411"},
        {"listen": "0.0.0.0:7411", "insecure": True},
        {"listen": "[::]:7411", "insecure": True},
        {"listen": "localhost"},
        {"listen": "localhost:"},
        {"listen": "localhost:99999"},
        {"listen": "::1:7411"},
        {"advertise": "nowhere"},
        {"tls": TLS, "insecure": True},
        {"grants": [{"tenant": "b", "prefix": "a/", "may": ["get"]}]},  # without identities
        {"tls": TLS, "transports": ["ucx"]},  # where nothing is trusted
        {"tls": TLS, "transports": ["tcp"]},
        {"tls": {**TLS, "data": {"listen": "0.0.0.0:1"}}},
    ],
)
def test_an_address_that_would_surprise_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        load_config(None, values)


def test_plain_text_elsewhere_is_said_explicitly() -> None:
    assert load_config(None, {"listen": "10.0.0.3:7411", "insecure": True}).listen == "10.0.0.3:7411"
    assert load_config(None, {"listen": "0.0.0.0:1", "insecure": True, "advertise": "h:1"}).advertise == "h:1"
    assert split_address("[::1]:7411") == ("::1", 7411)
    assert load_config(None, {"listen": "[::1]:0"}).listen == "[::1]:0"


def test_a_file_that_is_not_there_or_not_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no configuration file"):
        load_config(tmp_path / "none.toml", {})
    with pytest.raises(InvalidRequest, match="cannot be read"):
        load_config(write(tmp_path, "= 3"), {})


def test_a_configuration_cannot_be_changed() -> None:
    config = load_config(None, {})
    for section, name in ((config, "node"), (config.arena, "bytes"), (config.ucx, "first_port")):
        with pytest.raises((ValueError, AttributeError)):
            setattr(section, name, 1)


def test_a_snapshot_is_never_larger_than_the_arena() -> None:
    config = load_config(None, {"arena": {"bytes": (1 << 20) + 1}})
    assert config.wire_limits.max_snapshot_bytes == (1 << 20) + 4096


def test_what_a_mover_is_told_survives_the_command_line() -> None:
    config: Config = load_config(None, {"ucx": {"tls": ["tcp", "rc"]}, "shm": {"path": "/tmp/é"}})
    told = MoverConfig(1 << 20, True, config.transports_config, config.wire_limits, "info", "json", cpus="1-2")
    assert MoverConfig.from_json(told.to_json()) == told


@pytest.mark.parametrize(
    ("peer", "admin"),
    [
        ("ipv4:127.0.0.1:40312", True),
        ("ipv6:[::1]:40312", True),
        ("ipv6:%5B::1%5D:40312", True),
        ("unix:", True),
        ("ipv4:10.0.0.3:40312", False),
        ("ipv6:[2001:db8::1]:40312", False),
        ("", False),
        ("nonsense", False),
    ],
)
def test_only_this_host_administers(peer: str, admin: bool) -> None:
    principal = LocalCallers().principal(SimpleNamespace(peer=lambda: peer))  # type: ignore[arg-type]
    assert (principal.tenant, principal.admin) == ("local", admin)
    if not admin:
        with pytest.raises(PermissionDenied):
            principal.require_admin()


def run(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=30, check=False, env=environment(**settings)
    )


def test_the_command_checks_and_prints(tmp_path: Path) -> None:
    path = write(tmp_path, "[leases]\ndefault_s = 30\n")
    shown = run(
        *("--config", str(path), "--print-config", "--node", "n", "--arena", "2MiB", "--net-device", "lo"),
        HURRAY_DRAIN_S="3",
    )
    assert shown.returncode == 0, shown.stderr
    config = load_config(write(tmp_path, shown.stdout), {})
    assert (config.node, config.arena.bytes, config.leases.default_s, config.drain_s) == ("n", 2 << 20, 30, 3)
    assert run("--config", str(path), "--check").returncode == 0
    wrong = run("--config", str(path), "--check", "--listen", "0.0.0.0:1")
    assert wrong.returncode == 2
    assert "insecure" in wrong.stderr
    assert "Traceback" not in wrong.stderr


@pytest.mark.parametrize(
    ("text", "names"), [("eth0", ("eth0",)), ("eth0, lo", ("eth0", "lo")), ('["eth0", "lo"]', ("eth0", "lo"))]
)
def test_a_list_of_names_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, names: tuple[str, ...]
) -> None:
    monkeypatch.setenv("HURRAY_UCX__NET_DEVICES", text)
    assert load_config(write(tmp_path, ""), {}).ucx.net_devices == names


# --- transports -------------------------------------------------------------------------------------------------------


def test_with_certificates_every_transport_asks_for_one_or_is_named() -> None:
    elsewhere = {"listen": "0.0.0.0:7411", "advertise": "decode-3:7411", "tls": TLS}
    config = load_config(None, elsewhere)
    told = config.transports_config
    assert told.kinds == ("shm", "tls")
    assert told.tls is not None
    assert (told.tls.listen_host, told.tls.listen_port, told.tls.advertised_host) == ("0.0.0.0", 7412, "decode-3")
    assert told.credentials == Credentials(Path("c"), Path("k"), Path("ca"))
    assert config.left_out.keys() == {"ucx", "tcp"}
    data = {"certificate": "dc", "key": "dk", "listen": "10.0.0.3:9000"}
    named = load_config(
        None,
        {**elsewhere, "tls": {**TLS, "data": data}, "ucx": {"trusted": ["eth9"]}, "tcp": {"listen": "10.0.0.3:1"}},
    ).transports_config
    assert named.kinds == ("shm", "ucx", "tls", "tcp")
    assert named.tls is not None
    assert (named.tls.listen_host, named.tls.listen_port, named.tls.advertised_host) == ("10.0.0.3", 9000, None)
    assert named.credentials == Credentials(Path("dc"), Path("dk"), Path("ca"))
    told_mover = MoverConfig(1 << 20, False, named, Limits(), "info", "json")
    assert MoverConfig.from_json(told_mover.to_json()) == told_mover


def test_trust_comes_out_of_a_file_as_it_went_in(tmp_path: Path) -> None:
    text = """
[tls]
certificate = "c"
key = "k"
ca = "ca"
[tls.data]
certificate = "dc"
key = "dk"
[[grants]]
tenant = "b"
prefix = "a/ü/"
may = ["get", "list"]
[[grants]]
tenant = "ops"
may = ["admin"]
[quotas]
default = { bytes = "1GiB", transfers = 4 }
"tenant.b" = { transfers = 8 }
[audit]
path = "/var/log/audit"
"""
    config = load_config(write(tmp_path, text), {})
    assert load_config(write(tmp_path, to_toml(config)), {}).model_dump() == config.model_dump()
    default, own = read_quotas(config.quotas)
    assert default == Quota(1 << 30, None, 4)
    assert own == {"tenant.b": Quota(1 << 30, None, 8)}
    assert [grant.grant.prefix for grant in config.grants] == ["a/ü/", ""]


def test_quotas_and_grants_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HURRAY_QUOTAS", '{"default": {"snapshots": 3}}')
    for name in TLS:
        monkeypatch.setenv(f"HURRAY_TLS__{name.upper()}", "x")
    monkeypatch.setenv("HURRAY_GRANTS", '[{"tenant": "ops", "may": ["admin"]}]')
    config = load_config(write(tmp_path, ""), {})
    assert read_quotas(config.quotas)[0].snapshots == 3
    assert config.tls is not None
    assert config.grants[0].tenant == "ops"


def test_files_are_looked_at_before_the_start(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    node = authority.node("n")
    other = authority.node("other")
    old = authority.issue("old", hosts=["localhost"], expired=True)
    for wrong, said in (
        (replace(node, key=other.key), "tls.key"),
        (replace(node, ca=tmp_path / "none"), "tls.ca"),
        (old, "not valid now"),
    ):
        path = write(tmp_path, tls_table(wrong))
        for arguments in (["--check"], []):
            failed = run("--config", str(path), *arguments)
            assert failed.returncode == 2
            assert said in failed.stderr
            assert "Traceback" not in failed.stderr
        assert run("--config", str(path), "--print-config").returncode == 0
    assert run("--config", str(write(tmp_path, tls_table(node, other))), "--check").returncode == 0
    failed = run("--config", str(write(tmp_path, tls_table(node, replace(other, key=node.key)))), "--check")
    assert "tls.data.key" in failed.stderr
    failed = run("--config", str(write(tmp_path, '[audit]\npath = "/nowhere/audit"\n')), "--check")
    assert (failed.returncode, "audit.path" in failed.stderr) == (2, True)
    device = next((name for _, name in socket.if_nameindex() if name != "lo"), "nosuchdevice0")
    failed = run("--check", "--net-device", device, "--config", str(write(tmp_path, "")))
    assert (failed.returncode, "ucx.trusted" in failed.stderr) == (2, True)
    assert run("--check", "--net-device", device, "--ucx-trusted", device).returncode == 0


def test_all_that_can_be_had_by_default() -> None:
    told = load_config(None, {}).transports_config
    assert (told.kinds, told.optional, told.by_merit) == (("shm", "ucx", "tcp"), ("shm", "ucx"), True)
    assert (told.shm.path, told.shm.listens) == ("/run/hurray/hurrayd.sock", True)
    assert (told.tcp.listen_host, told.tcp.listen_port) == ("127.0.0.1", 7412)
    assert load_config(None, {"listen": "[::1]:0"}).transports_config.tcp.listen_host == "::1"
    assert load_config(None, {"listen": "localhost:0"}).transports_config.tcp.listen_port == 0
    assert load_config(None, {"shm": {"path": "/x/y"}}).transports_config.optional == ("ucx",)


def test_exactly_what_is_named() -> None:
    told = load_config(None, {"transports": ["tcp", "shm"]}).transports_config
    assert (told.kinds, told.optional, told.by_merit) == (("tcp", "shm"), (), False)


def test_plain_sockets_off_loopback_are_named_explicitly() -> None:
    elsewhere = {"listen": "10.0.0.3:7411", "insecure": True}
    config = load_config(None, elsewhere)
    assert "tcp" not in config.transports_config.kinds
    assert "10.0.0.3" in config.left_out["tcp"]
    with pytest.raises(InvalidRequest, match=r"tcp\.listen"):
        load_config(None, {**elsewhere, "transports": ["tcp"]})
    named = load_config(None, {**elsewhere, "tcp": {"listen": "10.0.0.3:9000"}})
    assert (named.transports_config.tcp.listen_port, list(named.left_out)) == (9000, ["tls"])
    with pytest.raises(InvalidRequest, match=r"tcp\.advertise"):
        load_config(None, {**elsewhere, "tcp": {"listen": "0.0.0.0:9000"}})
    wide = load_config(None, {**elsewhere, "tcp": {"listen": "0.0.0.0:9000", "advertise": "10.0.0.3"}})
    assert wide.transports_config.tcp.advertised_host == "10.0.0.3"


@pytest.mark.parametrize(
    "values",
    [
        {"transports": []},
        {"transports": ["carrier pigeon"]},
        {"transports": ["tls"]},  # without certificates
        {"transports": ["shm", "shm"]},
        {"shm": {"path": "relative"}},
        {"shm": {"path": "/" + "x" * 200}},
        {"tcp": {"listen": "nowhere"}},
        {"listen": "127.0.0.1:65535", "transports": ["tcp"]},
    ],
)
def test_transports_that_make_no_sense(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        load_config(None, values)


def test_the_check_says_which_transports_there_will_be(tmp_path: Path) -> None:
    said = run("--check", "--config", str(write(tmp_path, 'listen = "10.0.0.3:7411"\ninsecure = true\n'))).stdout
    assert "transport shm at /run/hurray/hurrayd.sock, if it can be had" in said
    assert "transport tcp left out: listen is 10.0.0.3:7411" in said


def test_shm_that_cannot_listen_is_left_out_where_it_may_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    shm, tcp = ShmConfig(path=str(tmp_path / "file" / "sock"), listens=True), SocketConfig(listen_host="127.0.0.1")
    for optional in (("shm",), ()):
        transports = TransportsConfig(("shm", "tcp"), shm, tcp, UcxConfig(), optional=optional)
        mover = Mover(MoverConfig(1 << 20, False, transports, Limits(), "info", "json"), lambda _: None)
        try:
            if optional:
                started = mover.start().started
                assert [item.kind for item in started.transports] == ["tcp"]
                assert "file/sock" in started.left_out["shm"]
            else:
                with pytest.raises(DataPlaneUnavailable) as caught:
                    mover.start()
                assert caught.value.details["transport"] == "shm"
        finally:
            mover.stop()
