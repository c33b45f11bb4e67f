"""Which transport moves the bytes: the default, an explicit choice, and what happens where one cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import hurray_client as ht
from hurray_client.config import ShmSection
from hurray_wire.source_payloads import SnapshotSource
from hurray_wire.transport import shm
from hurray_wire.v1 import transfer_pb2 as pb
from sdk.snapshots import assert_same_tokens, make_caches, make_snapshot
from sdk.test_node import SMALL_CHUNKS, at_chunk, free_port, large_snapshot
from support.daemon import RunningDaemon, command, environment, eventually, running_daemon

TESTS = Path(__file__).parents[1]
KINDS = ("shm", "tcp", "ucx")


@pytest.fixture(autouse=True)
def _unset(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HURRAY_TRANSPORTS")


@pytest.fixture
def clean(daemon: RunningDaemon) -> Iterator[None]:
    """Nothing is left in the shared daemon."""
    yield
    with ht.connect(daemon.address) as client:
        for info in client.list():
            client.delete(info.key)


def run_client(
    script: str, *arguments: str, prefix: tuple[str, ...] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    """A client in a process of its own."""
    return subprocess.run(
        [*prefix, sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**environment(PYTHONPATH=str(TESTS)), **env},
    )


ROUND_TRIP = """
    import sys
    import hurray_client as ht
    from sdk.snapshots import assert_same_tokens, make_snapshot
    with ht.connect(sys.argv[1]) as client:
        put = client.put("round", make_snapshot(), overwrite=True)
        with client.get("round", consume=True) as got:
            assert_same_tokens(make_snapshot(), got)
            print(put.transport, got.receipt.transport, "ucxx" in sys.modules)
"""


# --- choice -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("kind", KINDS)
def test_each_moves_what_it_must(daemon: RunningDaemon, kind: str) -> None:
    snapshot = make_snapshot()
    with ht.connect(daemon.address, transports=[kind]) as client:
        assert client.put("each", snapshot, require_transport=kind).transport == kind
        got = client.get("each", require_transport=kind)
        assert got.receipt.transport == kind
        assert_same_tokens(snapshot, got)
        into = client.get(
            "each", into=make_caches(seed=9), block_tables=[[0, 1, 2], [0, 4], []], require_transport=kind
        )
        assert into.receipt.transport == kind
        assert_same_tokens(snapshot, into)


@pytest.mark.usefixtures("clean")
def test_the_client_s_order_counts(daemon: RunningDaemon) -> None:
    for order in (("shm", "ucx", "tcp"), ("tcp", "shm"), ("ucx", "tcp")):
        with ht.connect(daemon.address, transports=order) as client:
            assert client.put("order", make_snapshot(), overwrite=True).transport == order[0]
            assert client.get("order").receipt.transport == order[0]
            for kind in order[1:]:
                assert client.get("order", require_transport=kind).receipt.transport == kind


def test_shared_memory_by_default_and_no_ucx_where_nobody_needs_it(daemon: RunningDaemon) -> None:
    ran = run_client(ROUND_TRIP, daemon.address, HURRAY_SHM__PATH=daemon.shm_path)
    assert (ran.returncode, ran.stdout.split()) == (0, ["shm", "shm", "False"]), ran.stderr
    assert ran.stderr == "", "a connection that was closed in order is no loss"


def test_clients_that_share_a_connection_want_the_same_of_it(daemon: RunningDaemon) -> None:
    plane = ht.LocalDataPlane()
    with ht.connect(daemon.address, data_plane=plane):
        with pytest.raises(ht.Misuse):
            ht.connect(daemon.address, data_plane=plane, transports=["tcp"])
        with ht.connect(daemon.address, data_plane=plane) as same:
            same.node()
    plane.close()


def test_names_that_are_none_are_refused(daemon: RunningDaemon) -> None:
    for names in ([], ["pigeon"], ["tcp", "tcp"]):
        with pytest.raises(ht.InvalidRequest) as caught:
            ht.connect(daemon.address, transports=names)
        assert caught.value.field == "transports"


@pytest.mark.usefixtures("clean")
def test_a_retry_by_another_transport_is_the_same_request(daemon: RunningDaemon) -> None:
    """Its chunks have another size."""
    request_id = "3c1f3a56-4f0e-4b5e-9c0a-5f1f0e6a7b11"
    receipts = []
    for kind in ("shm", "tcp"):
        with ht.connect(daemon.address, transports=[kind]) as client:
            receipts.append(client.put("retried", make_snapshot(), request_id=request_id))
    assert receipts[0] == receipts[1]


# --- shared memory that does not reach the node -----------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Paths that do not lead to the shared daemon."""
    listener = shm.ShmTransport(shm.ShmConfig(path=str(tmp_path / "other"), listens=True))
    yield {"nowhere": str(tmp_path / "none"), "another node": str(tmp_path / "other")}
    listener.close()


