"""The other side of a transport test, in a process of its own. One JSON object per line, in and out. Its argument is
the configuration: of shm if it has a path, else of UCX.

Out first: the parameters of this side. In: {"connect": parameters}, {"send": tag, "nbytes": n},
{"receive": tag, "nbytes": n}, {"close": true}, {"exit": true}. Out, for each send and receive that ends:
{"tag", "error", "digest"}; for a lost connection: {"lost": reason}. The end of the input ends the process.
"""

import hashlib
import json
import os
import select
import sys

import numpy as np

from hurray_wire.transport.base import Transport, TransportParameters
from hurray_wire.transport.shm import ShmConfig, ShmTransport
from hurray_wire.transport.ucx import UcxTransport
from hurray_wire.transport.ucx_config import UcxConfig


def pattern(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class Peer:
    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.endpoint = None
        self.running = True
        offered = self.transport.parameters()
        self.tell(kind=offered.kind, address=offered.address.hex(), settings=dict(offered.settings))

    def tell(self, **said: object) -> None:
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()

    def obey(self, order: dict) -> None:
        match order:
            case {"connect": given}:
                parameters = TransportParameters(given["kind"], bytes.fromhex(given["address"]), given["settings"])
                self.endpoint = self.transport.connect(1, parameters, lambda error: self.tell(lost=error.reason))
            case {"send": tag, "nbytes": nbytes}:
                data = pattern(nbytes, tag)
                self.endpoint.send(tag, data, lambda error: self.report(tag, data, error))
            case {"receive": tag, "nbytes": nbytes}:
                buffer = np.zeros(nbytes, np.uint8)
                self.endpoint.receive(tag, buffer, lambda error: self.report(tag, buffer, error))
            case {"close": _}:
                self.endpoint.close()
            case {"exit": _}:
                self.running = False

    def report(self, tag: int, buffer: np.ndarray, error: Exception | None) -> None:
        digest = hashlib.sha256(buffer).hexdigest() if error is None else None
        self.tell(tag=tag, error=None if error is None else error.reason, digest=digest)

    def run(self) -> None:
        pending = b""
        while self.running:
            if not self.transport.progress():
                self.transport.park(0.002)
            if not select.select([0], [], [], 0)[0]:
                continue
            read = os.read(0, 1 << 16)
            if not read:
                break
            *lines, pending = (pending + read).split(b"\n")
            for line in lines:
                self.obey(json.loads(line))
        self.transport.close()


if __name__ == "__main__":
    config = json.loads(sys.argv[1])
    Peer(ShmTransport(ShmConfig(**config)) if "path" in config else UcxTransport(UcxConfig(**config))).run()
