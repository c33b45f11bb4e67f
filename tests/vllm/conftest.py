"""Real engines, started once for all tests, beside a real daemon over real UCX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.examples.vllm.model import TINY, write_model
from support.vllm_engines import EngineProcess, Store, Trio, client_env, connector, engines, options, up

TIMEOUT_S = 420


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def model(folder: Path) -> Path:
    return write_model(folder / "tiny", seed=1)


@pytest.fixture(scope="session")
def store() -> Iterator[Store]:
    with Store() as running:
        yield running


@pytest.fixture(scope="session")
def nodes(store: Store) -> dict[str, str]:
    return {"store": store.daemon.address}


@pytest.fixture(scope="session")
def trio(folder: Path, model: Path, nodes: dict[str, str]) -> Iterator[Trio]:
    prefill = connector("kv_producer", nodes, node="store", put_timeout_s=5)
    decode = connector("kv_consumer", nodes, load_timeout_s=5)
    with engines(
        folder,
        client_env(),
        reference=options(model),
        prefill=options(model, kv_transfer_config=prefill),
        decode=options(model, kv_transfer_config=decode),
    ) as started:
        yield Trio(**up(started))


@pytest.fixture(scope="session")
def others(folder: Path, model: Path, nodes: dict[str, str], trio: Trio) -> Iterator[dict[str, EngineProcess]]:
    """Engines that differ from those in one thing each."""
    more_heads = write_model(folder / "heads", seed=1, shape=replace(TINY, kv_heads=4))
    other_seed = write_model(folder / "seed", seed=2)

    def decoding(of: Path, policy: str = "fail", **changes: Any) -> dict[str, Any]:
        return options(of, **{"kv_transfer_config": connector("kv_consumer", nodes, policy=policy), **changes})

    layerwise = connector("kv_producer", nodes, node="store", layerwise=True, put_timeout_s=5)
    both = connector("kv_both", nodes, policy="recompute", node="store", put_timeout_s=5, load_timeout_s=5)
    with engines(
        folder,
        client_env(),
        kv_heads=decoding(more_heads),
        dtype=decoding(model, dtype="float16"),
        layout=decoding(model, isa="vec16"),
        weights=decoding(other_seed),
        cache_dtype=options(
            model,
            kv_transfer_config=both | {"kv_load_failure_policy": "fail"},
            kv_cache_dtype="fp8",
            enable_prefix_caching=False,
        ),
        blocks_of_64=options(model, kv_transfer_config=both | {"kv_load_failure_policy": "fail"}, block_size=64),
        layerwise=options(model, kv_transfer_config=layerwise),
        # So few blocks that requests are preempted.
        small=options(model, kv_transfer_config=both, num_gpu_blocks_override=40),
    ) as started:
        yield up(started)
