"""Control-plane messages <-> what the wire layer works with: offers, session events, actions, parameters.

Everything that comes from a peer is checked here before anything else sees it.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from google.protobuf.duration_pb2 import Duration

from hurray_wire import session as s
from hurray_wire.alike import decode_each
from hurray_wire.checksum import Hash, hash_of
from hurray_wire.descriptor import Descriptor
from hurray_wire.errors import (
    CapabilityMismatch,
    HurrayError,
    InvalidDescriptor,
    InvalidRequest,
    LimitExceeded,
    ProtocolViolation,
)
from hurray_wire.image import ImagePlan, plan_image
from hurray_wire.limits import KEY_MAX_BYTES, Limits
from hurray_wire.orders import Output
from hurray_wire.paged import check_roles
from hurray_wire.policy import Policy
from hurray_wire.sections import DEVICE_NAMES, MEMORY_CLASS_NAMES
from hurray_wire.status import from_status, to_status
from hurray_wire.transport.base import TAG_TRANSFER_BITS, TransportParameters
from hurray_wire.v1 import transfer_pb2 as pb
from hurray_wire.validate import Counts, check_token_counts

PROTOCOL_VERSION: Final = 1

DURATION_MAX_S: Final = 3650 * 86400.0
"""Ten years: no duration on the wire is longer."""

TRANSPORTS_MAX: Final = 16
TRANSPORT_KIND_MAX: Final = 16

_ACROSS_MACHINES: Final = Policy(cross_machine=True)
_ANNOTATIONS_MAX: Final = 64
_REQUEST_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE)
_ANNOTATION_BYTES_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class OfferedSnapshot:
    """An offer that has been checked: what descriptors and token counts can show is right."""

    descriptors: tuple[Descriptor, ...]
    token_counts: Counts
    plan: ImagePlan
    hash: Hash


def check_key(key: str) -> None:
    """Raise InvalidRequest unless `key` is UTF-8 text of 1 to 512 bytes without control characters."""
    size = len(key.encode("utf-8", "surrogatepass"))
    if not 1 <= size <= KEY_MAX_BYTES:
        raise InvalidRequest(
            "key length out of range", field="key", offered=size, required=f"1 to {KEY_MAX_BYTES} bytes"
        )
    if key.isprintable():
        return
    for position, character in enumerate(key):
        if unicodedata.category(character) in ("Cc", "Cs"):
            raise InvalidRequest(
                "key has a control character", field="key", offered=repr(character), required="none", index=position
            )


def check_request_id(request_id: str) -> None:
    """Raise InvalidRequest unless it is a UUID4 in its usual text form."""
    if _REQUEST_ID.fullmatch(request_id) is None:
        raise InvalidRequest("not a request id", field="request_id", offered=request_id[:64], required="a UUID4")


def read_duration(duration: Duration, field: str) -> float:
    """Seconds of a duration from a peer. Raises InvalidRequest for one that is negative or above 10 years."""
    seconds = duration.seconds + duration.nanos / 1e9
    if not 0 <= seconds <= DURATION_MAX_S:
        raise InvalidRequest("duration out of range", field=field, offered=f"{seconds} s", required="0 to 10 years")
    return seconds


def to_duration(seconds: float) -> Duration:
    """Seconds as a duration."""
    return Duration(seconds=int(seconds), nanos=int(math.modf(seconds)[0] * 1e9))


def check_sizes(offer: pb.Offer, limits: Limits) -> None:
    """Raise LimitExceeded for more tensors, token counts, annotations or transports than are taken: before anything
    that costs time or memory for each of them."""
    for name, offered, most in (
        ("max_tensors", len(offer.tensors), limits.max_tensors),
        ("max_sequences", len(offer.token_counts), limits.max_sequences),
        ("annotations", len(offer.annotations), _ANNOTATIONS_MAX),
    ):
        if offered > most:
            raise LimitExceeded("above the limit of this node", field=name, offered=offered, required=f"<= {most}")
    check_transports(offer.transports)


def read_offer(offer: pb.Offer, limits: Limits) -> OfferedSnapshot:
    """Check an offer as far as it goes without its contents: descriptors by every rule, one shared structure, roles
    and layers, token counts, sizes. Costs memory in proportion to the message, never to what it declares.

    Raises InvalidDescriptor and Unsupported (with tensor, rule, field), GeometryMismatch, InvalidContents,
    InvalidSnapshot, InvalidRequest, LimitExceeded, CapabilityMismatch.
    """
    check_sizes(offer, limits)
    check_annotations(offer.annotations)
    descriptors = _read_descriptors([tensor.descriptor for tensor in offer.tensors], limits)
    plan = plan_image(descriptors, offer.chunk_bytes, limits, view=offer.view)
    check_roles([(descriptor.layer_index, descriptor.kv_role_name) for descriptor in descriptors])
    counts = check_token_counts(descriptors[0], np.asarray(offer.token_counts, np.uint64))
    return OfferedSnapshot(descriptors, counts, plan, hash_of(offer.checksum))


def _read_descriptors(encoded: Sequence[bytes], limits: Limits) -> tuple[Descriptor, ...]:
    descriptors: list[Descriptor] = []

    def short_enough() -> Iterator[bytes]:
        for data in encoded:
            if len(data) > limits.max_descriptor_bytes:
                raise LimitExceeded(
                    "descriptor too long", offered=len(data), required=f"<= {limits.max_descriptor_bytes}"
                )
            yield data

    try:
        for descriptor, consumed in decode_each(short_enough(), _ACROSS_MACHINES):
            given = len(encoded[len(descriptors)])
            if consumed != given:
                raise InvalidDescriptor(
                    "bytes follow the descriptor", field="descriptor_length", offered=given, required=consumed
                )
            descriptors.append(descriptor)
    except HurrayError as error:
        error.details.setdefault("tensor", str(len(descriptors)))
        raise
    return tuple(descriptors)


def check_annotations(annotations: Mapping[str, str]) -> None:
    """Raise InvalidRequest for what is not text, LimitExceeded for what is longer than a node takes."""
    for name, value in annotations.items():
        try:
            size = max(len(name.encode()), len(value.encode()))
        except (AttributeError, UnicodeEncodeError):
            raise InvalidRequest(
                "annotations are text", field="annotations", offered=f"{name!r}: {value!r}"[:64], required="UTF-8"
            ) from None
        if size > _ANNOTATION_BYTES_MAX:
            raise LimitExceeded(
                "annotation too long",
                field=f"annotations[{name[:32]!r}]",
                offered=size,
                required=f"<= {_ANNOTATION_BYTES_MAX} bytes",
            )


def check_transports(kinds: Sequence[str]) -> None:
    """Raise LimitExceeded for more kinds of transport, or longer names, than there can be."""
    size = max((len(kind) for kind in kinds), default=0)
    if len(kinds) > TRANSPORTS_MAX or size > TRANSPORT_KIND_MAX:
        raise LimitExceeded(
            "too many transports, or too long a name",
            field="transports",
            offered=f"{len(kinds)}, the longest of {size} characters",
            required=f"<= {TRANSPORTS_MAX} of at most {TRANSPORT_KIND_MAX} characters",
        )


def check_place(descriptors: Sequence[Descriptor], device_tag: int, memory_class: int, *, via_host: bool) -> None:
    """Raise CapabilityMismatch, naming tensor and field, for a pool of another device or memory class than that of the
    memory it would be held in, unless the source has said that it may change it."""
    if via_host:
        return
    for number, descriptor in enumerate(descriptors):
        for field, offered, required in (
            ("device_tag", descriptor.device_tag, device_tag),
            ("memory_class", descriptor.memory_class, memory_class),
        ):
            if offered != required:
                raise CapabilityMismatch(
                    "the pages would be held in memory of another kind than they are in: via_host=True allows it",
                    tensor=number,
                    field=f"buffers[0].{field}",
                    offered=_memory_name(field, offered),
                    required=_memory_name(field, required),
                )


def _memory_name(field: str, value: int) -> str:
    names = DEVICE_NAMES if field == "device_tag" else MEMORY_CLASS_NAMES
    return f"{value:#04x} ({names[value]})" if value < len(names) else f"{value:#04x}"


def choose_transport(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """The first of ours that they have, too. Raises CapabilityMismatch, naming both lists."""
    for kind in ours:
        if kind in theirs:
            return kind
    raise CapabilityMismatch(
        "no transport in common", field="transports", offered=", ".join(theirs), required="one of " + ", ".join(ours)
    )


# --- transports ---------------------------------------------------------------------------------------------------


def to_transport(parameters: TransportParameters) -> pb.Transport:
    """Parameters as a message."""
    return pb.Transport(kind=parameters.kind, address=parameters.address, settings=dict(parameters.settings))


def read_transport(message: pb.Transport) -> TransportParameters:
    """Parameters from a peer. Raises LimitExceeded for what is larger than any transport of ours."""
    settings = dict(message.settings)
    size = len(message.kind) + len(message.address) + sum(len(name) + len(value) for name, value in settings.items())
    if size > 16384:
        raise LimitExceeded(
            "transport parameters too long", field="transports", offered=size, required="<= 16384 bytes"
        )
    return TransportParameters(kind=message.kind, address=message.address, settings=settings)


# --- session events and actions -------------------------------------------------------------------------------------


def to_source_message(output: Output) -> pb.SourceMessage:
    """What a source's machine wants told."""
    match output:
        case s.TellChecksums(first, values):
            return pb.SourceMessage(checksums=pb.ChunkChecksums(first_chunk=first, values=values))
        case s.TellStop(error, sent):
            return pb.SourceMessage(stop=pb.Stop(error=to_status(error), sent_chunk_count=sent))
    raise AssertionError(f"not for a target: {output}")


