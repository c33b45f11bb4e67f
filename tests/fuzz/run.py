"""Fuzzes one target for some seconds, or runs it on one file.

    cd tests && python -m fuzz.run TARGET --seconds 60      from the seeds in fuzz/corpus/TARGET
    cd tests && python -m fuzz.run TARGET FILE              what a crash left, again

An input that crashes is kept in the folder from which it was started, and printed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
MEMORY_MIB = 2048
INPUT_BYTES = 4096


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", nargs="?")
    parser.add_argument("--list", action="store_true", help="print the names of the targets")
    parser.add_argument("file", nargs="?")
    parser.add_argument("--seconds", type=int, default=60)
    options = parser.parse_args()
    if options.list:
        print(*sorted(folder.name for folder in CORPUS.iterdir()))
        return
    if options.file is not None:
        from fuzz.targets import TARGETS

        TARGETS[options.target](Path(options.file).read_bytes())
        print("nothing wrong")
        return

    import atheris

    with atheris.instrument_imports(include=["hurray_wire"], exclude=["hurray_wire.v1"]):
        from fuzz.targets import TARGETS
    with tempfile.TemporaryDirectory() as found:
        limits = [f"-max_total_time={options.seconds}", f"-rss_limit_mb={MEMORY_MIB}", f"-max_len={INPUT_BYTES}"]
        atheris.Setup(
            [sys.argv[0], *limits, "-print_final_stats=1", found, str(CORPUS / options.target)], TARGETS[options.target]
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
