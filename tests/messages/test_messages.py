"""What a peer says, checked before anything else sees it."""

from __future__ import annotations

import numpy as np
import pytest

from hurray_wire.errors import ArenaFull, HurrayError, LimitExceeded, ProtocolViolation
from hurray_wire.limits import Limits
from hurray_wire.messages import check_sizes, read_offer, read_target_message
from hurray_wire.target_payloads import OwnMemory
from hurray_wire.transport.base import chunk_tag
from hurray_wire.v1 import transfer_pb2 as pb


def test_an_accepted_number_always_fits_a_tag() -> None:
    most = (1 << 40) - 1
    accept = read_target_message(pb.TargetMessage(accept=pb.Accept(transfer=most)))
    assert isinstance(accept, pb.Accept)
    assert chunk_tag(accept.transfer, 0) < 1 << 64
    for number in (most + 1, (1 << 64) - 1):
        with pytest.raises(ProtocolViolation) as caught:
            read_target_message(pb.TargetMessage(accept=pb.Accept(transfer=number)))
        assert caught.value.field == "transfer"


@pytest.mark.parametrize(
    ("offer", "field"),
    [
        (pb.Offer(tensors=[pb.TensorOffer()] * 5), "max_tensors"),
        (pb.Offer(token_counts=[0] * 8), "max_sequences"),
        (pb.Offer(annotations={f"{number}": "" for number in range(65)}), "annotations"),
        (pb.Offer(transports=["ucx"] * 17), "transports"),
        (pb.Offer(transports=["x" * (1 << 20)]), "transports"),
    ],
)
def test_what_there_is_too_much_of_is_refused_first(offer: pb.Offer, field: str) -> None:
    limits = Limits(max_tensors=4, max_sequences=7)
    for check in (check_sizes, read_offer):
        with pytest.raises(LimitExceeded) as caught:
            check(offer, limits)
        assert caught.value.field == field


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), MemoryError()])
def test_memory_that_cannot_be_had_is_no_fault_of_this_program(error: Exception) -> None:
    def allocate(_: int) -> np.ndarray:
        raise error

    with pytest.raises(HurrayError) as caught:
        OwnMemory(allocate).reserve(1 << 40)
    assert isinstance(caught.value, ArenaFull)
    assert caught.value.details["offered"] == str(1 << 40)
