"""Every error this project raises on purpose: one class per reason, each with its gRPC code.

A reason is what programs branch on, the message is for people, and `details` carries the values both need: the
field, the rule of the format, what was offered and what was required. `hurray_wire.status` carries an error over
gRPC and rebuilds the same class on the other side from (domain, reason), never from text.
"""

from __future__ import annotations

from typing import ClassVar

ERROR_DOMAIN = "transfer.hurray.dev"
"""ErrorInfo.domain of every error of this project."""

_BY_REASON: dict[str, type[HurrayError]] = {}


class HurrayError(Exception):
    """Base of all errors. Never raised itself.

    `code` is the canonical gRPC status code by name; `reason` is unique per class, UPPER_SNAKE.
    `retry_after_s` is set where waiting helps (seconds).
    """

    code: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "UNSPECIFIED"

    def __init__(self, message: str, *, retry_after_s: float | None = None, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.details: dict[str, str] = {name: str(value) for name, value in details.items() if value is not None}

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if cls.reason in _BY_REASON:
            raise TypeError(f"reason {cls.reason} is taken by {_BY_REASON[cls.reason].__name__}")
        _BY_REASON[cls.reason] = cls

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in self.details.items())
        return f"{self.reason}: {self.message}" + (f" ({shown})" if shown else "")

    @property
    def rule(self) -> str | None:
        """Id of the format rule that was broken, as in RULES (for example "B4"), or None."""
        return self.details.get("rule")

    @property
    def field(self) -> str | None:
        """Name of the field that is wrong, in the format's words, or None."""
        return self.details.get("field")

    @property
    def stage(self) -> str | None:
        """Stage of the transfer in which it happened, or None."""
        return self.details.get("stage")


def error_class(reason: str) -> type[HurrayError] | None:
    """The class of a reason, or None for one this version does not know."""
    return _BY_REASON.get(reason)


def all_reasons() -> tuple[str, ...]:
    """The reason of every error there is."""
    return tuple(_BY_REASON)


# --- INVALID_ARGUMENT: what was offered is wrong whatever the state of anything -------------------------------


class InvalidDescriptor(HurrayError):
    """Descriptor bytes break a rule of the format. Details: rule, field, offered, required, tensor."""

    code, reason = "INVALID_ARGUMENT", "INVALID_DESCRIPTOR"


class InvalidContents(HurrayError):
    """Index buffers, token counts, quantization parameters or pad bits break a rule. Details as above, and index."""

    code, reason = "INVALID_ARGUMENT", "INVALID_CONTENTS"


class InvalidSnapshot(HurrayError):
    """What the caller gave cannot be a snapshot: shapes, layouts, missing roles. Details: field, offered, required."""

    code, reason = "INVALID_ARGUMENT", "INVALID_SNAPSHOT"


class InvalidRequest(HurrayError):
    """A request's field is out of range. Details: field, offered, required."""

    code, reason = "INVALID_ARGUMENT", "INVALID_REQUEST"


class RequestIdReused(HurrayError):
    """The request id was used before with another body."""

    code, reason = "INVALID_ARGUMENT", "REQUEST_ID_REUSED"


# --- UNIMPLEMENTED / FAILED_PRECONDITION: fine in itself, not between these two --------------------------------


class Unsupported(HurrayError):
    """Element type, scheme, device or feature that this side does not take. Details: field, offered, required."""

    code, reason = "UNIMPLEMENTED", "UNSUPPORTED"


class GeometryMismatch(HurrayError):
    """Source and destination differ in a field. Details: tensor, field, offered, required."""

    code, reason = "FAILED_PRECONDITION", "GEOMETRY_MISMATCH"


class CapabilityMismatch(HurrayError):
    """The two sides share no transport, checksum, version or setting. Details: field, offered, required."""

    code, reason = "FAILED_PRECONDITION", "CAPABILITY_MISMATCH"


class ProtocolViolation(HurrayError):
    """The peer said something that the protocol does not allow in this state."""

    code, reason = "FAILED_PRECONDITION", "PROTOCOL_VIOLATION"


