"""A source whose node is stopped in the middle of a put, gives up, and meets it again: run as a process of its own,
since what it guards against is a crash inside UCX."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import hurray_client as ht
from sdk.snapshots import make_snapshot
from sdk.test_node import large_snapshot
from support.daemon import running_daemon

TURNS = 3


def main() -> None:
    config = ht.ClientConfig(chunk_bytes=4096, window=4)
    with running_daemon("[ucx]\nuser_timeout_s = 1.0") as daemon, ht.connect(daemon.address, config=config) as client:
        for turn in range(TURNS):
            client.put(f"before/{turn}", make_snapshot())
            processes = [daemon.pid, daemon.mover_pid]

            def stop(_: ht.Progress, processes: list[int] = processes) -> None:
                while processes:
                    os.kill(processes.pop(0), signal.SIGSTOP)

            stopped = list(processes)
            try:
                client.put(f"during/{turn}", large_snapshot(), on_progress=stop, timeout_s=0.5)
            except ht.HurrayError as error:
                print(error.reason, error.stage)
            else:
                print("COMMITTED")
            for process in reversed(stopped):
                os.kill(process, signal.SIGCONT)
            client.put(f"after/{turn}", make_snapshot(), timeout_s=30)
    print("alive")


if __name__ == "__main__":
    main()
