"""A node short of memory, of descriptors and of patience (cases 9, 11, 12 and 14): it starts or says why not, refuses
what is too much, and lives."""

from __future__ import annotations

import os
import pickle
import resource
import socket
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

import hurray_client as ht
from faults.harness import clean, next_works, settings, snapshot
from faults.processes import Held, resident_bytes
from hurray_wire.v1 import transfer_pb2 as pb
from hurray_wire.v1.transfer_pb2_grpc import TransferServiceStub
from support.daemon import RunningDaemon, command, environment, eventually, running_daemon

pytestmark = pytest.mark.ucx

TRANSPORTS = ("shm", "tcp", "ucx")
LIMITED = 'ulimit {} && exec "$0" "$@"'


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon() as daemon:
        yield daemon


def limited(limits: str) -> list[str]:
    """A command that becomes another one, under these limits of the shell's `ulimit`."""
    return ["bash", "-c", LIMITED.format(limits)]


def client_of(daemon: RunningDaemon, transport: str) -> ht.Client:
    return ht.connect(daemon.address, config=settings(daemon, transport, chunk_bytes=16 << 10))


# --- 9: memory ------------------------------------------------------------------------------------------------------


def test_memory_that_may_not_be_locked_is_no_obstacle() -> None:
    with running_daemon(prefix=limited("-l 64")) as daemon:
        for transport in TRANSPORTS:
            with client_of(daemon, transport) as client:
                next_works(client, transport, snapshot(1, 256))


def test_an_arena_larger_than_free_memory_is_refused_by_name() -> None:
    refused = subprocess.run(
        command("--listen", "127.0.0.1:0", "--arena", "8TiB"),
        capture_output=True, text=True, timeout=60, check=False, env=environment(),
    )  # fmt: skip
    assert refused.returncode == 1
    assert "arena.bytes" in refused.stderr


def test_an_arena_larger_than_shared_memory_has_room_for_works() -> None:
    """It has no name there: /dev/shm is one of 64 MiB in many containers."""
    room = os.statvfs("/dev/shm")
    shared_bytes = room.f_blocks * room.f_frsize
    mount = f'mount -t tmpfs -o size={4 << 20} tmpfs /dev/shm && exec "$0" "$@"'
    allowed = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0
    prefix = ["unshare", "--mount", "bash", "-c", mount] if allowed else []
    if not allowed and shared_bytes > 64 << 20:
        pytest.skip("NO SMALL /dev/shm IS TESTED: this process may not mount one")
    with running_daemon(prefix=prefix, arena_bytes=64 << 20) as daemon, client_of(daemon, "shm") as client:
        for number in range(8):
            client.put(f"full/{number}", snapshot(number, 4096))
        clean(client)


# --- 11: leases -----------------------------------------------------------------------------------------------------


def test_fifty_snapshots_that_nobody_fetches_are_freed_but_the_one_that_was_renewed(daemon: RunningDaemon) -> None:
    value = snapshot(1, 16)
    with client_of(daemon, "shm") as client:
        client.put("lease/17", value, lease_s=60)
        one = eventually(lambda: daemon.node_state().arena.held_bytes, 5)
        client.renew("lease/17", lease_s=120)
        for number in range(50):
            if number != 17:
                client.put(f"lease/{number}", value, lease_s=3)
        eventually(lambda: [info.key for info in client.list("lease/")] == ["lease/17"], 10, "49 leases have ended")
        eventually(lambda: daemon.node_state().arena.held_bytes == one, 5, "and their memory is free")
        with pytest.raises(ht.KeyExpired):
            client.get("lease/3")
        client.get("lease/17").close()
        clean(client)


# --- 12: very many at once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_64_threads_that_meet_a_new_node_open_one_connection(daemon: RunningDaemon, transport: str) -> None:
    value, barrier = snapshot(1, 16), threading.Barrier(64)
    opened = len(daemon.logged("session opened"))

    def meet(number: int) -> None:
        barrier.wait(20)
        client.put(f"meet/{number}", value)

    with client_of(daemon, transport) as client, ThreadPoolExecutor(64) as pool:
        list(pool.map(meet, range(64)))
        assert len(daemon.logged("session opened")) == opened + 1
        assert len(list(client.list("meet/"))) == 64
        clean(client)


