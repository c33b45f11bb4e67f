"""HurrayError <-> google.rpc.Status, as it travels in gRPC's `grpc-status-details-bin` trailer.

An ErrorInfo of our domain names the reason and carries the details, a BadRequest repeats the field for tools that know
no more, a RetryInfo says when waiting helps. The class is rebuilt from (domain, reason), never from text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from hurray_wire.errors import (
    ERROR_DOMAIN,
    Cancelled,
    DeadlineExceeded,
    HurrayError,
    LimitExceeded,
    PeerUnavailable,
    PermissionDenied,
    RemoteError,
    Unauthenticated,
    Unsupported,
    error_class,
)

STATUS_TRAILER: Final = "grpc-status-details-bin"

_BARE: Final[dict[str, type[HurrayError]]] = {
    "UNAVAILABLE": PeerUnavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "RESOURCE_EXHAUSTED": LimitExceeded,
    "UNIMPLEMENTED": Unsupported,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": PermissionDenied,
}
"""What a code means when it comes from gRPC itself, without details of ours."""


def to_status(error: HurrayError) -> status_pb2.Status:
    """The status that carries the error."""
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=error.message)
    _pack(status, error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=error.details))
    if error.code == "INVALID_ARGUMENT" and error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        _pack(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        info = error_details_pb2.RetryInfo()
        info.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        _pack(status, info)
    return status


def from_status(status: status_pb2.Status) -> HurrayError:
    """The error that a status carries. A reason this version does not know becomes RemoteError, with the reason in
    its details; a status without details of ours is what its code says."""
    info, retry_after_s = None, None
    for detail in status.details:
        found = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        if detail.Is(found.DESCRIPTOR) and detail.Unpack(found) and found.domain == ERROR_DOMAIN:
            info = found
        elif detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    code = code_pb2.Code.Name(status.code) if status.code in code_pb2.Code.values() else "UNKNOWN"
    if info is None:
        return from_code(code, status.message)
    known = error_class(info.reason)
    details = {name: value for name, value in info.metadata.items() if name != "retry_after_s"}
    if known is None or known is RemoteError:
        return _build(RemoteError, status.message, retry_after_s, {**details, "code": code, "reason": info.reason})
    return _build(known, status.message, retry_after_s, details)


def from_code(code: str, message: str, **details: object) -> HurrayError:
    """The error for a bare gRPC code, by its canonical name."""
    known = _BARE.get(code)
    named = {name: str(value) for name, value in details.items() if value is not None}
    if known is None:
        return _build(RemoteError, message or "the peer failed", None, {**named, "code": code})
    return _build(known, message or code, None, named)


def from_trailers(
    code: str, message: str, trailers: Iterable[tuple[str, str | bytes]] | None, **details: object
) -> HurrayError:
    """The error of a finished call: from its details where there are any of ours, else from its code.

    `details` are added to those of a bare code: the peer and the stage, which gRPC does not know.
    """
    for name, value in trailers or ():
        if name == STATUS_TRAILER:
            try:
                status = status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode())
            except DecodeError:
                break
            if status.details:
                return from_status(status)
    return from_code(code, message, **details)


def _pack(status: status_pb2.Status, message: error_details_pb2.ErrorInfo | object) -> None:
    packed = AnyMessage()
    packed.Pack(message)  # type: ignore[arg-type]
    status.details.append(packed)


def _build(kind: type[HurrayError], message: str, retry_after_s: float | None, details: dict[str, str]) -> HurrayError:
    error = kind(message, retry_after_s=retry_after_s)
    error.details.update(details)
    return error
