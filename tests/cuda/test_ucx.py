"""Receives into memory of a GPU over a real UCX, which takes this memory for the host's: what it is given is CuPy's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from hurray_wire import cuda
from hurray_wire.errors import ProtocolViolation
from hurray_wire.testing.transport_suite import Pair, all_fired, drive, pattern, post_receive, post_send, settle
from hurray_wire.transport.ucx import UcxTransport
from hurray_wire.transport.ucx_config import UcxConfig, with_cuda
from support.daemon import UCX_PORTS
from support.fake_cuda import fake_cuda, intact, let_ucx_take_it, placed

pytest.importorskip("ucxx")
pytestmark = pytest.mark.ucx

CONFIG = with_cuda(UcxConfig(first_port=UCX_PORTS[0], last_port=UCX_PORTS[1]))


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with fake_cuda():
        let_ucx_take_it(monkeypatch.setattr)
        cuda.gpu().enter()  # as the thread of a data plane does
        made = Pair(UcxTransport(CONFIG), UcxTransport(CONFIG))
        yield made
        made.a.close()
        made.b.close()


@pytest.mark.parametrize("receive_first", [True, False])
@pytest.mark.parametrize(("sent_bytes", "posted_bytes"), [(84, 100), (99_000, 100_000), (100, 100_000)])
def test_a_shorter_message_is_no_success(pair: Pair, sent_bytes: int, posted_bytes: int, receive_first: bool) -> None:
    assert pair.a.takes_device_memory
    before = pattern(posted_bytes, 1)
    buffer: Any = placed(before)
    outcomes = [post_receive(pair.to_a, 7, buffer)] if receive_first else []
    outcomes.append(post_send(pair.to_b, 7, placed(pattern(sent_bytes))))
    if not receive_first:
        settle(pair.a, pair.b, quiet_rounds=3)
        outcomes.insert(0, post_receive(pair.to_a, 7, buffer))
    drive([pair.a, pair.b], partial(all_fired, outcomes))

    assert isinstance(outcomes[0].error, ProtocolViolation)
    after = buffer.get()
    assert np.array_equal(after[sent_bytes:], before[sent_bytes:])
    assert np.array_equal(after[:sent_bytes], pattern(sent_bytes))
    assert intact(buffer)


def test_a_whole_one_is(pair: Pair) -> None:
    buffer: Any = placed(np.zeros(100_000, np.uint8))
    outcomes = [post_receive(pair.to_a, 7, buffer), post_send(pair.to_b, 7, placed(pattern(100_000)))]

    drive([pair.a, pair.b], partial(all_fired, outcomes))

    assert [outcome.error for outcome in outcomes] == [None, None]
    assert np.array_equal(buffer.get(), pattern(100_000))