class Misuse(HurrayError):
    """This program called something in a state that does not allow it (a closed client, a released snapshot)."""

    code, reason = "FAILED_PRECONDITION", "MISUSE"


# --- NOT_FOUND / ALREADY_EXISTS: keys ---------------------------------------------------------------------------


class KeyNotFound(HurrayError):
    """No snapshot has this key, and no tombstone says why."""

    code, reason = "NOT_FOUND", "KEY_NOT_FOUND"


class KeyExpired(HurrayError):
    """The lease of this (key, generation) ran out."""

    code, reason = "NOT_FOUND", "KEY_EXPIRED"


class KeyDeleted(HurrayError):
    """This (key, generation) was deleted or consumed."""

    code, reason = "NOT_FOUND", "KEY_DELETED"


class KeyOverwritten(HurrayError):
    """A newer generation of this key replaced the one asked for."""

    code, reason = "NOT_FOUND", "KEY_OVERWRITTEN"


class SnapshotLost(HurrayError):
    """The snapshot was committed, and its memory went with the data plane that held it."""

    code, reason = "NOT_FOUND", "SNAPSHOT_LOST"


class KeyExists(HurrayError):
    """A committed snapshot has this key and overwriting was not asked for."""

    code, reason = "ALREADY_EXISTS", "KEY_EXISTS"


class KeyBusy(HurrayError):
    """Another transfer to this key is running."""

    code, reason = "ALREADY_EXISTS", "KEY_BUSY"


# --- who may do what ---------------------------------------------------------------------------------------------


class PermissionDenied(HurrayError):
    """No grant allows this tenant this action on this key."""

    code, reason = "PERMISSION_DENIED", "PERMISSION_DENIED"


class Unauthenticated(HurrayError):
    """The caller has no identity that this node accepts."""

    code, reason = "UNAUTHENTICATED", "UNAUTHENTICATED"


# --- RESOURCE_EXHAUSTED: try again later (retry_after_s) -------------------------------------------------------


class ArenaFull(HurrayError):
    """The target has no free memory for the snapshot. Details: offered (bytes), free, total."""

    code, reason = "RESOURCE_EXHAUSTED", "ARENA_FULL"


class LimitExceeded(HurrayError):
    """A configured limit would be passed. Details: field, offered, required."""

    code, reason = "RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED"


class QuotaExceeded(HurrayError):
    """The tenant would have more than it may on this node. Details: field, offered, allowed."""

    code, reason = "RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED"


# --- the transfer did not happen, for reasons outside the snapshot ----------------------------------------------


class PeerUnavailable(HurrayError):
    """The peer cannot be reached or went away. Details: stage, peer."""

    code, reason = "UNAVAILABLE", "PEER_UNAVAILABLE"


class DataPlaneUnavailable(HurrayError):
    """The node's data plane is not up (starting, restarting, or gone). Details: stage."""

    code, reason = "UNAVAILABLE", "DATA_PLANE_UNAVAILABLE"


class NodeDraining(HurrayError):
    """The node is shutting down and takes no new transfers."""

    code, reason = "UNAVAILABLE", "NODE_DRAINING"


class OutcomeUnknown(HurrayError):
    """The stream was lost after the last byte: the target may or may not have committed. Retrying resolves it."""

    code, reason = "UNAVAILABLE", "OUTCOME_UNKNOWN"


class DeadlineExceeded(HurrayError):
    """The budget of the call ran out. Details: stage, budget_s."""

    code, reason = "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"


class Cancelled(HurrayError):
    """The caller or the peer cancelled the transfer."""

    code, reason = "CANCELLED", "CANCELLED"


class ChecksumMismatch(HurrayError):
    """Bytes that arrived are not the bytes that were sent. Details: chunk, offered, required."""

    code, reason = "DATA_LOSS", "CHECKSUM_MISMATCH"


class InternalError(HurrayError):
    """A fault of this program. Details: log_id, under which the node's log has the cause."""

    code, reason = "INTERNAL", "INTERNAL"


class RemoteError(HurrayError):
    """The peer failed in a way that this version has no class for. Details: code, and reason where it gave one."""

    code, reason = "UNKNOWN", "REMOTE"
