"""The SDK and hurrayctl with certificates: who they are, whom they believe, and what changes while they run."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hurray_client as ht
from hurray_client.channel import PLAIN_TEXT_NODE, TLS_NODE, look_at_tls, look_for_tls
from hurray_client.cli.main import app
from hurray_client.node import _choose_transports, _known
from hurray_wire.errors import ProtocolViolation
from hurray_wire.transport.base import TransportParameters
from hurray_wire.transport.tls import EXPECTED_IDENTITY
from hurray_wire.v1 import transfer_pb2 as pb
from sdk.ports import WIDE_PORTS
from sdk.snapshots import assert_same_tokens, make_snapshot
from support.daemon import RunningDaemon, running_daemon
from support.identities import TRUSTED_UCX, Identified, identified_daemon, tls_table
from transport.certificates import Authority


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Identified]:
    with identified_daemon(tmp_path_factory.mktemp("identities"), TRUSTED_UCX) as running:
        yield running


@pytest.fixture(scope="module")
def plain_node() -> Iterator[RunningDaemon]:
    with running_daemon() as running:
        yield running


def connect(node: Identified, tenant: str, *transports: str) -> ht.Client:
    config = ht.ClientConfig(shm={"path": node.daemon.shm_path}, transports=transports or None)  # type: ignore[arg-type]
    return ht.connect(node.address, tls=node.tenant(tenant), config=config)


@pytest.mark.parametrize("transport", ["ucx"], indirect=True)  # of the directory's fixture: each test here says its own
@pytest.mark.parametrize("kind", ["shm", "tls", "tcp", "ucx"])
def test_one_tenant_hands_over_to_another_by_every_transport(node: Identified, transport: str, kind: str) -> None:
    value, name = make_snapshot(), f"shared/{kind}"
    with connect(node, "a", kind) as a, connect(node, "b", kind) as b:
        receipt = a.put(f"a/{name}", value)
        assert (receipt.key, receipt.transport) == (f"a/{name}", kind)
        with b.get(f"a/{name}") as got:
            assert_same_tokens(got, value)
            assert got.receipt.transport == kind
        own = a.put("own", value)
        assert own.key == "a/own"
        a.get("own", consume=True).close()
        with pytest.raises(ht.PermissionDenied):
            b.get("a/own", wait_s=5)
        with pytest.raises(ht.PermissionDenied):
            b.put(f"a/{name}", value)
        assert [info.key for info in b.list("a/")] == [f"a/{name}"]
        a.delete(f"a/{name}")


@pytest.fixture
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HURRAY_TRANSPORTS")


@pytest.mark.usefixtures("_no_choice")
def test_with_certificates_nothing_is_used_unasked_that_would_do_without(node: Identified, tmp_path: Path) -> None:
    config = ht.ClientConfig(shm={"path": f"{tmp_path}/none"})  # type: ignore[arg-type]
    with ht.connect(node.address, tls=node.tenant("a"), config=config) as a:
        assert {"tls", "tcp", "ucx"} <= set(a.node().transports)
        assert a.put("quiet", make_snapshot()).transport == "tls"
        a.delete("quiet")
    offered = ["shm", "ucx", "tls", "tcp"]
    trusting = config.model_copy(update={"ucx": replace(config.ucx, trusted=("127.0.0.0/8",))})
    for settings, kinds in ((config, ("shm", "ucx")), (trusting, ("shm", "ucx"))):
        assert _choose_transports(offered, settings) == kinds
    tls = node.tenant("a")
    for settings, kinds in ((config, ("shm", "tls")), (trusting, ("shm", "ucx"))):
        assert _choose_transports(offered, settings.model_copy(update={"tls": tls})) == kinds
    with pytest.raises(ht.CapabilityMismatch):
        _choose_transports(["tcp", "ucx"], config.model_copy(update={"tls": tls}))


@pytest.mark.parametrize(
    ("transports", "offered", "unusable", "kinds"),
    [
        (("ucx", "tcp"), ["ucx", "tcp"], ["ucx"], ("tcp",)),
        (("ucx",), ["tcp"], ["ucx"], None),
        (None, ["shm", "tcp"], ["ucx"], ("shm", "tcp")),
        (None, ["shm"], ["ucx"], ("shm",)),
        (None, [], ["ucx"], None),
    ],
)
def test_what_cannot_be_used_is_passed_over_and_alone_is_waited_for(
    transports: tuple[str, ...] | None, offered: list[str], unusable: list[str], kinds: tuple[str, ...] | None
) -> None:
    config = ht.ClientConfig(transports=transports)
    why = dict.fromkeys(unusable, "its device is gone")
    if kinds is not None:
        assert _choose_transports(offered, config, why) == kinds
        return
    with pytest.raises(ht.DataPlaneUnavailable, match="ucx cannot be used: its device is gone") as raised:
        _choose_transports(offered, config, why)
    assert raised.value.retry_after_s


def test_a_node_must_say_whose_its_data_connections_are() -> None:
    told = TransportParameters("tls", b"address", {EXPECTED_IDENTITY: "whoever", "frames": "1"})
    with pytest.raises(ProtocolViolation, match="who its data plane is"):
        _known(told, pb.Hello())
    known = _known(told, pb.Hello(identity="spiffe://hurray/node/n/data"))
    assert known.settings == {EXPECTED_IDENTITY: "spiffe://hurray/node/n/data", "frames": "1"}
    assert _known(replace(told, kind="tcp"), pb.Hello()).kind == "tcp"


# --- who is refused, and how it is told -----------------------------------------------------------------------------


def test_a_certificate_that_is_not_taken_is_told_at_once_and_by_name(node: Identified, tmp_path: Path) -> None:
    uri = "spiffe://hurray/tenant/a"
    foreign = Authority(tmp_path).issue("foreign", spiffe=uri, trusts=node.authority)
    stranger = replace(node.tenant("a"), ca=Authority(tmp_path, "other").path)
    host = node.authority.node("elsewhere", hosts=["elsewhere.example"])
    refused = "does not take this certificate|unknown ca"
    for tls, words in ((foreign, refused), (stranger, "certificate of the node")):
        with ht.connect(node.address, tls=tls) as client, pytest.raises(ht.Unauthenticated, match=f"(?i){words}"):
            client.stat("x")  # long before the time for trying again is over
    with (
        running_daemon(tls_table(host, node.data)) as other,
        ht.connect(other.address, tls=node.tenant("a")) as client,
        pytest.raises(ht.Unauthenticated, match=r"certificate of the node: .*127\.0\.0\.1"),
    ):
        client.stat("x")
    with pytest.raises(ht.Misuse, match="not valid now"):
        ht.connect(node.address, tls=node.authority.issue("old", spiffe=uri, expired=True))
    with pytest.raises(ht.Misuse, match=r"tls\.key"):
        ht.connect(node.address, tls=replace(node.tenant("a"), key=node.tenant("b").key))


@pytest.mark.parametrize("call", [lambda client: client.stat("x"), lambda client: client.put("x", make_snapshot())])
def test_plain_text_to_a_node_that_wants_certificates_is_told_so(
    node: Identified, call: Callable[[ht.Client], object]
) -> None:
    with ht.connect(node.address) as client, pytest.raises(ht.Unauthenticated, match=r"speaks TLS only.*--certificate"):
        call(client)


@pytest.mark.parametrize("call", [lambda client: client.stat("x"), lambda client: client.put("x", make_snapshot())])
def test_certificates_shown_to_a_node_of_plain_text_are_told_so(
    node: Identified, plain_node: RunningDaemon, call: Callable[[ht.Client], object]
) -> None:
    words = r"no TLS connection to the node: the node speaks plain text only.*\[tls\]"
    with ht.connect(plain_node.address, tls=node.tenant("a")) as client, pytest.raises(ht.Unauthenticated, match=words):
        call(client)


@pytest.mark.parametrize("way", ["plain", "tls"])
def test_hurrayctl_says_which_of_tls_and_plain_text_it_takes(
    node: Identified, plain_node: RunningDaemon, way: str
) -> None:
    tls = node.tenant("a")
    files = ["--certificate", str(tls.certificate), "--key", str(tls.key), "--ca", str(tls.ca)]
    options, address = ([], node.address) if way == "plain" else (files, plain_node.address)
    words = "speaks TLS only" if way == "plain" else "speaks plain text only"
    for command in (["ls"], ["node"], ["stat", "x"]):
        result = CliRunner().invoke(app, [*options, *command, "-t", address])
        assert result.exit_code == 1, result.output
        assert words in result.output


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_is_recognised_though_it_turns_who_asks_away(node: Identified, version: ssl.TLSVersion) -> None:
    made = node.authority.node("n")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(made.ca))
    context.load_cert_chain(made.certificate, made.key)
    context.minimum_version = context.maximum_version = version
    context.verify_mode = ssl.CERT_REQUIRED

    def serve(connection: socket.socket) -> None:
        with suppress(OSError), context.wrap_socket(connection, server_side=True):
            pass

    with served(serve) as address:
        assert look_for_tls(address) == TLS_NODE


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\4"])
def test_what_is_neither_is_taken_for_neither(node: Identified, says: bytes) -> None:
    def serve(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.recv(9)
            connection.sendall(says)

    with served(serve) as address:
        assert look_for_tls(address) is None
        assert look_at_tls(address, node.tenant("a")) != PLAIN_TEXT_NODE


@contextmanager
def served(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that does this with each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    serve(listener.accept()[0])

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_looking_for_what_is_wrong_finds_nothing_where_nothing_is(node: Identified, plain_node: RunningDaemon) -> None:
    assert look_at_tls(node.address, node.tenant("a")) is None
    assert look_at_tls("127.0.0.1:1", node.tenant("a")) is None
    assert look_at_tls("unix:/nowhere", node.tenant("a")) is None
    for target in (plain_node.address, "127.0.0.1:1", "unix:/nowhere", "nowhere"):
        assert look_for_tls(target) is None


# --- changed files --------------------------------------------------------------------------------------------------


def install(target: ht.Credentials, made: ht.Credentials) -> None:
    for name in ("certificate", "key", "ca"):
        path: Path = getattr(target, name)
        staged = path.with_name(f"{path.name}.staged")
        shutil.copy(getattr(made, name), staged)
        staged.replace(path)


def test_changed_certificates_serve_the_next_call_and_what_runs_goes_on(node: Identified, tmp_path: Path) -> None:
    own = ht.Credentials(tmp_path / "c", tmp_path / "k", tmp_path / "ca")
    install(own, node.tenant("a"))
    config = ht.ClientConfig(transports=("tls",))
    value = make_snapshot()
    renewed = node.authority.issue("a2", spiffe="spiffe://hurray/tenant/a")
    with ht.connect(node.address, tls=own, config=config) as client:
        client.put("before", value)
        session = client._node._session
        began = threading.Event()

        def change(progress: ht.Progress) -> None:
            if not began.is_set():
                began.set()
                install(own, renewed)
                client.stat("before")

        client.put("during", value, on_progress=change)
        assert began.is_set()
        client.put("after", value)
        assert client._node._session is session  # nobody had to connect anew
        assert client._node.channels._line.pem.certificate == renewed.certificate.read_bytes()  # type: ignore[union-attr]
        own.key.write_bytes(b"broken")
        assert client.stat("after").info.key == "a/after"
        for name in ("before", "during", "after"):
            client.delete(name)


def test_a_node_takes_up_changed_certificates_and_keeps_the_old_where_they_do_not_fit(tmp_path: Path) -> None:
    with identified_daemon(tmp_path, TRUSTED_UCX) as node, connect(node, "a", "tls") as client:

        def reads_anew(name: str) -> None:
            with connect(node, "a", "tls") as other:
                other.get(name).close()

        def logged(words: str) -> bool:
            return any(words in entry["event"] for entry in node.daemon.log())

        client.put("x", make_snapshot())
        key = node.node.key.read_bytes()
        node.node.key.write_bytes(node.tenant("a").key.read_bytes())
        reads_anew("x")
        assert logged("the old ones stay in force")
        node.node.key.write_bytes(key)
        issued = node.authority.issue("m", spiffe="spiffe://hurray/node/m", hosts=["127.0.0.1"])
        for target in (node.node, node.data):  # another name for the data plane: who connects is told it
            install(target, issued)
            reads_anew("x")
        assert logged("credentials read again")
        client.put("y", make_snapshot())
        with pytest.raises(ht.PermissionDenied):
            client.stat("b/x")


# --- settings -------------------------------------------------------------------------------------------------------


def test_credentials_come_from_the_environment(node: Identified, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = node.tenant("a")
    for name in ("certificate", "key", "ca"):
        monkeypatch.setenv(f"HURRAY_TLS__{name.upper()}", str(getattr(tls, name)))
    monkeypatch.setenv("HURRAY_TRANSPORTS", "tls")
    assert ht.ClientConfig().tls == tls
    with ht.connect(node.address) as client:
        assert client.put("env", make_snapshot()).key == "a/env"
        client.delete("env")
    monkeypatch.delenv("HURRAY_TLS__KEY")
    with pytest.raises(ht.InvalidRequest, match=r"tls\.key"):
        ht.connect(node.address)


def test_clients_that_share_a_connection_share_an_identity(node: Identified) -> None:
    with closing(ht.LocalDataPlane(ht.ClientConfig(tls=node.tenant("a")))) as plane:
        a = ht.connect(node.address, tls=node.tenant("a"), data_plane=plane)
        with a, pytest.raises(ht.Misuse, match="tls"):
            ht.connect(node.address, tls=node.tenant("b"), data_plane=plane)


def test_hurrayctl_takes_credentials(node: Identified) -> None:
    tls = node.tenant("a")

    def run(*arguments: str, status: int = 0, **env: str) -> Any:
        done = CliRunner().invoke(app, [*arguments, "--json"], env={**WIDE_PORTS, **env})
        assert done.exit_code == status, done.output
        return json.loads(done.stdout)

    options = ["--certificate", str(tls.certificate), "--key", str(tls.key), "--ca", str(tls.ca)]
    assert run(*options, "ls", "-t", node.address) == []
    env = {f"HURRAY_TLS__{name.upper()}": str(getattr(tls, name)) for name in ("certificate", "key", "ca")}
    assert run("ls", "-t", node.address, **env) == []
    assert run(*options, "drain", "-t", node.address, status=1)["error"]["reason"] == "PERMISSION_DENIED"
    assert run(*options[:4], "ls", "-t", node.address, status=1)["error"]["details"]["field"] == "ca"
