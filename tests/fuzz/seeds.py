"""Writes the seeds in fuzz/corpus: `cd tests && python -m fuzz.seeds`."""

from __future__ import annotations

import struct
from pathlib import Path

from format.corpus import vectors
from hurray_wire.errors import ArenaFull
from hurray_wire.status import to_status
from hurray_wire.v1 import transfer_pb2 as pb
from support.raw import Prepared, snapshot

CORPUS = Path(__file__).parent / "corpus"
VECTORS = 12


def steps(*parts: tuple[int, int, int, bytes]) -> bytes:
    """See targets._steps."""
    return b"".join(bytes([*numbers, len(body)]) + body for *numbers, body in parts)


def seeds() -> dict[str, dict[str, bytes]]:
    """By target and name."""
    known = vectors("valid")
    descriptors = {
        vector["id"]: bytes.fromhex(vector["hex"])[: vector["consumed"]] for vector in known[:: len(known) // VECTORS]
    }
    table = struct.pack("<BBHBB", 0, 4, 8, 2, 3) + struct.pack("<2H", 6, 3) + struct.pack("<3I3I", 0, 2, 3, 0, 1, 0)
    offer = Prepared.of(snapshot(layers=1)).offer("a/b", 7)
    opening = pb.GetOpen(key="a/b", request_id=offer.request_id, incarnation=7, transports=["shm", "ucx"])
    hello = pb.Hello(protocol_version=1, incarnation=7, transports=[pb.Transport(kind="tcp", address=b"x" * 34)])
    stop = pb.Stop(error=to_status(ArenaFull("full", retry_after_s=1.0)), sent_chunk_count=3)
    return {
        "descriptor": descriptors,
        "index": {"ragged": table, "wide": b"\1" + table[1:10] + struct.pack("<3Q3Q", 0, 2, 3, 0, 1, 0)},
        "control": {
            "offer": b"\0" + pb.PutRequest(source=pb.SourceMessage(offer=offer)).SerializeToString(),
            "checksums": b"\0"
            + pb.PutRequest(
                source=pb.SourceMessage(checksums=pb.ChunkChecksums(first_chunk=1, values=[1, 2]))
            ).SerializeToString(),
            "open": b"\1" + pb.GetRequest(open=opening).SerializeToString(),
            "hello": b"\2" + pb.SessionRequest(hello=hello).SerializeToString(),
            "stop": b"\3" + pb.PutResponse(target=pb.TargetMessage(stop=stop)).SerializeToString(),
        },
        "tcp": {
            "eager": steps((0, 5, 8, b""), (2, 5, 8, b"x" * 8)),
            "announced": steps((0, 5, 200, b""), (6, 5, 200, b""), (14, 0, 200, b"y" * 200), (18, 0, 1, b"")),
            "bytes": steps((3, 0, 0, struct.pack("<QQQ", 1, 5, 8) + b"z" * 8)),
        },
        "shm": {
            "eager": b"\0" + steps((0, 5, 8, b""), (2, 5, 8, b"x" * 8)),
            "staged": b"\0" + steps((0, 5, 200, b""), (10, 5, 200, b""), (1, 6, 100, b""), (22, 0, 0, b"")),
            "announced": b"\0" + steps((6, 5, 200, b""), (0, 5, 200, b""), (18, 0, 200, b"")),
            "handshake": b"\x80" + steps((3, 0, 0, b"HURRYSHH" + bytes(64))),
        },
    }


def main() -> None:
    for target, files in seeds().items():
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
