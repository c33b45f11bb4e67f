"""A short run of every target, and of the mutations. FUZZ_SECONDS and MUTATIONS make them longer."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from fuzz.run import CORPUS, fuzz_apart, targets
from fuzz.targets import TARGETS
from support.daemon import environment

TESTS = Path(__file__).parents[1]
SECONDS = int(os.environ.get("FUZZ_SECONDS", "5"))
MUTATIONS = int(os.environ.get("MUTATIONS", "50000"))

pytestmark = pytest.mark.timeout(120 + 5 * SECONDS + MUTATIONS // 1000)


@pytest.mark.parametrize("target", TARGETS)
def test_the_seeds_do_no_harm(target: str) -> None:
    files = list((CORPUS / target).iterdir())
    assert files
    for file in files:
        TARGETS[target](file.read_bytes())


def test_no_target_fails_within_seconds(tmp_path: Path) -> None:
    if find_spec("atheris") is None:
        pytest.skip("NOTHING IS FUZZED: atheris is not installed")
    assert set(targets()) == set(TARGETS)
    with ThreadPoolExecutor(len(TARGETS)) as pool:
        ran = dict(zip(TARGETS, pool.map(lambda target: fuzz_apart(target, SECONDS, tmp_path), TARGETS), strict=True))
    failed = [f"{target}: {what}" for target, what in ran.items() if not what.endswith("nothing wrong")]
    assert not failed, "\n\n".join([*failed, *(path.read_bytes().hex() for path in tmp_path.iterdir())])


def test_mutants_of_descriptors_raise_nothing_but_our_errors_and_take_no_memory(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "fuzz.mutations", "--count", str(MUTATIONS)],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(TESTS)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr[-3000:]}"
    print(ran.stdout)
