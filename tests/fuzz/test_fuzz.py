"""A short run of every target, and of the mutations. FUZZ_SECONDS and MUTATIONS make them longer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fuzz.run import CORPUS
from fuzz.targets import TARGETS
from support.daemon import environment

TESTS = Path(__file__).parents[1]
SECONDS = int(os.environ.get("FUZZ_SECONDS", "10"))
MUTATIONS = int(os.environ.get("MUTATIONS", "50000"))

pytestmark = pytest.mark.timeout(120 + 5 * SECONDS + MUTATIONS // 1000)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env=environment(PYTHONPATH=str(TESTS)),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("target", TARGETS)
def test_the_seeds_do_no_harm(target: str) -> None:
    files = list((CORPUS / target).iterdir())
    assert files
    for file in files:
        TARGETS[target](file.read_bytes())


def test_no_target_fails_within_seconds(tmp_path: Path) -> None:
    try:
        import atheris  # noqa: F401
    except ImportError:
        pytest.skip("NOTHING IS FUZZED: atheris is not installed")

    def fuzz(target: str) -> str:
        folder = tmp_path / target
        folder.mkdir()
        ran = run(folder, "fuzz.run", target, "--seconds", str(SECONDS))
        if ran.returncode:
            inputs = [path.read_bytes().hex() for path in folder.iterdir()]
            return f"{target}: {inputs}\n{ran.stdout[-2000:]}\n{ran.stderr[-3000:]}"
        done = re.search(r"Done (\d+) runs", ran.stderr)
        assert done is not None
        return "" if int(done[1]) else f"{target}: nothing was run"

    with ThreadPoolExecutor(len(TARGETS)) as pool:
        failed = list(filter(None, pool.map(fuzz, TARGETS)))
    assert not failed, "\n\n".join(failed)


def test_mutants_of_descriptors_raise_nothing_but_our_errors_and_take_no_memory(tmp_path: Path) -> None:
    ran = run(tmp_path, "fuzz.mutations", "--count", str(MUTATIONS))
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr[-3000:]}"
    print(ran.stdout)
