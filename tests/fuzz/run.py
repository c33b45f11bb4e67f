"""Fuzzes targets for some seconds, or runs one on one file.

    cd tests && python -m fuzz.run --seconds 60             every target, from the seeds in fuzz/corpus
    cd tests && python -m fuzz.run TARGET --seconds 60      one of them
    cd tests && python -m fuzz.run TARGET FILE              what a crash left, again

An input that crashes is kept in the folder from which it was started, and printed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
MEMORY_MIB = 2048
INPUT_BYTES = 4096


def targets() -> list[str]:
    """Their names."""
    return sorted(folder.name for folder in CORPUS.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", nargs="?")
    parser.add_argument("file", nargs="?")
    parser.add_argument("--seconds", type=int, default=60)
    options = parser.parse_args()
    if options.file is not None:
        from fuzz.targets import TARGETS

        TARGETS[options.target](Path(options.file).read_bytes())
        print("nothing wrong")
    elif options.target is not None:
        fuzz(options.target, options.seconds)
    elif find_spec("atheris") is None:
        print("NOTHING IS FUZZED: atheris is not installed, for which there are wheels for x86_64 alone")
    else:
        sys.exit(fuzz_all(options.seconds))


def fuzz(target: str, seconds: int) -> None:
    """In this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=["hurray_wire"], exclude=["hurray_wire.v1"]):
        from fuzz.targets import TARGETS
    with tempfile.TemporaryDirectory() as found:
        limits = [f"-max_total_time={seconds}", f"-rss_limit_mb={MEMORY_MIB}", f"-max_len={INPUT_BYTES}"]
        atheris.Setup([sys.argv[0], *limits, "-print_final_stats=1", found, str(CORPUS / target)], TARGETS[target])
        atheris.Fuzz()


def fuzz_all(seconds: int) -> int:
    """Every target in a process of its own, one on each processor. The exit status."""
    failed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for target, what in zip(
            targets(), pool.map(lambda target: fuzz_apart(target, seconds), targets()), strict=True
        ):
            print(f"{target}: {what}", flush=True)
            failed += not what.endswith("nothing wrong")
    return min(failed, 1)


def fuzz_apart(target: str, seconds: int, folder: Path | None = None) -> str:
    """In a process of its own, in this folder: how many inputs were tried, and what is wrong."""
    ran = subprocess.run(
        [sys.executable, "-m", "fuzz.run", target, "--seconds", str(seconds)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(CORPUS.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    done = re.search(r"Done (\d+) runs", ran.stderr)
    count, all_is_well = int(done[1]) if done else 0, ran.returncode == 0
    what = "nothing wrong" if all_is_well and count else f"\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}\nfailed"
    return f"{count} inputs in {seconds} s: {what}"


if __name__ == "__main__":
    main()
