"""What one engine tells another about a prompt's cache: which node has it, and under which names.

It travels through a router in `kv_transfer_params`, so whoever makes requests may have written it. It names a node,
never an address, and nothing in it is believed: the node and the snapshot's own annotations say what the snapshot is.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hurray_client.transfer import check_generation
from hurray_wire.errors import InvalidRequest
from hurray_wire.messages import check_key

FIELD: Final = "hurray"
ERROR_FIELD: Final = "hurray_error"
_MAX_RANKS: Final = 1024


@dataclass(frozen=True, slots=True)
class Handle:
    """The cache of one prompt. `snapshots`: (key, generation) by tensor-parallel rank."""

    node: str
    block_size: int
    token_count: int
    snapshots: tuple[tuple[str, int], ...]

    def to_params(self) -> dict[str, Any]:
        """As kv_transfer_params that a decode engine takes."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            FIELD: {
                "node": self.node,
                "block_size": self.block_size,
                "tokens": self.token_count,
                "snapshots": [{"key": key, "generation": generation} for key, generation in self.snapshots],
            },
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any], *, tp_size: int, token_count: int) -> Handle:
        """Read and check what came with a request of `token_count` prompt tokens. Raises InvalidRequest by field."""
        fields = params.get(FIELD)
        if not isinstance(fields, Mapping):
            raise InvalidRequest("the request has no handle", field=FIELD, offered=type(fields).__name__)
        node, snapshots = fields.get("node"), fields.get("snapshots")
        if not isinstance(node, str):
            raise InvalidRequest("a handle names a node", field="node", offered=type(node).__name__)
        if not isinstance(snapshots, Sequence) or isinstance(snapshots, str) or len(snapshots) > _MAX_RANKS:
            raise InvalidRequest("a handle names snapshots", field="snapshots", offered=type(snapshots).__name__)
        if len(snapshots) != tp_size:
            raise InvalidRequest(
                "the cache was put by an engine of another tensor-parallel size",
                field="tp_size",
                offered=len(snapshots),
                required=tp_size,
            )
        offered = _integer(fields, "tokens")
        if offered != token_count:
            raise InvalidRequest(
                "the handle is of another prompt", field="tokens", offered=offered, required=token_count
            )
        return cls(node, _integer(fields, "block_size"), offered, tuple(map(_snapshot, snapshots)))


def _integer(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequest("a handle has positive numbers", field=name, offered=repr(value)[:64])
    return value


def _snapshot(fields: object) -> tuple[str, int]:
    if not isinstance(fields, Mapping):
        raise InvalidRequest("a handle names snapshots", field="snapshots", offered=type(fields).__name__)
    key, generation = fields.get("key"), _integer(fields, "generation")
    if not isinstance(key, str):
        raise InvalidRequest("a snapshot has a key", field="key", offered=type(key).__name__)
    check_key(key)
    check_generation(generation)
    return key, generation


def rank_key(base: str, rank: int, tp_size: int) -> str:
    """Key of one rank's snapshot."""
    return f"{base}-tp{rank}of{tp_size}"


def prompt_digest(token_ids: Sequence[int], *extra: str) -> str:
    """What tells a prompt from all others: its tokens, and whatever else its cache depends on (adapter, images)."""
    digest = hashlib.sha256(array("q", token_ids).tobytes())
    for text in extra:
        digest.update(b"\0" + text.encode())
    return digest.hexdigest()


def failed_params(error: str) -> dict[str, Any]:
    """kv_transfer_params of a prompt whose cache could not be handed over: a decode engine computes it itself."""
    return {"do_remote_prefill": False, "do_remote_decode": False, ERROR_FIELD: error[:512]}
