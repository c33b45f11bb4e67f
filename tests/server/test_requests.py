"""One outcome per request id, however often it is tried."""

from __future__ import annotations

import pytest

from hurray_server.requests import MIN_KEPT_S, Requests, Running
from hurray_wire.errors import RequestIdReused
from hurray_wire.v1 import transfer_pb2 as pb

RECEIPT = pb.Receipt(generation=3)


def done(requests: Requests, request_id: str, *, tenant: str = "t", lease_s: float = 1.0, now_s: float = 0.0) -> None:
    requests.succeed(requests.begin(tenant, request_id, b"d"), RECEIPT, lease_s=lease_s, now_s=now_s)


def test_a_retry_of_a_success_gets_the_first_receipt() -> None:
    requests = Requests()
    assert requests.look_up("t", "a", b"d", 0.0) is None
    done(requests, "a")
    assert requests.look_up("t", "a", b"d", 1.0) == RECEIPT


def test_a_retry_of_a_failure_runs_anew() -> None:
    requests = Requests()
    running = requests.begin("t", "a", b"d")
    requests.fail(running)
    requests.fail(running)
    assert requests.look_up("t", "a", b"d", 1.0) is None
    assert len(requests) == 0


def test_a_retry_of_one_that_runs_is_woken_once_by_its_end() -> None:
    requests = Requests()
    running = requests.begin("t", "a", b"d")
    woken: list[int] = []
    found = requests.look_up("t", "a", b"d", 0.0)
    assert isinstance(found, Running)
    found.watch(lambda: woken.append(1))
    requests.succeed(running, RECEIPT, lease_s=1, now_s=0.0)
    requests.fail(running)
    assert woken == [1]


def test_a_retry_that_waits_no_longer_is_forgotten() -> None:
    requests = Requests()
    running = requests.begin("t", "a", b"d")
    woken: list[str] = []
    unwatch = running.watch(lambda: woken.append("gone"))
    running.watch(lambda: woken.append("there"))
    unwatch()
    assert len(running.waiters) == 1
    requests.fail(running)
    assert woken == ["there"]


@pytest.mark.parametrize("finished", [False, True])
def test_another_body_under_the_same_id_is_refused(finished: bool) -> None:
    requests = Requests()
    running = requests.begin("t", "a", b"d")
    if finished:
        requests.succeed(running, RECEIPT, lease_s=1, now_s=0.0)
    with pytest.raises(RequestIdReused):
        requests.look_up("t", "a", b"other", 0.0)


def test_tenants_do_not_share_ids() -> None:
    requests = Requests()
    done(requests, "a")
    assert requests.look_up("someone else", "a", b"other", 0.0) is None


def test_a_receipt_is_kept_ten_minutes_or_as_long_as_the_lease() -> None:
    requests = Requests()
    done(requests, "short", lease_s=1)
    done(requests, "long", lease_s=2 * MIN_KEPT_S)
    assert requests.look_up("t", "short", b"d", MIN_KEPT_S - 1) == RECEIPT
    assert requests.look_up("t", "short", b"d", MIN_KEPT_S) is None
    assert requests.look_up("t", "long", b"d", 2 * MIN_KEPT_S - 1) == RECEIPT


def test_receipts_are_bounded_in_number_and_leave_when_their_time_is_over() -> None:
    requests = Requests(max_kept=2)
    for request_id in ("a", "b", "c"):
        done(requests, request_id)
    assert requests.look_up("t", "a", b"d", 0.0) is None
    assert requests.look_up("t", "b", b"d", 0.0) == RECEIPT
    done(requests, "d", now_s=MIN_KEPT_S)
    assert len(requests) == 1


def test_no_tenant_has_the_receipts_of_another_forgotten() -> None:
    requests = Requests(max_kept=3)
    done(requests, "mine", tenant="quiet")
    for number in range(9):
        done(requests, f"{number}", tenant="busy")
    assert requests.look_up("quiet", "mine", b"d", 0.0) == RECEIPT
    assert requests.look_up("busy", "6", b"d", 0.0) is None
    assert requests.look_up("busy", "7", b"d", 0.0) == RECEIPT


def test_after_a_loss_retries_run_anew() -> None:
    requests = Requests()
    done(requests, "a")
    requests.forget_receipts()
    assert requests.look_up("t", "a", b"d", 0.0) is None
