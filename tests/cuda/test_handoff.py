"""What tests/gpu does, with a GPU that is not there: a real daemon, real UCX, the kernels built for the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu.test_handoff_gpu import (
    on_gpu,
    on_host,
    settings,
    test_a_transport_without_gpus_is_told_by_the_receipt,
    test_between_gpu_and_host_only_on_request,
    test_from_gpu_to_gpu_and_back_into_pages,
    test_scales_go_with_their_pages,
    test_the_callers_stream_and_device_stay_current,
)
from hurray_wire import cuda
from support.fake_cuda import BUILT_KERNELS, build_kernels, fake_cuda, let_ucx_take_it, needs_compiler

pytest.importorskip("ucxx")
pytestmark = [needs_compiler, pytest.mark.ucx]

__all__ = [
    "on_gpu",
    "on_host",
    "settings",
    "test_a_transport_without_gpus_is_told_by_the_receipt",
    "test_between_gpu_and_host_only_on_request",
    "test_from_gpu_to_gpu_and_back_into_pages",
    "test_scales_go_with_their_pages",
    "test_the_callers_stream_and_device_stay_current",
]


@pytest.fixture(scope="module", autouse=True)
def cupy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    here = Path(__file__).parent
    with pytest.MonkeyPatch.context() as patch, fake_cuda() as module:
        patch.setenv(BUILT_KERNELS, str(build_kernels(tmp_path_factory.mktemp("kernels"))))
        patch.setenv("PYTHONPATH", f"{here / 'fake'}:{here.parent}")
        let_ucx_take_it(patch.setattr)
        yield module


@pytest.fixture
def gpu(cupy: Any) -> Any:
    return cuda.gpu()