@pytest.mark.usefixtures("clean")
def test_a_path_to_nowhere_means_tcp(daemon: RunningDaemon, tmp_path: Path) -> None:
    path = str(tmp_path / "none")
    with ht.connect(daemon.address, config=ht.ClientConfig(shm=ShmSection(path=path))) as client:
        assert client.put("far", make_snapshot()).transport == "tcp"
        assert client.get("far").receipt.transport == "tcp"
        with pytest.raises(ht.CapabilityMismatch, match=path):
            client.get("far", require_transport="shm")
    config = ht.ClientConfig(shm=ShmSection(path=path), transports=("shm",))
    with ht.connect(daemon.address, config=config) as client, pytest.raises(ht.CapabilityMismatch, match=path):
        client.get("far")


@pytest.mark.usefixtures("clean")
def test_a_path_to_another_node_means_tcp(daemon: RunningDaemon) -> None:
    with running_daemon(node="other") as other:
        config = ht.ClientConfig(shm=ShmSection(path=other.shm_path))
        with ht.connect(daemon.address, config=config) as client:
            assert client.put("far", make_snapshot()).transport == "tcp"
            with pytest.raises(ht.CapabilityMismatch, match="refused the handshake"):
                client.get("far", require_transport="shm")
        with ht.connect(other.address, config=config) as client:
            assert client.put("near", make_snapshot()).transport == "shm"


@pytest.mark.usefixtures("clean")
def test_another_host_means_tcp(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "_read_boot_id", lambda: "another")
    with ht.connect(daemon.address) as client:
        assert client.put("far", make_snapshot()).transport == "tcp"
        with pytest.raises(ht.CapabilityMismatch, match="boot_id"):
            client.get("far", require_transport="shm")
    with ht.connect(daemon.address, transports=["shm"]) as client, pytest.raises(ht.CapabilityMismatch) as caught:
        client.get("far")
    assert caught.value.field == "shm.boot_id"


def test_a_socket_is_all_that_two_containers_must_share(daemon: RunningDaemon, tmp_path: Path) -> None:
    """A client with mounts, IPC and pids of its own: another /dev/shm, another /proc, the daemon's folder hidden."""
    folder = Path(daemon.shm_path).parent
    shut = ("unshare", "--mount", "--ipc", "--pid", "--fork")
    if subprocess.run([*shut, "mount", "-t", "tmpfs", "none", tmp_path], check=False, capture_output=True).returncode:
        pytest.skip("namespaces are not permitted here: that shm needs nothing but its socket is NOT PROVEN")
    enter = f"""
        set -e
        mount -t tmpfs none {tmp_path}
        touch {tmp_path}/node.sock
        mount --bind {daemon.shm_path} {tmp_path}/node.sock
        mount -t tmpfs none {folder}
        mount -t tmpfs none /dev/shm
        mount -t proc proc /proc
        exec "$@"
    """
    prefix = (*shut, "sh", "-c", textwrap.dedent(enter), "sh")
    ran = run_client(ROUND_TRIP, daemon.address, prefix=prefix, HURRAY_SHM__PATH=str(tmp_path / "node.sock"))
    assert (ran.returncode, ran.stdout.split()) == (0, ["shm", "shm", "False"]), ran.stderr


# --- nodes that lack one ----------------------------------------------------------------------------------------------


