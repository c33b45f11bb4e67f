"""Log lines of hurrayd and its mover, which share one standard error, stay lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

WRITER = """
import logging
import structlog
from hurray_server.logs import configure_logs

configure_logs("info", "json", "p")
log = structlog.get_logger("test")
for number in range(2000):
    log.info("line", number=number)
    logging.getLogger("library").warning("line %d", number)
"""


def test_lines_of_two_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as sink:
        writers = [subprocess.Popen([sys.executable, "-c", WRITER], stderr=sink) for _ in range(2)]
        assert [writer.wait(60) for writer in writers] == [0, 0]
    lines = path.read_text().splitlines()
    assert len(lines) == 2 * 2 * 2000
    assert {json.loads(line)["process"] for line in lines} == {"p"}