def test_a_thousand_clients_at_a_node_with_256_descriptors() -> None:
    """Some are refused or have to wait; the node lives, and serves them once the others have gone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    noise = "File descriptor limit reached"
    with running_daemon(prefix=limited("-n 256"), noise=noise) as daemon, client_of(daemon, "tcp") as early:
        next_works(early, "before", snapshot(1, 16))
        channels = [
            grpc.insecure_channel(
                daemon.address, [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100)]
            )
            for _ in range(1000)
        ]
        calls = [
            TransferServiceStub(channel).GetNode.future(pb.GetNodeRequest(), timeout=4, wait_for_ready=True)
            for channel in channels
        ]
        codes: Counter[Any] = Counter()
        for call in calls:
            with suppress(grpc.RpcError):
                call.result()
            codes[call.code()] += 1
        assert codes[grpc.StatusCode.OK] >= 100, codes
        assert set(codes) <= {
            grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED
        }, codes  # fmt: skip
        assert daemon.process.poll() is None
        mover = daemon.mover_pid
        next_works(early, "meanwhile", snapshot(1, 16))
        for channel in channels:
            channel.close()
        eventually(lambda: Held.by(daemon.pid).descriptors < 64, 20, "the node has its descriptors back")
        with client_of(daemon, "shm") as late:
            next_works(late, "after", snapshot(1, 16))
        assert daemon.mover_pid == mover
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- 14: nonsense at every door -------------------------------------------------------------------------------------


BOMB = str(Path(tempfile.gettempdir(), "hurray-bomb"))


class Bomb:
    """What runs where a pickle is loaded."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.open, (BOMB, os.O_CREAT)


NONSENSE = {
    "random bytes": os.urandom(1 << 16),
    "a pickle": pickle.dumps(Bomb()) * 40,
    "a gigabyte, it says": (1 << 30).to_bytes(4, "little") + (1 << 30).to_bytes(8, "little") * 16,
    "a gigabyte, it says, the other way": (1 << 30).to_bytes(4, "big") + (1 << 30).to_bytes(8, "big") * 16,
    "nothing": b"",
    "HTTP": b"POST / HTTP/1.1\r\nContent-Length: 1073741824\r\n\r\n",
    "a frame of gRPC as long as can be": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + b"\xff\xff\xff\0\0\0\0\0\1"
    + bytes(60000),
    "a message of a gigabyte": b"\0\x40\0\0\0" + bytes(1000),
}


def doors(daemon: RunningDaemon) -> dict[str, Callable[[], socket.socket]]:
    """Every place where the node and its mover listen, as the kernel has it."""
    found: dict[str, Callable[[], socket.socket]] = {}
    inodes = set()
    for pid in (daemon.pid, daemon.mover_pid):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(descriptor).removeprefix("socket:[").rstrip("]"))
    rows = [row for table in ("tcp", "tcp6") for row in Path("/proc/net", table).read_text().splitlines()[1:]]
    for fields in map(str.split, rows):
        if fields[3] == "0A" and fields[9] in inodes:
            port = int(fields[1].partition(":")[2], 16)
            found[f"port {port}"] = lambda port=port: socket.create_connection(("127.0.0.1", port), 5)

    def dial() -> socket.socket:
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        door.settimeout(5)
        door.connect(daemon.shm_path)
        return door

    return found | {"socket": dial}


def test_nonsense_at_every_door(daemon: RunningDaemon) -> None:
    """Also at UCX's, which trusts whoever reaches it, as long as the nonsense is not made for it."""
    mover = daemon.mover_pid
    assert mover is not None
    every = doors(daemon)
    assert len(every) == 5, every  # control plane, metrics, tcp, UCX, shared memory
    with client_of(daemon, "tcp") as client:
        next_works(client, "before", snapshot(1, 16))
        before = resident_bytes(daemon.pid), resident_bytes(mover)
        kept = []
        for name, dial in every.items():
            for data in NONSENSE.values():
                door = dial()
                kept.append(door)  # who says it does not go away by itself
                with suppress(OSError):
                    step = 4096 if door.type == socket.SOCK_SEQPACKET else len(data) or 1
                    for start in range(0, len(data), step):
                        door.sendall(data[start : start + step])
            assert daemon.mover_pid == mover, name
            next_works(client, "meanwhile", snapshot(1, 16))
        after = resident_bytes(daemon.pid), resident_bytes(mover)
        assert max(after[0] - before[0], after[1] - before[1]) < 64 << 20, (before, after)
        for door in kept:
            door.close()
        next_works(client, "after", snapshot(1, 16))
    assert daemon.mover_pid == mover
    assert not Path(BOMB).exists()
    events = [str(entry.get("event")) for entry in daemon.log()]
    for kind in ("tcp", "shm"):  # gRPC and UCX tell of none
        assert any(event.startswith(f"dialer refused (kind={kind}, why=") for event in events), kind
