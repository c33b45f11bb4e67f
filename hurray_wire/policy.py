"""What a reader of descriptors accepts where the format leaves a choice, and how it says no."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from .errors import InvalidDescriptor, Unsupported
from .limits import Limits


@dataclass(frozen=True, slots=True)
class Policy:
    """Every choice that RULES.md leaves to a reader. The defaults are strict.

    `permissive`: accept what the block-paged text lets a permissive reader accept, which is a broken storage
    invariant (1), (2), (3) or (6): rules V1, V2, V3, V4 and L2, and no other. For looking at a damaged snapshot only.
    `cross_machine`: the descriptor describes buffers of another machine, so each must be producer-synced (D6).
    `private_agreed`: tags F0-FE of devices, memory classes and element types are agreed out of band (D3, E6).
    `allow_unaligned_gpu`: take buffers of accelerators aligned to less than 4096 (A3).
    `resolved_shape`: the true sizes of dynamic dimensions, None where there is none to resolve (S1). A decoded
    descriptor carries the resolved sizes. It has no effect on dimensions that the descriptor states.
    `limits`: bounds on what a peer may send.
    """

    permissive: bool = False
    cross_machine: bool = False
    private_agreed: bool = False
    allow_unaligned_gpu: bool = False
    resolved_shape: tuple[int | None, int | None, int | None] | None = None
    limits: Limits = field(default_factory=Limits)


STRICT: Final = Policy()


def broken(rule: str, field: str, offered: object, required: str) -> InvalidDescriptor:
    """The error for a descriptor whose `field` is `offered` where `rule` demands `required`."""
    return InvalidDescriptor(
        f"{field} is {offered}, must be {required}",
        rule=rule,
        field=field,
        offered=offered,
        required=required,
    )


def not_taken(rule: str, field: str, offered: object, required: str) -> Unsupported:
    """The error for a value that may mean something somewhere, and that this reader does not take."""
    return Unsupported(
        f"{field} {offered} is not taken here, only {required}",
        rule=rule,
        field=field,
        offered=offered,
        required=required,
    )
