"""Memory that is used again."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
import pytest

from hurray_wire.memory import huge_empty, is_page_aligned
from hurray_wire.pool import MemoryPool

MIB = 1 << 20


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("nbytes", [0, 1, 4097, 2 * MIB, 2 * MIB + 5, 5 * MIB])
def test_memory_is_aligned_writable_and_of_the_size_asked_for(nbytes: int) -> None:
    for memory in (MemoryPool().take(nbytes), huge_empty(nbytes)):
        assert (memory.shape, memory.dtype) == ((nbytes,), np.uint8)
        assert is_page_aligned(memory)
        memory[:] = 7
        assert (memory == 7).all()


def test_a_block_comes_back_with_its_last_view_and_not_before() -> None:
    pool = MemoryPool()
    memory = pool.take(4 * MIB)
    place = address(memory)
    memory[:] = 1
    view = memoryview(memory[MIB:].view(np.float32).reshape(-1, 4))[5:]  # type: ignore[arg-type]
    del memory

    other = pool.take(4 * MIB)
    assert address(other) != place
    other[:] = 2
    assert view.tobytes() == b"\1" * view.nbytes

    del view
    assert pool.idle_bytes == 4 * MIB
    assert address(pool.take(4 * MIB)) == place


def test_a_block_is_lent_for_what_is_smaller_but_not_by_far() -> None:
    pool = MemoryPool()
    place = address(pool.take(8 * MIB))
    assert pool.idle_bytes == 8 * MIB

    assert address(pool.take(5 * MIB)) == place
    assert address(pool.take(3 * MIB)) != place
    assert pool.take(16 * MIB).nbytes == 16 * MIB


def test_the_smallest_that_fits_is_lent() -> None:
    pool = MemoryPool()
    large, small = pool.take(8 * MIB), pool.take(6 * MIB)
    place = address(small)
    del small, large

    assert address(pool.take(5 * MIB)) == place


def test_no_more_is_kept_than_allowed_and_the_newest_stays() -> None:
    pool = MemoryPool(keep_bytes=10 * MIB)
    blocks = [pool.take(4 * MIB) for _ in range(3)]
    last = address(blocks[-1])
    while blocks:
        del blocks[0]

    assert pool.idle_bytes == 8 * MIB
    assert address(pool.take(4 * MIB)) == last
    pool.take(64 * MIB)
    assert pool.idle_bytes <= 10 * MIB


def test_a_closed_pool_keeps_nothing_and_takes_nothing_away() -> None:
    pool = MemoryPool()
    kept = pool.take(4 * MIB)
    kept[:] = 3
    pool.take(2 * MIB)
    pool.close()

    assert pool.idle_bytes == 0
    assert (kept == 3).all()
    del kept
    assert pool.idle_bytes == 0
    assert pool.take(2 * MIB).nbytes == 2 * MIB


def test_arrays_outlive_their_pool() -> None:
    pool = MemoryPool()
    memory = pool.take(2 * MIB)
    gone = weakref.ref(pool)
    memory[:] = 9
    del pool
    assert (memory == 9).all()
    del memory
    assert gone() is None


def test_a_block_may_come_back_while_the_pool_is_at_work() -> None:
    """As the garbage collector does it: in the thread that holds the lock, too."""
    pool = MemoryPool()
    memory = pool.take(2 * MIB)
    with pool._lock:
        del memory
        assert pool.idle_bytes == 0
    pool.take(MIB)

    assert pool.take(2 * MIB).nbytes == 2 * MIB
    assert pool.idle_bytes == 2 * MIB


def test_threads_never_have_one_block_at_a_time() -> None:
    pool = MemoryPool(keep_bytes=16 * MIB)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            memory = pool.take(2 * MIB)
            memory[:: 1 << 16] = number
            if (memory[:: 1 << 16] != number).any():
                wrong.append(number)
            del memory  # else it would be held beside the next one

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong
    assert 2 * MIB <= pool.idle_bytes <= 8 * MIB
