"""A source that begins a put and stops in the middle of its pages, to be killed. Prints "stalled" when it is there.

`python -m support.stalled_source ADDRESS KEY`
"""

from __future__ import annotations

import signal
import sys

from support.raw import WAIT_S, Prepared, RawClient, snapshot


def main() -> None:
    address, key = sys.argv[1:]
    client = RawClient(address)
    prepared = Prepared.of(snapshot(layers=8, pages=64), chunk_bytes=8192)
    put = client.put(prepared, prepared.offer(key, client.incarnation), ready_tensors=4)
    put.accepted.result(WAIT_S)
    put.sent.get(timeout=WAIT_S)  # the index has been sent
    print("stalled", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
