"""HurrayError <-> google.rpc.Status, as it travels in gRPC's `grpc-status-details-bin` trailer.

An ErrorInfo of our domain names the reason and carries the details, a BadRequest repeats the field for tools that know
no more, a RetryInfo says when waiting helps. The class is rebuilt from (domain, reason), never from text.

A status may come from a peer, and an error may quote one: text is cut, in both directions, to what fits gRPC's 8 KiB of
trailing metadata, and nothing that a status holds makes these functions raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

MESSAGE_MAX_BYTES: Final = 512
DETAIL_MAX_BYTES: Final = 384
DETAIL_NAME_MAX_BYTES: Final = 64
DETAILS_MAX_BYTES: Final = 2560
"""Names and values of all details together; the longest are left out first."""

RETRY_AFTER_MAX_S: Final = 86400.0

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
    message, details = cut_text(error.message, MESSAGE_MAX_BYTES), _cut_details(error.details)
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=message)
    _pack(status, error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=details))
    if error.code == "INVALID_ARGUMENT" and "field" in details:
        violation = error_details_pb2.BadRequest.FieldViolation(field=details["field"], description=message)
        _pack(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        info = error_details_pb2.RetryInfo()
        info.retry_delay.FromNanoseconds(int(_retry_after_s(error.retry_after_s) * 1e9))
        _pack(status, info)
    return status


def from_status(status: status_pb2.Status) -> HurrayError:
    """The error that a status carries. A reason this version does not know becomes RemoteError, with the reason in
    its details; a status without details of ours is what its code says."""
    info, retry_after_s = None, None
    for detail in status.details:
        found = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        try:
            if detail.Unpack(found) and found.domain == ERROR_DOMAIN:
                info = found
            elif detail.Unpack(retry):
                retry_after_s = _retry_after_s(retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9)
        except DecodeError:
            continue
    code = code_pb2.Code.Name(status.code) if status.code in code_pb2.Code.values() else "UNKNOWN"
    if info is None:
        return from_code(code, status.message)
    known = error_class(info.reason)
    details = {name: value for name, value in info.metadata.items() if name != "retry_after_s"}
    if known is None or known is RemoteError:
        reason = cut_text(info.reason, DETAIL_NAME_MAX_BYTES)
        return _build(RemoteError, status.message, retry_after_s, {**details, "code": code, "reason": reason})
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
    error = kind(cut_text(message, MESSAGE_MAX_BYTES), retry_after_s=retry_after_s)
    error.details.update(_cut_details(details))
    return error


def cut_text(text: str, max_bytes: int) -> str:
    """The text, or as much of its beginning as has at most `max_bytes` bytes of UTF-8, "..." at its end."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return data.decode()
    return data[: max_bytes - 3].decode("utf-8", "ignore") + "..."


def _cut_details(details: Mapping[str, str]) -> dict[str, str]:
    cut = {cut_text(name, DETAIL_NAME_MAX_BYTES): cut_text(value, DETAIL_MAX_BYTES) for name, value in details.items()}
    left = DETAILS_MAX_BYTES
    kept = set()
    for name, value in sorted(cut.items(), key=lambda item: len(item[1])):
        left -= len(name.encode()) + len(value.encode())
        if left < 0:
            break
        kept.add(name)
    return {name: value for name, value in cut.items() if name in kept}


def _retry_after_s(seconds: float) -> float:
    return min(max(seconds, 0.0), RETRY_AFTER_MAX_S)
