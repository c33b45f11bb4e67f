"""Errors over the wire and back: every class comes back as itself, and what a peer says is bounded and never raises."""

from __future__ import annotations

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from hurray_wire.errors import ERROR_DOMAIN, HurrayError, InvalidRequest, PeerUnavailable, RemoteError
from hurray_wire.status import STATUS_TRAILER, from_status, from_trailers, to_status

TRAILERS_MAX_BYTES = 8192
"""What gRPC lets a call's trailing metadata have, by default."""


def classes(base: type[HurrayError] = HurrayError) -> list[type[HurrayError]]:
    return [kind for child in base.__subclasses__() for kind in (child, *classes(child))]


def packed(message: object) -> AnyMessage:
    result = AnyMessage()
    result.Pack(message)  # type: ignore[arg-type]
    return result


@pytest.mark.parametrize("kind", [kind for kind in classes() if kind is not RemoteError])
def test_every_error_comes_back_as_itself(kind: type[HurrayError]) -> None:
    error = kind("why", retry_after_s=1.5, field="page_size", offered=32, required=64, stage="offer", tensor="café")
    trailers = [(STATUS_TRAILER, to_status(error).SerializeToString())]
    for back in (from_status(to_status(error)), from_trailers(error.code, "", trailers)):
        assert type(back) is kind
        assert (back.message, back.details, back.retry_after_s) == (error.message, error.details, 1.5)


@given(
    st.text(max_size=3000),
    st.dictionaries(st.text(max_size=200), st.text(max_size=2000), max_size=60),
    st.one_of(st.none(), st.floats(allow_nan=False)),
)
def test_whatever_an_error_holds_fits_the_trailing_metadata(
    message: str, details: dict[str, str], retry_after_s: float | None
) -> None:
    error = InvalidRequest(message, retry_after_s=retry_after_s, field="key")
    error.details.update(details)
    status = to_status(error)
    as_percents = 3 * len(status.message.encode())
    as_base64 = 4 * len(status.SerializeToString()) // 3
    assert as_percents + as_base64 < TRAILERS_MAX_BYTES
    assert isinstance(from_status(status), InvalidRequest)


def test_a_long_detail_is_cut_and_the_short_ones_stay() -> None:
    names = {f"tensor_{number}": "x" * 5000 for number in range(20)}
    error = from_status(to_status(InvalidRequest("m" * 5000, field="tensors", rule="B4", **names)))
    assert (error.field, error.rule) == ("tensors", "B4")
    assert error.message.endswith("...")
    assert all(value.endswith("...") for name, value in error.details.items() if name.startswith("tensor_"))


details = st.one_of(
    st.builds(
        AnyMessage,
        type_url=st.sampled_from(
            [f"type.googleapis.com/google.rpc.{name}" for name in ("ErrorInfo", "RetryInfo", "BadRequest")] + ["", "/"]
        ),
        value=st.binary(max_size=40),
    ),
    st.builds(
        lambda reason, domain, metadata: packed(
            error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata=metadata)
        ),
        st.sampled_from(["INVALID_REQUEST", "PEER_UNAVAILABLE", "REMOTE", "NEW", "x" * 10_000]),
        st.sampled_from([ERROR_DOMAIN, "elsewhere"]),
        st.dictionaries(
            st.sampled_from(["field", "stage", "code", "retry_after_s", "n" * 999]), st.text(max_size=9999), max_size=4
        ),
    ),
    st.builds(
        lambda seconds, nanos: packed(
            error_details_pb2.RetryInfo(retry_delay={"seconds": seconds, "nanos": nanos})  # type: ignore[arg-type]
        ),
        st.sampled_from([0, -1, 5, 2**63 - 1, -(2**63)]),
        st.sampled_from([0, -1, 2**31 - 1, -(2**31)]),
    ),
)


@given(st.integers(-(2**31), 2**31 - 1), st.text(max_size=5000), st.lists(details, max_size=5))
def test_no_status_of_a_peer_raises_and_none_grows(code: int, message: str, items: list[AnyMessage]) -> None:
    error = from_status(status_pb2.Status(code=code, message=message, details=items))
    assert len(str(error).encode()) < TRAILERS_MAX_BYTES
    again = from_status(to_status(error))
    assert type(again) is type(error)
    assert error.retry_after_s is None or 0 <= error.retry_after_s <= 86400


def test_a_status_that_cannot_be_read_is_what_its_code_says() -> None:
    malformed = AnyMessage(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xff")
    assert isinstance(from_status(status_pb2.Status(code=14, details=[malformed])), PeerUnavailable)
    assert isinstance(from_trailers("UNAVAILABLE", "", [(STATUS_TRAILER, b"\xff\xff")]), PeerUnavailable)