def to_target_message(output: Output, accept: Callable[[], pb.Accept]) -> pb.TargetMessage:
    """What a target's machine wants told. `accept` makes the Accept, which the machine knows nothing of."""
    match output:
        case s.TellAccept():
            return pb.TargetMessage(accept=accept())
        case s.TellReceipt(receipt):
            return pb.TargetMessage(receipt=receipt)
        case s.TellStop(error):
            return pb.TargetMessage(stop=pb.Stop(error=to_status(error)))
    raise AssertionError(f"not for a source: {output}")


def read_source_message(message: pb.SourceMessage) -> s.Event:
    """The event for a target that a source's message is. Raises ProtocolViolation for an offer or an empty one."""
    match message.WhichOneof("message"):
        case "checksums":
            return s.ChecksumsReceived(message.checksums.first_chunk, tuple(message.checksums.values))
        case "stop":
            return s.PeerStopped(from_status(message.stop.error), message.stop.sent_chunk_count)
        case kind:
            raise ProtocolViolation("unexpected message", offered=kind or "empty message", required="checksums or stop")


def read_target_message(message: pb.TargetMessage) -> s.ReceiptReceived | s.PeerStopped | pb.Accept:
    """The event for a source that a target's message is, or its Accept. Raises ProtocolViolation for an empty one, and
    for a transfer number that no tag can hold."""
    match message.WhichOneof("message"):
        case "accept":
            if message.accept.transfer >= 1 << TAG_TRANSFER_BITS:
                raise ProtocolViolation(
                    "transfer number out of range",
                    field="transfer",
                    offered=message.accept.transfer,
                    required=f"< 2**{TAG_TRANSFER_BITS}",
                )
            return message.accept
        case "receipt":
            return s.ReceiptReceived(message.receipt)
        case "stop":
            return s.PeerStopped(from_status(message.stop.error))
        case _:
            raise ProtocolViolation("unexpected message", offered="empty message", required="accept, receipt or stop")
