"""How two processes prove to each other that they are on one host, and the ones that met on the control plane.

Each side has an identity: 16 bytes of name and 32 bytes of token, drawn at random, told to the peer over the
authenticated control plane and to nobody else. Over the socket go only HMACs under these tokens:

    listener -> dialer   CHALLENGE  nonce of the listener
    dialer -> listener   HELLO      name and nonce of the dialer, an admission, and a memfd with the dialer's proof
    listener -> dialer   WELCOME    a memfd with the listener's proof

The admission shows that the dialer has the listener's token, before the listener knows which peer it is. Proofs are
under both tokens, so that they fit this pair only, and lie in memory that is mapped to read them: a peer that can be
seen but shares no memory proves nothing. All proofs hold for the two nonces of one connection.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np

from hurray_wire import memfd
from hurray_wire.errors import ProtocolViolation
from hurray_wire.limits import PAGE_BYTES
from hurray_wire.transport._shm_frames import violation
from hurray_wire.transport._shm_packets import Packet

_NAME_BYTES: Final = 16
_TOKEN_BYTES: Final = 32
_NONCE_BYTES: Final = 16

_ADDRESS: Final = struct.Struct(f"<B{_NAME_BYTES}s{_TOKEN_BYTES}s")
_CHALLENGE: Final = struct.Struct(f"<8s{_NONCE_BYTES}s")
_HELLO: Final = struct.Struct(f"<8s{_NAME_BYTES}s{_NONCE_BYTES}s{hashlib.sha256().digest_size}s")
_CHALLENGE_MAGIC: Final = b"HURRYSHC"
_HELLO_MAGIC: Final = b"HURRYSHH"
_WELCOME_MAGIC: Final = b"HURRYSHW"


@dataclass(frozen=True, slots=True)
class Identity:
    """Of one transport. `token` is secret between it and its peers."""

    listens: bool
    name: bytes
    token: bytes

    def __repr__(self) -> str:
        return f"<Identity {self.name.hex()} {role(self.listens)}>"

    def pack(self) -> bytes:
        """The transport's address: whether it listens (u8), name, token."""
        return _ADDRESS.pack(self.listens, self.name, self.token)


def draw_identity(*, listens: bool) -> Identity:
    """A new one."""
    return Identity(listens, secrets.token_bytes(_NAME_BYTES), secrets.token_bytes(_TOKEN_BYTES))


def read_identity(address: bytes) -> Identity:
    """A peer's, from its address. Raises ProtocolViolation."""
    if len(address) != _ADDRESS.size or address[0] > 1:
        raise violation("address", f"{len(address)} bytes", f"{_ADDRESS.size} bytes, the first 0 or 1")
    listens, name, token = _ADDRESS.unpack(address)
    return Identity(bool(listens), name, token)


def role(listens: bool) -> str:
    """In words."""
    return "listens" if listens else "dials"


def draw_nonce() -> bytes:
    return secrets.token_bytes(_NONCE_BYTES)


@dataclass(frozen=True, slots=True)
class Hello:
    """What a dialer said. `offered` is its proof, which can be checked once its identity is known."""

    dialer: bytes
    nonces: bytes
    offered: bytes


def challenge(nonce: bytes) -> bytes:
    """The packet with which a listener begins."""
    return _CHALLENGE.pack(_CHALLENGE_MAGIC, nonce)


def read_challenge(packet: Packet) -> bytes:
    """The listener's nonce. Raises ProtocolViolation."""
    return bytes(_read(_CHALLENGE, _CHALLENGE_MAGIC, packet, carries=False)[1])


def hello(own: Identity, listener: Identity, listener_nonce: bytes, nonce: bytes) -> tuple[bytes, int]:
    """A dialer's answer, and the descriptor to send with it. Raises OSError."""
    nonces = listener_nonce + nonce
    admission = _mac(listener.token, b"admission", nonces, own.name)
    proof = _proof(b"dialer", own, listener, nonces)
    return _HELLO.pack(_HELLO_MAGIC, own.name, nonce, admission), _memory_of(proof)


def read_hello(packet: Packet, own: Identity, nonce: bytes) -> Hello:
    """Raises ProtocolViolation unless the dialer has this listener's token and its memory can be mapped."""
    _, name, dialer_nonce, admission = _read(_HELLO, _HELLO_MAGIC, packet, carries=True)
    nonces = nonce + dialer_nonce
    if not hmac.compare_digest(admission, _mac(own.token, b"admission", nonces, name)):
        raise ProtocolViolation("the peer does not have this side's token", field="shm.token")
    return Hello(name, nonces, _read_memory(packet))


def check_hello(said: Hello, own: Identity, dialer: Identity) -> None:
    """Raise ProtocolViolation unless it is this dialer that said Hello to this listener."""
    _check_proof(said.offered, _proof(b"dialer", dialer, own, said.nonces))


def welcome(own: Identity, dialer: Identity, nonces: bytes) -> tuple[bytes, int]:
    """A listener's last word, and the descriptor to send with it. Raises OSError."""
    return _WELCOME_MAGIC, _memory_of(_proof(b"listener", dialer, own, nonces))


def check_welcome(packet: Packet, own: Identity, listener: Identity, nonces: bytes) -> None:
    """Raise ProtocolViolation unless it is this listener that said Welcome to this dialer."""
    _read(struct.Struct("8s"), _WELCOME_MAGIC, packet, carries=True)
    _check_proof(_read_memory(packet), _proof(b"listener", own, listener, nonces))


def _read(layout: struct.Struct, magic: bytes, packet: Packet, *, carries: bool) -> tuple[bytes, ...]:
    if len(packet.data) != layout.size or packet.data[: len(magic)] != magic:
        raise violation("handshake", f"{len(packet.data)} bytes", f"{layout.size} bytes that begin with {magic!r}")
    if len(packet.descriptors) != carries:
        raise violation("handshake", f"{len(packet.descriptors)} descriptors", int(carries))
    return layout.unpack(packet.data)


def _memory_of(proof: bytes) -> int:
    descriptor, memory = memfd.create("hurray-proof", PAGE_BYTES)
    memory[: len(proof)] = np.frombuffer(proof, np.uint8)
    return descriptor


def _read_memory(packet: Packet) -> bytes:
    (descriptor,) = packet.descriptors
    try:
        return memfd.map_received(descriptor, PAGE_BYTES)[: hashlib.sha256().digest_size].tobytes()
    except OSError as error:
        raise violation("memory", os.strerror(error.errno or 0), "a mapping") from error


def _check_proof(offered: bytes, required: bytes) -> None:
    if not hmac.compare_digest(offered, required):
        raise ProtocolViolation("the peer is not the one of the control plane", field="shm.proof")


def _proof(label: bytes, dialer: Identity, listener: Identity, nonces: bytes) -> bytes:
    return _mac(listener.token + dialer.token, label, nonces, dialer.name + listener.name)


def _mac(key: bytes, label: bytes, nonces: bytes, names: bytes) -> bytes:
    return hmac.digest(key, label + nonces + names, "sha256")
