"""The benchmark of a GPU: that it runs what it says, and refuses where there is none."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from hurray_client.bench import gpu
from hurray_client.bench.processes import BenchError
from hurray_client.cli.main import app
from hurray_wire import cuda
from support.fake_cuda import fake_cuda, needs_compiler


def test_without_a_gpu_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)

    refused = CliRunner().invoke(app, ["bench", "--device", "cuda", "--json"])

    assert refused.exit_code == 1
    assert "cupy is not installed" in refused.output


@needs_compiler
def test_every_kernel_is_timed_on_what_it_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_INDEX_ENTRIES", 3000)
    with fake_cuda():
        bench = gpu.Kernels(cuda.gpu(), 64 * gpu._PAGE_BYTES)
        pages = np.random.default_rng(0).integers(0, 256, (64, gpu._PAGE_BYTES), np.uint8)
        order = bench._order.get()
        bench._pool._host[...] = pages

        assert {name for name, run in bench.cases.items() if run() <= 0} == set()

        bench._pool._host[...] = pages
        bench.cases["gather"]()
        assert np.array_equal(bench._out.get(), pages[order])
        bench._pool._host[...] = 0
        bench.cases["scatter_host_ids"]()
        assert np.array_equal(bench._pool.get(), pages)


def test_a_table_says_what_was_met() -> None:
    samples = {
        name: [1.0, 1.0]
        for name in ("device_copy", "gather", "scatter", "checksum", "scrub", "scrub_dirty", "index", "put")
    }
    samples["put"] = [20.0, 20.0]
    samples["index"] = [1e-4, 1e-4]
    bench = type("Bench", (), {"cases": dict.fromkeys(samples.keys() - {"put"}), "name": "GPU"})
    receipts = {"put_mix64": {"transport": "ucx", "checksum": "mix64", "staged_bytes": 0}}

    found = gpu._found(bench, gpu.Scale(rounds=2), samples, facts=receipts, skipped={}, failed={})  # type: ignore[arg-type]

    shown = {name: met for name, _, _, met in gpu.rows(found)}
    assert shown["gather, of the copy"] == "yes"
    assert shown["put, of the copy"] == "NO"
    assert shown["scrub of 3 % dead, of the copy's time"] == "NO"
    assert shown["index of 1.5 million entries, ms"] == "yes"
    assert found["ratios"]["put"]["median"] == 0.05
    assert found["ratios"]["checksum"]["median"] == 0.5


@needs_compiler
def test_a_part_that_fails_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead:
        def __init__(self, *_: object) -> None:
            raise BenchError("the node does not start")

    def broken() -> float:
        raise BenchError("lost")

    monkeypatch.setattr(gpu, "Worker", Dead)
    monkeypatch.setattr(gpu, "_INDEX_ENTRIES", 3000)
    monkeypatch.setattr(gpu, "_nixl", lambda *_: broken)
    monkeypatch.setattr(gpu, "QUICK", gpu.Scale(64 * gpu._PAGE_BYTES, 64 * gpu._PAGE_BYTES, 2))
    with fake_cuda():
        shown = CliRunner().invoke(app, ["bench", "--device", "cuda", "--quick", "--json"])

    assert shown.exit_code == 1
    found = json.loads(shown.stdout)
    assert found["failed"] == {"put": "the node does not start", "nixl": "lost"}
    assert found["ratios"].keys() == {"gather", "scatter", "gather_host_ids", "scatter_host_ids", "checksum"}
    assert [len(row) for row in gpu.rows(found)] == [4] * 9
