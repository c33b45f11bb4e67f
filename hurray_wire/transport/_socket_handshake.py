"""Binds a connection to the two transports whose parameters name each other, before it carries a frame.

    dialer   -> acceptor   MAGIC, id of the dialer's token, nonce               56 bytes
    acceptor -> dialer     nonce, HMAC(key, "acceptor", transcript)             64 bytes
    dialer   -> acceptor   HMAC(key, "dialer", transcript)                      32 bytes

The key is both sides' tokens, which only they know: they were exchanged over the authenticated control plane, and never
cross a data connection. The transcript holds kind, id, both nonces and both certificates, so that a proof fits one
connection only: neither a recording nor a relay between two TLS connections is worth anything.

A handshake is a generator: it yields the events to poll for, and is resumed when one came.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import select
from collections.abc import Callable, Generator
from typing import Final, Protocol, TypeVar

from hurray_wire.errors import HurrayError, Unauthenticated
from hurray_wire.transport._socket_channel import Channel
from hurray_wire.transport._tls_credentials import fingerprint

TOKEN_BYTES: Final = 32
ID_BYTES: Final = 16
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = hashlib.sha256().digest_size

_MAGIC: Final = b"HURRAY\x00\x01"
"""The last byte is the version of this exchange."""

_HELLO_BYTES: Final = len(_MAGIC) + ID_BYTES + _NONCE_BYTES

Steps = Generator[int, None, None]


E = TypeVar("E", bound="Expected")


class Expected(Protocol):
    """A peer that a dialer may prove to be."""

    @property
    def peer_token(self) -> bytes:
        """The token it told over the control plane."""


def new_token() -> bytes:
    """A transport's secret."""
    return secrets.token_bytes(TOKEN_BYTES)


def token_id(token: bytes) -> bytes:
    """Name of a token, from which it cannot be told."""
    return hashlib.sha256(b"hurray transport token id" + token).digest()[:ID_BYTES]


def dial(channel: Channel, kind: str, own_token: bytes, peer_token: bytes) -> Steps:
    """Connect, and prove to be the owner of `own_token` to the owner of `peer_token`.

    Raises OSError, or Unauthenticated for an acceptor that is not that owner.
    """
    yield select.EPOLLOUT
    channel.check_connected()
    while not channel.handshake():
        yield channel.interest
    hello = _MAGIC + token_id(own_token) + secrets.token_bytes(_NONCE_BYTES)
    yield from _send(channel, hello)
    answer = memoryview(bytearray(_NONCE_BYTES + _PROOF_BYTES))
    yield from _receive(channel, answer)
    transcript = _transcript(
        kind,
        hello,
        bytes(answer[:_NONCE_BYTES]),
        dialer_certificate=channel.local_certificate,
        acceptor_certificate=channel.peer_certificate()[0],
    )
    key = own_token + peer_token
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(key, b"acceptor", transcript)):
        raise refused("it does not know the tokens")
    yield from _send(channel, _proof(key, b"dialer", transcript))


def accept(
    channel: Channel,
    kind: str,
    own_token: bytes,
    find: Callable[[bytes], E | None],
) -> Generator[int, None, E]:
    """Let a dialer prove which expected peer it is, and return that one. Until `find` knows the peer by the id of its
    token, the dialer waits.

    Raises OSError, or Unauthenticated for a dialer that is nobody expected.
    """
    while not channel.handshake():
        yield channel.interest
    hello = memoryview(bytearray(_HELLO_BYTES))
    yield from _receive(channel, hello)
    if bytes(hello[: len(_MAGIC)]) != _MAGIC:
        raise refused("it speaks another protocol")
    dialer_id = bytes(hello[len(_MAGIC) : len(_MAGIC) + ID_BYTES])
    while (expected := find(dialer_id)) is None:
        yield 0
    nonce = secrets.token_bytes(_NONCE_BYTES)
    transcript = _transcript(
        kind,
        bytes(hello),
        nonce,
        dialer_certificate=channel.peer_certificate()[0],
        acceptor_certificate=channel.local_certificate,
    )
    key = expected.peer_token + own_token
    yield from _send(channel, nonce + _proof(key, b"acceptor", transcript))
    proof = memoryview(bytearray(_PROOF_BYTES))
    yield from _receive(channel, proof)
    if not hmac.compare_digest(proof, _proof(key, b"dialer", transcript)):
        raise refused("it does not know the tokens")
    return expected


def refused(why: str) -> HurrayError:
    """The error for a peer that is not who it has to be."""
    return Unauthenticated(f"the peer of a data connection was refused: {why}", stage="connect")


def _transcript(
    kind: str, hello: bytes, acceptor_nonce: bytes, *, dialer_certificate: bytes, acceptor_certificate: bytes
) -> bytes:
    """All parts but the first have a fixed length."""
    certificates = fingerprint(dialer_certificate) + fingerprint(acceptor_certificate)
    return kind.encode() + hello + acceptor_nonce + certificates


def _proof(key: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, role + b"\0" + transcript, "sha256")


def _send(channel: Channel, message: bytes) -> Steps:
    rest = memoryview(message)
    while rest or channel.unsent:
        sent = channel.send([rest] if rest else [])
        rest = rest[sent:]
        if not sent and (rest or channel.unsent):
            yield select.EPOLLOUT


def _receive(channel: Channel, view: memoryview) -> Steps:
    while view:
        count = channel.receive_into(view)
        view = view[count:]
        if not count:
            yield channel.interest
