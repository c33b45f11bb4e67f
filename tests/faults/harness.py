"""What every test of faults does around its fault: a handoff, and what must be true after it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import hurray_client as ht
from sdk.snapshots import assert_same_tokens, make_caches, make_snapshot
from support.daemon import RunningDaemon, eventually

BUDGET_S = 8.0
GRACE_S = 6.0
"""What a call may take beyond its budget: to drain (2 s) and to settle (2 s), on a busy machine."""


def settings(daemon: RunningDaemon, transport: str, *, chunk_bytes: int, **others: Any) -> ht.ClientConfig:
    """A client that notices a silent node soon."""
    return ht.ClientConfig(
        **{
            "transports": (transport,),
            "shm": {"path": daemon.shm_path},
            "chunk_bytes": chunk_bytes,
            "window": 2,
            "keepalive_interval_s": 1.0,
            "keepalive_timeout_s": 1.5,
            "retry_s": BUDGET_S,
            "connect_timeout_s": 4.0,
        }
        | others
    )


def snapshot(seed: int, pages: int) -> ht.KVSnapshot:
    """Four tensors of `pages` pages of 256 bytes; the last page is partly dead."""
    caches = make_caches(num_pages=pages, page_size=8, seed=seed)
    return make_snapshot(caches, [list(range(pages))], [8 * pages - 3])


@dataclass(frozen=True)
class Outcome:
    """Of one call."""

    value: Any
    error: ht.HurrayError | None
    seconds: float


def attempt(work: Callable[[], Any]) -> Outcome:
    """What came of a call that has BUDGET_S."""
    began_s = time.monotonic()
    try:
        value, error = work(), None
    except ht.HurrayError as raised:
        value, error = None, raised
    return Outcome(value, error, time.monotonic() - began_s)


def check_error(outcome: Outcome, codes: tuple[str, ...] = ("UNAVAILABLE", "DEADLINE_EXCEEDED")) -> None:
    """It came in time; an error has one of these codes and names its stage."""
    assert outcome.seconds < BUDGET_S + GRACE_S, f"{outcome.seconds:.1f} s: {outcome.error}"
    if outcome.error is not None:
        assert outcome.error.code in codes, outcome.error
        assert outcome.error.stage, outcome.error


def check_put(
    daemon: RunningDaemon, direct: ht.Client, key: str, value: ht.KVSnapshot, outcome: Outcome, **codes: Any
) -> None:
    """Committed once and whole, or no trace; and the source was not told otherwise."""
    check_error(outcome, **codes)
    held = [info.generation for info in direct.list(key) if info.key == key]
    if outcome.error is None:
        assert held == [outcome.value.generation]
    elif held:
        assert isinstance(outcome.error, ht.OutcomeUnknown), f"committed, and the source is told {outcome.error}"
    assert len(daemon.logged("snapshot committed", key=key)) == len(held)
    if held:
        with direct.get(key) as got:
            assert_same_tokens(value, got)


def check_get(direct: ht.Client, key: str, value: ht.KVSnapshot, outcome: Outcome, **codes: Any) -> None:
    """All of it, or an error; and nobody reads it any more."""
    check_error(outcome, **codes)
    if outcome.error is None:
        assert_same_tokens(value, outcome.value)
    eventually(lambda: direct.stat(key).info.reader_count == 0, 10, "nobody reads it any more")


def next_works(client: ht.Client, key: str, value: ht.KVSnapshot) -> None:
    """The same client hands over another one."""
    client.put(key, value, timeout_s=30)
    with client.get(key, timeout_s=30, consume=True) as got:
        assert_same_tokens(value, got)


def balanced(direct: ht.Client) -> bool:
    """Whether the whole arena is free."""
    arena = direct.node().arena
    return arena.free_bytes == arena.total_bytes


def clean(direct: ht.Client) -> None:
    """Delete all there is: then nothing may be left."""
    for info in direct.list():
        with suppress(ht.KeyExpired):
            direct.delete(info.key)
    eventually(lambda: balanced(direct), 15, "the arena is whole")
