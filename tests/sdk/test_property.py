"""Random snapshots through a real daemon over every transport: live slots equal bit for bit, all else clear, nothing
else sent."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st

import hurray_client as ht
from hurray_client.config import ShmSection
from hurray_wire.packing import E8M0_NEUTRAL
from hurray_wire.parameters import parameter_arrays
from hurray_wire.quantization import PerBlockAffine
from hurray_wire.transport.ucx_config import UcxConfig
from sdk.capture import Capture
from sdk.snapshots import assert_dead_slots_clear, assert_same_tokens, distinct_in_order, live_map, slot_bits, tables_of
from sdk.strategies import Case, cases
from support.daemon import RunningDaemon, running_daemon

DAEMON_PORTS, CLIENT_PORTS = range(20700, 20750), range(20750, 20800)

KINDS = ("ucx", "tcp", "shm")

POISON = os.urandom(8)
"""Not to be found by chance in 2**60 random bytes."""

EXAMPLES = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    ucx = f"[ucx]\nfirst_port = {DAEMON_PORTS[0]}\nlast_port = {DAEMON_PORTS[-2]}"
    tcp = f'[tcp]\nlisten = "127.0.0.1:{DAEMON_PORTS[-1]}"'
    with running_daemon(f"{ucx}\n{tcp}") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def capture() -> Iterator[Capture | None]:
    """Runs around everything the client of this module does."""
    try:
        recording = Capture(range(DAEMON_PORTS[0], CLIENT_PORTS[-1] + 1))
    except PermissionError:
        yield None
        return
    recording.start()
    yield recording


@pytest.fixture(scope="module")
def peer(node: RunningDaemon, capture: Capture | None) -> Iterator[ht.Client]:
    """Its worker listens in a range of its own. Small chunks: most snapshots take several."""
    config = ht.ClientConfig(
        shm=ShmSection(path=node.shm_path),
        ucx=UcxConfig(first_port=CLIENT_PORTS[0], last_port=CLIENT_PORTS[-1]),
        chunk_bytes=4096,
        window=2,
    )
    with ht.connect(node.address, config=config, transports=KINDS) as client:
        yield client


@pytest.fixture(scope="module")
def markers() -> list[bytes]:
    """Bytes of live slots that were handed over."""
    return []


def check_received(case: Case, receipt: ht.Receipt, got: ht.KVSnapshot) -> None:
    """What must be true of a whole snapshot that arrived."""
    tables = case.needed_tables
    numbers = distinct_in_order(tables)
    assert tables_of(got) == [[numbers[page] for page in table] for table in tables]
    assert receipt.distinct_page_count == len(numbers) == got.structure.num_pages
    assert receipt.logical_page_count == sum(map(len, tables))
    assert receipt.dirty_dead_slot_count == 0
    assert got.structure.block_table.dtype == case.snapshot.structure.block_table.dtype
    assert got.token_counts.tolist() == case.token_counts
    live = live_map(got)
    pages = list(numbers)
    assert receipt.dead_slot_count == int((~live).sum()) * len(got.tensors)
    assert_dead_slots_clear(got)
    for number, (sent, received) in enumerate(zip(case.snapshot.tensors, got.tensors, strict=True)):
        assert received.name == sent.name
        assert received.descriptor.element_type is sent.descriptor.element_type
        assert received.descriptor.quantization == sent.descriptor.quantization
        ours = slot_bits(case.snapshot, number)[pages] if pages else slot_bits(case.snapshot, number)[:0]
        assert np.array_equal(slot_bits(got, number)[live], ours[live])
        assert_parameters(sent, received, pages, live)
        for buffer in (received.page_pool, *received.parameters):
            assert buffer.nbytes == 0 or buffer.ctypes.data % 4096 == 0
        assert all(handle.alignment >= 4096 for handle in received.descriptor.buffers)


def assert_parameters(sent: Any, received: Any, pages: list[int], live: npt.NDArray[np.bool_]) -> None:
    """Scales and zero points: those of slots follow their pages, dead ones are neutral, all others are equal."""
    pairs = zip(
        parameter_arrays(sent.descriptor, sent.buffers),
        parameter_arrays(received.descriptor, received.buffers),
        strict=True,
    )
    for (parameter, ours), (_, theirs) in pairs:
        if not isinstance(sent.descriptor.quantization, PerBlockAffine):
            assert np.array_equal(ours, theirs)
            continue
        size = sent.descriptor.page_size
        ours, theirs = ours.reshape(-1, size)[pages] if pages else ours[:0].reshape(0, size), theirs.reshape(-1, size)
        assert np.array_equal(theirs[live], ours[live])
        assert (theirs[~live] == (1 if parameter.kind == "scale" else 0)).all()


def mark(case: Case, markers: list[bytes]) -> None:
    """Note the bytes of one live slot, where they are enough not to be found by chance."""
    live = np.argwhere(live_map(case.snapshot))
    for number in range(len(case.snapshot.tensors)):
        bits = slot_bits(case.snapshot, number)
        if live.size and bits.shape[2] >= 128 and bits.shape[2] % 8 == 0:
            page, slot = live[0]
            markers.append(np.packbits(bits[page, slot], bitorder="little")[:64].tobytes())
            return


@EXAMPLES
@given(case=cases(poison=POISON), kind=st.sampled_from(KINDS))
def test_whole_snapshots(case: Case, kind: str, peer: ht.Client, markers: list[bytes]) -> None:
    describe(case)
    receipt = peer.put("property", case.snapshot, overwrite=True, require_transport=kind)
    if kind != "shm":
        mark(case, markers)
    got = peer.get("property", consume=True, require_transport=kind)
    assert_same_tokens_where_possible(case.snapshot, got)
    check_received(case, receipt, got)
    assert got.receipt.dirty_dead_slot_count == 0


@EXAMPLES
@given(case=cases(poison=POISON, whole_pages=True), kind=st.sampled_from(KINDS), data=st.data())
def test_into_other_tables_with_other_aliasing(
    case: Case, kind: str, data: st.DataObject, peer: ht.Client, markers: list[bytes]
) -> None:
    describe(case)
    tables = data.draw(other_tables(case.needed_tables))
    spare = data.draw(st.integers(0, 3))
    num_pages = 1 + spare + max((page for table in tables for page in table), default=0)
    seed = data.draw(st.integers(0, 99))
    own = {(tensor.layer_index, tensor.role): own_pool(tensor, num_pages, seed) for tensor in case.snapshot.tensors}
    before = {key: pool.copy() for key, (pool, _) in own.items()}
    destination = ht.Destination.from_paged(
        {key: pool for key, (pool, _) in own.items()},
        block_tables=csr(tables, case.snapshot.structure.block_table.dtype),
        element_type={(t.layer_index, t.role): t.descriptor.element_type for t in case.snapshot.tensors},
        page_shape={
            (t.layer_index, t.role): (t.descriptor.page_size, t.descriptor.num_heads, t.descriptor.head_dim)
            for t in case.snapshot.tensors
            if t.descriptor.element_type.is_packed
        },
        quantization={key: quantized for key, (_, quantized) in own.items() if quantized is not None},
    )
    peer.put("property/into", case.snapshot, overwrite=True, require_transport=kind)
    if kind != "shm":
        mark(case, markers)
    got = peer.get("property/into", consume=True, into=destination, require_transport=kind)
    assert tables_of(got) == tables
    assert_same_tokens_where_possible(case.snapshot, got)
    named = sorted({page for table in tables for page in table})
    others = [page for page in range(num_pages) if page not in named]
    live = live_map(got)
    for number, tensor in enumerate(got.tensors):
        pool = own[tensor.layer_index, tensor.role][0]
        old = before[tensor.layer_index, tensor.role]
        assert pool[others].tobytes() == old[others].tobytes()
        bits = slot_bits(got, number)
        clear = np.zeros(bits.shape[2], np.uint8)
        if tensor.descriptor.element_type.name == "float8_e8m0":
            clear = np.unpackbits(np.full(bits.shape[2] // 8, E8M0_NEUTRAL, np.uint8), bitorder="little")
        assert (bits[named][~live[named]] == clear).all() if named else True
        source_bits = slot_bits(case.snapshot, number)
        for theirs, ours, count in zip(case.needed_tables, tables, case.token_counts, strict=True):
            for token in range(count):
                page, slot = divmod(token, case.page_size)
                assert np.array_equal(bits[ours[page], slot], source_bits[theirs[page], slot])


def test_the_wire_carried_tokens_and_nothing_else(
    node: RunningDaemon, peer: ht.Client, capture: Capture | None, markers: list[bytes]
) -> None:
    """This transfer, and all above: the capture has every live marker, and nowhere the poison; nor has the target."""
    pool = np.frombuffer(POISON * 4096, np.uint8).reshape(16, 4, 4, 128).copy()
    pool[[9, 2], :] = np.frombuffer(marker := os.urandom(512), np.uint8).reshape(4, 128)
    pool[2, 3] = np.frombuffer(POISON * 64, np.uint8).reshape(4, 128)
    caches = {(0, "key"): pool, (0, "value"): pool.copy()}
    peer.put("wire", ht.KVSnapshot.from_paged(caches, block_tables=[[9, 2]], token_counts=[7], element_type="uint8"))
    own = {key: np.zeros((3, 4, 4, 128), np.uint8) for key in caches}
    got = [
        peer.get("wire"),
        peer.get("wire", into=ht.Destination.from_paged(own, block_tables=[[0, 2]], element_type="uint8")),
    ]
    for snapshot in got:
        assert all(POISON not in tensor.page_pool.tobytes() for tensor in snapshot.tensors)
        assert all(marker in tensor.page_pool.tobytes() for tensor in snapshot.tensors)
    markers.append(marker)
    if capture is not None:
        peer.close()
        assert capture.stop() == 0, "the capture missed packets and proves nothing"
        streams = capture.streams()
        assert not any(POISON in stream for stream in streams)
        assert all(any(marker in stream for stream in streams) for marker in markers)
    assert node.mover_pid is not None
    assert find_in_memory(node.mover_pid, marker)
    assert not find_in_memory(node.mover_pid, POISON)
    if capture is None:
        pytest.skip("raw sockets are not permitted here: NOTHING WAS CAPTURED, what crosses the wire is not proven")


def assert_same_tokens_where_possible(ours: ht.KVSnapshot, theirs: ht.KVSnapshot) -> None:
    """By the SDK's own reading, too."""
    try:
        assert_same_tokens(ours, theirs)
    except ht.Unsupported:
        event("tokens not readable")


