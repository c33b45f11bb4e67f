"""What runs on a real GPU: skipped with the reason where there is none, unless run.sh says that there must be one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from hurray_wire import cuda

REASON = cuda.why_no_cuda()


@pytest.fixture(scope="session", autouse=True)
def driver() -> None:
    """Before anything is started."""
    if REASON is not None:
        assert os.environ.get("HURRAYTEST_GPU") != "required", REASON
        pytest.skip(REASON)


@pytest.fixture(autouse=True)
def gpu(driver: None) -> Iterator[Any]:
    """The GPU, current in this thread."""
    place = cuda.gpu()
    place.enter()
    yield place
    place.settle()