@pytest.fixture
def without_ucxx(tmp_path: Path) -> dict[str, str]:
    """An environment in which ucxx is not installed."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.partition('.')[0] in ('ucxx', 'libucx'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Blocker())\n"
    )
    return {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(TESTS)))}


def test_a_node_without_ucx_serves_all_the_same(without_ucxx: dict[str, str]) -> None:
    with running_daemon(env=without_ucxx) as daemon:
        state = daemon.node_state()
        assert ([item.kind for item in state.transports], state.ucx) == (["shm", "tcp"], "")
        (left_out,) = daemon.logged("transport left out", transport="ucx")
        assert "ucxx" in left_out["reason"]
        for path, kind in ((daemon.shm_path, "shm"), ("/nowhere/x", "tcp")):
            ran = run_client(ROUND_TRIP, daemon.address, HURRAY_SHM__PATH=path, **without_ucxx)
            assert (ran.returncode, ran.stdout.split()) == (0, [kind, kind, "False"]), ran.stderr
        with ht.connect(daemon.address, transports=["ucx"]) as client, pytest.raises(ht.CapabilityMismatch):
            client.get("none")


def refused_start(text: str, folder: Path, **env: str) -> str:
    """What a hurrayd says that must not start."""
    (folder / "hurrayd.toml").write_text(f'listen = "127.0.0.1:0"\n{text}\n')
    ran = subprocess.run(
        command("--config", str(folder / "hurrayd.toml")),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment(**env),
    )
    assert ran.returncode == 1, ran.stderr
    assert "ready" not in ran.stdout
    return ran.stderr.splitlines()[-1]


def test_what_is_named_must_start(daemon: RunningDaemon, tmp_path: Path, without_ucxx: dict[str, str]) -> None:
    tcp = f'[tcp]\nlisten = "{daemon.address}"'
    said = refused_start(f'transports = ["tcp"]\n{tcp}', tmp_path)
    assert "transport=tcp" in said
    assert "in use" in said
    said = refused_start(f'transports = ["shm", "tcp"]\n[shm]\npath = "{daemon.shm_path}"', tmp_path)
    assert "transport=shm" in said
    assert daemon.shm_path in said
    said = refused_start('transports = ["ucx"]', tmp_path, **without_ucxx)
    assert "transport=ucx" in said
    # Without a list, too: a place that was given, and a port.
    assert "transport=shm" in refused_start(f'[shm]\npath = "{daemon.shm_path}"', tmp_path)
    assert "transport=tcp" in refused_start(f'{tcp}\n[shm]\npath = "{tmp_path}/s"', tmp_path)


def test_a_node_of_one_transport(tmp_path: Path) -> None:
    for kind in ("shm", "tcp"):
        with running_daemon(f'transports = ["{kind}"]') as daemon:
            assert [item.kind for item in daemon.node_state().transports] == [kind]
            config = ht.ClientConfig(shm=ShmSection(path=daemon.shm_path))
            with ht.connect(daemon.address, config=config) as client:
                assert client.put("one", make_snapshot()).transport == kind


# --- processes that die -----------------------------------------------------------------------------------------------

STALL = """
    import sys, threading
    import hurray_client as ht
    from hurray_wire.source_payloads import SnapshotSource
    from sdk.test_node import SMALL_CHUNKS, large_snapshot
    stage = SnapshotSource.stage
    def stop(self, chunk, *others):
        if chunk.index == 20:
            print("stalled", flush=True)
            threading.Event().wait()
        return stage(self, chunk, *others)
    SnapshotSource.stage = stop
    with ht.connect(sys.argv[1], config=SMALL_CHUNKS, transports=[sys.argv[2]]) as client:
        client.put("stalled", large_snapshot())
"""


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_client_killed_in_the_middle_leaves_nothing(daemon: RunningDaemon, kind: str) -> None:
    before = descriptor_count(daemon)
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STALL), daemon.address, kind],
        stdout=subprocess.PIPE,
        env=environment(PYTHONPATH=str(TESTS), HURRAY_SHM__PATH=daemon.shm_path),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"stalled\n"
        assert not shared_by_name(process.pid, daemon.mover_pid), "a name would outlive them"
        process.kill()
    eventually(lambda: all_free(daemon.node_state().arena), 20, "the arena is whole")
    eventually(lambda: descriptor_count(daemon) <= before, 10, "the connection and its memory are gone")
    with ht.connect(daemon.address, transports=[kind]) as client:
        assert client.put("stalled", make_snapshot()).transport == kind


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_mover_killed_in_the_middle_is_followed_by_one_at_the_same_place(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_daemon(f'transports = ["{kind}"]\n[tcp]\nlisten = "127.0.0.1:{free_port()}"') as daemon:
        config = SMALL_CHUNKS.model_copy(update={"shm": ShmSection(path=daemon.shm_path)})
        with ht.connect(daemon.address, config=config) as client:
            at_chunk(monkeypatch, SnapshotSource, daemon.kill_mover)
            with pytest.raises(ht.HurrayError) as caught:
                client.put("lost", large_snapshot(), timeout_s=20)
            assert caught.value.code == "UNAVAILABLE"
            assert client.put("found", make_snapshot(), timeout_s=20).transport == kind


def test_a_node_killed_with_its_mover_does_not_block_its_successor(tmp_path: Path) -> None:
    config = (
        f'transports = ["shm", "tcp"]\n[shm]\npath = "{tmp_path}/node.sock"\n[tcp]\nlisten = "127.0.0.1:{free_port()}"'
    )
    with running_daemon(config) as daemon:
        daemon.kill_mover()
        daemon.kill()
    assert (tmp_path / "node.sock").is_socket()
    client_config = ht.ClientConfig(shm=ShmSection(path=str(tmp_path / "node.sock")))
    with running_daemon(config) as daemon, ht.connect(daemon.address, config=client_config) as client:
        assert client.put("next", make_snapshot()).transport == "shm"


def descriptor_count(daemon: RunningDaemon) -> int:
    return len(os.listdir(f"/proc/{daemon.mover_pid}/fd"))


def shared_by_name(*pids: int | None) -> list[str]:
    """What processes have mapped that others could open by a name."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return [line for line in lines if "/dev/shm/" in line or "SYSV" in line]


def all_free(arena: pb.ArenaUsage) -> bool:
    return arena.receiving_bytes == arena.quarantined_bytes == 0