@st.composite
def other_tables(draw: st.DrawFn, tables: list[list[int]]) -> list[list[int]]:
    """Tables of the same lengths over other pages: what the source shares may be shared here, or not."""
    free = iter(draw(st.permutations(range(1 + 2 * sum(map(len, tables))))))
    given_to: dict[int, list[int]] = {}
    others = []
    for table in tables:
        other = []
        for page in table:
            known = given_to.setdefault(page, [])
            if not known or draw(st.booleans()):
                known.append(next(free))
            other.append(draw(st.sampled_from(known)))
        others.append(other)
    return others


def csr(tables: list[list[int]], dtype: Any) -> tuple[Any, Any]:
    ends = np.cumsum([0, *map(len, tables)]).astype(np.uint64)
    return ends, np.array([page for table in tables for page in table], dtype)


def own_pool(tensor: Any, num_pages: int, seed: int) -> tuple[npt.NDArray[Any], ht.Quantized | None]:
    """A caller's pool for a tensor, full of something else."""
    descriptor = tensor.descriptor
    rng = np.random.default_rng(seed)
    page_bytes = descriptor.page_bytes
    raw = rng.integers(1, 255, (num_pages, page_bytes), dtype=np.uint8)
    element_type = descriptor.element_type
    if element_type.is_packed:
        pool: npt.NDArray[Any] = raw
    else:
        shape = (num_pages, descriptor.page_size, descriptor.num_heads, descriptor.head_dim)
        assert element_type.numpy is not None
        pool = raw.reshape(-1).view(element_type.numpy).reshape(shape)
    scheme = descriptor.quantization
    if scheme is None:
        return pool, None
    arrays = tuple(array.copy() for _, array in parameter_arrays(descriptor, tensor.buffers))
    if isinstance(scheme, PerBlockAffine):
        arrays = tuple(np.ones(num_pages * descriptor.page_size, array.dtype) for array in arrays)
    return pool, ht.Quantized(scheme, arrays)


def find_in_memory(pid: int, pattern: bytes) -> bool:
    """Whether a process has these bytes anywhere that it may write to."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            span, access, *_ = line.split()
            if "w" not in access:
                continue
            start, end = (int(part, 16) for part in span.split("-"))
            try:
                memory.seek(start)
                if pattern in memory.read(end - start):
                    return True
            except (OSError, ValueError, OverflowError):
                continue
    return False


def describe(case: Case) -> None:
    types = Counter(tensor.descriptor.element_type.name for tensor in case.snapshot.tensors)
    note(f"{dict(types)}, tables {case.tables}, counts {case.token_counts}, page_size {case.page_size}")
